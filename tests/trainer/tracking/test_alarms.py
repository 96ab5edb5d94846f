"""Alarms: every level fires on its side and not at it, can be moved and turned off, and reads metrics that
exist."""

import math
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.presets import PRESETS
from configs.schema.alarms import AlarmsConfig
from tests.support.packed_batches import at_valid, random_batch
from trainer.algorithm.mismatch import mismatch_metrics, rejection_metrics, weight_metrics
from trainer.algorithm.segments import count_per_sequence
from trainer.ranks.metrics import values
from trainer.tracking.alarms import check_alarms

HEALTHY = {
    "mismatch/kept_fraction": 0.99,
    "advantage/std": 0.8,
    "policy/first_ratio_max": 1.0,
    "policy/first_ratio_min": 1.0,
    "mismatch/weight_mean": 1.01,
    "mismatch/weight_normaliser": 0.99,
    "mismatch/ess": 0.97,
    "mismatch/k1": -1e-4,
    "mismatch/k3": 1e-4,
    "mismatch/chi2_token": 2e-4,
    "mismatch/response_abs_prob_over": 0.0,
    "mismatch/rejected/total/tokens": 0.01,
    "mismatch/rejected/total/sequences": 0.01,
    "reward/failed_fraction": 0.0,
    "eval/accuracy_fall": 2.5,
}
FIRING = [
    ("kept_min", "mismatch/kept_fraction", 0.0),
    ("advantage_std_min", "advantage/std", 0.0),
    ("first_ratio_tolerance", "policy/first_ratio_max", 1.01),
    ("first_ratio_tolerance", "policy/first_ratio_min", 0.99),
    ("weight_mean_min", "mismatch/weight_mean", 0.49),
    ("weight_mean_min", "mismatch/weight_normaliser", 0.49),
    ("weight_mean_max", "mismatch/weight_mean", 2.1),
    ("weight_mean_max", "mismatch/weight_normaliser", 2.1),
    ("ess_min", "mismatch/ess", 0.29),
    ("kl_max", "mismatch/k1", 0.11),
    ("kl_max", "mismatch/k1", -0.11),
    ("kl_max", "mismatch/k3", 0.11),
    ("chi2_token_max", "mismatch/chi2_token", 1.1),
    ("response_abs_prob_over_max", "mismatch/response_abs_prob_over", 0.03),
    ("rejected_max", "mismatch/rejected/total/tokens", 0.51),
    ("rejected_max", "mismatch/rejected/total/sequences", 0.51),
    ("reward_failed_max", "reward/failed_fraction", 0.06),
    ("reward_failed_max", "eval/failed_fraction", 0.06),
    ("reward_failed_max", "eval/greedy/failed_fraction", 0.06),
    ("reward_failed_max", "eval/set/hard/failed_fraction", 0.06),
    ("accuracy_fall_max", "eval/accuracy_fall", 4.1),
]


def test_a_healthy_step_and_an_empty_one_raise_nothing():
    assert check_alarms(HEALTHY, AlarmsConfig()) == []
    assert check_alarms({}, AlarmsConfig()) == []


@pytest.mark.parametrize(("name", "metric", "value"), FIRING)
def test_each_level_fires_alone_and_can_be_turned_off(name, metric, value):
    (alarm,) = check_alarms(HEALTHY | {metric: value}, AlarmsConfig())
    level = getattr(AlarmsConfig(), name)
    assert (alarm.name, alarm.value) == (name, value)
    assert alarm.message.startswith(f"{metric} is {value:.4g} (alarms.{name}: {level:g})")
    assert "Usual cause: " in alarm.message and "Try: " in alarm.message
    assert check_alarms(HEALTHY | {metric: value}, AlarmsConfig(**{name: None})) == []


@pytest.mark.parametrize(("name", "metric", "value"), FIRING)
def test_the_worst_value_is_the_farthest_from_a_healthy_one(name, metric, value):
    """By which the report chooses the step that it shows; one that is no number is worse than all."""
    beyond = 2 * value - HEALTHY.get(metric, 0.0)
    badness = [
        alarm.badness
        for one in (value, beyond, math.nan)
        for alarm in check_alarms(HEALTHY | {metric: one}, AlarmsConfig())
        if alarm.name == name
    ]
    assert badness[0] < badness[1] < badness[2] == math.inf


def test_every_level_is_tested():
    assert {name for name, _, _ in FIRING} == set(AlarmsConfig.model_fields)


