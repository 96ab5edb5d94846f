"""``tandem watch``: a run in the terminal, while it runs or after its end. Curves, the parts of the last step, what
the roles do, and the newest samples.

Like ``tandem status`` it only reads the folder, and disturbs nothing.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.checks.arguments import BadInput
from launch.commands.samples import decode_of, transcript
from launch.commands.status import status
from launch.processes.run_folder import RunFolder
from trainer.metric_names import STEP_PARTS, TIME_PARTS, known, value_of
from trainer.tracking.metrics_file import GrowingMetrics
from trainer.tracking.samples import read_samples, sample_file, sampled_steps
from trainer.tracking.transcripts import Decode

CURVES = tuple(
    (title, known(name), form)
    for title, name, form in (
        ("reward", "reward/before_selection", ".3f"),
        ("held out", "eval/accuracy", ".1%"),
        ("|Δp| max", "mismatch/abs_prob_max", ".1e"),
        ("ESS", "mismatch/ess", ".3f"),
        ("staleness", "staleness/mean", ".2f"),
        ("entropy", "policy/entropy", ".3f"),
        ("length", "response/length_mean", ".1f"),
        ("tokens/s", "throughput/tokens_per_s", ".0f"),
        ("s a step", "time/step", ".2f"),
    )
)
"""(title, metric, format); those that were not recorded are left out."""
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
"""Characters of a curve and of the bar of a step."""
MOST_SAMPLES = 4
Part = tuple[str, RenderableType]
"""(title, content) of a panel."""


def watch(folder: RunFolder, *, once: bool, every_s: float) -> None:
    """Show the run until Ctrl-C or SIGTERM; with ``once`` print one picture."""
    console, decode = Console(highlight=False), cache(lambda: decode_of(folder)[0])
    metrics = GrowingMetrics(folder.metrics)
    if once:
        for title, part in _parts(folder, metrics.read(), decode):
            console.print(Panel(part, title=title, title_align="left"))
        return
    if not console.is_terminal:
        raise BadInput("watch needs a terminal; add --once to print one picture into a file or a pipe")
    # Ctrl-C must work even if the parent ignored it, as for background jobs of scripts: no other key ends the view.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(_parts(folder, metrics.read(), decode)), refresh=True)
            time.sleep(every_s)


def _parts(folder: RunFolder, rows: Sequence[dict], decode: Callable[[], Decode]) -> list[Part]:
    """The panels. ``rows``: of the folder's metrics."""
    return [
        ("run", Text(str(status(folder, rows=rows)), no_wrap=True, overflow="ellipsis")),
        ("curves", curves(rows)),
        ("the last step", last_step(rows)),
        ("newest samples", _samples(folder, decode)),
    ]


def _screen(parts: Sequence[Part]) -> Layout:
    """The panels one below the other at full height. The samples get the remaining height, and are cut to it."""
    panels = []
    for title, part in parts:
        height = part.row_count if isinstance(part, Table) else str(part).count("\n") + 1
        panel = Panel(part, title=title, title_align="left")
        panels.append(Layout(panel, size=None if title == "newest samples" else height + 2))
    layout = Layout()
    layout.split_column(*panels)
    return layout


def curves(rows: Sequence[dict]) -> RenderableType:
    """A curve over the steps for each quantity that was recorded, with its last, least and greatest value."""
    table = Table.grid(padding=(0, 2))
    for title, metric, form in CURVES:
        values = [value for row in rows if (value := value_of(row, metric)) is not None]
        if values:
            bounds = f"{min(values):{form}} to {max(values):{form}}"
            table.add_row(title, Text(sparkline(values, WIDTH), style="cyan"), f"{values[-1]:{form}}", bounds)
    return table if table.row_count else Text("no step yet")


def sparkline(values: Sequence[float], width: int) -> str:
    """A character per value or, for more than ``width`` values, per mean of neighbours. The lowest bar is the least value,
    the highest the greatest."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    cuts = [len(finite) * place // count for place in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    spread = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / spread * (len(BARS) - 1))] for mean in means)


def last_step(rows: Sequence[dict]) -> RenderableType:
    """The parts of the newest trained step, as ``time/*`` has them."""
    trained = [row for row in rows if row.get("time/step")]
    if not trained:
        return Text("no step yet")
    row = trained[-1]
    parts = {part: row.get(f"time/{part}") or 0.0 for part in TIME_PARTS}
    parts["other"] = max(row["time/step"] - sum(parts[part] for part in STEP_PARTS), 0.0)
    whole = sum(parts.values()) or 1.0
    table = Table.grid(padding=(0, 2))
    for part, seconds in parts.items():
        if seconds:
            bar = Text("█" * max(round(WIDTH * seconds / whole), 1), style="cyan")
            table.add_row(part, f"{seconds:.2f} s", f"{seconds / whole:.0%}", bar)
    return table


def _samples(folder: RunFolder, decode: Callable[[], Decode]) -> RenderableType:
    """The first samples of the newest step that kept any."""
    steps = sampled_steps(folder.samples)
    if not steps:
        return Text("none yet")
    file = sample_file(folder.samples, steps[-1])
    try:
        return _transcript(file, file.stat().st_mtime_ns, decode)
    except (OSError, ValueError) as error:  # a resumed run may have removed it
        return Text(str(error))


@lru_cache(maxsize=1)
def _transcript(file: Path, written: int, decode: Callable[[], Decode]) -> RenderableType:
    """Cached until there is a newer file, or ``written`` changes: rendering long samples takes seconds."""
    return Group(*transcript(read_samples(file)[:MOST_SAMPLES], decode(), tokens=False))
