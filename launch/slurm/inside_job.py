"""The supervisor inside a Slurm job: the batch script of ``tandem slurm`` becomes ``python -m launch job
RUN``.

    nodes of the job           steps, each with its log in RUN/logs
    the first of the learner   learn-0: a torchrun, where those of the others meet; and beside it sample
    the others of the learner  learn-1, ...
    those of the servers       serve-0, serve-1, ...

    what ends it                                     what follows
    the run has done all its steps                   exit code 0
    SIGUSR1: the time limit or a pre-emption nears   stopped with a checkpoint, then `scontrol requeue`; where the notice was too short
                                                     for a checkpoint, as after a failure
    SIGTERM: pre-emption, requeue or scancel         stopped with a checkpoint, exit code 75; Slurm starts it again where it means to
    a role fails                                     `scontrol requeue`, launch.slurm.max_restarts times without a newer checkpoint
                                                     in between, each a little later than the last; then exit
                                                     code 1
    bad input                                        exit code 2: it would fail again

SIGTERM to an ``srun`` kills its step at once, which is how servers are ended. Where Slurm itself ends a job,
it sends SIGTERM to every process of every step, and SIGKILL after its KillWait (30 s by default): until then
the roles hold out (``roles.IN_JOB``), and the learner writes its checkpoint.

By hand: ``scancel --batch --signal=USR1 JOB`` stops and requeues, ``scancel JOB`` stops for good. (Without
``--batch`` a signal goes to the steps, past this supervisor.)
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.schema import RunConfig
from launch.checks.config import BadInput
from launch.commands import train as training
from launch.processes import stopping
from launch.processes.addresses import free_port, own_address
from launch.processes.placement import gpus_of_node, learner_ranks_per_node, num_nodes, serve_roles
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Interrupted, Role, RoleFailed, Supervisor
from launch.roles import start
from launch.roles import table as roles
from launch.slurm import job as jobs
from launch.slurm.job import Job

ECHO_EVERY_S = 0.5
STEP_TIMEOUT_S = 120
"""For Slurm to begin a step; by default an ``srun`` asks for ever."""
LOCK_TIMEOUT_S = 120.0
"""For the lock of a node that has died."""
SEEN_TIMEOUT_S = 60.0
"""For a file of another node to be seen: clients of NFS remember for as long that it did not exist."""
END_MARGIN_S = 30.0
"""Of the notice: for ending every process and asking for the requeue."""


def run_job(run: Path) -> int:
    """Do what the run folder says, on the nodes of this job; returns the exit code.

    Raises BadInput and ConfigError where there is no use in trying again.
    """
    folder = start.existing_run(run)
    try:
        config = roles.config_of(folder)
    except ValueError as error:
        raise BadInput(str(error)) from error
    assert isinstance(config, RunConfig)  # as config_of promises
    try:
        job = Job.of_environment()
    except RuntimeError as error:
        raise RoleFailed(str(error)) from error
    if jobs.is_finished(folder, config):
        print(f"{folder.path} is finished; nothing is left to do", flush=True)
        return 0
    _check(job, folder, config)
    try:
        steps = job_steps(folder, config, job)
    except ValueError as error:
        raise BadInput(f"RUN: {folder.path}: {error}") from error
    with Signals() as signals:
        job.record(folder)
        print(
            f"run {folder.path}, job {job.id} (start {job.restart + 1}) on {' '.join(job.nodes)}", flush=True
        )
        print(f"logs of its steps: {' '.join(str(role.log) for role in steps)}", flush=True)
        try:
            outcome = _supervise(folder, config, steps, pause_s=jobs.pause_s(folder) if job.restart else 0.0)
        except (Interrupted, RoleFailed) as error:
            outcome = error
        if isinstance(outcome, stopping.Finished):
            outcome = _outcome_seen(folder, config)
        if not isinstance(outcome, stopping.Finished):
            return _after(folder, config, job, outcome, signals.received())
        training.print_result(folder, config)
        return 0


def _outcome_seen(folder: RunFolder, config: RunConfig) -> stopping.Outcome | RoleFailed:
    """The learner has ended well: finished, or stopped. Its last words may come from another node, and take
    their time to be seen here."""
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while time.monotonic() < deadline:
        if (stopped := stopping.read_stopped(folder)) is not None:
            return stopped
        if jobs.is_finished(folder, config):
            return stopping.Finished()
        time.sleep(ECHO_EVERY_S)
    return RoleFailed(
        f"the learner ended without an error, but left no results in {folder.path}; do all nodes share its file system?"
    )


def _check(job: Job, folder: RunFolder, config: RunConfig) -> None:
    nodes = config.launch.nodes
    if len(job.nodes) != num_nodes(config):
        wanted = f"{nodes.learner} + {nodes.rollout} nodes" if nodes is not None else "one node"
        raise BadInput(
            f"launch.nodes: the run takes {wanted}, but job {job.id} has {len(job.nodes)} "
            f"({' '.join(job.nodes)}); make the script anew with `tandem slurm {folder.config} resume={folder.path}`"
        )
    other = jobs.running_elsewhere(folder, job)
    if other is not None:
        raise BadInput(
            f"RUN: {folder.path} is being run by job {other}; wait for it, or end it with `scancel {other}`"
        )
    _claim(folder, may_be_our_own=job.restart > 0 and jobs.recorded(folder) in job.names)


def _claim(folder: RunFolder, *, may_be_our_own: bool) -> None:
    """An earlier life of this job, whose node has died, may hold the folder until the shared file system
    gives its locks up."""
    deadline = time.monotonic() + (LOCK_TIMEOUT_S if may_be_our_own else 0.0)
    while True:
        try:
            return folder.claim()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                said = f"RUN: {folder.path} is being run by another process; wait for it, or stop it first"
                raise (RoleFailed(said) if may_be_our_own else BadInput(said)) from None
        except ValueError as error:
            raise BadInput(f"RUN: {error}") from error
        time.sleep(ECHO_EVERY_S)


def _supervise(
    folder: RunFolder, config: RunConfig, steps: Sequence[Role], *, pause_s: float
) -> stopping.Outcome:
    notice_s = config.launch.slurm.notice_s
    ending = stopping.ending(folder)
    with (
        Supervisor(grace_s=config.launch.stop_grace_s, ending=ending) as supervisor,
        stopping.StopSignals(folder) as signals,
    ):
        if pause_s > 0:
            print(f"starting in {pause_s:.0f} s: the last start left no checkpoint", flush=True)
            time.sleep(pause_s)  # a signal ends it, as it does everything here
        for role in steps:
            supervisor.start(role)
        with echoed(folder.path / "console.log"), training.causes_told(folder, config, supervisor):
            return stopping.wait_for_learner(
                supervisor,
                signals,
                names=[role.name for role in steps if role.name.startswith("learn")],
                timeout_s=min(config.launch.stop_timeout_s, max(notice_s - END_MARGIN_S, notice_s / 2)),
            )


def job_steps(folder: RunFolder, config: RunConfig, job: Job) -> list[Role]:
    """Every role of the run as a step of the job."""
    nodes, env = config.launch.nodes, start.environment(config) | {roles.IN_JOB: "1"}
    # On one node all three share its GPUs, of which the learner has the first.
    learners, servers = (
        (job.nodes[: nodes.learner], job.nodes[nodes.learner :])
        if nodes is not None
        else (job.nodes, job.nodes)
    )
    gpus = gpus_of_node(config)

    def step(name: str, host: str, command: Sequence[str], *, gpus: int, error: str) -> Role:
        command = [*_srun(name, host, config, gpus=gpus), *command]
        return Role(
            name=name, command=command, log=folder.logs / f"{name}.log", error=folder.error(error), env=env
        )

    serve = [
        step(name, host, roles.command("serve", folder, node=i), gpus=gpus, error=name)
        for i, (name, host) in enumerate(zip(serve_roles(config), servers, strict=True))
    ]
    sample = step("sample", learners[0], roles.command("sample", folder), gpus=0, error="sample")
    learn = [
        step(f"learn-{i}", host, command, gpus=gpus, error="learn")
        for i, (host, command) in enumerate(zip(learners, _torchruns(folder, config, job), strict=True))
    ]
    return [*serve, sample, *learn]


def _torchruns(folder: RunFolder, config: RunConfig, job: Job) -> list[list[str]]:
    """For each node of the learner. The first, which this process is on, is where the others meet it."""
    nodes, ranks = config.launch.nodes, learner_ranks_per_node(config)
    if nodes is None or nodes.learner == 1:
        return [roles.command("learn", folder, ranks=ranks)]
    addresses = [own_address(nodes), *(_address(host) for host in job.nodes[1 : nodes.learner])]
    endpoint, label = f"{addresses[0]}:{free_port(addresses[0])}", f"{job.id}-{job.restart}"
    timeout_s = config.launch.start_timeout_s
    meetings = [
        roles.Rendezvous(
            nodes=nodes.learner,
            endpoint=endpoint,
            id=label,
            timeout_s=timeout_s,
            is_host=i == 0,
            address=address,
        )
        for i, address in enumerate(addresses)
    ]
    return [roles.command("learn", folder, ranks=ranks, rendezvous=meeting) for meeting in meetings]


def _address(host: str) -> str | None:
    """Of another node, as this one knows it; None where its name is known to Slurm alone."""
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return None


def _srun(name: str, host: str, config: RunConfig, *, gpus: int) -> list[str]:
    """Of a step on one node. ``--overlap``, and all CPUs: by default a step has one, and waits until others
    leave it some."""
    slurm = config.launch.slurm
    options = {
        "nodes": "1",
        "ntasks": "1",
        "nodelist": host,
        "job-name": name,
        "export": "ALL",
        "cpu-bind": "none",
        "mem": "0",
        "kill-on-bad-exit": "1",
        "immediate": str(STEP_TIMEOUT_S),
        "container-image": slurm.container,
        "container-mounts": slurm.container_mounts,
    }
    if gpus_of_node(config):
        options["gres"] = f"gpu:{gpus}" if gpus else "none"
    return [
        "srun",
        "--overlap",
        *(f"--{option}={value}" for option, value in options.items() if value is not None),
    ]


# ---------------------------------------------------------------------------------------------------------------
# what comes after


def _after(
    folder: RunFolder,
    config: RunConfig,
    job: Job,
    what: stopping.Stopped | Interrupted | RoleFailed,
    signals: frozenset[signal.Signals],
) -> int:
    """Of a start that did not finish the run: the exit code, once the job is requeued where it is to go on."""
    failed, limit = isinstance(what, RoleFailed), config.launch.slurm.max_restarts
    _say(_words(what))
    if signal.SIGTERM in signals:
        _say(f"Slurm ends this job; unless it has requeued it, go on with `{_by_hand(folder)}`")
        return os.EX_TEMPFAIL
    without_checkpoint = failed or isinstance(what, Interrupted)
    if without_checkpoint and (failed or signal.SIGUSR1 in signals) and not jobs.may_restart(folder, limit):
        cause = (
            "mend the cause"
            if failed
            else "raise launch.slurm.notice_s above the time of an update and a checkpoint"
        )
        _say(f"{limit + 1} starts have ended without a newer checkpoint (launch.slurm.max_restarts={limit}): this job is not requeued; "
             f"{cause}, then go on with `{_by_hand(folder)}`")  # fmt: skip
    elif failed or signal.SIGUSR1 in signals:
        _requeue(folder, job)
    else:
        _say(f"go on with `{_by_hand(folder)}`")
    return 1 if failed else os.EX_TEMPFAIL


def _words(what: stopping.Stopped | Interrupted | RoleFailed) -> str:
    if isinstance(what, stopping.Stopped):
        return f"stopped after step {what.step} on request ({what.reason})"
    return str(what) or "stopped before a checkpoint could be written; every process of the run has ended"


def _by_hand(folder: RunFolder) -> str:
    script = folder.path / "train.sbatch"
    if script.exists():  # an element of an array has none of its own
        return f"sbatch {script}"
    again = f" resume={folder.path}" if folder.newest_checkpoint() is not None else ""
    return f"tandem slurm {folder.config}{again} --submit"


def _requeue(folder: RunFolder, job: Job) -> None:
    try:
        job.requeue()
    except RuntimeError as error:
        _say(f"{error}; go on with `{_by_hand(folder)}`")
    else:
        _say(f"job {job.id} is requeued, and goes on from the newest checkpoint")


def _say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)


class Signals:
    """Which signals this process has got, whoever handles them: the supervisor's handlers come and go. A
    context manager."""

    def __enter__(self) -> "Signals":
        self._received: set[signal.Signals] = set()
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        return self

    def received(self) -> frozenset[signal.Signals]:
        with contextlib.suppress(BlockingIOError):
            self._received |= {signal.Signals(number) for number in os.read(self._out, 4096)}
        return frozenset(self._received)

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._out)
        os.close(self._in)


@contextlib.contextmanager
def echoed(path: Path) -> Iterator[None]:
    """Meanwhile print what is added to a file that another host writes."""
    over = threading.Event()

    def follow(position: int) -> None:
        last = False
        while not last:
            last = over.wait(ECHO_EVERY_S)  # once more then: the last lines
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(position)
                text = file.read()
                position += len(text)
                print(text.decode(errors="replace"), end="", flush=True)

    thread = threading.Thread(
        target=follow, args=(path.stat().st_size if path.exists() else 0,), name="echo", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10 * ECHO_EVERY_S)
