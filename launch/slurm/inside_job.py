"""The supervisor inside a Slurm job. The batch script of ``tandem slurm`` becomes ``python -m launch job RUN``.

    nodes of the job           steps, each with its log in RUN/logs
    the first of the learner   learn-0: a torchrun, where those of the others meet; and beside it sample
    the others of the learner  learn-1, ...
    those of the servers       serve-0, serve-1, ...; colocated, these are the learner's nodes

    what ends it                                     what follows
    the run has done all its steps                   exit code 0
    a failure or a stop after the last step, once    no requeue: only the report is missing
    the model is written
    SIGUSR1: the time limit or a pre-emption nears   stopped with a checkpoint, then `scontrol requeue`; if the time limit or
                                                     its notice was too short for a newer checkpoint, as after a failure
    SIGTERM: pre-emption, requeue or scancel         stopped with a checkpoint, exit code 75; Slurm decides about another start
    a role fails                                     `scontrol requeue`, launch.slurm.max_restarts times without a newer checkpoint
                                                     in between, with growing pauses; then exit code 1
    bad input                                        exit code 2: it would fail again

SIGTERM to an ``srun`` kills its step at once; servers are ended in this way. When Slurm itself ends a job, it
sends SIGTERM to every process of every step, and SIGKILL after its KillWait (30 s by default). Until then the
roles ignore SIGTERM (``command_line.IN_JOB``), and the learner writes its checkpoint.

By hand: ``scancel --batch --signal=USR1 JOB`` stops and requeues, ``scancel JOB`` stops for good. (Without
``--batch`` a signal goes to the steps, past this supervisor.)
"""

import codecs
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from configs.errors import counted
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input
from launch.commands.train import adding_causes, print_message, print_result, without_report
from launch.processes import placement, stopping
from launch.processes.addresses import free_port, own_address
from launch.processes.going_on import job_command, way_on
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Interrupted, Role, RoleFailed, Supervisor
from launch.processes.unheard import go_on_unheard
from launch.roles.command_line import IN_JOB, Rendezvous, role_command
from launch.roles.start import PACKAGE_ROOT, config_of, environment, existing_run
from launch.slurm.job import ASKED_OF_SLURM, Job, count_failed_start, is_finished, pause_s, running_elsewhere
from launch.slurm.script import seconds
from trainer.file_system import SHARED_FOLDER_S

ECHO_EVERY_S = 0.5
STEP_TIMEOUT_S = 120
"""Time for Slurm to begin a step; by default an ``srun`` waits forever."""
LOCK_TIMEOUT_S = 120.0
"""Time for the file system to release the lock of a dead node."""
END_MARGIN_S = 30.0
"""The part of the notice that is for ending every process and for the requeue."""


def run_job(run: Path) -> int:
    """Run the folder's config on the nodes of this job. Returns the exit code.

    Raises BadInput and ConfigError if another start would fail too.
    """
    go_on_unheard()  # a requeued job has its log on the disk that may have filled up
    folder = existing_run(run)
    with as_bad_input():
        config = config_of(folder, RunConfig)
    try:
        job = Job.of_environment()
    except RuntimeError as error:
        raise RoleFailed(str(error)) from error
    for name in ASKED_OF_SLURM:
        os.environ.pop(f"SLURM_{name}", None)
    os.environ.pop("SRUN_CPUS_PER_TASK", None)
    if is_finished(folder, config, note=print_message):
        print(f"{folder.path} is finished; there is nothing left to do", flush=True)
        return 0
    _check(job, folder, config)
    with as_bad_input(f"RUN: {folder.path}: "):
        steps = job_steps(folder, config, job)
    begins_at = folder.newest_checkpoint()
    with Signals() as signals:
        job.record(folder)
        print(f"run {folder.path}, job {job.id} (start {job.restart + 1}) on {' '.join(job.nodes)}")
        print(f"logs of its steps: {' '.join(str(role.log) for role in steps)}", flush=True)
        try:
            outcome = _supervise(folder, config, steps, pause_s(folder) if job.restart else 0.0)
        except (Interrupted, RoleFailed) as error:
            outcome = error
        if isinstance(outcome, stopping.Finished):
            outcome = _wait_for_outcome(folder, config)
        if not isinstance(outcome, stopping.Finished):
            return _requeue_or_end(folder, config, job, outcome, signals.received(), begins_at)
        print_result(folder, config, in_job=True)
        return 0


