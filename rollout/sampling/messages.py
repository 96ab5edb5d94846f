"""Messages between learner and sample role: msgpack over ZeroMQ.

The values per token of groups follow the msgpack as plain bytes (``rollout/columns.py``):

    0xc1, 7 zeros    no msgpack begins like this
    8 bytes          the length of the msgpack, little endian
    the msgpack, and zeros up to a multiple of ``ALIGNMENT``
    the content
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Self

import msgspec
import numpy as np

from rollout.client import RolloutError
from rollout.columns import ALIGNMENT, Columns, Taken, aligned, joined
from rollout.records import Group, Trajectory, different_rewards


class SamplingError(RolloutError):
    """Groups or an evaluation could not be produced; the message says why."""


class SampleRoleLost(SamplingError):
    """The sample role's process has ended, or its host is gone. It will never answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeSelection:
    """Statistics of all groups that a step uses up, before dynamic sampling leaves some of them out."""

    reward_mean: float
    """Of the samples that were scored."""
    no_signal_fraction: float
    """Share of the groups whose siblings all have the same reward."""
    tokens: int
    """Response tokens."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self:
        trajectories = [t for group in groups for t in group.trajectories]
        rewards = [different_rewards(group.trajectories) for group in groups]
        return cls(
            reward_mean=fmean(t.reward for t in trajectories if t.branch == 0 and t.reward is not None),
            no_signal_fraction=fmean(len(of_group) < 2 for of_group in rewards),
            tokens=sum(int(t.response_mask.sum()) for t in trajectories),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingStats:
    """Cost of one reply. Requests and retries count since the previous reply, since some are for later steps."""

    seconds: float
    """From the request to the reply."""
    requests: int
    """Completions requested."""
    retries: int
    """Completions requested again after an attempt failed in transport or ran out of time."""
    failed_rewards: int
    """Samples whose reward raised or ran out of time; they are not scored."""
    reward_retries: int = 0
    """Requests to reward models and judges that were repeated."""
    resampled_groups: int = 0
    """Groups sampled instead of groups without signal (dynamic sampling)."""
    filled_groups: int = 0
    """Groups without signal that were handed out after the last round of dynamic sampling."""
    scored: int = 0
    """Samples with a reward, failed ones included."""
    first_failure: str | None = None
    """Prompt and error of the first failed reward."""
    first_group: int = 0
    """Number of the first group that the reply uses up."""
    prompts: list[str] = field(default_factory=list)
    """The prompt of each group that it uses up, in order."""
    without_signal: list[int] = field(default_factory=list)
    """Numbers of the groups that are not handed out, for lack of signal."""
    before_selection: BeforeSelection | None = None
    """None without dynamic sampling, since the groups before and after selection are then the same."""
    idle_s: float = 0.0
    """Seconds since the previous reply without any sample at the servers, neither for training nor for evaluation."""
    running_groups: int = 0
    """Groups of later steps that are still being sampled when the step's groups are handed out."""
    ready_groups: int = 0
    """Groups of later steps that are finished at that time."""
    left_out_prompts: int = 0
    """Prompts of the data that are too long and never sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Evaluation on held-out problems. ``Score.correct`` tells which samples are right."""

    accuracy: float
    reward_mean: float
    count: int
    """Samples: problems times samples_per_prompt."""
    length_mean: float
    """Mean number of tokens that the policy sampled, end tokens included, over samples in which it had a turn."""
    truncated_fraction: float
    """Share of these samples that a token limit cut off, in the last turn of their first sequence."""
    failed: int = 0
    """Samples whose reward or episode failed. Their reward counts as 0. They count as wrong, unless the part of the reward
    that decides correctness was computed."""
    first_failure: str | None = None
    """Prompt and error of the first failure, over all sets and greedy answers. Only the whole result has it."""
    accuracy_error: float | None = None
    """Standard error of the accuracy over problems, since samples of one problem are not independent. None for
    a single problem."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """pass@k: the probability that k samples of a problem hold a right one, as a mean over problems; k of 2 or more."""
    greedy: "EvaluationResult | None" = None
    """Result of one answer per problem at temperature 0, if the config asks for it."""
    sets: "dict[str, EvaluationResult]" = field(default_factory=dict)
    """Results of further held-out sets, by name."""
    sources: "dict[str, EvaluationResult]" = field(default_factory=dict)
    """Results by the name of the problems' source, if each source has its own reward."""
    groups: list[Group] = field(default_factory=list, compare=False)
    """Samples of the first problems of each set, to look at. Only the whole result has them."""
    groups_from: list[str | None] = field(default_factory=list, compare=False)
    """The name of the further held-out set that each of ``groups`` is from; None: from the main one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The sampler's position in the data, which is all that a resumed run needs."""

    position: int
    """Groups handed out since the start, over all epochs. The next group has this number."""
    num_prompts: int
    """Size of the training set. A resumed run compares it to notice other data."""
    prompts: int | None = None
    """``digest_of`` the training prompts, to notice other data of the same size. None in states of earlier versions."""


