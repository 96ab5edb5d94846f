"""Ragged rows of kept ids against lists of lists: chosen, packed, split, and joined again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.kept_sets import KeptSets
from parallel.packing import PackedBatch, pack_sequences
from trainer.recording import in_order

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), min_size=1, max_size=9)


def kept_sets(rows: list[list[int]]) -> KeptSets:
    ids = torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int32)
    return KeptSets(num_T=torch.tensor([len(row) for row in rows], dtype=torch.int32), ids_M=ids)


def as_rows(kept: KeptSets) -> list[list[int]]:
    return [part.tolist() for part in kept.ids_M.split(kept.num_T.tolist())]


@given(ROWS, st.data())
def test_those_at_some_places_are_the_rows_at_these_places(rows, data):
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    found = kept_sets(rows).at(torch.tensor(places, dtype=torch.int64))
    assert as_rows(found) == [rows[place] for place in places]
    owners = [t for t, row in enumerate(rows) for _ in row]
    assert kept_sets(rows).token_of_each().tolist() == owners


def packed(responses: list[list[list[int]]], first: int = 0) -> PackedBatch:
    """Sequences of a prompt token and a response token per row of kept ids."""
    lengths = [1 + len(rows) for rows in responses]
    return pack_sequences(
        token_ids=[[5] * n for n in lengths],
        response_masks=[[False] + [True] * (n - 1) for n in lengths],
        rollout_logprobs=[[0.0] * n for n in lengths],
        sequence_ids=range(first, first + len(lengths)),
        num_kept=[[0, *map(len, rows)] for rows in responses],
        kept_ids=[np.array([id_ for row in rows for id_ in row], dtype=np.int32) for rows in responses],
    )


@given(st.lists(ROWS, min_size=1, max_size=4), st.data())
def test_kept_ids_stay_with_their_targets_through_packing_splitting_and_joining(responses, data):
    batch = packed(responses)
    assert as_rows(batch.kept) == [row for rows in responses for row in rows]
    order = data.draw(st.permutations(range(len(responses))))
    chosen = batch.select(order).to(torch.device("cpu"))
    assert as_rows(chosen.kept) == [row for number in order for row in responses[number]]
    joined = in_order([batch.select([number]) for number in order])
    assert as_rows(joined.kept) == as_rows(batch.kept)
    assert torch.equal(joined.kept_ids_M, batch.kept_ids_M) and joined.kept_ids_M.dtype == torch.int32


def test_a_share_whose_episodes_all_failed_has_no_kept_sets_and_is_joined_all_the_same():
    rows = [[[1, 2], [3]]]
    failed = pack_sequences(
        token_ids=[[5, 6]], response_masks=[[False, False]], rollout_logprobs=[[0.0, 0.0]], sequence_ids=[1]
    )
    for parts in ([packed(rows), failed], [failed, packed(rows)]):
        joined = in_order(parts)
        assert as_rows(joined.kept) == [*as_rows(packed(rows).kept), []] and joined.num_tokens == 3
    assert in_order([failed]).num_kept_T is None


def test_counts_and_ids_that_do_not_fit_are_refused():
    batch = packed([[[1, 2], [3]]])
    with pytest.raises(ValueError, match="counts 3 kept ids, but kept_ids_M has 2"):
        batch.with_fields(kept_ids_M=batch.kept_ids_M[:2])
    with pytest.raises(ValueError, match="num_kept_T has a count of -1; a token has at least 0"):
        batch.with_fields(num_kept_T=torch.tensor([4, -1], dtype=torch.int32))
    with pytest.raises(ValueError, match="one is missing; pass both"):
        batch.with_fields(kept_ids_M=None)
    with pytest.raises(ValueError, match="convert it to int32"):
        batch.with_fields(kept_ids_M=batch.kept_ids_M.long())
