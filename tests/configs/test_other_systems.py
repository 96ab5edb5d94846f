"""Blocks of verl and ROLL: what each accepts and weighs is what the original formula does, on random
log-ratios; notes; refusals.

The originals stand here as their documents and sources state them, in plain torch on padded rows. Legend: S
sequences, L padded length. log_ratio_SL = log pi_train - log pi_rollout, mask_SL bool.
"""

import math
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.loader import ConfigError, Problem, load_config, parse_config, resolved_yaml
from configs.other_systems.answers import answer
from configs.other_systems.roll import ROLL_KEYS, from_roll
from configs.other_systems.verl import VERL_KEYS, from_verl
from configs.presets import PRESETS
from configs.schema.correction import CorrectionConfig, DivergenceRule, ImportanceWeight, NoWeight, RatioRule
from tests.support.packed_batches import random_batch
from trainer.algorithm.correction import correct, correct_current

# -----------------------------------------------------------------------------------------------------------------
# the originals


def sums(x_SL: Tensor, mask_SL: Tensor) -> Tensor:
    return (x_SL * mask_SL).sum(-1, keepdim=True).expand_as(x_SL)


def means(x_SL: Tensor, mask_SL: Tensor) -> Tensor:
    return sums(x_SL, mask_SL) / sums(torch.ones_like(x_SL), mask_SL)


def no_aggregate(x_SL: Tensor, mask_SL: Tensor) -> Tensor:
    return x_SL


def maxima(x_SL: Tensor, mask_SL: Tensor) -> Tensor:
    return x_SL.masked_fill(~mask_SL, -math.inf).amax(-1, keepdim=True).expand_as(x_SL)


def verl_new_keep(
    log_ratio_SL: Tensor, mask_SL: Tensor, option: str, lower: float | None, upper: float
) -> Tensor:
    """``token_k1`` and the like: the statistic is -log r, log(r)^2 / 2 or r - 1 - log r, aggregated; k1 is
    held between two logarithms."""
    scope, kind = option.rsplit("_", 1)
    statistics = {
        "k1": -log_ratio_SL,
        "k2": 0.5 * log_ratio_SL**2,
        "k3": log_ratio_SL.exp() - 1 - log_ratio_SL,
    }
    aggregate = {"token": no_aggregate, "seq_sum": sums, "seq_mean": means, "seq_max": maxima}[scope]
    statistic = aggregate(statistics[kind], mask_SL)
    if kind == "k1":
        return (statistic >= math.log(lower)) & (statistic <= math.log(upper))
    return statistic <= upper


LEVELS = {"token": no_aggregate, "sequence": sums, "geometric": means}


def ratio_keep(log_ratio_SL: Tensor, mask_SL: Tensor, level: str, lower: float, upper: float) -> Tensor:
    """verl up to December 2025, and ROLL: the ratio of a token, the product or the geometric mean of a
    sequence within two bounds."""
    ratio = LEVELS[level](log_ratio_SL, mask_SL).exp()
    return (ratio >= lower) & (ratio <= upper)


def veto_keep(log_ratio_SL: Tensor, mask_SL: Tensor, threshold: float) -> Tensor:
    return ~((log_ratio_SL.exp() < threshold) & mask_SL).any(-1, keepdim=True).expand_as(mask_SL)


def raw_weight(log_ratio_SL: Tensor, mask_SL: Tensor, level: str) -> Tensor:
    return LEVELS[level](log_ratio_SL, mask_SL).exp()


# -------------------------------------------------------------------------------------------------------------------------
# ours


def random_rows(seed: int, num_sequences: int = 80) -> tuple[Tensor, Tensor]:
    """(log_ratio_SL, mask_SL): sequences that differ in length and in how far they are off, in both
    directions; each has a valid token."""
    generator = torch.Generator().manual_seed(seed)
    length = 9
    mask_SL = torch.rand(num_sequences, length, generator=generator) < 0.7
    mask_SL[:, 0] = True
    shift_S1 = 0.2 * torch.randn(num_sequences, 1, generator=generator, dtype=torch.float64)
    return shift_S1 + 0.5 * torch.randn(
        num_sequences, length, generator=generator, dtype=torch.float64
    ), mask_SL


def ours(config: CorrectionConfig, log_ratio_SL: Tensor, mask_SL: Tensor) -> tuple[Tensor, Tensor]:
    """(keep_SL, weights_SL)"""
    num_sequences, length = mask_SL.shape
    batch = random_batch([length] * num_sequences, seed=0, dtype=torch.float64, mask_T=mask_SL.flatten())
    train_T = batch.rollout_logprobs_T + log_ratio_SL.flatten()
    if config.mode == "bypass":
        correction = correct_current(batch, train_T, config)
    else:
        correction = correct(batch.with_fields(old_logprobs_T=train_T), config)
    return correction.keep_T.view(mask_SL.shape), correction.weights_T.view(mask_SL.shape)


