"""Draws the pictures of ``pictures.py`` from a run's recorded metrics.

The colours differ under every kind of colour vision (M. Okabe and K. Ito, 2008); lines also differ in their
dashes. Legends stand above the axes and cover nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any, assert_never

from configs.schema import RunConfig
from trainer.report.pictures import MAX, MEAN, Buckets, Lines, Panel, Picture, Shares
from trainer.report.series import (
    Recorded,
    Series,
    is_drawn,
    smooth,
    smoothing_width,
    thinned,
    with_gaps,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
ALONE = (4.8, 3.5)
"""Inches of a single panel: on a phone of 360 pixels its smallest letters are about 8 pixels high."""
LEGEND = {"loc": "lower left", "frameon": False, "fontsize": 8}
"""Above the axes, with ``bbox_to_anchor``."""
MOST_BARS = 500
"""Most bars of a stack. More would be narrower than a pixel, and a page would grow with the run."""
FEW_RUNS = 6
"""Up to so many runs, each panel has a legend, every step as a pale line, and accuracies as numbers."""
FEWEST_SMOOTHED = 12
_LAST_STEPS = 10
_LINEAR_BELOW = 1e-3
"""A log scale with values that are not positive is linear below this, where metrics of the gap are noise."""


def draw(picture: Picture, recorded: Recorded, config: RunConfig) -> "Figure | None":
    """The whole picture, None if nothing of it was recorded."""
    panels = [panel for panel in picture.panels if is_drawn(panel, recorded)]
    if not panels:
        return None
    figure, all_axes = new_figure(len(panels), picture.title)
    for panel, axes in zip(panels, all_axes, strict=True):
        _draw_panel(axes, panel, recorded, config)
    _note_smoothing(figure, panels, recorded)
    return figure


def draw_alone(picture: Picture, recorded: Recorded, config: RunConfig) -> "Iterator[Figure]":
    """Each panel as its own figure, so that a page can arrange them by the width of the screen."""
    for panel in picture.panels:
        if is_drawn(panel, recorded):
            figure, (axes,) = new_figure(1, "", size=ALONE)
            _draw_panel(axes, panel, recorded, config)
            _note_smoothing(figure, [panel], recorded)
            yield figure


def _draw_panel(axes: "Axes", panel: Panel, recorded: Recorded, config: RunConfig) -> None:
    match panel:
        case Lines():
            lines = recorded.labelled(panel.metrics).items()
            draw_lines(axes, panel, [(label, recorded.get(metric)) for metric, label in lines], config)
        case Shares():
            _draw_shares(axes, panel, recorded)
        case Buckets():
            _draw_buckets(axes, panel, recorded)
        case _:
            assert_never(panel)


def _note_smoothing(figure: "Figure", panels: Sequence[Panel], recorded: Recorded) -> None:
    smoothed = [
        smoothing_width(series)
        for panel in panels
        if isinstance(panel, Lines) and not panel.sparse
        for series in map(recorded.get, recorded.labelled(panel.metrics))
        if len(series) >= FEWEST_SMOOTHED
    ]
    if smoothed:
        note = f"lines: mean of {max(smoothed)} steps; pale: each step"
        figure.supxlabel(note, fontsize=8, color="#555555", x=0.99, ha="right")


def new_figure(
    num_panels: int, title: str, *, size: tuple[float, float] | None = None
) -> "tuple[Figure, Sequence[Axes]]":
    """``size``: inches; None: enough for all panels in rows. ``title``: empty if the page shows it itself.
    ``page.save`` does the layout."""
    # Slow to import. Figure itself draws with Agg, without a display or global state.
    from matplotlib.figure import Figure

    rows, columns = (1, num_panels) if num_panels <= 3 else (math.ceil(num_panels / 2), 2)
    figure = Figure(figsize=size or (11, 0.6 + 3.3 * rows))
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[num_panels:]:
        axes.remove()
    for axes in all_axes[:num_panels]:
        axes.grid(True, color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, list(all_axes[:num_panels])


def draw_stack(
    axes: "Axes",
    steps: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    colors: Sequence[Any],
    *,
    title: str,
) -> None:
    """Stack the parts of each step, one step wide, with gaps for missing steps. ``parts`` have a value per step.

    With more than ``MOST_BARS`` steps, each bar is the mean of several, which keeps sums and shares. The axis label says
    of how many.
    """
    count = steps[-1] - steps[0] + 1
    width = math.ceil(count / MOST_BARS)
    edges = [*(steps[0] - 0.5 + begin for begin in range(0, count, width)), steps[-1] + 0.5]
    bars: list[list[int]] = [[] for _ in edges[1:]]
    for place, step in enumerate(steps):
        bars[(step - steps[0]) // width].append(place)
    bottom = [0.0] * len(bars)
    for color, (label, values) in zip(colors, parts.items(), strict=True):
        means = [fmean(values[place] for place in bar) if bar else math.nan for bar in bars]
        top = [low + mean for low, mean in zip(bottom, means, strict=True)]
        if any(values):
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=shown(label))
        bottom = top
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)
    if width > 1:
        axes.set_xlabel(f"step (each bar: mean of {width})")
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 3, steps[0] + 3)
    _set_title(axes, title)
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(fontsize=8, reverse=True, frameon=False, handlelength=1.2, **place)


def shown(label: str) -> str:
    """The label in a form that matplotlib shows letter by letter. A ``$`` would begin a formula. A ``_`` at the beginning
    would keep the label out of legends, so a space without width precedes it."""
    label = label.replace("$", r"\$")
    return f"\u200b{label}" if label.startswith("_") else label


# --------------------------------------------------------------------------------------------------------------------
# lines


def draw_lines(
    axes: "Axes",
    panel: Lines,
    drawn: Sequence[tuple[str, Series]],
    config: RunConfig,
    *,
    runs: Sequence[str] = (),
) -> None:
    """Draw the series of ``drawn``, each with its label, as ``panel`` says.

    runs: the labels of all compared runs, if the lines are of runs. A run then has the same style in every panel, and
    with many runs ``draw_legend`` draws the legend.
    """
    labels, is_crowded = runs or [label for label, _ in drawn], len(runs) > FEW_RUNS
    for label, series in drawn:
        style = line_style(labels.index(label), len(labels))
        if panel.sparse:
            _draw_points(axes, series, shown(label), style, is_crowded=is_crowded)
        else:
            _draw_series(axes, series, shown(label), style, is_crowded=is_crowded)
    axes.set_ylabel(panel.unit)
    all_values = [value for _, series in drawn for value in series.values]
    if panel.line is not None:
        all_values.append(_draw_line(axes, panel.line, config))
    if len({step for _, series in drawn for step in series.steps}) == 1:
        axes.set_xlim(drawn[0][1].steps[0] - 1, drawn[0][1].steps[0] + 1)
    _set_scale(axes, panel, all_values)
    has_alarm = panel.alarm is not None and _draw_alarm_level(
        axes, getattr(config.alarms, panel.alarm), panel.alarm_of
    )
    is_named_by_title = (
        len(panel.metrics) == len(drawn) == 1
        and "*" not in panel.metrics.values()
        and panel.line is None
        and not has_alarm
    )
    if is_named_by_title or is_crowded:
        _set_title(axes, panel.title)
    else:
        _add_legend(axes, panel.title)


def line_style(place: int, count: int) -> dict[str, Any]:
    """Colour and dashes of the line at ``place`` among ``count``. Up to 28 lines differ in one or both. With more, the
    colours follow a scale."""
    from matplotlib import colormaps

    dashes = _DASHES[place % len(_DASHES)]
    if count <= math.lcm(len(COLORS), len(_DASHES)):
        return {"color": COLORS[place % len(COLORS)], "linestyle": dashes}
    return {"color": colormaps["turbo"](place / (count - 1)), "linestyle": dashes}


def draw_legend(figure: "Figure", labels: Sequence[str]) -> None:
    """The legend of all runs, for panels without one: in the middle of an empty figure, which grows as needed."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=shown(label), linewidth=1.9, **line_style(place, len(labels)))
        for place, label in enumerate(labels)
    ]
    width, height = figure.get_size_inches()
    columns = max(int(width * 12 / (max(map(len, labels)) + 8)), 1)  # 12 letters an inch, 8 for the line
    rows = math.ceil(len(labels) / columns)
    needed = 0.18 * rows + 0.3
    figure.set_size_inches(width, max(height, needed))
    figure.legend(handles=handles, loc="center", ncols=columns, fontsize=8, frameon=False, handlelength=3.2)


