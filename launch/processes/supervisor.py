"""Starts roles as process groups, watches them, and ends every process of every group, whatever happens.

The supervisor ends a role's whole group (SIGTERM, grace, SIGKILL) when it finishes itself, when any role fails,
on Ctrl-C, or on SIGUSR2, which does the same in the background, where Ctrl-C is ignored. If the supervisor dies,
the kernel sends each role SIGTERM (PR_SET_PDEATHSIG). A dead process of a role may leave children in a session of
their own, such as a torchrun rank's checkpoint writer. They become children of the supervisor, which is the
"subreaper" of its descendants, and are ended with the rest. SIGTERM may also be a request to stop:
launch/processes/stopping.py.

Python drops an exception that a signal handler raises inside some callbacks, such as logging's hooks around a
fork ("Exception ignored in ..."). An interrupt is therefore also noted, and every check of the roles raises it again.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import psutil

from launch.processes.run_folder import error_text
from launch.processes.unheard import go_on_unheard
from rollout.servers.watched_process import how_it_ended, log_tail, signal_group
from rollout.terminal_text import visible

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
POLL_S = 0.1
LAST_LINES = 40
FULL_BYTES = 1 << 16
"""With less free space on the disk a traceback cannot be written."""
KILL_TIMEOUT_S = 5.0
LARGEST_LOG, KEPT_LOG = 2**28, 2**20
"""Most bytes of a role's log, and the bytes of its end that remain once it has more."""


class RoleFailed(RuntimeError):
    """A role ended before its work was done, or never became ready."""


class Interrupted(RuntimeError):
    """Ctrl-C or SIGTERM, after every process has ended. (typer would catch a KeyboardInterrupt.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process to start. stderr goes into ``log``; if that becomes too large, only its end is kept. stdout goes there too, or
    to the terminal."""

    name: str
    command: Sequence[str]
    log: Path
    error: Path | None = None
    """The file in which the role itself writes the error that ended it."""
    env: dict[str, str] = field(default_factory=dict)
    show_stdout: bool = False

    @property
    def program(self) -> str:
        """A name of the process, which may be an agent that starts the role's work."""
        agents = {"srun": "its srun", "launch.roles.rendezvous": "its torchrun"}
        return next((agents[word] for word in self.command if word in agents), "its process")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    role: Role
    process: subprocess.Popen
    log_start: int
    """Size of the log before this start, from an earlier life of the run."""

    def last_lines(self, lines: int) -> str:
        return log_tail(self.role.log, lines, start=self.log_start)


