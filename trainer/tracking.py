"""What is recorded of a run: metrics.jsonl, one console line per step, and MLflow.

    log(step, metrics) ──> metrics.jsonl   the record: written and flushed before log returns
                       ──> console         one line (also console.log)
                       ──> queue ──> the `tracking` thread ──> MLflow   never waited for, except at close, and then for seconds

The thread is the only one that imports or calls MLflow: importing it and creating the sqlite store take seconds, a `log_batch` 10 ms and
more, and a remote server may not answer at all. When it does not, what is queued is tried again every RETRY_S seconds; past QUEUE_SIZE
items it is dropped. Each kind of trouble is logged once, and training goes on.
"""

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from configs.loader import resolved_yaml
from configs.schema import RunConfig

Status = Literal["FINISHED", "FAILED", "KILLED"]
log = logging.getLogger(__name__)

QUEUE_SIZE = 2000
RETRY_S = 30.0
CLOSE_DEADLINE_S = 30.0
HEADER_EVERY = 20
_PACE_STEPS = 20
_RESERVED = ("step", "elapsed_s")

_MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the thread retries by itself
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set where the user has not set them."""


# ------------------------------------------------------------------------------------------------------------ metrics.jsonl


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """The lines of a metrics.jsonl; None stands for a value that was not finite.

    A line that is not a JSON object with a step (torn by a crash) is left out, with a warning. Raises OSError.
    """
    rows, torn = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            torn.append(str(number))
    if torn:
        log.warning("%s: line %s not readable, left out", path, ", ".join(torn))
    return rows


def _keep_until(path: Path, step: int) -> list[dict[str, float | int | None]]:
    """Drop the lines of later steps and torn ones; the new file takes the old one's place at once."""
    kept = [row for row in read_metrics(path) if row["step"] <= step] if path.exists() else []
    fresh = path.with_suffix(".jsonl.new")
    fresh.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    os.replace(fresh, path)
    return kept


# ------------------------------------------------------------------------------------------------------------------ console


def _seconds(value: float) -> str:
    return f"{value:.1f}s" if value < 1000 else f"{value:.0f}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k" if value < 1e7 else f"{value / 1e6:.0f}M"


_COLUMNS = (
    ("reward", 7, "reward/mean", "{:.3f}".format),
    ("heldout", 8, "eval/accuracy", "{:.1%}".format),
    ("|dp|mean", 9, "mismatch/abs_prob_mean", "{:.1e}".format),
    ("|dp|max", 9, "mismatch/abs_prob_max", "{:.1e}".format),
    ("k3 KL", 9, "mismatch/k3", "{:.1e}".format),
    ("ESS", 7, "mismatch/ess", "{:.3f}".format),
    ("kept", 7, "mismatch/kept_fraction", "{:.3f}".format),
    ("entropy", 8, "policy/entropy", "{:.3f}".format),
    ("grad", 8, "optim/grad_norm", "{:.3g}".format),
    ("tok/s", 7, "throughput/tokens_per_s", _count),
    ("sample", 8, "time/sampling", _seconds),
    ("logprob", 8, "time/logprobs", _seconds),
    ("update", 8, "time/update", _seconds),
    ("sync", 7, "time/sync", _seconds),
)
"""(title, width, metric, format); dp is p_rollout - p_old."""


def header(num_steps: int) -> str:
    return _step_cell("step", num_steps) + "".join(f"{title:>{width}}" for title, width, _, _ in _COLUMNS) + f"{'ETA':>8}"


def row(step: int, num_steps: int, metrics: Mapping[str, float | None], eta_s: float | None) -> str:
    """One step as a line under ``header``; a metric that was not measured, or is not finite, is a dash."""
    values = [(metrics.get(metric), width, show) for _, width, metric, show in _COLUMNS]
    cells = [f" {'-' if value is None else show(value):>{width - 1}}" for value, width, show in values]
    return _step_cell(f"{step}/{num_steps}", num_steps) + "".join(cells) + f"{'-' if eta_s is None else _duration(eta_s):>8}"


def _step_cell(text: str, num_steps: int) -> str:
    return f"{text:>{max(2 * len(str(num_steps)) + 1, 7)}}"


