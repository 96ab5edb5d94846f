"""Prompts to groups of scored samples: one task per group.

Only ``next_groups`` moves the position in the data, and only when all its groups are complete, so a state taken
between two requests resumes exactly. Groups that are sampled ahead of their step (``pool.py``) are not in the
state; a resumed run samples them again under the same numbers and seeds. The position counts every prompt that
a step has used, including those without signal. Other files handle weights, versions (the learner names the newest), the
choice of a replica, and the turns within a sample.
"""

import hashlib
import heapq
import json
import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

from configs.schema import RunConfig
from configs.schema.rollout import DynamicSampling
from rollout.client import ClientStats, GenerationClient
from rollout.environments.episodes import Sample, SampleMaker
from rollout.gathering import all_or_first_error
from rollout.records import Group, Prompt, different_rewards, seed_of
from rollout.rewards.scorer import Scorer
from rollout.sampling.messages import (
    BeforeSelection,
    EvaluationResult,
    SamplerState,
    SamplingError,
    SamplingStats,
)
from rollout.sampling.order import Order
from rollout.sampling.pool import GroupPool, ScoredGroup
from rollout.tasks import Task, digest_of, ids_of
from rollout.terminal_text import on_one_visible_line

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 8
"""Failed rewards of one request that are logged one by one; further ones are only counted."""


class Graded(NamedTuple):
    """What an evaluation keeps of a sample (see ``Sample``). The tokens of thousands of samples would take gigabytes."""

    reward: float | None
    correct: bool
    error: str | None
    num_sampled: int
    is_truncated: bool