def _wait_for_outcome(folder: RunFolder, config: RunConfig) -> stopping.Outcome | RoleFailed:
    """The outcome of a learner that has ended well: finished, or stopped. Its last message may come from another
    node, with a delay."""
    deadline = time.monotonic() + SHARED_FOLDER_S
    while time.monotonic() < deadline:
        if (stopped := stopping.read_stopped(folder)) is not None:
            return stopped
        if is_finished(folder, config):
            return stopping.Finished()
        time.sleep(ECHO_EVERY_S)
    error = f"the learner ended without an error, but left no results in {folder.path}"
    return RoleFailed(f"{error}; do all nodes share its file system?")


def _check(job: Job, folder: RunFolder, config: RunConfig) -> None:
    nodes = config.launch.nodes
    if len(job.nodes) != placement.num_nodes(config):
        needed = "one node" if nodes is None else f"{nodes.learner} + {nodes.rollout} nodes"
        if nodes is not None and config.launch.takes_turns:
            needed = f"{counted(nodes.learner, 'node')} (launch.placement=colocated)"
        given = f"job {job.id} has {len(job.nodes)} ({' '.join(job.nodes)})"
        again = f"`{job_command(folder)}` makes a new script"
        raise BadInput(f"launch.nodes: the run takes {needed}, but {given}; {again}")
    try:
        other = running_elsewhere(folder, job)
    except RuntimeError as error:
        raise RoleFailed(f"RUN: {error}") from error
    if other is not None:
        fix = f"wait for it, or end it with `scancel {other}`"
        raise BadInput(f"RUN: {folder.path} is being run by job {other}; {fix}")
    _claim(folder, may_be_our_own=job.restart > 0 and job.is_recorded(folder))


def _claim(folder: RunFolder, *, may_be_our_own: bool) -> None:
    """Claim the folder. An earlier life of this job, whose node has died, may hold it until the shared file system
    releases the lock."""
    deadline = time.monotonic() + (LOCK_TIMEOUT_S if may_be_our_own else 0.0)
    while True:
        try:
            return folder.claim()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                text = f"RUN: {folder.path} is being run by another process; wait for it, or stop it first"
                raise (RoleFailed(text) if may_be_our_own else BadInput(text)) from None
        except ValueError as error:
            raise BadInput(f"RUN: {error}") from error
        time.sleep(ECHO_EVERY_S)


def _supervise(folder: RunFolder, config: RunConfig, steps: Sequence[Role], pause: float) -> stopping.Outcome:
    notice_s, ending = config.launch.slurm.notice_s, stopping.ending(folder)
    stop_timeout_s = min(config.launch.stop_timeout_s, max(notice_s - END_MARGIN_S, notice_s / 2))
    learners = [role.name for role in steps if role.name.startswith("learn")]
    with (
        Supervisor(grace_s=config.launch.stop_grace_s, ending=ending) as supervisor,
        stopping.StopSignals(folder, supervisor) as signals,
    ):
        if pause > 0:
            print(f"starting in {pause:.0f} s, since the last start failed", flush=True)
            time.sleep(pause)  # a signal ends it
        for role in steps:
            supervisor.start(role)
        with echoed(folder.console), adding_causes(folder, config, supervisor):
            restarts = config.rollout.max_sampler_restarts
            return stopping.wait_for_learner(
                supervisor, signals, timeout_s=stop_timeout_s, names=learners, sampler_restarts=restarts
            )