class _Console:
    """Lines to stdout, styled only on a terminal, and plain to console.log."""

    def __init__(self, path: Path, num_steps: int):
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._num_steps = num_steps
        self._num_rows = 0

    def step(self, step: int, metrics: Mapping[str, float | None], eta_s: float | None) -> None:
        if self._num_rows % HEADER_EVERY == 0:
            self._line(header(self._num_steps), style="bold")
        self._num_rows += 1
        self._line(row(step, self._num_steps, metrics, eta_s), style="green" if metrics.get("eval/accuracy") is not None else None)

    def say(self, text: str) -> None:
        self._line(text, style=None)

    def _line(self, text: str, style: str | None) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()
        if not sys.stdout.isatty():
            print(text, flush=True)
            return
        from rich.console import Console  # only where there is a terminal

        Console(file=sys.stdout, highlight=False, markup=False).print(text, style=style, no_wrap=True, crop=False, overflow="ignore")

    def close(self) -> None:
        self._file.close()


# ------------------------------------------------------------------------------------------------------------------- MLflow


def tracking_uri(config: RunConfig, run_dir: Path) -> str:
    """``tracking.uri``, else MLFLOW_TRACKING_URI, else the sqlite store of the run folder."""
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested config to dotted names and text, as MLflow's params are."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _mlflow_name(name: str) -> str:
    """MLflow takes word characters and ``_-. /`` in a name that is a clean relative path, up to 250 of them."""
    parts = [part for part in re.sub(r"[^\w\-. /]", "_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:250].rstrip("/") or "unnamed"


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    timestamp_ms: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Params:
    params: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Artifact:
    path: Path
    folder: str | None = None


_Item = _Row | _Params | _Artifact


class _MlflowThread(threading.Thread):
    """Sends items to MLflow in order. ``put`` never waits; ``finish`` waits up to its deadline."""

    METRICS_PER_BATCH = 1000
    PARAMS_PER_BATCH = 100
    PARAM_LENGTH = 6000

    def __init__(self, config: RunConfig, run_dir: Path, first: Sequence[_Item], tags: Mapping[str, str]):
        super().__init__(name="tracking", daemon=True)  # daemon: a server that hangs must not keep the process alive
        self._uri, self._config, self._run_dir, self._tags = tracking_uri(config, run_dir), config, run_dir, dict(tags)
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque(first)  # guarded by _changed; only this thread takes from it
        self._most_items = len(first) + QUEUE_SIZE
        self._status: Status | None = None
        self._client: Any = None
        self._run_id: str | None = None
        self._next_attempt = 0.0
        self._warned: set[str] = set()

    # ---- called by the training loop

    def put(self, item: _Item) -> None:
        with self._changed:
            room = len(self._items) < self._most_items
            if room:
                self._items.append(item)
                self._changed.notify()
        if not room:
            self._warn_once("full", "MLflow is %d items behind; later ones are dropped (metrics.jsonl has every one)", QUEUE_SIZE)

    def finish(self, status: Status, deadline_s: float) -> None:
        """Send what is left and set the status of the run, in at most ``deadline_s`` seconds."""
        with self._changed:
            self._status = status
            self._changed.notify()
        self.join(deadline_s)
        if self.is_alive():
            log.warning("MLflow at %s did not take everything within %.0f s; metrics.jsonl has every metric", self._shown_uri, deadline_s)

    # ---- the thread

    def run(self) -> None:
        try:
            self._serve()
        except Exception:  # the boundary of the thread: whatever MLflow or a storage plugin raises must not end training
            log.exception("MLflow tracking ended; training goes on, and metrics.jsonl has every metric")

    def _serve(self) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        closing = False
        while not closing:
            closing = self._wait_for_work()
            try:
                self._send_all(MlflowException)
                if closing:
                    self._client.set_terminated(self._run_id, self._status)
                self._warned.discard("unreachable")
            except (MlflowException, SQLAlchemyError, OSError) as error:
                self._next_attempt = time.monotonic() + RETRY_S
                self._warn_once("unreachable", "MLflow at %s: %s; training goes on, tried again later", self._shown_uri, _brief(error))
                if closing:
                    log.warning("MLflow at %s lacks the last %d items and the status of this run", self._shown_uri, len(self._items))

    def _wait_for_work(self) -> bool:
        """Until there is something to send and the time to (re)try has come, or the run ends: then True."""
        with self._changed:
            while self._status is None:
                left_s = self._next_attempt - time.monotonic()
                if self._items and left_s <= 0:
                    return False
                self._changed.wait(left_s if self._items else None)
            return True

    def _send_all(self, rejected: type[Exception]) -> None:
        if self._run_id is None:
            self._open_run()
        while batch := self._next_batch():
            try:
                self._send(batch)
            except rejected as error:
                if not _refused(error):
                    raise
                self._warn_once("rejected", "MLflow refused a record, which is left out there: %s", _brief(error))
            with self._changed:
                for _ in batch:
                    self._items.popleft()

    def _next_batch(self) -> list[_Item]:
        """The next item with the rows after it that fit into the same request; empty where nothing is left."""
        batch: list[_Item] = []
        num_metrics = 0
        with self._changed:
            for item in self._items:
                num_metrics += len(item.metrics) if isinstance(item, _Row) else self.METRICS_PER_BATCH
                if batch and num_metrics > self.METRICS_PER_BATCH:
                    break
                batch.append(item)
        return batch

    def _send(self, batch: Sequence[_Item]) -> None:
        from mlflow.entities import Metric, Param

        first = batch[0]
        if isinstance(first, _Artifact):
            if first.path.exists():
                send = self._client.log_artifacts if first.path.is_dir() else self._client.log_artifact
                send(self._run_id, str(first.path), first.folder)
            else:
                self._warn_once(str(first.path), "artifact %s does not exist", first.path)
        elif isinstance(first, _Params):
            params = [Param(_mlflow_name(k), v[: self.PARAM_LENGTH]) for k, v in first.params.items()]
            for chunk in _chunks(params, self.PARAMS_PER_BATCH):
                self._client.log_batch(self._run_id, params=chunk)
        else:
            metrics = [Metric(_mlflow_name(k), v, row.timestamp_ms, row.step) for row in batch for k, v in row.metrics.items()]
            for chunk in _chunks(metrics, self.METRICS_PER_BATCH):
                self._client.log_batch(self._run_id, metrics=chunk)

    def _open_run(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = self._client or MlflowClient(tracking_uri=self._uri)
        id_file = self._run_dir / "mlflow_run_id"
        self._end_previous(id_file)
        run = self._client.create_run(self._experiment_id(), run_name=self._config.name, tags=self._tags)
        self._run_id = run.info.run_id
        id_file.write_text(self._run_id, encoding="utf-8")

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._config.tracking.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        location = None  # a server has its own
        if self._uri.startswith("sqlite:///"):  # beside the database; MLflow's default would be the current folder
            location = (Path(self._uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        try:
            return self._client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = self._client.get_experiment_by_name(name)  # another run was first
            if found is None:
                raise
            return found.experiment_id

    def _end_previous(self, id_file: Path) -> None:
        """A resumed run is a new one for MLflow, with the whole history, as MLflow cannot take back the steps that are redone."""
        from mlflow.exceptions import MlflowException

        if not id_file.exists():
            return
        self._tags["tandem.continues_run"] = previous = id_file.read_text(encoding="utf-8").strip()
        try:
            if self._client.get_run(previous).info.status == "RUNNING":
                self._client.set_terminated(previous, "KILLED")
        except MlflowException as error:
            if not _refused(error):
                raise  # unreachable: tried again with the rest

    @property
    def _shown_uri(self) -> str:
        return re.sub(r"//[^/@]*@", "//", self._uri)

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)


def _refused(error: Any) -> bool:
    """The store understood and said no: asking again would not help."""
    code = error.get_http_status_code()
    return 400 <= code < 500 and code not in (408, 429)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


# ------------------------------------------------------------------------------------------------------------------ tracker


class Tracker:
    """Records a run. As a context manager it closes with the status that the way out says."""

    def __init__(self, config: RunConfig, run_dir: Path, *, resumed_from_step: int | None = None):
        """
        run_dir: an existing or new folder; config.yaml, metrics.jsonl, console.log and (where no other store is named) mlflow.db go there.
        resumed_from_step: metrics of later steps, written before the interruption, are dropped.
        Raises ValueError where the folder already holds metrics and the run is not a resumed one; OSError where it cannot be written.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        if resumed_from_step is None and path.exists() and path.stat().st_size:
            raise ValueError(f"{run_dir} already holds the metrics of a run; use another `name`, or go on with `resume={run_dir}`")
        kept = [] if resumed_from_step is None else _keep_until(path, resumed_from_step)
        (run_dir / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")
        self._num_steps, self._grace_s = config.steps, config.launch.stop_grace_s
        self._last_step = kept[-1]["step"] if kept else 0
        self._elapsed_before = max((row.get("elapsed_s") or 0.0 for row in kept), default=0.0)
        self._started = time.monotonic()
        self._last_change: tuple[int, float] | None = None
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._warned: set[str] = set()
        self._closed = False
        self._file = path.open("a", encoding="utf-8")
        self._console = _Console(run_dir / "console.log", config.steps)
        for name, value in _MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        tags = {"tandem.run_dir": str(run_dir.resolve())}
        if resumed_from_step is not None:
            tags["tandem.resumed_from_step"] = str(resumed_from_step)
        self._mlflow = _MlflowThread(config, run_dir, list(_first_items(config, run_dir, kept)), tags)
        self._mlflow.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step. Steps may repeat (a later evaluation of the same step) but not go back: ValueError.

        A value that is not finite is null in metrics.jsonl, a dash on the console and left out of MLflow, with one warning per name.
        """
        if self._closed:
            raise ValueError(f"step {step} is logged after the tracker was closed")
        if step < self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; steps do not go back")
        if reserved := [name for name in _RESERVED if name in metrics]:
            raise ValueError(f"a metric cannot be called {reserved[0]!r}, which every line has by itself; rename it")
        now = time.monotonic()
        values = {name: self._finite(name, float(value)) for name, value in metrics.items()}
        line = {"step": step, "elapsed_s": round(self._elapsed_before + now - self._started, 3), **values}
        self._file.write(f"{json.dumps(line, allow_nan=False)}\n")
        self._file.flush()
        self._mlflow.put(_row_of(line))
        self._console.step(step, values, self._eta(step, now, values.get("time/step")))
        self._last_step = step

    def say(self, text: str) -> None:
        """A line on the console and in console.log that is no step."""
        self._console.say(text)

    def artifact(self, path: Path) -> None:
        """Send a file or the files of a folder to MLflow, in the background."""
        self._mlflow.put(_Artifact(path, path.name if path.is_dir() else None))

    def close(self, status: Status) -> None:
        """Send what is left and end the MLflow run: within 30 s, or half the grace period of a stop. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        self._mlflow.finish(status, CLOSE_DEADLINE_S if status == "FINISHED" else min(CLOSE_DEADLINE_S, self._grace_s / 2))
        self._file.close()
        self._console.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def _finite(self, name: str, value: float) -> float | None:
        if math.isfinite(value):
            return value
        if name not in self._warned:
            self._warned.add(name)
            log.warning("metric %s is %s; recorded as null (said once)", name, value)
        return None

    def _eta(self, step: int, now: float, step_s: float | None) -> float | None:
        """Steps left times the mean of the last steps' seconds; the first step goes by its own ``time/step``."""
        if self._last_change is not None and step > self._last_change[0]:
            self._pace.append((now - self._last_change[1]) / (step - self._last_change[0]))
        if self._last_change is None or step > self._last_change[0]:
            self._last_change = (step, now)
        pace = sum(self._pace) / len(self._pace) if self._pace else step_s
        return None if pace is None else max(self._num_steps - step, 0) * pace


def _row_of(line: Mapping[str, Any]) -> _Row:
    metrics = {name: value for name, value in line.items() if name not in _RESERVED and value is not None}
    return _Row(line["step"], time.time_ns() // 1_000_000, metrics)


def _first_items(config: RunConfig, run_dir: Path, history: Iterable[Mapping[str, Any]]) -> Iterator[_Item]:
    yield _Params(flatten(config.model_dump(mode="json")))
    yield _Artifact(run_dir / "config.yaml")
    yield from map(_row_of, history)
