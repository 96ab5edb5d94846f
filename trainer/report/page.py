"""``report.html`` and its figures, from metrics.jsonl, config.yaml and, if there are any, samples and summary.json
of a run.

The page needs neither network nor scripts. Its notes name metrics that were not recorded, or never changed;
they are not drawn. ``drawing.py`` draws the pictures of ``pictures.py``.
"""

import base64
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from configs.loader import ConfigError, load_config
from configs.presets import DESCRIPTIONS, preset_name
from configs.schema import RunConfig
from configs.schema.alarms import AlarmsConfig
from configs.schema.model import ModelConfig
from trainer.metric_names import TIME_PARTS, known
from trainer.report import comparison, timeline
from trainer.report.drawing import (
    ALONE,
    COLORS,
    Recorded,
    Series,
    draw,
    draw_alone,
    draw_stack,
    is_drawn,
    new_figure,
)
from trainer.report.pictures import FLAT_MEANS, PICTURES, ROUNDING, Lines
from trainer.report.samples import ShownSamples, shown_samples
from trainer.tracking.alarms import Alarm, check_alarms
from trainer.tracking.ledger import LEDGER, read_ledger, summary
from trainer.tracking.tracker import duration, flatten, read_metrics

if TYPE_CHECKING:
    import jinja2
    from matplotlib.figure import Figure

    from tracing.reading import Trace

