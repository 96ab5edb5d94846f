"""What the sample role asks of an inference engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.records import Completion


class GenerationError(RuntimeError):
    """A completion could not be obtained: retries used up, deadline passed, or the server refused the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """Counts since the client was made; they only grow."""

    requests: int = 0
    """Completions asked for, each counted once however often it was retried."""
    retries: int = 0
    """Attempts that failed in transport and were repeated."""
    generated_tokens: int = 0

    def __sub__(self, earlier: "ClientStats") -> "ClientStats":
        return ClientStats(
            requests=self.requests - earlier.requests,
            retries=self.retries - earlier.retries,
            generated_tokens=self.generated_tokens - earlier.generated_tokens,
        )


class GenerationClient(Protocol):
    """Token ids in, token ids out. Many calls run at once; how many reach the engine is the client's concern.

    Not its concern: prompts, groups, rewards, and which version is too old.
    """

    @property
    def stats(self) -> ClientStats: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> Completion:
        """One sampled response; a stop token that ended it is part of it.

        Log-probs are natural logs of softmax(logits / temperature) over the full vocabulary. ``seed`` fixes the sample
        on engines that run deterministically; others ignore it.

        Raises:
            GenerationError: no completion after retries, past the deadline, or the request was refused.
        """
        ...

    async def close(self) -> None: ...
