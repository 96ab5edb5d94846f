"""Diagnostics of the gap: plain loops, golden scalars, hand calculations, exactness under any split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.golden_cases import load
from tests.support.packed_batches import at_valid, random_batch
from trainer.algorithm.mismatch import (
    mismatch_metrics,
    negative_fraction,
    rejection_metrics,
    reward_metrics,
    routing_metrics,
    rule_metrics,
    veto_metrics,
    weight_metrics,
)
from trainer.algorithm.segments import count_per_sequence
from trainer.ranks.metrics import merge_metrics, values

GOLDEN = load("correction")
BUCKETS = {
    "le_64": (1, 64),
    "le_256": (65, 256),
    "le_1024": (257, 1024),
    "le_4096": (1025, 4096),
    "over_4096": (4097, math.inf),
}
MAX_BINS = {
    "le_0.001": 0.001,
    "le_0.01": 0.01,
    "le_0.1": 0.1,
    "le_0.25": 0.25,
    "le_0.5": 0.5,
    "over_0.5": math.inf,
}
MEAN_BINS = {
    "le_1e-05": 1e-5,
    "le_0.0001": 1e-4,
    "le_0.001": 1e-3,
    "le_0.01": 1e-2,
    "le_0.1": 0.1,
    "over_0.1": math.inf,
}


def of(batch):
    return at_valid(
        mismatch_metrics,
        batch.old_logprobs_T,
        batch.rollout_logprobs_T,
        batch.response_mask_T,
        batch.cu_seqlens,
    )


def counted(passed_T, mask_T, cu_seqlens):
    """Response tokens of each sequence: those that passed, and all."""
    return count_per_sequence(passed_T & mask_T, cu_seqlens), count_per_sequence(mask_T, cu_seqlens)


# ------------------------------------------------------------------------------------------------------- slow
# references


def responses(cu_seqlens, mask_T, *tensors_T):
    """Per sequence with a valid token, the values of each tensor at its valid tokens, as lists."""
    rows, tensors_T = [], [x_T.tolist() for x_T in tensors_T]
    mask_T = mask_T.tolist()
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        places = [t for t in range(start, end) if mask_T[t]]
        if places:
            rows.append([[x_T[t] for t in places] for x_T in tensors_T])
    return rows


def average(xs):
    return math.fsum(xs) / len(xs)


def bound(x):
    return min(max(x, -20.0), 20.0)


def pearson(xs, ys):
    mean_x, mean_y = average(xs), average(ys)
    dx, dy = [x - mean_x for x in xs], [y - mean_y for y in ys]
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(
        math.fsum(a * a for a in dx) * math.fsum(b * b for b in dy)
    )


def assert_agree(found, expected):
    """A correlation of few and nearly equal values is known to fewer digits than the rest."""
    name = "mismatch/prob_pearson"
    assert found.get(name) == pytest.approx(expected.get(name), abs=1e-4)
    rest, expected_rest = ({k: v for k, v in metrics.items() if k != name} for metrics in (found, expected))
    assert rest == pytest.approx(expected_rest, rel=1e-9, abs=1e-12)


def shares(xs, bins):
    found, below = {}, -math.inf
    for label, edge in bins.items():
        found[label] = sum(below < x <= edge for x in xs) / len(xs)
        below = edge
    return found


def slow_mismatch(train_T, rollout_T, mask_T, cu_seqlens):
    rows = responses(cu_seqlens, mask_T, train_T, rollout_T)
    if not rows:
        return {}
    ratio = [[t - r for t, r in zip(train, rollout, strict=True)] for train, rollout in rows]
    gap = [
        [abs(math.exp(r) - math.exp(t)) for t, r in zip(train, rollout, strict=True)]
        for train, rollout in rows
    ]
    k3 = [[math.expm1(bound(d)) - bound(d) for d in row] for row in ratio]
    all_d, all_gap, all_k3 = ([x for row in xs for x in row] for xs in (ratio, gap, k3))
    rho = [math.exp(bound(d)) for d in all_d]
    diff = [-average(row) for row in ratio]
    found = {
        "abs_prob_mean": average(all_gap), "abs_prob_max": max(all_gap),
        "k1": average([-d for d in all_d]), "k3": average(all_k3), "logprob_gap_max": max(map(abs, all_d)),
        "ratio_mean": average(rho), "ratio_max": max(rho), "ratio_min": min(rho),
        "ratio_outside_fraction": average([not 0.9 <= x <= 1.1 for x in rho]),
        "chi2_token": average([x * x for x in rho]) - 1,
        "chi2_sequence": average([math.exp(bound(math.fsum(row))) ** 2 for row in ratio]) - 1,
        "log_ppl_train": average([-average(train) for train, _ in rows]),
        "log_ppl_rollout": average([-average(rollout) for _, rollout in rows]),
        "ppl_train": average([math.exp(bound(-average(train))) for train, _ in rows]),
        "ppl_rollout": average([math.exp(bound(-average(rollout))) for _, rollout in rows]),
        "ppl_ratio": average([math.exp(bound(x)) for x in diff]),
        "log_ppl_diff_mean": average(diff), "log_ppl_diff_abs": average(list(map(abs, diff))),
        "log_ppl_diff_max": max(diff), "log_ppl_diff_min": min(diff),
        "response_abs_prob_max_mean": average([max(row) for row in gap]),
        "response_abs_prob_mean_mean": average([average(row) for row in gap]),
        "response_abs_prob_mean_max": max(average(row) for row in gap),
        "response_abs_prob_over": average([max(row) > 0.5 for row in gap]),
    }  # fmt: skip
    p_train, p_rollout = ([math.exp(x) for row in rows for x in row[i]] for i in (0, 1))
    if len(p_train) > 1:
        found["prob_pearson"] = pearson(p_rollout, p_train)
    found |= {
        f"response_abs_prob_max_share/{k}": v for k, v in shares([max(row) for row in gap], MAX_BINS).items()
    }
    found |= {
        f"response_abs_prob_mean_share/{k}": v
        for k, v in shares([average(row) for row in gap], MEAN_BINS).items()
    }
    for label, (low, high) in BUCKETS.items():
        by_length = [
            (g, k)
            for gs, ks in zip(gap, k3, strict=True)
            if low <= len(gs) <= high
            for g, k in zip(gs, ks, strict=True)
        ]
        placed = [
            (place, *pair)
            for gs, ks in zip(gap, k3, strict=True)
            for place, pair in enumerate(zip(gs, ks, strict=True), 1)
        ]
        by_position = [(g, k) for place, g, k in placed if low <= place <= high]
        for name, pairs in (("by_length", by_length), ("by_position", by_position)):
            if pairs:
                found |= {
                    f"{name}/{label}/abs_prob_mean": average([g for g, _ in pairs]),
                    f"{name}/{label}/abs_prob_max": max(g for g, _ in pairs),
                    f"{name}/{label}/k3": average([k for _, k in pairs]),
                    f"{name}/{label}/k3_max": max(k for _, k in pairs),
                }
    return {f"mismatch/{name}": value for name, value in found.items()}


# ------------------------------------------------------------------------------------------------------------
# the gap


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 999))
def test_plain_loops_agree(lengths, seed):
    batch = random_batch(lengths, seed=seed, dtype=torch.float64)
    slow = slow_mismatch(
        batch.old_logprobs_T, batch.rollout_logprobs_T, batch.response_mask_T, batch.cu_seqlens
    )
    assert_agree(values(of(batch)), slow)


@pytest.mark.parametrize("lengths", [[64, 65], [1, 256, 257, 70], [1024, 1025, 3], [4096, 8193]])
def test_plain_loops_agree_at_the_edges_of_the_buckets(lengths):
    full = random_batch(
        lengths, seed=1, dtype=torch.float64, mask_T=torch.ones(sum(lengths), dtype=torch.bool)
    )
    slow = slow_mismatch(full.old_logprobs_T, full.rollout_logprobs_T, full.response_mask_T, full.cu_seqlens)
    assert_agree(values(of(full)), slow)


def test_positions_count_valid_tokens_alone():
    """130 places of which every second is valid: 65 tokens, so one of them is past the first bucket."""
    batch = random_batch([130], seed=0, mask_T=torch.arange(130) % 2 == 1)
    last = (
        (batch.old_logprobs_T[129].double().exp() - batch.rollout_logprobs_T[129].double().exp()).abs().item()
    )
    found = values(of(batch))
    assert found["mismatch/by_position/le_256/abs_prob_mean"] == pytest.approx(last, rel=1e-12)
    assert "mismatch/by_length/le_64/k3" not in found and "mismatch/by_position/le_1024/k3" not in found


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_golden_divergences(case):
    """Of the tokens before rejection, as there."""
    found = values(
        at_valid(
            mismatch_metrics,
            case.input_T("old_logp"),
            case.input_T("rollout_logp"),
            case.mask_T,
            case.cu_seqlens,
        )
    )
    names = {
        "kl": "k1", "k3_kl": "k3", "training_ppl": "ppl_train", "rollout_ppl": "ppl_rollout", "ppl_ratio": "ppl_ratio",
        "training_log_ppl": "log_ppl_train", "rollout_log_ppl": "log_ppl_rollout",
        "log_ppl_diff": "log_ppl_diff_mean", "log_ppl_abs_diff": "log_ppl_diff_abs", "log_ppl_diff_max": "log_ppl_diff_max",
        "log_ppl_diff_min": "log_ppl_diff_min", "chi2_token": "chi2_token", "chi2_seq": "chi2_sequence",
    }  # fmt: skip
    assert {theirs: found[f"mismatch/{ours}"] for theirs, ours in names.items()} == pytest.approx(
        {theirs: case.scalars[theirs] for theirs in names}, rel=1e-6, abs=1e-9
    )


def test_by_hand():
    old, rollout = torch.tensor([0.4, 0.25, 0.7]).log(), torch.tensor([0.1, 0.5, 0.1]).log()
    metrics = at_valid(
        mismatch_metrics, old, rollout, torch.tensor([True, True, False]), torch.tensor([0, 3])
    )
    found = {name.removeprefix("mismatch/"): value for name, value in values(metrics).items()}
    k3 = ((4 - 1 - math.log(4)) + (0.5 - 1 + math.log(2))) / 2
    expected = {
        "abs_prob_mean": (0.3 + 0.25) / 2, "abs_prob_max": 0.3, "prob_pearson": -1.0,
        "k1": (-math.log(4) + math.log(2)) / 2, "k3": k3,
        "logprob_gap_max": math.log(4), "ratio_mean": 2.25, "ratio_max": 4.0, "ratio_min": 0.5, "ratio_outside_fraction": 1.0,
        "chi2_token": (16 + 0.25) / 2 - 1, "chi2_sequence": 2.0**2 - 1,
        "log_ppl_train": -math.log(0.1) / 2, "log_ppl_rollout": -math.log(0.05) / 2,
        "ppl_train": 0.1**-0.5, "ppl_rollout": 0.05**-0.5, "ppl_ratio": 2**-0.5,
        "log_ppl_diff_mean": -math.log(2) / 2, "log_ppl_diff_abs": math.log(2) / 2,
        "log_ppl_diff_max": -math.log(2) / 2, "log_ppl_diff_min": -math.log(2) / 2,
        "response_abs_prob_max_mean": 0.3, "response_abs_prob_mean_mean": 0.275, "response_abs_prob_mean_max": 0.275,
        "response_abs_prob_over": 0.0, "response_abs_prob_max_share/le_0.5": 1.0, "response_abs_prob_mean_share/over_0.1": 1.0,
    }  # fmt: skip
    for name in ("by_length", "by_position"):
        largest_k3 = 3 - math.log(4)
        buckets = {"abs_prob_mean": 0.275, "abs_prob_max": 0.3, "k3": k3, "k3_max": largest_k3}
        expected |= {f"{name}/le_64/{key}": value for key, value in buckets.items()}
    assert {name: value for name, value in found.items() if value or "_share/" not in name} == pytest.approx(
        expected, rel=1e-6
    )
    assert sum("_share/" in name for name in found) == 12


def test_a_greatest_difference_of_exactly_one_half_is_not_over_it():
    """Probabilities 1 and 1/2, and in a second response 1 and 1/4, then 1 and 1."""
    rollout_N, train_N = (
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([0.5, 0.25, 1], dtype=torch.float64),
    )
    found = values(mismatch_metrics(train_N.log(), rollout_N, torch.tensor([0, 1, 3])))
    assert found["mismatch/abs_prob_max"] == 0.75 and found["mismatch/response_abs_prob_over"] == 0.5
    assert found["mismatch/response_abs_prob_max_share/le_0.5"] == 0.5


def test_probabilities_near_one_keep_their_digits():
    """1 - 1e-17 and 1 - 3e-17 are 1 in float64."""
    train_N, rollout_N = torch.tensor([[-1e-17, -2e-17], [-3e-17, -6e-17]], dtype=torch.float64)
    found = values(mismatch_metrics(train_N, rollout_N, torch.tensor([0, 2])))
    assert found["mismatch/abs_prob_max"] == pytest.approx(4e-17, rel=1e-9, abs=0)


def test_equal_policies_show_no_gap():
    batch = random_batch([8, 3], seed=0)
    found = values(of(batch.with_fields(rollout_logprobs_T=batch.old_logprobs_T)))
    assert found.pop("mismatch/log_ppl_train") == found.pop("mismatch/log_ppl_rollout") > 0
    assert found.pop("mismatch/ppl_train") == found.pop("mismatch/ppl_rollout") > 1
    assert found.pop("mismatch/prob_pearson") == pytest.approx(1.0, abs=1e-12)
    ones = {"mismatch/ratio_mean", "mismatch/ratio_max", "mismatch/ratio_min", "mismatch/ppl_ratio"}
    ones |= {
        "mismatch/response_abs_prob_max_share/le_0.001",
        "mismatch/response_abs_prob_mean_share/le_1e-05",
    }
    assert found == {name: float(name in ones) for name in found}
    assert [name for name, value in found.items() if math.copysign(1, value) < 0] == [], "0, not -0"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 999), st.data())
def test_any_split_merges_to_the_whole_and_off_mask_never_matters(lengths, seed, data):
    batch = random_batch(lengths, seed=seed)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    off_T = ~batch.response_mask_T
    dirty = batch.with_fields(
        old_logprobs_T=batch.old_logprobs_T.masked_fill(off_T, torch.nan),
        rollout_logprobs_T=batch.rollout_logprobs_T.masked_fill(off_T, -torch.inf),
    )
    parts = [dirty.select([row for row, o in enumerate(owner) if o == rank]) for rank in range(4)]
    merged = merge_metrics(of(p) for p in parts)
    assert_agree(values(merged), values(of(batch)))
    assert values(merged).get("mismatch/k3", 0) >= 0


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 999))
def test_the_order_of_sequences_never_matters(order, seed):
    batch = random_batch([3, 70, 1, 5, 9], seed=seed)
    assert_agree(values(of(batch.select(order))), values(of(batch)))


def test_sequences_without_valid_tokens_change_nothing():
    batch = random_batch([4, 6, 5], seed=3, mask_T=torch.tensor([True] * 4 + [False] * 6 + [True] * 5))
    assert of(batch) == of(batch.select([0, 2]))
    nothing = batch.with_fields(response_mask_T=torch.zeros(15, dtype=torch.bool))
    assert values(of(nothing)) == {} == values(of(batch.select([])))


def test_extreme_log_ratios_stay_finite_and_carry_no_gradient():
    train = torch.tensor([-1e4, -1e-4, -1e4], requires_grad=True)
    rollout = torch.tensor([-1e-4, -1e4, -1e4])
    found = values(
        at_valid(
            mismatch_metrics, train, rollout, torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 2, 3])
        )
    )
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch/ratio_max"] == pytest.approx(math.exp(20)) and found[
        "mismatch/logprob_gap_max"
    ] == pytest.approx(1e4)
    assert found["mismatch/chi2_sequence"] == pytest.approx((math.exp(40) + math.exp(-40) + 1) / 3 - 1)
    assert found["mismatch/k3"] == pytest.approx((2 * math.cosh(20) - 2) / 3, rel=1e-9), "of 20, -20 and 0"


def test_what_is_measured_stays_as_it_was():
    """Both functions overwrite their working copies, of float64 tensors too."""
    draw = torch.Generator().manual_seed(2)
    train_N, rollout_N = -torch.rand(2, 9, generator=draw, dtype=torch.float64)
    given, bounds_S = [train_N.clone(), rollout_N.clone()], torch.tensor([0, 4, 9])
    mismatch_metrics(train_N, rollout_N, bounds_S)
    weight_metrics(train_N, rollout_N, bounds_S)
    assert torch.equal(train_N, given[0]) and torch.equal(rollout_N, given[1])


# ----------------------------------------------------------------------------------------------------
# weights, rejection


def slow_weights(raw_T, weights_T, mask_T, cu_seqlens, lower, upper):
    rows = responses(cu_seqlens, mask_T, raw_T, weights_T)
    found = {}
    for index, prefix, ess in ((0, "raw_", "ess"), (1, "", "ess_bounded")):
        tokens = [w for row in rows for w in row[index]]
        for name, xs in (
            (f"{prefix}weight", tokens),
            (f"{prefix}sequence_weight", [average(row[index]) for row in rows]),
        ):
            std = math.sqrt(average([(x - average(xs)) ** 2 for x in xs]))
            found |= {
                f"{name}_mean": average(xs),
                f"{name}_std": std,
                f"{name}_min": min(xs),
                f"{name}_max": max(xs),
            }
        found[ess] = sum(tokens) ** 2 / len(tokens) / sum(w * w for w in tokens)
    raw = [w for row in rows for w in row[0]]
    found |= {
        "truncated_fraction": average([w > upper for w in raw]),
        "below_lower_fraction": average([w < lower for w in raw]),
    }
    return {f"mismatch/{name}": value for name, value in found.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 999), st.data())
def test_weights_agree_with_plain_loops_under_any_split(lengths, seed, data):
    batch = random_batch(lengths, seed=seed, dtype=torch.float64)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    raw_T = (batch.old_logprobs_T - batch.rollout_logprobs_T).exp()
    dirty = batch.with_fields(old_logprobs_T=raw_T.masked_fill(~batch.response_mask_T, torch.nan))
    parts = [dirty.select([row for row, o in enumerate(owner) if o == rank]) for rank in range(3)]
    merged = merge_metrics(
        at_valid(
            weight_metrics,
            p.old_logprobs_T,
            p.old_logprobs_T.clamp(max=1.2),
            p.response_mask_T,
            p.cu_seqlens,
            lower=0.8,
            upper=1.2,
        )
        for p in parts
    )
    slow = {}
    if batch.response_mask_T.any():
        slow = slow_weights(raw_T, raw_T.clamp(max=1.2), batch.response_mask_T, batch.cu_seqlens, 0.8, 1.2)
    assert values(merged) == pytest.approx(slow, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN if c.params["is_level"] in ("token", "sequence")], ids=lambda c: c.name
)
def test_golden_weights(case):
    """There after truncation and before normalisation, of the tokens before rejection; the spread of
    sequences divides by one less."""
    log_ratio_T = torch.where(case.mask_T, case.input_T("old_logp") - case.input_T("rollout_logp"), 0.0)
    if case.params["is_level"] == "sequence":
        rows = torch.split(log_ratio_T, torch.diff(case.cu_seqlens).tolist())
        log_ratio_T = torch.cat([row.sum().expand_as(row) for row in rows])
    raw_T, upper = log_ratio_T.exp(), case.params["is_upper"]
    found = values(
        at_valid(
            weight_metrics,
            raw_T,
            raw_T.clamp(max=upper),
            case.mask_T,
            case.cu_seqlens,
            lower=1 / upper,
            upper=upper,
        )
    )
    sequences = len(responses(case.cu_seqlens, case.mask_T))
    found["mismatch/sequence_weight_std"] *= math.sqrt(sequences / max(sequences - 1, 1))
    names = {
        "rollout_is_mean": "weight_mean", "rollout_is_eff_sample_size": "ess_bounded", "rollout_is_seq_mean": "sequence_weight_mean",
        "rollout_is_seq_max": "sequence_weight_max", "rollout_is_seq_min": "sequence_weight_min",
        "rollout_is_seq_std": "sequence_weight_std",
    }  # fmt: skip
    if case.params["is_level"] == "token":  # at sequence level these count otherwise there
        names |= {
            "rollout_is_max": "weight_max", "rollout_is_min": "weight_min",
            "rollout_is_ratio_fraction_high": "truncated_fraction", "rollout_is_ratio_fraction_low": "below_lower_fraction",
        }  # fmt: skip
    assert {theirs: found[f"mismatch/{ours}"] for theirs, ours in names.items()} == pytest.approx(
        {theirs: case.scalars[theirs] for theirs in names}, rel=1e-6, abs=1e-8
    )


def test_weights_by_hand():
    raw_T = torch.tensor([4.0, 0.25, 9.0, 1.0])
    mask_T = torch.tensor([True, True, False, True])
    found = values(
        at_valid(
            weight_metrics, raw_T, raw_T.clamp(max=2.0), mask_T, torch.tensor([0, 3, 4]), lower=0.5, upper=2.0
        )
    )
    assert found["mismatch/raw_weight_mean"] == pytest.approx(5.25 / 3)
    assert found["mismatch/weight_mean"] == pytest.approx(3.25 / 3)
    assert found["mismatch/ess"] == pytest.approx(5.25**2 / (3 * (16 + 0.0625 + 1)))
    assert found["mismatch/sequence_weight_mean"] == pytest.approx((1.125 + 1) / 2)
    assert found["mismatch/sequence_weight_std"] == pytest.approx(0.0625)
    assert (
        found["mismatch/truncated_fraction"] == found["mismatch/below_lower_fraction"] == pytest.approx(1 / 3)
    )
    at_bounds = values(
        at_valid(weight_metrics, raw_T, raw_T, mask_T, torch.tensor([0, 3, 4]), lower=0.25, upper=4.0)
    )
    assert at_bounds["mismatch/truncated_fraction"] == at_bounds["mismatch/below_lower_fraction"] == 0.0
    zeros = values(
        at_valid(weight_metrics, raw_T, raw_T, mask_T, torch.tensor([0, 3, 4]), lower=0.0, upper=0.0)
    )
    assert (zeros["mismatch/truncated_fraction"], zeros["mismatch/below_lower_fraction"]) == (1.0, 0.0)
    near_one_T = 1 + 1e-9 * torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    near_one = values(at_valid(weight_metrics, near_one_T, near_one_T, mask_T, torch.tensor([0, 3, 4])))
    assert near_one["mismatch/weight_std"] == pytest.approx(math.sqrt(2 / 3) * 1e-9, rel=1e-6)
    unbounded = values(at_valid(weight_metrics, raw_T, raw_T, mask_T, torch.tensor([0, 3, 4])))
    assert not {"mismatch/truncated_fraction", "mismatch/below_lower_fraction"} & unbounded.keys()


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN if "rollout_rs_masked_fraction" in c.scalars], ids=lambda c: c.name
)
def test_golden_rejection(case):
    found = values(
        rejection_metrics({}, *counted(case.output_T("mask").bool(), case.mask_T, case.cu_seqlens))
    )
    assert found["mismatch/rejected/total/tokens"] == pytest.approx(
        case.scalars["rollout_rs_masked_fraction"], rel=1e-6, abs=1e-8
    )
    assert found["mismatch/kept_fraction"] == pytest.approx(
        1 - case.scalars["rollout_rs_masked_fraction"], rel=1e-6, abs=1e-8
    )
    touched = case.scalars["rollout_rs_seq_masked_fraction"]
    assert found["mismatch/rejected/total/touched_sequences"] == pytest.approx(touched, rel=1e-6, abs=1e-8)


def test_rejection_and_veto_by_hand():
    mask_T = torch.tensor([True, True, False, True, True, False, True])
    passed_T = torch.tensor([True, False, False, False, False, True, True])
    cu_seqlens = torch.tensor([0, 3, 5, 6, 7])  # partly, wholly, without valid tokens, not rejected
    passed_S, valid_S = counted(passed_T, mask_T, cu_seqlens)
    kept_S = passed_S * torch.tensor([1, 1, 1, 0])  # another rule's doing
    assert values(rejection_metrics({"k3_mean": passed_S}, kept_S, valid_S)) == pytest.approx({
        "mismatch/rejected/k3_mean/tokens": 3 / 5,
        "mismatch/rejected/k3_mean/sequences": 1 / 3,
        "mismatch/rejected/k3_mean/touched_sequences": 2 / 3,
        "mismatch/rejected/total/tokens": 4 / 5,
        "mismatch/rejected/total/sequences": 2 / 3,
        "mismatch/rejected/total/touched_sequences": 1.0,
        "mismatch/kept_fraction": 1 / 5,
    })  # fmt: skip
    assert values(veto_metrics(counted(~passed_T, mask_T, cu_seqlens)[0])) == {
        "mismatch/veto/tokens": 3.0,
        "mismatch/veto/sequences": 2.0,
    }
    nothing_T = torch.zeros(7, dtype=torch.bool)
    assert values(rejection_metrics({}, *counted(passed_T, nothing_T, cu_seqlens))) == {}
    below_S, _ = counted(~passed_T, nothing_T, cu_seqlens)
    assert values(veto_metrics(below_S)) == {"mismatch/veto/tokens": 0.0, "mismatch/veto/sequences": 0.0}


def test_a_statistic_on_a_bound_is_within_it():
    statistic = torch.tensor([0.5, 0.25, 2.0, 3.0, 1.0])
    found = values(rule_metrics("difference_token", statistic, lower=0.5, upper=2.0, is_log_ratio=False))
    prefix = "mismatch/rejected/difference_token"
    assert found[f"{prefix}/above_upper"] == found[f"{prefix}/below_lower"] == pytest.approx(1 / 5)


def test_numbers_of_float32_are_measured_in_float64():
    x = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    bounds = {"lower": 0.2, "upper": 0.7}
    for measure in (
        lambda x: rule_metrics("ratio_token", x, **bounds, is_log_ratio=True),
        lambda x: rule_metrics("k2_token", x, **bounds, is_log_ratio=False),
        lambda x: reward_metrics(torch.ones(2000), x),
    ):
        assert measure(x) == measure(x.double())


def test_one_value_for_all_tokens_is_refused():
    one, all_N, bounds_S = torch.tensor([-1.0]), torch.full((4,), -1.0), torch.tensor([0, 3, 4])
    for measure in (mismatch_metrics, weight_metrics):
        for pair in ((one, all_N), (all_N, one)):
            with pytest.raises(ValueError, match=r"has shape \(1,\), the responses 4 valid tokens"):
                measure(*pair, bounds_S)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 999), st.data())
def test_rejection_merges_over_any_split(lengths, seed, data):
    batch = random_batch(lengths, seed=seed)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))

    def describe(b):
        keep_T = (b.advantages_T > 0) & b.response_mask_T
        kept, below = (counted(x_T, b.response_mask_T, b.cu_seqlens) for x_T in (keep_T, ~keep_T))
        return rejection_metrics({}, *kept) | veto_metrics(below[0])

    merged = merge_metrics(
        describe(batch.select([row for row, o in enumerate(owner) if o == rank])) for rank in range(3)
    )
    assert merged == describe(batch)


# -----------------------------------------------------------------------------------------------------
# reward, sign of KL


def test_reward_under_the_learner_by_hand():
    rewards_S, log_ratio_S = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([math.log(3.0), 0.0, torch.nan])
    counted_S = torch.tensor([True, True, False])
    found = values(reward_metrics(rewards_S, log_ratio_S, counted_S))
    assert found == pytest.approx({
        "reward/as_sampled": 0.5, "reward/importance_weighted": 3 / 4, "reward/importance_ess": 16 / (2 * 10)
    }, rel=1e-6)  # fmt: skip
    assert values(reward_metrics(rewards_S[:2], torch.zeros(2)))["reward/importance_weighted"] == 0.5
    assert values(reward_metrics(rewards_S, log_ratio_S, torch.zeros(3, dtype=torch.bool))) == {}


def test_reward_under_the_learner_is_the_exact_expectation_where_every_outcome_is_seen_in_proportion():
    """Ten samples in the proportions 5:3:2 of rollout; the learner's probabilities are 0.2, 0.3, 0.5."""
    outcome_S = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    log_ratio_S = (torch.tensor([0.2, 0.3, 0.5]) / torch.tensor([0.5, 0.3, 0.2])).log()[outcome_S]
    rewards_S = torch.tensor([1.0, -2.0, 4.0])[outcome_S]
    found = values(reward_metrics(rewards_S, log_ratio_S))
    assert found["reward/as_sampled"] == pytest.approx(0.5 * 1 - 0.3 * 2 + 0.2 * 4, rel=1e-6)
    assert found["reward/importance_weighted"] == pytest.approx(0.2 * 1 - 0.3 * 2 + 0.5 * 4, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-1e4, 1e4), st.integers(0, 2)), min_size=1, max_size=12)
)
def test_reward_estimates_merge_over_any_split_and_stay_within_the_rewards(rows):
    rewards_S, log_ratio_S = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in (0, 1))
    part_S = torch.tensor([r[2] for r in rows])
    whole = values(reward_metrics(rewards_S, log_ratio_S))
    merged = merge_metrics(reward_metrics(rewards_S, log_ratio_S, part_S == p) for p in range(3))
    assert values(merged) == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert min(rewards_S) - 1e-9 <= whole["reward/importance_weighted"] <= max(rewards_S) + 1e-9


def test_experts_that_differ_are_a_share_of_tokens_and_of_layers_with_experts():
    found = values(routing_metrics([1, 2], 4, is_sparse=[True, False, True]))
    layers = {"mismatch/experts_differ/layer_0": 1 / 4, "mismatch/experts_differ/layer_2": 2 / 4}
    assert found == {"mismatch/experts_differ": 3 / 8} | layers


def test_negative_estimates_are_counted():
    assert negative_fraction([-1e-3, 0.0, 2e-3, -1e-9]).value == 0.5
    assert negative_fraction([]).value is None
    assert negative_fraction([-1.0]).merge(negative_fraction([1.0, 1.0])).value == pytest.approx(1 / 3)
