"""The records that sampling produces, all frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"
    """The response ends with an end-of-sequence token, which is part of it."""
    LENGTH = "length"
    """The response reached max_new_tokens without an end."""


class TrajectoryStatus(StrEnum):
    OK = "ok"
    REWARD_FAILED = "reward_failed"
    """The reward function raised or ran out of time: scored 0, counted in the metrics, still trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. ``reference`` is the right answer, in the form that the reward compares with."""

    prompt_id: str
    token_ids: list[int]
    text: str
    task: str
    reference: str
    row: Mapping[str, Any] | None = None
    """The whole record of the data file, where the reward function may read it."""
    place: str | None = None
    """File and line or row, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response in the server's own tokens; text is never tokenised again."""

    token_ids: list[int]
    rollout_logprobs: list[float]
    """Natural logs of softmax(logits / temperature) over the full vocabulary, one per token."""
    token_versions: list[int]
    """Weight version that sampled each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one response."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    """Whether the response counts as right in an evaluation. ``Scorer`` sets it; single rewards do not."""
    error: str | None = None
    """Why scoring failed; a failed score counts 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A prompt with one response and its score. Lists are aligned with ``token_ids``, with 0 on prompt tokens."""

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
    """Reward of the whole response; the learner puts it on the last response token."""
    reward_parts: dict[str, float]
    status: TrajectoryStatus = TrajectoryStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G siblings of one prompt."""

    group_id: int
    prompt_id: str
    trajectories: list[Trajectory]
