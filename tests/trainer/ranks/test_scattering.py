"""Shares as they arrive, against the shares that were sent, on gloo ranks."""

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from rollout.columns import FIELDS
from rollout.records import COUNTS, EXPERTS, TOKEN_IDS, Group, Status
from tests.support.megatron_workers import forked_context
from tests.support.records import trajectory
from tests.support.scattering_workers import serve_rank
from tests.trainer.batch.test_step_batch import make_groups
from trainer.batch.sharing_out import Share, share_out
from trainer.ranks.scattering import packed, unpacked

RANKS = 4
EMPTY = Share(
    trajectories=[], sequence_ids=[], rows=[], lengths=[], rewards=[], group_ids=[], episode_ids=[], group_sizes=[]
)  # fmt: skip


def shares_of(groups: list[Group], dp_size: int) -> list[Share]:
    return share_out(groups, num_minibatches=1, dp_size=dp_size, token_budget=1000)


def with_experts(groups: list[Group]) -> list[Group]:
    """Experts of two layers of every other sample; none of the others."""
    changed = []
    for group in groups:
        trajectories = []
        for i, t in enumerate(group.trajectories):
            experts = np.arange(len(t.token_ids) * 4, dtype=EXPERTS[1]).reshape(-1, 2, 2)
            known = {"experts": experts, "is_replayed": experts[:, 0, 0] % 3 == 0} if i % 2 else {}
            trajectories.append(replace(t, **known))
        changed.append(replace(group, trajectories=trajectories))
    return changed


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    context = forked_context()
    store = tmp_path_factory.mktemp("store") / "store"
    processes, ends = [], []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        processes.append(
            context.Process(target=serve_rank, args=(rank, RANKS, str(store), theirs), daemon=True)
        )
        processes[-1].start()
        ends.append(mine)
    yield ends
    for process in processes:
        process.kill()
        process.join(20.0)


def scattered(ends: list[Connection], shares: list[Any], copies: int) -> list[Any]:
    for rank, end in enumerate(ends):
        end.send((None if rank else shares, copies))
    results = []
    for end in ends:
        assert end.poll(180.0)
        results.append(end.recv())
    return results


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_every_rank_gets_its_own_share_whole(ends, copies):
    shares = shares_of(
        with_experts(make_groups([[5, 9, 70, 4], [3, 8, 2, 30]], [[0.0, 1.0, 0.5, 1.0]] * 2, seed=0)),
        RANKS // copies,
    )
    for rank, share in enumerate(scattered(ends, shares, copies)):
        expected = shares[rank // copies]
        assert share == expected
        for mine, theirs in zip(share.trajectories, expected.trajectories, strict=True):
            assert mine.token_ids.dtype == theirs.token_ids.dtype


def test_a_turn_that_differs_on_one_rank_ends_the_step_on_all(ends):
    """The last rank alone has the token that nobody sampled."""
    shares = shares_of(make_groups([[5, 9, 70, 4]], [[0.0, 1.0, 0.5, 1.0]], seed=0), RANKS)
    (victim,) = shares[-1].trajectories
    number, turn = next((i, turn) for i, turn in enumerate(victim.turns, 1) if turn.end > turn.start)
    victim.token_ids[turn.start] += 1
    messages = scattered(ends, shares, 1)
    assert len(set(messages)) == 1
    assert (
        f"prompt {victim.prompt_id}, sibling {victim.sibling_id}: turn {number} has other tokens"
        in messages[0]
    )


def test_shares_without_trajectories_arrive_too(ends):
    shares = [replace(empty, rewards=[float(rank)]) for rank, empty in enumerate([EMPTY] * RANKS)]
    assert scattered(ends, shares, 1) == shares


def test_turns_rewards_experts_and_kept_ids_arrive(ends):
    """Of every other sample, as of one that was sampled elsewhere."""
    (groups,) = [make_groups([[5, 9, 70, 4]], [[0.0, 1.0, 0.5, 1.0]], seed=0)]
    changed = []
    for i, t in enumerate(with_experts(groups)[0].trajectories):
        n = len(t.token_ids)
        kept = {
            "num_kept": np.arange(n, dtype=COUNTS),
            "kept_ids": np.arange(n * (n - 1) // 2, dtype=TOKEN_IDS),
        }
        turns = [replace(turn, reward=0.25 * i, num_retractions=i) for turn in t.turns]
        further = {"turns": turns, "reward_parts": {"part": 0.5 * i}, "status": Status.TOKEN_LIMIT}
        changed.append(replace(t, **further, **(kept if i % 2 else {})))
    groups = [replace(groups[0], trajectories=changed)]
    shares = share_out(groups, num_minibatches=1, dp_size=2, token_budget=1000, credits_turns=True)
    for rank, share in enumerate(scattered(ends, [replace(s, turn_rewards=None) for s in shares], 2)):
        expected = shares[rank // 2]
        assert share.trajectories == expected.trajectories
        for mine, theirs in zip(share.trajectories, expected.trajectories, strict=True):
            assert type(mine.status) is Status
            for name in FIELDS:
                one, other = getattr(mine, name), getattr(theirs, name)
                assert (one is None) == (other is None)
                assert one is None or (one.dtype == other.dtype and one.shape == other.shape)


def test_rewards_of_turns_arrive():
    groups = make_groups([[5, 9, 70, 4]], [[0.0, 1.0, 0.5, 1.0]], seed=0)
    shares = share_out(groups, num_minibatches=1, dp_size=2, token_budget=1000, credits_turns=True)
    for share in shares:
        found = unpacked(*packed(share)).turn_rewards
        assert found is not None and share.turn_rewards is not None
        assert found.rewards_V.equal(share.turn_rewards.rewards_V)
        assert found.places_V.equal(share.turn_rewards.places_V)


def test_nothing_is_pickled_for_a_token():
    """17 bytes a token would be 17 million; the header grows with samples alone."""
    n = 250_000
    samples = [
        trajectory(
            group_id=0, sibling_id=i, prompt_id="p", token_ids=[i] * n, response_mask=[False] + [True] * (n - 1),
            rollout_logprobs=[-0.5] * n, token_versions=[3] * n, reward=float(i), reward_parts={},
        )
        for i in range(4)
    ]  # fmt: skip
    groups = [Group(group_id=0, prompt_id="p", trajectories=samples)]
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=2_000_000)
    message, header = packed(share)
    num_tokens = sum(len(t.token_ids) for t in share.trajectories)
    assert header < 2000 and num_tokens == 4 * n
    assert 0 <= len(message) - header - 13 * num_tokens < 100
    received = unpacked(message, header)
    assert received == share
    assert all(np.shares_memory(t.token_ids, message.numpy()) for t in received.trajectories)
