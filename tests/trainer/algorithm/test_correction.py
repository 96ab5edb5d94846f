"""Correction: golden cases, the slow reference, hand calculations, properties, and errors that name the
sequence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema.correction import CorrectionConfig
from parallel.packing import PackedBatch
from tests.reference import correction as reference
from tests.support.golden_cases import GoldenCase, load
from tests.support.packed_batches import random_batch
from trainer.algorithm.correction import (
    Correction,
    bounded_weights,
    correct,
    correct_current,
    level_ratio,
    rule_names,
    weight_sums,
)
from trainer.algorithm.segments import valid_tokens
from trainer.ranks.metrics import merge_metrics, values


def config_of(**fields) -> CorrectionConfig:
    return CorrectionConfig.model_validate(fields)


NO_WEIGHT = config_of(weight={"level": "none"})
TRUNCATED = config_of(weight={"level": "token", "upper": 2.0})


def batch_of(rollout_T: Tensor, old_T: Tensor, mask_T: Tensor, lengths: list[int]) -> PackedBatch:
    return random_batch(lengths, seed=0).with_fields(
        rollout_logprobs_T=rollout_T, old_logprobs_T=old_T, response_mask_T=mask_T, ref_logprobs_T=None
    )


# ----------------------------------------------------------------------------------------------------------------
# golden cases

GOLDEN_RULES = {
    "token_k1": {"rule": "ratio", "level": "token"},
    "seq_sum_k1": {"rule": "ratio", "level": "sequence"},
    "seq_mean_k1": {"rule": "ratio", "level": "geometric"},
} | {
    f"{name}_{kind}": {"rule": kind, "reduce": reduce}
    for kind in ("k2", "k3")
    for name, reduce in (("token", "token"), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max"))
}


def golden_rule(rule: str, threshold: str) -> dict:
    bounds = [float(part) for part in threshold.split("_")]
    return GOLDEN_RULES[rule] | (
        {"lower": bounds[0], "upper": bounds[1]} if len(bounds) == 2 else {"upper": bounds[0]}
    )


def golden_config(case: GoldenCase) -> CorrectionConfig:
    params = case.params
    weight = {"level": "none"}
    if params["is_level"] is not None:
        weight = {
            "level": params["is_level"],
            "upper": params["is_upper"],
            "normalise": params["batch_normalize"],
        }
    return config_of(weight=weight, reject=[golden_rule(**r) for r in params["rejections"]])


@pytest.mark.parametrize("case", load("correction"), ids=lambda c: c.name)
def test_golden(case):
    batch = batch_of(
        case.input_T("rollout_logp"),
        case.input_T("old_logp"),
        case.mask_T,
        torch.diff(case.cu_seqlens).tolist(),
    )
    result = correct(batch, golden_config(case))
    assert torch.equal(result.keep_T, case.output_T("mask").bool())
    assert result.weights_T.dtype == torch.float64
    wanted_T = (
        case.output_T("weights") * case.mask_T
        if case.params["is_level"] is not None
        else case.mask_T.double()
    )
    torch.testing.assert_close(result.weights_T, wanted_T, rtol=1e-6, atol=1e-12)


# -------------------------------------------------------------------------------------------------------------
# slow reference

LEVELS = ("token", "sequence", "geometric", "segment", "segment_geometric")


@st.composite
def weight_blocks(draw) -> dict:
    level = draw(st.sampled_from(("none", *LEVELS)))
    if level == "none":
        return {"level": "none"}
    bound = draw(st.sampled_from(("truncate", "clip", "mask", "none")))
    block = {"level": level, "bound": bound, "normalise": draw(st.booleans())}
    if bound != "none":
        block["upper"] = draw(st.sampled_from((1.05, 1.5, 4.0)))
    if bound in ("clip", "mask"):
        block["lower"] = draw(st.sampled_from((0.0, 0.3, 0.95)))
    return block


@st.composite
def rules(draw) -> dict:
    if draw(st.booleans()):
        lower = draw(st.sampled_from((0.0, 0.5, 0.9)))
        return {
            "rule": "ratio",
            "level": draw(st.sampled_from(LEVELS)),
            "lower": lower,
            "upper": draw(st.sampled_from((1.02, 1.7, 9.0))),
        }
    if draw(st.booleans()):
        reduce = draw(st.sampled_from(("token", "sum", "mean", "segment_mean")))
        return {
            "rule": "difference",
            "reduce": reduce,
            "lower": draw(st.sampled_from((-0.003, -0.02))),
            "upper": 0.01,
        }
    return {
        "rule": draw(st.sampled_from(("k2", "k3"))),
        "reduce": draw(st.sampled_from(("token", "sum", "mean", "max"))),
        "upper": draw(st.sampled_from((0.01, 0.1, 1.0))),
    }


configs = st.builds(
    lambda weight, reject, veto: config_of(weight=weight, reject=reject, veto=veto),
    weight_blocks(), st.lists(rules(), max_size=3), st.sampled_from((None, 0.2, 0.6)),
)  # fmt: skip
shapes = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10_000))


def exact_batch(lengths: list[int], seed: int) -> PackedBatch:
    return random_batch(lengths, seed=seed, dtype=torch.float64)


def rows_of(x_T: Tensor, batch: PackedBatch) -> list[list]:
    return [row.tolist() for row in x_T.split(batch.lengths)]


@settings(max_examples=150, deadline=None)
@given(shapes, configs)
def test_weights_and_mask_are_those_of_the_slow_reference(shape, config):
    batch = exact_batch(*shape)
    result = correct(batch, config)
    log_ratios = rows_of(batch.old_logprobs_T - batch.rollout_logprobs_T, batch)
    sequences = list(zip(log_ratios, rows_of(batch.response_mask_T, batch), strict=True))
    block = {"bound": None, "lower": None, "upper": None, "normalise": False} | config.weight.model_dump()
    wanted = reference.weights(sequences, **block)
    assert [x for row in rows_of(result.weights_T, batch) for x in row] == pytest.approx(
        [x for row in wanted for x in row], rel=1e-12
    )
    policies = zip(
        rows_of(batch.old_logprobs_T, batch), rows_of(batch.rollout_logprobs_T, batch), strict=True
    )
    for kept, (log_ratio, mask), (old, rollout) in zip(
        rows_of(result.keep_T, batch), sequences, policies, strict=True
    ):
        by_rule = [
            reference.keeps_by_difference(old, rollout, mask, rule.model_dump())
            if rule.rule == "difference"
            else reference.keeps(log_ratio, mask, rule.model_dump())
            for rule in config.reject
        ]
        if config.veto is not None:
            by_rule.append(reference.survives_veto(log_ratio, mask, config.veto))
        assert kept == [all(passed) for passed in zip(mask, *by_rule, strict=True)]


# ------------------------------------------------------------------------------------------------------------------
# properties


@settings(max_examples=60, deadline=None)
@given(shapes, configs, st.randoms())
def test_neither_packing_nor_order_matters(shape, config, random):
    batch = exact_batch(*shape)
    whole = correct(batch, config)
    order = list(range(len(batch.lengths)))
    random.shuffle(order)
    cut = random.randrange(len(order) + 1)
    parts = [batch.select(order[:cut]), batch.select(order[cut:])]
    # What normalise needs of the other part: added up as ranks would.
    sums = [torch.zeros(2, dtype=torch.float64)]

    def note(local: Tensor) -> Tensor:
        sums[0] = sums[0] + local
        return local

    for part in parts:
        correct(part, config, note)
    found = [correct(part, config, lambda local: sums[0]) for part in parts]
    columns = batch.sequence_ids_S.tolist(), rows_of(whole.weights_T, batch), rows_of(whole.keep_T, batch)
    wanted = {s: rows for s, *rows in zip(*columns, strict=True)}
    for part, result in zip(parts, found, strict=True):
        if part.lengths:
            columns = (
                part.sequence_ids_S.tolist(),
                rows_of(result.weights_T, part),
                rows_of(result.keep_T, part),
            )
            for s, weights, keep in zip(*columns, strict=True):
                assert (weights, keep) == (pytest.approx(wanted[s][0], rel=1e-12), wanted[s][1])
    assert values(merge_metrics(f.metrics for f in found)) == pytest.approx(
        values(whole.metrics), rel=1e-9, abs=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(shapes, configs)
def test_equal_policies_are_left_alone(shape, config):
    batch = exact_batch(*shape)
    batch = batch.with_fields(old_logprobs_T=batch.rollout_logprobs_T)
    result = correct(batch, config)
    assert torch.equal(result.keep_T, batch.response_mask_T)
    assert torch.equal(result.weights_T, batch.response_mask_T.double())


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(rules(), min_size=1, max_size=3), st.floats(1.0, 5.0))
def test_wider_bounds_never_keep_fewer(shape, reject, factor):
    batch = exact_batch(*shape)
    wider = [
        r | {"upper": r["upper"] * factor}
        | ({"lower": r["lower"] * factor if r["rule"] == "difference" else r["lower"] / factor} if "lower" in r else {})
        for r in reject
    ]  # fmt: skip
    narrow, wide = (correct(batch, config_of(reject=rules)).keep_T for rules in (reject, wider))
    assert (narrow <= wide).all()


@settings(max_examples=40, deadline=None)
@given(
    configs,
    st.sampled_from(("old_logprobs_T", "rollout_logprobs_T")),
    st.sampled_from((torch.float32, torch.float64)),
)
def test_log_ratios_of_ten_thousand_stay_finite(config, name, dtype):
    batch = random_batch([4, 7, 1], seed=3, dtype=dtype)
    impossible_T = getattr(batch, name).clone()
    impossible_T[::3] -= 1e4
    result = correct(batch.with_fields(**{name: impossible_T}), config)
    assert result.weights_T.isfinite().all()
    assert all(m.value is None or math.isfinite(m.value) for m in result.metrics.values())


@settings(max_examples=40, deadline=None)
@given(shapes, configs, st.sampled_from((torch.nan, torch.inf, -torch.inf)))
def test_what_lies_off_the_mask_changes_nothing(shape, config, garbage):
    batch = exact_batch(*shape)
    off_T = ~batch.response_mask_T
    names = ("old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T")
    dirty = batch.with_fields(**{name: getattr(batch, name).masked_fill(off_T, garbage) for name in names})
    clean, found = (correct(b, config) for b in (batch, dirty))
    assert torch.equal(clean.weights_T, found.weights_T)
    assert torch.equal(clean.keep_T, found.keep_T)
    assert clean.metrics == found.metrics


@settings(max_examples=30, deadline=None)
@given(configs)
def test_nothing_valid(config):
    result = correct(random_batch([3, 1], seed=0, mask_T=torch.zeros(4, dtype=torch.bool)), config)
    assert result.weights_T.tolist() == [0.0] * 4
    assert not result.keep_T.any()
    assert not any(
        value for name, value in values(result.metrics).items() if name != "mismatch/weight_normaliser"
    )


def own_weight(name: str, **chosen) -> CorrectionConfig:
    function = f"tests.support.own_functions:{name}"
    return config_of(weight={"level": "function", "function": function, "settings": chosen})


@settings(max_examples=20, deadline=None)
@given(configs | st.just(own_weight("learned")))
def test_weights_carry_no_gradient(config):
    batch = random_batch([6, 3], seed=2)
    old_T = batch.old_logprobs_T.clone().requires_grad_()
    assert not correct(batch.with_fields(old_logprobs_T=old_T), config).weights_T.requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# by hand


def test_token_weights_by_hand():
    rollout_T = torch.tensor([0.1, 0.5, 0.2, 0.9]).log()
    old_T = torch.tensor([0.4, 0.25, 0.3, 0.1]).log()
    mask_T = torch.tensor([True, True, True, False])
    result = correct(batch_of(rollout_T, old_T, mask_T, [2, 2]), TRUNCATED)
    assert result.weights_T.tolist() == pytest.approx([2.0, 0.5, 1.5, 0.0])
    assert result.keep_T.tolist() == [True, True, True, False]
    found = {name.removeprefix("mismatch/"): value for name, value in values(result.metrics).items()}
    wanted = {
        "ess": (4 + 0.5 + 1.5) ** 2 / (3 * (16 + 0.25 + 2.25)),  # of 4, 0.5, 1.5: before the bound
        "weight_mean": 4 / 3, "weight_max": 2.0, "weight_min": 0.5, "truncated_fraction": 1 / 3, "kept_fraction": 1.0,
        "k1": -math.log(4 * 0.5 * 1.5) / 3,  # rollout's divergence from old
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    clipped = config_of(weight={"level": "token", "bound": "clip", "lower": 0.75, "upper": 5.0})
    metrics = values(correct(batch_of(rollout_T, old_T, mask_T, [2, 2]), clipped).metrics)
    assert metrics["mismatch/below_lower_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch/truncated_fraction"] == 0.0


def test_what_is_told_of_the_raw_ratio_does_not_depend_on_the_weight():
    """Of tokens, also where a function of the user's own makes the weight, or nothing does."""
    truncated = config_of(weight={"level": "token", "upper": 1.01})
    batch = random_batch([5, 7], seed=3)
    own = own_weight("truncate", upper=1.01)
    built_in, by_function, none = (correct(batch, config) for config in (truncated, own, NO_WEIGHT))
    assert torch.equal(built_in.weights_T, by_function.weights_T)
    wanted = values(built_in.metrics)
    del wanted["mismatch/truncated_fraction"]
    found = values(by_function.metrics)
    assert found.pop("own/weight/above") == values(built_in.metrics)["mismatch/truncated_fraction"]
    assert found == wanted
    raw = {k: v for k, v in wanted.items() if k.startswith("mismatch/raw_") or k == "mismatch/ess"}
    assert len(raw) > 4 and raw.items() <= values(none.metrics).items()
    assert {none.metrics[f"mismatch/weight_{of}"].value for of in ("mean", "min", "max")} == {1.0}


