"""Prompts to groups of scored responses: one task per group generates, one task per sample decodes and scores.

Only ``next_groups`` moves the position in the data, and only when all its groups are complete: a state taken
between two requests resumes exactly. Dynamic sampling works in rounds, and the position counts every sampled
prompt. Weights, versions (the learner names the newest) and the choice of a replica are not its concern.
"""

import asyncio
import hashlib
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import TYPE_CHECKING

from configs.schema.launch import EvaluationConfig
from configs.schema.rollout import DynamicSampling, NoDynamicSampling, ResampleGroups, RolloutConfig
from rollout.client import GenerationClient
from rollout.records import Completion, FinishReason, Group, Prompt, Score, Trajectory, TrajectoryStatus
from rollout.rewards import Scorer
from rollout.sampling.messages import EvaluationResult, SamplerState, SamplingError, SamplingStats
from rollout.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 8
"""Limit of the failed rewards of one request that are logged one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    completion: Completion
    score: Score


class GroupSampler:
    """Samples groups in a seeded order of the prompts, and evaluates on held-out prompts. For one task at a
    time."""

    def __init__(
        self,
        *,
        client: GenerationClient,
        task: Task,
        scorer: Scorer,
        tokenizer: "PreTrainedTokenizerBase",
        stop_token_ids: Sequence[int],
        rollout: RolloutConfig,
        evaluation: EvaluationConfig,
        seed: int,
    ) -> None:
        """
        Raises:
            ValueError: the task has no training prompts.
        """
        if not len(task.train):
            raise ValueError(f"task {task.name} has no training prompts; check its train_path")
        self._client, self._task, self._scorer, self._tokenizer = client, task, scorer, tokenizer
        self._stop_token_ids = list(stop_token_ids)
        self._rollout, self._evaluation, self._seed = rollout, evaluation, seed
        self._dynamic = rollout.dynamic_sampling
        self._position, self._next_group_id = 0, 0
        self._order, self._order_epoch = list[int](), -1

    @property
    def state(self) -> SamplerState:
        return SamplerState(
            position=self._position, next_group_id=self._next_group_id, num_prompts=len(self._task.train)
        )

    def load_state(self, state: SamplerState | None) -> None:
        """Continue from another sampler's state of the same seed and data; None: from the start of the data.

        Raises:
            ValueError: the size of the training set differs from the state's.
        """
        if state is None:
            self._position = self._next_group_id = 0
            return
        if state.num_prompts != len(self._task.train):
            raise ValueError(
                f"the state to resume was taken with {state.num_prompts} training prompts, but task {self._task.name} now has "
                f"{len(self._task.train)}; resume with the same data"
            )
        self._position, self._next_group_id = state.position, state.next_group_id

    async def next_groups(
        self, count: int, *, newest: int, max_staleness: int
    ) -> tuple[list[Group], SamplingStats]:
        """The next ``count`` prompts in order, each with ``group_size`` scored siblings.

        With dynamic sampling: the next ``count`` groups whose siblings differ, in the order of their prompts.
        If the rounds give too few of them, the first groups without signal are kept in their places.

        Raises:
            SamplingError: a token was sampled by weights older than ``newest - max_staleness``, or newer than
                ``newest``; or every reward of a round failed.
            GenerationError: a completion could not be obtained. The position stays where it was.
        """
        groups: list[Group] = []
        has_signal: list[bool] = []
        rounds: list[SamplingStats] = []
        max_rounds = self._dynamic.max_rounds if self._dynamic.type == "resample" else 1
        while (missing := count - sum(has_signal)) and len(rounds) < max_rounds:
            prompts = [self._prompt_at(self._position + len(groups) + i) for i in range(missing)]
            first_id, size = self._next_group_id + len(groups), self._rollout.group_size
            seeds = [
                self._sample_seeds(prompt, size, attempt=first_id + i) for i, prompt in enumerate(prompts)
            ]
            sampled, stats = await self._sample_all(prompts, seeds, temperature=self._rollout.temperature)
            new_groups = [_make_group(first_id + i, prompt, sampled[i]) for i, prompt in enumerate(prompts)]
            _check_versions(new_groups, newest=newest, max_staleness=max_staleness)
            groups += new_groups
            has_signal += [_has_signal([s.score for s in samples], self._dynamic) for samples in sampled]
            rounds.append(stats)
        num_filled = count - sum(has_signal)
        stats = replace(_total_stats(rounds), resampled_groups=len(groups) - count, filled_groups=num_filled)
        if num_filled:
            logger.warning(
                "only %d of %d groups have differing rewards after %d rounds and %d prompts; %d without signal are trained on too",
                sum(has_signal), count, len(rounds), len(groups), num_filled,
            )  # fmt: skip
        self._position += len(groups)
        self._next_group_id += len(groups)
        return [groups[i] for i in choose_groups(has_signal, count)], stats

    async def evaluate(self) -> EvaluationResult | None:
        """Accuracy on held-out problems, the same ones each time; None if the task holds none out.

        Raises:
            GenerationError: a completion could not be obtained.
            SamplingError: every reward failed.
        """
        prompts = choose_heldout(self._task.heldout, self._evaluation.max_prompts)
        if not prompts:
            return None
        per_prompt = self._evaluation.samples_per_prompt
        seeds = [self._sample_seeds(prompt, per_prompt, attempt=-1) for prompt in prompts]
        sampled, _ = await self._sample_all(prompts, seeds, temperature=self._evaluation.temperature)
        return _summarise_samples(sampled)

    def _sample_seeds(self, prompt: Prompt, count: int, *, attempt: int) -> list[int]:
        return [
            _sample_seed(self._seed, prompt.prompt_id, sibling, attempt=attempt) for sibling in range(count)
        ]

    async def _sample_all(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], *, temperature: float
    ) -> tuple[list[list[_Sample]], SamplingStats]:
        """For each prompt one sample per seed of its own, in order.

        All prompts are requested at once; the client limits the samples that reach the servers. The first
        failure cancels the rest. Raises SamplingError if every reward failed.
        """
        started, before, retries_before = time.perf_counter(), self._client.stats, self._scorer.retries
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [
                    tasks.create_task(self._sample_group(prompt, prompt_seeds, temperature, tasks))
                    for prompt, prompt_seeds in zip(prompts, seeds, strict=True)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        sampled = [
            [_Sample(completion=completion, score=score.result()) for completion, score in group.result()]
            for group in groups
        ]
        failures = _failed_rewards(prompts, sampled)
        num_scored = sum(map(len, sampled))
        if failures and len(failures) == num_scored:
            raise SamplingError(
                f"the rewards of all {num_scored} samples failed: nothing can be learned; the first: {failures[0]}"
            )
        client = self._client.stats - before
        return sampled, SamplingStats(
            seconds=time.perf_counter() - started,
            requests=client.requests,
            retries=client.retries,
            failed_rewards=len(failures),
            reward_retries=self._scorer.retries - retries_before,
            scored=num_scored,
            first_failure=next(iter(failures), None),
        )

    async def _sample_group(
        self, prompt: Prompt, seeds: Sequence[int], temperature: float, tasks: asyncio.TaskGroup
    ) -> list[tuple[Completion, asyncio.Task[Score]]]:
        """The completions, each with the task that scores it while other groups are still being sampled."""
        completions = await self._client.generate_group(
            prompt.token_ids,
            max_new_tokens=self._rollout.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seeds=seeds,
        )
        return [
            (completion, tasks.create_task(self._score_completion(prompt, completion)))
            for completion in completions
        ]

    async def _score_completion(self, prompt: Prompt, completion: Completion) -> Score:
        text, num_tokens = self._response_text(completion), len(completion.token_ids)
        return await self._scorer.score(
            prompt, text, num_tokens=num_tokens, finish_reason=completion.finish_reason
        )

    def _response_text(self, completion: Completion) -> str:
        # Only the end token is dropped. Special tokens in the middle stay, or `1<pad>+2` would score as `1+2`.
        ended = bool(completion.token_ids) and completion.token_ids[-1] in self._stop_token_ids
        token_ids = completion.token_ids[:-1] if ended else completion.token_ids
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _prompt_at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._task.train))
        if epoch != self._order_epoch:
            self._order = epoch_order(len(self._task.train), seed=self._seed, epoch=epoch)
            self._order_epoch = epoch
        return self._task.train[self._order[index]]


def epoch_order(num_prompts: int, *, seed: int, epoch: int) -> list[int]:
    """The order of the training prompts in an epoch, a function of seed and epoch alone."""
    order = list(range(num_prompts))
    random.Random(f"tandem prompt order {seed} {epoch}").shuffle(order)
    return order


def choose_heldout(heldout: Sequence[Prompt], max_prompts: int | None) -> list[Prompt]:
    """All held-out prompts, or the ``max_prompts`` with the lowest hashes, which do not depend on the file's
    order."""
    if max_prompts is None or max_prompts >= len(heldout):
        return list(heldout)
    by_hash = sorted(heldout, key=lambda prompt: hashlib.sha256(prompt.prompt_id.encode()).digest())
    return by_hash[:max_prompts]


def choose_groups(has_signal: Sequence[bool], count: int) -> list[int]:
    """Ascending indices of the ``count`` groups to train on: all with signal, then the first ones without."""
    without = [i for i, signal in enumerate(has_signal) if not signal]
    return sorted([i for i, signal in enumerate(has_signal) if signal] + without[: count - sum(has_signal)])


def _has_signal(scores: Sequence[Score], dynamic: DynamicSampling) -> bool:
    """Whether the siblings differ in the value that dynamic sampling compares; always True without it."""
    match dynamic:
        case ResampleGroups(compare="reward"):
            return len({score.value for score in scores}) > 1
        case ResampleGroups():  # by "correct"
            return len({score.correct for score in scores}) > 1
        case NoDynamicSampling():
            return True


def _sample_seed(run_seed: int, prompt_id: str, sibling: int, *, attempt: int) -> int:
    """31 bits from the run's seed, the prompt, the sibling, and the group id (``attempt``)."""
    digest = hashlib.sha256(json.dumps([run_seed, prompt_id, sibling, attempt]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _total_stats(rounds: Sequence[SamplingStats]) -> SamplingStats:
    numbers = [field.name for field in fields(SamplingStats) if field.name != "first_failure"]
    failures = [stats.first_failure for stats in rounds if stats.first_failure is not None]
    return SamplingStats(
        **{name: sum(getattr(stats, name) for stats in rounds) for name in numbers},
        first_failure=next(iter(failures), None),
    )


def _make_group(group_id: int, prompt: Prompt, samples: Sequence[_Sample]) -> Group:
    trajectories = [_make_trajectory(group_id, i, prompt, sample) for i, sample in enumerate(samples)]
    return Group(group_id=group_id, prompt_id=prompt.prompt_id, trajectories=trajectories)


def _make_trajectory(group_id: int, sibling_id: int, prompt: Prompt, sample: _Sample) -> Trajectory:
    """Join prompt and response, with zeros on the prompt; nothing else joins the two."""
    completion, score = sample.completion, sample.score
    num_prompt, num_response = len(prompt.token_ids), len(completion.token_ids)
    return Trajectory(
        group_id=group_id,
        sibling_id=sibling_id,
        prompt_id=prompt.prompt_id,
        token_ids=list(prompt.token_ids) + completion.token_ids,
        response_mask=[False] * num_prompt + [True] * num_response,
        rollout_logprobs=[0.0] * num_prompt + completion.rollout_logprobs,
        token_versions=[0] * num_prompt + completion.token_versions,
        finish_reason=completion.finish_reason,
        reward=score.value,
        reward_parts=score.parts,
        status=TrajectoryStatus.OK if score.error is None else TrajectoryStatus.REWARD_FAILED,
    )


def _failed_rewards(prompts: Sequence[Prompt], sampled: Sequence[Sequence[_Sample]]) -> list[str]:
    """The failures as texts, which are also logged."""
    failed = [
        f"prompt {prompt.prompt_id}, sibling {sibling_id}, scored 0: {sample.score.error}"
        for prompt, samples in zip(prompts, sampled, strict=True)
        for sibling_id, sample in enumerate(samples)
        if sample.score.error is not None
    ]
    for failure in failed[:MAX_LOGGED_FAILURES]:
        logger.warning("reward failed for %s", failure)
    if len(failed) > MAX_LOGGED_FAILURES:
        logger.warning(
            "the rewards of %d further samples failed, all scored 0", len(failed) - MAX_LOGGED_FAILURES
        )
    return failed


def _check_versions(groups: Sequence[Group], *, newest: int, max_staleness: int) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            versions = set(compress(trajectory.token_versions, trajectory.response_mask))
            wrong = sorted(v for v in versions if not newest - max_staleness <= v <= newest)
            if wrong:
                raise SamplingError(
                    f"prompt {group.prompt_id}, sibling {trajectory.sibling_id} has tokens sampled by weight version {wrong[0]}, but "
                    f"the learner is at {newest} and allows max_staleness={max_staleness}; the servers missed a weight update"
                )


def accuracy_error(right: Sequence[Sequence[bool]]) -> float | None:
    """Standard error of the share of right samples, as that of a mean over clusters (problems) of equal size."""
    shares = [sum(samples) / len(samples) for samples in right]
    return statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None


def _summarise_samples(sampled: Sequence[Sequence[_Sample]]) -> EvaluationResult:
    samples = [sample for samples in sampled for sample in samples]
    truncated = sum(sample.completion.finish_reason is FinishReason.LENGTH for sample in samples)
    return EvaluationResult(
        accuracy=sum(sample.score.correct for sample in samples) / len(samples),
        reward_mean=sum(sample.score.value for sample in samples) / len(samples),
        count=len(samples),
        accuracy_error=accuracy_error([[sample.score.correct for sample in samples] for samples in sampled]),
        length_mean=sum(len(sample.completion.token_ids) for sample in samples) / len(samples),
        truncated_fraction=truncated / len(samples),
    )
