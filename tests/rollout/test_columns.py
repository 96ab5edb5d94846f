"""Trajectories by columns: the same at the other end, whatever they have, and nothing else is taken for some."""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import columns
from rollout.columns import ALIGNMENT, DTYPES, FIELDS, Columns, Head, Run, Taken, aligned, joined
from rollout.records import EXPERTS, FinishReason, Status, Trajectory, Turn

ARRAYS = {
    "token_ids": "<i4",
    "response_mask": "|b1",
    "rollout_logprobs": "<f4",
    "token_versions": "<i4",
    "is_replayed": "|b1",
    "num_kept": "<i4",
    "kept_ids": "<i4",
}
TURN = Turn(
    start=1, end=2, prompt_digest=2**64 - 1, response_digest=0, finish_reason=FinishReason.LENGTH, num_retractions=2
)  # fmt: skip


def arrays(kind: str, row: tuple[int, ...] = ()) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 9).map(
        lambda n: np.random.default_rng(n).integers(0, 2, (n, *row)).astype(np.dtype(kind))
    )


@st.composite
def trajectories(draw) -> Trajectory:
    """Any arrays, of which each may be missing: what belongs together is not the concern of columns."""
    row = draw(st.sampled_from([(2, 2), (1, 3), (0, 4)]))
    experts = arrays(np.dtype(draw(st.sampled_from(EXPERTS))).str, row)
    needed = {name: draw(arrays(kind)) for name, kind in [*ARRAYS.items()][:4]}
    further = {name: draw(st.none() | arrays(kind)) for name, kind in [*ARRAYS.items()][4:]}
    return Trajectory(
        **needed,
        **further,
        experts=draw(st.none() | experts),
        group_id=draw(st.integers(-5, 5)),
        sibling_id=draw(st.integers(0, 5)),
        prompt_id=draw(st.text(max_size=5)),
        turns=draw(st.lists(st.sampled_from([TURN, replace(TURN, reward=0.5)]), max_size=3)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_parts=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2)),
        status=draw(st.sampled_from(Status)),
        branch=draw(st.integers(-1, 3)),
    )


def there_and_back(sent: list[Trajectory]) -> list[Trajectory]:
    taken = Taken.apart(sent)
    content = np.full(taken.size, 7, dtype=np.uint8)
    taken.write(content)
    return joined(msgspec.msgpack.decode(msgspec.msgpack.encode(taken.columns), type=Columns), content)


@given(st.lists(trajectories(), max_size=6))
def test_records_are_the_same_at_the_other_end(sent):
    found = there_and_back(sent)
    assert found == sent
    for one, other in zip(found, sent, strict=True):
        assert type(one.status) is Status and all(type(turn) is Turn for turn in one.turns)
        for name in FIELDS:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                assert mine.flags.aligned or not mine.size


def test_every_field_of_a_record_is_in_the_head_or_a_column():
    assert {f.name for f in fields(Trajectory)} == {*FIELDS, *Head.__struct_fields__}


def test_the_arrays_of_a_field_are_one_run_and_lie_end_to_end():
    """What travels for an array is one number; its content is written from where it lies, once."""
    sent = [
        Trajectory(
            group_id=0, sibling_id=i, prompt_id="p", turns=[], reward=None, reward_parts={},
            **{name: np.full(1000 + i, i, dtype=kind) for name, kind in [*ARRAYS.items()][:4]},
        )
        for i in range(50)
    ]  # fmt: skip
    taken = Taken.apart(sent)
    assert [len(runs) for runs in taken.columns.runs] == [1] * len(FIELDS)
    assert all(part is t.token_ids for part, t in zip(taken.parts[0], sent, strict=True))
    num_tokens = sum(len(t.token_ids) for t in sent)
    assert 0 <= taken.size - 13 * num_tokens < 4 * ALIGNMENT
    assert len(msgspec.msgpack.encode(taken.columns)) < 60 * len(sent)
    content = np.empty(taken.size, dtype=np.uint8)
    taken.write(content)
    assert all(np.shares_memory(t.token_versions, content) for t in joined(taken.columns, content))


def test_arrays_that_are_not_contiguous_are_written_too():
    (sent,) = [
        Trajectory(
            group_id=0, sibling_id=0, prompt_id="p", turns=[], reward=None, reward_parts={},
            experts=np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(1, 0, 2),
            **{name: (np.arange(6) % 4).astype(kind)[::2] for name, kind in [*ARRAYS.items()][:4]},
        )
    ]  # fmt: skip
    assert there_and_back([sent]) == [sent]


def test_bytes_that_begin_anywhere_are_moved_to_where_any_type_may_begin():
    whole = np.zeros(64, dtype=np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    assert np.shares_memory(aligned(whole[start:]), whole)
    moved = aligned(whole[start + 1 :])
    assert moved.ctypes.data % ALIGNMENT == 0 and len(moved) == 63 - start


def runs_of(token_ids: Run) -> list[list[Run]]:
    return [[token_ids], *([Run(None, (), [0])] for _ in FIELDS[1:])]


HEAD = Head(0, 0, "p", [], None, {}, Status.OK, 0)


@pytest.mark.parametrize(
    "heads, runs, size",
    [
        (1, runs_of(Run("|O", (), [2])), 16),
        (1, runs_of(Run("<f8", (), [2])), 16),
        (1, runs_of(Run("<i4", (), [5])), 16),  # more than there is
        (1, runs_of(Run("<i4", (), [2])), 32),  # less
        (1, runs_of(Run("<i4", (), [2])), 8),  # cut off
        (1, runs_of(Run("<i4", (), [2**62])), 16),
        (1, runs_of(Run("<i4", (2**40, 2**40), [2])), 16),
        (1, runs_of(Run("<i4", (-1, -1), [2])), 16),
        (1, runs_of(Run("<i4", (), [-1])), 16),
        (1, runs_of(Run("<i4", (), [4, -2])), 16),
        (2, runs_of(Run("<i4", (), [2])), 16),
        (1, runs_of(Run("<i4", (), [1, 1])), 16),
        (0, runs_of(Run("<i4", (), [2])), 16),
        (1, runs_of(Run("<i4", (), [2]))[:-1], 16),
        (1, [], 16),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(heads, runs, size):
    with pytest.raises(ValueError):
        joined(Columns([HEAD] * heads, runs), np.zeros(size, dtype=np.uint8))


def test_the_types_of_arrays_are_those_of_the_records():
    assert {*ARRAYS.values(), *(np.dtype(kind).str for kind in EXPERTS)} == DTYPES
    assert np.dtype(columns.TOKEN_IDS).str in DTYPES
