"""``report.html`` and its figures, from what a run has written so far: metrics.jsonl, config.yaml, and summary.json where it is there.

The page needs neither network nor scripts. What was not recorded, stays flat, or is missing is said in its notes instead of drawn.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.loader import ConfigError, load_config
from configs.schema import RunConfig
from trainer.tracking import flatten, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#1f5fa8", "#d1622b", "#3b8f5a", "#8a5aa8", "#7f7f7f")
_TIME_PARTS = ("sampling", "logprobs", "update", "sync", "evaluation")
_FEWEST_SMOOTHED = 12
_FEWEST_FLAT = 5


@dataclass(frozen=True, slots=True)
class _Series:
    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One pair of axes: metrics in one unit over the steps."""

    unit: str
    metrics: Mapping[str, str]
    """Name to label."""
    log: bool = False
    """Where all values are positive."""
    bounds: tuple[float | None, float | None] = (None, None)
    sparse: bool = False
    """Measured at few steps: marked points, no smoothing."""
    line: tuple[str, str] | None = None
    """A horizontal line: (field of the config, label)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    name: str
    title: str
    about: str
    panels: tuple[_Panel, ...]


_PICTURES = (
    _Picture(
        name="reward",
        title="Reward and held-out accuracy",
        about="Left: mean reward of the sampled responses of each step. Right: accuracy on problems that are never trained on.",
        panels=(
            _Panel(unit="reward", metrics={"reward/mean": "mean reward"}),
            _Panel(unit="accuracy (share)", metrics={"eval/accuracy": "held-out accuracy"}, sparse=True, bounds=(0, None)),
        ),
    ),
    _Picture(
        name="mismatch",
        title="Mismatch of the two engines",
        about="|p_rollout - p_old| of the sampled tokens: what SGLang and the learner say of the same token with the same weights.",
        panels=(
            _Panel(unit="|p_rollout - p_old|", metrics={"mismatch/abs_prob_max": "max", "mismatch/abs_prob_mean": "mean"}, log=True),
        ),
    ),
    _Picture(
        name="kl",
        title="KL divergences",
        about="k3 estimate of KL(rollout || old), the engines' gap; KL(old || current) of the update; KL(current || ref).",
        panels=(
            _Panel(unit="KL (nats), engines", metrics={"mismatch/k3": "k3, rollout to old"}, log=True),
            _Panel(unit="KL (nats), policy", metrics={"policy/ppo_kl": "old to current", "policy/ref_kl": "current to ref"}),
        ),
    ),
    _Picture(
        name="ess",
        title="Effective sample size of the importance weights",
        about="ESS (1: all weights are equal), and the fraction of response tokens that the correction keeps.",
        panels=(
            _Panel(unit="share", metrics={"mismatch/ess": "ESS", "mismatch/kept_fraction": "kept fraction"}, bounds=(None, 1.0)),
        ),
    ),
    _Picture(
        name="entropy",
        title="Entropy of the policy",
        about="Mean over response tokens. A fall towards 0 means that sampling has become deterministic.",
        panels=(_Panel(unit="entropy (nats per token)", metrics={"policy/entropy": "entropy"}, bounds=(0, None)),),
    ),
    _Picture(
        name="response_length",
        title="Response length",
        about="Left: tokens per response. Right: the share of responses that ended at the length limit, not by an end-of-sequence token.",
        panels=(
            _Panel(unit="tokens", metrics={"response/length_max": "longest", "response/length_mean": "mean"}, bounds=(0, None)),
            _Panel(unit="truncated (share)", metrics={"response/truncated_fraction": "truncated"}, bounds=(0, None)),
        ),
    ),
    _Picture(
        name="clip_fraction",
        title="Clipped tokens",
        about="Share of response tokens whose ratio current/old met the clip bounds, and of those that met the dual clip.",
        panels=(
            _Panel(
                unit="share of tokens",
                metrics={"policy/clip_fraction": "clipped", "policy/dual_clip_fraction": "dual clip"},
                bounds=(0, None),
            ),
        ),
    ),
    _Picture(
        name="grad_norm",
        title="Gradient norm",
        about="Before clipping; the dashed line is the norm at which it is clipped.",
        panels=(
            _Panel(
                unit="L2 norm",
                metrics={"optim/grad_norm": "gradient norm"},
                bounds=(0, None),
                line=("learner.optimizer.clip_grad", "clip_grad"),
            ),
        ),
    ),
)

_FLAT_MEANS = {
    ("policy/clip_fraction", 0.0): "expected with one minibatch per step: the policy that is updated is the one that was scored",
    ("policy/ppo_kl", 0.0): "expected with one minibatch per step: current equals old exactly",
    ("policy/dual_clip_fraction", 0.0): "dual clip acts on rare tokens only",
    ("mismatch/kept_fraction", 1.0): "the correction rejects no token",
    ("mismatch/kept_fraction", 0.0): "the correction rejects every token: nothing is learned",
    ("response/truncated_fraction", 1.0): "no response ends by itself: max_new_tokens is too small",
    ("reward/mean", 0.0): "no response was ever right: there is nothing to learn from",
}


@dataclass(slots=True)
class _Run:
    folder: Path
    config: RunConfig
    steps: list[int]
    series: dict[str, _Series]
    elapsed_s: float
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def get(self, metric: str) -> _Series:
        return self.series.get(metric, _Series([], []))


def write_report(run_dir: Path) -> Path:
    """Write ``figures/*.png`` and ``report.html`` of a run, finished or not; returns the path of the page.

    Raises ValueError where the folder is not that of a training run.
    """
    run = _read_run(run_dir)
    figures = run_dir / "figures"
    figures.mkdir(exist_ok=True)
    shown = []
    for name, title, about, figure in _draw_all(run):
        path = figures / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, dpi=120, metadata={"Software": None})
        shown.append({"title": title, "about": about, "image": base64.b64encode(path.read_bytes()).decode("ascii")})
    _note_the_data(run)
    page = run_dir / "report.html"
    page.write_text(_render(run, shown), encoding="utf-8")
    return page


# ------------------------------------------------------------------------------------------------------------------ reading


def _read_run(run_dir: Path) -> _Run:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; name the folder of a run, for example runs/latest")
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (run_dir / name).is_file()]
    if missing:
        raise ValueError(f"{run_dir} is not the folder of a training run: it has no {' and no '.join(missing)}; name one under runs/")
    try:
        config = load_config(run_dir / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"{run_dir}/config.yaml is not a config of this version of tandem; correct or restore it:\n{error}") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"{run_dir} is a run of kind {config.kind}; reports are made of runs of kind train")
    rows = read_metrics(run_dir / "metrics.jsonl")
    steps, series = _by_metric(rows)
    elapsed_s = max((row.get("elapsed_s") or 0.0 for row in rows), default=0.0)
    run = _Run(run_dir, config, steps, series, elapsed_s, {})
    run.summary = _read_summary(run)
    return run


def _read_summary(run: _Run) -> dict[str, Any]:
    path = run.folder / "summary.json"
    if not path.exists():
        run.notes.append("The run has no summary.json: it is not finished, or was stopped. Figures show what was recorded until now.")
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        summary = None
    if isinstance(summary, dict):
        return summary
    run.notes.append("summary.json is not readable and was left out.")
    return {}


def _by_metric(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, _Series]]:
    """All steps, and each metric over the steps that have it; of two values of one step the later counts."""
    by_metric: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "elapsed_s") and isinstance(value, int | float):
                by_metric.setdefault(name, {})[row["step"]] = float(value)
    steps = sorted({row["step"] for row in rows})
    return steps, {name: _Series(sorted(values), [values[s] for s in sorted(values)]) for name, values in by_metric.items()}


def _note_the_data(run: _Run) -> None:
    if not run.steps:
        run.notes.append("No step has been recorded yet.")
        return
    if gaps := [(a + 1, b - 1) for a, b in zip(run.steps, run.steps[1:], strict=False) if b > a + 1]:
        listed = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:10])
        run.notes.append(f"Steps without a record: {listed}{' and more' if len(gaps) > 10 else ''}. Lines are interrupted there.")
    named = dict.fromkeys(m for picture in _PICTURES for panel in picture.panels for m in panel.metrics)
    absent = [m for m in named if not run.get(m)]
    if absent:
        run.notes.append(f"Not recorded, so not drawn: {', '.join(absent)}.")
    for metric in named:
        series = run.get(metric)
        if len(series) >= _FEWEST_FLAT and len(set(series.values)) == 1:
            why = _FLAT_MEANS.get((metric, series.values[0]))
            run.notes.append(f"{metric} is {_number(series.values[0])} at all {len(series)} steps{f' ({why})' if why else ''}.")


# ------------------------------------------------------------------------------------------------------------------ drawing


def _draw_all(run: _Run) -> Iterator[tuple[str, str, str, "Figure | None"]]:
    for picture in _PICTURES:
        yield picture.name, picture.title, picture.about, _draw(picture, run)
    about = "Seconds of each part of a step, stacked; `other` is what the parts leave of the whole step."
    yield "step_time", "Where the time of a step goes", about, _draw_step_time(run)


def _new_figure(num_panels: int, title: str) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.figure import Figure  # slow to import; Figure itself draws with Agg, without a display or global state

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    all_axes = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes in all_axes:
        axes.grid(True, color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, all_axes


def _draw(picture: _Picture, run: _Run) -> "Figure | None":
    panels = [panel for panel in picture.panels if any(run.get(m) for m in panel.metrics)]
    if not panels:
        return None
    figure, all_axes = _new_figure(len(panels), picture.title)
    for panel, axes in zip(panels, all_axes, strict=True):
        _draw_panel(axes, panel, run)
    return figure


def _draw_panel(axes: "Axes", panel: _Panel, run: _Run) -> None:
    drawn = [(label, run.get(metric)) for metric, label in panel.metrics.items() if run.get(metric)]
    for color, (label, series) in zip(_COLORS, drawn, strict=False):
        if panel.sparse:
            _draw_points(axes, series, label, color)
        else:
            _draw_series(axes, series, label, color)
    axes.set_ylabel(panel.unit)
    all_values = [value for _, series in drawn for value in series.values]
    if panel.line is not None:
        all_values.append(_draw_line(axes, panel.line, run))
    if len({step for _, series in drawn for step in series.steps}) == 1:
        axes.set_xlim(drawn[0][1].steps[0] - 1, drawn[0][1].steps[0] + 1)
    if panel.log and min(all_values) > 0:
        axes.set_yscale("log")
        axes.set_ylabel(f"{panel.unit}, log scale")
    else:
        _set_bounds(axes, panel.bounds, all_values)
    if len(drawn) > 1 or panel.line is not None or any(len(s) >= _FEWEST_SMOOTHED for _, s in drawn if not panel.sparse):
        axes.legend(fontsize=8, framealpha=0.9)


def _draw_points(axes: "Axes", series: _Series, label: str, color: str) -> None:
    axes.plot(series.steps, series.values, color=color, marker="o", markersize=5, linewidth=1.4, label=label)
    ends = {0, len(series) - 1}
    for index in ends:
        axes.annotate(
            f"{series.values[index]:.1%}",
            (series.steps[index], series.values[index]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            fontsize=9,
        )
    axes.margins(x=0.09, y=0.15)


def _draw_series(axes: "Axes", series: _Series, label: str, color: str) -> None:
    steps, values = _with_gaps(series)
    if len(series) < _FEWEST_SMOOTHED:
        axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.4, label=label)
        return
    width = max(len(series) // 15, 3) | 1
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
    axes.plot(steps, smooth(values, width), color=color, linewidth=1.9, label=f"{label} (mean of {width} steps; pale: each step)")


def _with_gaps(series: _Series) -> tuple[list[int], list[float]]:
    """Every step from first to last, NaN where there is no value, so that a line breaks there instead of bridging it."""
    known = dict(zip(series.steps, series.values, strict=True))
    steps = list(range(series.steps[0], series.steps[-1] + 1))
    return steps, [known.get(step, math.nan) for step in steps]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Mean over the ``width`` (odd) steps around each, of those that exist; NaN stays NaN and does not count in its neighbours' means."""
    half, smoothed = width // 2, []
    for index, value in enumerate(values):
        near = [v for v in values[max(index - half, 0) : index + half + 1] if not math.isnan(v)]
        smoothed.append(math.nan if math.isnan(value) else sum(near) / len(near))
    return smoothed


def _set_bounds(axes: "Axes", bounds: tuple[float | None, float | None], values: Sequence[float]) -> None:
    low, high = bounds
    spread = max(values) - min(values)
    if spread <= 1e-9 * max(abs(max(values)), 1e-300):  # flat: without this the scale shows rounding noise
        around = abs(values[0]) * 0.1 or 0.1
        axes.set_ylim(values[0] - around if low is None else low - 0.03 * (values[0] + around - low), values[0] + around)
    elif low is not None and min(values) >= low:
        axes.set_ylim(bottom=low - 0.03 * (max(values) - low))
    if high is not None and max(values) <= high and spread:
        axes.set_ylim(top=high + 0.05 * spread)


def _draw_line(axes: "Axes", line: tuple[str, str], run: _Run) -> float:
    value: Any = run.config
    for part in line[0].split("."):
        value = getattr(value, part)
    axes.axhline(value, color="#555555", linestyle="--", linewidth=1.2, label=f"{line[1]} = {value:g}")
    return value


def _draw_step_time(run: _Run) -> "Figure | None":
    steps, parts = _step_times(run)
    if not steps:
        return None
    figure, (axes,) = _new_figure(1, "Where the time of a step goes")
    bottom = [0.0] * len(steps)
    for color, (name, seconds) in zip((*_COLORS[:4], "#c9a227", "#bdbdbd"), parts.items(), strict=False):
        if any(seconds):
            axes.bar(steps, seconds, bottom=bottom, width=0.9 if len(steps) < 80 else 1.0, color=color, label=name)
        bottom = [b + s for b, s in zip(bottom, seconds, strict=True)]
    axes.set_ylabel("seconds")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
    axes.margins(x=0.01)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 3, steps[0] + 3)
    return figure


def _step_times(run: _Run) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds by part over the steps that have any; ``other`` is the rest of time/step, never below 0."""
    known = {part: dict(zip(s.steps, s.values, strict=True)) for part in (*_TIME_PARTS, "step") if (s := run.get(f"time/{part}"))}
    steps = sorted({step for values in known.values() for step in values})
    parts = {part: [known.get(part, {}).get(step, 0.0) for step in steps] for part in _TIME_PARTS}
    sums = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
    whole = [known.get("step", {}).get(step, 0.0) for step in steps]
    return steps, {**parts, "other": [max(w - s, 0.0) for w, s in zip(whole, sums, strict=True)]}


# --------------------------------------------------------------------------------------------------------------------- page


def _render(run: _Run, figures: Sequence[Mapping[str, str]]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report_template.html").render(
        name=run.config.name,
        folder=run.folder.name,
        facts=_facts(run),
        notes=run.notes,
        figures=figures,
        seconds=_seconds_by_part(run),
        settings=changed_settings(run.config),
        metrics=_metric_table(run),
    )


def _facts(run: _Run) -> list[tuple[str, str]]:
    accuracy = run.get("eval/accuracy")
    before = run.summary.get("accuracy_before", accuracy.values[0] if accuracy else None)
    after = run.summary.get("accuracy_after", accuracy.values[-1] if len(accuracy) > 1 else None)
    counts = run.get("eval/count")
    done = run.summary.get("steps", max(run.steps, default=0))
    return [
        ("Accuracy before", _percent(before, counts.values[0] if counts else None)),
        ("Accuracy after" if run.summary else "Accuracy so far", _percent(after, counts.values[-1] if counts else None)),
        ("Steps", f"{done} of {run.config.steps}"),
        ("Seconds", f"{_total_seconds(run):,.0f}"),
    ]


def _percent(share: Any, count: float | None) -> str:
    if not isinstance(share, int | float):
        return "not measured"
    error = f" ± {math.sqrt(share * (1 - share) / count):.1%}" if count and 0 <= share <= 1 else ""
    return f"{share:.1%}{error}"


def _total_seconds(run: _Run) -> float:
    seconds = run.summary.get("seconds")
    parts = seconds.values() if isinstance(seconds, dict) else [seconds]
    if isinstance(seconds, dict) and "total" in seconds:
        parts = [seconds["total"]]
    return sum(parts) if all(isinstance(s, int | float) for s in parts) else run.elapsed_s


def _seconds_by_part(run: _Run) -> list[tuple[str, str, str]]:
    """(part, seconds, share) over all recorded steps."""
    totals = {name: sum(seconds) for name, seconds in _step_times(run)[1].items()}
    whole = sum(totals.values())
    return [(name, f"{total:,.1f}", f"{total / whole:.0%}") for name, total in totals.items() if total > 0]


def changed_settings(config: RunConfig) -> list[tuple[str, str, str]]:
    """(field, value, default) of every setting that is not at its default; required ones have the default "-"."""
    plain = RunConfig(model=config.model, task=config.task)
    defaults = flatten(plain.model_dump(mode="json"))
    for block in ("model", "task"):
        required = {name for name, info in type(getattr(config, block)).model_fields.items() if info.is_required() or name == "type"}
        for name, info in type(getattr(config, block)).model_fields.items():
            default = flatten({f"{block}.{name}": "-" if name in required else info.default})
            defaults |= default
    values = flatten(config.model_dump(mode="json"))
    return [(name, _redacted(value), defaults.get(name, "-")) for name, value in values.items() if value != defaults.get(name)]


def _redacted(value: str) -> str:
    """A report is passed on: no user and password of a tracking server in it."""
    scheme, slashes, rest = value.partition("://")
    host, at, tail = rest.rpartition("@")
    return f"{scheme}{slashes}{tail}" if slashes and at and "/" not in host else value


def _metric_table(run: _Run) -> list[tuple[str, str, str, str, str, int]]:
    """(name, first, last, least, most, number of values)"""
    return [
        (name, *map(_number, (s.values[0], s.values[-1], min(s.values), max(s.values))), len(s)) for name, s in sorted(run.series.items())
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
