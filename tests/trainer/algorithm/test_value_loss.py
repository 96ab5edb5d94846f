"""The critic's loss: golden losses and gradients, a slow reference, a hand calculation, and what must not
matter.

Legend: T packed tokens.
"""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.critic import CriticConfig
from tests.support.golden_cases import load
from tests.support.packed_batches import count_valid, random_batch
from trainer.algorithm.aggregation import aggregation_weights
from trainer.algorithm.value_loss import clipped_value_loss, explained_variance, value_loss
from trainer.ranks.metrics import merge_metrics, values

GOLDEN_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_over_constant",
}


@pytest.mark.parametrize("case", load("value_loss"), ids=lambda c: c.name)
def test_golden_loss_and_gradient(case):
    mode = GOLDEN_MODES[case.params["aggregation"]]
    constant = case.width if mode == "sequence_mean_token_sum_over_constant" else None
    counts = count_valid(case.mask_T, case.cu_seqlens)
    batch = random_batch(torch.diff(case.cu_seqlens).tolist(), seed=0).with_fields(
        response_mask_T=case.mask_T, values_T=case.input_T("values"), returns_T=case.input_T("returns"),
        value_aggregation_T=aggregation_weights(case.mask_T, case.cu_seqlens, mode=mode, constant=constant, counts=counts),
    )  # fmt: skip
    current_T = case.input_T("predictions").requires_grad_()
    loss, metrics = value_loss(batch, current_T, value_clip=case.params["clip"])
    (gradient,) = torch.autograd.grad(loss, current_T)
    expected = case.output_T("grad")
    assert loss.item() == pytest.approx(case.arrays["out_loss"].item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    assert torch.equal(gradient[~case.mask_T], torch.zeros_like(gradient[~case.mask_T]))
    assert metrics["critic/clip_fraction"].value == pytest.approx(case.scalars["clip_fraction"], rel=1e-6)


def valued_batch(lengths, seed, mask_T=None):
    """A batch that the critic has scored, float64, with weights of no mode in particular; and its values now."""
    batch = random_batch(lengths, seed=seed, mask_T=mask_T)
    generator = torch.Generator().manual_seed(seed + 1)
    old_T, returns_T, current_T = torch.randn(3, sum(lengths), generator=generator, dtype=torch.float64)
    weights_T = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    return batch.with_fields(
        values_T=old_T, returns_T=returns_T, value_aggregation_T=weights_T
    ), old_T + 0.4 * current_T


def slow_value_loss(batch, current, clip):
    """(loss, gradient per token) in plain Python."""
    loss, gradient = 0.0, [0.0] * len(current)
    rows = (batch.response_mask_T, batch.values_T, batch.returns_T, batch.value_aggregation_T)
    for t, (valid, old, target, weight) in enumerate(zip(*(row.tolist() for row in rows), strict=True)):
        if not valid:
            continue
        value, error = current[t], (current[t] - target) ** 2
        held = value if clip is None else min(max(value, old - clip), old + clip)
        held_error = (held - target) ** 2
        loss += weight * 0.5 * max(error, held_error)
        gradient[t] = 0.0 if held_error > error else weight * (value - target)
    return loss, gradient


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    clip=st.sampled_from([None, 0.05, 0.3, 5.0]),
)
def test_against_the_slow_reference(lengths, seed, clip):
    batch, current_T = valued_batch(lengths, seed)
    current_T.requires_grad_()
    loss, _ = value_loss(batch, current_T, value_clip=clip)
    wanted, gradient = slow_value_loss(batch, current_T.tolist(), clip)
    assert loss.item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert torch.autograd.grad(loss, current_T)[0].tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