class GroupSampler:
    """Samples groups in the order of the prompts, and evaluates on held-out prompts. It serves one call at a
    time."""

    def __init__(
        self,
        *,
        client: GenerationClient,
        evaluation_client: GenerationClient,
        task: Task,
        samples: SampleMaker,
        evaluation_samples: SampleMaker,
        scorer: Scorer,
        order: Order,
        config: RunConfig,
    ) -> None:
        """evaluation_client, evaluation_samples: for held-out prompts, which do not queue behind training
        prompts. scorer: the scorer of ``samples``; its retries are counted. Raises ValueError: the task has
        no training prompts."""
        if not len(task.train):
            raise ValueError(f"task {task.name} has no training prompts; check its train_path")
        self._client, self._task, self._samples, self._scorer = client, task, samples, scorer
        self._evaluation_client, self._evaluation_samples = evaluation_client, evaluation_samples
        self._rollout, self._evaluation, self._seed = config.rollout, config.evaluation, config.seed
        self._kept_problems = config.tracking.evaluation_problems
        self._dynamic = config.rollout.dynamic_sampling
        max_rounds = self._dynamic.max_rounds if self._dynamic.type == "resample" else 1
        self._pool = GroupPool(self._sample_group, max_rounds=max_rounds)
        self._counted = (client.stats, scorer.retries)
        self._order_of = lru_cache(maxsize=1)(order)

    @property
    def state(self) -> SamplerState:
        num_prompts = len(self._task.train)
        return SamplerState(position=self._pool.first, num_prompts=num_prompts, prompts=self._digest)

    @cached_property
    def _digest(self) -> int:
        return digest_of(self._task.train)

    async def load_state(self, state: SamplerState | None) -> None:
        """Continue from another sampler's state of the same seed and data; None: from the start of the data.
        Groups that are being sampled are cancelled. Raises ValueError: the training set is not the
        state's."""
        if state is not None and state.num_prompts != len(self._task.train):
            raise ValueError(
                f"the state to resume was taken with {state.num_prompts} training prompts, but task {self._task.name} now has "
                f"{len(self._task.train)}; resume with the same data"
            )
        if state is not None and state.prompts not in (None, self._digest):
            raise ValueError(
                f"the state to resume was taken with other training prompts: task {self._task.name} still has {state.num_prompts}, but "
                "some of them, their references or their order have changed; resume with the same data"
            )
        await self._pool.restart(0 if state is None else state.position)

    async def close(self) -> None:
        """Cancel the groups that are being sampled."""
        await self._pool.restart(self._pool.first)

    async def next_groups(
        self, count: int, *, newest: int, max_staleness: int, ahead: int = 0
    ) -> tuple[list[Group], SamplingStats]:
        """The groups of the next ``count`` prompts in order, each with ``group_size`` scored siblings. The groups of
        ``ahead`` further steps are sampled at the same time, and continue after the return.

        With dynamic sampling: the next ``count`` groups whose siblings differ, in the order of their prompts.
        If the rounds give too few of them, the first groups without signal fill their places.

        Raises:
            SamplingError: a token was sampled by weights older than ``newest - max_staleness``, or newer than
                ``newest``; or every reward failed.
            GenerationError: a completion could not be obtained. The position does not move, and the next call samples all
                groups again.
        """
        began = time.perf_counter()
        await self.admit(count, newest=newest, ahead=ahead)
        try:
            scored = await self._pool.next_step()
            failures = [failure for group in scored for failure in group.failures]
            _log_failures(failures)
            if not any(group.num_usable for group in scored):
                raise SamplingError(_nothing_to_learn(failures, len(scored) * self._rollout.group_size))
            _check_versions([s.group for s in scored], newest=newest, max_staleness=max_staleness)
        except BaseException:
            await self._pool.restart(self._pool.first)
            raise
        first = self._pool.first
        self._pool.hand_out(len(scored))
        has_signal = [s.has_signal for s in scored]
        if num_filled := count - sum(has_signal):
            logger.warning(
                "only %d of %d groups have siblings that differ after %d prompts; %d without signal are trained on too",
                sum(has_signal), count, len(scored), num_filled,
            )  # fmt: skip
        chosen = choose_groups(has_signal, count)
        requested, reward_retries = self._counts_since_last_reply()
        stats = SamplingStats(
            seconds=time.perf_counter() - began,
            requests=requested.requests,
            retries=requested.retries,
            failed_rewards=len(failures),
            reward_retries=reward_retries,
            resampled_groups=len(scored) - count,
            filled_groups=num_filled,
            scored=len(scored) * self._rollout.group_size,
            first_failure=next(iter(failures), None),
            first_group=first,
            prompts=[s.group.prompt_id for s in scored],
            without_signal=sorted(first + place for place in {*range(len(scored))} - {*chosen}),
            before_selection=None
            if self._dynamic.type == "none"
            else BeforeSelection.of([s.group for s in scored]),
            idle_s=requested.idle_s,
            running_groups=self._pool.running,
            ready_groups=self._pool.ready,
            left_out_prompts=self._task.num_left_out,
        )
        return [scored[i].group for i in chosen], stats

    def _counts_since_last_reply(self) -> tuple[ClientStats, int]:
        """Of the client, and the scorer's retries."""
        (stats, retries), self._counted = self._counted, (self._client.stats, self._scorer.retries)
        return self._counted[0] - stats, self._counted[1] - retries

    async def admit(self, count: int, *, newest: int, ahead: int) -> None:
        """Start the groups that ``next_groups`` with these arguments would start. The servers have version ``newest``."""
        await self._client.see_version(newest)
        self._pool.admit(count, ahead=ahead)

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
        if not self._task.heldout:
            return None
        config, most = self._evaluation, self._evaluation.max_prompts
        names = [None, *self._task.heldout_sets]
        sets = [
            choose_heldout(heldout, most)
            for heldout in (self._task.heldout, *self._task.heldout_sets.values())
        ]
        ways = [(config.samples_per_prompt, config.temperature)] + [(1, 0.0)] * config.greedy
        asked = [(prompt, *way) for prompts in sets for way in ways for prompt in prompts]
        set_of = [name for name, prompts in zip(names, sets, strict=True) for _ in ways for _ in prompts]
        to_keep = {prompt.prompt_id for prompts in sets for prompt in prompts[: self._kept_problems]}
        kept: dict[int, Group] = {}
        # All at once, so that the servers never wait for the last samples of one set or way.
        answers = await all_or_first_error(
            self._graded(*each, number=number, kept=kept if each[0].prompt_id in to_keep else None)
            for number, each in enumerate(asked)
        )
        failures = [
            failure
            for (prompt, *_), samples in zip(asked, answers, strict=True)
            for failure in _failed_rewards(prompt, samples)
        ]
        _log_failures(failures)
        if len(failures) == sum(map(len, answers)):
            raise SamplingError(_nothing_to_learn(failures, len(failures)))
        sources = self._summarise_sources(sets[0], answers)
        answered, results = iter(answers), []
        for prompts in sets:
            sampled, *greedy = (_summarise_samples(list(islice(answered, len(prompts)))) for _ in ways)
            results.append(replace(sampled, greedy=next(iter(greedy), None)))
        first, *others = results
        by_set = dict(zip(self._task.heldout_sets, others, strict=True))
        return replace(
            first,
            sets=by_set,
            sources=sources,
            first_failure=next(iter(failures), None),
            groups=[kept[number] for number in sorted(kept)],
            groups_from=[set_of[number] for number in sorted(kept)],
        )

    async def _graded(
        self, prompt: Prompt, count: int, temperature: float, *, number: int, kept: dict[int, Group] | None
    ) -> "list[Graded]":
        """kept: gets the samples as the group of this number."""
        samples = await self._evaluation_samples.sample(
            self._evaluation_client,
            prompt,
            self._sample_seeds(prompt, count, attempt=-1),
            temperature=temperature,
        )
        if kept is not None:
            if temperature != self._evaluation.temperature:
                prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}, at temperature {temperature:g}")
            kept[number] = _make_group(number, prompt, samples)
        return [
            Graded(
                reward=sample.reward,
                correct=sample.correct,
                error=sample.error,
                num_sampled=sample.num_sampled,
                is_truncated=sample.is_truncated,
            )
            for sample in samples
        ]

    def _summarise_sources(
        self, prompts: Sequence[Prompt], answers: "Sequence[Sequence[Graded]]"
    ) -> dict[str, EvaluationResult]:
        """answers: those to ``prompts`` come first; further ones are ignored."""
        by_source: dict[str, list[Sequence[Graded]]] = {}
        for prompt, samples in zip(prompts, answers, strict=False):
            if (source := self._scorer.source_name(prompt)) is not None:
                by_source.setdefault(source, []).append(samples)
        return {source: _summarise_samples(samples) for source, samples in sorted(by_source.items())}

    async def _sample_group(self, number: int) -> ScoredGroup:
        """The training group of this number, which is also its position in the order of the data."""
        prompt, size = self._prompt_at(number), self._rollout.group_size
        seeds = self._sample_seeds(prompt, size, attempt=number)
        samples = await self._samples.sample(
            self._client, prompt, seeds, temperature=self._rollout.temperature
        )
        return ScoredGroup(
            group=_make_group(number, prompt, samples),
            has_signal=_has_signal(samples, self._dynamic),
            failures=_failed_rewards(prompt, samples),
            num_usable=sum(sample.reward is not None for sample in samples),
        )

    def _sample_seeds(self, prompt: Prompt, count: int, *, attempt: int) -> list[int]:
        """attempt: the group's id; -1 in evaluations."""
        return [
            seed_of(json.dumps([self._seed, prompt.prompt_id, sibling, attempt])) for sibling in range(count)
        ]

    def _prompt_at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._task.train))
        return self._task.train[self._order_of(epoch)[index]]


