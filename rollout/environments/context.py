"""The contexts of one episode: each is a sequence of tokens, and the engine that continues it."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollout.client import GenerationClient, Session
from rollout.environments.protocol import EpisodeEnded
from rollout.environments.sequence import TokenSequence
from rollout.records import Completion, FinishReason, Prompt, Score, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_turns: int
    """Of all sequences together."""
    max_tokens: int
    """Of a whole sequence."""
    max_new_tokens: int
    """Of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Text to tokens and back, where an environment needs text."""

    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: frozenset[int]
    """Tokens that end a response; they are no part of its text."""

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: np.ndarray) -> str:
        # Only the end token is dropped. Special tokens in the middle stay, or `1<pad>+2` would score as `1+2`.
        ids = token_ids.tolist()
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@dataclass(slots=True)
class _Count:
    value: int = 0


ScoreText = Callable[[Prompt, str, int, FinishReason], Awaitable[Score]]
"""f(problem, response_text, num_tokens, finish_reason): the run's reward."""


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
        self.sequence, self._session = TokenSequence(), Session()
        self._forks: list[EpisodeContext] = []
        self._turns_of_episode = _Count()
        self._client, self._problem, self._seed = client, problem, seed
        self._temperature, self._limits, self._texts, self._score = temperature, limits, texts, score

    @property
    def token_ids(self) -> np.ndarray:
        return self.sequence.token_ids

    def sequences(self) -> list[TokenSequence]:
        """Of the episode, which this context began: its own, and behind it each fork with the forks of that."""
        return [self.sequence, *(one for fork in self._forks for one in fork.sequences())]

    def fork(self, at: int | None = None) -> "EpisodeContext":
        fork = copy(self)  # the engine, the limits, and the count of turns are shared
        fork.sequence, fork._forks = self.sequence.beginning(at), []
        fork._seed = _derived(self._seed, f"fork {len(self._forks)}")
        self._forks.append(fork)
        return fork

    def observe(self, token_ids: Sequence[int]) -> None:
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
        turn, length = self._turns_of_episode.value, len(self.sequence)
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
        self._turns_of_episode.value += 1  # before the answer: forks may act at the same time
        (completion,) = await self._client.generate_group(
            self.sequence.token_ids.tolist(),
            max_new_tokens=min(
                max_new_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens, room
            ),
            temperature=self._temperature,
            stop_token_ids=[*self._texts.end_token_ids, *stop_token_ids],
            seeds=[turn_seed(self._seed, len(self.sequence.turns))],
            session=self._session,
        )
        self.sequence.append(completion)
        return completion

    def encode(self, text: str) -> list[int]:
        return self._texts.encode(text)

    def decode(self, completion: Completion) -> str:
        return self._texts.decode(completion.token_ids)

    async def score(self, response_text: str) -> Score:
        turns = self.sequence.turns
        num_tokens = sum(turn.end - turn.start for turn in turns)
        finish_reason = turns[-1].finish_reason if turns else FinishReason.STOP
        return await self._score(self._problem, response_text, num_tokens, finish_reason)


def turn_seed(episode_seed: int, turn: int) -> int:
    """31 bits. The first turn has the episode's own seed, like a single-turn sample."""
    if turn == 0:
        return episode_seed
    return _derived(episode_seed, f"turn {turn}")


def _derived(seed: int, what: str) -> int:
    digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
