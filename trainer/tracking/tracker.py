"""The records of a run: metrics.jsonl, one console line per step, MLflow, and copies in other trackers.

log(step, metrics) ──> metrics.jsonl   the record: written and flushed before log returns, unless the disk is full
                   ──> console         one line (also console.log)
                   ──> queue ──> mlflow_thread.py ──> MLflow   never waited for, except at close, and then for seconds
metrics.jsonl ──> publisher.py, a process for each of W&B and TensorBoard that the config asks for
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from configs.schema import RunConfig
from rollout.terminal_text import visible
from trainer.file_system import LineFile, write_whole
from trainer.metric_names import find_entry, known, value_of
from trainer.ranks.interruption import StopRequested
from trainer.tracking.alarms import Alarm
from trainer.tracking.mlflow_thread import Artifact, MlflowThread, Params, Row, Status
from trainer.tracking.publisher import Publisher, services_of

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 30.0
HEADER_EVERY = 20
ALARM = "bold red"
BLOCK_BYTES = 1 << 16
_PACE_STEPS = 20
_RESERVED = ("step", "elapsed_s")


# ------------------------------------------------------------------------------------------------------------
# metrics.jsonl


def read_metrics(path: Path, *, is_written: bool = False) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, two of one step joined; None stands for a value that was not finite.

    Lines that are no JSON object of a step and numbers (torn by a crash, or edited) are left out, with a warning unless
    ``is_written``: the last line may then be on its way. Raises OSError.
    """
    rows, torn = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not _join(rows, line):
            torn.append(str(number))
    if torn and not is_written:
        log.warning("%s: line %s not readable as a step and numbers, left out", path, ", ".join(torn))
    return rows


