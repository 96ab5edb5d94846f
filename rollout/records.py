"""The records that sampling produces, all frozen. Values per token stay in numpy arrays, from the server's answer to
the learner's tensors, because a step may have millions of tokens."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

TOKEN_IDS, LOGPROBS, VERSIONS, MASK, COUNTS = np.int32, np.float32, np.int32, np.bool_, np.int32
"""Types of the arrays. SGLang's log-probs are float32, and JSON has all their digits."""
EXPERTS = (np.uint8, np.int16)
"""Types of experts' ids: the smaller one that fits the model's number of experts."""


Message = Mapping[str, Any]
"""One message of a conversation: ``role``, ``content``, and other keys that a chat template reads."""
Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class WithTools:
    """A prompt whose chat template also renders tools."""

    messages: Messages
    tools: tuple[Mapping[str, Any], ...]
    """Their JSON schemas, from the record."""


DataPrompt = str | Messages | WithTools
"""A prompt of a data file. A text becomes the user's message if there is a chat template."""


def messages_of(prompt: DataPrompt) -> Messages:
    if isinstance(prompt, WithTools):
        return prompt.messages
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


class FinishReason(StrEnum):
    STOP = "stop"
    """The response ends with an end-of-sequence token, or with the token that completes a text of ``rollout.stop``. The token is
    part of it."""
    LENGTH = "length"
    """The response reached max_new_tokens without an end."""


class Status(StrEnum):
    """How a sample ended."""

    OK = "ok"
    REWARD_FAILED = "reward_failed"
    """The reward function raised or ran out of time. The sample has no score; the metrics count it."""
    TOKEN_LIMIT = "token_limit"
    """The environment asked for more tokens than a sequence may have, or a prompt did not fit into the servers."""
    TURN_LIMIT = "turn_limit"
    """The environment asked for more turns than an episode may have."""
    TIME_LIMIT = "time_limit"
    """The episode took too long, and was cancelled."""
    FAILED = "failed"
    """The environment raised, or its process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. ``reference`` is the right answer, in the form that the reward compares with."""

    prompt_id: str
    token_ids: list[int]
    text: str
    """The text that rewards read; see ``rollout.tasks.prompts.plain_text``."""
    reference: str
    messages: Messages | None = None
    """The conversation in the data, if it is more than one user message."""
    row: Mapping[str, Any] | None = None
    """The whole record of the data file, if the reward function may read it."""
    place: str | None = None
    """File and line or row, for messages."""


class _WithArrays:
    """Two are equal if all fields are equal. (A dataclass' own comparison fails on arrays: they have no single truth value.)"""

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
    """float32 [n]: natural logs of softmax(logits / temperature), over the full vocabulary, or over the token's kept ids if
    the sampler truncated it."""
    token_versions: np.ndarray
    """int32 [n]: weight version that sampled each token."""
    finish_reason: FinishReason
    prompt_digest: int
    """``digest`` of the tokens in the request."""
    cached_tokens: int = 0
    """Tokens of the prompt that the server had in its prefix cache."""
    num_retractions: int = 0
    """How often the server interrupted the response, for new weights or for lack of memory. It then recomputed the prompt
    and the response so far."""
    experts: np.ndarray | None = None
    """uint8 or int16 [rows, L, K], if requested: the experts of the last input tokens, in the L layers that have
    experts. Row -1 belongs to the token before the last one. After a retraction the server computed them again, with the
    weights that sampled the last token."""
    num_kept: np.ndarray | None = None
    """int32 [n], if the sampler truncated: how many ids it kept for each token, including the sampled one."""
    kept_ids: np.ndarray | None = None
    """int32: these ids, token after token. None with ``num_kept``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one response."""

    value: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    """Whether the response counts as right in an evaluation. ``Scorer`` sets it; single rewards do not."""
    error: str | None = None
    """Why scoring failed. The sample then counts as not scored, and ``value`` is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request to the servers, and the position of its answer in a trajectory."""

    start: int
    """Position of the first sampled token. All tokens before it were the prompt of this turn."""
    end: int
    prompt_digest: int
    """``digest`` of the tokens that the request carried."""
    response_digest: int
    """``digest`` of the tokens that the server answered with."""
    finish_reason: FinishReason
    num_retractions: int = 0
    """See ``Completion``."""
    cached_tokens: int = 0
    """Tokens of the prompt that the server had in its prefix cache."""
    reward: float | None = None
    """The part of the sample's reward that this turn earned. None: the turn has no reward of its own."""


