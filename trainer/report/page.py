"""``report.html`` and its figures, from metrics.jsonl, config.yaml and, if there are any, samples and summary.json
of a run.

The page needs neither network nor scripts. Metrics that were not recorded or never changed are not drawn; the
page's notes name them. ``drawing.py`` draws the pictures of ``pictures.py``.
"""

import base64
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from configs.errors import counted
from configs.presets import DESCRIPTIONS, preset_name
from configs.schema import RunConfig
from configs.schema.model import ModelConfig
from trainer.file_system import write_whole
from trainer.metric_names import STEP_PARTS, TIME_PARTS
from trainer.report import comparison, timeline
from trainer.report.drawing import ALONE, COLORS, draw, draw_alone, draw_stack, new_figure
from trainer.report.pictures import PICTURES
from trainer.report.recorded_run import AlarmHistory, RecordedRun, note_the_data, number_text, read_run
from trainer.report.samples import shown_samples
from trainer.tracking.console import duration
from trainer.tracking.tracker import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tracing.reading import Trace


def write_report(run_dir: Path, config: RunConfig | None = None) -> Path:
    """Write ``figures/*.png`` and ``report.html`` of a run, finished or not; returns the path of the page.

    config: the run's; None: read from its folder.
    Raises ValueError if the folder is not that of a training run.
    """
    run = read_run(run_dir, config)
    figures = run_dir / "figures"
    figures.mkdir(exist_ok=True)
    pictures = []
    for name, title, about, figure, panels in _draw_all(run):
        path = figures / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        write_whole(path, as_png(figure))
        pictures.append(shown(title, about, panels))
    note_the_data(run)
    samples = shown_samples(run_dir, run.config.model.path)
    run.notes += samples.notes
    page, num_steps = run_dir / "report.html", sum(step > 0 for step in run.steps)
    text = render(
        "template.html",
        name=run.config.name,
        folder=run.folder.name,
        facts=_facts(run),
        recipe=_recipe(run.config),
        alarms=[_alarm_text(history, num_steps) for history in run.alarms],
        num_steps=num_steps,
        alarms_off=[name for name, level in run.config.alarms if level is None],
        notes=run.notes,
        at_rest=run.at_rest,
        figures=pictures,
        samples=samples,
        seconds=_seconds_by_part(run),
        settings=changed_settings(run.config),
        metrics=_metric_table(run),
    )
    write_whole(page, text.encode())  # on a full disk the page before stays
    return page


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tables of a comparison's page. The first row of each has the titles of the columns."""

    results: comparison.Table
    settings: comparison.Table
    """Empty if the runs differ in no setting."""
    left_out: list[str]
    """A line for each run that has recorded no step yet."""


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Comparison:
    """Write one page that compares the runs of these folders, finished or not. Of ``runs/*`` it leaves out what is no
    training run.

    Raises ValueError with every path that is no training run, if one of them does not exist or fewer than two runs are left, and
    if no run has recorded a step.
    """
    runs, problems, left_out = list[RecordedRun](), dict[Path, str](), list[str]()
    for folder in run_dirs:
        try:
            run = read_run(folder, None, may_lack_metrics=True)
        except ValueError as error:
            problems[folder] = str(error)
            continue
        if run.steps:
            runs.append(run)
        else:
            left_out.append(f"left out: {folder} has recorded no step yet")
    num_runs = len(run_dirs) - len(problems)
    if problems and (num_runs < 2 or not all(path.exists() for path in problems)):
        raise ValueError("\n  ".join(problems.values()))
    if problems:
        left_out.append(
            f"left out, since they are no training runs: {', '.join(path.name for path in problems)}"
        )
    if not runs:
        raise ValueError(f"none of the {num_runs} runs has recorded a step yet; wait, or name other runs")
    configs = [run.config for run in runs]
    labels = comparison.labels_of([(run.folder.name, run.config) for run in runs])
    recorded = dict(zip(labels, (run.recorded for run in runs), strict=True))
    pairs = zip(recorded.values(), configs, strict=True)
    results = comparison.results_table(dict(zip(labels, pairs, strict=True)))
    settings = comparison.settings_table(labels, configs)
    compared = [(comparison.RESULTS_TITLE, comparison.RESULTS_ABOUT, results)]
    compared += [(comparison.SETTINGS_TITLE, comparison.SETTINGS_ABOUT, settings)] if settings else []
    curves = shown("Curves", comparison.ABOUT, comparison.draw(recorded, configs[0]))
    text = render("comparison.html", count=len(runs), notes=left_out, compared=compared, figures=[curves])
    write_whole(page, text.encode())
    return Comparison(results=results, settings=settings, left_out=left_out)


