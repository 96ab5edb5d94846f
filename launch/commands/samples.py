"""``tandem samples``: what the model does. Samples of a step or an evaluation turn by turn, and learner and rollout log-probs
of each token.

It reads only the run folder, and works during a run.
"""

from collections.abc import Iterator, Sequence

import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from configs.reading.files import text_of
from launch.checks.arguments import BadInput, as_bad_input
from launch.processes.run_folder import RunFolder
from launch.processes.started_by import started_in
from rollout.terminal_text import visible
from trainer.tracking.samples import EVALUATION, STEP, Sample, read_samples, sample_file, sampled_steps
from trainer.tracking.transcripts import (
    Decode,
    Stretch,
    beginning,
    find_decode,
    gap_labels,
    outcome,
    stretches,
)

OBSERVED, TITLE = "dim italic", "bold"
GAP_STYLES = ("", "cyan", "yellow", "dark_orange", "red", "bold white on red")
"""Of the levels of |Δp|."""
MOST_LISTED = 8
"""Tokens in the table of the largest |Δp|."""
WRITTEN = {
    STEP: ("at the end of each step's update", "sample_groups"),
    EVALUATION: ("at the end of each evaluation", "evaluation_problems"),
}
"""When samples are written, and the field that says how many."""
MOST_STEPS = 12
"""Steps that an error names from each end."""


def show_samples(
    folder: RunFolder,
    *,
    step: int | None,
    group: int | None,
    sibling: int | None,
    tokens: bool,
    evaluation: bool,
) -> None:
    """Print the samples of ``step`` (None: the last one), of all groups and siblings or only of the given ones. evaluation: the
    samples of the evaluation after it. A run of ``tandem eval`` has no others."""
    of = EVALUATION if evaluation or folder.request.exists() else STEP
    step = _chosen_step(folder, step, of)
    with as_bad_input(f"--step {step}: "):
        samples = read_samples(sample_file(folder.samples, step, of))
    chosen = _chosen(_chosen(samples, "group", group), "sibling", sibling)
    decode, problem = decode_of(folder)
    console = Console(highlight=False, markup=False, emoji=False)
    if problem is not None:
        console.print(Text(visible(problem), style="red"), soft_wrap=True)
    for part in transcript(chosen, decode, tokens=tokens, of=of):
        console.print(part, soft_wrap=not isinstance(part, Table))


def _chosen_step(folder: RunFolder, step: int | None, of: str) -> int:
    steps = sampled_steps(folder.samples, of)
    if not steps and folder.request.exists():
        raise BadInput(f"RUN: {folder.path} is not a training run, and has no samples of an evaluation")
    if not steps:
        when, field = WRITTEN[of]
        none = f"RUN: {folder.path} has no samples yet"
        raise BadInput(f"{none}; they are written {when}, unless tracking.{field} is 0")
    if step is not None and step not in steps:
        none = f"no samples of this step in {folder.samples}"
        raise BadInput(f"--step {step}: {none}; there are {_listed(steps)}")
    return steps[-1] if step is None else step


def _listed(steps: Sequence[int]) -> str:
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"those of steps {steps[0]} to {steps[-1]}"
    shown = [str(step) for step in steps]
    if len(shown) > 2 * MOST_STEPS:
        shown = [*shown[:MOST_STEPS], "…", *shown[-MOST_STEPS:]]
    return f"those of {', '.join(shown)}"


def _chosen(samples: list[Sample], name: str, number: int | None) -> list[Sample]:
    there = sorted({getattr(sample, name) for sample in samples})
    if number is not None and number not in there:
        raise BadInput(f"--{name} {number}: not among the samples; there are {', '.join(map(str, there))}")
    return [sample for sample in samples if number in (None, getattr(sample, name))]


def decode_of(folder: RunFolder) -> tuple[Decode, str | None]:
    """``find_decode`` of a run. Its config.yaml may be damaged."""
    try:
        model = started_in(folder.commands) / yaml.safe_load(text_of(folder.config))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, RecursionError) as error:
        decode, problem = find_decode(folder.hf, folder.path)
        return decode, problem and f"{folder.config} names no model.path ({error}), and {problem}"
    return find_decode(model, folder.path)


def transcript(
    samples: Sequence[Sample], decode: Decode, *, tokens: bool, of: str = STEP
) -> Iterator[RenderableType]:
    """The samples of one step, or of the evaluation after it: each group's prompt, then its siblings turn by turn.

    tokens: with sampled tokens in the colour of their |Δp|, and a table of the largest.
    """
    if not samples:
        return
    what = "step" if of == STEP else "evaluation after step"
    yield Text(f"{what} {samples[0].step}, sampled for version {samples[0].version} of the weights", TITLE)
    if tokens:
        yield _legend(samples)
    group, prompt = None, None
    for sample in samples:
        parts = stretches(sample, decode)
        if sample.group != group:
            group, prompt = sample.group, beginning(sample)
            heldout_set = f", held-out set {sample.heldout_set}" if sample.heldout_set else ""
            yield Text(f"\n━━ group {group}, prompt {visible(sample.prompt_id)}{heldout_set}", TITLE)
            if parts and parts[0].turn is None:
                yield Text(parts[0].text, OBSERVED)
        yield Text(f"\n── {sample.name}: {outcome(sample)}", TITLE)
        for part in parts:
            if part.turn is not None or part.number > 0 or beginning(sample) != prompt:
                yield from _stretch(part, tokens)
        if tokens and (table := _worst_tokens(parts)) is not None:
            yield table


def _stretch(part: Stretch, tokens: bool) -> Iterator[Text]:
    yield Text(part.title, "dim" if part.turn is None else "green")
    if part.turn is None or not tokens:
        yield Text(part.text, OBSERVED if part.turn is None else "")
        return
    line = Text()
    for piece in part.pieces:
        line.append(piece.text.replace("\n", "↵\n"), GAP_STYLES[piece.gap_level or 0])
    yield line


def _legend(samples: Sequence[Sample]) -> Text:
    line = Text("|Δp| = |p rollout - p learner|: ")
    for label, style in zip(gap_labels(), GAP_STYLES, strict=True):
        line.append(label, style).append("  ")
    if any(sample.learner_logprobs is None for sample in samples):
        line.append("(the learner has not scored these tokens)")
    return line


def _worst_tokens(parts: Sequence[Stretch]) -> Table | None:
    pieces = [piece for part in parts for piece in part.pieces if piece.gap is not None]
    if not pieces:
        return None
    largest = sorted(pieces, key=lambda piece: -(piece.gap or 0.0))[:MOST_LISTED]
    table = Table("place", "token", "p rollout", "p learner", "|Δp|", "age", title_justify="left")
    table.title = f"largest |Δp|; mean {sum(piece.gap or 0.0 for piece in pieces) / len(pieces):.2e}"
    for piece in largest:
        probabilities = (f"{p or 0.0:.4f}" for p in (piece.rollout, piece.learner))
        cells = (str(piece.start), Text(repr(piece.text)), *probabilities, f"{piece.gap:.1e}", str(piece.age))
        table.add_row(*cells, style=GAP_STYLES[piece.gap_level or 0])
    return table
