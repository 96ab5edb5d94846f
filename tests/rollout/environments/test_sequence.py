"""What servers tell of a sequence of turns: experts by the newest weights, kept ids of the turn that sampled a token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.client import KnownExperts
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
        st.tuples(
            st.integers(0, 4),
            st.integers(1, 5),
            st.sampled_from(["same", "newer", "retracted", "interrupted"]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_each_token_has_the_experts_by_the_newest_weights_behind_it(turns, behind):
    """turns: (observed tokens, sampled tokens, what became of the weights since the turn before). Where they are newer at
    its end, its answer has the rows of all tokens. A turn that an update interrupts is of two versions, and its rows are by the
    newer one; a turn that the server retracts for lack of memory keeps its version. Only what is not known by the newest
    weights is told. behind: tokens observed after the last."""
    sequence, version = TokenSequence(), 7
    sequence.observe([1])
    rows: dict[int, tuple[int, int]] = {}  # place -> (turn, version); written out token by token
    length, inputs = 1, None
    for number, (observed, sampled, change) in enumerate(turns, start=1):
        sequence.observe([2] * observed)
        asked = sequence.known_experts
        assert asked == (None if inputs is None else KnownExperts(before=inputs, version=version))
        length += observed + sampled
        inputs = length - 1
        version += change == "newer"
        versions = [version] * sampled
        if change == "interrupted":
            version += 1
            versions[-1] = version
        first = asked.before if asked is not None and asked.version == version else 0
        rows |= {place: (number, version) for place in range(first, inputs)}
        sequence.append(
            completion(
                token_ids=[3] * sampled,
                rollout_logprobs=[-1.0] * sampled,
                token_versions=versions,
                finish_reason=FinishReason.STOP,
                experts=rows_of(number, first, inputs),
                num_retractions=int(change in ("retracted", "interrupted")),
            )
        )
    sequence.observe([4] * behind)
    made = sequence.trajectory(
        group_id=0, sibling_id=0, prompt_id="p", reward=1.0, reward_parts={}, status=Status.OK
    )
    assert {row[1] for row in rows.values()} <= {version}, "one policy for the whole beginning"
    assert len(rows) == inputs, "every input"
    assert made.experts.shape == (length + behind, LAYERS, CHOSEN)
    assert np.flatnonzero(made.is_replayed).tolist() == sorted(rows)
    for place in range(length + behind):
        wanted = [rows[place][0], place] if place in rows else [0, 0]
        assert (made.experts[place] == wanted).all(), place
    forked = sequence.beginning(length - 1)
    assert forked.known_experts is None, "a fork asks for the experts of all its tokens"
    assert np.array_equal(forked.token_ids, sequence.token_ids[: length - 1])


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


def test_behind_an_answer_without_experts_or_without_tokens_all_are_asked_for():
    """Both are by the weights before, so that what was told stays known."""
    sequence = TokenSequence()
    sequence.observe([1])
    for number, (tokens, told, known) in enumerate(((2, (0, 2), 2), (1, None, None), (0, (0, 3), None)), 1):
        sequence.append(
            completion(
                token_ids=[3] * tokens,
                rollout_logprobs=[-1.0] * tokens,
                token_versions=[7] * tokens,
                finish_reason=FinishReason.STOP,
                experts=None if told is None else rows_of(number, *told),
            )
        )
        assert sequence.known_experts == (known and KnownExperts(before=known, version=7))
    made = sequence.trajectory(
        group_id=0, sibling_id=0, prompt_id="p", reward=1.0, reward_parts={}, status=Status.OK
    )
    assert made.is_replayed.tolist() == [True, True, False, False] and made.branch == 0
    assert (made.experts[:2] == rows_of(1, 0, 2)).all() and not made.experts[2:].any()


def test_no_experts_are_left_of_weights_before_an_answer_without_experts():
    """A later turn was sampled by newer weights, which told none."""
    sequence = TokenSequence()
    sequence.observe([1])
    for number, experts in enumerate((rows_of(1, 0, 2), None)):
        sequence.append(
            completion(
                token_ids=[3, 3],
                rollout_logprobs=[-1.0] * 2,
                token_versions=[7 + number] * 2,
                finish_reason=FinishReason.STOP,
                experts=experts,
            )
        )
    made = sequence.trajectory(
        group_id=0, sibling_id=0, prompt_id="p", reward=1.0, reward_parts={}, status=Status.OK
    )
    assert not made.is_replayed.any() and not made.experts.any()
    assert made.token_versions.tolist() == [0, 7, 7, 8, 8]
