"""Processes that do not outlive their owner: each a session and process group of its own under
``watchdog.py``."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

KILL_TIMEOUT_S = 30.0
"""For the kernel to take a killed server with all its memory apart."""
POLL_S = 0.05
LOG_TAIL_LINES = 40
WATCHDOG = Path(__file__).parent / "watchdog.py"
SESSION_GUARD = Path(__file__).parent / "session_guard.py"


def start_watched(
    command: Sequence[str], *, log_file: Path, environment: Mapping[str, str]
) -> subprocess.Popen:
    """The watchdog of ``command``, all of whose output goes to ``log_file``. Raises OSError."""
    with open(log_file, "wb", opener=_for_owner) as log:
        return subprocess.Popen(
            # The pipe is the lifeline: nobody writes to it, and its end of file tells the watchdog that this
            # process is gone.
            [sys.executable, "-I", str(WATCHDOG), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def guard_session(*, timeout_s: float, note: Path) -> None:
    """Have all that this process leaves behind in its session end with it, however it ends; and this process
    where it stays stopped for ``timeout_s``, of which ``note`` is made.

    Nothing to do where it does not lead the session: that is the shell's of whoever started it by hand.
    """
    if os.getsid(0) != os.getpid():
        return
    nothing = subprocess.DEVNULL
    command = [
        sys.executable,
        "-I",
        str(SESSION_GUARD),
        str(os.getpid()),
        str(timeout_s),
        str(note.resolve()),
    ]
    subprocess.Popen(command, cwd="/", start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)


def _for_owner(path: str, flags: int) -> int:
    """An opener. A server prints its settings, the run's key among them."""
    return os.open(path, flags, 0o600)


def end_watched(processes: Sequence[subprocess.Popen]) -> None:
    """SIGKILL to the groups of all.

    A server has nothing to save. SGLang looks at SIGTERM every 5 s only, and its main process takes the end
    of the others for a crash: it would end the log of a healthy run with a crash report.

    Raises:
        RuntimeError: a process survived SIGKILL.
    """
    members = [_group_members(process.pid) for process in processes]
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)
    for process, known in zip(processes, members, strict=True):
        _end_for_good(process, known)


def _end_for_good(process: subprocess.Popen, known: set[psutil.Process]) -> None:
    known |= _group_members(process.pid)
    _signal_group(process.pid, signal.SIGKILL)
    for member in known:  # also one that moved to a group of its own
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(KILL_TIMEOUT_S)
    if process.stdin is not None:
        process.stdin.close()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    # Not psutil's wait_procs: it also waits for zombies, which stay until a parent that has adopted them
    # looks.
    while (alive := [member for member in known if _lives(member)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if alive:
        raise RuntimeError(f"processes of {process.args} survived SIGKILL: {alive}")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended in between
        return False


def _group_members(group: int) -> set[psutil.Process]:
    """Every process of the group, and every descendant of its leader."""
    members: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(group)
        members |= {leader, *leader.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                members.add(process)
    return members


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def how_it_ended(code: int) -> str:
    """In words, of a watched process or any other: its exit code, negative or above 128 where a signal ended
    it."""
    number = -code if code < 0 else code - 128
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with exit code {code}"


def server_pid(process: subprocess.Popen) -> int | None:
    """Of what runs under the watchdog ``process``; None before it has started, and after its end."""
    with suppress(psutil.NoSuchProcess):
        return next((child.pid for child in psutil.Process(process.pid).children()), None)
    return None


def log_tail(log_file: Path, lines: int = LOG_TAIL_LINES, *, start: int = 0) -> str:
    """The last lines of a log, without its progress bars. start: bytes that are another process's, such as
    those of an earlier life."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 65536, start))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.splitlines()[-lines:])
