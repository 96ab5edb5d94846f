"""One RL step on one page.

    sampler.next_groups   scored groups, from the sample role        (rank 0 requests them; all ranks wait)
    learner.score         old and ref log-probs, values of a critic; no gradient
    correct               importance weights and rejection, from old against rollout
    compute_advantages    from rewards of the whole step, less the KL to ref if it is in the reward
    learner.update        forward, loss, backward, clip, step; once per minibatch
                          (no backward for groups without signal, whose gradient is zero)
                          (with a single minibatch current is old: score leaves old out, and the loss computes
                          the correction from its own forward pass; in bypass mode from current)
    weight_sync.publish   pause, send, verify, resume
    sampler.admit         the groups start that the new weights allow (k >= 1)
                          (then evaluation, metrics and checkpoint, while the servers sample)

With ``rollout.max_staleness: 0`` every token of a step is sampled by the weights that the step starts from. With
k >= 1 the sample role already samples the groups of the next k steps while this page trains. A token is then
at most k versions older (the rule is in ``rollout/sampling/pool.py``), and it keeps its version and its
log-prob. All ranks run this page; only rank 0 requests samples, tracks and writes. If learner and servers
share devices, they take turns (``trainer/turns.py``). Clock and spans measure where the time goes
(``trainer/step_clock.py``).

An interruption (a request to stop, a failure of the rollout side) reaches all ranks together. If the step
still waits for groups, no weight has changed, and the step is dropped. If its weights have changed, the step
is complete, even if the servers did not take them: it is recorded, and then the run ends. A resumed run makes
up for a missed evaluation.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from configs.schema import RunConfig
from rollout.sampling.messages import EvaluationResult
from tracing import span
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.batch.farthest_token import farthest_token
from trainer.checkpointing import Checkpointer
from trainer.learner import Learner, learner_logprobs
from trainer.ranks.interruption import INTERRUPTIONS, Postponed
from trainer.recording import Recorder
from trainer.sample_keeping import SampleKeeper
from trainer.sampling import Sampled, SharedSampler
from trainer.step_clock import StepClock, clocked
from trainer.step_metrics import evaluation_metrics, step_metrics, step_rewards
from trainer.tracking.ledger import Ledger
from trainer.tracking.tracker import Tracker
from trainer.turns import OwnDevices
from trainer.weight_sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a training run; ``launch/roles/learn.py`` builds them."""

    config: RunConfig
    learner: Learner
    sampler: SharedSampler
    weight_sync: WeightSync
    checkpointer: Checkpointer
    recorder: Recorder
    samples: SampleKeeper
    tracker: Tracker | None
    ledger: Ledger | None
    """None on all ranks but the first, like the tracker."""
    doing: Callable[[str], None]
    """Called with the name of each part of the step that this rank enters."""
    profiled: Callable[[int], AbstractContextManager[object]]
    """Gives the context manager in which a traced step runs."""
    devices: OwnDevices = field(default_factory=OwnDevices)
    first_step: int = 1
    evaluation_owed: bool = False
    """Whether the step before the first lacks its evaluation."""


