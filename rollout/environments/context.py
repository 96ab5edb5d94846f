"""The contexts of one episode: each is a sequence of tokens with the engine that continues it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.byte_level import decoder_of
from rollout.client import GenerationClient, PromptTooLongError, Session
from rollout.environments.clock import EpisodeClock
from rollout.environments.protocol import EpisodeEnded
from rollout.environments.sequence import TokenSequence
from rollout.gathering import TasksToEnd
from rollout.records import Completion, FinishReason, Prompt, Score, Status, seed_of
from rollout.rewards.function import to_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_turns: int
    """Turns of all sequences together."""
    max_tokens: int
    """Tokens of a whole sequence."""
    max_new_tokens: int
    """Sampled tokens of one turn."""
    max_prompt_tokens: int = 2**31 - 1
    """Tokens that a turn may continue: servers accept no longer prompt."""


class Texts:
    """Text to tokens and back, where an environment needs text.

    end_token_ids: they end a response, and are no part of its text. vocab_size: the model's; token ids are
    below it.
    """

    def __init__(
        self, *, tokenizer: "PreTrainedTokenizerBase", end_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.tokenizer, self.end_token_ids, self.vocab_size = tokenizer, end_token_ids, vocab_size
        self._text_of = decoder_of(tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: np.ndarray) -> str:
        # Only the end token is dropped. Special tokens in the middle stay, or `1<pad>+2` would score as `1+2`.
        if len(token_ids) and int(token_ids[-1]) in self.end_token_ids:
            token_ids = token_ids[:-1]
        return self._text_of(token_ids)


@dataclass(slots=True)
class _Episode:
    """What the contexts of an episode share."""

    turns: int = 0
    """Requested turns of all sequences."""
    requests: TasksToEnd = field(default_factory=TasksToEnd)
    is_over: bool = False
    clock: EpisodeClock = field(default_factory=EpisodeClock)


ScoreText = Callable[..., Coroutine[Any, Any, Score]]
"""f(problem, response_text, *, num_tokens, finish_reason): the run's reward (``Scorer.score``)."""