def _draw_points(
    axes: "Axes", series: Series, label: str, style: Mapping[str, Any], *, is_crowded: bool
) -> None:
    points = thinned(series.steps, series.values)
    if is_crowded:
        axes.plot(*points, marker="o", markersize=3, linewidth=1.4, label=label, **style)
        return
    line = {"color": style["color"], "marker": "o", "markersize": 5, "linewidth": 1.4}
    axes.plot(*points, label=label, **line)
    text = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "fontsize": 9}
    for index in {0, len(series) - 1}:
        place = (series.steps[index], series.values[index])
        axes.annotate(f"{series.values[index]:.1%}", place, **text)
    axes.margins(x=0.09, y=0.15)


def _draw_series(
    axes: "Axes", series: Series, label: str, style: Mapping[str, Any], *, is_crowded: bool
) -> None:
    steps, values = with_gaps(series)
    if len(series) < FEWEST_SMOOTHED:
        marks = {"marker": "o", "markersize": 4, "linewidth": 1.4}
        axes.plot(*thinned(steps, values), label=label, **marks, **style)
        return
    if not is_crowded:
        _draw_with_points(axes, steps, values, color=style["color"], alpha=0.25, linewidth=1.0)
    width, smoothed = 1.4 if is_crowded else 1.9, smooth(values, smoothing_width(series))
    _draw_with_points(axes, steps, smoothed, linewidth=width, label=label, **style)


