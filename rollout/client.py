"""What the sample role asks of an inference engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.records import Completion


class RolloutError(RuntimeError):
    """The rollout side failed, as the learner sees it: its own weights and optimizer are well."""


class GenerationError(RuntimeError):
    """Completions could not be obtained: retries used up, deadline passed, or the server refused the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """Counts since the client was made; they only grow."""

    requests: int = 0
    """Completions asked for, each counted once however often it was retried."""
    retries: int = 0
    """Attempts that failed in transport and were repeated; one attempt is for all samples of a request."""

    def __sub__(self, earlier: "ClientStats") -> "ClientStats":
        return ClientStats(
            requests=self.requests - earlier.requests,
            retries=self.retries - earlier.retries,
        )


class GenerationClient(Protocol):
    """Token ids in, token ids out. Many calls run at once; how many reach the engine is the client's concern.

    Not its concern: prompts, groups, rewards, and which version is too old.
    """

    @property
    def stats(self) -> ClientStats: ...

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Independent responses to one prompt, one per seed and in their order; a stop token that ended one
        is part of it.

        Log-probs are natural logs of softmax(logits / temperature) over the full vocabulary. A seed fixes its
        sample on engines that run deterministically; others ignore it.

        Raises:
            GenerationError: not every completion came after retries and before the deadline, or the request
            was refused.
        """
        ...

    async def close(self) -> None: ...