def of_ratios(ratios: list[float], lengths: list[int], mask: list[bool] | None = None) -> PackedBatch:
    """A batch whose tokens have these ratios old / rollout."""
    rollout_T = torch.full((len(ratios),), -9.0, dtype=torch.float64)
    old_T = rollout_T + torch.tensor(ratios, dtype=torch.float64).log()
    return batch_of(rollout_T, old_T, torch.tensor(mask or [True] * len(ratios)), lengths)


@pytest.mark.parametrize(("level", "wanted"), [
    ("token", [2, 0.5, 8, 0, 4, 0.25]),
    ("sequence", [32, 32, 32, 0, 32, 0.25]),
    ("geometric", [32**0.25, 32**0.25, 32**0.25, 0, 32**0.25, 0.25]),
    ("segment", [8, 8, 8, 0, 4, 0.25]),
    ("segment_geometric", [2, 2, 2, 0, 4, 0.25]),
])  # fmt: skip
def test_levels_by_hand(level, wanted):
    batch = of_ratios([2, 0.5, 8, 100, 4, 0.25], [5, 1], [True, True, True, False, True, True])
    result = correct(batch, config_of(weight={"level": level, "bound": "none"}))
    assert result.weights_T.tolist() == pytest.approx(wanted)


def test_a_function_has_the_boundaries_of_responses_and_of_segments():
    """Its weight is the share of the response that the segment is: 2 of 3, 1 of 3, and 1 of 1."""
    batch = of_ratios([1.0] * 5, [4, 1], [True, True, False, True, True])
    found = correct(batch, own_weight("segments")).weights_T.tolist()
    assert found == pytest.approx([2 / 3, 2 / 3, 0, 1 / 3, 1])