class GrowingMetrics:
    """The lines of a metrics.jsonl to which a run adds. A look reads what was added since the one before; only a file that was
    replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[dict[str, Any]]()
        self._inode, self._end, self._last = 0, 0, b""
        """Of what was read: the file, the end of its last whole line, and that line."""

    def read(self) -> list[dict[str, Any]]:
        """As ``read_metrics`` of a file that is written; no lines of one that is not there. Lines that have not changed are the
        same objects as at the look before. Raises OSError."""
        try:
            added = self._added()
        except FileNotFoundError:
            added = self._begin_anew(0)
        *whole, begun = added.split(b"\n")
        for line in whole:
            _join(self._rows, line.decode(errors="replace"))
            self._end, self._last = self._end + len(line) + 1, line + b"\n"
        rows = [*self._rows]
        _join(rows, begun.decode(errors="replace"))  # where only the end of its line is missing
        return rows

    def _added(self) -> bytes:
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._end - len(self._last))
            content = file.read()
            # A file that takes the place of another may get the inode of the one before that.
            if inode == self._inode and content.startswith(self._last):
                return content[len(self._last) :]
            self._begin_anew(inode)
            file.seek(0)
            return file.read()

    def _begin_anew(self, inode: int) -> bytes:
        self._rows, self._inode, self._end, self._last = [], inode, 0, b""
        return b""


def _join(rows: list[dict[str, Any]], line: str) -> bool:
    """Add a line to those before it, or join it to the last, if it is of the same step. Returns whether it can be read."""
    if (row := _row_in(line)) is None:
        return False
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1] = rows[-1] | row
    else:
        rows.append(row)
    return True


def _row_in(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and all(map(_is_value, row.values()))
    return row if is_row else None


def _is_value(value: Any) -> bool:
    """A number that is finite as a float, or None. (Python's JSON has NaN and integers of any length.)"""
    return value is None or (
        type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
    )


def rows_from_the_end(path: Path, *, with_metric: str = "") -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, the newest first, of which no more is read than is asked for. Lines before the
    newest are given only where they have the metric."""
    newest = True
    for line in _lines_from_the_end(path):
        if newest or not with_metric or f'"{with_metric}"' in line:
            row = _row_in(line)
            if row is not None:
                newest = False
                yield row


def _lines_from_the_end(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        left, begun = file.seek(0, os.SEEK_END), b""
        while left:
            size = min(left, BLOCK_BYTES)
            left = file.seek(left - size)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from (line.decode(errors="replace") for line in reversed(lines))
        yield begun.decode(errors="replace")


def _keep_until(path: Path, step: int, then: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """Replace the file, in one move, by its whole lines up to ``step`` and then ``then``; returns these lines."""
    rows = read_metrics(path) if path.exists() else []
    kept = [*(row for row in rows if row["step"] <= step), *then]
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept).encode(), flush=True)
    return kept


# ------------------------------------------------------------------------------------------------------------------
# console


def _seconds(value: float) -> str:
    return f"{value:.1f}s" if value < 1000 else f"{value:.0f}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k" if value < 1e7 else f"{value / 1e6:.0f}M"


@dataclass(frozen=True, slots=True)
class Column:
    """One cell of a step's line. ``shown``: whether the quantity can change with this config."""

    title: str
    width: int
    metric: str
    show: Callable[[float], str]
    shown: Callable[[RunConfig], bool] = lambda config: True

    def __post_init__(self) -> None:
        known(self.metric)


_COLUMNS = (
    Column("reward", 7, "reward/before_selection", "{:.3f}".format),
    Column("heldout", 8, "eval/accuracy", "{:.1%}".format),
    Column("length", 8, "response/length_mean", "{:.1f}".format),
    Column("loss", 10, "loss/total", "{:.2e}".format),
    Column("entropy", 8, "policy/entropy", "{:.3f}".format),
    Column("ref KL", 9, "policy/ref_kl", "{:.1e}".format, lambda config: config.kl.coefficient > 0),
    Column("grad", 8, "optim/grad_norm", "{:.3g}".format),
    Column("|Δp|max", 9, "mismatch/abs_prob_max", "{:.1e}".format),
    Column(
        "ESS", 7, "mismatch/ess", "{:.3f}".format, lambda config: config.correction.weight.level != "none"
    ),
    Column("lag", 6, "staleness/mean", "{:.2f}".format, lambda config: config.rollout.max_staleness > 0),
    Column("kept", 7, "mismatch/kept_fraction", "{:.3f}".format, lambda config: config.correction.rejects),
    Column("tok/s", 7, "throughput/tokens_per_s", _count),
    Column("sample", 8, "time/sampling", _seconds),
    Column(
        "logprob", 8, "time/logprobs", _seconds, lambda config: config.scores_old or config.kl.coefficient > 0
    ),
    Column("update", 8, "time/update", _seconds),
    Column("sync", 7, "time/sync", _seconds),
)
"""Δp is p_rollout - p_old. All other metrics are in metrics.jsonl and in the report."""


def columns_of(config: RunConfig) -> tuple[Column, ...]:
    return tuple(column for column in _COLUMNS if column.shown(config))


def header(num_steps: int, columns: Sequence[Column] = _COLUMNS) -> str:
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    return f"{_step_cell('step', num_steps)}{titles}{'left':>8}"


def row(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float | None],
    left_s: float | None,
    columns: Sequence[Column] = _COLUMNS,
) -> str:
    """One step as a line under ``header``; a metric that was not measured, or is not finite, is a dash."""
    values = [(value_of(metrics, column.metric), column) for column in columns]
    cells = (
        f" {'-' if value is None else column.show(value):>{column.width - 1}}" for value, column in values
    )
    left = "-" if left_s is None else duration(left_s)
    return f"{_step_cell(f'{step}/{num_steps}', num_steps)}{''.join(cells)}{left:>8}"


def _step_cell(text: str, num_steps: int) -> str:
    return f"{text:>{max(2 * len(str(num_steps)) + 1, 7)}}"


class _Console:
    """Lines to stdout, styled only on a terminal, and plain to console.log."""

    def __init__(self, path: Path, config: RunConfig):
        self._file = LineFile(path)
        self._num_steps, self._columns = config.steps, columns_of(config)
        self._num_rows = 0

    def step(self, step: int, metrics: Mapping[str, float | None], left_s: float | None) -> None:
        if self._num_rows % HEADER_EVERY == 0:
            self.line(header(self._num_steps, self._columns), style="bold")
        self._num_rows += 1
        line = row(step, self._num_steps, metrics, left_s, self._columns)
        self.line(line, style="green" if metrics.get("eval/accuracy") is not None else None)

    def note(self, text: str) -> None:
        """Into console.log alone."""
        self._file.write(visible(text))

    def line(self, text: str, style: str | None = None) -> None:
        text = visible(text)  # it may hold a model's
        self.note(text)
        if not sys.stdout.isatty():
            with contextlib.suppress(OSError):  # a file on a full disk, or a reader that has gone
                print(text, flush=True)
            return
        from rich.console import Console  # only where there is a terminal

        Console(file=sys.stdout, highlight=False, markup=False).print(
            text, style=style, no_wrap=True, crop=False, overflow="ignore"
        )

    def close(self) -> None:
        self._file.close()


