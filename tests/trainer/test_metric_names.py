"""The table of metrics against a step that records all of them: names, reductions, and that none is left over."""

import math
from dataclasses import fields, replace

import pytest
import torch

from configs.schema.alarms import AlarmsConfig
from configs.schema.correction import CorrectionConfig, FunctionWeight, ImportanceWeight, RatioRule
from configs.schema.objective import (
    ClippedObjective,
    EntropyConfig,
    FunctionAdvantage,
    FunctionObjective,
    GaeAdvantage,
    KLConfig,
)
from parallel.engine_base import UpdateResult
from rollout.records import FinishReason, Group
from rollout.sampling.messages import BeforeSelection, EvaluationResult, SamplingStats
from tests.support.packed_batches import random_batch
from tests.support.records import trajectory
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.algorithm.kl_reward import KLInReward
from trainer.algorithm.mismatch import routing_metrics
from trainer.algorithm.policy_loss import policy_loss
from trainer.algorithm.value_loss import value_loss
from trainer.batch.step_batch import StepBatch
from trainer.learner import Update, _optimizer_metrics, skipped_metrics
from trainer.metric_names import METRICS, TIME_PARTS, entry_of, find_entry, known
from trainer.ranks.metrics import Metric, Reduction, merge_metrics, per_minibatch, values
from trainer.ranks.totals import alone
from trainer.report.pictures import Lines, Picture
from trainer.sampling import Sampled
from trainer.step_metrics import (
    StepMetrics,
    evaluation_metrics,
    first_and_sign,
    sampling_metrics,
    step_metrics,
    step_rewards,
    what_came_along,
)
from trainer.tracking.alarms import _Rule, check_alarms
from trainer.tracking.console import Column
from trainer.tracking.held_out import BestAccuracy
from trainer.weight_sync import SyncResult

CORRECTION = CorrectionConfig(
    weight=ImportanceWeight(level="token", bound="clip", normalise=True),
    reject=(RatioRule(level="token", lower=0.1, upper=2.0),),
    veto=1e-4,
)

HERE = "tests.support.own_functions"
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
OWN_OBJECTIVE = FunctionObjective(type="function", function=f"{HERE}:clipped", settings=CLIP)
OWN_ADVANTAGE = FunctionAdvantage(
    type="function", function=f"{HERE}:grpo", settings={"normalize_by_std": True}
)
OWN_CORRECTION = CorrectionConfig(
    weight=FunctionWeight(level="function", function=f"{HERE}:truncate", settings={"upper": 2.0})
)

EVALUATION = EvaluationResult(
    accuracy=0.5, reward_mean=0.5, count=4, length_mean=3.0, truncated_fraction=0.0, accuracy_error=0.1
)

SYNC = SyncResult(version=1, bytes=8, seconds=0.1, max_logprob_gap=1e-6)


