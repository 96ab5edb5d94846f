"""Diagnostics of the gap: golden scalars, hand calculations, exactness under any split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_cases import load
from tests.packed_batches import random_batch
from trainer.metrics import merge_metrics, values
from trainer.mismatch import mismatch_metrics


@pytest.mark.parametrize("case", load("correction"), ids=lambda c: c.name)
def test_golden_divergences(case):
    metrics = mismatch_metrics(case.input_T("old_logp"), case.input_T("rollout_logp"), case.mask_T)
    assert metrics["mismatch/k1"].value == pytest.approx(case.scalars["kl"], rel=1e-6)
    assert metrics["mismatch/k3"].value == pytest.approx(case.scalars["k3_kl"], rel=1e-6)


def test_by_hand():
    old, rollout = torch.tensor([0.4, 0.25, 0.7]).log(), torch.tensor([0.1, 0.5, 0.1]).log()
    metrics = mismatch_metrics(old, rollout, torch.tensor([True, True, False]))
    values = {name.removeprefix("mismatch/"): metric.value for name, metric in metrics.items()}
    assert values == pytest.approx({
        "abs_prob_mean": (0.3 + 0.25) / 2, "abs_prob_max": 0.3,
        "k1": (-math.log(4) + math.log(2)) / 2, "k3": ((4 - 1 - math.log(4)) + (0.5 - 1 + math.log(2))) / 2,
        "logprob_gap_max": math.log(4), "ratio_mean": 2.25, "ratio_max": 4.0, "ratio_min": 0.5,
    }, rel=1e-6)  # fmt: skip


def test_equal_policies_show_no_gap():
    batch = random_batch([8, 3], seed=0)
    metrics = mismatch_metrics(batch.old_logprobs_T, batch.old_logprobs_T, batch.response_mask_T)
    assert {name: metric.value for name, metric in metrics.items()} == {
        name: 1.0 if "ratio" in name else 0.0 for name in metrics
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 999), st.data())
def test_any_split_merges_to_the_whole_and_off_mask_never_matters(lengths, seed, data):
    batch = random_batch(lengths, seed=seed)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    whole = mismatch_metrics(batch.old_logprobs_T, batch.rollout_logprobs_T, batch.response_mask_T)
    dirty = batch.with_fields(old_logprobs_T=batch.old_logprobs_T.masked_fill(~batch.response_mask_T, torch.nan))
    parts = [dirty.select([row for row, o in enumerate(owner) if o == rank]) for rank in range(4)]
    merged = merge_metrics(mismatch_metrics(p.old_logprobs_T, p.rollout_logprobs_T, p.response_mask_T) for p in parts)
    assert values(merged) == pytest.approx(values(whole), rel=1e-12, abs=1e-15)
    k3 = merged["mismatch/k3"].value
    assert k3 is None or k3 >= 0