def _draw_with_points(axes: "Axes", steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    """Draw the line, and mark each value between two gaps, which no line reaches. A metric of every other step has only
    such values."""
    steps, values = thinned(steps, values)
    around = [math.nan, *values, math.nan]
    lonely = [
        place
        for place, (before, value, after) in enumerate(zip(around, values, around[2:], strict=False))
        if math.isnan(before) and math.isnan(after) and not math.isnan(value)
    ]
    marks = {"marker": "o", "markersize": 3, "markevery": lonely} if lonely else {}
    axes.plot(steps, values, **marks, **style)


def _set_scale(axes: "Axes", panel: Lines, values: Sequence[float]) -> None:
    if panel.log and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    elif panel.log and min(values) <= 0 and max(map(abs, values)) > 10 * _LINEAR_BELOW:
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    else:
        _set_bounds(axes, panel.bounds, values)


def _set_bounds(axes: "Axes", bounds: tuple[float | None, float | None], values: Sequence[float]) -> None:
    low, high = bounds
    # Numbers in full: matplotlib would put a common power above the axes, into the legend.
    axes.yaxis.set_major_formatter("{x:.10g}")
    spread = max(values) - min(values)
    is_flat = spread <= 1e-9 * max(abs(max(values)), 1e-300)
    if is_flat:  # without this the scale shows rounding noise
        around = abs(values[0]) * 0.1 or 0.1
        top = values[0] + around
        axes.set_ylim(values[0] - around if low is None else low - 0.03 * (top - low), top)
    elif low is not None and min(values) >= low:
        axes.set_ylim(low - 0.03 * (max(values) - low), max(values) + 0.06 * (max(values) - low))
    if high is not None and max(values) <= high and not is_flat:
        axes.set_ylim(top=min(axes.get_ylim()[1], high + 0.05 * spread))


def _draw_line(axes: "Axes", field: str, config: RunConfig) -> float:
    value, label = attrgetter(field)(config), field.rpartition(".")[2]
    axes.axhline(value, color="#555555", linestyle="--", linewidth=1.2, label=f"{label} = {value:g}")
    return value


def _draw_alarm_level(axes: "Axes", level: float | None, of: str | None) -> bool:
    """Draw the level if it lies within the data's range, which it must not widen. of: the line that it judges."""
    low, high = axes.get_ylim()
    if level is None or not low <= level <= high:
        return False
    label = f"alarm level {level:g}" + (f" ({of})" if of else "")
    axes.axhline(level, color="#aa0000", linestyle=":", linewidth=1.2, label=label)
    axes.set_ylim(low, high)
    return True


def _set_title(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")


def _add_legend(axes: "Axes", title: str) -> None:
    """The legend above the axes, with the panel's title over it."""
    labels = axes.get_legend_handles_labels()[1]
    axes.legend(
        title=title,
        title_fontproperties={"size": 10, "weight": "bold"},
        alignment="left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=1 if any(len(label) > 20 for label in labels) else 2,
        **LEGEND,
        borderaxespad=0.2,
        handlelength=2.4,
        columnspacing=1.2,
    )


# --------------------------------------------------------------------------------------------------
# distributions, buckets


def _draw_shares(axes: "Axes", panel: Shares, recorded: Recorded) -> None:
    from matplotlib import colormaps

    labels = recorded.edges(panel.prefix)
    by_label = {label: recorded.get(f"{panel.prefix}/{part}") for part, label in labels.items()}
    steps = sorted({step for series in by_label.values() for step in series.steps})
    parts = {}
    for label, series in by_label.items():
        by_step = series.by_step
        parts[label] = [by_step.get(step, 0.0) for step in steps]
    shades = [colormaps["cividis_r"](place / max(len(parts) - 1, 1)) for place in range(len(parts))]
    draw_stack(axes, steps, parts, shades, title=panel.title)
    axes.set_ylabel(panel.unit)
    axes.set_ylim(0, 1)


def _draw_buckets(axes: "Axes", panel: Buckets, recorded: Recorded) -> None:
    def last(part: str, metric: str) -> list[float]:
        series = recorded.get(f"{panel.prefix}/{part}/{metric}")
        return [value for step, value in zip(series.steps, series.values, strict=True) if step in since]

    edges = recorded.edges(panel.prefix)
    steps = {step for part in edges for step in recorded.get(f"{panel.prefix}/{part}/{MEAN}").steps}
    since = set(sorted(steps)[-_LAST_STEPS:])
    labels = {part: label for part, label in edges.items() if last(part, MEAN)}
    means = [fmean(last(part, MEAN)) for part in labels]
    maxima = [max(last(part, MAX), default=math.nan) for part in labels]  # NaN: all were not finite
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], means, width=0.38, color=COLORS[0], label="mean")
    right = [place + 0.2 for place in places]
    axes.bar(right, maxima, width=0.38, color=COLORS[1], label="max", hatch="//", edgecolor="white")
    if positive := [value for value in (*means, *maxima) if value > 0]:
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(positive) / 2)
    axes.set_xticks(list(places), list(labels.values()), fontsize=8)
    axes.set_xlim(-0.7, max(len(labels), 2) - 0.3)
    axes.set_xlabel(panel.axis)
    axes.set_ylabel(panel.unit)
    axes.grid(False, axis="x")
    _add_legend(axes, panel.title)