@pytest.mark.parametrize(("bound", "wanted"), [
    ({"bound": "truncate", "upper": 2}, [0.1, 1, 2]),
    ({"bound": "clip", "upper": 2}, [0.5, 1, 2]),
    ({"bound": "clip", "upper": 2, "lower": 0.2}, [0.2, 1, 2]),
    ({"bound": "mask", "upper": 5, "lower": 0.5}, [0, 1, 0]),
    ({"bound": "none"}, [0.1, 1, 10]),
])  # fmt: skip
def test_bounds_by_hand(bound, wanted):
    result = correct(of_ratios([0.1, 1, 10], [3]), config_of(weight={"level": "token"} | bound))
    assert result.weights_T.tolist() == pytest.approx(wanted)
    assert result.keep_T.all(), "a weight of zero is no rejection: the token still counts"
    with pytest.raises(ValueError, match="unknown weight bound 'other'; choose truncate"):
        bounded_weights(result.weights_T, "other", lower=None, upper=None)


def test_what_lies_on_a_bound_is_within():
    on_bounds = torch.tensor([0.5, 1.0, 2.0])
    assert torch.equal(bounded_weights(on_bounds, "mask", lower=0.5, upper=2.0), on_bounds)
    rollout_T = torch.tensor([-1.0, -1.0])
    equal = batch_of(rollout_T, rollout_T, torch.tensor([True, True]), [1, 1])
    rules = [{"rule": "ratio", "lower": 1.0, "upper": 1.0}] * 3
    found = correct(equal, config_of(reject=rules))
    assert found.keep_T.all()
    names = {name.split("/")[2] for name in found.metrics if name.endswith("/tokens")}
    assert names == {"ratio_token", "ratio_token_2", "ratio_token_3", "total"}
    veto = math.exp(-2.0)
    assert math.log(veto) == -2.0
    apart = batch_of(rollout_T, rollout_T - torch.tensor([2.0, 2.125]), torch.tensor([True, True]), [1, 1])
    assert correct(apart, config_of(veto=veto)).keep_T.tolist() == [True, False]


