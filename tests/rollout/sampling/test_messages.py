"""Arrays in messages: the same on the other side, and nothing else is taken for one."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from rollout.records import FinishReason, Group
from rollout.sampling.messages import Groups, SamplingStats, decode_reply, decode_request, encode
from tests.support.records import trajectory

STATS = SamplingStats(seconds=1.0, requests=1, retries=0, failed_rewards=0)


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
    return Groups([Group(group_id=4, prompt_id="p", trajectories=samples)], STATS)


def test_a_reply_is_the_same_on_the_other_side():
    sent = groups(2, 9, 300)
    received = decode_reply(encode(sent))
    assert received == sent and received != groups(2, 9, 301)
    one, other = (reply.groups[0].trajectories[2] for reply in (sent, received))
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


@pytest.mark.parametrize(
    "array",
    [
        ["|O", [1], b"12345678"],
        ["<f8", [1], b"12345678"],
        ["<i4", [1], b"12345"],
        ["<i4", [2], b"1234"],
        ["<i4", ["1"], b"1234"],
        ["<i4", 1, b"1234"],
        ["<i4", [2], [1, 2]],
        [1, 2, 3],
        b"1234",
        None,
        ["<i4", b"1234"],
        ["<i4", [1], b"1234", b""],
    ],
)
def test_what_is_no_array_of_a_message_is_refused(array):
    content = msgspec.msgpack.decode(encode(groups(2)))
    content["groups"][0]["trajectories"][0]["token_ids"] = array
    with pytest.raises(msgspec.DecodeError):
        decode_reply(msgspec.msgpack.encode(content))
    with pytest.raises(msgspec.DecodeError):
        decode_request(encode(groups(2)))


def test_nothing_but_arrays_is_packed_specially():
    with pytest.raises(NotImplementedError, match="complex"):
        encode(Groups(groups=[1j], stats=STATS))