def test_by_hand():
    current_T = torch.tensor([1.0, 0.5, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    returns_T = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    result = clipped_value_loss(current_T, old_T, returns_T, clip=0.25)
    # moved to the return, but further than allowed; moved away from it; towards it, too far; not moved
    assert result.loss_T.tolist() == [0.5 * 0.75**2, 0.5 * 0.5**2, 0.5 * 1.75**2, 0.5 * 2.0**2]
    assert result.clipped_T.tolist() == [True, False, True, False]
    assert torch.autograd.grad(result.loss_T.sum(), current_T)[0].tolist() == [0.0, 0.5, 0.0, 2.0]


def test_off_the_mask_nothing_matters():
    batch, current_T = valued_batch([6, 5], seed=3)
    fields = ("values_T", "returns_T", "value_aggregation_T")
    spoiled = batch.with_fields(
        **{name: torch.where(batch.response_mask_T, getattr(batch, name), torch.nan) for name in fields}
    )
    results = []
    for b, x_T in ((batch, current_T), (spoiled, torch.where(batch.response_mask_T, current_T, torch.inf))):
        x_T = x_T.clone().requires_grad_()
        loss, metrics = value_loss(b, x_T, value_clip=0.2)
        results.append((loss.item(), torch.autograd.grad(loss, x_T)[0].tolist(), values(metrics)))
    assert results[0] == results[1]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_without_response_tokens_loss_and_gradient_are_exact_zeros(clip):
    batch, current_T = valued_batch([4], seed=0, mask_T=torch.zeros(4, dtype=torch.bool))
    current_T = torch.full_like(current_T, torch.nan).requires_grad_()
    loss, metrics = value_loss(batch, current_T, value_clip=clip)
    (gradient,) = torch.autograd.grad(loss, current_T)
    assert loss.item() == 0.0 and gradient.tolist() == [0.0] * 4
    assert values(metrics) == {"critic/loss": 0.0}
    assert explained_variance(values(metrics)) is None


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_no_finite_loss(bad, clip):
    batch, current_T = valued_batch([4], seed=0, mask_T=torch.ones(4, dtype=torch.bool))
    current_T[2] = bad
    assert not value_loss(batch, current_T, value_clip=clip)[0].isfinite()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(5)), cut=st.integers(1, 4))
def test_parts_add_up_to_the_whole(seed, order, cut):
    """Loss, metrics and explained variance do not depend on how sequences are split or packed."""
    batch, current_T = valued_batch([3, 7, 1, 5, 4], seed)
    whole_loss, whole = value_loss(batch, current_T, value_clip=0.2)
    parts = []
    for rows in (order[:cut], order[cut:]):
        # Advantages carry the current values through the selection.
        part = batch.with_fields(advantages_T=current_T).select(rows)
        parts.append(value_loss(part, part.advantages_T, value_clip=0.2))
    merged = values(merge_metrics(metrics for _, metrics in parts))
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), rel=1e-12)
    assert merged == pytest.approx(values(whole), rel=1e-12)

    returns, olds = (x_T[batch.response_mask_T].tolist() for x_T in (batch.returns_T, batch.values_T))
    if len(returns) > 1:
        errors = [r - v for r, v in zip(returns, olds, strict=True)]
        wanted = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
        assert explained_variance(merged) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "old, returns, wanted",
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 1.0),
        ([3.0, 3.0, 3.0], [1.0, 2.0, 4.0], 0.0),
        ([-1.0, -2.0, -4.0], [1.0, 2.0, 4.0], -3.0),
        ([1.0, 2.0, 4.0], [0.1, 0.1, 0.1], None),
        ([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], None),
        ([1e-8, 2e-8, 4e-8], [1e-8, 2e-8, 4e-8], 1.0),  # equal is meant relative to the mean
        ([1.0, 2.0, 4.0], [2e-16, -1e-16, 0.0], None),  # advantages plus values, where every reward is 0
        ([-99.0, -198.0, -396.0], [1.0, 2.0, 4.0], -9999.0),
        ([1001.0, 1001.0, 1001.0], [1000.0, 1001.0, 1003.0], 0.0),  # a small spread around a large mean
    ],
)
def test_explained_variance_by_hand(old, returns, wanted):
    batch, _ = valued_batch([3], seed=0, mask_T=torch.ones(3, dtype=torch.bool))
    batch = batch.with_fields(values_T=torch.tensor(old), returns_T=torch.tensor(returns))
    metrics = values(value_loss(batch, torch.tensor([0.5, 1.0, 3.0]), value_clip=None)[1])
    names = ("value_mean", "return_mean", "clip_fraction")
    assert [metrics[f"critic/{name}"] for name in names] == pytest.approx([1.5, sum(returns) / 3, 0.0])
    found = explained_variance(metrics)
    assert found is None if wanted is None else found == pytest.approx(wanted, abs=1e-9)


def test_what_is_missing_is_named():
    batch, current_T = valued_batch([4], seed=0)
    with pytest.raises(ValueError, match="lacks values_T, value_aggregation_T"):
        value_loss(batch.with_fields(values_T=None, value_aggregation_T=None), current_T, value_clip=None)
    with pytest.raises(ValueError, match=r"shape \(3,\), the batch 4 tokens"):
        value_loss(batch, current_T[:3], value_clip=None)


def test_an_optimizer_setting_leaves_the_critics_other_defaults():
    assert CriticConfig(optimizer={"clip_grad": 0.5}).optimizer.lr == CriticConfig().optimizer.lr == 1e-5