def test_normalised_weights_have_mean_one_over_tokens_or_sequences():
    batch = of_ratios([1, 1, 4, 1, 1, 9], [3, 2, 1], [True] * 5 + [False])
    by_token = correct(batch, config_of(weight={"level": "token", "bound": "none", "normalise": True}))
    assert by_token.weights_T.tolist() == pytest.approx([x / 1.6 for x in (1, 1, 4, 1, 1, 0)])
    assert by_token.metrics["mismatch/weight_normaliser"].value == pytest.approx(1.6)
    by_sequence = correct(batch, config_of(weight={"level": "sequence", "bound": "none", "normalise": True}))
    assert by_sequence.weights_T.tolist() == pytest.approx([x / 2.5 for x in (4, 4, 4, 1, 1, 0)])
    small = correct(of_ratios([0.5], [1]), config_of(weight={"level": "token", "normalise": True}))
    assert small.weights_T.tolist() == [1.0]


def test_normalised_weights_that_are_all_masked_stay_zero():
    masked = {"level": "token", "bound": "mask", "upper": 2.0, "normalise": True}
    result = correct(of_ratios([9, 8], [2]), config_of(weight=masked))
    assert result.weights_T.tolist() == [0.0, 0.0]
    assert result.metrics["mismatch/weight_normaliser"].value == 1.0


