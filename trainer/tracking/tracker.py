"""The records of a run: metrics.jsonl, one console line per step, MLflow, and copies in other trackers.

log(step, metrics) ──> metrics.jsonl   the record: written and flushed before log returns, unless the disk is full
                   ──> console         one line (also console.log)
                   ──> queue ──> mlflow_thread.py ──> MLflow   never waited for, except at close, and then for seconds
metrics.jsonl ──> publisher.py, a process for each of W&B and TensorBoard that the config asks for
"""

import json
import logging
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from configs.schema import RunConfig
from rollout.terminal_text import tandem_command
from trainer.file_system import LineFile, way_to_write
from trainer.metric_names import find_entry
from trainer.ranks.interruption import StopRequested
from trainer.tracking.alarms import check_alarms, judged
from trainer.tracking.console import Console
from trainer.tracking.held_out import BestAccuracy
from trainer.tracking.metrics_file import keep_until
from trainer.tracking.mlflow_thread import Artifact, MlflowThread, Problem, Row, Status
from trainer.tracking.publisher import Publisher, services_of

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 30.0
ALARM = "bold red"
_PACE_STEPS = 20


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
                f"{run_dir} already holds the metrics of a run; use another `name`, or continue it with `resume={run_dir}`"
            )
        kept = [] if resumed_from_step is None else keep_until(path, resumed_from_step)
        self._grace_s, self._alarm_levels = config.launch.stop_grace_s, config.alarms
        self._last_line: dict[str, Any] = dict(kept[-1]) if kept else {}
        self.elapsed_before_s: float = max((row.get("elapsed_s") or 0.0 for row in kept), default=0.0)
        """Seconds of the attempts before a resume, up to the step that it continues from."""
        self._best_accuracy = BestAccuracy(kept, max_failed=config.alarms.reward_failed_max)
        self._started, self._time_left = time.monotonic(), _TimeLeft(config)
        self._warned, self._named, self._alarming = set[str](), set[str](), set[str]()
        self._closed = False
        self._path, self._file = path, LineFile(path)
        self._console = Console(run_dir / "console.log", config)
        tags = {"tandem.run_dir": str(run_dir.resolve())}
        if resumed_from_step is not None:
            tags["tandem.resumed_from_step"] = str(resumed_from_step)
        first = [
            flatten(config.model_dump(mode="json")),
            Artifact(run_dir / "config.yaml"),
            *map(_row_of, kept),
        ]
        self._mlflow = MlflowThread(config, run_dir, first, tags)
        self._mlflow.start()
        self._publishers: list[Publisher] = []
        for service in services_of(config):
            try:
                self._publishers.append(Publisher(service, run_dir))
            except OSError as error:
                later = f"`{tandem_command('publish', run_dir, '--to', service)}` does it later"
                self._warn_of(service, f"the metrics are not copied to {service} ({error}); {later}")

    @property
    def last_step(self) -> int:
        """The step of the newest line."""
        return self._last_line.get("step", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step, and print its alarms. An evaluation is compared with the best one before it
        (``eval/accuracy_fall``). A later evaluation of the same step joins its line; no step is earlier than the last.

        The console prints an alarm in full when it begins, and again only after it had stopped.

        A value that is not finite is null in metrics.jsonl, a dash on the console and left out of MLflow, with
        one warning per name. A name that trainer/metric_names.py lacks gets one warning, which fails a test.
        """
        metrics = {**metrics, **self._best_accuracy.fall_to(metrics)}
        for name in metrics.keys() - self._named:
            if find_entry(name) is None:
                warnings.warn(
                    f"metric {name!r} is not in trainer/metric_names.py; add it there", stacklevel=2
                )
        self._named |= metrics.keys()
        now = time.monotonic()
        values = {name: self._finite(name, float(value)) for name, value in metrics.items()}
        line = {"step": step, "elapsed_s": round(self.elapsed_before_s + now - self._started, 3), **values}
        self._write(line)
        self._mlflow.put(_row_of(line))
        self._console.step(step, values, self._time_left.after(step, now, values))
        self._print_alarms(step, metrics)
        self._warn_of_mlflow(self._mlflow.problem)
        for publisher in self._publishers:
            self._warn_of(publisher.service, publisher.problem())

    def _write(self, line: dict[str, Any]) -> None:
        """Add the line to the file, or join it to the last one, if it is of the same step."""
        if line["step"] == self._last_line.get("step"):
            line = self._last_line | line
            problem = self._replace_last(line)
        else:
            problem = self._file.write(json.dumps(line, allow_nan=False))
        self._last_line = line
        if problem:
            wrong = f"step {line['step']}: {self._path} cannot be written ({problem.strerror})"
            later = f"{way_to_write(problem)}: the run continues, and writes these lines later"
            self.warn_once("metrics", f"{wrong}; {later}")

    def _print_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        alarms = check_alarms(metrics, self._alarm_levels)
        for alarm in alarms:
            if alarm.name not in self._alarming:
                self._console.line(f"  ! step {step}: {alarm.message}", style=ALARM)
        # A step without an evaluation does not end an alarm of evaluations.
        self._alarming = (self._alarming - judged(metrics)) | {alarm.name for alarm in alarms}

    def _replace_last(self, line: Mapping[str, Any]) -> OSError | None:
        """Replace the last line, which is of the same step, by ``line``. If the disk has no space for the whole file, append
        ``line`` and return the error; ``read_metrics`` joins the two lines."""
        try:
            if problem := self._file.flush():  # lines wait in memory, and a new file would lose them
                raise problem
            keep_until(self._path, line["step"] - 1, then=[line])
        except OSError as error:
            return self._file.write(json.dumps(line, allow_nan=False)) or error
        self._file.close()
        self._file = LineFile(self._path)
        return None

    def say(self, text: str) -> None:
        """Write a line that is not a step to the console and to console.log."""
        self._console.line(text)

    def warn_once(self, about: str, text: str) -> None:
        """Print a warning like an alarm, once for each ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            self._console.line(f"  ! {text}", style=ALARM)

    def _warn_of(self, service: str, problem: str | None) -> None:
        if problem is not None:
            self.warn_once(f"copy to {service}", problem)

    def _warn_of_mlflow(self, problem: Problem | None) -> None:
        if problem is not None:  # an outage that has passed hides no later problem
            self.warn_once(f"MLflow: {problem.kind}", problem.text)

    def note(self, text: str) -> None:
        """Write a line only to console.log; the console has it already."""
        self._console.note(text)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Send a file, into ``folder`` of MLflow's artifacts, or the files of a folder, in the background."""
        self._mlflow.put(Artifact(path, path.name if path.is_dir() else folder))

    def close(self, status: Status) -> None:
        """Send the rest and end the MLflow run, within 30 s or half the grace period of a stop. A second close does
        nothing. Raises OSError if a run that has finished could not write all its metrics."""
        if self._closed:
            return
        self._closed = True
        patience_s = CLOSE_DEADLINE_S if status == "FINISHED" else min(CLOSE_DEADLINE_S, self._grace_s / 2)
        deadline = time.monotonic() + patience_s
        for publisher in self._publishers:
            publisher.tell(status)
        self._warn_of_mlflow(self._mlflow.finish(status, patience_s))
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


class _TimeLeft:
    """Seconds until the run ends: steps left times the mean seconds of the last steps (at first ``time/step``), and
    evaluations left times the seconds of the last one."""

    def __init__(self, config: RunConfig):
        self._num_steps, self._evaluation, self._evaluation_s = config.steps, config.evaluation, 0.0
        self._last_change: tuple[int, float] | None = None
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)

    def after(self, step: int, now: float, values: Mapping[str, float | None]) -> float | None:
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
    metrics = {name: x for name, x in line.items() if name not in ("step", "elapsed_s") and x is not None}
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
