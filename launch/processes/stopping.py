"""How a run is asked to stop, and what comes of it. The run folder carries the words between supervisor and
learner, wherever they are.

    roles/stop.json      {"reason"}          a stop is asked for: by the supervisor, or by a learner rank that got SIGTERM itself
    roles/stopped.json   {"step", "reason"}  what the learner says as its last word: the newest step, of which there is a checkpoint
    roles/ending.now                         the supervisor ends every process: from here on SIGTERM means at once

    whoever wants the run to stop ── SIGUSR1, SIGTERM ──> supervisor ── stop.json ──> learner, rank 0 (looks while it waits for samples)
    Slurm ── SIGTERM to everything ──> learner ranks ───────────────── stop.json ──┘      │
                                                                                          ├─ drops the step
                                                                                          that waits, or
                                                                                          finishes it
    exit code 75, or requeued  <── supervisor, when the learner has ended <── stopped.json ┴─ writes a checkpoint

A rank gets SIGTERM twice where Slurm sends it to everything (torchrun, which got it too, passes it on): it
counts as one request. Torchrun also sends SIGTERM to its ranks when it fails itself. They stop in the same
way, with a checkpoint, but the run has failed: the supervisor takes it for a stop only if somebody else
asked, torchrun says that it got the signal, or it ended well.
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

from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import POLL_S, RoleFailed, Supervisor

LOOK_EVERY_S = 0.5
"""At the run folder, which may be on a shared file system."""
CAUSE_TIMEOUT_S = 10.0
"""For a role to find out that one of its processes is dead, when the learner has lost it already."""
LOST_THE_ROLLOUT = ("ControlError:", "WeightSyncError:", "SamplingError:", "GenerationError:")
"""What a learner's last words begin with where the rollout side has failed it."""
OWN_WORDS = "the sample role failed: SamplingError:"
"""The sample role is well, and has said what is wrong."""
TERMINATED_AGENT = re.compile(r"got signal: (15|\S*SIGTERM)|Received \S*(15|SIGTERM)\S* death signal")
"""What torchrun says when it gets SIGTERM itself."""
AGENT_LINES = 200
SIGTERM_TO_RANK = "SIGTERM to learner rank"


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has done all its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ended as it was asked to."""

    step: int
    """The last complete one, of which there is a checkpoint; 0: none was complete, and there is none."""
    reason: str


Outcome = Finished | Stopped


class RunStopped(RuntimeError):
    """Not a failure: the run can go on."""


def ending(folder: RunFolder) -> Path:
    return folder.path / "roles" / "ending.now"


def request_stop(folder: RunFolder, reason: str) -> None:
    """Ask the learner to stop. The first request counts."""
    if stop_reason(folder) is None:
        write_json(folder.address("stop"), {"reason": reason})


def stop_reason(folder: RunFolder) -> str | None:
    """Why a stop was asked for; None where it was not."""
    found = folder.read_address("stop")
    return found["reason"] if found is not None else None


def report_stopped(folder: RunFolder, outcome: Stopped) -> None:
    write_json(folder.address("stopped"), {"step": outcome.step, "reason": outcome.reason})


def read_stopped(folder: RunFolder) -> Stopped | None:
    found = folder.read_address("stopped")
    return Stopped(**found) if found is not None else None


# ---------------------------------------------------------------------------------------------------------------
# the supervisor


def wait_for_learner(
    supervisor: Supervisor, signals: "StopSignals", *, timeout_s: float, names: Sequence[str] = ("learn",)
) -> Outcome:
    """Inside ``signals``: wait until the learner's roles, one for each of its nodes, have ended, and pass
    requests to stop on to them.

    SIGUSR1 and the first SIGTERM ask for a stop; until the learner can heed one (it is still starting), and
    on the second SIGTERM, they are KeyboardInterrupt, as Ctrl-C is. Where a role of the rollout side has
    failed the learner, which is well, is asked to stop too, so that its last complete step is not lost.

    timeout_s: from the request to the learner's end. When it has passed: KeyboardInterrupt, or after a
    failure RoleFailed. Raises RoleFailed when the learner has failed, or any other role before it.
    """
    folder = signals.folder
    failure: RoleFailed | None = None
    asked_at: float | None = None
    while any(supervisor.is_running(name) for name in names):
        if asked_at is None:
            with _cause_named(supervisor, folder, names):
                _check_learner(supervisor, folder, names)
            failure = _failure_of_others(supervisor, folder, names)
            reason = (
                signals.reason or (failure and str(failure).splitlines()[0].rstrip(".")) or signals.look()
            )
            if reason:
                asked_at = time.monotonic()
                request_stop(folder, reason)
                how = f"the step is finished or dropped, then a checkpoint is written; at most {timeout_s:.0f} s"
                print(f"stopping ({reason}): {how}", flush=True)
        elif time.monotonic() - asked_at > timeout_s:
            if failure is not None:
                raise failure
            raise KeyboardInterrupt
        time.sleep(POLL_S)
    stopped = read_stopped(folder)
    if failure is None and stopped is not None and not _was_asked_for(supervisor, signals, names):
        failure = next(supervisor.failure(name) for name in names if supervisor.exit_code(name) != 0)
    if failure is not None:
        kept = (
            f"\nThe learner was well: a checkpoint of step {stopped.step}, the last complete one, is there."
            if stopped
            else ""
        )
        raise RoleFailed(f"{failure}{kept}")
    if stopped is not None:  # whatever the exit code: torchrun's own is 1 when it got SIGTERM too
        return stopped
    with _cause_named(supervisor, folder, names):
        supervisor.check(may_end=(*names, "sample"))
    return Finished()


def _was_asked_for(supervisor: Supervisor, signals: "StopSignals", names: Sequence[str]) -> bool:
    """Whether a stop that the learner has heeded was a request. A torchrun that fails sends SIGTERM to its
    ranks, too."""
    if signals.reason is not None or not (stop_reason(signals.folder) or "").startswith(SIGTERM_TO_RANK):
        return True
    return all(
        supervisor.exit_code(name) == 0 or TERMINATED_AGENT.search(supervisor.last_lines(name, AGENT_LINES))
        for name in names
    )


@contextlib.contextmanager
def _cause_named(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> Iterator[None]:
    """A learner that has lost a server or the sample role ends too, maybe before its role has noticed: that
    one's failure comes first."""
    try:
        yield
    except RoleFailed as loss:
        error = folder.error("learn")
        words = error.read_text() if error.exists() else ""
        is_loss = words.startswith(LOST_THE_ROLLOUT) and OWN_WORDS not in words
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while is_loss and time.monotonic() < deadline:
            try:
                supervisor.check(may_end=("sample",), but_not=names)
            except RoleFailed as cause:
                raise RoleFailed(f"{cause}\nThe learner ended of it: {words.splitlines()[0]}") from loss
            time.sleep(POLL_S)
        raise


