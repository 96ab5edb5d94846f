"""Shares as they arrive, against the shares that were sent, on gloo ranks."""

import multiprocessing
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.records import EXPERTS, Group
from tests.support.scattering_workers import serve_rank
from tests.trainer.batch.test_step_batch import make_groups
from trainer.batch.sharing_out import Share, split_groups
from trainer.ranks import scattering

RANKS = 4


def shares_of(groups: list[Group], dp_size: int) -> list[Share]:
    return split_groups(groups, num_minibatches=1, dp_size=dp_size, token_budget=1000)


def with_experts(groups: list[Group]) -> list[Group]:
    """Experts of two layers of every other sample; none of the others."""
    changed = []
    for group in groups:
        trajectories = []
        for i, t in enumerate(group.trajectories):
            experts = np.arange(len(t.token_ids) * 4, dtype=EXPERTS[1]).reshape(-1, 2, 2)
            known = {"experts": experts, "is_replayed": experts[:, 0, 0] % 3 == 0} if i % 2 else {}
            trajectories.append(_replaced(t, **known))
        changed.append(_replaced(group, trajectories=trajectories))
    return changed


def _replaced(record: Any, **changes: Any) -> Any:
    return type(record)(**{f.name: getattr(record, f.name) for f in fields(record)} | changes)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    context = multiprocessing.get_context("spawn")
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
    turn = next(turn for turn in victim.turns if turn.end > turn.start)
    victim.token_ids[turn.start] += 1
    messages = scattered(ends, shares, 1)
    assert len(set(messages)) == 1
    assert f"prompt {victim.prompt_id}, sibling {victim.sibling_id}: turn" in messages[0]


def test_shares_without_arrays_arrive_too(ends):
    shares = [{"rank": i, "none": np.zeros(0)} for i in range(RANKS)]
    for rank, share in enumerate(scattered(ends, shares, 1)):
        assert share["rank"] == rank and share["none"].shape == (0,)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["int32", "float32", "bool", "uint8", "int16"])),
        max_size=6,
    )
)
def test_arrays_are_put_together_again_from_bytes_alone(kinds):
    """The header has none of their content, and each begins where any type may."""
    arrays = [
        np.random.default_rng(i).integers(0, 2, size).astype(kind) for i, (size, kind) in enumerate(kinds)
    ]
    header, buffers = scattering._taken_apart(arrays)
    content = scattering._end_to_end(header.sizes, buffers)
    joined = scattering._joined(header, content)
    assert len(joined) == len(arrays)
    for found, array in zip(joined, arrays, strict=True):
        assert found.dtype == array.dtype and np.array_equal(found, array)
        assert found.flags.aligned or not len(found)


def test_the_header_is_small_and_holds_no_array():
    """17 bytes a token would be 17 million; the header grows with samples alone."""
    sample = [np.full(1_000_000, 7, dtype=np.int32) for _ in range(4)]
    header, buffers = scattering._taken_apart({"arrays": sample})
    assert len(header.objects) < 1000
    assert sum(header.sizes) == 16_000_000 and all(b.base is not None for b in buffers)
    assert np.shares_memory(buffers[0], sample[0])  # sent from where it lies
