"""A deterministic engine for unit tests of what surrounds an engine; no part of the product."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.client import ClientStats, GenerationError, KnownExperts, PromptTooLongError, Session
from rollout.environments.context import Texts
from rollout.environments.episodes import SingleTurns
from rollout.records import Completion, FinishReason
from tests.support.records import completion


def fake_tokens(
    prompt_ids: Sequence[int], seed: int, *, max_new_tokens: int, vocab_size: int, stop: int
) -> list[int]:
    """Tokens that depend only on prompt and seed; about one response in two ends early with ``stop``."""
    digest = hashlib.sha256(repr((list(prompt_ids), seed)).encode()).digest()
    length = 1 + digest[0] % (2 * max_new_tokens)
    tokens = [digest[1 + i % 31] % vocab_size for i in range(min(length, max_new_tokens))]
    tokens = [token if token != stop else (token + 1) % vocab_size for token in tokens]
    return [*tokens[:-1], stop] if length <= max_new_tokens else tokens


def single_turns(tokenizer: Any, scorer: Any, *, max_new_tokens: int, stop: int = 0) -> SingleTurns:
    """What makes samples of single responses, scored by ``scorer``."""
    return SingleTurns(
        texts=Texts(tokenizer=tokenizer, end_token_ids=frozenset([stop]), vocab_size=2**31),
        max_new_tokens=max_new_tokens,
        score=scorer.score,
    )


@dataclass
class FakeEngine:
    """A ``GenerationClient``. Groups finish in a scrambled order; a test chooses failures by prompt and seed."""

    version: int = 0
    vocab_size: int = 20
    fail: Callable[[Sequence[int], int], bool] = lambda prompt_ids, seed: False
    longest_prompt: int = 2**31
    stats: ClientStats = field(default_factory=ClientStats)
    calls: list[tuple[tuple[int, ...], int, float]] = field(default_factory=list)
    """(prompt, seed, temperature) of every sample, in the order they were asked for."""

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seeds: Sequence[int],
        session: Session | None = None,
        known_experts: KnownExperts | None = None,
    ) -> list[Completion]:
        self.calls += [(tuple(prompt_ids), seed, temperature) for seed in seeds]
        for _ in range(seeds[0] % 5):  # groups finish in another order than they started in
            await asyncio.sleep(0)
        if len(prompt_ids) > self.longest_prompt:
            raise PromptTooLongError(f"asked to refuse {len(prompt_ids)} tokens")
        if any(self.fail(prompt_ids, seed) for seed in seeds):
            raise GenerationError(f"asked to fail for {list(prompt_ids)}")
        (stop, *_) = stop_token_ids
        responses = [
            fake_tokens(
                prompt_ids, seed, max_new_tokens=max_new_tokens, vocab_size=self.vocab_size, stop=stop
            )
            for seed in seeds
        ]
        self.stats = replace(self.stats, requests=self.stats.requests + len(seeds))
        return [
            completion(
                prompt_ids=prompt_ids,
                token_ids=tokens,
                rollout_logprobs=[-(1 + token) / (temperature or 1.0) for token in tokens],
                token_versions=[self.version] * len(tokens),
                finish_reason=FinishReason.STOP if tokens[-1] == stop else FinishReason.LENGTH,
            )
            for tokens in responses
        ]

    def with_own_places(self, *, top_p: float = 1.0, top_k: int = -1) -> "FakeEngine":
        return self

    async def see_version(self, newest: int) -> None:
        return None

    async def drain(self, within_s: float) -> None:
        return None

    def reopen(self) -> None:
        return None

    async def close(self) -> None:
        return None