def test_the_geometric_level_tells_apart_what_exp_would_round_away():
    batch = of_ratios([1.0002] * 100 + [1.0] * 100, [100, 100]).with_fields()
    kept = correct(
        batch,
        config_of(
            weight={"level": "none"}, reject=[{"rule": "ratio", "level": "geometric", "upper": 1.0001}]
        ),
    )
    assert [row[0] for row in rows_of(kept.keep_T, batch)] == [False, True]


@pytest.mark.parametrize(("reduce", "kept"), [
    ("token", [False, True, True, False, True, False]),  # dp = 0.3, -0.1, 0.1 | -0.3 of a token off the mask, 0.15 | -0.4
    ("sum", [False, False, False, False, False, False]),  # 0.45, -0.4
    ("mean", [True, True, True, False, True, False]),  # 0.1125, -0.4
    ("segment_mean", [True, True, True, False, True, False]),  # 0.1, 0.15, -0.4
])  # fmt: skip
def test_rules_on_the_difference_of_probabilities_by_hand(reduce, kept):
    rollout_T = torch.tensor([0.2, 0.5, 0.6, 0.9, 0.25, 0.8], dtype=torch.float64)
    old_T = rollout_T + torch.tensor([0.3, -0.1, 0.1, -0.3, 0.15, -0.4], dtype=torch.float64)
    batch = batch_of(
        rollout_T.log(), old_T.log(), torch.tensor([True, True, True, False, True, True]), [5, 1]
    )
    rule = {"rule": "difference", "reduce": reduce, "lower": -0.2, "upper": 0.25}
    assert correct(batch, config_of(weight={"level": "none"}, reject=[rule])).keep_T.tolist() == kept