def choose_heldout(heldout: Sequence[Prompt], max_prompts: int | None) -> list[Prompt]:
    """All held-out prompts, or the ``max_prompts`` with the lowest hashes, which do not depend on the file's
    order. No others are tokenised."""
    if max_prompts is None or max_prompts >= len(heldout):
        return list(heldout)
    hashes = [hashlib.sha256(prompt_id.encode()).digest() for prompt_id in ids_of(heldout)]
    return [
        heldout[index] for index in heapq.nsmallest(max_prompts, range(len(hashes)), key=hashes.__getitem__)
    ]


def choose_groups(has_signal: Sequence[bool], count: int) -> list[int]:
    """Ascending indices of the ``count`` groups to train on: all with signal, then the first ones without."""
    without = [i for i, signal in enumerate(has_signal) if not signal]
    return sorted([i for i, signal in enumerate(has_signal) if signal] + without[: count - sum(has_signal)])


def _has_signal(samples: Sequence[Sample], dynamic: DynamicSampling) -> bool:
    """Whether the siblings differ in the value that dynamic sampling compares; always True without it. Samples that
    were not scored do not count."""
    scored = [sample for sample in samples if sample.reward is not None]
    if dynamic.type == "none":
        return True
    values = different_rewards(scored) if dynamic.compare == "reward" else {s.correct for s in scored}
    return len(values) > 1