# ------------------------------------------------------------------------------------------------------------------
# drawing


def _draw_all(run: RecordedRun) -> "Iterator[tuple[str, str, str, Figure | None, Iterable[Figure]]]":
    """(name, title, about, the whole picture for its own file, its panels for the page)"""
    for picture in PICTURES:
        panels = draw_alone(picture, run.recorded, run.config)
        yield picture.name, picture.title, picture.about, draw(picture, run.recorded, run.config), panels
    about = (
        "Seconds of each part of a step, stacked; other: the rest of the whole step. The evaluation comes after the step, and the "
        "checkpoint is that of the step before."
    )
    title = "Where the time of a step goes"
    whole, alone = _draw_step_time(run, title, None), _draw_step_time(run, "", ALONE)
    yield "step_time", title, about, whole, [] if alone is None else [alone]
    traced = _traced_step(run)
    whole = traced and timeline.draw_timeline(traced, timeline.TITLE, width=11)
    alone = [timeline.draw_timeline(traced, "", width=2 * ALONE[0])] if traced else []
    yield "timeline", timeline.TITLE, timeline.ABOUT, whole, alone


def _traced_step(run: RecordedRun) -> "Trace | None":
    try:
        return timeline.last_step(run.folder)
    except ValueError as error:
        run.notes.append(f"The trace was left out: {error}.")
        return None


def shown(title: str, about: str, figures: "Iterable[Figure]") -> dict[str, Any]:
    """Figures under one title, for a page."""
    return {"title": title, "about": about, "images": [as_svg(figure) for figure in figures]}


def save(figure: "Figure", file: io.BytesIO | io.StringIO, **options: Any) -> None:
    """Save the figure with room for its texts. With matplotlib's own layout it would be drawn twice, the first time only
    for the layout."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if figure.axes:  # a legend alone has nothing to lay out, and matplotlib would warn
        ConstrainedLayoutEngine(wspace=0.04, hspace=0.06).execute(figure)
    figure.savefig(file, **options)


def as_png(figure: "Figure") -> bytes:
    """The figure for its own file."""
    png = io.BytesIO()
    save(figure, png, format="png", dpi=120, metadata={"Software": None})
    return png.getvalue()


def as_svg(figure: "Figure") -> str:
    """The figure for the page, in base64: sharp at every width, and a few kilobytes."""
    from matplotlib import rc_context

    svg, fonts = io.StringIO(), ["DejaVu Sans", "sans-serif"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tandem", "font.family": fonts}):
        save(figure, svg, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(svg.getvalue().encode()).decode("ascii")


def _draw_step_time(run: RecordedRun, title: str, size: tuple[float, float] | None) -> "Figure | None":
    steps, parts = _step_times(run)
    if not steps:
        return None
    figure, (axes,) = new_figure(1, title, size=size)
    draw_stack(axes, steps, parts, (*COLORS[: len(TIME_PARTS)], "#bdbdbd"), title="")
    axes.set_ylabel("seconds")
    return figure


def _step_times(run: RecordedRun) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds by part over the steps that have any; ``other`` is the rest of time/step."""
    series = {part: run.get(f"time/{part}") for part in (*TIME_PARTS, "step")}
    seconds = {part: s.by_step for part, s in series.items()}
    steps = sorted({step for by_step in seconds.values() for step in by_step})
    parts = {part: [by_step.get(step, 0.0) for step in steps] for part, by_step in seconds.items()}
    whole = parts.pop("step")
    in_step = zip(*(parts[part] for part in STEP_PARTS), strict=True)
    rest = [max(all_s - sum(part_s), 0.0) for all_s, part_s in zip(whole, in_step, strict=True)]
    return steps, {**parts, "other": rest}