def assert_same_set(
    config: CorrectionConfig, log_ratio_SL: Tensor, mask_SL: Tensor, original_SL: Tensor
) -> None:
    keep_SL, _ = ours(config, log_ratio_SL, mask_SL)
    assert torch.equal(keep_SL, original_SL & mask_SL)


def assert_divides(keep_SL: Tensor, mask_SL: Tensor) -> None:
    """The case would notice a rule that keeps, or rejects, everything."""
    assert 0.05 < (keep_SL & mask_SL).sum() / mask_SL.sum() < 0.95


# -------------------------------------------------------------------------------------------------------------------------
# verl

NEW_RULES = [
    ("token_k1", "0.6_1.4"),
    ("token_k1", "0.9_3.0"),
    ("token_k1", 1.5),
    ("token_k1", "1.5"),
    ("seq_sum_k1", "0.5_2.0"),
    ("seq_sum_k1", "0.2_1.5"),
    ("seq_mean_k1", "0.9_1.3"),
    ("seq_mean_k1", "0.99_1.05"),
    ("token_k2", 0.1),
    ("token_k3", "0.08"),
    ("seq_sum_k2", 0.9),
    ("seq_sum_k3", 0.9),
    ("seq_mean_k2", 0.12),
    ("seq_mean_k3", 0.12),
    ("seq_max_k2", 0.5),
    ("seq_max_k3", 0.5),
]


def both_bounds(threshold: str | float) -> tuple[float, float]:
    lower, _, upper = str(threshold).rpartition("_")
    return float(lower) if lower else 1 / float(upper), float(upper)


@pytest.mark.parametrize(("option", "threshold"), NEW_RULES)
@pytest.mark.parametrize("bypass", [False, True])
def test_verl_rules_accept_what_they_accept_there(option, threshold, bypass):
    config, _ = from_verl({"rollout_rs": option, "rollout_rs_threshold": threshold, "bypass_mode": bypass})
    log_ratio_SL, mask_SL = random_rows(seed=1)
    keep_SL = verl_new_keep(log_ratio_SL, mask_SL, option, *both_bounds(threshold))
    assert_divides(keep_SL, mask_SL)
    assert_same_set(config, log_ratio_SL, mask_SL, keep_SL)


def test_bounds_of_k1_act_on_the_inverse_ratio():
    """By hand: "0.5_1.25" keeps 0.8 <= rho <= 2, where the same numbers of the older rule keep 0.5 <= rho <=
    1.25."""
    new, _ = from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.25"})
    old, _ = from_verl(
        {"rollout_rs": "token", "rollout_rs_threshold": 1.25, "rollout_rs_threshold_lower": 0.5}
    )
    assert new.reject == (RatioRule(level="token", lower=0.8, upper=2.0),)
    assert old.reject == (RatioRule(level="token", lower=0.5, upper=1.25),)
    log_ratio_SL, mask_SL = (
        torch.tensor([[0.6, 1.0, 1.6]], dtype=torch.float64).log(),
        torch.ones(1, 3, dtype=torch.bool),
    )
    assert ours(new, log_ratio_SL, mask_SL)[0].tolist() == [[False, True, True]]
    assert ours(old, log_ratio_SL, mask_SL)[0].tolist() == [[True, True, False]]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["token_k1", "seq_sum_k1", "seq_mean_k1"]),
    st.floats(0.05, 5.0),
    st.floats(0.05, 5.0),
    st.integers(0, 10**6),
)
def test_any_bounds_of_k1(option, lower, upper, seed):
    assume(lower <= upper)
    config, _ = from_verl({"rollout_rs": option, "rollout_rs_threshold": f"{lower!r}_{upper!r}"})
    log_ratio_SL, mask_SL = random_rows(seed, num_sequences=12)
    assert_same_set(config, log_ratio_SL, mask_SL, verl_new_keep(log_ratio_SL, mask_SL, option, lower, upper))


@pytest.mark.parametrize(
    ("rules", "thresholds"),
    [
        ("token_k1,seq_max_k2", "0.6_1.6,0.5"),
        (" token_k1 , seq_max_k2 ", " 0.6_1.6 , 0.5 "),
        (["token_k1", "seq_max_k2"], ["0.6_1.6", 0.5]),
        ("token_k1, seq_max_k2, token_k1", "0.6_1.6, 0.5"),
    ],
)
def test_several_verl_rules_must_all_pass(rules, thresholds):
    config, _ = from_verl({"rollout_rs": rules, "rollout_rs_threshold": thresholds})
    log_ratio_SL, mask_SL = random_rows(seed=2)
    one = verl_new_keep(log_ratio_SL, mask_SL, "token_k1", 0.6, 1.6)
    two = verl_new_keep(log_ratio_SL, mask_SL, "seq_max_k2", None, 0.5)
    assert_divides(one & ~two, mask_SL)
    assert_same_set(config, log_ratio_SL, mask_SL, one & two)


