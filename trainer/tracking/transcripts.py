"""The text of a sample by turns, with the numbers of learner and rollout for each token.

A token may be a part of a character, and the text of a token may depend on the one before. ``pieces_of`` therefore
gives the shortest runs of tokens that have a text of their own.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.errors import counted
from rollout.terminal_text import visible
from rollout.tokenization import load_tokenizer
from rollout.tokenizer_files import TokenizerFiles
from trainer.tracking.samples import Sample, SampledTurn

Decode = Callable[[Sequence[int]], str]
GAP_EDGES = (0.001, 0.01, 0.1, 0.25, 0.5)
"""Bounds of the levels of |Δp|, those of ``mismatch/response_abs_prob_max_share``."""
OLDEST = 4
"""Tokens of this age and more have one level."""
PART_OF_A_CHARACTER = "\ufffd"
MOST_PARTS = 8
"""Tokens that may make one character; an invalid byte stays a part forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The shortest run of tokens that has a text."""

    text: str
    start: int
    end: int
    """Places of its tokens in the sample."""
    rollout: float | None = None
    learner: float | None = None
    """Probabilities of its token; of several tokens, of the one with the largest gap. None on tokens that were not
    sampled, and where they are not known."""
    age: int | None = None
    """Updates of the weights between the sampling of its oldest token and the step; None if it was not sampled."""

    @property
    def gap(self) -> float | None:
        """|Δp|"""
        return None if self.rollout is None or self.learner is None else abs(self.rollout - self.learner)

    @property
    def gap_level(self) -> int | None:
        """0 is below the first of ``GAP_EDGES``, 5 above the last."""
        return None if self.gap is None else sum(self.gap > edge for edge in GAP_EDGES)

    @property
    def age_level(self) -> int | None:
        return None if self.age is None else min(max(self.age, 0), OLDEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring tokens that were all observed, or all sampled in one turn. The prompt is the first stretch."""

    turn: SampledTurn | None
    """None: observed."""
    number: int
    """The turn's number, from 1. Observed tokens have the number of the turn before them, the prompt has 0."""
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def title(self) -> str:
        """The kind of stretch, its number of tokens, the ages of sampled tokens unless all are 0, and the turn's reward."""
        count = sum(piece.end - piece.start for piece in self.pieces)
        if self.turn is None:
            return f"{'observed' if self.number else 'prompt'}, {counted(count, 'token')}"
        ages = sorted({piece.age for piece in self.pieces if piece.age is not None})
        old = "" if ages in ([], [0]) else f", age {ages[0]}" + (f" to {ages[-1]}" if ages[1:] else "")
        earned = "" if self.turn.reward is None else f", reward {self.turn.reward:g}"
        return f"turn {self.number}, {counted(count, 'token')}, ended by {visible(self.turn.finish_reason)}{old}{earned}"


def gap_labels() -> list[str]:
    return [*(f"up to {edge:g}" for edge in GAP_EDGES), f"over {GAP_EDGES[-1]:g}"]


def age_labels() -> list[str]:
    return [*map(str, range(OLDEST)), f"{OLDEST} and more"]


def ids_as_text(token_ids: Sequence[int]) -> str:
    """Replaces a tokenizer's ``decode`` if there is no tokenizer."""
    return " ".join(map(str, token_ids))


def find_decode(model_path: Path, run_dir: Path) -> tuple[Decode, str | None]:
    """A run's tokenizer: that of ``model.path``, else of the trained model; else ``ids_as_text``, and why."""
    problem = ""
    for folder in (model_path, run_dir / "hf"):
        try:
            return _decode_of(folder), None
        except ValueError as error:
            problem = problem or str(error)
    return ids_as_text, f"{problem}; token ids are shown instead of text"