# ---------------------------------------------------------------------------------------------------------------------
# page


def render(template: str, **content: object) -> str:
    """A page from a template of this folder."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(**content)


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    accuracy = run.get("eval/accuracy").by_step
    last = max(accuracy, default=0)
    before = run.summary.get("accuracy_before", accuracy.get(0))
    after = run.summary.get("accuracy_after", accuracy[last] if last > 0 else None)
    after_step = run.summary.get("accuracy_after_step", last)
    done = run.summary.get("steps", max(run.steps, default=0))
    return [
        ("Accuracy before", _accuracy_text(run, before, 0)),
        ("Accuracy after" if run.summary else "Accuracy so far", _accuracy_text(run, after, after_step)),
        ("Steps", f"{done} of {run.config.steps}"),
        ("Running time" if run.summary else "Running time so far", duration(_total_seconds(run))),
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
    count, value = sum(step > 0 for step in history.steps), history.worst.value
    worst = "not finite" if math.isnan(value) else number_text(value)
    when = f"{count} of {counted(num_steps, 'step')} ({count / max(num_steps, 1):.0%}), first at step {history.steps[0]}"
    return history.name, f"{when}; worst {worst} at step {history.worst_step}", history.worst.message


def _accuracy_text(run: RecordedRun, accuracy: Any, step: int) -> str:
    if not isinstance(accuracy, int | float):
        return "not measured"
    error = run.get("eval/accuracy_error").by_step.get(step)
    return f"{accuracy:.1%}" + (f" ± {error:.1%}" if error is not None else "") + f" at step {step}"


def _total_seconds(run: RecordedRun) -> float:
    """Seconds of the learner's start and steps; before the summary is written, of the steps so far. The summary's
    other seconds are parts of these, or precede the run (the quickstart's installation and warm start)."""
    seconds = run.summary.get("seconds")
    if isinstance(seconds, dict) and isinstance(seconds.get("training"), int | float):
        return seconds["training"] + (seconds.get("start_up") or 0.0)
    return run.elapsed_s


def _seconds_by_part(run: RecordedRun) -> list[tuple[str, str, str]]:
    """(part, seconds, share) over all recorded steps."""
    totals = {name: sum(seconds) for name, seconds in _step_times(run)[1].items()}
    whole = sum(totals.values())
    return [(name, f"{total:,.1f}", f"{total / whole:.0%}") for name, total in totals.items() if total > 0]


def changed_settings(config: RunConfig) -> list[tuple[str, str, str]]:
    """(field, value, default) of every setting that differs from its default; "-" is a required one's default."""
    # Other fields of the model may contradict defaults, and its own defaults are read below.
    plain = RunConfig(model=ModelConfig(path=config.model.path), task=config.task)
    defaults = flatten(plain.model_dump(mode="json", exclude={"model", "task"}))
    for block in ("model", "task"):
        for name, info in type(getattr(config, block)).model_fields.items():
            is_required = info.is_required() or name == "type"
            default = "-" if is_required else info.get_default(call_default_factory=True)
            defaults |= flatten({f"{block}.{name}": default})
    values = flatten(config.model_dump(mode="json"))
    return [
        (name, value, defaults.get(name, "-"))
        for name, value in values.items()
        if value != defaults.get(name)
    ]


def _metric_table(run: RecordedRun) -> list[tuple[str | int, ...]]:
    """(name, first, last, least, most, number of values)"""
    return [
        (name, *map(number_text, (s.values[0], s.values[-1], min(s.values), max(s.values))), len(s))
        for name, s in sorted(run.recorded.series.items())
    ]