# ------------------------------------------------------------------------------------------------------------------
# tracker


class Tracker:
    """Records a run. As a context manager it closes with the status that fits the exception, if any."""

    def __init__(self, config: RunConfig, run_dir: Path, *, resumed_from_step: int | None = None):
        """
        run_dir: a folder with the run's config.yaml; metrics.jsonl and console.log go there (mlflow.db: see
        ``store_file``). resumed_from_step: metrics of later steps are dropped.
        Raises ValueError if the folder already holds metrics and the run is not resumed; OSError if it cannot
        be written.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        if resumed_from_step is None and path.exists() and path.stat().st_size:
            raise ValueError(
                f"{run_dir} already holds the metrics of a run; use another `name`, or go on with `resume={run_dir}`"
            )
        kept = [] if resumed_from_step is None else _keep_until(path, resumed_from_step)
        self._num_steps, self._grace_s = config.steps, config.launch.stop_grace_s
        self._last_step = kept[-1]["step"] if kept else 0
        self._last_line: dict[str, Any] = dict(kept[-1]) if kept else {}
        self.elapsed_before_s: float = max((row.get("elapsed_s") or 0.0 for row in kept), default=0.0)
        """Seconds of the attempts before a resume, up to the step that it goes on from."""
        self._started = time.monotonic()
        self._last_change: tuple[int, float] | None = None
        self._evaluation, self._evaluation_s = config.evaluation, 0.0
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._warned: set[str] = set()
        self._named: set[str] = set()
        self._alarming: set[str] = set()
        self._closed = False
        self._path, self._file = path, LineFile(path)
        self._console = _Console(run_dir / "console.log", config)
        tags = {"tandem.run_dir": str(run_dir.resolve())}
        if resumed_from_step is not None:
            tags["tandem.resumed_from_step"] = str(resumed_from_step)
        settings = Params(flatten(config.model_dump(mode="json")))
        first = [settings, Artifact(run_dir / "config.yaml"), *map(_row_of, kept)]
        self._mlflow = MlflowThread(config, run_dir, first, tags)
        self._mlflow.start()
        self._publishers: list[Publisher] = []
        for service in services_of(config):
            try:
                self._publishers.append(Publisher(service, run_dir))
            except OSError as error:
                later = f"`tandem publish {run_dir} --to {service}` does it later"
                self._warn_of(service, f"the metrics are not copied to {service} ({error}); {later}")

    def log(self, step: int, metrics: Mapping[str, float], alarms: Sequence[Alarm] = ()) -> None:
        """Record one step. A later evaluation of the same step joins its line; ValueError for an earlier step.

        The console prints an alarm in full when it begins, and again only after it had stopped.

        A value that is not finite is null in metrics.jsonl, a dash on the console and left out of MLflow, with
        one warning per name. A name that trainer/metric_names.py lacks gets one warning, which fails a test.
        """
        if self._closed:
            raise ValueError(f"step {step} is logged after the tracker was closed")
        if step < self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; steps do not go back")
        if reserved := [name for name in _RESERVED if name in metrics]:
            raise ValueError(
                f"a metric cannot be called {reserved[0]!r}, which every line has by itself; rename it"
            )
        for name in metrics.keys() - self._named:
            self._named.add(name)
            if find_entry(name) is None:
                warnings.warn(
                    f"metric {name!r} is not in trainer/metric_names.py; add it there", stacklevel=2
                )
        now = time.monotonic()
        values = {name: self._finite(name, float(value)) for name, value in metrics.items()}
        line = {"step": step, "elapsed_s": round(self.elapsed_before_s + now - self._started, 3), **values}
        if step == self._last_line.get("step"):
            whole = self._last_line | line
            problem = self._replace_last(whole)
        else:
            whole = line
            problem = self._file.write(json.dumps(line, allow_nan=False))
        if problem:
            fix = "free space; the run goes on, and its lines are written then"
            self.warn_once(
                "metrics", f"step {step}: {self._path} cannot be written ({problem.strerror}): {fix}"
            )
        self._last_line = whole
        self._mlflow.put(_row_of(line))
        self._console.step(step, values, self._left_s(step, now, values))
        for alarm in alarms:
            if alarm.name not in self._alarming:
                self._console.line(f"  ! step {step}: {alarm.message}", style=ALARM)
        self._alarming = {alarm.name for alarm in alarms}
        self._last_step = step
        for publisher in self._publishers:
            self._warn_of(publisher.service, publisher.problem())

    def _replace_last(self, line: Mapping[str, Any]) -> OSError | None:
        """Put ``line`` in the place of the last one, of the same step. Returns the error of a disk without space for the whole
        file: the line then goes behind the other, which ``read_metrics`` joins."""
        try:
            if problem := self._file.flush():  # lines wait, which a new file would not have
                raise problem
            _keep_until(self._path, line["step"] - 1, then=[line])
        except OSError as error:
            return self._file.write(json.dumps(line, allow_nan=False)) or error
        self._file.close()
        self._file = LineFile(self._path)
        return None

    def say(self, text: str) -> None:
        """Print a line that is no step on the console and to console.log."""
        self._console.line(text)

    def warn_once(self, about: str, text: str) -> None:
        """Print a warning like an alarm, once for each ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            self._console.line(f"  ! {text}", style=ALARM)

    def _warn_of(self, service: str, problem: str | None) -> None:
        if problem is not None:
            self.warn_once(f"copy to {service}", problem)

    def note(self, text: str) -> None:
        """Write a line to console.log alone; the console has it already."""
        self._console.note(text)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Send a file, into ``folder`` of the store, or the files of a folder to MLflow, in the background."""
        self._mlflow.put(Artifact(path, path.name if path.is_dir() else folder))

    def close(self, status: Status) -> None:
        """Send the rest and end the MLflow run, within 30 s or half the grace period of a stop. A second close does
        nothing. Raises OSError where a run that has finished could not write all its metrics."""
        if self._closed:
            return
        self._closed = True
        patience_s = CLOSE_DEADLINE_S if status == "FINISHED" else min(CLOSE_DEADLINE_S, self._grace_s / 2)
        deadline = time.monotonic() + patience_s
        for publisher in self._publishers:
            publisher.tell(status)
        self._mlflow.finish(status, patience_s)
        for publisher in self._publishers:
            self._warn_of(publisher.service, publisher.finish(deadline))
        self._console.close()
        if problem := self._file.close():
            lost = f"the last lines of {self._path} are lost ({problem.strerror})"
            if status == "FINISHED":
                raise OSError(problem.errno, lost)
            print(lost, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StopRequested)
        self.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def _finite(self, name: str, value: float) -> float | None:
        if math.isfinite(value):
            return value
        if name not in self._warned:
            self._warned.add(name)
            log.warning("metric %s is %s; recorded as null (this is logged once)", name, value)
        return None

    def _left_s(self, step: int, now: float, values: Mapping[str, float | None]) -> float | None:
        """Seconds until the run ends: steps left times the mean seconds of the last steps (at first ``time/step``), and
        evaluations left times the seconds of the last one."""
        evaluation_s, step_s = values.get("time/evaluation"), values.get("time/step")
        self._evaluation_s = self._evaluation_s if evaluation_s is None else evaluation_s
        if self._last_change is not None and step > self._last_change[0]:
            stepping_s = now - self._last_change[1] - (evaluation_s or 0.0)
            self._pace.append(stepping_s / (step - self._last_change[0]))
        if self._last_change is None or step > self._last_change[0]:
            self._last_change = (step, now)
        pace = sum(self._pace) / len(self._pace) if self._pace else step_s
        if pace is None:
            return None
        evaluations_s = self._evaluation.number_after(step, self._num_steps) * self._evaluation_s
        return max(self._num_steps - step, 0) * pace + evaluations_s


def _row_of(line: Mapping[str, Any]) -> Row:
    metrics = {name: value for name, value in line.items() if name not in _RESERVED and value is not None}
    return Row(line["step"], time.time_ns() // 1_000_000, metrics)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as MLflow params: dotted names and text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
