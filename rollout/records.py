"""The records that sampling produces, all frozen. What a response has per token is in numpy arrays, from the server's
answer to the learner's tensors: a step may have millions of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

TOKEN_IDS, LOGPROBS, VERSIONS, MASK = np.int32, np.float32, np.int32, np.bool_
"""Types of the arrays. SGLang's log-probs are float32 numbers, which JSON writes in full."""


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


class _WithArrays:
    """Equal where all fields are. (A dataclass' own comparison asks an array for one truth.)"""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            np.array_equal(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(_WithArrays):
    """One sampled response in the server's own tokens; text is never tokenised again."""

    token_ids: np.ndarray
    """int32 [n]"""
    rollout_logprobs: np.ndarray
    """float32 [n]: natural logs of softmax(logits / temperature) over the full vocabulary."""
    token_versions: np.ndarray
    """int32 [n]: weight version that sampled each token."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(_WithArrays):
    """A prompt with one response and its score. Arrays are aligned with ``token_ids``, with 0 on prompt tokens."""

    group_id: int
    sibling_id: int
    prompt_id: str
    token_ids: np.ndarray
    """int32 [n]"""
    response_mask: np.ndarray
    """bool [n]: False on prompt (and later: tool) tokens."""
    rollout_logprobs: np.ndarray
    """float32 [n]"""
    token_versions: np.ndarray
    """int32 [n]"""
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
