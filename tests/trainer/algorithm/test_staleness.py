"""Metrics by the age of tokens against a slow reading of their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.correction import CorrectionConfig, ImportanceWeight, RatioRule
from tests.support.packed_batches import random_batch
from trainer.algorithm.correction import correct
from trainer.algorithm.mismatch import SampledGap
from trainer.ranks.metrics import merge_metrics, values

CONFIG = CorrectionConfig(
    weight=ImportanceWeight(level="token", bound="truncate", upper=1.2),
    reject=(RatioRule(level="token", lower=0.5, upper=2.0),),
)
LABELS = {
    0: "le_0",
    1: "le_1",
    2: "le_2",
    3: "le_4",
    4: "le_4",
    5: "le_8",
    8: "le_8",
    9: "le_16",
    16: "le_16",
    17: "over_16",
    40: "over_16",
}


def lagged(lengths: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.7
    batch = random_batch(lengths, seed=seed, mask_T=mask_T)
    choice_T = torch.randint(len(LABELS), (sum(lengths),), generator=generator)
    return batch.with_fields(lag_T=torch.tensor(list(LABELS), dtype=torch.int16)[choice_T])


def slow(batch, correction) -> dict[str, float]:
    tokens: dict[str, list[tuple[float, ...]]] = {}
    lags_by_response: dict[int, set[int]] = {}
    bounds = batch.cu_seqlens.tolist()
    for t in range(batch.num_tokens):
        if not batch.response_mask_T[t]:
            continue
        response = next(s for s in range(len(bounds) - 1) if bounds[s] <= t < bounds[s + 1])
        lag = int(batch.lag_T[t])
        lags_by_response.setdefault(response, set()).add(lag)
        old, rollout = float(batch.old_logprobs_T[t]), float(batch.rollout_logprobs_T[t])
        row = (lag, old, rollout, float(correction.weights_T[t]), bool(correction.keep_T[t]))
        tokens.setdefault(LABELS[lag], []).append(row)
    every = [row[0] for rows in tokens.values() for row in rows]
    expected = {
        "staleness/mean": sum(every) / len(every),
        "staleness/max": max(every),
        "staleness/mixed_fraction": sum(len(lags) > 1 for lags in lags_by_response.values())
        / len(lags_by_response),
    }
    for label, rows in tokens.items():
        gaps = [abs(math.exp(old) - math.exp(rollout)) for _, old, rollout, *_ in rows]
        logs = [old - rollout for _, old, rollout, *_ in rows]
        ratios = [math.exp(d) for d in logs]
        expected |= {f"staleness/by_lag/{label}/{name}": value for name, value in {
            "tokens": len(rows), "abs_prob_mean": sum(gaps) / len(gaps), "abs_prob_max": max(gaps),
            "logprob_gap_max": max(map(abs, logs)), "k3": sum(math.exp(d) - 1 - d for d in logs) / len(logs),
            "weight_mean": sum(row[3] for row in rows) / len(rows),
            "ess": sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios),
            "kept_fraction": sum(row[4] for row in rows) / len(rows),
        }.items()}  # fmt: skip
    return expected


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_metrics_are_those_of_their_definitions_and_merge_over_ranks(lengths, seed):
    batch = lagged(lengths, seed)
    if not batch.response_mask_T.any():
        return
    whole = correct(batch, CONFIG)
    expected = slow(batch, whole)
    parts = [correct(batch.select([row]), CONFIG).metrics for row in range(len(lengths))]
    for recorded in (values(whole.metrics), values(merge_metrics(parts))):
        told = {name: value for name, value in recorded.items() if name.startswith("staleness/")}
        assert told.keys() == expected.keys()
        assert told == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_without_lags_nothing_is_said_of_staleness():
    batch = random_batch([4, 5], seed=1, mask_T=torch.ones(9, dtype=torch.bool))
    assert not [name for name in correct(batch, CONFIG).metrics if name.startswith("staleness")]


def test_a_share_without_response_tokens_changes_nothing():
    batch = lagged([4, 6, 5], seed=3)
    batch = batch.with_fields(response_mask_T=torch.arange(15) < 10)
    empty, whole = (correct(batch.select(rows), CONFIG).metrics for rows in ([2], [0, 1]))
    assert not [name for name in values(empty) if name.startswith("staleness")]
    assert values(merge_metrics([empty, whole])) == values(whole)


def test_extreme_gaps_stay_finite_and_small_ones_stay_above_zero():
    batch = random_batch([2], seed=1, mask_T=torch.ones(2, dtype=torch.bool))
    logprobs = {"old_logprobs_T": torch.tensor([-1e4, 0.0]), "rollout_logprobs_T": torch.tensor([0.0, -1e4])}
    batch = batch.with_fields(lag_T=torch.zeros(2, dtype=torch.int16), **logprobs)
    found = values(correct(batch, CONFIG).metrics)
    assert found["staleness/by_lag/le_0/logprob_gap_max"] == 1e4
    assert found["staleness/by_lag/le_0/ess"] == pytest.approx(0.5), "one of two ratios is all of the sum"
    logprobs = {
        "old_logprobs_T": torch.tensor([-1e-9, 0.0]),
        "rollout_logprobs_T": torch.tensor([-3e-9, 0.0]),
    }
    found = values(correct(batch.with_fields(**logprobs), CONFIG).metrics)
    assert found["staleness/by_lag/le_0/abs_prob_max"] == pytest.approx(2e-9), "both are 1 in float32"


def test_what_may_end_a_run_is_the_gap_of_the_tokens_that_the_same_weights_sampled():
    mask_T = torch.ones(6, dtype=torch.bool)
    batch = random_batch([6], seed=2, mask_T=mask_T)
    lag_T = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.int16)
    gaps_T = torch.tensor([1e-6, -2e-6, 0.5, 0.1, -0.3, 0.2])
    batch = batch.with_fields(rollout_logprobs_T=batch.old_logprobs_T - gaps_T)
    assert SampledGap.of(correct(batch, CONFIG).metrics).nats == pytest.approx(0.5, rel=1e-3)
    of_same = correct(batch.with_fields(lag_T=lag_T), CONFIG).metrics
    assert SampledGap.of(of_same).nats == pytest.approx(2e-6, rel=0.2)
    all_old = correct(batch.with_fields(lag_T=lag_T.clamp(min=1)), CONFIG).metrics
    assert SampledGap.of(all_old) is None