def test_one_verl_threshold_for_all_rules():
    config, _ = from_verl({"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": 0.3})
    assert config.reject == (
        DivergenceRule(rule="k2", reduce="token", upper=0.3),
        DivergenceRule(rule="k3", reduce="mean", upper=0.3),
    )


@pytest.mark.parametrize(
    ("level", "upper", "lower"),
    [
        ("token", 2.0, None),
        ("token", 1.3, 0.2),
        ("sequence", 2.0, None),
        ("sequence", 3.0, 0.9),
        ("geometric", 1.1, None),
        ("geometric", 1.3, 0.0),
    ],
)
def test_verl_rules_of_november_2025(level, upper, lower):
    config, _ = from_verl(
        {"rollout_rs": level, "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": lower}
    )
    log_ratio_SL, mask_SL = random_rows(seed=3)
    keep_SL = ratio_keep(log_ratio_SL, mask_SL, level, 1 / upper if lower is None else lower, upper)
    assert_divides(keep_SL, mask_SL)
    assert_same_set(config, log_ratio_SL, mask_SL, keep_SL)


def test_verl_veto_stands_beside_rules_and_weights():
    block = {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.3,
        "rollout_token_veto_threshold": 0.6,
        "rollout_is": "token",
    }
    config, _ = from_verl(block)
    log_ratio_SL, mask_SL = random_rows(seed=4)
    veto_SL, rule_SL = (
        veto_keep(log_ratio_SL, mask_SL, 0.6),
        ratio_keep(log_ratio_SL, mask_SL, "geometric", 1 / 1.3, 1.3),
    )
    assert_divides(rule_SL & ~veto_SL, mask_SL)
    assert_same_set(config, log_ratio_SL, mask_SL, veto_SL & rule_SL)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("threshold", [2.0, "1.5", "0.5_2.0"])
def test_verl_weights(level, normalise, threshold):
    """Truncated or, with two bounds, zero outside of them (IcePop); normalised over tokens, or over
    sequences."""
    config, _ = from_verl(
        {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalise}
    )
    log_ratio_SL, mask_SL = random_rows(seed=5)
    raw = raw_weight(log_ratio_SL, mask_SL, level)
    _, upper = both_bounds(threshold)
    expected = (
        torch.where((raw >= 0.5) & (raw <= 2.0), raw, 0.0) if "_" in str(threshold) else raw.clamp(max=upper)
    )
    assert not torch.equal(expected, raw)
    if normalise:
        expected = expected / (
            expected[mask_SL].mean() if level == "token" else means(expected, mask_SL)[:, 0].mean()
        )
    torch.testing.assert_close(ours(config, log_ratio_SL, mask_SL)[1], expected * mask_SL, rtol=1e-12, atol=0)


def test_verl_loss_and_mode():
    def of(**block):
        config, _ = from_verl(block)
        return config.mode, config.loss, config.weight.level

    assert of(rollout_is="token") == ("decoupled", "objective", "token")
    assert of(rollout_is="token", bypass_mode=False, loss_type="ppo_clip", use_policy_gradient=False) == (
        "decoupled",
        "objective",
        "token",
    )
    assert of(rollout_is="token", bypass_mode=True) == ("bypass", "objective", "none")
    assert of(rollout_is="token", bypass_mode=True, loss_type="ppo_clip") == ("bypass", "objective", "none")
    assert of(rollout_is="token", bypass_mode=True, loss_type="reinforce") == (
        "bypass",
        "policy_gradient",
        "token",
    )
    assert of(rollout_is="sequence", bypass_mode=True, use_policy_gradient=True) == (
        "bypass",
        "policy_gradient",
        "sequence",
    )
    assert of(bypass_mode=True, use_policy_gradient=True) == ("bypass", "policy_gradient", "none")


def test_an_empty_verl_block_measures_only():
    config, notes = from_verl({})
    assert config == PRESETS["disabled"]
    assert notes == ["rollout_is is left out -> weight: {level: none}, the default of verl's YAML"]


