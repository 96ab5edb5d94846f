"""Prompts to groups of scored responses: one task per group generates, and one per sample decodes and scores.

Only ``next_groups`` moves the position in the data, and only when all its groups are complete: a state taken
between two requests resumes exactly. Groups that are sampled ahead of their step (``pool.py``) are not in the
state; a resumed run samples them again under the same numbers and seeds. The position counts every prompt that
a step has used, those without signal too. Weights, versions (the learner names the newest) and the choice of a
replica are not its concern.
"""

import asyncio
import hashlib
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs.schema.launch import EvaluationConfig
from configs.schema.rollout import DynamicSampling, NoDynamicSampling, ResampleGroups, RolloutConfig
from rollout.client import GenerationClient
from rollout.records import MASK, Completion, FinishReason, Group, Prompt, Score, Trajectory, TrajectoryStatus
from rollout.rewards import Scorer
from rollout.sampling.messages import EvaluationResult, SamplerState, SamplingError, SamplingStats
from rollout.sampling.pool import GroupPool, ScoredGroup
from rollout.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
        evaluation_client: GenerationClient | None = None,
        task: Task,
        scorer: Scorer,
        tokenizer: "PreTrainedTokenizerBase",
        stop_token_ids: Sequence[int],
        rollout: RolloutConfig,
        evaluation: EvaluationConfig,
        seed: int,
    ) -> None:
        """evaluation_client: for held-out prompts, which then do not wait behind training prompts; None: ``client``.

        Raises:
            ValueError: the task has no training prompts.
        """
        if not len(task.train):
            raise ValueError(f"task {task.name} has no training prompts; check its train_path")
        self._client, self._task, self._scorer, self._tokenizer = client, task, scorer, tokenizer
        self._evaluation_client = evaluation_client or client
        self._stop_token_ids = list(stop_token_ids)
        self._rollout, self._evaluation, self._seed = rollout, evaluation, seed
        self._dynamic = rollout.dynamic_sampling
        max_rounds = self._dynamic.max_rounds if self._dynamic.type == "resample" else 1
        self._pool = GroupPool(self._sample_group, max_rounds=max_rounds)
        self._counted = (client.stats, scorer.retries)
        self._order, self._order_epoch = list[int](), -1

    @property
    def state(self) -> SamplerState:
        return SamplerState(position=self._pool.first, num_prompts=len(self._task.train))

    async def load_state(self, state: SamplerState | None) -> None:
        """Continue from another sampler's state of the same seed and data; None: from the start of the data.
        Groups that are being sampled are given up.

        Raises:
            ValueError: the size of the training set differs from the state's.
        """
        if state is not None and state.num_prompts != len(self._task.train):
            raise ValueError(
                f"the state to resume was taken with {state.num_prompts} training prompts, but task {self._task.name} now has "
                f"{len(self._task.train)}; resume with the same data"
            )
        await self._pool.restart(0 if state is None else state.position)

    async def close(self) -> None:
        """Give up the groups that are being sampled."""
        await self._pool.restart(self._pool.first)

    async def next_groups(
        self, count: int, *, newest: int, max_staleness: int, ahead: int = 0
    ) -> tuple[list[Group], SamplingStats]:
        """The groups of the next ``count`` prompts in order, each with ``group_size`` scored siblings. From now on
        the groups of ``ahead`` further steps are sampled too, also after the return.

        With dynamic sampling: the next ``count`` groups whose siblings differ, in the order of their prompts.
        If the rounds give too few of them, the first groups without signal are kept in their places.

        Raises:
            SamplingError: a token was sampled by weights older than ``newest - max_staleness``, or newer than
                ``newest``; or every reward failed.
            GenerationError: a completion could not be obtained. The position stays where it was, and all
                groups are sampled anew.
        """
        began = time.perf_counter()
        await self._client.see_version(newest)
        self._pool.admit(count, ahead=ahead)
        try:
            scored = await self._pool.next_step()
            failures = [failure for group in scored for failure in group.failures]
            _check_rewards(failures, len(scored) * self._rollout.group_size)
            _check_versions([s.group for s in scored], newest=newest, max_staleness=max_staleness)
        except BaseException:
            await self._pool.restart(self._pool.first)
            raise
        first = self._pool.first
        self._pool.hand_out(len(scored))
        has_signal = [s.has_signal for s in scored]
        if num_filled := count - sum(has_signal):
            logger.warning(
                "only %d of %d groups have differing rewards after %d prompts; %d without signal are trained on too",
                sum(has_signal), count, len(scored), num_filled,
            )  # fmt: skip
        chosen = choose_groups(has_signal, count)
        before, self._counted = self._counted, (self._client.stats, self._scorer.retries)
        requested = self._counted[0] - before[0]
        stats = SamplingStats(
            seconds=time.perf_counter() - began,
            requests=requested.requests,
            retries=requested.retries,
            failed_rewards=len(failures),
            reward_retries=self._counted[1] - before[1],
            resampled_groups=len(scored) - count,
            filled_groups=num_filled,
            scored=len(scored) * self._rollout.group_size,
            first_failure=next(iter(failures), None),
            first_group=first,
            prompts=[s.group.prompt_id for s in scored],
            without_signal=sorted(first + place for place in {*range(len(scored))} - {*chosen}),
            idle_s=requested.idle_s,
            running_groups=self._pool.running,
            ready_groups=self._pool.ready,
        )
        return [scored[i].group for i in chosen], stats

    async def drain(self, within_s: float) -> None:
        """See ``GenerationClient.drain``."""
        await self._client.drain(within_s)

    def reopen(self) -> None:
        self._client.reopen()

    async def evaluate(self) -> EvaluationResult | None:
        """Accuracy on held-out problems, the same ones each time; None if the task holds none out.

        Raises:
            GenerationError: a completion could not be obtained.
            SamplingError: every reward failed.
        """
        prompts = choose_heldout(self._task.heldout, self._evaluation.max_prompts)
        if not prompts:
            return None
        client, temperature = self._evaluation_client, self._evaluation.temperature
        seeds = [
            self._sample_seeds(prompt, self._evaluation.samples_per_prompt, attempt=-1) for prompt in prompts
        ]
        sampled = await _all_or_first_error(
            self._sample(client, prompt, of_prompt, temperature)
            for prompt, of_prompt in zip(prompts, seeds, strict=True)
        )
        failures = [
            f for p, samples in zip(prompts, sampled, strict=True) for f in _failed_rewards(p, samples)
        ]
        _check_rewards(failures, sum(map(len, sampled)))
        return _summarise_samples(sampled)

    async def _sample_group(self, number: int) -> ScoredGroup:
        """The training group of this number, which is its place in the order of the data too."""
        prompt, size = self._prompt_at(number), self._rollout.group_size
        seeds = self._sample_seeds(prompt, size, attempt=number)
        samples = await self._sample(self._client, prompt, seeds, self._rollout.temperature)
        return ScoredGroup(
            group=_make_group(number, prompt, samples),
            has_signal=_has_signal([s.score for s in samples], self._dynamic),
            failures=_failed_rewards(prompt, samples),
        )

    def _sample_seeds(self, prompt: Prompt, count: int, *, attempt: int) -> list[int]:
        return [
            _sample_seed(self._seed, prompt.prompt_id, sibling, attempt=attempt) for sibling in range(count)
        ]

    async def _sample(
        self, client: GenerationClient, prompt: Prompt, seeds: Sequence[int], temperature: float
    ) -> list[_Sample]:
        """One scored sample per seed. The samples are scored while other groups are still being sampled."""
        completions = await client.generate_group(
            prompt.token_ids,
            max_new_tokens=self._rollout.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seeds=seeds,
        )
        scores = await _all_or_first_error(
            self._score_completion(prompt, completion) for completion in completions
        )
        return [
            _Sample(completion=completion, score=score)
            for completion, score in zip(completions, scores, strict=True)
        ]

    async def _score_completion(self, prompt: Prompt, completion: Completion) -> Score:
        text, num_tokens = self._response_text(completion), len(completion.token_ids)
        return await self._scorer.score(
            prompt, text, num_tokens=num_tokens, finish_reason=completion.finish_reason
        )

    def _response_text(self, completion: Completion) -> str:
        # Only the end token is dropped. Special tokens in the middle stay, or `1<pad>+2` would score as `1+2`.
        token_ids = completion.token_ids.tolist()
        if token_ids and token_ids[-1] in self._stop_token_ids:
            token_ids.pop()
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _prompt_at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._task.train))
        if epoch != self._order_epoch:
            self._order = epoch_order(len(self._task.train), seed=self._seed, epoch=epoch)
            self._order_epoch = epoch
        return self._task.train[self._order[index]]