def _make_group(group_id: int, prompt: Prompt, samples: Sequence[Sample]) -> Group:
    trajectories = [t for i, sample in enumerate(samples) for t in sample.trajectories(group_id, i, prompt)]
    return Group(group_id=group_id, prompt_id=prompt.prompt_id, trajectories=trajectories)


def _failed_rewards(prompt: Prompt, samples: Sequence[Sample | Graded]) -> list[str]:
    """A line each, for a terminal: an error may hold what a model has written."""
    return [
        f"prompt {on_one_visible_line(prompt.prompt_id)}, sibling {sibling_id}, not scored: {on_one_visible_line(sample.error)}"
        for sibling_id, sample in enumerate(samples)
        if sample.error is not None
    ]


def _log_failures(failures: Sequence[str]) -> None:
    for failure in failures[:MAX_LOGGED_FAILURES]:
        logger.warning("a sample failed: %s", failure)
    if len(failures) > MAX_LOGGED_FAILURES:
        logger.warning("%d further samples failed in this step", len(failures) - MAX_LOGGED_FAILURES)


def _nothing_to_learn(failures: Sequence[str], count: int) -> str:
    if not failures:
        return (
            f"none of the {count} samples has a score: all reached a limit of the environment; raise the limit, or set "
            "environment.reward_at_limit"
        )
    return f"the rewards of all {count} samples failed: nothing can be learned; the first: {failures[0]}"


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
    """Standard error of the share of right samples, as the mean over clusters (problems) of equal size."""
    shares = [sum(samples) / len(samples) for samples in right]
    return statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None


def pass_at(k: int, *, samples: int, right: int) -> float:
    """1 - C(samples - right, k) / C(samples, k): the probability that k of a problem's samples, drawn without replacement,
    hold a right one. An unbiased estimate of 1 - (1 - p)^k, where k <= samples.

    Source: Chen et al. 2021 (arXiv 2107.03374), in its product form.
    """
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def _pass_at(right: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@k over problems with the same number of samples each: for k = 2, 4, 8, … and all samples."""
    most = len(right[0])
    ks = sorted({most, *(2**power for power in range(1, most.bit_length()))} - {1})
    return {
        k: statistics.fmean(pass_at(k, samples=most, right=sum(samples)) for samples in right) for k in ks
    }


def _summarise_samples(sampled: Sequence[Sequence[Graded]]) -> EvaluationResult:
    """A sample that was not scored has a reward of 0. It counts as wrong, unless only a reward part failed that does not
    decide correctness."""
    samples = [sample for samples in sampled for sample in samples]
    truncated = sum(sample.is_truncated for sample in samples)
    # An episode may fail before its first turn.
    lengths = [sample.num_sampled for sample in samples if sample.num_sampled]
    right = [[sample.correct for sample in samples] for samples in sampled]
    return EvaluationResult(
        accuracy=sum(sample.correct for sample in samples) / len(samples),
        reward_mean=sum(sample.reward or 0.0 for sample in samples) / len(samples),
        count=len(samples),
        accuracy_error=accuracy_error(right),
        pass_at=_pass_at(right),
        length_mean=sum(lengths) / max(len(lengths), 1),
        truncated_fraction=truncated / max(len(lengths), 1),
        failed=sum(sample.error is not None for sample in samples),
    )
