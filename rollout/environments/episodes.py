"""Samples of one prompt: single responses, or episodes of an environment. The sampler knows only ``SampleMaker``."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from configs.schema.environment import EnvironmentLimits
from rollout.client import GenerationClient, GenerationError, PromptTooLongError
from rollout.environments.context import EpisodeContext, EpisodeLimits, ScoreText, Texts
from rollout.environments.protocol import Environment, EpisodeEnded, EpisodeFailed, Outcome
from rollout.environments.sequence import TokenSequence
from rollout.environments.tandem_worker.failures import describe
from rollout.gathering import all_or_first_error
from rollout.records import FinishReason, Prompt, Status, Trajectory
from rollout.rewards.function import to_score
from rollout.rewards.served import RewardModelError
from rollout.rewards.worker import WorkerStartError

ENDS_THE_RUN = (GenerationError, RewardModelError, WorkerStartError)
"""Errors of the engines and rewards. No episode causes them, so they end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored sample."""

    sequences: list[TokenSequence]
    """One, and one more for each fork of an episode."""
    reward: float | None
    parts: dict[str, float]
    correct: bool
    status: Status
    error: str | None
    """Why the reward or the episode failed."""

    @classmethod
    def of(cls, sequences: list[TokenSequence], outcome: Outcome) -> Self:
        right = outcome.reward is not None and outcome.reward >= 1.0
        return cls(
            sequences=sequences,
            reward=outcome.reward,
            parts=dict(outcome.parts),
            correct=right if outcome.correct is None else outcome.correct,
            status=outcome.status,
            error=outcome.error,
        )

    @property
    def sequence(self) -> TokenSequence:
        """The first sequence."""
        return self.sequences[0]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(turn.end - turn.start for sequence in self.sequences for turn in sequence.turns)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of tokens cut off the last turn of the first sequence."""
        turns = self.sequence.turns
        return bool(turns) and turns[-1].finish_reason is FinishReason.LENGTH

    def trajectories(self, group_id: int, sibling_id: int, prompt: Prompt) -> list[Trajectory]:
        """One per sequence."""
        return [
            sequence.trajectory(
                group_id=group_id,
                sibling_id=sibling_id,
                prompt_id=prompt.prompt_id,
                reward=self.reward,
                reward_parts=self.parts,
                status=self.status,
                branch=branch,
            )
            for branch, sequence in enumerate(self.sequences)
        ]


class SingleTurns:
    """Each sample is one response to the prompt. All siblings are one request; they are scored while other groups
    are still being sampled."""

    def __init__(self, *, texts: Texts, max_new_tokens: int, score: ScoreText):
        self._texts, self._max_new_tokens, self._score = texts, max_new_tokens, score

    async def sample(
        self, client: GenerationClient, prompt: Prompt, seeds: Sequence[int], *, temperature: float
    ) -> list[Sample]:
        try:
            completions = await client.generate_group(
                prompt.token_ids,
                max_new_tokens=self._max_new_tokens,
                temperature=temperature,
                stop_token_ids=[*self._texts.end_token_ids],
                seeds=seeds,
            )
        except PromptTooLongError as error:
            outcome = Outcome(reward=None, status=Status.TOKEN_LIMIT, error=str(error))
            return [Sample.of([_with_something_to_pack(TokenSequence(), prompt)], outcome) for _ in seeds]
        scores = await all_or_first_error(
            self._score(
                prompt,
                self._texts.decode(c.token_ids),
                num_tokens=len(c.token_ids),
                finish_reason=c.finish_reason,
            )
            for c in completions
        )
        return [
            Sample.of([TokenSequence.of_single_turn(prompt.token_ids, completion)], Outcome.of(score))
            for completion, score in zip(completions, scores, strict=True)
        ]