NOVEMBER = {
    "decoupled_token_is": {"rollout_is": "token"},
    "decoupled_seq_is": {"rollout_is": "sequence"},
    "decoupled_seq_is_rs": {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 2.0},
    "decoupled_geo_rs": {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.001,
        "rollout_token_veto_threshold": 1e-4,
    },
    "ppo_is_bypass": {"rollout_is": "token", "bypass_mode": True},
    "pg_rs": {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.001,
        "rollout_token_veto_threshold": 1e-4,
        "bypass_mode": True,
        "use_policy_gradient": True,
    },
    "pg_is": {"rollout_is": "sequence", "bypass_mode": True, "use_policy_gradient": True},
    "disabled": {"rollout_is": None, "rollout_rs": None},
    "decoupled_k3_rs_token_is": {
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.01,
    },
    "pg_token_icepop": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
        "bypass_mode": True,
        "loss_type": "reinforce",
    },
}


@pytest.mark.parametrize("name", NOVEMBER)
def test_presets_of_verl_are_those_of_the_same_name(name):
    assert from_verl(NOVEMBER[name])[0] == PRESETS[name]


def test_notes_say_how_each_verl_key_was_understood():
    _, notes = from_verl(
        {
            "rollout_is": "token",
            "rollout_is_threshold": 3.0,
            "rollout_rs": "seq_mean_k1,token_k3",
            "rollout_rs_threshold": "0.8_2.0,0.5",
            "rollout_token_veto_threshold": 1e-4,
            "bypass_mode": False,
            "loss_type": "ppo_clip",
        }
    )
    assert notes == [
        "bypass_mode: false -> mode: decoupled",
        "loss_type: ppo_clip -> no effect: bypass_mode is false, so the loss is the run's objective",
        "rollout_is: token, rollout_is_threshold: 3.0 -> weight: {level: token, bound: truncate, upper: 3.0}",
        "rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.8_2.0 -> reject: {rule: ratio, level: geometric, upper: 1.25, lower: 0.5} "
        "(verl bounds 1 / rho there, 0.8 <= 1 / rho <= 2.0; the same set, with bounds on rho)",
        "rollout_rs: token_k3, rollout_rs_threshold: '0.5' -> reject: {rule: k3, reduce: token, upper: 0.5}",
        "rollout_token_veto_threshold: 0.0001 -> veto: 0.0001",
    ]


@pytest.mark.parametrize(
    ("block", "note"),
    [
        (
            {"rollout_is": None, "rollout_is_threshold": 2.0},
            "rollout_is_threshold: 2.0 -> no effect: rollout_is is null",
        ),
        (
            {"rollout_is": None, "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize: true -> no effect: rollout_is is null",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": None},
            "weight: {level: none}, since verl has no weights without a threshold",
        ),
        (
            {"rollout_rs": None, "rollout_rs_threshold": 2.0},
            "rollout_rs_threshold: 2.0 -> no effect: rollout_rs is null",
        ),
        (
            {"rollout_is": "token", "bypass_mode": True},
            "rollout_is: token -> no effect: in bypass mode with PPO's loss",
        ),
        ({"bypass_mode": True, "rollout_token_veto_threshold": 1e-4}, "verl of November 2025 leaves it out"),
        (
            {"bypass_mode": True, "rollout_rs": ["token"], "rollout_rs_threshold": 2.0},
            "verl of November 2025 leaves it out",
        ),
        (
            {"bypass_mode": True, "use_policy_gradient": True},
            "use_policy_gradient: true -> loss: policy_gradient",
        ),
        (
            {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            "for that set denominator: all",
        ),
    ],
)
def test_what_has_no_effect_is_said(block, note):
    _, notes = from_verl(block)
    assert any(note in line for line in notes), notes


def every_key_noted(block: dict, notes: list[str]) -> bool:
    return all(
        any(f"{key}: " in note for note in notes)
        for key, value in block.items()
        if value not in (None, False)
    )


@settings(deadline=None, max_examples=200)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rollout_is": st.sampled_from([None, "token", "sequence"]),
            "rollout_is_threshold": st.sampled_from([None, 2.0, "0.5_5.0"]),
            "rollout_is_batch_normalize": st.booleans(),
            "rollout_rs": st.sampled_from(
                [None, "token", "geometric", "token_k1", "seq_mean_k3", "token_k1,seq_sum_k1"]
            ),
            "rollout_rs_threshold": st.sampled_from([None, 2.0, 1.001, "0.5_2.0"]),
            "rollout_rs_threshold_lower": st.sampled_from([None, 0.5]),
            "rollout_token_veto_threshold": st.sampled_from([None, 1e-4]),
            "bypass_mode": st.booleans(),
            "loss_type": st.sampled_from(["ppo_clip", "reinforce"]),
            "use_policy_gradient": st.booleans(),
        },
    )
)
def test_no_verl_key_is_dropped_in_silence(block):
    try:
        _, notes = from_verl(block)
    except ConfigError as error:
        assert {problem.field for problem in error.problems} <= set(VERL_KEYS)
    else:
        assert every_key_noted(block, notes), notes


# -------------------------------------------------------------------------------------------------------------------------
# ROLL