def measured_parts() -> tuple[StepBatch, list[dict[str, Metric]], list[dict[str, Metric]]]:
    """A batch of two minibatches, the metrics before its update and those of each of its updates."""
    batch = random_batch([5, 7], seed=0, mask_T=torch.ones(12, dtype=torch.bool))
    lag_T = torch.tensor([0, 1, 2, 0] * 3, dtype=torch.int16)
    batch = batch.with_fields(values_T=torch.linspace(0, 1, 12), sequence_ids_S=torch.arange(2), lag_T=lag_T)
    is_replayed_T = torch.arange(12) % 4 > 0
    batch = batch.with_fields(
        experts_TLK=torch.zeros(12, 2, 1, dtype=torch.uint8), is_replayed_T=is_replayed_T
    )
    ones = torch.ones(12, dtype=torch.int32)
    batch = batch.with_fields(num_kept_T=ones, kept_ids_M=ones)
    step = StepBatch(
        packed=batch, rows=[[[0]], [[1]]], rewards_S=torch.tensor([0.0, 1.0]), group_ids_S=torch.zeros(2)
    )
    penalty_T, kl = KLInReward(KLConfig(coefficient=0.1, place="reward")).penalty(
        batch, num_samples=2, total=alone
    )
    advantages = compute_advantages(
        batch, step.rewards_S, step.group_ids_S, GaeAdvantage(type="gae"), penalty_T=penalty_T
    )
    own = compute_advantages(batch, step.rewards_S, step.group_ids_S, OWN_ADVANTAGE).metrics
    own |= correct(batch, OWN_CORRECTION).metrics
    correction = correct(batch, CORRECTION)
    weights_T = torch.full((12,), 0.1)
    step = step.with_advantages(advantages).with_fields(
        importance_weights_T=weights_T, aggregation_T=weights_T, value_aggregation_T=weights_T
    )
    terms = {
        "objective": ClippedObjective(dual_clip=3.0),
        "kl": KLConfig(coefficient=0.1),
        "entropy": EntropyConfig(),
        "correction": CorrectionConfig(off_policy_mask=0.1),
        "aggregation": "token_mean",
    }
    result = UpdateResult(grad_norm=1.0, lr=1e-3, skipped=False, outputs=[])
    updates = []
    for (micro,) in step.minibatches():
        policy = policy_loss(micro, micro.old_logprobs_T - 0.1, torch.ones(micro.num_tokens), **terms).metrics
        own |= policy_loss(
            micro, micro.old_logprobs_T, torch.ones(micro.num_tokens), **terms | {"objective": OWN_OBJECTIVE}
        ).metrics
        critic = value_loss(micro, micro.values_T, value_clip=0.2)[1]
        routing = routing_metrics([1, 2], 4, is_sparse=[True, False, True])
        steps = _optimizer_metrics("optim", result) | _optimizer_metrics("critic", result)
        steps |= skipped_metrics([micro], [False])
        updates.append(policy | critic | routing | steps)
    own = {name: metric for name, metric in own.items() if name.startswith("own/")}
    return step, [kl, advantages.metrics, correction.metrics, own], updates


def whole_step(**changes) -> StepMetrics:
    step, measured, updates = measured_parts()
    sample = trajectory(
        group_id=0,
        sibling_id=0,
        prompt_id="p",
        token_ids=[1, 2, 3, 4, 5],
        response_mask=[False, True, True, False, True],  # two turns
        rollout_logprobs=[0.0, -1.0, -1.0, 0.0, -1.0],
        token_versions=[0, 0, 0, 0, 0],
        finish_reason=FinishReason.STOP,
        reward=1.0,
        reward_parts={"format": 1.0},
    )
    group = Group(group_id=0, prompt_id="p", trajectories=[sample])
    evaluated = replace(EVALUATION, pass_at={2: 0.7}, greedy=EVALUATION)
    step_of = {
        "sampled": Sampled(
            groups=[group],
            stats=SamplingStats(
                seconds=1.0,
                requests=1,
                retries=0,
                failed_rewards=0,
                before_selection=BeforeSelection.of([group]),
            ),
        ),
        "batch": step,
        "measured": [*measured, step_rewards(step, step.packed.old_logprobs_T, alone)],
        "updates": [Update(metrics=per_minibatch(metrics)) for metrics in updates],
        "sync": SYNC,
        "evaluation": replace(evaluated, sets={"hard": evaluated}, sources={"openai/gsm8k": evaluated}),
        "seconds": dict.fromkeys(("step", *TIME_PARTS), 1.0),
        "mode": "decoupled",
        "group": None,
    }
    return step_metrics(**step_of | changes)


def test_a_step_records_what_the_table_has_and_nothing_else():
    recorded = whole_step().recorded
    recorded |= BestAccuracy([recorded], max_failed=None).fall_to(recorded)
    assert [name for name in recorded if find_entry(name) is None] == []
    assert METRICS.keys() - {entry_of(name).name for name in recorded} == set()


def test_reductions_are_those_of_the_table():
    _, measured, updates = measured_parts()
    merged = [(name, metric) for metrics in (*measured, *updates) for name, metric in metrics.items()]
    assert {n: m.reduction for n, m in merged} == {n: entry_of(n).reduction for n, _ in merged}
    assert {entry.reduction for entry in METRICS.values()} == {*Reduction, None}