_FEWEST_FLAT = 5
_HEALTHY_AT_ONE = ("kept_min", "first_ratio_tolerance", "weight_mean_min", "weight_mean_max", "ess_min")
"""Alarms of quantities whose healthy value is 1; that of the others is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmHistory:
    """One alarm over the steps of a run."""

    name: str
    steps: list[int]
    """The steps that raised it."""
    worst_step: int
    worst: Alarm


@dataclass(slots=True)
class _Run:
    folder: Path
    config: RunConfig
    recorded: Recorded
    alarms: list[AlarmHistory]
    elapsed_s: float
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return self.recorded.steps

    @property
    def training_steps(self) -> list[int]:
        """Step 0 only evaluates."""
        return [step for step in self.steps if step > 0]

    def get(self, metric: str) -> Series:
        known(metric.removeprefix("1 - "))
        return self.recorded.get(metric)


def write_report(run_dir: Path, config: RunConfig | None = None, *, against: Sequence[Path] = ()) -> Path:
    """Write ``figures/*.png`` and ``report.html`` of a run, finished or not; returns the path of the page.

    config: the run's; None: read from its folder.
    against: folders of other runs, to be compared with it.
    Raises ValueError if a folder is not that of a training run.
    """
    run, others = _read_run(run_dir, config), [_read_run(folder, None) for folder in against]
    figures = run_dir / "figures"
    figures.mkdir(exist_ok=True)
    shown = []
    for name, title, about, figure, panels in _draw_all(run, others):
        path = figures / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, dpi=120, metadata={"Software": None})
        shown.append({"title": title, "about": about, "images": [as_svg(panel) for panel in panels]})
    _note_the_data(run)
    samples = shown_samples(run_dir, run.config.model.path)
    run.notes += samples.notes
    page = run_dir / "report.html"
    page.write_text(_render(run, others, shown, samples), encoding="utf-8")
    return page


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the page of a comparison shows as tables, the titles of their columns first."""

    results: comparison.Table
    settings: comparison.Table
    """Empty where the runs differ in no setting."""
    left_out: list[str]
    """A line for each run that has recorded no step yet."""


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Comparison:
    """Write one page with the runs of these folders over each other, finished or not.

    Raises ValueError with every folder that is not of a training run, and where no run has recorded a step.
    """
    runs, problems, left_out = list[_Run](), list[str](), list[str]()
    for folder in run_dirs:
        try:
            run = _read_run(folder, None, may_lack_metrics=True)
        except ValueError as error:
            problems.append(str(error))
            continue
        if run.steps:
            runs.append(run)
        else:
            left_out.append(f"left out: {folder} has recorded no step yet")
    if problems:
        raise ValueError("\n  ".join(problems))
    if not runs:
        raise ValueError(
            f"none of the {len(run_dirs)} runs has recorded a step yet; wait for one, or name others"
        )
    labelled = _labelled(runs)
    found = Comparison(
        results=comparison.results_table(
            {label: (run.recorded, run.config) for label, run in labelled.items()}
        ),
        settings=_settings_table(labelled),
        left_out=left_out,
    )
    _, panels = comparison.draw({label: run.recorded for label, run in labelled.items()}, runs[0].config)
    shown = {"title": "Curves", "about": comparison.ABOUT, "images": [as_svg(panel) for panel in panels]}
    template = environment().get_template("comparison.html")
    text = template.render(
        count=len(runs), notes=left_out, compared=_sections(found.results, found.settings), figures=[shown]
    )
    page.write_text(text, encoding="utf-8")
    return found


# ------------------------------------------------------------------------------------------------------------------
# reading


def _read_run(run_dir: Path, config: RunConfig | None, *, may_lack_metrics: bool = False) -> _Run:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; name the folder of a run, for example runs/latest")
    needed = ("config.yaml",) if may_lack_metrics else ("config.yaml", "metrics.jsonl")
    missing = [name for name in needed if not (run_dir / name).is_file()]
    if missing:
        raise ValueError(
            f"{run_dir} is not the folder of a training run: it has no {' and no '.join(missing)}; name one under runs/"
        )
    try:
        loaded = config or load_config(run_dir / "config.yaml")
    except ConfigError as error:
        raise ValueError(
            f"{run_dir}/config.yaml is not a config of this version of tandem; correct or restore it:\n{error}"
        ) from error
    if not isinstance(loaded, RunConfig):
        raise ValueError(f"{run_dir} is a run of kind {loaded.kind}; reports are made of runs of kind train")
    metrics = run_dir / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() or not may_lack_metrics else []
    elapsed_s = max((row.get("elapsed_s") or 0.0 for row in rows), default=0.0)
    run = _Run(run_dir, loaded, _by_metric(rows), alarm_histories(rows, loaded.alarms), elapsed_s, {})
    run.summary = _read_summary(run)
    return run


def _read_summary(run: _Run) -> dict[str, Any]:
    path = run.folder / "summary.json"
    if not path.exists():
        run.notes.append(
            "The run has no summary.json: it is not finished, or was stopped. Figures show what was recorded until now."
        )
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        summary = None
    if isinstance(summary, dict):
        return summary
    run.notes.append("summary.json is not readable and was left out.")
    return {}


def _by_metric(rows: Sequence[Mapping[str, Any]]) -> Recorded:
    """The series of each metric; of two values of one step the later counts."""
    by_metric: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "elapsed_s") and isinstance(value, int | float):
                by_metric.setdefault(name, {})[row["step"]] = float(value)
    series = {
        name: Series(sorted(values), [values[s] for s in sorted(values)])
        for name, values in by_metric.items()
    }
    return Recorded(steps=sorted({row["step"] for row in rows}), series=series)


def alarm_histories(rows: Sequence[Mapping[str, Any]], config: AlarmsConfig) -> list[AlarmHistory]:
    """The alarms of a run's lines of metrics.jsonl, by the levels of its config, the most frequent first.

    A null stands for a value that was not finite: an alarm, and the worst value. Step 0 only evaluates.
    """
    merged: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        merged[row["step"]] |= {name: math.nan if value is None else value for name, value in row.items()}
    raised: dict[str, dict[int, Alarm]] = {}
    for step in sorted(merged.keys() - {0}):
        for alarm in check_alarms(merged[step], config):
            raised.setdefault(alarm.name, {})[step] = alarm
    histories = []
    for name, by_step in raised.items():
        worst_step = max(by_step, key=lambda step: _distance_from_healthy(by_step[step]))
        worst = by_step[worst_step]
        histories.append(AlarmHistory(name=name, steps=sorted(by_step), worst_step=worst_step, worst=worst))
    return sorted(histories, key=lambda history: -len(history.steps))


def _distance_from_healthy(alarm: Alarm) -> float:
    away = abs(alarm.value - (alarm.name in _HEALTHY_AT_ONE))
    return math.inf if math.isnan(away) else away


def _note_the_data(run: _Run) -> None:
    if not run.steps:
        run.notes.append("No step has been recorded yet.")
        return
    if (run.folder / LEDGER).is_file():
        run.notes.append(f"Data: {summary(read_ledger(run.folder / LEDGER))}.")
    if gaps := [(a + 1, b - 1) for a, b in zip(run.steps, run.steps[1:], strict=False) if b > a + 1]:
        listed = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:10])
        run.notes.append(
            f"Steps without a record: {listed}{' and more' if len(gaps) > 10 else ''}. Lines are interrupted there."
        )
    pictures = [(p.optional, [panel for panel in p.panels if isinstance(panel, Lines)]) for p in PICTURES]
    expected = [
        name
        for optional, panels in pictures
        if not optional
        for panel in panels
        for name in panel.metrics
        if "*" not in name  # as many as there are, perhaps none
    ]
    absent = [name.removeprefix("1 - ") for name in expected if not run.get(name)]
    if absent:
        run.notes.append(f"Not recorded, so not drawn: {', '.join(dict.fromkeys(absent))}.")
    left_out, rounding = [], []
    shown = {
        name: is_drawn(panel, run.recorded)
        for _, panels in pictures
        for panel in panels
        for name in run.recorded.labelled(panel.metrics)
    }
    for metric, is_shown in shown.items():
        series = run.get(metric)
        if len(set(series.values)) > 1:
            if not is_shown:
                rounding.append(metric)
            continue
        value, why = _number(series.values[0]), FLAT_MEANS.get((metric, series.values[0]))
        why = f" ({why})" if why else ""
        if not is_shown:
            left_out.append(f"{metric} is {value}{why}")
        elif len(series) >= _FEWEST_FLAT:
            run.notes.append(f"{metric} is {value} at all {len(series)} steps{why}.")
    if rounding:
        near = f"Nothing but rounding (nearer than {ROUNDING:g} to where the quantity rests)"
        run.notes.append(f"{near}, so not drawn: {', '.join(rounding)}.")
    if left_out:
        run.notes.append(f"The same at every step, so not drawn: {'; '.join(left_out)}.")


# ------------------------------------------------------------------------------------------------------------------
# drawing


def _draw_all(
    run: _Run, others: Sequence[_Run]
) -> "Iterator[tuple[str, str, str, Figure | None, Iterable[Figure]]]":
    """(name, title, about, the whole picture for its own file, its panels for the page)"""
    compared = {label: each.recorded for label, each in _labelled([run, *others]).items()}
    whole, panels = comparison.draw(compared, run.config) if others else (None, ())
    yield "comparison", comparison.TITLE, comparison.ABOUT, whole, panels
    for picture in PICTURES:
        panels = draw_alone(picture, run.recorded, run.config)
        yield picture.name, picture.title, picture.about, draw(picture, run.recorded, run.config), panels
    about = "Seconds of each part of a step, stacked; `other` is what they leave of the whole step, which its evaluation comes after."
    title = "Where the time of a step goes"
    whole, alone = _draw_step_time(run, title, None), _draw_step_time(run, "", ALONE)
    yield "step_time", title, about, whole, [] if alone is None else [alone]
    traced = _traced_step(run)
    whole = traced and timeline.draw_timeline(traced, timeline.TITLE, width=11)
    alone = [timeline.draw_timeline(traced, "", width=2 * ALONE[0])] if traced else []
    yield "timeline", timeline.TITLE, timeline.ABOUT, whole, alone


def _traced_step(run: _Run) -> "Trace | None":
    try:
        return timeline.last_step(run.folder)
    except ValueError as error:
        run.notes.append(f"The trace was left out: {error}.")
        return None


def _labelled(runs: Sequence[_Run]) -> dict[str, _Run]:
    return dict(
        zip(comparison.labels_of([(each.folder.name, each.config) for each in runs]), runs, strict=True)
    )


def as_svg(figure: "Figure") -> str:
    """The figure for the page, in base64: sharp at every width, and a few kilobytes."""
    from matplotlib import rc_context

    svg, fonts = io.StringIO(), ["DejaVu Sans", "sans-serif"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tandem", "font.family": fonts}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(svg.getvalue().encode()).decode("ascii")


def _draw_step_time(run: _Run, title: str, size: tuple[float, float] | None) -> "Figure | None":
    steps, parts = _step_times(run)
    if not steps:
        return None
    figure, (axes,) = new_figure(1, title, size=size)
    draw_stack(axes, steps, parts, (*COLORS[:5], "#bdbdbd"), title="")
    axes.set_ylabel("seconds")
    return figure


def _step_times(run: _Run) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds by part over the steps that have any; ``other`` is the rest of time/step, which excludes the
    evaluation."""
    series = {part: run.get(f"time/{part}") for part in (*TIME_PARTS, "step")}
    seconds = {part: dict(zip(s.steps, s.values, strict=True)) for part, s in series.items()}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    parts = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = parts.pop("step")
    in_step = zip(*(parts[part] for part in TIME_PARTS if part != "evaluation"), strict=True)
    rest = [max(all_s - sum(part_s), 0.0) for all_s, part_s in zip(whole, in_step, strict=True)]
    return steps, {**parts, "other": rest}


# ---------------------------------------------------------------------------------------------------------------------
# page


def _render(
    run: _Run, others: Sequence[_Run], figures: Sequence[Mapping[str, str]], samples: ShownSamples
) -> str:
    return (
        environment()
        .get_template("template.html")
        .render(
            name=run.config.name,
            folder=run.folder.name,
            facts=_facts(run),
            recipe=_recipe(run.config),
            alarms=[_alarm_text(history, len(run.training_steps)) for history in run.alarms],
            num_steps=len(run.training_steps),
            alarms_off=[name for name, level in run.config.alarms if level is None],
            notes=run.notes,
            figures=figures,
            samples=samples,
            compared=_sections(None, _settings_table(_labelled([run, *others]))) if others else [],
            seconds=_seconds_by_part(run),
            settings=changed_settings(run.config),
            metrics=_metric_table(run),
        )
    )


def environment() -> "jinja2.Environment":
    """The templates of this folder."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )


def _sections(
    results: comparison.Table | None, settings: comparison.Table
) -> list[tuple[str, str, comparison.Table]]:
    """(title, about, rows) of the tables that there are."""
    sections = [
        (comparison.RESULTS_TITLE, comparison.RESULTS_ABOUT, results),
        (comparison.SETTINGS_TITLE, comparison.SETTINGS_ABOUT, settings),
    ]
    return [(title, about, rows) for title, about, rows in sections if rows]


def _facts(run: _Run) -> list[tuple[str, str]]:
    accuracy = run.get("eval/accuracy")
    before = run.summary.get("accuracy_before", accuracy.values[0] if accuracy else None)
    after = run.summary.get("accuracy_after", accuracy.values[-1] if len(accuracy) > 1 else None)
    errors = _standard_errors(run)
    done = run.summary.get("steps", max(run.steps, default=0))
    return [
        ("Accuracy before", _percent(before, errors[0])),
        ("Accuracy after" if run.summary else "Accuracy so far", _percent(after, errors[1])),
        ("Steps", f"{done} of {run.config.steps}"),
        ("Wall time, start to end" if run.summary else "Wall time so far", duration(_total_seconds(run))),
    ]


def _recipe(config: RunConfig) -> list[tuple[str, str, str]]:
    """(part of the loss, its name or explicit form, in words)"""
    correction, preset = config.correction, preset_name(config.correction)
    written = preset or _one_line(
        {k: v for k, v in correction.model_dump(mode="json", exclude_none=True).items() if v != []}
    )
    recipe = [("correction", written, DESCRIPTIONS.get(written, ""))]
    for part, block in (("objective", config.policy_objective), ("advantage", config.advantage)):
        body = block.model_dump(mode="json", exclude={"type"})
        recipe.append((part, block.type, _one_line(body) if body else ""))
    if config.rollout.rounding is not None:
        recipe.append(("rollout", f"precision {config.rollout.precision}", config.rollout.rounding))
    return recipe


def _one_line(block: Mapping[str, Any]) -> str:
    return yaml.safe_dump(block, default_flow_style=True, sort_keys=False, width=math.inf).strip()


def _alarm_text(history: AlarmHistory, num_steps: int) -> tuple[str, str, str]:
    """(name, when and how bad, message of the worst step)"""
    count, value = len(history.steps), history.worst.value
    worst = "not finite" if math.isnan(value) else _number(value)
    when = f"{count} of {num_steps} steps ({count / num_steps:.0%}), first at step {history.steps[0]}"
    return history.name, f"{when}; worst {worst} at step {history.worst_step}", history.worst.message


def _standard_errors(run: _Run) -> tuple[float | None, float | None]:
    """Standard errors of the first and of the last accuracy, as recorded. For a run of an earlier version they are
    computed as if all answers to a problem were alike."""
    recorded, accuracy = run.get("eval/accuracy_error"), run.get("eval/accuracy")
    counts = run.get("eval/count")
    if not (accuracy and counts):
        return None, None
    problems = [count / run.config.evaluation.samples_per_prompt for count in counts.values]
    shares = (accuracy.values[0], problems[0]), (accuracy.values[-1], problems[-1])
    first, last = (
        math.sqrt(share * (1 - share) / count) if count and 0 <= share <= 1 else None
        for share, count in shares
    )
    return (recorded.values[0], recorded.values[-1]) if recorded else (first, last)


def _percent(share: Any, error: float | None) -> str:
    if not isinstance(share, int | float):
        return "not measured"
    return f"{share:.1%}" + (f" ± {error:.1%}" if error is not None else "")


def _total_seconds(run: _Run) -> float:
    """Seconds of the learner's start and steps; before the summary is written, of the steps so far. The summary's
    other seconds are parts of these, or precede the run (the quickstart's installation and warm start)."""
    seconds = run.summary.get("seconds")
    if isinstance(seconds, dict) and isinstance(seconds.get("training"), int | float):
        return seconds["training"] + (seconds.get("start_up") or 0.0)
    return run.elapsed_s


def _seconds_by_part(run: _Run) -> list[tuple[str, str, str]]:
    """(part, seconds, share) over all recorded steps."""
    totals = {name: sum(seconds) for name, seconds in _step_times(run)[1].items()}
    whole = sum(totals.values())
    return [(name, f"{total:,.1f}", f"{total / whole:.0%}") for name, total in totals.items() if total > 0]


def _settings_table(runs: Mapping[str, _Run]) -> comparison.Table:
    """Empty where the runs differ in no setting."""
    rows = comparison.settings_table([*runs], [run.config for run in runs.values()])
    return [[_redacted(value) for value in row] for row in rows] if len(rows) > 1 and len(rows[0]) > 1 else []


def changed_settings(config: RunConfig) -> list[tuple[str, str, str]]:
    """(field, value, default) of every setting that differs from its default; "-" is a required one's default."""
    # Other fields of the model may contradict defaults, and its own defaults are read below.
    plain = RunConfig(model=ModelConfig(path=config.model.path), task=config.task)
    defaults = flatten(plain.model_dump(mode="json"))
    for block in ("model", "task"):
        for name, info in type(getattr(config, block)).model_fields.items():
            is_required = info.is_required() or name == "type"
            defaults |= flatten({f"{block}.{name}": "-" if is_required else info.default})
    values = flatten(config.model_dump(mode="json"))
    return [
        (name, _redacted(value), defaults.get(name, "-"))
        for name, value in values.items()
        if value != defaults.get(name)
    ]


def _redacted(value: str) -> str:
    """A setting without user and password of a tracking server, as reports are passed on."""
    scheme, slashes, rest = value.partition("://")
    host, at, tail = rest.rpartition("@")
    return f"{scheme}{slashes}{tail}" if slashes and at and "/" not in host else value


def _metric_table(run: _Run) -> list[tuple[str | int, ...]]:
    """(name, first, last, least, most, number of values)"""
    return [
        (name, *map(_number, (s.values[0], s.values[-1], min(s.values), max(s.values))), len(s))
        for name, s in sorted(run.recorded.series.items())
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