def roll_weight(
    log_ratio_SL: Tensor, mask_SL: Tensor, level: str | None, lower: float, upper: float
) -> Tensor:
    return (
        torch.ones_like(log_ratio_SL)
        if level is None
        else raw_weight(log_ratio_SL, mask_SL, level).clamp(lower, upper)
    )


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 2.0), (0.0, 1.2), (0.7, 1.5)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_roll_weights(level, lower, upper):
    block = {
        "infer_correction": True,
        "infer_is_mode": level,
        "infer_is_threshold_min": lower,
        "infer_is_threshold_max": upper,
    }
    config, _ = from_roll(block)
    log_ratio_SL, mask_SL = random_rows(seed=6)
    expected = roll_weight(log_ratio_SL, mask_SL, level, lower, upper)
    torch.testing.assert_close(ours(config, log_ratio_SL, mask_SL)[1], expected * mask_SL, rtol=1e-12, atol=0)
    assert config.mode == "decoupled" and config.reject == () and config.veto is None


@pytest.mark.parametrize("off", [None, False, "none", "None", ""])
def test_roll_without_weights(off):
    config, _ = from_roll({"infer_correction": True, "infer_is_mode": off, "enable_seq_reject": off})
    assert config == PRESETS["disabled"]


@pytest.mark.parametrize(
    "extra",
    [
        {"enable_token_reject": True},
        {
            "enable_token_reject": True,
            "infer_token_mask_threshold_min": 0.6,
            "infer_token_mask_threshold_max": 1.3,
        },
        {"enable_seq_reject": "sequence"},
        {
            "enable_seq_reject": "sequence",
            "infer_seq_mask_threshold_min": 0.5,
            "infer_seq_mask_threshold_max": 1.5,
        },
        {
            "enable_seq_reject": "geometric",
            "infer_seq_mask_threshold_min": 0.9,
            "infer_seq_mask_threshold_max": 1.2,
        },
        {"enable_catastrophic_reject": True, "infer_catastrophic_threshold": 0.3},
        {
            "enable_token_reject": True,
            "enable_catastrophic_reject": True,
            "infer_catastrophic_threshold": 0.25,
            "enable_seq_reject": "geometric",
            "infer_seq_mask_threshold_min": 0.8,
            "infer_seq_mask_threshold_max": 1.3,
        },
    ],
)
def test_roll_rejects_what_it_rejects_there(extra):
    config, _ = from_roll({"infer_correction": True} | extra)
    defaults = {
        "infer_token_mask_threshold_min": 0.0,
        "infer_token_mask_threshold_max": 2.0,
        "infer_catastrophic_threshold": 1e-4,
        "infer_seq_mask_threshold_min": 0.1,
        "infer_seq_mask_threshold_max": 10.0,
    }
    said = defaults | extra
    log_ratio_SL, mask_SL = random_rows(seed=7)
    log_ratio_SL = log_ratio_SL * 1.5
    keep_SL = torch.ones_like(mask_SL)
    if "enable_token_reject" in extra:
        bounds = said["infer_token_mask_threshold_min"], said["infer_token_mask_threshold_max"]
        keep_SL &= ratio_keep(log_ratio_SL, mask_SL, "token", *bounds)
    if "enable_catastrophic_reject" in extra:
        keep_SL &= veto_keep(log_ratio_SL, mask_SL, said["infer_catastrophic_threshold"])
    if "enable_seq_reject" in extra:
        bounds = said["infer_seq_mask_threshold_min"], said["infer_seq_mask_threshold_max"]
        keep_SL &= ratio_keep(log_ratio_SL, mask_SL, extra["enable_seq_reject"], *bounds)
    assert_divides(keep_SL, mask_SL)
    assert_same_set(config, log_ratio_SL, mask_SL, keep_SL)


def test_roll_defaults_are_those_of_its_documentation():
    config, notes = from_roll(
        {"infer_correction": True, "enable_token_reject": True, "enable_catastrophic_reject": True}
    )
    assert config == CorrectionConfig(
        weight=ImportanceWeight(level="token", upper=2.0),
        reject=(RatioRule(level="token", lower=0.0, upper=2.0),),
        veto=1e-4,
    )
    assert any("infer_is_mode is left out -> token" in note for note in notes)
    sequence, _ = from_roll(
        {"infer_correction": True, "infer_is_mode": "none", "enable_seq_reject": "sequence"}
    )
    assert sequence == CorrectionConfig(
        weight=NoWeight(), reject=(RatioRule(level="sequence", lower=0.1, upper=10.0),)
    )


def test_roll_switched_off():
    for block, said in [
        ({}, "left out"),
        ({"infer_correction": False, "infer_is_mode": "token"}, "infer_correction: false"),
    ]:
        config, (note,) = from_roll(block)
        assert config == PRESETS["disabled"]
        assert said in note and "nothing is corrected, only measured" in note