class Supervisor:
    """A context manager. No process outlives it, however it is left.

    The roles leave their results in files. From the entry on, and also after the exit, printing in this process therefore
    never raises (launch/processes/unheard.py).
    """

    def __init__(self, *, grace_s: float, ending: Path | None = None):
        """ending: a file to make before the roles are ended. Until it exists, a learner takes SIGTERM for a
        request to stop."""
        self._grace_s, self._ending = grace_s, ending
        self._running: dict[str, _Running] = {}
        self._is_interrupted = False

    def __enter__(self) -> "Supervisor":
        go_on_unheard()
        # A closed terminal (SIGHUP) ends a run like Ctrl-C, unless nohup had it ignored.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            hint = f"`kill {os.getpid()}` ends this run"
            print(f"started in the background, where Ctrl-C does nothing: {hint}", flush=True)
        stops = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        keys = (signal.SIGHUP, signal.SIGINT)
        stops += [number for number in keys if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, lambda *_: self.interrupt()) for number in stops}
        self._was_subreaper = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(self._was_subreaper))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._not_ours = set(psutil.Process().children())
        return self

    def __exit__(self, kind, *exc) -> None:
        # A further Ctrl-C must not leave processes running: half of them, or all if it comes before the next lines.
        self._is_interrupted = True
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        try:
            self.stop_all()
        finally:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, self._was_subreaper.value)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            raise Interrupted from None

    def interrupt(self) -> None:
        """For signal handlers: end the run, by KeyboardInterrupt here or at the next check of the roles. A further signal
        raises nothing: it could come as ``__exit__`` begins, and no role would be ended."""
        if not self._is_interrupted:
            self._is_interrupted = True
            raise KeyboardInterrupt

    def raise_interrupt(self) -> None:
        """Raise the KeyboardInterrupt of a signal again, in case Python dropped the first one."""
        if self._is_interrupted:
            raise KeyboardInterrupt

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

    def start_again(self, name: str) -> None:
        """Restart a role whose process has ended, and end the rest of its process group."""
        running = self._running[name]
        signal_group(running.process.pid, signal.SIGKILL)
        self.start(running.role)

    def wait_for(
        self,
        condition: Callable[[], bool],
        *,
        what: str,
        timeout_s: float,
        while_waiting: Callable[[float], None] = lambda waited: None,
    ) -> None:
        """Return once ``condition()`` is true. Raises RoleFailed if a role ends first, with any code, or the deadline
        passes."""
        started = time.monotonic()
        while not condition():
            self.check(may_end=())
            waited = time.monotonic() - started
            if waited > timeout_s:
                fix = "raise launch.start_timeout_s if it only needs longer"
                raise RoleFailed(f"waited {timeout_s:.0f} s for {what}; {fix}")
            while_waiting(waited)
            time.sleep(POLL_S)

    def wait_until_done(self, name: str) -> None:
        """Return when role ``name`` has ended well. Raises RoleFailed when it, or another role before it, has
        failed."""
        process = self._running[name].process
        while process.poll() is None:
            self.check(may_end=(name, "sample"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_S)
        self.check(may_end=(name, "sample"))

    def is_running(self, name: str) -> bool:
        self.raise_interrupt()
        return self._running[name].process.poll() is None

    def processes(self) -> dict[psutil.Process, str]:
        """The processes of the roles that run, with their names."""
        processes = {}
        for name, running in list(self._running.items()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(running.process.pid)
                processes[process] = f"the {name} role ({running.role.program})"
        return processes

    def exit_code(self, name: str) -> int | None:
        return self._running[name].process.poll()

    def failure(self, name: str) -> RoleFailed:
        """The error for a role that has ended: its process, its exit code, and its last output since this start."""
        running = self._running[name]
        code = running.process.wait(timeout=60)  # it has ended already
        process = f" ({running.role.program}, pid {running.process.pid})" if code < 0 else ""
        end = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        first_line = f"the {name} role ended with {end}{process}."
        return RoleFailed(f"{first_line}\n{_cause_text(running)}\nIts whole log: {running.role.log}")

    def last_lines(self, name: str, lines: int) -> str:
        """The last lines that the role has written into its log since this start."""
        return self._running[name].last_lines(lines)

    def check(
        self, may_end: Sequence[str], *, among: Sequence[str] | None = None, but_not: Sequence[str] = ()
    ) -> None:
        """Raise RoleFailed for the first role that has ended. Roles in ``may_end`` may end with code 0: the learner
        tells sample to stop.

        among: the roles to check (None: all), except those in ``but_not``.
        """
        self.raise_interrupt()
        self._shorten_logs()
        for name, running in self._running.items():
            if name in but_not or (among is not None and name not in among):
                continue
            code = running.process.poll()
            if code is not None and not (code == 0 and name in may_end):
                raise self.failure(name)

    def _shorten_logs(self) -> None:
        """Rewards and environments print into a role's log, which must not fill the disk."""
        for name, running in self._running.items():
            with contextlib.suppress(OSError):
                if shorten(running.role.log):
                    self._running[name] = replace(running, log_start=0)

    def stop_all(self) -> None:
        """SIGTERM to every group, newest role first, then SIGKILL to what is left after the grace period."""
        if self._ending is not None:
            with contextlib.suppress(OSError):  # on a full disk: the learner then ends by SIGKILL
                self._ending.touch()
        processes = [running.process for running in reversed(self._running.values())]
        for process in processes:
            signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for process in processes:
            _wait_for_end(process.pid, deadline)
        for process in processes:
            signal_group(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for process in processes:
            _wait_for_end(process.pid, deadline)
            process.poll()
        # Repeated, since a killed process hands its children over to this one.
        deadline = time.monotonic() + max(self._grace_s, KILL_TIMEOUT_S)
        while (left := self._descendants()) and time.monotonic() < deadline:
            kill(left)
        self._running.clear()

    def _descendants(self) -> list[psutil.Process]:
        """All descendants of this process, without those that it had before the supervisor began."""
        descendants = []
        for child in psutil.Process().children():
            if child not in self._not_ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendants += [child, *child.children(recursive=True)]
        return descendants


def shorten(log: Path) -> bool:
    """Cut the log if it has more than ``LARGEST_LOG`` bytes; its end stays, after a line that says so. Returns whether it was
    cut. Its writers append, so they continue after that; lines that they write at this moment may be lost."""
    dropped = log.stat().st_size - KEPT_LOG
    if dropped + KEPT_LOG <= LARGEST_LOG:
        return False
    with log.open("a+b", buffering=0) as file:
        file.seek(dropped)
        end = file.read(KEPT_LOG)
        file.truncate(0)
        about = f"({dropped} bytes before this were dropped: a log has {LARGEST_LOG} at most)\n"
        file.write(about.encode() + end)
    return True


def run_to_end(*roles: Role, grace_s: float) -> None:
    """Start these roles, and return when the last of them has ended well; no process of theirs is left. Raises RoleFailed."""
    with Supervisor(grace_s=grace_s) as supervisor:
        for role in roles:
            supervisor.start(role)
        supervisor.wait_until_done(roles[-1].name)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to each, and wait a moment for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=1.0)


def exit_now(code: int) -> NoReturn:
    """End this process and its children (a session's guard) at once.

    After sys.exit, a thread that still waits for a server or a peer would keep this rank, and so the run, alive
    for minutes.
    """
    try:
        kill(psutil.Process().children(recursive=True))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


FAILED_RANK = re.compile(r"\(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)")
"""An entry of torchrun's table of failed ranks. torchrun's line about the first failure is not used: if several ranks had ended
when it looked, it names the lowest rank, which may only have lost another one."""
ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
BY_TORCHRUN = re.compile(r"[A-Z]\d{4} .*torch/distributed/elastic/")
"""How a line of torchrun's own log begins. Lines of ranks that are still running may follow it."""
END_OF_TORCHRUN = re.compile(r"^\S*ChildFailedError:", re.MULTILINE)
"""The end of torchrun's last traceback. Its table of failed ranks follows, and no rank is running any more."""
AGENT_LINES = 200
"""Lines of a log in which torchrun's words are looked for."""


def _cause_text(running: _Running) -> str:
    """The ranks that torchrun saw killed (they leave no error), and the error that the role left, or else the end of its
    log."""
    role = running.role
    error = "" if role.error is None else error_text(role.error)
    said = running.last_lines(AGENT_LINES)
    ended_by_torchrun = set(ENDED_BY_TORCHRUN.findall(said))
    deaths = {
        f"rank {rank} of this node (pid {pid}) {how_it_ended(int(code))}": None
        for rank, code, pid in FAILED_RANK.findall(said)
        if pid not in ended_by_torchrun and (int(code) < 0 or not error)
    }
    if error and deaths:
        error = f"another rank, which lost it, said: {error}"
    last_words = error or _own_last_lines(running, deaths)
    is_unexplained = not last_words and not _are_all_killed(deaths)
    if is_unexplained and shutil.disk_usage(role.log.parent).free < FULL_BYTES:
        last_words = f"the disk of {role.log.parent} is full, so it could not write why; free space"
    return textwrap.indent(visible("\n".join(filter(None, [*deaths, last_words]))), "    ")


def _own_last_lines(running: _Running, deaths: Collection[str]) -> str:
    """The last lines of a role that left no error. If ranks are known to have died (``deaths``), torchrun's own lines say
    nothing more and are left out, and so is what a rank printed before a SIGKILL, which it could not foresee."""
    if not deaths:
        return running.last_lines(LAST_LINES)
    if _are_all_killed(deaths):
        return ""
    said = running.last_lines(AGENT_LINES)
    if (end := END_OF_TORCHRUN.search(said)) is not None:
        said = said[: max(said.rfind("Traceback (most recent call last)", 0, end.start()), 0)]
    own = [line for line in said.rstrip().splitlines() if not BY_TORCHRUN.match(line)]
    return "\n".join(own[-LAST_LINES:])


def _are_all_killed(deaths: Collection[str]) -> bool:
    """Whether ranks are known to have died, all by SIGKILL."""
    return bool(deaths) and all(death.endswith(how_it_ended(-signal.SIGKILL)) for death in deaths)


def _wait_for_end(pid: int, deadline: float) -> None:
    """Wait until a child has ended, at most until ``deadline``. Its exit code can still be read afterwards.

    This does not use Popen.wait: a signal handler that raises, such as Ctrl-C's, can interrupt Popen.poll after it took its
    lock and before the block that releases it. Popen.wait would then wait for the lock forever.
    """
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # the exit code has been read already
        while os.waitid(os.P_PID, pid, look) is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