def job_steps(folder: RunFolder, config: RunConfig, job: Job) -> list[Role]:
    """Every role of the run as a step of the job."""
    nodes, env, gpus = config.launch.nodes, _environment(config), placement.gpus_of_node(config)
    # On one node all three share its GPUs, of which the learner has the first.
    learners = job.nodes if nodes is None else job.nodes[: nodes.learner]
    servers = job.nodes[placement.first_server_node(config) :]

    def step(name: str, host: str, command: Sequence[str], *, gpus: int, error: str) -> Role:
        command = [*_srun(name, host, config, gpus=gpus), *_in_container(config, command)]
        log = folder.logs / f"{name}.log"
        return Role(name=name, command=command, log=log, error=folder.error(error), env=env)

    serve = [
        step(name, host, role_command("serve", folder, node=i), gpus=gpus, error=name)
        for i, (name, host) in enumerate(zip(placement.serve_roles(config), servers, strict=True))
    ]
    sample = step("sample", learners[0], role_command("sample", folder), gpus=0, error="sample")
    learn = [
        step(f"learn-{i}", host, command, gpus=gpus, error="learn")
        for i, (host, command) in enumerate(zip(learners, _torchruns(folder, config, job), strict=True))
    ]
    return [*serve, sample, *learn]


def _environment(config: RunConfig) -> dict[str, str]:
    env = environment(config) | {IN_JOB: "1"}
    is_checkout = (PACKAGE_ROOT / "setup.py").is_file()
    if config.launch.slurm.container_python is not None and not is_checkout:
        # An installed Tandem is among the host's packages. These, torch included, would come before the image's.
        env["PYTHONPATH"] = ""
    return env


def _torchruns(folder: RunFolder, config: RunConfig, job: Job) -> list[list[str]]:
    """A command for each node of the learner. They meet at the first node, on which this process runs."""
    nodes, ranks = config.launch.nodes, placement.learner_ranks_per_node(config)
    if nodes is None or nodes.learner == 1:
        return [role_command("learn", folder, ranks=ranks)]
    addresses = [own_address(nodes), *(_address(host) for host in job.nodes[1 : nodes.learner])]
    endpoint, id = f"{addresses[0]}:{free_port(addresses[0])}", f"{job.id}-{job.restart}"
    meetings = [
        Rendezvous(launch=config.launch, endpoint=endpoint, id=id, is_host=i == 0, address=address)
        for i, address in enumerate(addresses)
    ]
    return [role_command("learn", folder, ranks=ranks, rendezvous=meeting) for meeting in meetings]


def _address(host: str) -> str | None:
    """The address of another node, as this one knows it; None if only Slurm knows its name."""
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return None


def _srun(name: str, host: str, config: RunConfig, *, gpus: int) -> list[str]:
    """The srun of a step on one node, with ``--overlap`` and all CPUs: by default a step has one CPU, and waits
    until others leave it some. Its environment must have nothing of ASKED_OF_SLURM."""
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
    }
    if slurm.container is not None and slurm.container_runtime == "pyxis":
        options |= {
            "container-image": slurm.container,
            "container-mounts": slurm.container_mounts,
            # By default a step starts in a folder of the image; paths in a config are relative to this one.
            "container-workdir": os.getcwd(),
        }
    if placement.gpus_of_node(config):
        options["gres"] = f"gpu:{gpus}" if gpus else "none"
    given = (f"--{name}={value}" for name, value in options.items() if value is not None)
    return ["srun", "--overlap", *given]


def _in_container(config: RunConfig, command: Sequence[str]) -> list[str]:
    """The command as the step runs it: by the image's interpreter. For apptainer, which is not a Slurm plugin, it is wrapped
    in a command that enters the image."""
    slurm = config.launch.slurm
    if slurm.container_python is not None:
        command = [slurm.container_python, *command[1:]]
    if slurm.container is None or slurm.container_runtime == "pyxis":
        return list(command)
    gpus = ["--nv"] if placement.gpus_of_node(config) else []
    mounts = [f"--bind={slurm.container_mounts}"] if slurm.container_mounts is not None else []
    return ["apptainer", "exec", *gpus, *mounts, f"--pwd={os.getcwd()}", slurm.container, *command]


