"""Processes that do not outlive their owner. Each has its own session and group under ``watchdog.py``, and its own TMPDIR,
which is removed after its end."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from rollout.guarded_process import OF_SERVERS, SHORT, own_name
from rollout.run_key import RunKey
from rollout.servers.watchdog import OWN_FOLDER, remove_left, shared_memory_of

KILL_TIMEOUT_S = 30.0
"""Deadline for the kernel to tear down a killed server with all its memory."""
POLL_S = 0.05
LOG_TAIL_LINES = 40
OF_NANOBIND = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")
"""Lines about objects that are left when an interpreter ends: a hundred of them hide the error before."""
LONGEST_FOLDER = 107 - len("/sgl_ar_fd_12345678/12.sock")
"""Bytes of a path to which a process may add a folder and a unix socket. The kernel takes 107 for a socket's path."""
WATCHDOG = Path(__file__).parent / "watchdog.py"
SESSION_GUARD = Path(__file__).parent / "session_guard.py"


class WatchedProcess(subprocess.Popen):
    """A watchdog's process."""

    folder: str
    """TMPDIR of the watched process."""


def start_watched(
    command: Sequence[str], *, log_file: Path, environment: Mapping[str, str]
) -> WatchedProcess:
    """Start the watchdog of ``command``, with all output in ``log_file``. Raises OSError."""
    folder = _make_folder()
    try:
        # Only its owner may read the log: it has the server's settings, and the run's key among them.
        with open(log_file, "wb", opener=partial(os.open, mode=0o600)) as log:
            process = WatchedProcess(
                # The pipe carries no data: its end of file tells the watchdog that this process is gone.
                [sys.executable, "-I", str(WATCHDOG), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": folder, OWN_FOLDER: folder},
                start_new_session=True,
            )
    except BaseException:
        os.rmdir(folder)
        raise
    process.folder = folder
    return process


def _make_folder() -> str:
    name, usual = own_name(OF_SERVERS), tempfile.gettempdir()
    folder = os.path.join(usual, name)
    if len(os.fsencode(folder)) > LONGEST_FOLDER and os.access(SHORT, os.W_OK | os.X_OK):
        folder = os.path.join(SHORT, name)
    os.mkdir(folder, 0o700)
    return folder


def guard_session(*, timeout_s: float, note: Path) -> None:
    """Start a guard that ends this process's session when this process ends in any way. If this process stays
    stopped for ``timeout_s``, the guard makes ``note``, and kills it.

    Does nothing for a process that does not lead its session: the session is then a user's shell.
    """
    if os.getsid(0) != os.getpid():
        return
    nothing = subprocess.DEVNULL
    arguments = [str(os.getpid()), str(timeout_s), str(note.resolve())]
    command = [sys.executable, "-I", str(SESSION_GUARD), *arguments]
    subprocess.Popen(command, cwd="/", start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)


def end_watched(processes: Sequence[WatchedProcess]) -> None:
    """End the groups of all processes by SIGKILL, and remove what they leave in TMPDIR and /dev/shm.

    A server has nothing to save. SGLang looks for SIGTERM only every 5 s. Its main process would then take the end
    of its other processes for a crash, and write a crash report into the log of a healthy run.

    Raises RuntimeError: a process survived SIGKILL.
    """
    members = [_group_members(process.pid) for process in processes]
    left = [shared_memory_of({member.pid for member in group}) for group in members]
    for process in processes:
        signal_group(process.pid, signal.SIGKILL)
    try:
        for process, group in zip(processes, members, strict=True):
            _kill_all(process, group)
    finally:
        for process, files in zip(processes, left, strict=True):
            remove_left(process.folder, files)


def _kill_all(process: WatchedProcess, members: set[psutil.Process]) -> None:
    members |= _group_members(process.pid)
    signal_group(process.pid, signal.SIGKILL)
    for member in members:  # also one that moved to another group
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(KILL_TIMEOUT_S)
    if process.stdin is not None:
        process.stdin.close()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    # psutil's wait_procs would also wait for zombies, which stay until the parent that adopted them reaps them.
    while (alive := [member for member in members if _is_alive(member)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if alive:
        raise RuntimeError(f"processes of {process.args} survived SIGKILL: {alive}")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
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


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def how_it_ended(code: int) -> str:
    """How a process ended, in words. The exit ``code`` is negative or above 128 after a signal."""
    number = -code if code < 0 else code - 128
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with exit code {code}"


def server_pid(process: subprocess.Popen) -> int | None:
    """Process id of the server under the watchdog ``process``; None before its start and after its end."""
    with suppress(psutil.NoSuchProcess):
        return next((child.pid for child in psutil.Process(process.pid).children()), None)
    return None


def log_tail(
    log_file: Path, lines: int = LOG_TAIL_LINES, *, start: int = 0, key: RunKey | None = None
) -> str:
    """The last lines of a log, without progress bars and nanobind's lists. The first ``start`` bytes, which are an earlier
    process's, are left out. ``key`` is masked, because others may read the output."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 65536, start))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    text = text if key is None else text.replace(key.secret, "***")
    written = [line for line in text.splitlines() if not OF_NANOBIND.match(line)]
    return "\n".join(line.rsplit("\r", 1)[-1] for line in written[-lines:])