def _check_learner(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> None:
    """Raise RoleFailed where one of several nodes has failed: the others would wait for it."""
    try:
        supervisor.check(may_end=names, among=names)
    except RoleFailed:
        if stop_reason(folder) is None:  # else torchrun's own code, after SIGTERM
            raise


def _failure_of_others(supervisor: Supervisor, folder: RunFolder, names: Sequence[str]) -> RoleFailed | None:
    try:
        supervisor.check(may_end=("sample",), but_not=names)
    except RoleFailed as failure:
        if not _heeds(folder):
            raise
        return failure
    return None


def _heeds(folder: RunFolder) -> bool:
    """Whether the learner is past its start, and so will see a request to stop."""
    return folder.read_address("learn") is not None


class StopSignals:
    """While inside, SIGUSR1 and SIGTERM are requests to a learner that can heed one, and KeyboardInterrupt
    before it can. A context manager, of the main thread, to be inside of when the learner is started."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.reason: str | None = None
        self._terminated = False
        self._looked_at = -LOOK_EVERY_S

    def __enter__(self) -> "StopSignals":
        self._previous = {
            number: signal.signal(number, self._take) for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        second_term = number == signal.SIGTERM and self._terminated
        self._terminated |= number == signal.SIGTERM
        if second_term or not _heeds(self.folder):
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def look(self) -> str | None:
        """What stop.json says, which anyone may have written; from time to time."""
        if time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        return stop_reason(self.folder)


# ------------------------------------------------------------------------------------------------------------------
# the learner


class StopListener:
    """A learner rank's ear for requests to stop. For the main thread to make, once, before anything else of
    the rank.

    SIGTERM becomes stop.json by a thread of its own, at once, even while the main thread waits in a
    collective, as all ranks but the first do while samples are made. Where the supervisor ends everything, or
    torchrun the peers of a rank that failed, it is KeyboardInterrupt.
    """

    def __init__(self, folder: RunFolder, *, is_first_rank: bool):
        self._folder = folder
        self._reason: str | None = None
        self._looked_at = -LOOK_EVERY_S
        if is_first_rank:  # of an earlier life, where no supervisor has cleared the folder
            for file in (
                *map(folder.address, ("stop", "stopped", "learn")),
                folder.error("learn"),
                ending(folder),
            ):
                file.unlink(missing_ok=True)
        self._awake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake = wake  # kept open
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._pass_on, name="stop-listener", daemon=True).start()

    def reason(self) -> str | None:
        """Why this run is to stop; None where nobody has asked. For rank 0, again and again while it waits."""
        if self._reason is None and time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._reason = stop_reason(self._folder)
        return self._reason

    def _on_term(self, number: int, frame: object) -> None:
        if self._is_end():
            raise KeyboardInterrupt

    def _is_end(self) -> bool:
        return ending(self._folder).exists() or self._folder.error("learn").exists()

    def _pass_on(self) -> None:
        while numbers := self._awake.recv(64):
            if signal.SIGTERM in numbers and not self._is_end():
                self._reason = self._reason or f"{SIGTERM_TO_RANK} {os.environ.get('RANK', '0')}"
                with contextlib.suppress(
                    OSError
                ):  # a full disk: rank 0 has got the signal too, or torchrun ends this rank
                    request_stop(self._folder, self._reason)