class NextGroups(msgspec.Struct, frozen=True, tag=True):
    count: int
    newest: int
    max_staleness: int
    ahead: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Sent before a weight update. Samples that are not yet at the servers wait for the next request."""

    within_s: float


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Sent after a weight update. The groups of the next ``count`` prompts and of ``ahead`` further steps may start, as if
    NextGroups had come."""

    count: int
    newest: int
    ahead: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    pass


class LoadState(msgspec.Struct, frozen=True, tag=True):
    state: SamplerState | None
    """None: the start."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Groups(msgspec.Struct, frozen=True, tag=True):
    groups: list[Group]
    stats: SamplingStats
    state: SamplerState
    """State after these groups."""


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    result: EvaluationResult | None


class InColumns(msgspec.Struct, frozen=True, tag=True):
    """A reply with groups, as it is sent."""

    groups: list[tuple[int, str, int]]
    """(number, prompt, trajectories) of each."""
    columns: Columns
    reply: Groups | Evaluated
    """Without its groups."""


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Failure(msgspec.Struct, frozen=True, tag=True):
    message: str


Request = NextGroups | Drain | Admit | Evaluate | LoadState | Stop
Reply = Groups | Evaluated | Done | Failure


_MARK = b"\xc1".ljust(8, b"\0")
_PREFIX = len(_MARK) + 8


def encode(message: Request | Reply) -> bytes | memoryview:
    match message:
        case Groups(groups=groups) | Evaluated(result=EvaluationResult(groups=[_, *_] as groups)):
            bare = _with_groups(message, [])
        case _:
            return msgspec.msgpack.encode(message)
    taken = Taken.apart([t for group in groups for t in group.trajectories])
    counts = [(group.group_id, group.prompt_id, len(group.trajectories)) for group in groups]
    packed = msgspec.msgpack.encode(InColumns(counts, taken.columns, bare))
    before = b"".join([_MARK, len(packed).to_bytes(8, "little"), packed])
    before = before.ljust(-(-len(before) // ALIGNMENT) * ALIGNMENT, b"\0")
    whole = np.empty(len(before) + taken.size, dtype=np.uint8)
    whole[: len(before)] = np.frombuffer(before, dtype=np.uint8)
    taken.write(whole[len(before) :])
    return whole.data


def decode_request(content: bytes | memoryview) -> Request:
    """Raises msgspec.DecodeError or UnicodeDecodeError if the content is not a request."""
    return msgspec.msgpack.decode(content, type=Request)


def decode_reply(content: bytes | memoryview) -> Reply:
    """The arrays of groups are views of ``content``. Raises the same errors as ``decode_request``."""
    if bytes(content[: len(_MARK)]) != _MARK:
        return msgspec.msgpack.decode(content, type=Evaluated | Done | Failure)
    end = _PREFIX + int.from_bytes(content[len(_MARK) : _PREFIX], "little")
    sent = msgspec.msgpack.decode(content[_PREFIX:end], type=InColumns)
    try:
        trajectories = joined(sent.columns, aligned(content[-(-end // ALIGNMENT) * ALIGNMENT :]))
        return _with_groups(sent.reply, _grouped(sent.groups, trajectories))
    except ValueError as error:
        raise msgspec.DecodeError(f"the groups of a reply cannot be read: {error}") from error


def _with_groups(reply: Groups | Evaluated, groups: list[Group]) -> Groups | Evaluated:
    if isinstance(reply, Groups):
        return msgspec.structs.replace(reply, groups=groups)
    return Evaluated(None if reply.result is None else replace(reply.result, groups=groups))


def _grouped(groups: Sequence[tuple[int, str, int]], trajectories: list[Trajectory]) -> list[Group]:
    bounds = [*accumulate((count for *_, count in groups), initial=0)]
    if min((count for *_, count in groups), default=0) < 0 or bounds[-1] != len(trajectories):
        raise ValueError(f"{len(trajectories)} trajectories for {bounds[-1]} in groups")
    return [
        Group(group_id=number, prompt_id=prompt, trajectories=trajectories[start:end])
        for (number, prompt, _), (start, end) in zip(groups, pairwise(bounds), strict=True)
    ]
