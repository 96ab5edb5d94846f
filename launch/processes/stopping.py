"""Requests to stop a run, and their outcome. The run folder carries the messages between supervisor and
learner, on whatever nodes they run.

    roles/stop.json      {"reason"}          the request, by the supervisor or by a learner rank that got SIGTERM itself
    roles/stopped.json   {"step", "reason"}  the learner's last message: the newest step, which has a checkpoint
    roles/ending.now                         the supervisor ends every process: from now on SIGTERM ends a role at once, and
                                             servers that no SIGTERM reaches end by themselves

    a user, or `tandem stop` ── SIGUSR1, SIGTERM ──> supervisor ── stop.json ──> learner, rank 0 (looks while it waits for samples)
    Slurm ── SIGTERM to everything ──> learner ranks ───────────────── stop.json ──┘      │
                                                                                          ├─ drops the step
                                                                                          that waits, or
                                                                                          finishes it
    exit code 75, or requeued  <── supervisor, when the learner has ended <── stopped.json ┴─ writes a checkpoint

If Slurm sends SIGTERM to everything, a rank gets it twice, since torchrun passes it on; this counts as one
request. torchrun also sends SIGTERM to its ranks when torchrun itself fails. They stop in the same way, with a
checkpoint, but the run has failed. The supervisor treats this as a stop only if there was another request, if
torchrun reports the signal, or if torchrun ended well.
"""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.processes.run_folder import RunFolder, error_text, read_present, write_json
from launch.processes.supervisor import AGENT_LINES, POLL_S, RoleFailed, Supervisor
from trainer.file_system import way_to_write

LOOK_EVERY_S = 0.5
"""Seconds between looks at the run folder, which may be on a shared file system."""
CAUSE_TIMEOUT_S = 10.0
"""Time for a role to notice that one of its processes is dead, after the learner has lost it."""
LOST_THE_ROLLOUT = (
    "ControlError:", "WeightSyncError:", "SamplingError: the sample role ", "SampleRoleLost:", "GenerationError:", "RolloutError:",
)  # fmt: skip
"""How a learner's error begins if the rollout side has failed. Other SamplingErrors are of a sample role that runs."""
TERMINATED_AGENT = re.compile(r"got signal: (15|\S*SIGTERM)|Received \S*(15|SIGTERM)\S* death signal")
"""torchrun's output when it gets SIGTERM itself."""
SIGTERM_TO_RANK = "SIGTERM to learner rank"


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has done all its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ended on request."""

    step: int
    """The last complete step, which has a checkpoint; 0 if no step was complete."""
    reason: str


Outcome = Finished | Stopped


class RunStopped(RuntimeError):
    """The run was stopped, did not fail, and can be continued."""


def ending(folder: RunFolder) -> Path:
    return folder.roles / "ending.now"


def time_of_end(folder: RunFolder) -> int | None:
    """When the supervisor began to end every process, in ns by the file system's clock; None before."""
    try:
        return ending(folder).stat().st_mtime_ns
    except OSError:  # no answer from the file system is no evidence
        return None