async def _all_or_first_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. The first error cancels the others, and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in started]


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


def _make_group(group_id: int, prompt: Prompt, samples: Sequence[_Sample]) -> Group:
    trajectories = [_make_trajectory(group_id, i, prompt, sample) for i, sample in enumerate(samples)]
    return Group(group_id=group_id, prompt_id=prompt.prompt_id, trajectories=trajectories)


def _make_trajectory(group_id: int, sibling_id: int, prompt: Prompt, sample: _Sample) -> Trajectory:
    """Join prompt and response, with zeros on the prompt; nothing else joins the two."""
    completion, score = sample.completion, sample.score
    num_prompt, num_response = len(prompt.token_ids), len(completion.token_ids)

    def behind_prompt(response: np.ndarray, on_prompt: int | list[int] = 0) -> np.ndarray:
        joined = np.empty(num_prompt + num_response, dtype=response.dtype)
        joined[:num_prompt], joined[num_prompt:] = on_prompt, response
        return joined

    return Trajectory(
        group_id=group_id,
        sibling_id=sibling_id,
        prompt_id=prompt.prompt_id,
        token_ids=behind_prompt(completion.token_ids, prompt.token_ids),
        response_mask=behind_prompt(np.ones(num_response, dtype=MASK)),
        rollout_logprobs=behind_prompt(completion.rollout_logprobs),
        token_versions=behind_prompt(completion.token_versions),
        finish_reason=completion.finish_reason,
        reward=score.value,
        reward_parts=score.parts,
        status=TrajectoryStatus.OK if score.error is None else TrajectoryStatus.REWARD_FAILED,
    )


