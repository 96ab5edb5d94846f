"""``tandem publish``: a run's metrics in Weights & Biases or TensorBoard, during the run or after it.

It reads the run folder alone, and works on any machine that sees it: a login node has the network that a compute node
may lack.
"""

import fcntl
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import get_args

from configs.loader import load_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.commands.status import brief_state
from launch.processes.run_folder import WITHOUT_LOCKS, RunFolder
from trainer.tracking.mlflow_thread import Status
from trainer.tracking.publisher import ServiceName, missing_package
from trainer.tracking.services import Service, ServiceError, TensorBoardService, WandbService, publish

LOOK_EVERY_S = 2.0
"""Seconds between two looks at the metrics."""
ASK_EVERY_S = 30.0
"""Seconds between two questions whether the run goes on, which may go to Slurm."""
GOES_ON = ("running", "waiting", "unknown")
SERVICES: dict[str, ServiceName] = {name: name for name in get_args(ServiceName)}
STATUSES: dict[str, Status] = {status: status for status in get_args(Status)}


def publish_run(
    folder: RunFolder, to: str, *, project: str | None, entity: str | None, follow: bool, until_told: bool
) -> None:
    """Copy the run's metrics to the service ``to``.

    until_told: go on until standard input says how the run has ended, or ends. A learner starts it so.
    Raises BadInput for a run or a service that cannot be used.
    """
    service = SERVICES.get(to)
    if service is None:
        raise BadInput(f"--to {to}: there is no such service; choose {' or '.join(SERVICES)}")
    if problem := missing_package(service):
        raise BadInput(f"--to {service} {problem}")
    if service != "wandb" and (project or entity):
        raise BadInput(f"--project and --entity are of W&B; leave them out with --to {service}")
    config = load_config(folder.config, [])
    metrics = folder.path / "metrics.jsonl"
    if not isinstance(config, RunConfig) or folder.request.exists():
        raise BadInput(f"RUN: {folder.path} is no training run, and has no metrics to copy")
    if not (metrics.exists() or follow or until_told):
        state = f"`tandem status {folder.path}` shows its state"
        raise BadInput(f"RUN: {folder.path} has no metrics yet; {state}, and --follow waits for them")
    wait = partial(_status_of, folder)
    if until_told:
        wait = _told
        for number in (signal.SIGINT, signal.SIGTERM):  # they are the learner's, which tells
            signal.signal(number, signal.SIG_IGN)
    elif follow:
        wait = _followed(folder)
    with _alone(folder, service, waits=until_told):
        try:
            publish(_service(service, folder, config, project, entity), metrics, wait, _say)
        except ServiceError as error:
            print(f"tandem: {error}", file=sys.stderr)
            raise SystemExit(1) from error


@contextmanager
def _alone(folder: RunFolder, service: ServiceName, *, waits: bool) -> Iterator[None]:
    """Inside, no other process copies the run to the service: both would begin anew. A resumed run ``waits`` for the end of
    the copy before it. Raises BadInput."""
    with (folder.path / f".publish-{service}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError as error:
            how = f"{folder.logs / f'publish-{service}.log'} has its output where the run itself started it"
            raise BadInput(f"RUN: another process copies {folder.path} to {service}; {how}") from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield


def _service(
    name: ServiceName, folder: RunFolder, config: RunConfig, project: str | None, entity: str | None
) -> Service:
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
    """How the run has ended; one that goes on has been left by the copy."""
    state = brief_state(folder)
    return "FINISHED" if state == "finished" else "FAILED" if state == "failed" else "KILLED"


def _followed(folder: RunFolder) -> Callable[[], Status | None]:
    """Waits a moment, and gives the status once the run has ended, or at Ctrl-C."""
    ask_at = time.monotonic()

    def wait() -> Status | None:
        nonlocal ask_at
        try:
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_EVERY_S
                if not brief_state(folder).startswith(GOES_ON):
                    return _status_of(folder)
            time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            return "KILLED"
        return None

    return wait


def _told() -> Status | None:
    """Waits a moment for what standard input says."""
    if not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
        return None
    return STATUSES.get(sys.stdin.readline().strip(), "FAILED")