class EpisodeContext:
    """See ``protocol.Context``."""

    def __init__(
        self,
        *,
        client: GenerationClient,
        problem: Prompt,
        seed: int,
        temperature: float,
        limits: EpisodeLimits,
        texts: Texts,
        score: ScoreText,
    ) -> None:
        self._episode, self._is_acting = _Episode(), False
        self.sequence, self._session = TokenSequence(), Session(waiting=self._episode.clock.stopped)
        self._forks: list[EpisodeContext] = []
        self._client, self._problem, self._seed = client, problem, seed
        self._temperature, self._limits, self._texts, self._score = temperature, limits, texts, score

    @property
    def token_ids(self) -> np.ndarray:
        return self.sequence.token_ids

    def sequences(self) -> list[TokenSequence]:
        """All sequences of the episode that this context began: its own, then each fork followed by that fork's forks.
        Without recursion: if an agent rewrites its last message at each turn, each sequence is a fork of the one before."""
        sequences, left = list[TokenSequence](), list[EpisodeContext]([self])
        while left:
            context = left.pop()
            sequences.append(context.sequence)
            left += reversed(context._forks)
        return sequences

    def deadline(self, seconds: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        return self._episode.clock.deadline(seconds)

    async def end(self) -> None:
        """End the requests of all contexts of the episode. The contexts cannot be used afterwards."""
        self._episode.is_over = True
        await self._episode.requests.end()

    def fork(self, at: int | None = None) -> "EpisodeContext":
        self._require_running()
        fork = copy(self)  # it shares the engine, the limits and the episode
        fork.sequence, fork._forks, fork._is_acting = self.sequence.beginning(at), [], False
        fork._seed = seed_of(f"{self._seed} fork {len(self._forks)}")
        self._forks.append(fork)
        return fork

    def observe(self, token_ids: Sequence[int]) -> None:
        self._require_idle("observe")
        self._require_tokens(token_ids)
        room = self._limits.max_tokens - len(self.sequence)
        if len(token_ids) > room:
            raise EpisodeEnded(
                Status.TOKEN_LIMIT,
                f"an observation of {len(token_ids)} tokens follows {len(self.sequence)} tokens, "
                f"but environment.max_tokens={self._limits.max_tokens}",
            )
        self.sequence.observe(token_ids)

    async def act(
        self, *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        self._require_idle("act")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        self._require_tokens(stop_token_ids)
        turn, length = self._episode.turns, len(self.sequence)
        if not length:
            raise ValueError("act() before observe(): there is nothing to continue; observe the prompt first")
        if turn >= self._limits.max_turns:
            raise EpisodeEnded(
                Status.TURN_LIMIT, f"turn {turn + 1}, but environment.max_turns={self._limits.max_turns}"
            )
        room = self._limits.max_tokens - length
        if room < 1:
            raise EpisodeEnded(
                Status.TOKEN_LIMIT,
                f"turn {turn + 1} follows {length} tokens, but environment.max_tokens={self._limits.max_tokens}",
            )
        if length > self._limits.max_prompt_tokens:
            raise EpisodeEnded(
                Status.TOKEN_LIMIT,
                f"turn {turn + 1} follows {length} tokens, but the servers continue at most {self._limits.max_prompt_tokens}",
            )
        self._episode.turns += 1  # counted before the answer, since forks may act at the same time
        request = self._episode.requests.start(
            self._client.generate_group(
                self.sequence.token_ids.tolist(),
                max_new_tokens=min(
                    max_new_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens, room
                ),
                temperature=self._temperature,
                stop_token_ids=[*self._texts.end_token_ids, *stop_token_ids],
                seeds=[turn_seed(self._seed, len(self.sequence.turns))],
                session=self._session,
                known_experts=self.sequence.known_experts,
            )
        )
        self._is_acting = True
        try:
            (completion,) = await request
        except PromptTooLongError as error:
            self._episode.turns -= 1
            raise EpisodeEnded(
                Status.TOKEN_LIMIT, f"turn {turn + 1} follows {length} tokens: {error}"
            ) from error
        finally:
            self._is_acting = False
        self._require_running()
        self.sequence.append(completion)
        return completion

    def reward_turn(self, reward: float, turn: int = -1) -> None:
        self._require_idle("reward_turn")
        self.sequence.reward_turn(to_score(reward).value, turn)

    def encode(self, text: str) -> list[int]:
        return self._texts.encode(text)

    def decode(self, completion: Completion) -> str:
        return self._texts.decode(completion.token_ids)

    async def score(self, response_text: str) -> Score:
        turns = self.sequence.turns
        num_tokens = turns[-1].end - turns[-1].start if turns else 0
        finish_reason = turns[-1].finish_reason if turns else FinishReason.STOP
        with self._episode.clock.stopped():  # a reward has its own time limits
            return await self._score(
                self._problem, response_text, num_tokens=num_tokens, finish_reason=finish_reason
            )

    def _require_running(self) -> None:
        if self._episode.is_over:
            raise RuntimeError("the episode is over; await everything that it starts before run() returns")

    def _require_idle(self, what: str) -> None:
        self._require_running()
        if self._is_acting:
            raise RuntimeError(f"{what}() while act() is under way; await it first, or fork the context")

    def _require_tokens(self, token_ids: Sequence[int]) -> None:
        ids, most = np.asarray(token_ids), self._texts.vocab_size - 1
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > most):
            wrong = next((i for i in token_ids if type(i) is not int or not 0 <= i <= most), token_ids[0])
            raise ValueError(f"{wrong!r} is not a token id; token ids are integers from 0 to {most}")


def turn_seed(episode_seed: int, turn: int) -> int:
    """31 bits. The first turn has the episode's own seed, like a single-turn sample."""
    return seed_of(f"{episode_seed} turn {turn}") if turn else episode_seed
