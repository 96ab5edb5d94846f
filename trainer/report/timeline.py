"""The timeline of the last traced step: the parts of each learner rank, and how much is under way in the sample role."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracing.reading import STEP, Process, Recorded, Trace, read_trace
from tracing.recorder import MAIN
from trainer.report.drawing import COLORS, LEGEND, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "One step on one clock"
ABOUT = (
    "The last traced step: the parts of each learner rank, from its own beginning to its end, and below them how many requests and "
    "rewards of the sample role are under way. `tandem trace RUN` has all spans."
)
MOST_RANKS = 8
LEAST_SHARE = 0.01
"""Share of the step. A part that takes less is grey."""
GREY = "#bdbdbd"


def last_step(run: Path) -> Trace | None:
    """The last whole step of the run's trace; None if there is none. Raises ValueError if the trace cannot be read."""
    trace = read_trace(run)
    return trace.last(1) if trace.steps else None


def draw_timeline(trace: Trace, title: str, *, width: float) -> "Figure":
    """trace: of one step. width: inches."""
    from matplotlib.ticker import AutoLocator

    ((step, (begin, end)),) = trace.steps.items()
    ranks = [process for process in trace.processes if process.who.startswith("rank-")][:MOST_RANKS]
    curves = [*_under_way(trace.processes)]
    height = 1.4 + 0.42 * (len(ranks) + len(curves))
    figure, (axes,) = new_figure(1, title, size=(width, height))
    color_of = _colors(ranks, end - begin)
    for place, process in enumerate(ranks):
        for part in _own_parts(process):
            label = part.name if part.name in color_of else None
            bar = [((part.begin - begin) / 1e9, part.seconds)]
            axes.broken_barh(bar, (place - 0.38, 0.76), color=color_of.get(part.name, GREY), label=label)
    for place, (_, spans) in enumerate(curves, len(ranks)):
        _draw_count(axes, place, spans, begin, end)
    names = [process.title for process in ranks] + [name for name, _ in curves]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1e9)
    axes.xaxis.set_major_locator(AutoLocator())
    axes.set_xlabel(f"seconds since the start of step {step}")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), bbox_to_anchor=(0, 1), ncols=4, **LEGEND)
    return figure


def _own_parts(process: Process) -> list[Recorded]:
    """The outermost spans inside of the step."""
    parts: list[Recorded] = []
    for span in process.spans:
        if span.row == MAIN and span.name != STEP and (not parts or span.begin >= parts[-1].end):
            parts.append(span)
    return parts


def _colors(ranks: Sequence[Process], whole: int) -> dict[str, str]:
    """The colour of each part, by its name, of those that take longest on some rank, in the order of the step."""
    longest: dict[str, int] = {}
    for part in (part for process in ranks for part in _own_parts(process)):
        longest[part.name] = max(longest.get(part.name, 0), part.end - part.begin)
    shown = sorted(longest, key=lambda name: -longest[name])[: len(COLORS)]
    shown = [name for name in longest if name in shown and longest[name] >= LEAST_SHARE * whole]
    return dict(zip(shown, COLORS, strict=False))


def _under_way(processes: Sequence[Process]) -> Iterator[tuple[str, list[Recorded]]]:
    """(label, outermost spans) of each family of rows besides a process's main row."""
    for process in processes:
        families: dict[str, dict[str, list[Recorded]]] = {}
        for span in process.spans:
            if span.row != MAIN:
                rows = families.setdefault(span.row.rpartition(" ")[0], {})
                row = rows.setdefault(span.row, [])
                if not row or span.begin >= row[-1].end:
                    row.append(span)
        for family, rows in families.items():
            yield f"{family} (≤ {len(rows)})", [span for row in rows.values() for span in row]


def _draw_count(axes: "Axes", place: int, spans: Sequence[Recorded], begin: int, end: int) -> None:
    """Draw the number of open spans over time. Its maximum is as high as the row."""
    changes = sorted([(max(s.begin, begin), 1) for s in spans] + [(min(s.end, end), -1) for s in spans])
    times, counts, now = [0.0], [0], 0
    for at, change in changes:
        now += change
        times.append((at - begin) / 1e9)
        counts.append(now)
    top = max(max(counts), 1)
    heights = [place + 0.38 - 0.76 * count / top for count in counts]
    axes.fill_between(times, place + 0.38, heights, step="post", color="#555555", linewidth=0)
