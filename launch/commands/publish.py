"""``tandem publish``: a run's metrics in Weights & Biases or TensorBoard, during the run or after it.

It reads only the run folder, and works on any machine that sees it, such as a login node: compute nodes often have no
network.
"""

import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import get_args

from configs.loader import load_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.commands.status import brief_state
from launch.processes.locks import WithoutLocks, locked
from launch.processes.run_folder import RunFolder
from rollout.terminal_text import tandem_command
from trainer.tracking.mlflow_thread import Status
from trainer.tracking.publisher import ServiceName, missing_package
from trainer.tracking.services import ServiceError, TensorBoardService, WandbService, publish

LOOK_EVERY_S = 2.0
"""Seconds between two looks at the metrics."""
ASK_EVERY_S = 30.0
"""Seconds between two checks whether the run is still active; a check may ask Slurm."""
ENDED = ("finished", "failed", "stopped")
"""States that another machine sees too."""
STATUSES: dict[str, Status] = {status: status for status in get_args(Status)}


def publish_run(
    folder: RunFolder,
    service: ServiceName,
    *,
    project: str | None,
    entity: str | None,
    follow: bool,
    until_told: bool,
) -> None:
    """Copy the run's metrics to the service.

    until_told: continue until standard input says how the run has ended, or ends. A learner starts the command like this.
    Raises BadInput for a run or a service that cannot be used.
    """
    if problem := missing_package(service):
        raise BadInput(f"--to {service} {problem}")
    if service != "wandb" and (project or entity):
        raise BadInput(f"--project and --entity belong to W&B; leave them out with --to {service}")
    config = load_config(folder.config)
    metrics = folder.metrics
    if not isinstance(config, RunConfig) or folder.request.exists():
        raise BadInput(f"RUN: {folder.path} is no training run, and has no metrics to copy")
    if not (metrics.exists() or follow or until_told):
        state = f"`{tandem_command('status', folder.path)}` shows its state"
        raise BadInput(f"RUN: {folder.path} has no metrics yet; {state}, and --follow waits for them")
    if until_told:
        wait = _told
        for number in (signal.SIGINT, signal.SIGTERM):  # the learner handles them, and tells this process
            signal.signal(number, signal.SIG_IGN)
    else:
        wait = _followed(folder, _interrupted()) if follow else partial(_status_of, folder)
    with _alone(folder, service, waits=until_told):
        try:
            publish(_service(service, folder, config, project, entity), metrics, wait, _say)
        except (ServiceError, OSError) as error:
            text = f"{str(error).rstrip('.')}. Run the same command again: it copies from the start"
            print(f"tandem: {text}", file=sys.stderr)
            raise SystemExit(1) from error


def _interrupted() -> threading.Event:
    """Set by the first Ctrl-C, so that the copy is closed in order. A second Ctrl-C ends the process."""
    event = threading.Event()

    def note(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    return event


@contextmanager
def _alone(folder: RunFolder, service: ServiceName, *, waits: bool) -> Iterator[None]:
    """While entered, no other process copies the run to the service, since both would copy from the start. The process of a
    run ``waits`` for the end of another copy, or of the run. Raises BadInput."""
    lock, has_said = None, False
    while lock is None:
        try:
            lock = locked(folder.path / f".publish-{service}.lock")
        except WithoutLocks:
            lock = nullcontext()
        except ValueError as error:
            raise BadInput(f"RUN: {error}") from error
        except BlockingIOError:
            how = f"if the run itself started it, its output is in {folder.logs / f'publish-{service}.log'}"
            problem = f"another process copies {folder.path} to {service}; {how}"
            if not waits:
                raise BadInput(f"RUN: {problem}") from None
            if not has_said:
                _say(problem)
            has_said = True
            if _told() is not None:
                raise SystemExit(0) from None  # the other process has copied the whole run
    with lock:
        yield


def _service(
    name: ServiceName, folder: RunFolder, config: RunConfig, project: str | None, entity: str | None
) -> TensorBoardService | WandbService:
    if name == "tensorboard":
        return TensorBoardService(folder.path, say=_say)
    wandb = config.tracking.wandb
    return WandbService(
        folder.path,
        project=project or (wandb and wandb.project) or config.tracking.experiment,
        entity=entity or (wandb and wandb.entity) or None,
        say=_say,
    )


def _say(text: str) -> None:
    print(text, flush=True)


def _status_of(folder: RunFolder) -> Status:
    """How the run has ended; if it is still active, the copy has left it."""
    state = brief_state(folder)
    return "FINISHED" if state == "finished" else "FAILED" if state == "failed" else "KILLED"


def _followed(folder: RunFolder, interrupted: threading.Event) -> Callable[[], Status | None]:
    """Waits a moment, and returns the status once the run has ended, or after Ctrl-C. Another machine cannot see that a run
    was killed."""
    ask_at = time.monotonic()
    _say("following the run; Ctrl-C ends the copy, not the run")

    def wait() -> Status | None:
        nonlocal ask_at
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + ASK_EVERY_S
            if brief_state(folder).startswith(ENDED):
                return _status_of(folder)
        return "KILLED" if interrupted.wait(LOOK_EVERY_S) else None

    return wait


def _told() -> Status | None:
    """Waits a moment for a status on standard input."""
    if not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
        return None
    return STATUSES.get(sys.stdin.readline().strip(), "FAILED")
