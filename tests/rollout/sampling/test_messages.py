"""Arrays in messages: the same on the other side, and nothing else is taken for one."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from rollout.records import FinishReason, Group
from rollout.sampling.messages import (
    BeforeSelection,
    Done,
    Evaluated,
    EvaluationResult,
    Failure,
    Groups,
    SamplerState,
    SamplingStats,
    Stop,
    decode_reply,
    decode_request,
    encode,
)
from tests.support.records import trajectory

STATS = SamplingStats(seconds=1.0, requests=1, retries=0, failed_rewards=0)
STATE = SamplerState(position=5, num_prompts=9, prompts=2**64 - 1)


def experts_of(number: int, n: int) -> dict:
    """Of the first sample none, of the others some in bytes and some in two bytes."""
    if not number:
        return {}
    ids = np.arange(n * 6).reshape(n, 3, 2) % 250
    kept = {"num_kept": np.arange(n, dtype=np.int32), "kept_ids": np.arange(n * (n - 1) // 2, dtype=np.int32)}
    return kept | {
        "experts": ids.astype([np.uint8, np.int16][number % 2]),
        "is_replayed": np.arange(n) % 3 > 0,
    }


def groups(*lengths: int) -> Groups:
    samples = [
        trajectory(
            group_id=4, sibling_id=i, prompt_id="p", token_ids=[7] * n, response_mask=[False] + [True] * (n - 1),
            rollout_logprobs=[-0.1 * k for k in range(n)], token_versions=[3] * n,
            finish_reason=FinishReason.STOP, reward=0.5, reward_parts={"correct": 0.5}, **experts_of(i, n),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    samples[0] = replace(samples[0], turns=[replace(turn, reward=0.25) for turn in samples[0].turns])
    some = [Group(group_id=4, prompt_id="p", trajectories=samples[:2])]
    return Groups([*some, Group(group_id=5, prompt_id="q", trajectories=samples[2:])], STATS, STATE)


def test_a_reply_is_the_same_on_the_other_side():
    sent = groups(2, 9, 300)
    received = decode_reply(encode(sent))
    assert received == sent and received != groups(2, 9, 301)
    one, other = (reply.groups[1].trajectories[0] for reply in (sent, received))
    for name in (
        "token_ids",
        "response_mask",
        "rollout_logprobs",
        "token_versions",
        "experts",
        "is_replayed",
        "num_kept",
        "kept_ids",
    ):
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
        assert getattr(one, name).shape == getattr(other, name).shape, name
    assert received.groups[0].trajectories[0].experts is None


def test_an_evaluation_brings_the_samples_that_it_keeps():
    result = EvaluationResult(
        accuracy=0.5, reward_mean=0.25, count=2, length_mean=3.0, truncated_fraction=0.0
    )
    for kept in ([], groups(2, 9, 300).groups):
        sets = [None, "hard"][: len(kept)]
        received = decode_reply(encode(Evaluated(replace(result, groups=kept, groups_from=sets))))
        assert received == Evaluated(result) and received.result.groups == kept
        assert received.result.groups_from == sets
    assert decode_reply(encode(Evaluated(None))) == Evaluated(None)


def test_groups_may_be_none_and_may_be_empty():
    for none in (
        Groups([], STATS, STATE),
        Groups([Group(group_id=4, prompt_id="p", trajectories=[])], STATS, STATE),
    ):
        assert decode_reply(encode(none)) == none


def test_arrays_are_views_of_the_message_wherever_its_buffer_begins():
    """ZeroMQ's buffers begin anywhere, a type's numbers do not."""
    sent = groups(2, 9, 300)
    message = encode(sent)
    for start in range(18):
        buffer = np.zeros(len(message) + 32, dtype=np.uint8)
        buffer[start : start + len(message)] = np.frombuffer(message, dtype=np.uint8)
        received = decode_reply(buffer[start : start + len(message)].data)
        assert received == sent
        arrays = [t.rollout_logprobs for group in received.groups for t in group.trajectories]
        assert all(array.flags.aligned for array in arrays)
    assert all(
        np.shares_memory(t.experts, np.frombuffer(message, dtype=np.uint8))
        for group in decode_reply(message).groups
        for t in group.trajectories
        if t.experts is not None
    )


def test_replies_without_groups_are_msgpack_alone():
    for reply in (Done(), Failure("it failed")):
        assert decode_reply(encode(reply)) == reply == decode_reply(memoryview(encode(reply)))


def test_what_is_cut_off_or_has_more_behind_it_is_refused():
    message = bytes(encode(groups(2, 9)))
    for length in [0, 1, 8, 12, 16, 40, len(message) // 2, len(message) - 1]:
        with pytest.raises(msgspec.DecodeError):
            decode_reply(message[:length])
    with pytest.raises(msgspec.DecodeError):
        decode_reply(message + b"\0" * 16)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1])
def test_a_length_that_is_not_that_of_the_msgpack_is_refused(length):
    message = bytes(encode(groups(2, 9)))
    with pytest.raises(msgspec.DecodeError):
        decode_reply(message[:8] + length.to_bytes(8, "little") + message[16:])


def with_head(change) -> bytes:
    """A message whose msgpack is changed."""
    message = bytes(encode(groups(2, 9)))
    end = 16 + int.from_bytes(message[8:16], "little")
    head = msgspec.msgpack.decode(message[16:end])
    change(head)
    packed = msgspec.msgpack.encode(head)
    start = -(-end // 16) * 16
    before = message[:8] + len(packed).to_bytes(8, "little") + packed
    return before.ljust(-(-len(before) // 16) * 16, b"\0") + message[start:]


def test_a_changed_head_is_read_where_nothing_is_wrong():
    assert decode_reply(with_head(lambda head: None)) == groups(2, 9)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["columns"][1][0][0].__setitem__(0, "|O"),
        lambda head: head["columns"][1][0][0].__setitem__(0, "<f8"),
        lambda head: head["columns"][1][0][0].__setitem__(2, [2, 20]),
        lambda head: head["columns"][1][0][0].__setitem__(2, ["2", 9]),
        lambda head: head["columns"][1][0][0].__setitem__(2, [12, -1]),
        lambda head: head["columns"][0].pop(),
        lambda head: head["columns"][1].pop(),
        lambda head: head["columns"][0][0].__setitem__(3, [{"start": 1}]),
        lambda head: head["columns"][0][0].__setitem__(6, "broken"),
        lambda head: head.update(groups=[[4, "p", 1]]),
        lambda head: head.update(groups=[[4, "p", 3], [5, "q", -1]]),
        lambda head: head["reply"].pop("state"),
        lambda head: head["reply"].update(type="Done"),
        lambda head: head.update(type="Groups"),
    ],
)
def test_what_are_no_groups_of_a_message_is_refused(change):
    with pytest.raises(msgspec.DecodeError):
        decode_reply(with_head(change))


def test_groups_are_no_request_and_a_request_is_no_reply():
    with pytest.raises(msgspec.DecodeError):
        decode_request(encode(groups(2)))
    with pytest.raises(msgspec.DecodeError):
        decode_reply(encode(Stop()))


def test_nothing_but_arrays_is_packed_specially():
    sent = groups(2)
    strange = replace(sent.groups[0].trajectories[0], reward_parts={"correct": 1j})
    with pytest.raises(TypeError, match="complex"):
        encode(Groups([replace(sent.groups[0], trajectories=[strange])], STATS, STATE))


def answer_of(group_id: int, sibling_id: int, reward: float | None, branch: int = 0):
    return trajectory(
        group_id=group_id, sibling_id=sibling_id, prompt_id="p", token_ids=[1, 2, 3], response_mask=[False, True, True],
        rollout_logprobs=[0.0, -1.0, -1.0], token_versions=[0, 0, 0], reward=reward, reward_parts={}, branch=branch,
    )  # fmt: skip


def test_before_selection_a_fork_is_no_sample_and_one_without_a_score_is_no_sibling():
    groups = [
        Group(
            group_id=0,
            prompt_id="p",
            trajectories=[answer_of(0, 0, 1.0), answer_of(0, 0, 1.0, branch=1), answer_of(0, 1, None)],
        ),
        Group(group_id=1, prompt_id="p", trajectories=[answer_of(1, 0, 0.0), answer_of(1, 1, 0.5)]),
    ]
    assert BeforeSelection.of(groups) == BeforeSelection(reward_mean=0.5, no_signal_fraction=0.5, tokens=10)
