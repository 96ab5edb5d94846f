"""A run's recorded metrics as series over its steps. Finds the panels of ``pictures.py`` that have something to show, and
smooths and thins series for ``drawing.py``, which draws them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import assert_never

from trainer.metric_names import find_entry
from trainer.report.pictures import MAX, Buckets, Lines, Panel, Shares

MOST_POINTS = 2000
"""Most points of a line. More would be narrower than a pixel, and a page would grow with the run."""


@dataclass(frozen=True, slots=True)
class Series:
    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All steps, and each metric over the steps that have it."""

    steps: list[int]
    series: dict[str, Series]

    def get(self, metric: str) -> Series:
        """The metric's series, empty if it was not recorded."""
        base = metric.removeprefix("1 - ")
        series = self.series.get(base, Series([], []))
        return series if base == metric else Series(series.steps, [1 - value for value in series.values])

    def labelled(self, metrics: Mapping[str, str]) -> dict[str, str]:
        """Those of the metrics that were recorded, name to label. A star stands for all names of its entry in the table of
        metrics."""
        labels = {}
        for name, label in metrics.items():
            if "*" not in name:
                labels |= {name: label} if len(self.get(name)) else {}
                continue
            starred = name.removeprefix("1 - ")
            pattern = re.compile(re.escape(starred).replace(r"\*", "(.+)"))
            matches = filter(None, map(pattern.fullmatch, sorted(self.series)))
            labels |= {
                name.replace(starred, match[0]): label.replace("*", match[1])
                for match in matches
                if find_entry(match[0]) is find_entry(starred)
            }
        return labels

    def edges(self, prefix: str) -> dict[str, str]:
        """The recorded bins or buckets of a prefix, in order: ``le_64`` to its label ``≤ 64``."""
        names = (name for name in self.series if name.startswith(f"{prefix}/"))
        parts = {name.removeprefix(f"{prefix}/").split("/")[0] for name in names}
        edges = sorted(
            (float(edge), kind == "over", part) for part in parts for kind, _, edge in [part.partition("_")]
        )
        return {part: f"{'>' if over else '≤'} {edge:g}" for edge, over, part in edges}


def is_drawn(panel: Panel, recorded: Recorded) -> bool:
    match panel:
        case Lines(metrics=metrics):
            return any(_happened(panel, name, recorded) for name in recorded.labelled(metrics))
        case Shares(prefix=prefix):
            after_first = list(recorded.edges(prefix))[1:]
            return any(any(recorded.get(f"{prefix}/{part}").values) for part in after_first)
        case Buckets(prefix=prefix):
            maxima = (recorded.get(f"{prefix}/{part}/{MAX}").values for part in recorded.edges(prefix))
            return any(value >= panel.noise for values in maxima for value in values)
        case _:
            assert_never(panel)


def _happened(panel: Lines, metric: str, recorded: Recorded) -> bool:
    """Whether the metric left the value at which it rests, by more than rounding."""
    idle = panel.idle_of.get(metric, panel.idle)
    values = recorded.get(metric).values
    return any(value != idle and abs(value - (idle or 0.0)) >= panel.noise for value in values)


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Mean over the ``width`` (odd) steps around each. NaN stays NaN and is left out of its neighbours' means."""
    sums = _window_sums([0.0 if math.isnan(value) else value for value in values], width)
    counts = _window_sums([float(not math.isnan(value)) for value in values], width)
    return [
        math.nan if math.isnan(value) else total / count
        for value, total, count in zip(values, sums, counts, strict=True)
    ]


def _window_sums(values: Sequence[float], width: int) -> list[float]:
    """Sum of the ``width`` (odd) values around each, those past the ends taken as 0, in linear time.

    A window is the end of one block of ``width`` values and the beginning of the next, so two sums inside blocks are
    added. A difference of running sums would lose small values after a large one.
    """
    beyond = [0.0] * (width // 2)
    padded = [*beyond, *values, *beyond]
    blocks = [padded[start : start + width] for start in range(0, len(padded), width)]
    begins = [total for block in blocks for total in accumulate(block)]
    ends = [total for block in blocks for total in reversed([*accumulate(reversed(block))])]
    return [
        ends[place] + (begins[place + width - 1] if place % width else 0.0) for place in range(len(values))
    ]


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most about ``MOST_POINTS`` points that look like all of them: the first and the last, and the least and the greatest
    of each of ``MOST_POINTS / 2`` stretches. A stretch without a value keeps its gap."""
    if len(values) <= MOST_POINTS:
        return [*steps], [*values]
    width, kept = math.ceil(2 * len(values) / MOST_POINTS), {0, len(values) - 1}
    for start in range(0, len(values), width):
        stretch = range(start, min(start + width, len(values)))
        finite = [place for place in stretch if not math.isnan(values[place])] or [start]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    places = sorted(kept)
    return [steps[place] for place in places], [values[place] for place in places]


def smoothing_width(series: Series) -> int:
    return max(len(series) // 15, 3) | 1


def with_gaps(series: Series) -> tuple[list[int], list[float]]:
    """Every step from first to last. Missing values are NaN, so that lines break there."""
    by_step = series.by_step
    steps = list(range(series.steps[0], series.steps[-1] + 1))
    return steps, [by_step.get(step, math.nan) for step in steps]