def test_notes_say_how_each_roll_key_was_understood():
    _, notes = from_roll(
        {
            "infer_correction": True,
            "infer_is_mode": "token",
            "infer_is_threshold_min": 0.0,
            "infer_is_threshold_max": 2.0,
            "enable_token_reject": True,
            "infer_token_mask_threshold_min": 0.0,
            "infer_token_mask_threshold_max": 2.0,
            "enable_catastrophic_reject": False,
            "infer_catastrophic_threshold": 1e-4,
            "enable_seq_reject": "sequence",
            "infer_seq_mask_threshold_min": 0.1,
            "infer_seq_mask_threshold_max": 10,
        }
    )
    assert notes == [
        "infer_correction: true -> mode: decoupled",
        "infer_is_mode: token, infer_is_threshold_min: 0.0, infer_is_threshold_max: 2.0 -> "
        "weight: {level: token, bound: truncate, upper: 2.0}",
        "enable_token_reject: true, infer_token_mask_threshold_min: 0.0, infer_token_mask_threshold_max: 2.0 -> "
        "reject: {rule: ratio, level: token, upper: 2.0, lower: 0.0}",
        "enable_seq_reject: sequence, infer_seq_mask_threshold_min: 0.1, infer_seq_mask_threshold_max: 10 -> "
        "reject: {rule: ratio, level: sequence, upper: 10.0, lower: 0.1}",
        "infer_catastrophic_threshold: 0.0001 -> no effect: enable_catastrophic_reject is off",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# refusals

VERL_ERRORS = [
    # block, field, value, in the error, in the fix
    ({"rollout_iss": "token"}, "rollout_iss", "token", "unknown key", "did you mean `rollout_is`?"),
    ({"zzz": 1}, "zzz", "1", "unknown key", "keys of this block: rollout_is, rollout_is_threshold"),
    (
        {"rollout_is": "geometric"},
        "rollout_is",
        "geometric",
        "not one of the choices",
        "choices: token, sequence",
    ),
    ({"rollout_is": True}, "rollout_is", "true", "not one of the choices", "choices: token, sequence"),
    (
        {"rollout_is": "token", "rollout_is_threshold": 0},
        "rollout_is_threshold",
        "0",
        "neither a number above 0",
        "lower first",
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": "a_2"},
        "rollout_is_threshold",
        "a_2",
        "neither a number",
        "lower first",
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": "1_2_3"},
        "rollout_is_threshold",
        "'1_2_3'",
        "nor two of them",
        "lower first",
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": True},
        "rollout_is_threshold",
        "true",
        "neither a number",
        "lower first",
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": [2.0]},
        "rollout_is_threshold",
        "[2.0]",
        "neither a number",
        "lower first",
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": math.inf},
        "rollout_is_threshold",
        ".inf",
        "neither a number",
        "lower first",
    ),
    (
        {"rollout_is_threshold": "5.0_0.5"},
        "rollout_is_threshold",
        "5.0_0.5",
        "lower bound 5.0 is above the upper bound 0.5",
        "correct",
    ),
    (
        {"rollout_is_batch_normalize": "yes"},
        "rollout_is_batch_normalize",
        "yes",
        "must be true or false",
        "without quotes",
    ),
    ({"bypass_mode": 1}, "bypass_mode", "1", "must be true or false", "without quotes"),
    (
        {"loss_type": "grpo", "bypass_mode": True},
        "loss_type",
        "grpo",
        "not one of the choices",
        "choices: ppo_clip, reinforce",
    ),
    ({"loss_type": "reinforce"}, "loss_type", "reinforce", "only in bypass mode", "set bypass_mode: true"),
    (
        {"use_policy_gradient": True},
        "use_policy_gradient",
        "true",
        "only in bypass mode",
        "objective.type: policy_gradient",
    ),
    (
        {"use_policy_gradient": True, "loss_type": "ppo_clip", "bypass_mode": True},
        "use_policy_gradient",
        "true",
        "contradicts loss_type: ppo_clip",
        "keep one",
    ),
    (
        {
            "rollout_is": "token",
            "rollout_is_batch_normalize": True,
            "bypass_mode": True,
            "loss_type": "reinforce",
        },
        "rollout_is_batch_normalize",
        "true",
        "its mean over the step is unknown",
        "set it to false",
    ),
    (
        {"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0},
        "rollout_rs",
        "token_k4",
        "token_k4 is not a rule",
        "did you mean",
    ),
    (
        {"rollout_rs": "zzz", "rollout_rs_threshold": 2.0},
        "rollout_rs",
        "zzz",
        "zzz is not a rule",
        "rules: token_k1, seq_sum_k1",
    ),
    (
        {"rollout_rs": "token,seq_mean_k3", "rollout_rs_threshold": 2.0},
        "rollout_rs",
        "token,seq_mean_k3",
        "token is not a rule",
        "token_k",
    ),
    ({"rollout_rs": "token_k1"}, "rollout_rs_threshold", "(not set)", "needs a threshold", "two bounds"),
    ({"rollout_rs": "sequence"}, "rollout_rs_threshold", "(not set)", "needs a threshold", "without quotes"),
    (
        {"rollout_rs": "geometric", "rollout_rs_threshold": "0.999_1.001"},
        "rollout_rs_threshold",
        "0.999_1.001",
        "must be a number for rollout_rs: geometric",
        "the lower one is rollout_rs_threshold_lower",
    ),
    (
        {"rollout_rs": "token", "rollout_rs_threshold": -2.0},
        "rollout_rs_threshold",
        "-2.0",
        "must be a number",
        "above 0",
    ),
    (
        {"rollout_rs": "token", "rollout_rs_threshold": 0.5},
        "rollout_rs_threshold",
        "0.5",
        "2.0 is above the upper bound 0.5",
        "correct",
    ),
    (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": [0.5, 2.0]},
        "rollout_rs_threshold",
        "[0.5, 2.0]",
        "2 thresholds, but the number of rules is 1",
        '"0.5_2.0"',
    ),
    (
        {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2.0"},
        "rollout_rs_threshold",
        "0.5_2.0",
        "only an upper bound",
        "2.0",
    ),
    (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"},
        "rollout_rs_threshold",
        "2.0_0.5",
        "nothing could",
        "correct",
    ),
    (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5},
        "rollout_rs_threshold_lower",
        "0.5",
        "goes only with the older rules (token, sequence, geometric)",
        '"0.5_2.0"',
    ),
    (
        {"rollout_token_veto_threshold": 1.0},
        "rollout_token_veto_threshold",
        "1.0",
        "would reject what the two policies agree on",
        "1e-4",
    ),
    ({"rollout_token_veto_threshold": 0}, "rollout_token_veto_threshold", "0", "must be a number", "above 0"),
]

ROLL_ERRORS = [
    ({"infer_is_modes": "token"}, "infer_is_modes", "token", "unknown key", "did you mean `infer_is_mode`?"),
    ({"infer_correction": "yes"}, "infer_correction", "yes", "must be true or false", "without quotes"),
    (
        {"infer_is_mode": "geometric"},
        "infer_is_mode",
        "geometric",
        "not one of the choices",
        "choices: token, sequence, none",
    ),
    (
        {"infer_is_threshold_max": "2.0"},
        "infer_is_threshold_max",
        "'2.0'",
        "must be a number",
        "without quotes",
    ),
    ({"infer_is_threshold_max": None}, "infer_is_threshold_max", "null", "must be a number", "above 0"),
    ({"infer_is_threshold_min": -1}, "infer_is_threshold_min", "-1", "must be a number", "of at least 0"),
    (
        {"infer_is_threshold_min": 3.0},
        "infer_is_threshold_min",
        "3.0",
        "3.0 is above the upper bound 2.0",
        "correct",
    ),
    (
        {"enable_seq_reject": True},
        "enable_seq_reject",
        "true",
        "not one of the choices",
        "choices: sequence, geometric, none",
    ),
    (
        {"enable_token_reject": True, "infer_token_mask_threshold_min": 5.0},
        "infer_token_mask_threshold_min",
        "5.0",
        "5.0 is above the upper bound 2.0",
        "correct",
    ),
    ({"infer_catastrophic_threshold": 2}, "infer_catastrophic_threshold", "2", "agree on", "1e-4 to 1e-6"),
]


def the_problem(error: ConfigError) -> Problem:
    (problem,) = error.problems
    assert all(
        part and part in str(error)
        for part in (problem.where, problem.field, problem.value, problem.error, problem.fix)
    )
    return problem


CASES = [("verl", from_verl, *case) for case in VERL_ERRORS] + [
    ("roll", from_roll, *case) for case in ROLL_ERRORS
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    correction = "correction: {weight: {bound: clip, lower: 0.1, upper: 9.0}, veto: 1e-6}"
    write("base.yaml", f"model: {{path: model}}\ntask: {{type: countdown}}\n{correction}\n")
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("system", "read", "block", "field", "value", "error", "fix"),
    CASES,
    ids=[f"{c[0]}-{c[2]}" for c in CASES],
)
def test_what_cannot_be_honoured_is_refused(folder, system, read, block, field, value, error, fix):
    with pytest.raises(ConfigError) as raised:
        read(block)
    problem = the_problem(raised.value)
    assert (problem.field, problem.value) == (field, value)
    assert (error in problem.error or error in problem.fix) and fix in problem.fix

    lines = "".join(f"    {key}: {dump(given)}" for key, given in block.items())
    path = write("top.yaml", f"extends: base.yaml\ncorrection:\n  {system}:\n{lines}")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    found = the_problem(raised.value)
    line = 4 + list(block).index(field) if field in block else 3
    assert (found.where, found.field, found.value) == (
        f"top.yaml:{line}",
        f"correction.{system}.{field}",
        value,
    )
    assert (found.error, found.fix) == (problem.error, problem.fix)


def dump(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n")


def test_all_problems_of_a_block_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        from_verl(
            {
                "rollout_iss": "token",
                "bypass_mode": "yes",
                "rollout_rs": "zzz",
                "rollout_token_veto_threshold": 3,
            }
        )
    assert [p.field for p in raised.value.problems] == [
        "rollout_iss",
        "bypass_mode",
        "rollout_rs",
        "rollout_token_veto_threshold",
    ]


# ------------------------------------------------------------------------------------------------------------------
# in a config


def test_a_block_in_a_config(folder):
    block = "correction: {verl: {rollout_is: token, rollout_rs: token_k1, rollout_rs_threshold: 0.5_1.25}, veto: 1e-5}\n"
    path = write("top.yaml", f"extends: base.yaml\n{block}")
    notes: list[str] = []
    config = parse_config(path).validated(notes=notes)
    expected = CorrectionConfig(
        weight=ImportanceWeight(upper=2.0),
        reject=(RatioRule(level="token", lower=0.8, upper=2.0),),
        veto=1e-5,
    )
    assert config.correction == expected  # nothing of base.yaml is left
    assert (
        notes[0]
        == "correction.verl (top.yaml:2): rollout_is: token -> weight: {level: token, bound: truncate, upper: 2.0}"
    )
    assert "verl bounds 1 / rho there" in notes[1] and len(notes) == 2
    assert load_config(write("resolved.yaml", resolved_yaml(config))) == config
    assert load_config(path, ["correction.weight.upper=3"]).correction.weight == ImportanceWeight(upper=3.0)
    roll = parse_config("base.yaml", ["correction={roll: {infer_correction: true}}"]).validated(notes=notes)
    assert roll.correction == PRESETS["tis"]
    assert "correction.roll (command line): infer_correction: true -> mode: decoupled" in notes


def test_a_block_over_a_block_of_the_same_system_is_read_together_with_it(folder):
    path = write(
        "top.yaml",
        "extends: base.yaml\ncorrection: {verl: {rollout_is: sequence, rollout_is_threshold: 3.0}}\n",
    )
    weight = load_config(path, ["correction.verl.rollout_is_threshold=5.0"]).correction.weight
    assert weight == ImportanceWeight(level="sequence", upper=5.0)
    assert load_config(path, ["correction.roll.infer_correction=true"]).correction == PRESETS["tis"]
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["correction.verl.bypass_mode=yes"])
    assert the_problem(raised.value).where == "command line"


def test_notes_are_of_the_block_that_the_correction_starts_from(folder):
    path = write("top.yaml", "extends: base.yaml\ncorrection: {verl: {rollout_is: sequence}}\n")
    notes: list[str] = []
    parse_config(path, ["correction=pg_is"]).validated(notes=notes)
    assert notes == []


@pytest.mark.parametrize("given", ["3", "token", "null", "[token]"])
def test_a_block_that_is_none(folder, given):
    with pytest.raises(ConfigError) as raised:
        load_config(write("top.yaml", f"extends: base.yaml\ncorrection: {{verl: {given}}}\n"))
    problem = the_problem(raised.value)
    assert (problem.where, problem.field, problem.value) == ("top.yaml:2", "correction.verl", given)
    assert problem.error == "must be a block of keys" and "correction: {verl: {...}}" in problem.fix


@pytest.mark.parametrize(
    ("override", "home"),
    [
        ("rollout_correction={rollout_is: token}", "`correction: {verl: {...}}`"),
        ("correction.rollout_is=token", "`correction: {verl: {...}}`"),
        ("infer_correction=true", "`correction: {roll: {...}}`"),
    ],
)
def test_keys_of_other_systems_among_ours(folder, override, home):
    with pytest.raises(ConfigError) as raised:
        load_config("base.yaml", [override])
    problem = the_problem(raised.value)
    assert problem.error == "unknown key" and home in problem.fix


def test_only_keys_of_other_systems_are_foreign():
    assert all(answer([key], None) for key in ("rollout_correction", *VERL_KEYS, *ROLL_KEYS))
    ours_too = {"mode", "loss", "weight", "reject", "veto", "denominator", "rollout", "correction"}
    assert not any(answer([key], None) for key in ours_too)