def train(run: Run) -> None:
    """Raises StopRequested or RolloutError, after the last complete step."""
    config, learner, sampler = run.config, run.learner, run.sampler
    rollout = config.rollout
    for step, clock in clocked(range(run.first_step, config.steps + 1), run.doing, run.profiled):
        postponed, trains_policy = Postponed(), step > config.critic_warmup_steps
        with clock.time("sampling"):
            sampled = sampler.next_groups(
                rollout.prompts_per_step,
                newest=learner.version,
                max_staleness=rollout.max_staleness,
                ahead=min(rollout.max_staleness, config.steps - step),
            )
            with span("receive"):
                batch = learner.receive(sampled.groups)
        tell_of_failed_rewards(run, step, sampled)
        with clock.time("logprobs"):
            run.devices.give_to_learner()
            batch = learner.score(batch, before_update=trains_policy)
        with span("correction"):
            correction = correct(batch.packed, config.correction, learner.total)
        with span("advantages"):
            penalty_T, kl_metrics = learner.kl_in_reward.penalty(
                batch.packed, num_samples=batch.num_episodes, total=learner.total, trains_policy=trains_policy
            )
            advantages = compute_advantages(
                batch.packed,
                batch.rewards_S,
                batch.group_ids_S,
                config.advantage,
                episode_ids_S=batch.episode_ids_S,
                turn_rewards=batch.turn_rewards,
                reward_parts=batch.reward_parts,
                penalty_T=penalty_T,
                total=learner.total,
            )
            batch = batch.with_advantages(advantages).with_loss_weights(
                correction, config.aggregation, config.correction.denominator, learner.total
            )
        with span("record batch"):
            tell_once(run, "recorded batches", run.recorder.record(step, batch, learner))
        with clock.time("update"):
            updates = [learner.update(minibatch, policy=trains_policy) for minibatch in batch.minibatches()]
        with span("keep samples"):
            learner_T = learner_logprobs(batch, updates, config.correction)
            run.samples.keep(step, sampled.groups, batch, learner_T, learner)
        with clock.time("sampling"):
            postponed.attempt(lambda: sampler.drain(rollout.drain_s))
        with clock.time("sync"):
            sync = postponed.attempt(run.weight_sync.publish, in_any_case=True)  # the weights have moved
            postponed.attempt(partial(admit_next, run, step))
        clock.end_step()
        is_due = config.evaluation.is_due(step, config.steps)
        evaluation = postponed.attempt(partial(evaluate, run, step, clock)) if is_due else None
        with span("metrics"):
            rewards = step_rewards(batch, learner_T, learner.total)
            metrics = step_metrics(
                sampled=sampled,
                batch=batch,
                measured=[kl_metrics, advantages.metrics, correction.metrics, rewards],
                updates=updates,
                sync=sync,
                evaluation=evaluation,
                seconds=clock.seconds,
                mode=config.correction.mode,
                group=learner.groups.dp_group,
            )
            if run.tracker is not None:
                run.tracker.log(step, metrics.recorded)
            if run.ledger is not None and sampled.stats is not None:
                run.ledger.enter(step, sampled.stats)
            farthest = partial(farthest_token, batch, learner_T, learner.groups.dp_group)
            run.weight_sync.check_samples(metrics.sampled_gap, farthest)
        with clock.time("checkpoint", of_next_step=True):
            evaluation_owed = postponed.interruption is not None and is_due
            problem = run.checkpointer.after_step(
                step, learner, sampler, evaluation_owed=evaluation_owed, evaluated=metrics.recorded
            )
            tell_once(run, f"checkpoint of step {step}", problem)
        postponed.release()


def admit_next(run: Run, step: int) -> None:
    """Start the groups that the weights after ``step`` allow. With k = 0, where servers and learner may share devices, the
    next step's request starts them."""
    rollout, later_steps = run.config.rollout, run.config.steps - step
    if rollout.max_staleness > 0 and later_steps > 0:
        ahead = min(rollout.max_staleness, later_steps - 1)
        run.sampler.admit(rollout.prompts_per_step, newest=run.learner.version, ahead=ahead)


def tell_once(run: Run, about: str, problem: str | None) -> None:
    """Print on the console a problem that does not end the run; None: nothing to print."""
    if run.tracker is not None and problem is not None:
        run.tracker.warn_once(about, problem)


def tell_of_failed_rewards(run: Run, step: int, sampled: Sampled) -> None:
    """Print on the console, once per run, why rewards failed. Metrics and alarms count later failures."""
    stats = sampled.stats
    if run.tracker is not None and stats is not None and stats.first_failure is not None:
        failed = f"{stats.failed_rewards} of {stats.scored} rewards failed"
        run.tracker.warn_once("failed rewards", f"step {step}: {failed}; the first, of {stats.first_failure}")


def evaluate(run: Run, step: int, clock: StepClock) -> EvaluationResult | None:
    """Evaluate on the held-out problems, and print on the console, once per run, why rewards failed there."""
    with clock.time("evaluation"):
        result = run.sampler.evaluate()
    run.samples.keep_evaluation(step, result, run.learner.version)
    if run.tracker is not None and result is not None and result.first_failure is not None:
        what = f"step {step}: rewards of the evaluation failed, and these answers count as wrong"
        run.tracker.warn_once(
            "failed rewards of an evaluation", f"{what}; the first, of {result.first_failure}"
        )
    return result


def evaluate_before(run: Run) -> None:
    """Record the held-out accuracy before the first step. A fresh run evaluates its model (step 0). A resumed
    run evaluates its last step, if an interruption came before that evaluation."""
    is_due = run.evaluation_owed or (run.first_step == 1 and run.config.evaluation.at_ends)
    if not is_due:
        return
    clock = StepClock(run.doing)
    evaluation = evaluate(run, run.first_step - 1, clock)
    evaluated = {} if evaluation is None else evaluation_metrics(evaluation)
    if run.tracker is not None and evaluated:
        run.tracker.log(run.first_step - 1, evaluated | {"time/evaluation": clock.seconds["evaluation"]})
    if run.first_step > 1:  # it has a checkpoint, from which the run was resumed
        tell_once(run, "best checkpoint", run.checkpointer.after_owed_evaluation(run.learner, evaluated))


@contextmanager
def saved_where_interrupted(run: Run) -> Iterator[None]:
    """On interruption, save a checkpoint of the last complete step, then re-raise."""
    try:
        yield
    except INTERRUPTIONS:
        with suppress(*INTERRUPTIONS):  # the servers that should make room may be gone
            tell_once(run, "best checkpoint", run.checkpointer.save_last(run.learner))
        raise