def test_a_value_at_its_level_is_healthy_and_levels_can_be_moved():
    edges = {
        "mismatch/weight_mean": 2.0, "mismatch/weight_normaliser": 0.5, "mismatch/ess": 0.3, "mismatch/k1": -0.1, "mismatch/k3": 0.1,
        "mismatch/chi2_token": 1.0, "mismatch/response_abs_prob_over": 0.02, "mismatch/rejected/total/tokens": 0.5,
    }  # fmt: skip
    assert check_alarms(edges, AlarmsConfig()) == []
    moved = AlarmsConfig(weight_mean_max=1.9, kl_max=0.05, kept_min=0.5)
    assert [a.name for a in check_alarms(edges | {"mismatch/kept_fraction": 0.5}, moved)] == [
        "kept_min",
        "weight_mean_max",
        "kl_max",
    ]


@pytest.mark.parametrize("metric", HEALTHY)
def test_what_is_not_a_number_is_not_healthy(metric):
    assert check_alarms(HEALTHY | {metric: math.nan}, AlarmsConfig())


def test_the_metrics_that_alarms_read_are_the_ones_that_are_written():
    batch = random_batch([5, 9], seed=0)
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    ratio_T = (batch.old_logprobs_T - batch.rollout_logprobs_T).exp()
    written = values(
        at_valid(mismatch_metrics, batch.old_logprobs_T, batch.rollout_logprobs_T, mask_T, cu_seqlens)
        | at_valid(weight_metrics, ratio_T, ratio_T.clamp(max=2), mask_T, cu_seqlens, upper=2)
        | rejection_metrics({}, *[count_per_sequence(mask_T, cu_seqlens)] * 2)
    )
    elsewhere = {
        "advantage/std",
        "policy/first_ratio_max",
        "policy/first_ratio_min",
        "mismatch/weight_normaliser",
        "reward/failed_fraction",
        "eval/accuracy_fall",
    }
    assert HEALTHY.keys() - written.keys() == elsewhere


def test_a_rollout_of_another_policy_raises_what_it_should():
    batch = random_batch([40] * 20, seed=1)
    other_T = batch.rollout_logprobs_T - torch.linspace(0, 3, 800)
    ratio_T = (other_T - batch.rollout_logprobs_T).exp()
    metrics = values(
        at_valid(mismatch_metrics, other_T, batch.rollout_logprobs_T, batch.response_mask_T, batch.cu_seqlens)
        | at_valid(weight_metrics, ratio_T, ratio_T, batch.response_mask_T, batch.cu_seqlens)
    )
    assert {"weight_mean_min", "kl_max"} <= {alarm.name for alarm in check_alarms(metrics, AlarmsConfig())}


def test_alarms_of_the_gap_tell_what_of_it_is_staleness():
    wide = HEALTHY | {"mismatch/k3": 0.3}
    (plain,) = check_alarms(wide, AlarmsConfig())
    assert "lag" not in plain.message
    (aged,) = check_alarms(wide | {"staleness/mean": 1.5, "staleness/by_lag/le_0/k3": 2e-5}, AlarmsConfig())
    assert (
        aged.message
        == f"{plain.message} Here tokens lag by 1.5 versions on average: k3 of the fresh ones, 2e-05, is the engines' "
        + ("own gap; mismatch/k3, 0.3, has both.")
    )
    (old,) = check_alarms(wide | {"staleness/mean": 2.0}, AlarmsConfig())
    assert old.message.endswith("no token is fresh, so the engines' own gap is not known.")
    (other,) = check_alarms(HEALTHY | {"reward/failed_fraction": 1.0, "staleness/mean": 2.0}, AlarmsConfig())
    assert "lag" not in other.message


@pytest.mark.parametrize(
    "bad", [{"ess_min": 1.5}, {"kl_max": 0}, {"unknown": 1}, {"weight_mean_min": 3.0}, {"rejected_max": -0.1}]
)
def test_impossible_levels_are_refused(bad):
    with pytest.raises(ValidationError):
        AlarmsConfig(**bad)


def test_the_guide_explains_every_alarm_and_every_preset_and_names_no_other():
    guide = (Path(__file__).parents[3] / "trainer" / "README.md").read_text()
    advice = " ".join(
        check_alarms(HEALTHY | {metric: value}, AlarmsConfig())[0].message for _, metric, value in FIRING
    )
    assert {name for name in PRESETS if f"`{name}`" not in guide} == set()
    assert set(
        re.findall(r"\b(?:decoupled|bypass|pg)_[a-z0-9_]+|\b[a-z]+_(?:is|bypass|outliers)\b", advice)
    ) <= set(PRESETS)
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) >= set(AlarmsConfig.model_fields)
