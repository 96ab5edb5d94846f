"""MLflow, in a thread of its own. Training waits for it only at the end of a run, and then for seconds.

Only this thread imports or calls MLflow: the import and the creation of the sqlite store take seconds, a
`log_batch` 10 ms and more, and a remote server may not answer at all. Queued items are then sent again every
RETRY_S seconds; items past QUEUE_SIZE are dropped. Each kind of problem is logged once, and training continues.

    training loop ── put(item) ──> queue ──> `tracking` thread: open the run, send in order, retry ──> MLflow
                  ── finish(status, deadline) ──> the thread sends what is left and ends; joined for at most
                  the deadline
"""

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.reading.files import text_of
from configs.schema import RunConfig
from configs.schema.base import without_credentials
from trainer.file_system import mount_of, open_lock
from trainer.tracking.provenance import provenance

Status = Literal["FINISHED", "FAILED", "KILLED"]
log = logging.getLogger(__name__)

COMPLETE_UNTIL = "tandem.complete_until"
"""Tag of a run that was closed in order: it has every metric up to this step, and none of a later one."""
STORE, ARTIFACTS = "mlflow.db", "mlartifacts"
LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems with the kernel's own locks. No other file system is trusted."""
QUEUE_SIZE = 2000
RETRY_S = 30.0

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the thread retries by itself
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set unless the user has set them."""


def tracking_uri(config: RunConfig, run_dir: Path) -> str:
    """``tracking.uri``, else MLFLOW_TRACKING_URI, else the sqlite store of ``store_file``."""
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_uri(run_dir)


def _own_uri(run_dir: Path) -> str:
    """URI of the sqlite store. A ``?`` in the path would begin the URI's query, and a ``%`` an encoded letter."""
    return f"sqlite:///{store_file(run_dir)}".replace("%", "%25").replace("?", "%3F")


def store_file(run_dir: Path) -> Path:
    """The sqlite store: ``mlflow.db`` in the folder of the run folders, shared by all runs there.

    Runs write to it at the same time under sqlite's lock, which waits 20 s. The run has its own store in three cases:
    it has one already; it may not write to the folder above or to the store there, which may be another user's; the
    file system is a network's, whose locks sqlite cannot trust.
    """
    run_dir = run_dir.resolve()
    own, shared = run_dir / STORE, run_dir.parent / STORE
    lock = _lock_of(shared)
    parts = (run_dir.parent, *filter(os.path.lexists, (shared, lock, shared.with_name(ARTIFACTS))))
    safe = file_system_of(run_dir.parent) in LOCAL_FILE_SYSTEMS and not lock.is_symlink()
    return shared if safe and not own.exists() and all(os.access(part, os.W_OK) for part in parts) else own


def _lock_of(store: Path) -> Path:
    return store.with_suffix(".lock")


def file_system_of(folder: Path) -> str:
    """Type of the folder's file system as the kernel names it (ext4, nfs4); "" if unknown."""
    try:
        _, mount = mount_of(folder)
    except OSError:
        return ""
    kind = re.search(r" - (\S+)", mount)
    return kind[1] if kind else ""