def _failed_rewards(prompt: Prompt, samples: Sequence[_Sample]) -> list[str]:
    return [
        f"prompt {prompt.prompt_id}, sibling {sibling_id}, scored 0: {sample.score.error}"
        for sibling_id, sample in enumerate(samples)
        if sample.score.error is not None
    ]


def _check_rewards(failures: Sequence[str], num_scored: int) -> None:
    """Log the failed rewards. Raises SamplingError where no other is left."""
    for failure in failures[:MAX_LOGGED_FAILURES]:
        logger.warning("reward failed for %s", failure)
    if len(failures) > MAX_LOGGED_FAILURES:
        logger.warning(
            "the rewards of %d further samples failed, all scored 0", len(failures) - MAX_LOGGED_FAILURES
        )
    if failures and len(failures) == num_scored:
        raise SamplingError(
            f"the rewards of all {num_scored} samples failed: nothing can be learned; the first: {failures[0]}"
        )


def _check_versions(groups: Sequence[Group], *, newest: int, max_staleness: int) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.token_versions[trajectory.response_mask]
            wrong = versions[(versions < newest - max_staleness) | (versions > newest)]
            if len(wrong):
                raise SamplingError(
                    f"prompt {group.prompt_id}, sibling {trajectory.sibling_id} has tokens sampled by weight version {wrong.min()}, but "
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