def test_a_step_whose_responses_are_all_masked_raises_the_alarm_of_equal_advantages():
    step, (kl, advantages, *others), _ = measured_parts()
    masked = step.packed.with_fields(response_mask_T=torch.zeros(12, dtype=torch.bool))
    of_none = compute_advantages(masked, step.rewards_S, step.group_ids_S, OWN_ADVANTAGE).metrics
    names = [
        {
            alarm.name
            for alarm in check_alarms(whole_step(measured=[kl, of, *others]).recorded, AlarmsConfig())
        }
        for of in (advantages, of_none)
    ]
    assert names[1] - names[0] == {"advantage_std_min"}


def test_losses_are_means_over_minibatches_and_counts_are_sums():
    _, _, updates = measured_parts()
    recorded = whole_step().recorded
    totals = [metrics["loss/total"].value for metrics in updates]
    assert recorded["loss/total"] == pytest.approx(sum(totals) / 2)
    assert recorded["mismatch/experts_differ"] == 3 / 8 and recorded["mismatch/experts_differ/layer_2"] == 0.5
    assert recorded["mismatch/replayed_fraction"] == 0.75 and recorded["policy/skipped_fraction"] == 0
    assert recorded["mismatch/veto/tokens"] == 0 and recorded["optim/skipped"] == 0


def test_norm_and_rate_are_of_the_updates_that_were_done():
    skipped = _optimizer_metrics("optim", UpdateResult(grad_norm=math.inf, lr=0.0, skipped=True, outputs=[]))
    assert values(skipped) == {"optim/skipped": 1}
    done = [
        _optimizer_metrics("optim", UpdateResult(grad_norm=norm, lr=rate, skipped=False, outputs=[]))
        for norm, rate in ((3.0, 0.25), (2.0, 0.75))
    ]
    assert values(merge_metrics([*done, skipped])) == {
        "optim/grad_norm": 3.0, "optim/lr": 0.5, "optim/skipped": 1
    }  # fmt: skip


def test_the_gap_that_may_end_a_run_is_the_steps_own():
    step = whole_step()
    assert step.sampled_gap == (
        step.recorded["staleness/by_lag/le_0/abs_prob_max"],
        step.recorded["staleness/by_lag/le_0/logprob_gap_max"],
    )


def test_so_is_that_of_log_probs_that_only_the_update_has():
    _, (*others, own), updates = measured_parts()
    found = whole_step(
        measured=[*others[:-1], own],
        updates=[Update(metrics=per_minibatch(metrics | others[-1])) for metrics in updates],
    )
    assert found.sampled_gap == whole_step().sampled_gap is not None


def test_tokens_are_counted_by_the_time_of_the_step_and_a_gap_of_zero_is_a_gap():
    seconds = {**dict.fromkeys(TIME_PARTS, 1.0), "step": 2.0}
    found = whole_step(seconds=seconds, sync=replace(SYNC, max_logprob_gap=0.0)).recorded
    assert found["throughput/tokens_per_s"] == 3 / 2 and found["sync/max_logprob_gap"] == 0.0


def test_what_the_sampler_and_an_evaluation_say_is_recorded_under_its_name():
    names = [f.name for f in fields(SamplingStats) if f.type in ("int", "float", int, float)]
    stats = SamplingStats(**{name: 2 + number for number, name in enumerate(names)})
    found = sampling_metrics(stats)
    for name in (n.removeprefix("sampling/") for n in found if n.startswith("sampling/")):
        assert found[f"sampling/{name}"] == getattr(stats, name)
    assert found["reward/failed"] == stats.failed_rewards and "reward/before_selection" not in found
    before = BeforeSelection(reward_mean=0.125, no_signal_fraction=0.75, tokens=9)
    assert (
        found.items()
        < sampling_metrics(replace(stats, before_selection=before)).items()
        >= {
            ("reward/before_selection", 0.125),
            ("groups/no_signal_before_selection", 0.75),
            ("response/tokens_before_selection", 9),
        }
    )
    assert found["reward/failed_fraction"] == stats.failed_rewards / stats.scored
    result = EvaluationResult(accuracy=0.1, reward_mean=0.2, count=3, length_mean=4.0, truncated_fraction=0.5)
    found = evaluation_metrics(replace(result, greedy=replace(result, accuracy=0.6)))
    for name in ("accuracy", "reward_mean", "count", "length_mean", "truncated_fraction"):
        assert found[f"eval/{name}"] == getattr(result, name)
    assert found["eval/greedy/accuracy"] == 0.6 and found["eval/failed_fraction"] == 0
    assert evaluation_metrics(replace(result, failed=1))["eval/failed_fraction"] == 1 / 3
    assert result.accuracy_error is None and "eval/accuracy_error" not in found, "of one problem"


