"""Starts roles as process groups of their own, watches them, and ends every process of every group, whatever
happens.

Who ends whom: the supervisor ends a role's whole group (SIGTERM, grace, SIGKILL) when it finishes itself,
when any role fails, or on Ctrl-C; if the supervisor dies, the kernel sends each role SIGTERM
(PR_SET_PDEATHSIG). What a dead process of a role leaves behind in a session of its own (a torchrun rank's
checkpoint writer) becomes a child of the supervisor, which is the "subreaper" of its descendants, and is
ended with the rest. How SIGTERM can be a request to stop instead: launch/processes/stopping.py.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from rollout.servers.watched_process import how_it_ended, log_tail

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
POLL_S = 0.1
LAST_LINES = 40
KILL_TIMEOUT_S = 5.0
StartRole = Callable[..., "Role"]
"""(name, folder, config, ...) -> the role to start: ``commands.role``."""


class RoleFailed(RuntimeError):
    """A role ended before its work was done, or never became ready."""


class Interrupted(RuntimeError):
    """Ctrl-C or SIGTERM, after everything has been stopped (KeyboardInterrupt itself would be typer's to
    handle)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process to start. ``stdout`` to the terminal (the learner's step lines) or, like stderr always,
    into ``log``."""

    name: str
    command: Sequence[str]
    log: Path
    error: Path | None = None
    """Where the role itself writes what ended it, in a sentence."""
    env: dict[str, str] = field(default_factory=dict)
    show_stdout: bool = False

    @property
    def program(self) -> str:
        """What the process itself is, where it is not the role's work alone."""
        agents = {"srun": "its srun", "launch.roles.rendezvous": "its torchrun"}
        return next((agents[word] for word in self.command if word in agents), "its process")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    role: Role
    process: subprocess.Popen
    log_start: int
    """Bytes that were in its log before: of an earlier life of the run."""

    def last_lines(self, lines: int) -> str:
        return log_tail(self.role.log, lines, start=self.log_start)


class Supervisor:
    """A context manager: leaving it, on any path, leaves no process behind."""

    def __init__(self, *, grace_s: float, ending: Path | None = None):
        """ending: a file to make before the roles are ended; to a learner SIGTERM is a request to stop until
        it is there."""
        self._grace_s, self._ending = grace_s, ending
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> "Supervisor":
        # A closed terminal (SIGHUP) ends a run like Ctrl-C, unless nohup had it ignored.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            print(
                f"started in the background, where Ctrl-C does nothing: `kill {os.getpid()}` ends this",
                flush=True,
            )
        stops = [signal.SIGTERM, signal.SIGUSR1] + [signal.SIGHUP] * (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        )
        self._on_interrupt = signal.getsignal(signal.SIGINT)
        self._previous = {number: signal.signal(number, _raise_interrupt) for number in stops}
        self._was_subreaper = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(self._was_subreaper))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._not_ours = set(psutil.Process().children())
        return self

    def __exit__(self, kind, *exc) -> None:
        # A second Ctrl-C must not leave half of the processes running.
        for number in (signal.SIGINT, *self._previous):
            signal.signal(number, signal.SIG_IGN)
        try:
            self.stop_all()
        finally:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, self._was_subreaper.value)
            for number, handler in ((signal.SIGINT, self._on_interrupt), *self._previous.items()):
                signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            raise Interrupted from None

    def start(self, role: Role) -> None:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        with role.log.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                list(role.command),
                env=os.environ | role.env,
                stdin=subprocess.DEVNULL,
                stdout=None if role.show_stdout else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._running[role.name] = _Running(role=role, process=process, log_start=log_start)

    def wait_for(
        self,
        condition: Callable[[], bool],
        *,
        what: str,
        timeout_s: float,
        while_waiting: Callable[[float], None] = lambda waited: None,
    ) -> None:
        """Return once ``condition()`` holds; raise RoleFailed if a role ends first, well or not, or the
        deadline passes."""
        started = time.monotonic()
        while not condition():
            self.check(may_end=())
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise RoleFailed(
                    f"waited {timeout_s:.0f} s for {what}; raise launch.start_timeout_s if it only needs longer"
                )
            while_waiting(waited)
            time.sleep(POLL_S)

    def wait_until_done(self, name: str) -> None:
        """Return when role ``name`` has ended well; raise RoleFailed when it, or any other role before it,
        has failed."""
        process = self._running[name].process
        while process.poll() is None:
            self.check(may_end=(name, "sample"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_S)
        self.check(may_end=(name, "sample"))

    def is_running(self, name: str) -> bool:
        return self._running[name].process.poll() is None

    def processes(self) -> dict[psutil.Process, str]:
        """Of the roles that run, each with what it is."""
        found = {}
        for name, running in list(self._running.items()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[psutil.Process(running.process.pid)] = f"the {name} role ({running.role.program})"
        return found

    def exit_code(self, name: str) -> int | None:
        return self._running[name].process.poll()

    def failure(self, name: str) -> RoleFailed:
        """That this role has ended, and all that is known of it: which process, how, and its last words in
        this life."""
        running = self._running[name]
        code = running.process.wait(timeout=60)  # it has ended
        which = f" ({running.role.program}, pid {running.process.pid})" if code < 0 else ""
        said = f"the {name} role ended with {_describe(code)}{which}."
        return RoleFailed(f"{said}\n{_cause(running)}\nIts whole log: {running.role.log}")

    def last_lines(self, name: str, lines: int) -> str:
        """Of the role's log, as far as this life wrote it."""
        return self._running[name].last_lines(lines)

    def check(
        self, may_end: Sequence[str], *, among: Sequence[str] | None = None, but_not: Sequence[str] = ()
    ) -> None:
        """Raise RoleFailed for the first role that has ended; those of ``may_end`` (sample is told to stop)
        may have, with code 0.

        Looks ``among`` these roles (None: all), but not at those of ``but_not``.
        """
        for name, running in self._running.items():
            code = running.process.poll()
            if (
                code is None
                or (code == 0 and name in may_end)
                or name in but_not
                or (among is not None and name not in among)
            ):
                continue
            raise self.failure(name)

    def stop_all(self) -> None:
        """SIGTERM to every group, newest role first, then SIGKILL to what is left after the grace period."""
        if self._ending is not None:
            with contextlib.suppress(OSError):  # on a full disk the learner ends with SIGKILL
                self._ending.touch()
        processes = [running.process for running in reversed(self._running.values())]
        for process in processes:
            _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for process in processes:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + max(self._grace_s, KILL_TIMEOUT_S)
        while (
            left := self._descendants()
        ) and time.monotonic() < deadline:  # again: a killed process hands its children over to us
            kill(left)
        self._running.clear()

    def _descendants(self) -> list[psutil.Process]:
        """All that came from this process since the supervisor began, but for what it had started before."""
        found = []
        for child in psutil.Process().children():
            if child not in self._not_ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child, *child.children(recursive=True)]
        return found


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL to each, and a moment for them to be gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=1.0)


def exit_now(code: int) -> NoReturn:
    """Not sys.exit: a thread that still waits for a server or a peer would keep this rank, and so the run,
    alive for minutes.

    Nobody else cleans up then: child processes (a checkpoint's writers) are ended here.
    """
    try:
        kill(psutil.Process().children(recursive=True))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


DEAD_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
"""Torchrun's words for the first of its ranks that failed."""


def _cause(running: _Running) -> str:
    """The ranks that torchrun saw killed, which leave no words, and those of the role, where it left any;
    else its log's end."""
    role = running.role
    try:
        words = role.error.read_text() if role.error is not None else ""
    except FileNotFoundError:
        words = ""
    deaths = {
        f"rank {rank} of this node (pid {pid}) {how_it_ended(int(code))}": None
        for code, rank, pid in DEAD_RANK.findall(running.last_lines(200))
        if int(code) < 0 or not words
    }
    if words and deaths:
        words = f"another rank, which lost it, said: {words}"
    return textwrap.indent("\n".join([*deaths, words or running.last_lines(LAST_LINES)]), "    ")


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when the one that started it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _raise_interrupt(signum, frame) -> None:
    raise KeyboardInterrupt
