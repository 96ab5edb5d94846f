"""The records that sampling produces. All are frozen; L counts prompt and response tokens, R response tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its answer with an end-of-sequence token, which is part of the response."""
    LENGTH = "length"
    """max_new_tokens were sampled without an end."""


class TrajectoryStatus(StrEnum):
    OK = "ok"
    REWARD_FAILED = "reward_failed"
    """The reward function raised or ran out of time: scored 0, counted in the metrics, still trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. ``reference`` is what the reward needs to know of the right answer."""

    prompt_id: str
    token_ids: list[int]
    text: str
    task: str
    reference: str
    row: Mapping[str, Any] | None = None
    """The whole record of the data file, where a reward function may ask for it."""
    place: str | None = None
    """Where it stands in a file, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response, as the server gave it: no retokenisation anywhere."""

    token_ids: list[int]
    rollout_logprobs: list[float]
    """Natural logs of softmax(logits / temperature) over the full vocabulary, one per token."""
    token_versions: list[int]
    """Weight version that sampled each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function said of one response."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    """Whether the response counts as right in an evaluation; said by ``Scorer``, not by single reward
    functions."""
    error: str | None = None
    """Why scoring failed (what failed counts 0), else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A prompt with one response and its score; lists are aligned with ``token_ids``, zeros on prompt tokens."""

    group_id: int
    sibling_id: int
    prompt_id: str
    token_ids: list[int]
    response_mask: list[bool]
    """False on prompt (and later: tool) tokens."""
    rollout_logprobs: list[float]
    token_versions: list[int]
    finish_reason: FinishReason
    reward: float
    """Lands on the last response token."""
    reward_parts: dict[str, float]
    status: TrajectoryStatus = TrajectoryStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G siblings of one prompt."""

    group_id: int
    prompt_id: str
    trajectories: list[Trajectory]