class EndOfStart:
    """Whether the supervisor has begun to end every process since this object was made. Roles poll this because SIGTERM may
    not reach them: Slurm loses the steps of a node that was cut off, and sends only one SIGTERM to a job that it cancels."""

    def __init__(self, folder: RunFolder):
        self._folder, self._earlier = folder, time_of_end(folder)

    def has_come(self) -> bool:
        return time_of_end(self._folder) not in (None, self._earlier)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt, which is not a failure of the role, if the end has come."""
        if self.has_come():
            raise KeyboardInterrupt


def request_stop(folder: RunFolder, reason: str) -> None:
    """Ask the learner to stop. Later requests have no effect."""
    if stop_reason(folder) is None:
        write_json(folder.stop_request, {"reason": reason})


def stop_reason(folder: RunFolder) -> str | None:
    """The reason of a request to stop; None without a request."""
    request = read_present(folder.stop_request)
    return request["reason"] if request is not None else None


def report_stopped(folder: RunFolder, outcome: Stopped) -> None:
    write_json(folder.stop_outcome, {"step": outcome.step, "reason": outcome.reason})


def read_stopped(folder: RunFolder) -> Stopped | None:
    outcome = read_present(folder.stop_outcome)
    return Stopped(**outcome) if outcome is not None else None


# ---------------------------------------------------------------------------------------------------------------
# the supervisor


def wait_for_learner(
    supervisor: Supervisor,
    signals: "StopSignals",
    *,
    timeout_s: float,
    names: Sequence[str] = ("learn",),
    sampler_restarts: int = 0,
) -> Outcome:
    """Wait until the learner's roles, one for each of its nodes, have ended, and pass requests to stop on to
    them. Must be called inside ``signals``.

    SIGUSR1 and the first SIGTERM are requests. While the learner starts, and on the second SIGTERM, they raise
    KeyboardInterrupt, like Ctrl-C. If a role of the rollout side fails, the learner is asked to stop too, so
    that its last complete step is not lost. A sample role that had been ready is instead restarted, up to
    ``sampler_restarts`` times.

    timeout_s: from the request to the learner's end. After it, KeyboardInterrupt is raised, or RoleFailed after a
    failure. Raises RoleFailed if the learner, or another role before it, has failed.
    """
    folder = signals.folder
    failure: RoleFailed | None = None
    request: _Request | None = None
    may_restart = False
    while any(supervisor.is_running(name) for name in names):
        if request is None:
            with _cause_named(supervisor, folder, names):
                _check_learner(supervisor, folder, names)
            # A sample role that fails at its start, because of its data or its reward, would fail again.
            may_restart = may_restart or _can_stop(folder) or folder.read_address("sample") is not None
            if may_restart and sampler_restarts > 0:
                sampler_restarts -= _restart_sampler(supervisor, folder, sampler_restarts)
            is_left_out = may_restart and sampler_restarts > 0
            failure = _failure_of_others(supervisor, folder, (*names, "sample") if is_left_out else names)
            first_line = failure and str(failure).splitlines()[0].rstrip(".")
            if reason := signals.reason or first_line or signals.look():
                request = _Request(folder, reason)
                steps = "the step is finished or dropped, then a checkpoint is written"
                print(f"stopping ({reason}): {steps}; at most {timeout_s:.0f} s", flush=True)
                request.send()
        elif time.monotonic() - request.made_at > timeout_s:
            if failure is not None:
                raise failure
            raise KeyboardInterrupt
        else:
            request.send()
        time.sleep(POLL_S)
    return _outcome(supervisor, signals, names, failure)


class _Request:
    """The supervisor's request to stop, until it is in the folder. A full disk, for which a run may well be stopped, must not
    end the run at once: its steps since the last checkpoint would be lost."""

    def __init__(self, folder: RunFolder, reason: str):
        self.made_at = time.monotonic()
        self._folder, self._reason = folder, reason
        self._is_sent = self._has_told = False

    def send(self) -> None:
        """Write the request, unless it is written. A failure is told once, and the next call tries again."""
        if self._is_sent:
            return
        try:
            request_stop(self._folder, self._reason)
            self._is_sent = True
        except OSError as error:
            if not self._has_told:
                where = f"the request cannot be written into {self._folder.roles} ({error.strerror})"
                wait = "the request is then written, and until then the run continues"
                print(f"{where}; {way_to_write(error)}: {wait}", flush=True)
            self._has_told = True


def _outcome(
    supervisor: Supervisor, signals: "StopSignals", names: Sequence[str], failure: RoleFailed | None
) -> Outcome:
    """How the learner has ended. ``failure``: of a role of the rollout side, because of which it was asked to stop."""
    folder = signals.folder
    stopped = read_stopped(folder)
    if failure is None and stopped is not None and not _was_asked_for(supervisor, signals, names, stopped):
        failure = next(supervisor.failure(name) for name in names if supervisor.exit_code(name) != 0)
    if failure is not None:
        if stopped is None:
            raise RoleFailed(str(failure))
        kept = f"it has saved a checkpoint of step {stopped.step}, the last complete one"
        raise RoleFailed(f"{failure}\nThe learner did not fail: {kept}.")
    if stopped is not None:  # with any exit code: torchrun's is 1 when it got SIGTERM too
        return stopped
    with _cause_named(supervisor, folder, names):
        supervisor.check(may_end=(*names, "sample"))
    return Finished()


def _was_asked_for(
    supervisor: Supervisor, signals: "StopSignals", names: Sequence[str], stopped: Stopped
) -> bool:
    """Whether the learner stopped on a request. A torchrun that fails sends SIGTERM to its ranks, too."""
    # A rank acts on its SIGTERM before it has written stop.json, and may end before it writes it.
    first = stop_reason(signals.folder) or stopped.reason
    if signals.reason is not None or not first.startswith(SIGTERM_TO_RANK):
        return True
    return all(
        supervisor.exit_code(name) == 0 or TERMINATED_AGENT.search(supervisor.last_lines(name, AGENT_LINES))
        for name in names
    )


@contextlib.contextmanager
def _cause_named(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> Iterator[None]:
    """A learner that loses a server or the sample role also ends, perhaps before that role's own failure is visible. The
    failure of the lost role is raised first, as the cause."""
    try:
        yield
    except RoleFailed as loss:
        text = error_text(folder.error("learn"))
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while text.startswith(LOST_THE_ROLLOUT) and time.monotonic() < deadline:
            try:
                supervisor.check(may_end=("sample",), but_not=names)
            except RoleFailed as cause:
                why = f"The learner ended because of it: {text.splitlines()[0]}"
                raise RoleFailed(f"{cause}\n{why}") from loss
            time.sleep(POLL_S)
        raise


def _check_learner(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> None:
    """Raise RoleFailed if the learner has failed on one of several nodes: the others would wait for it."""
    try:
        supervisor.check(may_end=names, among=names)
    except RoleFailed:
        if stop_reason(folder) is None:  # otherwise it is torchrun's exit code after SIGTERM
            raise


def _failure_of_others(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> RoleFailed | None:
    try:
        supervisor.check(may_end=("sample",), but_not=names)
    except RoleFailed as failure:
        if not _can_stop(folder):
            raise
        return failure
    return None


def _restart_sampler(supervisor: Supervisor, folder: RunFolder, restarts: int) -> bool:
    """Restart the sample role if its process has failed. Returns whether it has."""
    if supervisor.exit_code("sample") in (None, 0):
        return False
    first_line = str(supervisor.failure("sample")).splitlines()[0].rstrip(".")
    print(f"{first_line}; restarted (restarts left: {restarts - 1})", flush=True)
    folder.forget("sample")  # so that the learner waits for the next announcement
    supervisor.start_again("sample")
    return True


def _can_stop(folder: RunFolder) -> bool:
    """Whether the learner is past its start, and so sees requests to stop."""
    return folder.read_address("learn") is not None


class StopSignals:
    """A context manager of the main thread, to be entered before the learner is started. While entered, SIGUSR1 and
    SIGTERM are requests to stop. As long as the learner cannot see requests, they interrupt the supervisor."""

    def __init__(self, folder: RunFolder, supervisor: Supervisor):
        self.folder = folder
        self._supervisor = supervisor
        self.reason: str | None = None
        self._terminated = False
        self._looked_at = -LOOK_EVERY_S

    def __enter__(self) -> "StopSignals":
        requests = (signal.SIGTERM, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._take) for number in requests}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        second_term = number == signal.SIGTERM and self._terminated
        self._terminated |= number == signal.SIGTERM
        if second_term or not _can_stop(self.folder):
            self._supervisor.interrupt()
        self.reason = self.reason or signal.Signals(number).name

    def look(self) -> str | None:
        """The reason in stop.json, which any process may have written; it is read from time to time."""
        if time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        return stop_reason(self.folder)


# ------------------------------------------------------------------------------------------------------------------
# the learner


class StopListener:
    """Receives requests to stop in a learner rank. The main thread makes one, before anything else.

    A thread turns SIGTERM into stop.json at once, even while the main thread waits in a collective. All ranks but the first
    wait like this while samples are made. SIGTERM raises KeyboardInterrupt if the supervisor ends everything, or torchrun
    ends the peers of a failed rank.
    """

    def __init__(self, folder: RunFolder, *, is_first_rank: bool):
        self._folder = folder
        self._reason: str | None = None
        self._looked_at = -LOOK_EVERY_S
        if is_first_rank:  # files of an earlier life, if no supervisor has cleared the folder
            folder.forget("learn")
            for file in (folder.stop_request, folder.stop_outcome, ending(folder)):
                file.unlink(missing_ok=True)
        self._awake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake = wake  # kept open
        signal.signal(signal.SIGTERM, self._interrupt_at_end)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._pass_signals_on, name="stop-listener", daemon=True).start()

    def reason(self) -> str | None:
        """The reason to stop; None without a request. Rank 0 polls it while it waits."""
        if self._reason is None and time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._reason = stop_reason(self._folder)
        return self._reason

    def _interrupt_at_end(self, number: int, frame: object) -> None:
        if self._is_end():
            raise KeyboardInterrupt

    def _is_end(self) -> bool:
        return ending(self._folder).exists() or self._folder.error("learn").exists()

    def _pass_signals_on(self) -> None:
        while numbers := self._awake.recv(64):
            if signal.SIGTERM in numbers and not self._is_end():
                self._reason = self._reason or f"{SIGTERM_TO_RANK} {os.environ.get('RANK', '0')}"
                # On a full disk: rank 0 has the signal too, or torchrun ends this rank.
                with contextlib.suppress(OSError):
                    request_stop(self._folder, self._reason)
