"""The interface between the sample role and an inference engine."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rollout.records import Completion


class RolloutError(RuntimeError):
    """The rollout side failed; the learner's own weights and optimizer are intact."""


class GenerationError(RuntimeError):
    """Completions could not be obtained: retries used up, deadline passed, or the server refused the request."""


class PromptTooLongError(GenerationError):
    """The server has no room for this prompt and an answer. The servers are healthy and answer other prompts."""


class AttemptFailed(Exception):
    """One attempt at a request failed, and another may succeed."""

    def __init__(self, message: str = "", *, wait_s: float = 0.0) -> None:
        """wait_s: the wait before the next request that the server asked for."""
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """Counts since the client was made; they never fall."""

    requests: int = 0
    """Completions requested; retries of a completion do not count."""
    retries: int = 0
    """Completions requested again after an attempt failed in transport or ran out of time. All completions of the failed
    attempt count."""
    idle_s: float = 0.0
    """Seconds in which no sample was at the servers, from the first sample on."""

    def __sub__(self, earlier: "ClientStats") -> "ClientStats":
        return ClientStats(
            requests=self.requests - earlier.requests,
            retries=self.retries - earlier.retries,
            idle_s=self.idle_s - earlier.idle_s,
        )


@dataclass(slots=True, eq=False)
class Session:
    """Requests that continue one another. They go to the same server while it is up, to use its prefix cache."""

    server: object = None
    """Only the client sets and reads it."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a request waits for a place, for the end of a drain, or for a server that restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownExperts:
    """The experts of a prompt's first tokens are known from an earlier request."""

    before: int
    """The number of these tokens."""
    version: int
    """The weights that chose the experts."""


class GenerationClient(Protocol):
    """Token ids in, token ids out. Many calls run at once; the client limits how many reach the engine.

    Prompts, groups, rewards and the limit of staleness are not its concern.
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
        session: Session | None = None,
        known_experts: KnownExperts | None = None,
    ) -> list[Completion]:
        """Independent responses to one prompt, one per seed, in the order of the seeds. The stop token that
        ended a response is part of it.

        known_experts: if the client requests experts, the answer may omit those of these input tokens, as long as the weights
        that chose them sample the whole response. None: the answer has the experts of all input tokens.

        Log-probs are natural logs of softmax(logits / temperature) over the full vocabulary. If the client's sampler is
        truncated, they are over each token's kept ids, which the completion then has. A seed fixes its sample on engines
        that run deterministically; other engines ignore it.

        Raises:
            PromptTooLongError: the server has no room for the prompt.
            GenerationError: retries or time ran out before all completions came, or the request was refused.
        """
        ...

    def with_own_places(self, *, top_p: float = 1.0, top_k: int = -1) -> "GenerationClient":
        """A client of the same engine for samples that are not trained on. They do not queue behind this client's samples,
        have no experts, and come from the fewest ids whose probabilities sum to ``top_p``, of the ``top_k`` likeliest (-1: of
        all). Their log-probs are over the full vocabulary. The new client counts its own stats."""
        ...

    async def see_version(self, newest: int) -> None:
        """The engine's weights now have version ``newest``. Lost servers are used again once they have it."""
        ...

    async def drain(self, within_s: float) -> None:
        """Return when no sample is at the engine, or after ``within_s`` seconds. Further samples wait in the client until
        ``reopen``."""
        ...

    def reopen(self) -> None: ...

    async def close(self) -> None: ...