def _decode_of(folder: Path) -> Decode:
    """Raises ValueError if there is no tokenizer."""
    if TokenizerFiles.reads(folder):
        return TokenizerFiles(folder).decode
    tokenizer = load_tokenizer(folder)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def beginning(sample: Sample) -> list[int]:
    """The tokens before its first turn. Siblings have one prompt, but a fork may begin with other tokens."""
    return sample.token_ids[: sample.turns[0].start if sample.turns else None]


def outcome(sample: Sample) -> str:
    """Reward with its parts, status and size, in a line."""
    reward = "not scored" if sample.reward is None else f"reward {sample.reward:g}"
    parts = ", ".join(
        f"{visible(name)} {'not finite' if value is None else f'{value:g}'}"
        for name, value in sample.parts.items()
    )
    count = sum(turn.end - turn.start for turn in sample.turns)
    turns, tokens = counted(len(sample.turns), "turn"), counted(count, "sampled token")
    return f"{reward}{f' ({parts})' if parts else ''}, {visible(sample.status)}, {turns}, {tokens}"


def stretches(sample: Sample, decode: Decode) -> list[Stretch]:
    """The whole sample in order. Stretches without tokens are left out, unless they are turns."""
    spans: list[tuple[int, int, SampledTurn | None, int]] = []
    end = 0
    for number, turn in enumerate(sample.turns, start=1):
        spans += [(end, turn.start, None, number - 1), (turn.start, turn.end, turn, number)]
        end = turn.end
    spans.append((end, len(sample.token_ids), None, len(sample.turns)))
    numbers, starts = _token_numbers(sample), [start for start, end, *_ in spans if end > start]
    found: dict[int, list[Piece]] = {start: [] for start in starts}
    for piece in pieces_of(sample.token_ids, decode, cuts=[end for _, end, *_ in spans]):
        found[starts[bisect_right(starts, piece.start) - 1]].append(_with_numbers(piece, numbers))
    return [
        Stretch(turn=turn, number=number, pieces=found[start] if end > start else [])
        for start, end, turn, number in spans
        if turn is not None or end > start
    ]


def _token_numbers(sample: Sample) -> dict[int, tuple[float | None, float | None, int]]:
    """(probability by the rollout, by the learner, age) by the place of each sampled token."""
    places = [place for turn in sample.turns for place in range(turn.start, turn.end)]
    learner = sample.learner_logprobs or [None] * len(places)
    ages = [sample.version - version for version, count in sample.versions for _ in range(count)]
    columns = zip(places, sample.rollout_logprobs, learner, ages, strict=True)
    return {place: (_exp(rollout), _exp(own), age) for place, rollout, own, age in columns}


def _exp(logprob: float | None) -> float | None:
    return None if logprob is None else math.exp(min(logprob, 0.0))


def _with_numbers(piece: Piece, numbers: dict[int, tuple[float | None, float | None, int]]) -> Piece:
    piece = replace(piece, text=visible(piece.text))
    own = [numbers[place] for place in range(piece.start, piece.end) if place in numbers]
    if not own:
        return piece
    tokens = (replace(piece, rollout=rollout, learner=learner) for rollout, learner, _ in own)
    worst = max(tokens, key=lambda token: -1.0 if token.gap is None else token.gap)
    return replace(worst, age=max(age for *_, age in own))


def pieces_of(token_ids: Sequence[int], decode: Decode, cuts: Sequence[int] = ()) -> Iterator[Piece]:
    """The tokens as pieces, in order. No piece crosses one of ``cuts``.

    Each text is what a token adds to the text of the piece before it: a tokenizer may drop the space that a text
    begins with, so a token cannot be decoded alone.
    """
    ends, before, start = set(cuts) | {len(token_ids)}, 0, 0
    known = ""
    for end in range(1, len(token_ids) + 1):
        whole = decode(token_ids[before:end])
        is_complete = len(whole) > len(known) and not whole.endswith(PART_OF_A_CHARACTER)
        if not (is_complete or end in ends or end - start >= MOST_PARTS):
            continue
        yield Piece(text=whole[len(known) :], start=start, end=end)
        before, start = start, end
        known = decode(token_ids[before:end])
