"""Figures of a study of mismatch, from the content of mismatch.json alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

MARKERS = "osD^vP*X"
SMALLEST = 1e-9
"""The place of a gap of zero on a logarithmic axis."""


def draw_study(result: Row, folder: Path) -> list[Path]:
    """Writes the PNG files and returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"distribution": _distribution, "length": _length}
    if result["causes"] and any(not row["bitwise"] for row in result["causes"]["ranked"]):
        pictures["causes"] = _causes
    files = []
    for name, draw in pictures.items():
        figure = draw(result)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def _figure(width: float, height: float) -> "Figure":
    # Slow to import. Figure itself draws with Agg, without a display or global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _distribution(result: Row) -> "Figure":
    """Per rollout layout: the share of responses whose max Δp is above x, one line per learner layout."""
    rollouts = list(dict.fromkeys(pair["rollout"] for pair in result["pairs"]))
    figure = _figure(max(7.0, 5.2 * len(rollouts)), 4.2)
    panels = figure.subplots(1, len(rollouts), sharex=True, sharey=True, squeeze=False)[0]
    for axes, rollout in zip(panels, rollouts, strict=True):
        for index, pair in enumerate(p for p in result["pairs"] if p["rollout"] == rollout):
            gaps = sorted(max(x, SMALLEST) for x in pair["response_max"])
            above = [1 - i / len(gaps) for i in range(len(gaps))]
            line = {"color": f"C{index}", "linestyle": ("-", "--", ":", "-.")[index % 4]}
            axes.step(gaps, above, where="pre", label=f"learner {pair['learner']}", **line)
        axes.axvline(result["threshold"], color="0.4", linewidth=0.8)
        axes.set(xscale="log", yscale="log", title=f"rollout {rollout}")
        axes.set_xlabel("max |p_rollout − p_learner| of a response")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("share of responses above")
    return figure


def _length(result: Row) -> "Figure":
    """Max and mean against the response's length, Δp against position, and one long response against several
    short ones."""
    figure = _figure(13, 8)
    (max_axes, mean_axes), (position_axes, token_axes) = figure.subplots(2, 2)
    for index, pair in enumerate(result["pairs"]):
        marks = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "linewidth": 1, "capsize": 2}
        style = marks | {"label": f"{pair['learner']} | {pair['rollout']}"}
        max_axes.errorbar(*zip(*_by_length(pair, "max_mean", "short_max"), strict=True), **style)
        mean_axes.errorbar(*zip(*_by_length(pair, "mean_mean", "short_mean"), strict=True), **style)
        rows = pair["by_position"]
        ends = [row["up_to"] or 2 * row["above"] for row in rows]
        position_axes.errorbar(
            ends, [row["mean"] for row in rows], [row["mean_se"] or 0 for row in rows], **style
        )
    for axes, what in ((max_axes, "max"), (mean_axes, "mean")):
        axes.set(title=f"{what.capitalize()} of a response", ylabel=f"mean over responses of {what} Δp")
        axes.set_xlabel("response length (tokens, mean of the bucket)")
    position_axes.set(
        title="By position", ylabel="mean Δp of the tokens", xlabel="position in the response (up to)"
    )
    for axes in (max_axes, mean_axes, position_axes):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    max_axes.legend(fontsize=7, title="learner | rollout", title_fontsize=7)
    _equal_tokens(token_axes, result["pairs"])
    return figure


def _by_length(pair: Row, long: str, short: str) -> list[tuple[float, float, float]]:
    """(length, value, error) of each bucket of long responses, and of the short ones as a whole."""
    one, rows = pair["equal_tokens"], pair["by_length"]
    points = [(row["tokens"] / row["responses"], row[long], row[f"{long}_se"] or 0) for row in rows]
    of_short = (one["short_tokens"] / one["short_per_prompt"], one[short], one[f"{short}_se"] or 0)
    return sorted([*points, of_short])


def _equal_tokens(axes: "Axes", pairs: Sequence[Row]) -> None:
    columns = {
        "short_max": "one short response",
        "short_together_max": "all short ones together",
        "long_first_max": "first part of the long one",
        "long_max": "one long response",
    }
    width = 0.8 / len(columns)
    for index, (name, label) in enumerate(columns.items()):
        places = [place + (index - 1.5) * width for place in range(len(pairs))]
        rows = [pair["equal_tokens"] for pair in pairs]
        errors = [row[f"{name}_se"] or 0 for row in rows]
        axes.bar(places, [row[name] for row in rows], width, yerr=errors, label=label, capsize=2)
    one = pairs[0]["equal_tokens"]
    axes.set_xticks(
        range(len(pairs)), [f"{pair['learner']} |\n{pair['rollout']}" for pair in pairs], fontsize=7
    )
    title = f"{one['tokens']:.1f} tokens of one response, and of several"
    axes.set(title=title, ylabel="mean over prompts of max Δp")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _causes(result: Row) -> "Figure":
    """Distance that each switch moves the probabilities."""
    rows = [row for row in result["causes"]["ranked"] if not row["bitwise"]][::-1]
    figure = _figure(9, 1.5 + 0.4 * len(rows))
    axes = figure.subplots()
    axes.barh(
        [f"{row['cause']} ({row['side']})" for row in rows],
        [row["moved_mean"] for row in rows],
        xerr=[row["moved_mean_se"] or 0 for row in rows],
        color="#3b6ea5",
        capsize=2,
    )
    axes.set(title="What moves the probabilities", xscale="log")
    axes.set_xlabel("mean |Δp| of the sampled tokens when switched (± one standard error)")
    axes.grid(axis="x", alpha=0.3)
    return figure
