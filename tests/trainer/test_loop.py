"""What the step hands to its parts, and when. The parts are stand-ins that record their calls; interrupted runs with the
real ones are in tests/launch/processes/test_stop.py, numbers of real steps in tests/end_to_end."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from configs.loader import load_config
from configs.schema.objective import KLConfig
from rollout.client import RolloutError
from rollout.sampling.messages import EvaluationResult
from tests.support.packed_batches import random_batch
from trainer import loop, step_clock
from trainer.algorithm.kl_reward import KLInReward
from trainer.loop import Run, train
from trainer.ranks.metrics import values
from trainer.ranks.totals import alone
from trainer.sampling import Sampled

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/countdown_tiny.yaml"
TAKES_S = {
    "next_groups": 1,
    "score": 10,
    "update": 100,
    "drain": 1000,
    "publish": 10_000,
    "evaluate": 100_000,
}
EVALUATED = EvaluationResult(accuracy=0.5, reward_mean=0.5, count=4, length_mean=3.0, truncated_fraction=0.0)


@pytest.fixture
def stepped(monkeypatch):
    """A function that trains, and returns the calls of all parts in their order. Each part takes its ``TAKES_S``."""
    now, calls = [0.0], Mock()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    for name in (
        "correct",
        "compute_advantages",
        "step_rewards",
        "step_metrics",
        "learner_logprobs",
        "farthest_token",
    ):
        monkeypatch.setattr(loop, name, getattr(calls, name))
    batch = Mock(
        name="batch", num_episodes=3, episode_ids_S=torch.tensor([0, 0, 1, 2]), rewards_S=torch.zeros(4)
    )
    for method in ("with_advantages", "with_loss_weights"):
        getattr(batch, method).return_value = batch
    batch.minibatches.return_value = ["first", "second"]
    learner = calls.learner
    learner.version = 0
    learner.receive.return_value = learner.score.return_value = batch
    learner.kl_in_reward.penalty.return_value = ("penalty", "of KL")
    calls.compute_advantages.return_value.metrics = "of advantages"
    calls.recorder.record.return_value = None
    calls.correct.return_value.metrics = "of correction"
    stats = SimpleNamespace(first_failure="KeyError", failed_rewards=1, scored=2)
    calls.sampler.next_groups.return_value = Sampled(groups=["group"], stats=stats)

    def takes(part: Mock, name: str) -> None:
        def pass_time(*unused, **named):
            now[0] += TAKES_S[name]
            learner.version += name == "publish"
            return part.return_value

        part.side_effect = pass_time

    for name in TAKES_S:
        owner = {"publish": calls.weight_sync, "score": learner, "update": learner}.get(name, calls.sampler)
        takes(getattr(owner, name), name)

    def run(
        *overrides: str,
        full: str | None = None,
        kl: KLInReward | None = None,
        evaluated: EvaluationResult = EVALUATED,
        checkpoint_s: float = 0.0,
    ) -> Mock:
        def save(*unused, **named):
            now[0] += checkpoint_s
            return full

        if kl is not None:
            learner.kl_in_reward, learner.total, batch.packed = kl, alone, random_batch([4, 3], seed=3)
        calls.checkpointer.after_step.side_effect = save
        calls.sampler.evaluate.return_value = evaluated
        parts = {
            name: getattr(calls, name)
            for name in (
                "sampler",
                "weight_sync",
                "checkpointer",
                "recorder",
                "samples",
                "tracker",
                "ledger",
                "devices",
                "doing",
                "profiled",
            )
        }
        train(Run(config=load_config(RECIPE, ["model.path=model", *overrides]), learner=learner, **parts))
        return calls

    return run


def numbers_of(part: Mock) -> list[int]:
    return [call.args[0] for call in part.call_args_list]


def test_the_order_of_a_step(stepped):
    calls = stepped("steps=1", "evaluation={every: 1}")
    told = [name if name != "doing" else f"[{args[0]}]" for name, args, _ in calls.mock_calls]
    assert told == [
        "[sampling]", "sampler.next_groups", "learner.receive", "tracker.warn_once",
        "[logprobs]", "devices.give_to_learner", "learner.score", "correct", "learner.kl_in_reward.penalty", "compute_advantages",
        "recorder.record", "[update]", "learner.update", "learner.update", "learner_logprobs", "samples.keep",
        "[sampling]", "sampler.drain", "[sync]", "weight_sync.publish", "[evaluation]", "sampler.evaluate", "samples.keep_evaluation",
        "step_rewards", "step_metrics", "tracker.log", "ledger.enter", "weight_sync.check_samples",
        "[checkpoint]", "checkpointer.after_step",
    ]  # fmt: skip


def test_the_groups_that_an_update_allows_start_before_anything_else_if_it_succeeded(stepped):
    calls = stepped("steps=2", "rollout.max_staleness=1", "evaluation={every: 1}")
    told = [name for name, *_ in calls.mock_calls]
    first = told.index("sampler.admit")
    assert told[first - 1 : first + 3] == [
        "weight_sync.publish",
        "sampler.admit",
        "doing",
        "sampler.evaluate",
    ]
    assert told.count("sampler.admit") == 1, "none after the last step"
    calls.reset_mock()
    calls.weight_sync.publish.side_effect = RolloutError("the servers are gone")
    with pytest.raises(RolloutError):
        stepped("steps=2", "rollout.max_staleness=1")
    assert calls.weight_sync.publish.called and not calls.sampler.admit.called


def test_a_checkpoint_that_found_no_space_is_told_of_each_time(stepped):
    calls = stepped("steps=2", full="no space")
    told = [call.args for call in calls.tracker.warn_once.call_args_list]
    assert [args for args in told if "checkpoint" in args[0]] == [
        ("checkpoint of step 1", "no space"),
        ("checkpoint of step 2", "no space"),
    ]


def test_a_best_step_that_could_not_be_named_is_told_of():
    run = Mock(first_step=3, evaluation_owed=True)
    run.sampler.evaluate.return_value = None
    run.checkpointer.after_owed_evaluation.return_value = "no space"
    loop.evaluate_before(run)
    run.tracker.warn_once.assert_called_once_with("best checkpoint", "no space")


def test_failed_rewards_of_an_evaluation_are_told_before_and_within_the_steps(stepped):
    failing = replace(EVALUATED, failed=2, first_failure="prompt h0")
    run = Mock(first_step=1)
    run.sampler.evaluate.return_value = failing
    loop.evaluate_before(run)
    about, told = run.tracker.warn_once.call_args.args
    assert told.startswith("step 0: rewards of the evaluation failed") and told.endswith("of prompt h0")
    step, recorded = run.tracker.log.call_args.args
    assert (step, recorded["eval/failed_fraction"]) == (0, 0.5)
    calls = stepped("steps=2", "evaluation={every: 2, at_ends: false}", evaluated=failing)
    told = [call.args for call in calls.tracker.warn_once.call_args_list if call.args[0] == about]
    assert [text.partition(":")[0] for _, text in told] == ["step 2"]


def test_every_part_hears_of_the_same_step_and_sampling_ends_with_the_run(stepped):
    calls = stepped("steps=5", "rollout.max_staleness=2", "evaluation={every: 2, at_ends: true}")
    for part in (
        calls.recorder.record, calls.samples.keep, calls.tracker.log, calls.ledger.enter, calls.checkpointer.after_step
    ):  # fmt: skip
        assert numbers_of(part) == [1, 2, 3, 4, 5]
    asked = [call.kwargs for call in calls.sampler.next_groups.call_args_list]
    assert [(of["newest"], of["max_staleness"], of["ahead"]) for of in asked] == [
        (0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 2, 1), (4, 2, 0)
    ]  # fmt: skip
    admitted = [call.kwargs for call in calls.sampler.admit.call_args_list]
    assert admitted == [{name: of[name] for name in ("newest", "ahead")} for of in asked[1:]]
    prompts = calls.sampler.next_groups.call_args.args
    assert {call.args for call in calls.sampler.admit.call_args_list} == {prompts}
    evaluated = [call.kwargs["evaluation"] is not None for call in calls.step_metrics.call_args_list]
    assert evaluated == [False, True, False, True, True]


def test_the_policy_is_scored_but_not_trained_in_the_critics_warm_up(stepped):
    calls = stepped("steps=3", "advantage.type=gae", "critic.warmup_steps=1", "learner.minibatches=2")
    assert [call.kwargs["before_update"] for call in calls.learner.score.call_args_list] == [
        False,
        True,
        True,
    ]
    trained = [(call.args[0], call.kwargs["policy"]) for call in calls.learner.update.call_args_list]
    assert trained == [(name, step > 1) for step in (1, 2, 3) for name in ("first", "second")]


def test_no_controller_moves_the_coefficient_of_the_kl_in_the_critics_warm_up(stepped):
    """The policy stands still then. It is the reference itself at the start of a run, and the coefficient shrank with each
    step, long before there was anything to control."""
    controller = {"type": "adaptive", "target": 0.01, "horizon": 1000}
    kl = KLInReward(KLConfig(coefficient=0.1, place="reward", controller=controller))
    calls = stepped("steps=4", "advantage.type=gae", "critic.warmup_steps=2", kl=kl)
    measured = [call.kwargs["measured"][0] for call in calls.step_metrics.call_args_list]
    first, second, third, fourth = (values(metrics)["policy/kl_coefficient"] for metrics in measured)
    assert first == second == third == 0.1 and abs(fourth - 0.1) > 1e-5


def test_time_of_the_parts_and_of_the_step(stepped):
    """A drain is a wait for samples; an evaluation is no part of the step."""
    seconds = stepped("steps=1", "evaluation={every: 1}").step_metrics.call_args.kwargs["seconds"]
    parts = {"sampling": 1001, "logprobs": 10, "update": 200, "sync": 10_000}
    assert seconds == parts | {"step": sum(parts.values()), "evaluation": 100_000}


def test_a_checkpoint_is_in_the_line_of_the_next_step_which_it_is_no_part_of(stepped):
    """The line of its own step is on disk before it is written."""
    calls = stepped("steps=3", checkpoint_s=1_000_000)
    seconds = [call.kwargs["seconds"] for call in calls.step_metrics.call_args_list]
    assert [times.get("checkpoint") for times in seconds] == [None, 1_000_000, 1_000_000]
    assert len({times["step"] for times in seconds}) == 1


def test_the_clock_of_evaluations_runs_where_one_is_due_alone(stepped):
    """A time of 1e-5 would pass for that of an evaluation."""
    calls = stepped("steps=5", "evaluation={every: 2, at_ends: true}")
    seconds = [call.kwargs["seconds"] for call in calls.step_metrics.call_args_list]
    assert [times.get("evaluation") for times in seconds] == [None, 100_000, None, 100_000, 100_000]


def test_metrics_and_checks_get_what_was_measured(stepped):
    calls = stepped("steps=1", "correction.denominator=all")
    assert calls.learner.kl_in_reward.penalty.call_args.kwargs["num_samples"] == 3, "episodes, not sequences"
    named = calls.compute_advantages.call_args.kwargs
    weighted = calls.learner.score.return_value.with_loss_weights.call_args.args
    assert weighted[0] is calls.correct.return_value and weighted[2] == "all"
    assert named["penalty_T"] == "penalty" and named["episode_ids_S"].tolist() == [0, 0, 1, 2]
    measured = calls.step_metrics.call_args.kwargs["measured"]
    assert measured == ["of KL", "of advantages", "of correction", calls.step_rewards.return_value]
    metrics, (gap, farthest) = calls.step_metrics.return_value, calls.weight_sync.check_samples.call_args.args
    assert calls.tracker.log.call_args.args == (1, metrics.recorded)
    assert calls.checkpointer.after_step.call_args.kwargs["evaluated"] is metrics.recorded
    assert gap is metrics.sampled_gap and farthest("nats") is calls.farthest_token.return_value
    assert calls.farthest_token.call_args.args[3] == "nats"
