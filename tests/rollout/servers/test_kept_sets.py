"""Kept ids in a server's answer: decoded to what was answered, and refused where anything is wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.client import GenerationError
from rollout.servers.kept_sets import bytes_per_token, decode_kept

VOCABULARY = 12


@st.composite
def answers(draw) -> tuple[list[int], list[list[int]]]:
    """(sampled ids, the set of each)"""
    sets = draw(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, unique=True), max_size=6))
    return [draw(st.sampled_from(kept)) for kept in sets], sets


def meta_of(sets: list[list[int]], logprobs: list | None = None) -> dict:
    logprobs = [-math.log(len(kept)) for kept in sets] if logprobs is None else logprobs
    return {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": logprobs}


def decoded(sampled: list[int], meta: dict):
    return decode_kept(meta, np.array(sampled, dtype=np.int32), VOCABULARY)


@given(answers())
def test_sets_come_back_end_to_end(drawn):
    sampled, sets = drawn
    kept = decoded(sampled, meta_of(sets))
    assert [part.tolist() for part in np.split(kept.kept_ids, kept.num_kept.cumsum())[:-1]] == sets
    assert kept.logprobs == pytest.approx([-math.log(len(kept)) for kept in sets])
    assert (kept.num_kept.dtype, kept.kept_ids.dtype, kept.logprobs.dtype) == (np.int32, np.int32, np.float32)


@given(answers(), st.data())
def test_a_set_without_its_token_is_refused(drawn, data):
    sampled, sets = drawn
    if not sampled:
        return
    place = data.draw(st.integers(0, len(sampled) - 1))
    sets = [kept.copy() for kept in sets]
    sets[place].remove(sampled[place])
    with pytest.raises(
        GenerationError, match=rf"token {place + 1} of {len(sampled)} \(id {sampled[place]}\) occurs 0 times"
    ):
        decoded(sampled, meta_of(sets, [-1.0] * len(sets)))


@pytest.mark.parametrize(
    "sampled, meta, message",
    [
        ([3], {}, "no sampling masks; start the servers with this config"),
        ([3], {"output_token_sampling_mask": [[3]]}, "no sampling masks"),
        ([3, 4], meta_of([[3]]), "masks are of 1 tokens with 1 log-probs, but it sampled 2"),
        ([3], meta_of([[3]], []), "with 0 log-probs"),
        ([3], meta_of([[3, 12]]), "kept token id 12, but the model has ids 0 to 11"),
        ([3], meta_of([[-1, 3]]), "kept token id -1"),
        ([3], meta_of([[3, 4, 3]]), "occurs 2 times among the 3 ids"),
        ([3, 4], meta_of([[3], [4]], [-0.5, None]), "log-prob of token 2 of 2 among its kept ids is nan"),
        ([3], meta_of([[3]], [0.1]), "is 0.1"),
    ],
)
def test_an_answer_of_another_form_is_refused(sampled, meta, message):
    with pytest.raises(GenerationError, match=message):
        decoded(sampled, meta)


def test_bytes_per_token():
    assert bytes_per_token(10) == 44