def mlflow_name(name: str) -> str:
    """A name that MLflow accepts: a clean relative path of up to 250 word characters and ``_-. /``."""
    parts = [part for part in re.sub(r"[^\w\-. /]", "_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:250].rstrip("/") or "unnamed"


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of one step."""

    step: int
    timestamp_ms: int
    metrics: Mapping[str, float]


Params = dict[str, str]
"""The run's config as dotted names and text."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file, or a folder with its content, for ``folder`` of the store (None: its root)."""

    path: Path
    folder: str | None = None


Item = Row | Params | Artifact


@dataclass(frozen=True, slots=True)
class Problem:
    """Why MLflow does not have everything, for the console; the log has every warning."""

    kind: Literal["outage", "ended", "unfinished"]
    """outage: sent again later. ended: nothing is sent any more. unfinished: the run ends, and something is not sent."""
    text: str


class MlflowThread(threading.Thread):
    """Sends items to MLflow in order. ``put`` never waits; ``finish`` waits up to its deadline.

    first: the content of the run folder, sent before anything else and not counted against the queue's size.
    tags: of the MLflow run.
    """

    METRICS_PER_BATCH = 1000
    PARAMS_PER_BATCH = 100
    PARAM_LENGTH = 6000

    def __init__(self, config: RunConfig, run_dir: Path, first: Sequence[Item], tags: Mapping[str, str]):
        # daemon: a server that hangs must not keep the process alive
        super().__init__(name="tracking", daemon=True)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._uri, self._tags = tracking_uri(config, run_dir), dict(tags)
        self._config, self._run_dir = config, run_dir
        self._changed = threading.Condition()
        self._items: deque[Item] = deque(first)  # guarded by _changed; only this thread removes items
        self._first = list(first)
        self._most_items = len(first) + QUEUE_SIZE
        self._last_step: int | None = None
        self._status: Status | None = None
        self._client: Any = None
        self._run_id: str | None = None
        self._next_attempt = 0.0
        self._warned: set[str] = set()
        self._num_dropped = 0
        self.problem: Problem | None = None
        """Of the last attempt to send."""

    # ---- called by the training loop

    def put(self, item: Item) -> None:
        with self._changed:
            room = len(self._items) < self._most_items
            if room:
                self._items.append(item)
                self._changed.notify()
            else:
                self._num_dropped += 1
        if not room:
            message = "MLflow is %d items behind; later ones are dropped (metrics.jsonl has every one)"
            self._warn_once("full", message, QUEUE_SIZE)

    def finish(self, status: Status, deadline_s: float) -> Problem | None:
        """Send the rest and set the status of the run, in at most ``deadline_s`` seconds. Returns why this failed."""
        with self._changed:
            self._status = status
            self._changed.notify()
        self.join(deadline_s)
        if not self.is_alive():
            return self.problem
        text = (
            f"MLflow at {self._shown_uri} did not take everything within {deadline_s:.0f} s; {self._lacking}"
        )
        log.warning("%s", text)
        return Problem("unfinished", text)

    @property
    def _lacking(self) -> str:
        """What a run that ends leaves behind."""
        number = len(self._items) + self._num_dropped
        items = f"{number} items and " if number else ""
        return f"metrics.jsonl has every metric, and MLflow lacks {items}the status of this run"

    # ---- the thread

    def run(self) -> None:
        try:
            self._send_until_finished()
        except Exception as error:
            # The thread's boundary: an error of MLflow or a storage plugin must not end training.
            then = "training continues, and metrics.jsonl has every metric"
            if self._status is not None:
                then = self._lacking
            self.problem = Problem("ended", f"MLflow tracking ended ({_shortened(error)}); {then}")
            log.error("%s\n%s", self.problem.text, without_credentials(traceback.format_exc()))

    def _send_until_finished(self) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        closing = False
        while not closing:
            closing = self._wait_for_work()
            try:
                self._send_all(MlflowException)
                if closing:
                    if not self._warned & {"full", "rejected"}:
                        self._client.set_tag(self._run_id, COMPLETE_UNTIL, str(self._last_step))
                    self._client.set_terminated(self._run_id, self._status)
                self._warned.discard("unreachable")
                self.problem = None
            except (MlflowException, SQLAlchemyError, OSError) as error:
                self._next_attempt = time.monotonic() + RETRY_S
                failed = f"MLflow at {self._shown_uri}: {_shortened(error)}"
                if closing:
                    self.problem = Problem("unfinished", f"{failed}; {self._lacking}")
                    log.warning("%s", self.problem.text)
                else:
                    later = "training continues, and MLflow is tried again later"
                    self.problem = Problem("outage", f"{failed}; {later}")
                    self._warn_once("unreachable", "%s", self.problem.text)

    def _wait_for_work(self) -> bool:
        """Wait until there are items and the time to (re)try has come. True if the run ends instead."""
        with self._changed:
            while self._status is None:
                left_s = self._next_attempt - time.monotonic()
                if self._items and left_s <= 0:
                    return False
                self._changed.wait(left_s if self._items else None)
            return True

    def _send_all(self, rejected: type[Exception]) -> None:
        if self._run_id is None:
            # Another user's first run may have made the shared store in the meantime.
            self._uri, self._client = tracking_uri(self._config, self._run_dir), None
            with self._others_kept_out():
                self._open_run()
            self._first = []  # may be long after a resume, and the queue has what is still to be sent
        while batch := self._next_batch():
            try:
                self._send(batch)
            except rejected as error:
                if not _is_refusal(error):
                    raise
                message = "MLflow refused a record, which is left out there: %s"
                self._warn_once("rejected", message, _shortened(error))
            with self._changed:
                for _ in batch:
                    self._items.popleft()

    def _next_batch(self) -> list[Item]:
        """The next item, with the following rows that fit into the same request; empty if nothing is left."""
        batch: list[Item] = []
        num_metrics = 0
        with self._changed:
            for item in self._items:
                # At least 1: a row without a number is never in one request with a file.
                num_metrics += max(len(item.metrics), 1) if isinstance(item, Row) else self.METRICS_PER_BATCH
                if batch and num_metrics > self.METRICS_PER_BATCH:
                    break
                batch.append(item)
        return batch

    def _send(self, batch: Sequence[Item]) -> None:
        from mlflow.entities import Metric, Param

        first = batch[0]
        if isinstance(first, Artifact):
            if first.path.exists():
                send = self._client.log_artifacts if first.path.is_dir() else self._client.log_artifact
                send(self._run_id, str(first.path), first.folder)
            else:
                self._warn_once(str(first.path), "artifact %s does not exist", first.path)
        elif isinstance(first, dict):
            params = [Param(name, value) for name, value in self._as_stored(first).items()]
            for chunk in _chunks(params, self.PARAMS_PER_BATCH):
                self._client.log_batch(self._run_id, params=chunk)
        else:
            rows = [item for item in batch if isinstance(item, Row)]
            self._last_step = rows[-1].step
            metrics = [
                Metric(mlflow_name(k), v, row.timestamp_ms, row.step)
                for row in rows
                for k, v in row.metrics.items()
            ]
            for chunk in _chunks(metrics, self.METRICS_PER_BATCH):
                self._client.log_batch(self._run_id, metrics=chunk)

    def _as_stored(self, config: Params) -> Params:
        return {mlflow_name(name): value[: self.PARAM_LENGTH] for name, value in config.items()}

    def _open_run(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        id_file = self._run_dir / "mlflow_run_id"
        if self._continue_previous(id_file):
            return
        name = f"{self._run_dir.resolve().name} seed {self._config.seed}"
        run = self._client.create_run(
            self._experiment_id(), run_name=name, tags={**provenance(), **self._tags}
        )
        self._run_id = run.info.run_id
        id_file.write_text(run.info.run_id, encoding="utf-8")

    @contextlib.contextmanager
    def _others_kept_out(self) -> Iterator[None]:
        """Of several runs that start together, only one makes the tables of a shared sqlite store."""
        if self._uri != _own_uri(self._run_dir):
            yield
            return
        with open_lock(_lock_of(store_file(self._run_dir))) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.engine import make_url

        name = self._config.tracking.experiment
        if experiment := self._client.get_experiment_by_name(name):
            return experiment.experiment_id
        location = None  # a server has its own
        if self._uri.startswith("sqlite:///"):  # beside the database, not in the current folder
            location = (Path(make_url(self._uri).database or "").resolve().parent / ARTIFACTS).as_uri()
        try:
            return self._client.create_experiment(name, artifact_location=location)
        except MlflowException:
            if experiment := self._client.get_experiment_by_name(name):  # another run was first
                return experiment.experiment_id
            raise

    def _continue_previous(self, id_file: Path) -> bool:
        """Whether to continue the MLflow run of the previous attempt. That run must have stopped in order, with
        exactly the steps that are resumed.

        Otherwise a resumed run becomes a new MLflow run with the whole history: MLflow can neither take back
        steps that run again nor change a param.
        """
        from mlflow.exceptions import MlflowException

        if not id_file.exists():
            return False
        self._tags["tandem.continues_run"] = previous = text_of(id_file).strip()
        try:
            run = self._client.get_run(previous)
        except MlflowException as error:
            if not _is_refusal(error):
                raise  # unreachable: tried again with the rest
            return False
        if run.info.status == "RUNNING":
            self._client.set_terminated(previous, "KILLED")
        if not self._has_exactly_the_first_items(run):
            return False
        self._client.delete_tag(previous, COMPLETE_UNTIL)
        self._client.set_tag(previous, "tandem.resumed_from_step", self._tags["tandem.resumed_from_step"])
        self._client.update_run(previous, status="RUNNING")
        with self._changed:
            for _ in self._first:
                self._items.popleft()
        self._run_id, self._last_step = previous, self._first[-1].step
        return True

    def _has_exactly_the_first_items(self, run: Any) -> bool:
        params = next((self._as_stored(item) for item in self._first if isinstance(item, dict)), None)
        last = self._first[-1] if self._first else None
        return (
            isinstance(last, Row)
            and run.data.tags.get(COMPLETE_UNTIL) == str(last.step)
            and run.data.params == params
        )

    @property
    def _shown_uri(self) -> str:
        return without_credentials(self._uri)

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)


def _is_refusal(error: Any) -> bool:
    """Whether the store understood the request and refused it, so that a retry would not help."""
    code = error.get_http_status_code()
    return 400 <= code < 500 and code not in (408, 429)


def _shortened(error: Exception) -> str:
    text = without_credentials(" ".join(str(error).split()))  # MLflow's errors have the whole address
    return f"{type(error).__name__}: {text[:300]}"


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
