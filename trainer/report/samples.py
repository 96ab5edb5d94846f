"""The page's samples: those of the first and of the last recorded step, as text by turns, token by token.

The page has at most 2 groups of each step, 4 siblings of each group, and 400 tokens of a prompt and of the tokens after
it. The middle of a longer text is left out. This keeps the page under 2 MB. ``tandem samples`` shows everything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rollout.terminal_text import visible
from trainer.tracking.samples import FOLDER, Sample, read_samples, sample_file, sampled_steps
from trainer.tracking.transcripts import (
    Decode,
    Piece,
    Stretch,
    age_labels,
    beginning,
    find_decode,
    gap_labels,
    outcome,
    stretches,
)

MOST_GROUPS, MOST_SIBLINGS = 2, 4
HEAD, TAIL = 250, 150
"""Pieces that are shown at the beginning and at the end of a longer sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A piece of text on the page."""

    text: str
    classes: str
    about: str
    """Shown where the pointer rests."""


Shown = dict[str, Any]
"""A step, group, sample or part of one, by the names that the page's template knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSamples:
    """The page's section of samples. It is left out if it has no steps."""

    steps: list[Shown]
    notes: list[str]
    gap_labels: list[str]
    age_labels: list[str]


def shown_samples(run_dir: Path, model_path: Path) -> ShownSamples:
    """The samples of a run's folder. A file that cannot be read becomes a note, and so does a missing tokenizer."""
    recorded = sampled_steps(run_dir / FOLDER)
    steps, notes = [], []
    decode, problem = find_decode(model_path, run_dir) if recorded else (None, None)
    for step in dict.fromkeys([*recorded[:1], *recorded[-1:]]):
        try:
            samples = read_samples(sample_file(run_dir / FOLDER, step))
        except ValueError as error:
            notes.append(f"Samples left out: {error}.")
            continue
        if decode is not None:
            steps.append(_step(samples, decode))
    if problem is not None:
        notes.append(f"Samples: {problem}.")
    return ShownSamples(steps=steps, notes=notes, gap_labels=gap_labels(), age_labels=age_labels())


def _step(samples: Sequence[Sample], decode: Decode) -> Shown:
    groups = islice(groupby(samples, key=lambda sample: sample.group), MOST_GROUPS)
    shown = [_group(number, [*members], decode) for number, members in groups]
    return {"title": f"Step {samples[0].step}", "groups": shown}


def _group(number: int, members: Sequence[Sample], decode: Decode) -> Shown:
    left_out = len(members) - MOST_SIBLINGS
    title = f"Group {number}, prompt {visible(members[0].prompt_id)}"
    title += f" ({left_out} more samples are not shown)" if left_out > 0 else ""
    prompts, samples = [], []
    for sample in members[:MOST_SIBLINGS]:
        parts = stretches(sample, decode)
        prompts.append([part for part in parts if part.number == 0])
        has_other = beginning(sample) != beginning(members[0])
        after = _shortened([part for part in parts if part.number > 0 or has_other])
        samples.append({"title": f"{sample.name.capitalize()}: {outcome(sample)}", "parts": after})
    prompt = "".join(token.text for part in _shortened(prompts[0]) for token in part["tokens"])
    return {"title": title, "prompt": prompt, "samples": samples}


def _shortened(parts: Sequence[Stretch]) -> list[Shown]:
    """The parts with HEAD + TAIL pieces in all at most; a note stands where the middle was."""
    total, place, shown = sum(len(part.pieces) for part in parts), 0, []
    gap = range(HEAD, total - TAIL)
    for part in parts:
        tokens = list(_tokens(part.pieces, gap, place))
        place += len(part.pieces)
        if tokens or not part.pieces:
            shown.append({"title": part.title, "is_sampled": part.turn is not None, "tokens": tokens})
    return shown


def _tokens(pieces: Sequence[Piece], gap: range, first: int) -> Iterator[Token]:
    for place, piece in enumerate(pieces, start=first):
        if place == gap.start and gap:
            yield Token(text=f" […{len(gap)} tokens are left out…] ", classes="cut", about="")
        if place not in gap:
            yield _token(piece)


def _token(piece: Piece) -> Token:
    """Classes: g3 is level 3 of |Δp|, a1 an age of 1."""
    if piece.age is None:
        return Token(text=piece.text, classes="", about="")
    classes = f"a{piece.age_level}" + (f" g{piece.gap_level}" if piece.gap is not None else "")
    numbers = " / ".join("?" if p is None else f"{p:.4f}" for p in (piece.rollout, piece.learner))
    return Token(text=piece.text.replace("\n", "↵\n"), classes=classes, about=f"{numbers} / {piece.age}")