# ---------------------------------------------------------------------------------------------------------------
# after a start that did not finish the run


def _requeue_or_end(
    folder: RunFolder,
    config: RunConfig,
    job: Job,
    outcome: stopping.Stopped | Interrupted | RoleFailed,
    signals: frozenset[signal.Signals],
    begins_at: Path | None,
) -> int:
    """Requeue the job if the run should continue. Returns the exit code. begins_at: the checkpoint that this start continued
    from."""
    failed, limit = isinstance(outcome, RoleFailed), config.launch.slurm.max_restarts
    how = str(outcome) or "stopped before a checkpoint could be written; every process of the run has ended"
    if isinstance(outcome, stopping.Stopped):
        how = f"stopped after step {outcome.step} on request ({outcome.reason})"
    print_message(how)
    if is_finished(folder, config):
        print_message(without_report(folder))
        return 1 if failed else os.EX_TEMPFAIL
    if signal.SIGTERM in signals:
        print_message(f"Slurm ends this job; unless it has requeued it, {way_on(folder)}")
        return os.EX_TEMPFAIL
    asks_requeue = failed or signal.SIGUSR1 in signals
    is_late = asks_requeue and folder.newest_checkpoint() == begins_at and _is_late(config)
    if (failed or is_late) and not count_failed_start(folder, limit):
        notice = "raise launch.slurm.notice_s above the time of an update and a checkpoint"
        if isinstance(outcome, stopping.Stopped):  # without a failure, but before its first step was done
            notice = "raise launch.slurm.time above that of a start and a step"
        starts = f"{counted(limit, 'restart')} brought no newer checkpoint"
        fix = f"{'fix the cause' if failed else notice}, then {way_on(folder)}"
        print_message(f"{starts} (launch.slurm.max_restarts={limit}): this job is not requeued; {fix}")
    elif asks_requeue:
        _requeue(folder, job)
    else:
        print_message(way_on(folder))
    return 1 if failed else os.EX_TEMPFAIL


def _is_late(config: RunConfig) -> bool:
    """Whether the time limit may have ended this start, rather than a pre-emption, which can come at any time: the job is in
    the second half of its time. (The job's time began before this process, with the prologue of its nodes.)"""
    return time.time() - psutil.Process().create_time() > seconds(config.launch.slurm.time) / 2


def _requeue(folder: RunFolder, job: Job) -> None:
    try:
        job.requeue()
    except RuntimeError as error:
        print_message(f"{error}; {way_on(folder)}")
    else:
        next_start = "continues from the newest checkpoint"
        if folder.newest_checkpoint() is None:
            next_start = "starts from the beginning, without a checkpoint"
            if damage := folder.damage_of_newest():
                next_start = f"finds no whole checkpoint{damage}"
        print_message(f"job {job.id} is requeued, and {next_start}")


class Signals:
    """A context manager that records the signals of this process, whichever handler is set: the supervisor sets and removes
    its handlers."""

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
    """While entered, print new lines of a file that another host writes."""
    over = threading.Event()

    def follow(position: int) -> None:
        decoder, last = codecs.getincrementaldecoder("utf-8")(errors="replace"), False
        while not last:
            last, new = over.wait(ECHO_EVERY_S), b""  # one more look for the last lines
            with contextlib.suppress(OSError), path.open("rb") as file:  # not there yet, or briefly missing
                file.seek(position)
                new = file.read()
            position += len(new)
            print(decoder.decode(new, final=last), end="", flush=True)  # a read may end within a character

    size = path.stat().st_size if path.exists() else 0
    thread = threading.Thread(target=follow, args=(size,), name="echo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10 * ECHO_EVERY_S)
