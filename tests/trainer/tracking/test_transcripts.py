"""The text of samples, and what is said of each token."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.terminal_text import visible
from rollout.tiny_model import make_tiny_countdown_model
from trainer.algorithm.mismatch import RESPONSE_MAX_EDGES
from trainer.tracking.samples import Sample, SampledTurn
from trainer.tracking.transcripts import (
    GAP_EDGES,
    age_labels,
    find_decode,
    gap_labels,
    ids_as_text,
    outcome,
    pieces_of,
    stretches,
)


def bytes_as_text(token_ids) -> str:
    """A tokenizer whose tokens are bytes: a character may take four."""
    return bytes(token_ids).decode(errors="replace")


def words_as_text(token_ids) -> str:
    """A tokenizer that drops the space which a text begins with."""
    return "".join(f" w{token}" for token in token_ids)[1:]


def make_sample(text: bytes = b"abcdefgh", **fields) -> Sample:
    """The prompt ab, the turn cd, the observation e, the turn fgh."""
    turns = [
        SampledTurn(start=2, end=4, finish_reason="stop", reward=0.25),
        SampledTurn(start=5, end=8, finish_reason="length"),
    ]
    defaults = {
        "step": 3, "version": 6, "group": 1, "sibling": 0, "prompt_id": "p", "status": "ok", "reward": 0.5,
        "parts": {}, "turns": turns, "token_ids": list(text), "rollout_logprobs": [math.log(0.5)] * 5,
        "learner_logprobs": [math.log(p) for p in (0.5, 0.502, 0.45, 0.3, 0.999999)], "versions": [(6, 3), (1, 2)],
    }  # fmt: skip
    return Sample(**{**defaults, **fields})


def test_turns_and_observations_follow_each_other():
    found = stretches(make_sample(), bytes_as_text)
    assert [(part.text, part.number, part.turn is not None) for part in found] == [
        ("ab", 0, False), ("cd", 1, True), ("e", 1, False), ("fgh", 2, True)
    ]  # fmt: skip
    assert [part.title for part in found] == [
        "prompt, 2 tokens", "turn 1, 2 tokens, ended by stop, reward 0.25", "observed, 1 token",
        "turn 2, 3 tokens, ended by length, age 0 to 5",
    ]  # fmt: skip
    pieces = [piece for part in found for piece in part.pieces]
    assert [piece.gap_level for piece in pieces] == [None, None, 0, 1, None, 2, 3, 4]
    assert [piece.age for piece in pieces] == [None, None, 0, 0, None, 0, 5, 5]
    assert [piece.age_level for piece in pieces[-3:]] == [0, 4, 4]
    assert pieces[6].gap == pytest.approx(0.2)


def test_the_levels_are_those_of_the_metric():
    assert GAP_EDGES == RESPONSE_MAX_EDGES
    assert len(gap_labels()) == len(GAP_EDGES) + 1 and gap_labels()[-1] == "over 0.5"
    assert age_labels() == ["0", "1", "2", "3", "4 and more"]


def test_without_the_learner_there_is_no_gap_but_an_age():
    piece = stretches(make_sample(learner_logprobs=None), bytes_as_text)[1].pieces[0]
    assert (piece.gap, piece.gap_level, piece.age, piece.rollout) == (None, None, 0, 0.5)


def test_a_character_of_several_tokens_is_one_piece_with_the_largest_gap_and_age():
    text = "ab€".encode()  # 2 + 3 bytes
    turn = SampledTurn(start=1, end=5, finish_reason="stop")
    learner = [math.log(p) for p in (0.5, 0.5, 0.2, 0.5)]
    sample = make_sample(
        text, turns=[turn], rollout_logprobs=[math.log(0.5)] * 4, learner_logprobs=learner,
        versions=[(6, 3), (4, 1)],
    )  # fmt: skip
    prompt, sampled = stretches(sample, bytes_as_text)
    assert prompt.text == "a" and [piece.text for piece in sampled.pieces] == ["b", "€"]
    assert sampled.pieces[1].gap == pytest.approx(0.3) and sampled.pieces[1].age == 2


def test_a_turn_without_a_token_is_still_a_turn():
    turns = [
        SampledTurn(start=2, end=2, finish_reason="stop"),
        SampledTurn(start=2, end=8, finish_reason="stop"),
    ]
    numbers = {"rollout_logprobs": [-1.0] * 6, "learner_logprobs": None, "versions": [(6, 6)]}
    found = stretches(make_sample(turns=turns, **numbers), bytes_as_text)
    assert [(part.text, part.number) for part in found] == [("ab", 0), ("", 1), ("cdefgh", 2)]


def test_a_space_that_a_text_begins_with_is_kept_between_pieces():
    assert "".join(piece.text for piece in pieces_of([1, 2, 3], words_as_text, cuts=[1, 2])) == "w1 w2 w3"
    assert [piece.text for piece in pieces_of([17, 4], ids_as_text)] == ["17", " 4"]


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_pieces_have_every_token_once_and_cross_no_cut(content, cuts):
    pieces = list(pieces_of(list(content), bytes_as_text, cuts=cuts))
    assert [place for piece in pieces for place in range(piece.start, piece.end)] == list(range(len(content)))
    assert not any(piece.start < cut < piece.end for piece in pieces for cut in cuts)


@given(st.text(max_size=40))
def test_sound_text_comes_back_whole(text):
    pieces = pieces_of(list(text.encode(errors="ignore")), bytes_as_text)
    assert "".join(piece.text for piece in pieces) == text.encode(errors="ignore").decode()


def test_control_characters_are_shown_and_not_obeyed():
    assert visible("a\tb\nü 👩‍🚀") == "a\tb\nü 👩‍🚀"
    assert visible("\x1b[31mred\x07\r\x7f\u202e\u2028") == "␛[31mred␇␍\\u007f\\u202e\\u2028"


def test_the_outcome_in_a_line():
    parts = {"correct": 1.0, "own": None}
    assert (
        outcome(make_sample(parts=parts))
        == "reward 0.5 (correct 1, own not finite), ok, 2 turns, 5 sampled tokens"
    )
    assert outcome(make_sample(reward=None, status="failed")).startswith("not scored, failed, 2 turns")


def test_the_tokenizer_is_the_models_else_the_trained_ones_else_ids(tmp_path):
    make_tiny_countdown_model(tmp_path / "run" / "hf", seed=0)
    gone = Path("no-such-model")
    decode, problem = find_decode(gone, tmp_path / "run")
    ids = list(range(5, 9))
    assert problem is None and len(decode(ids)) == 4
    assert find_decode(tmp_path / "run" / "hf", tmp_path)[0](ids) == decode(ids)
    decode, problem = find_decode(gone, tmp_path)
    assert decode([3, 14]) == "3 14"
    assert "no-such-model does not exist" in problem and "token ids are shown" in problem
