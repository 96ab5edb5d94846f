"""What servers tell of a sequence of turns: experts of the first turn that had a token as an input, kept ids of the turn
that sampled it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.environments.sequence import TokenSequence
from rollout.records import FinishReason, Status
from tests.support.records import completion

LAYERS, CHOSEN = 3, 2


def rows_of(turn: int, first: int, last: int) -> np.ndarray:
    """Rows of a turn's answer that tell turn and place: [last - first, L, K]."""
    rows = np.zeros((last - first, LAYERS, CHOSEN), dtype=np.uint8)
    rows[..., 0], rows[..., 1] = turn, np.arange(first, last)[:, None]
    return rows


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 5), st.sampled_from(["all", "new", "retracted"])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_each_token_has_the_experts_of_the_turn_that_first_had_it_as_an_input(turns, behind):
    """turns: (observed tokens, sampled tokens, rows that the server gives). behind: tokens observed after the last."""
    sequence = TokenSequence()
    sequence.observe([1])
    expected: dict[int, int] = {}  # place -> turn; written out token by token
    asked_from, length = 0, 1
    for number, (observed, sampled, given_rows) in enumerate(turns, start=1):
        sequence.observe([2] * observed)
        assert sequence.first_new_input == asked_from
        length += observed + sampled
        for place in range(asked_from, length - 1):
            if given_rows != "retracted":
                expected[place] = number
        first = 0 if number == 1 else asked_from
        experts = None if given_rows == "retracted" else rows_of(number, first, length - 1)
        sequence.append(
            completion(
                token_ids=[3] * sampled,
                rollout_logprobs=[-1.0] * sampled,
                token_versions=[0] * sampled,
                finish_reason=FinishReason.STOP,
                experts=experts,
                num_retractions=int(given_rows == "retracted"),
            )
        )
        asked_from = length - 1
    sequence.observe([4] * behind)
    made = sequence.trajectory(
        group_id=0, sibling_id=0, prompt_id="p", reward=1.0, reward_parts={}, status=Status.OK
    )
    assert [turn.num_retractions for turn in made.turns] == [int(kind == "retracted") for *_, kind in turns]
    if not expected:
        assert made.experts is None and made.is_replayed is None
        return
    assert made.experts.shape == (length + behind, LAYERS, CHOSEN)
    assert np.flatnonzero(made.is_replayed).tolist() == sorted(expected)
    for place in range(length + behind):
        wanted = [expected[place], place] if place in expected else [0, 0]
        assert (made.experts[place] == wanted).all(), place
    forked = sequence.beginning(length - 1)
    assert forked.first_new_input == 0, "a fork asks for the experts of all its tokens"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4)), max_size=4)
)
def test_sampled_tokens_have_their_turns_kept_ids_and_others_none(turns):
    """turns: (observed tokens, how many ids were kept for each sampled token)."""
    sequence, expected = TokenSequence(), [[]]
    sequence.observe([1])
    for number, (observed, kept) in enumerate(turns):
        sequence.observe([2] * observed)
        rows = [[100 * number + 10 * place + i for i in range(count)] for place, count in enumerate(kept)]
        expected += [[]] * observed + rows
        sequence.append(
            completion(
                token_ids=[3] * len(kept),
                rollout_logprobs=[-1.0] * len(kept),
                token_versions=[0] * len(kept),
                finish_reason=FinishReason.STOP,
                num_kept=np.array(kept, dtype=np.int32),
                kept_ids=np.concatenate(rows).astype(np.int32),
            )
        )
    made = sequence.trajectory(
        group_id=0, sibling_id=0, prompt_id="p", reward=1.0, reward_parts={}, status=Status.OK
    )
    if not turns:
        assert made.num_kept is None and made.kept_ids is None
        return
    assert [part.tolist() for part in np.split(made.kept_ids, made.num_kept.cumsum())[:-1]] == expected
    assert (made.num_kept[~made.response_mask] == 0).all()