def test_each_rule_s_own_statistic_by_hand():
    """Ratios 2, 1/2, 4 | 1/4; sequences of 4 (geometric 4^(1/3)) and 1/4. Neither pair of bounds is
    reciprocal."""
    batch = of_ratios([2, 0.5, 4, 0.25], [3, 1])
    rules = [
        {"rule": "ratio", "level": "token", "lower": 0.4, "upper": 3.0},
        {"rule": "ratio", "level": "sequence", "lower": 0.0, "upper": 3.0},
        {"rule": "k2", "reduce": "max", "upper": 0.9},
        {"rule": "difference", "upper": 3e-4, "lower": -1e-4},
    ]
    metrics = values(correct(batch, config_of(reject=rules)).metrics)
    found = {name.removeprefix("mismatch/rejected/"): value for name, value in metrics.items()}
    p = math.exp(-9)
    k2_high, k2_low = math.log(4) ** 2 / 2, math.log(4) ** 2 / 2
    wanted = {
        "ratio_token/statistic_mean": 6.75 / 4, "ratio_token/statistic_min": 0.25, "ratio_token/statistic_max": 4.0,
        "ratio_token/statistic_std": math.sqrt((4 + 0.25 + 16 + 0.0625) / 4 - (6.75 / 4) ** 2),
        "ratio_token/above_upper": 0.25, "ratio_token/below_lower": 0.25, "ratio_token/tokens": 0.5,
        "ratio_sequence/statistic_mean": 4.25 / 2, "ratio_sequence/statistic_min": 0.25, "ratio_sequence/statistic_max": 4.0,
        "ratio_sequence/statistic_std": 3.75 / 2, "ratio_sequence/above_upper": 0.5,
        "k2_max/statistic_mean": (k2_high + k2_low) / 2, "k2_max/above_upper": 1.0, "k2_max/statistic_std": 0.0,
        "difference_token/statistic_mean": p * (1 - 0.5 + 3 - 0.75) / 4, "difference_token/statistic_max": 3 * p,
        "difference_token/statistic_min": -0.75 * p, "difference_token/above_upper": 0.25, "difference_token/below_lower": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert "ratio_sequence/below_lower" not in found and "k2_max/below_lower" not in found


def test_a_difference_of_probabilities_near_one_keeps_its_digits():
    """0.999999 and 0.99999898 are one number of float32."""
    rollout_T = torch.tensor([-1.02e-6, -1.0e-6])
    batch = batch_of(rollout_T, torch.full((2,), -1.0e-6), torch.ones(2, dtype=torch.bool), [2])
    rule = {"rule": "difference", "reduce": "token", "lower": -1e-8, "upper": 1e-8}
    result = correct(batch, config_of(weight={"level": "none"}, reject=[rule]))
    assert result.keep_T.tolist() == [False, True]


def test_normalised_weights_need_the_whole_step():
    normalised = config_of(weight={"level": "token", "normalise": True})
    batch = random_batch([3], seed=0)
    with pytest.raises(ValueError, match="normalised weights need old_logprobs_T before the update"):
        correct_current(batch, batch.old_logprobs_T, normalised)


def test_veto_sees_the_unbounded_ratio_and_takes_the_whole_sequence():
    batch = of_ratios([1, 1e-5, 1, 1e-3, 1], [3, 2])
    result = correct(batch, config_of(weight={"level": "none"}, veto=1e-4))
    assert result.keep_T.tolist() == [False, False, False, True, True]
    far = batch.with_fields(
        old_logprobs_T=batch.old_logprobs_T - torch.tensor([0, 30.0, 0, 0, 0], dtype=torch.float64)
    )
    assert correct(far, config_of(veto=1e-12)).keep_T.tolist() == [False, False, False, True, True], (
        "e^-41.5 is below 1e-12"
    )
    found = values(result.metrics)
    assert (found["mismatch/veto/tokens"], found["mismatch/veto/sequences"]) == (1.0, 1.0)
    assert found["mismatch/rejected/veto/tokens"] == found["mismatch/rejected/total/tokens"] == 3 / 5


def test_names_of_rules_are_numbered_by_their_whole_name():
    levels = ("segment_geometric", "segment", "segment", "segment_geometric")
    rules = config_of(reject=[{"rule": "ratio", "level": level, "upper": 2} for level in levels]).reject
    wanted = ["ratio_segment_geometric", "ratio_segment", "ratio_segment_2", "ratio_segment_geometric_2"]
    assert rule_names(rules) == wanted


def test_every_rule_has_to_pass_and_is_counted_by_name():
    batch = of_ratios([1, 3, 1, 1.1, 1, 1], [2, 2, 2])
    result = correct(
        batch,
        config_of(
            reject=[
                {"rule": "ratio", "level": "token", "upper": 2},
                {"rule": "ratio", "level": "sequence", "upper": 1.05},
            ]
        ),
    )
    assert result.keep_T.tolist() == [False, False, False, False, True, True]
    found = values(result.metrics)
    assert found["mismatch/rejected/ratio_token/tokens"] == pytest.approx(1 / 6)
    assert found["mismatch/rejected/ratio_sequence/tokens"] == pytest.approx(4 / 6)
    assert found["mismatch/rejected/total/tokens"] == pytest.approx(4 / 6)
    assert found["mismatch/rejected/ratio_sequence/sequences"] == pytest.approx(2 / 3)
    bounds = [{"lower": 0.1, "upper": 2}, {"lower": 0.5, "upper": 9}]
    by_token = [{"rule": "ratio", "level": "token"} | bound for bound in bounds]
    result = correct(of_ratios([3, 0.2, 1], [3]), config_of(reject=by_token))
    assert result.keep_T.tolist() == [False, False, True]
    assert values(result.metrics)["mismatch/kept_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("config", [NO_WEIGHT, TRUNCATED])
def test_without_old_everything_is_left_to_the_loss(config):
    batch = random_batch([3, 4], seed=0).with_fields(old_logprobs_T=None)
    before = correct(batch, config)
    assert before.weights_T is None
    assert torch.equal(before.keep_T, batch.response_mask_T)
    assert before.metrics == {}


def test_bypass_leaves_everything_to_the_loss():
    batch = random_batch([5, 7], seed=1)
    config = config_of(
        mode="bypass",
        loss="policy_gradient",
        weight={"level": "sequence"},
        reject=[{"rule": "k3", "upper": 1e-9}],
    )
    before = correct(batch, config)
    assert torch.equal(before.keep_T, batch.response_mask_T)
    assert before.weights_T is None
    assert before.metrics == {}
    inside = correct_current(batch, batch.old_logprobs_T, config)
    as_decoupled = correct(batch, config.model_copy(update={"mode": "decoupled", "loss": "objective"}))
    assert torch.equal(inside.weights_T, as_decoupled.weights_T)
    assert torch.equal(inside.keep_T, as_decoupled.keep_T)
    assert isinstance(inside, Correction)


def test_log_ratios_are_bounded_after_their_sum_not_before():
    log_ratio_N = torch.tensor([30.0, -27.0, 30.0])
    valid, without_last = (
        valid_tokens(torch.ones(n, dtype=torch.bool), torch.tensor([0, n])) for n in (3, 2)
    )
    assert level_ratio(log_ratio_N, valid, "sequence").tolist() == pytest.approx([math.exp(20)] * 3)
    assert level_ratio(log_ratio_N[:2], without_last, "sequence").tolist() == pytest.approx([math.exp(3)] * 2)


def test_sums_over_a_response_of_float32_keep_their_digits():
    log_ratio_N = 0.018 * torch.rand(1999, generator=torch.Generator().manual_seed(0))
    valid = valid_tokens(torch.ones(1999, dtype=torch.bool), torch.tensor([0, 1999]))
    ratio_N = level_ratio(log_ratio_N, valid, "sequence")
    assert ratio_N.dtype == torch.float32, "a loss of float32 stays one"
    found = ratio_N[0].item()
    assert found == pytest.approx(math.exp(math.fsum(log_ratio_N.tolist())), rel=2e-7)
    weights_N = log_ratio_N.exp()
    sums = weight_sums(weights_N, valid, "token"), weight_sums(weights_N, valid, "sequence")
    exact = math.fsum(weights_N.tolist())
    assert torch.cat(sums).tolist() == pytest.approx([exact, 1999, exact / 1999, 1], rel=1e-12)
    old_T, config = log_ratio_N - 9.0, config_of(reject=[{"rule": "k2", "reduce": "sum", "upper": 1.0}])
    batch = batch_of(torch.full((1999,), -9.0), old_T, valid.mask_T, [1999])
    found = correct(batch, config).metrics["mismatch/rejected/k2_sum/statistic_max"].value
    assert found == pytest.approx(math.fsum(((old_T + 9.0).square() / 2).tolist()), rel=1e-12)


def test_divergences_are_of_the_bounded_log_ratio():
    """A log-ratio of 30 counts as 20."""
    far_T = torch.tensor([-40.0], dtype=torch.float64)
    batch = batch_of(far_T, far_T + 30, torch.tensor([True]), [1])
    for rule, most in (("k2", 20**2 / 2), ("k3", math.exp(20) - 21)):
        metrics = correct(batch, config_of(reject=[{"rule": rule, "reduce": "token", "upper": 1}])).metrics
        assert metrics[f"mismatch/rejected/{rule}_token/statistic_max"].value == pytest.approx(most)


# ----------------------------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize("name", ["old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("place", [3, 4])
def test_a_broken_logprob_names_its_sequence(name, value, place):
    batch = random_batch([3, 2, 4], seed=4, mask_T=torch.ones(9, dtype=torch.bool))
    broken = getattr(batch, name).clone()
    broken[place] = value  # places 3 and 4 are the second sequence, id 101
    with pytest.raises(
        ValueError, match=rf"{name} is (nan|-inf) on a response token of sequence 101 \(1 such"
    ):
        correct(batch.with_fields(**{name: broken}), TRUNCATED)


def test_a_weight_of_a_function_that_is_none_is_refused():
    with pytest.raises(ValueError, match="weights_N must be finite and at least 0"):
        correct(of_ratios([0.5], [1]), own_weight("negative"))


@pytest.mark.parametrize(("fields", "message"), [
    ({"weight": {"level": "token", "bound": "none", "upper": 2.0}}, "remove `upper` and `lower`"),
    ({"weight": {"level": "token", "bound": "truncate", "lower": 0.5}}, "has no lower bound"),
    ({"weight": {"level": "token", "bound": "clip", "lower": 3.0, "upper": 2.0}}, "lower=3.0 is above upper=2.0"),
    ({"reject": [{"rule": "ratio", "lower": 2.0, "upper": 1.5}]}, "give both, lower first"),
    ({"loss": "policy_gradient"}, "goes with `mode: bypass`"),
    ({"mode": "bypass", "weight": {"level": "token"}}, "count the gap twice"),
    ({"mode": "bypass", "loss": "policy_gradient", "weight": {"level": "token", "normalise": True}}, "`normalise` needs all weights"),
    ({"veto": 1.5}, "less than 1"),
])  # fmt: skip
def test_combinations_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


def test_defaults_that_follow_from_other_fields():
    assert config_of(mode="bypass").weight.level == "none"
    assert config_of(weight={"level": "token", "bound": "mask", "upper": 4.0}).weight.lower == 0.25
    assert config_of(reject=[{"rule": "ratio", "upper": 1.25}]).reject[0].lower == 0.8
    for fields in (
        {"mode": "bypass"},
        {"weight": {"level": "token", "bound": "none"}},
        {"weight": {"level": "token"}},
    ):
        assert CorrectionConfig.model_validate_json(config_of(**fields).model_dump_json()) == config_of(
            **fields
        )
