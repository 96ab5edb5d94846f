"""Correction weights: golden cases, hand calculations, errors that name the sequence, and what must not matter."""

import math

import pytest
import torch

from configs.schema.correction import CorrectionConfig, NoWeight, TokenWeight
from tests.golden_cases import load
from tests.packed_batches import random_batch
from trainer.correction import correct, truncated_token_weights
from trainer.metrics import merge_metrics


def batch_of(rollout, old, mask, lengths):
    return random_batch(lengths, seed=0).with_fields(
        rollout_logprobs_T=rollout, old_logprobs_T=old, response_mask_T=mask, ref_logprobs_T=None
    )


def config_of(level, upper=None):
    return CorrectionConfig(weight=NoWeight() if level is None else TokenWeight(upper=upper))


@pytest.mark.parametrize("case", load("correction"), ids=lambda c: c.name)
def test_golden(case):
    lengths = torch.diff(case.cu_seqlens).tolist()
    batch = batch_of(case.input_T("rollout_logp"), case.input_T("old_logp"), case.mask_T, lengths)
    result = correct(batch, config_of(case.params["is_level"], case.params["is_upper"]))
    assert torch.equal(result.keep_T, case.output_T("mask").bool())
    if case.params["is_level"] is None:
        assert torch.equal(result.weights_T, case.mask_T.float())
    else:
        torch.testing.assert_close(result.weights_T.double(), case.output_T("weights") * case.mask_T, rtol=1e-6, atol=1e-9)
        assert result.metrics["mismatch/weight_mean"].value == pytest.approx(case.scalars["rollout_is_mean"], rel=1e-6)


def test_by_hand():
    rollout = torch.tensor([0.1, 0.5, 0.2, 0.9]).log()
    old = torch.tensor([0.4, 0.25, 0.3, 0.1]).log()
    mask = torch.tensor([True, True, True, False])
    result = correct(batch_of(rollout, old, mask, [2, 2]), config_of("token", 2.0))
    assert result.weights_T.tolist() == pytest.approx([2.0, 0.5, 1.5, 0.0])
    assert result.keep_T.tolist() == [True, True, True, False]
    values = {name.removeprefix("mismatch/"): metric.value for name, metric in result.metrics.items()}
    assert values == pytest.approx({
        "ess": (4 + 0.5 + 1.5) ** 2 / (3 * (16 + 0.25 + 2.25)),  # of 4, 0.5, 1.5: before the bound
        "weight_mean": 4 / 3, "weight_max": 2.0, "weight_min": 0.5,
        "truncated_fraction": 1 / 3, "kept_fraction": 1.0,
    })  # fmt: skip


def test_level_none_weighs_all_alike_and_truncates_nothing():
    batch = random_batch([5, 7], seed=1)
    result = correct(batch, config_of(None))
    assert torch.equal(result.weights_T, batch.response_mask_T.float())
    assert result.metrics["mismatch/truncated_fraction"].value == 0.0
    assert result.metrics["mismatch/ess"].value < 1.0, "ESS is of the ratios, which differ here"


def test_weights_carry_no_gradient_and_extremes_stay_finite():
    log_ratio = torch.tensor([1e4, -1e4, 0.5], requires_grad=True)
    weights = truncated_token_weights(log_ratio, upper=1e9)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(0.5)])
    batch = random_batch([6], seed=2)
    old = batch.old_logprobs_T.clone().requires_grad_()
    assert not correct(batch.with_fields(old_logprobs_T=old), config_of("token", 2.0)).weights_T.requires_grad


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_off_mask_values_never_matter(garbage):
    batch = random_batch([6, 9, 4], seed=3)
    off_T = ~batch.response_mask_T
    dirty = batch.with_fields(**{
        name: getattr(batch, name).masked_fill(off_T, garbage) for name in ("old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T")
    })
    clean, found = (correct(b, config_of("token", 1.5)) for b in (batch, dirty))
    assert torch.equal(clean.weights_T, found.weights_T)
    assert clean.metrics == found.metrics


@pytest.mark.parametrize("name", ["old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("place", [3, 4])
def test_a_broken_logprob_names_its_sequence(name, value, place):
    batch = random_batch([3, 2, 4], seed=4, mask_T=torch.ones(9, dtype=torch.bool))
    broken = getattr(batch, name).clone()
    broken[place] = value  # places 3 and 4 are the second sequence, id 101
    with pytest.raises(ValueError, match=rf"{name} is (nan|-inf) on a response token of sequence 101 \(1 such"):
        correct(batch.with_fields(**{name: broken}), config_of("token", 2.0))


def test_unscored_batch_is_an_error():
    with pytest.raises(ValueError, match="old_logprobs_T is not set"):
        correct(random_batch([3], seed=0).with_fields(old_logprobs_T=None), config_of(None))


def test_parts_give_the_weights_and_metrics_of_the_whole():
    batch = random_batch([5, 1, 8, 3], seed=5)
    whole = correct(batch, config_of("token", 1.2))
    parts = [correct(batch.select(rows), config_of("token", 1.2)) for rows in ([0, 1], [2], [3], [])]
    assert torch.equal(torch.cat([p.weights_T for p in parts]), whole.weights_T)
    merged = merge_metrics(p.metrics for p in parts)
    assert {n: m.value for n, m in merged.items()} == pytest.approx({n: m.value for n, m in whole.metrics.items()}, rel=1e-12)


def test_nothing_valid():
    result = correct(random_batch([3], seed=0, mask_T=torch.zeros(3, dtype=torch.bool)), config_of("token", 2.0))
    assert result.weights_T.tolist() == [0.0] * 3
    assert not result.keep_T.any()
    assert all(metric.value is None for metric in result.metrics.values())
