"""A run as its report sees it: what its folder records, read into series, alarms and notes. Nothing is drawn here."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from configs.loader import ConfigError, load_config
from configs.schema import RunConfig
from configs.schema.alarms import AlarmsConfig
from trainer.file_system import read_file
from trainer.metric_names import known
from trainer.report.pictures import FLAT_MEANS, FLAT_MEANS_OF_ONE_MINIBATCH, PICTURES, Buckets, Lines
from trainer.report.series import Recorded, Series, is_drawn
from trainer.tracking.alarms import Alarm, check_alarms
from trainer.tracking.ledger import LEDGER, read_ledger, summary
from trainer.tracking.metrics_file import read_metrics

FEWEST_FLAT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmHistory:
    """One alarm over the steps of a run."""

    name: str
    steps: list[int]
    """The steps that raised it."""
    worst_step: int
    worst: Alarm


@dataclass(slots=True)
class RecordedRun:
    """The records of a run's folder."""

    folder: Path
    config: RunConfig
    recorded: Recorded
    alarms: list[AlarmHistory]
    elapsed_s: float
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    at_rest: list[str] = field(default_factory=list)
    """Which metrics are not drawn because nothing happened to them."""

    @property
    def steps(self) -> list[int]:
        return self.recorded.steps

    def get(self, metric: str) -> Series:
        known(metric.removeprefix("1 - "))
        return self.recorded.get(metric)


def read_run(run_dir: Path, config: RunConfig | None, *, may_lack_metrics: bool = False) -> RecordedRun:
    """The run in this folder, with its config if that is known.

    may_lack_metrics: accept a run that has recorded no step yet. Raises ValueError if the folder is not that of a
    training run.
    """
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
    run = RecordedRun(run_dir, loaded, _by_metric(rows), alarm_histories(rows, loaded.alarms), elapsed_s, {})
    run.summary = _read_summary(run)
    return run


def _read_summary(run: RecordedRun) -> dict[str, Any]:
    path = run.folder / "summary.json"
    if not path.exists():
        run.notes.append(
            "The run has no summary.json: it is not finished, or was stopped. Figures show what was recorded until now."
        )
        return {}
    summary = read_file(path, {}, [])
    if summary is None:
        run.notes.append("summary.json is not readable and was left out.")
        return {}
    done = summary.get("steps")
    if isinstance(done, int) and done < max(run.config.steps, *run.steps, 0):
        run.notes.append(
            f"summary.json is of step {done}, before the run continued: it is not finished, or was stopped. "
            "Figures show what was recorded until now."
        )
        return {}
    return summary


def _by_metric(rows: Sequence[Mapping[str, Any]]) -> Recorded:
    """The series of each metric. If a step has two values, the later one counts."""
    by_metric: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "elapsed_s") and value is not None:
                by_metric.setdefault(name, {})[row["step"]] = float(value)
    series = {name: Series(sorted(of), [of[step] for step in sorted(of)]) for name, of in by_metric.items()}
    return Recorded(steps=sorted({row["step"] for row in rows}), series=series)


def alarm_histories(rows: Sequence[Mapping[str, Any]], config: AlarmsConfig) -> list[AlarmHistory]:
    """The alarms of a run's lines of metrics.jsonl, by the levels of its config, the most frequent first.

    A null stands for a value that was not finite: an alarm, and the worst value. Step 0 is the evaluation before the first
    step.
    """
    raised: dict[str, dict[int, Alarm]] = defaultdict(dict)
    for row in rows:
        metrics = {name: math.nan if value is None else value for name, value in row.items()}
        for alarm in check_alarms(metrics, config):
            raised[alarm.name][row["step"]] = alarm
    histories = []
    for name, by_step in raised.items():
        step, worst = max(by_step.items(), key=lambda item: item[1].badness)
        histories.append(AlarmHistory(name=name, steps=sorted(by_step), worst_step=step, worst=worst))
    return sorted(histories, key=lambda history: -len(history.steps))


def note_the_data(run: RecordedRun) -> None:
    """Add notes on missing steps, missing metrics, and metrics that never change."""
    if not run.steps:
        run.notes.append("No step has been recorded yet.")
        return
    run.notes += _missing_records(run)
    same, rounding = list[str](), list[str]()
    for panel in (panel for picture in PICTURES for panel in picture.panels):
        if isinstance(panel, Lines):
            _note_lines(run, panel, same, rounding)
        elif not is_drawn(panel, run.recorded) and (edges := [*run.recorded.edges(panel.prefix).values()]):
            if isinstance(panel, Buckets):
                rounding.append(f"{panel.prefix}/*")
            else:
                same.append(f"{panel.prefix} is 1 in the first bin ({edges[0]})")
    if rounding:
        near = "Nothing but rounding around the value at rest"
        run.at_rest.append(f"{near}, so not drawn: {', '.join(rounding)}.")
    if same:
        run.at_rest.append(f"The same at every step, so not drawn: {'; '.join(same)}.")


def _note_lines(run: RecordedRun, panel: Lines, same: list[str], rounding: list[str]) -> None:
    """Of the panel's metrics, which no other panel has: those that never change, with the reason if it is known."""
    is_shown = is_drawn(panel, run.recorded)
    reasons = FLAT_MEANS | (FLAT_MEANS_OF_ONE_MINIBATCH if run.config.learner.minibatches == 1 else {})
    for metric in run.recorded.labelled(panel.metrics):
        values = run.get(metric).values
        if len(set(values)) > 1:
            rounding += [] if is_shown else [metric]
            continue
        why = reasons.get((metric, values[0]))
        what, why = f"{metric} is {number_text(values[0])}", f" ({why})" if why else ""
        if not is_shown:
            same.append(f"{what}{why}")
        elif len(values) >= FEWEST_FLAT:
            run.notes.append(f"{what} at all {len(values)} steps{why}.")


def _missing_records(run: RecordedRun) -> Iterator[str]:
    """Notes on the fate of groups, on steps without a record, and on metrics without one."""
    if (run.folder / LEDGER).is_file():
        yield f"Data: {summary(read_ledger(run.folder / LEDGER))}."
    if gaps := [(a + 1, b - 1) for a, b in pairwise((0, *run.steps)) if b > a + 1]:
        listed = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:10])
        more = " and more" if len(gaps) > 10 else ""
        yield f"Steps without a record: {listed}{more}. Lines are interrupted there."
    required = [panel for picture in PICTURES if not picture.optional for panel in picture.panels]
    lines = [panel for panel in required if isinstance(panel, Lines)]
    expected = [name for panel in lines for name in panel.metrics if name not in panel.may_lack]
    # A name with a star may stand for no metric at all.
    absent = [name.removeprefix("1 - ") for name in expected if "*" not in name and not run.get(name)]
    if absent:
        yield f"Not recorded, so not drawn: {', '.join(dict.fromkeys(absent))}."


def number_text(value: float) -> str:
    """Whole numbers whole, others with four digits."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