def test_what_a_rank_or_a_step_lacks_is_left_out():
    """Another rank than the first has neither samples nor evaluation; an update of the weights may have failed."""
    found = whole_step(sampled=Sampled(groups=None, stats=None), sync=None, evaluation=None).recorded
    parts = {name.split("/")[0] for name in found}
    assert {"loss", "mismatch", "time"} <= parts
    assert not parts & {"sync", "eval", "sampling", "response", "episode", "groups", "throughput"}
    step, *_ = measured_parts()
    assert step_rewards(step, None, alone) == {}
    without_policy = whole_step(
        updates=[Update(metrics={})], sync=replace(SYNC, max_logprob_gap=None)
    ).recorded
    assert not {"critic/explained_variance", "sync/max_logprob_gap"} & without_policy.keys()


def test_what_came_along_is_counted_on_response_tokens_alone():
    packed = random_batch([5], seed=0, mask_T=torch.tensor([False, True, True, True, True]))
    is_replayed_T, num_kept_T = torch.tensor([True, True, False, False, False]), torch.tensor([9, 1, 2, 3, 4])
    assert what_came_along(packed) == {}
    packed = packed.with_fields(
        experts_TLK=torch.zeros(5, 1, 1, dtype=torch.uint8), is_replayed_T=is_replayed_T,
        num_kept_T=num_kept_T.int(), kept_ids_M=torch.zeros(19, dtype=torch.int32),
    )  # fmt: skip
    assert values(what_came_along(packed)) == {"mismatch/replayed_fraction": 0.25, "mismatch/kept_ids": 2.5}


def test_the_ratio_of_the_first_minibatch_and_the_share_of_negative_estimates():
    updates = [
        Update(metrics={
            "policy/ppo_kl": Metric.quotient(kl, 1),
            "policy/ratio_min": Metric.min(torch.tensor([low])), "policy/ratio_max": Metric.max(torch.tensor([high])),
        })
        for kl, low, high in ((0.0, 1.0, 1.0), (-0.1, 0.5, 1.5), (-0.2, 0.25, 2.0))
    ]  # fmt: skip
    share = {"policy/ppo_kl_negative_fraction": 2 / 3}
    first = {"policy/first_ratio_min": 1.0, "policy/first_ratio_max": 1.0}
    assert first_and_sign(updates, "decoupled") == first | share
    assert first_and_sign(updates, "bypass") == share
    assert first_and_sign([Update(metrics={})], "decoupled") == {}


def test_stars_stand_for_rules_and_parts_and_a_typo_is_told_what_is_near():
    assert known("mismatch/rejected/k3_mean_2/tokens") and known("reward/part/a/b")
    with pytest.raises(ValueError, match=r"no metric is called 'reward/maen'.*or use reward/mean"):
        known("reward/maen")


@pytest.mark.parametrize(
    "make",
    [
        lambda name: Column("title", 7, name, str),
        lambda name: _Rule(name="x", metrics=(name,), healthy=max, wrong="", cause="", advice=""),
        lambda name: Picture(name="x", title="", about="", panels=(Lines(title="", metrics={name: ""}),)),
    ],
)
def test_console_alarms_and_pictures_refuse_an_unknown_name(make):
    make("mismatch/k3")
    with pytest.raises(ValueError, match="no metric is called 'mismatch/k33'"):
        make("mismatch/k33")


def test_a_panel_has_one_unit():
    panel = Lines(title="", metrics={"mismatch/k3": "", "mismatch/abs_prob_max": ""})
    with pytest.raises(ValueError):
        Picture(name="x", title="", about="", panels=(panel,))