def field_of(record: Mapping[str, Any], field: str) -> Any:
    """The value under the field's whole name or, if there is none, at the end of its dotted path. Raises LookupError."""
    value: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise LookupError(field)
        value = value[name]
    return value


def source_name(value: object) -> str:
    """The value of a field that names the source of its record. Raises ValueError if it cannot be a name."""
    if not isinstance(value, str | int | float):  # bool is an int
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"is {kind}; write the name of the record's source there")
    return str(value)


def source_of(
    record: Mapping[str, Any] | None, field: str, name_of: Callable[[object], str] = source_name
) -> str:
    """The name of a record's source: ``name_of`` of the value of ``field``. Raises ValueError."""
    try:
        return name_of(field_of(record or {}, field))
    except LookupError:
        raise ValueError(f"a record has no field `{field}`, which names its source") from None
    except ValueError as error:
        raise ValueError(f"the field `{field}` of a record {error}") from error


def digest(token_ids: np.ndarray) -> int:
    """64 bits of BLAKE2b over token ids, int32 in memory order."""
    content = np.ascontiguousarray(token_ids, dtype=TOKEN_IDS).data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def seed_of(text: str) -> int:
    """31 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(_WithArrays):
    """A sequence of tokens that the policy continued, and the score of its sample. Arrays are aligned with ``token_ids``
    and are 0 on tokens that the policy did not sample."""

    group_id: int
    sibling_id: int
    prompt_id: str
    token_ids: np.ndarray
    """int32 [n]"""
    response_mask: np.ndarray
    """bool [n]: False on tokens of the prompt, of tools and of other observations."""
    rollout_logprobs: np.ndarray
    """float32 [n]"""
    token_versions: np.ndarray
    """int32 [n]"""
    turns: list[Turn]
    """In order. A single-turn sample has one."""
    reward: float | None
    """Reward of the whole sample, including what its turns earned. The learner puts it on the last response token (with
    ``credit: turn`` only the part that no turn earned). None: not scored; the learner does not train on the sample and
    leaves it out of its group's baseline."""
    reward_parts: dict[str, float]
    status: Status = Status.OK
    experts: np.ndarray | None = None
    """uint8 or int16 [n, L, K]: the experts of each token as an input, in the L layers that have experts. Zeros for
    tokens whose experts are unknown. None: no token's experts are known."""
    is_replayed: np.ndarray | None = None
    """bool [n]: the tokens whose experts are known. None with ``experts``."""
    num_kept: np.ndarray | None = None
    """int32 [n]: number of ids that the sampler kept for each token; 0 on tokens that the policy did not sample. None:
    the sampler did not truncate."""
    kept_ids: np.ndarray | None = None
    """int32: these ids, token after token. None with ``num_kept``."""
    branch: int = 0
    """Number of this sequence in an episode that forked, from 0. All sequences of an episode have its reward."""

    @property
    def finish_reason(self) -> FinishReason:
        """Of the last turn."""
        return self.turns[-1].finish_reason if self.turns else FinishReason.STOP


def different_rewards(siblings: Iterable[Any]) -> set[float]:
    """The rewards of the scored siblings, in the learner's float32. Sums of the same parts may differ in bits beyond float32,
    which the learner's advantages do not see. ``siblings``: samples or trajectories."""
    return {float(np.float32(s.reward)) for s in siblings if s.reward is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G siblings of one prompt."""

    group_id: int
    prompt_id: str
    trajectories: list[Trajectory]
    """In the order of siblings. A sibling that forked has several, one after another."""
