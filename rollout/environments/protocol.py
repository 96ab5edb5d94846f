"""The interface of an environment of tokens.

An environment plays one episode per call of ``run``. It adds tokens to the context (``observe``), has the policy
continue them (``act``), and ends with an outcome. Sampled tokens never leave the context to come back as text, so
nothing is tokenised twice: the prompt of a turn begins, token by token, with the prompt and the response of the
turn before.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollout.records import Completion, Prompt, Score, Status


class _EpisodeOver(Exception):
    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class EpisodeEnded(_EpisodeOver):
    """A limit of the config ends the episode. An environment need not catch it: the outcome is then
    ``reward_at_limit`` of the config with this status."""


class EpisodeFailed(_EpisodeOver):
    """The episode is not scored. The message is complete: no line of code is added to it."""


def episode_failed(message: str) -> EpisodeFailed:
    """An ``EpisodeFailed`` that no limit and no reward has caused."""
    return EpisodeFailed(Status.FAILED, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an episode."""

    reward: float | None
    """None: not scored. The episode is then neither trained on nor part of its group's baseline."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Recorded as ``reward/part/NAME``."""
    correct: bool | None = None
    """Whether the episode counts as right in an evaluation. None: it does if the reward is at least 1."""
    status: Status = Status.OK
    error: str | None = None
    """Why the episode was not scored."""

    @classmethod
    def of(cls, score: Score, **parts: float) -> "Outcome":
        """The outcome of a score by the run's reward, with further ``parts``. A failed score gives no reward
        and no parts. ``correct`` is still taken from the score: the deciding part may have been computed.

        Raises TypeError for a number: a reward of the environment's own is ``Outcome(reward=...)``."""
        if not isinstance(score, Score):
            raise TypeError(
                f"Outcome.of takes what `await context.score(text)` returns, not {score!r}; a reward of your own is Outcome(reward=...)"
            )
        if score.error is not None:
            return cls(reward=None, correct=score.correct, status=Status.REWARD_FAILED, error=score.error)
        return cls(reward=score.value, parts={**score.parts, **parts}, correct=score.correct)


class Context(Protocol):
    """One growing sequence of tokens. An episode has one, and one more for each fork."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n]: the tokens so far."""
        ...

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not trained on: a prompt, the answer of a tool, feedback.

        Raises:
            EpisodeEnded: the sequence would be longer than ``environment.max_tokens``.
            ValueError: one of them is no token of the model.
            RuntimeError: a turn of this context is under way.
        """
        ...

    async def act(
        self, *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Have the policy continue the tokens so far, and append what it samples, the end token included.

        Args:
            max_new_tokens: at most ``rollout.max_new_tokens`` (in evaluations ``evaluation.max_new_tokens``), which is the
                default.
            stop_token_ids: tokens that end this turn, in addition to the model's own end tokens and to ``rollout.stop``.

        Raises EpisodeEnded: the sequence is full (``environment.max_tokens``), or this turn would be one more
        than ``environment.max_turns``.
        """
        ...

    def reward_turn(self, reward: float, turn: int = -1) -> None:
        """Credit a turn of this sequence with this much of the outcome's reward. Several rewards of a turn add up.

        ``Outcome.reward`` stays the reward of the whole episode. The part that no turn was credited with belongs to
        the last turn. By default (``advantage.credit: episode``) all turns of an episode have the same advantage, and
        turn rewards change only the records.

        Args:
            turn: its number among the turns that this sequence sampled, from 0; -1: the last.

        Raises:
            RuntimeError: a turn of this context is under way.
            ValueError: there is no such turn, or the reward is no finite number.
        """
        ...

    def fork(self, at: int | None = None) -> "Context":
        """A further sequence of the same episode. It begins with the first ``at`` tokens of this one. Use it for a
        sub-agent, or for a history that is rewritten.

        The shared tokens are trained on once, here. All sequences of an episode have its outcome, count once in
        their group's baseline, and share ``environment.max_turns``. They may act at the same time. A sequence
        without a turn is dropped. ``at``: None for all tokens so far, 0 for none of them.

        Raises ValueError: this sequence has fewer tokens.
        """
        ...

    def deadline(self, seconds: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """``asyncio.timeout`` for parts of the episode. As with ``environment.timeout_s``, some time does not count: a turn's
        wait for servers or for a place there, and the time of ``score``."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""
        ...

    def decode(self, completion: Completion) -> str:
        """The text of a turn without the model's end token. A token of ``stop_token_ids``, or a text of ``rollout.stop``, stays."""
        ...

    async def score(self, response_text: str) -> Score:
        """The run's reward of this text as the response to the problem, with the length and the finish
        reason of the last turn. A reward that fails gives a score with an error."""
        ...


class Environment(Protocol):
    """Made once per run with the ``options`` of the config as arguments; episodes run at the same time."""

    async def run(self, problem: Prompt, context: Context) -> Outcome:
        """Play one episode. It is cancelled after ``environment.timeout_s``: clean up in ``finally``.

        Any exception but EpisodeEnded ends the episode without a score, and is reported. Requests that are still under
        way end with the episode.
        """
        ...
