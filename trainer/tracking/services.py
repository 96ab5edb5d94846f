"""Copies of metrics.jsonl in other trackers: Weights & Biases, and TensorBoard's event files.

training loop ──> metrics.jsonl ──> ``publish``, in a process of its own ──> WandbService or TensorBoardService

The process is ``tandem publish``; ``publisher.py`` starts it for a run whose config asks for a copy.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from configs.errors import counted
from configs.reading.files import text_of
from configs.schema.base import without_credentials
from trainer.file_system import write_whole
from trainer.tracking.metrics_file import GrowingMetrics
from trainer.tracking.mlflow_thread import Status

WANDB_RUN = "wandb_run.json"
"""File in the run folder: the id of its run at W&B, and the lines there. It exists if the copy was closed in order."""
Line = dict[str, Any]
"""Of metrics.jsonl: ``step``, ``elapsed_s`` and the metrics."""


class ServiceError(RuntimeError):
    """A service refuses or does not answer."""


def publish(
    service: "WandbService | TensorBoardService",
    metrics: Path,
    wait: Callable[[], Status | None],
    say: Callable[[str], None] = print,
) -> None:
    """Copy all lines of ``metrics``, and those that the run adds. ``wait`` waits a moment; it returns the run's status once
    the run has ended. If a resumed run repeats steps, a new copy begins: no service takes steps back."""
    status: Status | None = None
    growing = GrowingMetrics(metrics)
    lines = growing.read()
    held = service.open(lines)
    sent = lines[:held]
    while True:
        new = added(lines, sent)
        # W&B continues after the last line of an earlier copy, and takes no more metrics of that line.
        if new is None or (new and held == len(sent) and held and new[0]["step"] == sent[-1]["step"]):
            say("steps that were copied have changed: a new copy begins")
            service.close("KILLED", sent)
            held = service.open(lines)
            new = lines[held:]
        for line in new:
            service.log(line)
        sent = lines
        if status is not None:
            service.close(status, sent)
            say(f"copied: {counted(len(sent), 'line')} of {metrics}")
            return
        status = wait()
        lines = growing.read()


def added(lines: Sequence[Line], sent: Sequence[Line]) -> list[Line] | None:
    """The part of ``lines`` that ``sent`` lacks; None if ``lines`` do not hold all of ``sent``."""
    if len(lines) < len(sent) or not all(map(_holds, lines, sent)):
        return None
    new = list(lines[len(sent) :])
    if sent and (names := lines[len(sent) - 1].keys() - sent[-1].keys()):
        last = lines[len(sent) - 1]
        new.insert(0, {name: last[name] for name in ("step", "elapsed_s", *sorted(names)) if name in last})
    return new


def _holds(line: Line, sent: Line) -> bool:
    """An evaluation adds to a line, and moves its ``elapsed_s``."""
    return line is sent or all(
        name in line and line[name] == value for name, value in sent.items() if name != "elapsed_s"
    )


def _measured(line: Line) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step" and value is not None}


class WandbService:
    """A run at Weights & Biases with the run folder's name and config. Nothing that W&B collects by itself goes there: code,
    console, git, command line, variables of Slurm, names and load of the machine, installed packages."""

    def __init__(
        self, run_dir: Path, *, project: str, entity: str | None, say: Callable[[str], None] = print
    ):
        self._dir, self._project, self._entity, self._say = run_dir.resolve(), project, entity, say
        self._file = self._dir / WANDB_RUN
        self._run: Any = None

    def open(self, lines: Sequence[Line]) -> int:
        """``lines``: all so far. Returns how many of them it holds already; 0 for a new copy. Raises ServiceError."""
        import wandb

        held = self._held(lines)
        id_, count = held if held is not None else (None, 0)
        quiet = wandb.Settings(
            console="off", disable_code=True, disable_git=True, silent=True, x_disable_stats=True, x_disable_meta=True,
            x_disable_machine_info=True, x_save_requirements=False, host="", username="", email="",
        )  # fmt: skip
        config = yaml.safe_load(text_of(self._dir / "config.yaml"))
        with _its_errors():
            self._run = wandb.init(
                project=self._project, entity=self._entity, name=self._dir.name,
                id=id_, resume=None if id_ is None else "allow", config=config, dir=self._dir, settings=quiet,
            )  # fmt: skip
        self._file.unlink(missing_ok=True)  # its presence says that the copy was closed in order
        run = self._run
        sync = shlex.join(["wandb", "sync", str(Path(run.dir).parent)])
        self._say(f"W&B: {f'`{sync}`' if run.offline else run.url}")
        return count

    def log(self, line: Line) -> None:
        """Add the next line, or the metrics that an evaluation has added to the last one."""
        with _its_errors():
            self._run.log(_measured(line), step=line["step"])

    def close(self, status: Status, lines: Sequence[Line]) -> None:
        """``lines``: all that were logged."""
        id_ = self._run.id
        with _its_errors():
            # W&B has no state for a run that was stopped and may continue.
            self._run.summary["status"] = status
            self._run.finish(exit_code=int(status == "FAILED"))
        content = {"id": id_, "lines": len(lines), "digest": _digest(lines)}
        write_whole(self._file, json.dumps(content).encode())

    def _held(self, lines: Sequence[Line]) -> tuple[str, int] | None:
        """(id of the run of an earlier copy, number of lines that it holds), if these are the first of ``lines``."""
        try:
            held = json.loads(text_of(self._file))
            id_, count = str(held["id"]), int(held["lines"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return (id_, count) if held.get("digest") == _digest(lines[:count]) else None


@contextmanager
def _its_errors() -> Iterator[None]:
    """Inside, an error of W&B becomes a ServiceError. It may hold the address of a server."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise ServiceError(f"W&B: {without_credentials(' '.join(str(error).split()))}") from error


def _digest(lines: Sequence[Line]) -> str:
    return hashlib.sha256(json.dumps(list(lines), sort_keys=True).encode()).hexdigest()


class TensorBoardService:
    """Event files in RUN/tensorboard, rewritten each time: ``tensorboard --logdir RUNS`` shows all runs."""

    def __init__(self, run_dir: Path, *, say: Callable[[str], None] = print):
        self._dir, self._say = run_dir, say
        self._writer: Any = None
        self._began = 0.0

    def open(self, lines: Sequence[Line]) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._dir / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # The purge makes a running TensorBoard forget the old file.
        self._writer = SummaryWriter(str(folder), purge_step=0)
        config = text_of(self._dir / "config.yaml")
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()))
        last = lines[-1].get("elapsed_s") if lines else None
        newest = (self._dir / "metrics.jsonl").stat().st_mtime if lines else time.time()
        self._began = newest - (last or 0.0)
        self._say(f"TensorBoard: `tensorboard --logdir {shlex.quote(str(self._dir.parent))}`")
        return 0

    def log(self, line: Line) -> None:
        written_at = self._began + (line.get("elapsed_s") or 0.0)
        for name, value in _measured(line).items():
            self._writer.add_scalar(name, value, line["step"], walltime=written_at)
        self._writer.flush()

    def close(self, status: Status, lines: Sequence[Line]) -> None:
        self._writer.close()