class Episodes:
    """Each sample is an episode of ``environment``. At most ``limits.max_concurrency`` run at once."""

    def __init__(
        self,
        environment: Environment,
        *,
        config: EnvironmentLimits,
        limits: EpisodeLimits,
        texts: Texts,
        score: ScoreText,
        end_s: float = 0.0,
    ) -> None:
        """end_s: further time for an environment that watches ``timeout_s`` itself, to end its episode."""
        self._environment, self._config, self._limits = environment, config, limits
        self._texts, self._score, self._end_s = texts, score, end_s
        self._places = asyncio.Semaphore(config.max_concurrency)

    async def sample(
        self, client: GenerationClient, prompt: Prompt, seeds: Sequence[int], *, temperature: float
    ) -> list[Sample]:
        contexts = [
            EpisodeContext(
                client=client,
                problem=prompt,
                seed=seed,
                temperature=temperature,
                limits=self._limits,
                texts=self._texts,
                score=self._score,
            )
            for seed in seeds
        ]
        return await all_or_first_error(self._play(prompt, context) for context in contexts)

    async def _play(self, prompt: Prompt, context: EpisodeContext) -> Sample:
        async with self._places:
            outcome = await self._outcome(prompt, context)
        with_turns = [sequence for sequence in context.sequences() if sequence.turns]
        return Sample.of(with_turns or [_with_something_to_pack(context.sequence, prompt)], outcome)

    async def _outcome(self, prompt: Prompt, context: EpisodeContext) -> Outcome:
        try:
            async with context.deadline(self._config.timeout_s + self._end_s) as deadline:
                outcome = checked(await self._run(prompt, context))
        except EpisodeEnded as end:
            outcome = Outcome(reward=self._config.reward_at_limit, status=end.status)
        except ENDS_THE_RUN:
            raise
        except TimeoutError as error:
            return self._late() if deadline.expired() else _failed(error)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return _failed(error)  # the environment has cancelled one of its own tasks
        except Exception as error:  # the user's code may raise anything
            return _failed(error)
        if not any(sequence.turns for sequence in context.sequences()):
            error = "the episode ended before the policy's first turn"
            return Outcome(reward=None, status=outcome.status, error=error)
        return outcome

    def _late(self) -> Outcome:
        limit = f"no outcome within environment.timeout_s={self._config.timeout_s:g} s"
        if self._end_s:
            limit += f" and {self._end_s:g} s more to end the episode"
        return Outcome(reward=None, status=Status.TIME_LIMIT, error=limit)

    async def _run(self, prompt: Prompt, context: EpisodeContext) -> object:
        """What the environment returns. Its unfinished requests are ended."""
        with _one_error():
            try:
                return await self._environment.run(prompt, context)
            finally:
                await context.end()


SampleMaker = SingleTurns | Episodes
"""Its ``sample`` gives one scored sample per seed."""


@contextmanager
def _one_error() -> Iterator[None]:
    """Replace an exception group, which forks in an asyncio.TaskGroup raise, with the most important of its errors."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = list(_leaves(group))
        for kind in (ENDS_THE_RUN, (EpisodeEnded, EpisodeFailed), BaseException):
            for error in errors:
                if isinstance(error, kind):
                    raise error from group


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _with_something_to_pack(sequence: TokenSequence, prompt: Prompt) -> TokenSequence:
    """The sequence, with the prompt appended if it is too short: packing needs at least two tokens, and an episode that
    failed before it observed its prompt has none."""
    while len(sequence) < 2:
        sequence.observe(prompt.token_ids)
    return sequence


def checked(outcome: object) -> Outcome:
    """The outcome with plain values. If its reward is not a finite number, the outcome has no score. Raises TypeError if it
    is not an Outcome, if its status is not a Status, if its parts do not map names to numbers, or if it has a reward and an error."""
    if not isinstance(outcome, Outcome):
        raise TypeError(f"run() returned {type(outcome).__name__}; return an Outcome")
    if not isinstance(outcome.status, Status):
        raise TypeError(f"run() returned the status {outcome.status!r}; give a Status, or leave it out")
    outcome = replace(
        outcome,
        correct=None if outcome.correct is None else bool(outcome.correct),
        error=None if outcome.error is None else str(outcome.error),
    )
    if outcome.reward is None:
        return replace(outcome, parts={}, error=outcome.error or "the environment gave no reward")
    if outcome.error is not None:
        raise TypeError(
            f"run() returned the reward {outcome.reward!r} with the error {outcome.error!r}, but an episode with an error is not "
            "scored; give the reward None, or leave out the error"
        )
    try:
        score = to_score((outcome.reward, dict(outcome.parts)))
    except ValueError as error:
        return Outcome(reward=None, status=Status.REWARD_FAILED, error=str(error))
    return replace(outcome, reward=score.value, parts=score.parts)


def _failed(error: BaseException) -> Outcome:
    if isinstance(error, EpisodeFailed):
        return Outcome(reward=None, status=error.status, error=str(error))
    return Outcome(reward=None, status=Status.FAILED, error=f"the environment raised {describe(error)}")
