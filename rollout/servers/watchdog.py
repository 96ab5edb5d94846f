"""Runs one server, SGLang or the router, so that none of its processes outlives its owner.

``python -I watchdog.py COMMAND...``

    owner (a role) --stdin pipe--> watchdog --child--> server --> its own processes
                                   └─ their own session and process group ───────┘

The whole group ends in each of three cases:
  * The owner dies in any way, including SIGKILL: the kernel closes its end of the pipe, and the watchdog reads the
    end of file.
  * The server exits by itself: the watchdog kills the rest of the group and exits with the server's code.
  * The watchdog is killed: the kernel sends the server SIGKILL (PR_SET_PDEATHSIG), and the server's workers
    have asked the kernel for the same.
SIGTERM to the group reaches the server directly; the watchdog only waits for the server's end. An owner may ignore
SIGTERM (in a Slurm job it comes to every process at once). The server must then survive it too. It has its own
handler, so the signal is blocked in it.

No process of the group has time to remove its files, so the watchdog removes the group's folder (``OWN_FOLDER``) and
its files in /dev/shm. It also lists these files in that folder. If the watchdog is killed with the group, the owner
removes them by the list, and if the owner is killed too, a later run (``guarded_process.remove_abandoned``). Standard
library only: the watchdog starts before anything heavy, under ``-I``, whatever the working directory and PYTHONPATH are.
"""

import ctypes
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
OWNER_GONE_EXIT_CODE = 75
OWN_FOLDER = "TANDEM_SERVER_FOLDER"
"""The variable that names the server's TMPDIR."""
LIST = "shared-memory"
"""The file in that folder with the paths of the group's files in /dev/shm."""
LOOK_S = 0.5
"""Time between two looks for new files in /dev/shm."""
SHARED_MEMORY = re.compile(r"(?<= )/dev/shm/(?:sgl_shm_|sglang_loads_|psm_|torch_(?P<maker>\d+)_)[\w.-]+$")
"""Files that SGLang, Python's ``shared_memory`` and torch make, at the end of a line of /proc/PID/maps. A file of torch may
have been made by another process, whose id is in its name."""


def main(command: list[str]) -> int:
    # SGLang's processes unpickle what comes over unix sockets below /tmp. A process that may write to such a file may connect.
    os.umask(os.umask(0o077) | 0o022)
    outlasts_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    watchdog = os.getpid()

    def in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if outlasts_sigterm:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watchdog:  # the watchdog died between fork and prctl
            os._exit(OWNER_GONE_EXIT_CODE)

    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    files = set[str]()
    code = _wait_for_server_or_owner(server, files)
    others = _rest_of_group()
    files |= shared_memory_of(others)
    for other in others:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    remove_left(os.environ.get(OWN_FOLDER), files)
    if code is None:
        os.killpg(0, signal.SIGKILL)  # processes that they had just started, and this one
        return OWNER_GONE_EXIT_CODE
    return code if code >= 0 else 128 - code


def _wait_for_server_or_owner(server: subprocess.Popen, files: set[str]) -> int | None:
    """The server's exit code, or None if the owner's end of standard input closed first.

    Meanwhile ``files`` gets the group's files in /dev/shm. If a server crashes, the kernel ends its workers with it, so
    afterwards no process has these files mapped."""
    exited = os.pidfd_open(server.pid)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    looked_at = 0.0
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(LOOK_S * 1000)}
        if exited in ready:
            return server.wait()
        if not ready:
            before, looked_at = looked_at, time.time()
            if shared_memory_changed_at() > before - LOOK_S:  # a file is mapped a moment after it is made
                found = shared_memory_of(_rest_of_group()) - files
                files |= found
                _list(found)
        elif not os.read(sys.stdin.fileno(), 4096):
            return None


def _list(files: set[str]) -> None:
    folder = os.environ.get(OWN_FOLDER)
    if files and folder is not None:
        with suppress(OSError), open(os.path.join(folder, LIST), "a") as file:
            file.write("".join(f"{name}\n" for name in files))


def _rest_of_group() -> set[int]:
    """All other processes of this group. This one still has to exit with the server's code."""
    group, others = os.getpgrp(), set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with suppress(ProcessLookupError):
            if os.getpgid(int(entry)) == group:
                others.add(int(entry))
    return others


def shared_memory_changed_at() -> float:
    """When a file in /dev/shm was last made or removed, in seconds since the epoch; 0 if there is no such folder."""
    with suppress(OSError):
        return os.stat("/dev/shm").st_mtime
    return 0.0


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that still have a name, and that these processes have made and mapped."""
    pids, files = set(pids), set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
            found = filter(None, map(SHARED_MEMORY.search, maps))
            files |= {
                file[0].rstrip() for file in found if file["maker"] is None or int(file["maker"]) in pids
            }
    return files


def remove_left(folder: str | None, files: Iterable[str]) -> None:
    """Remove what a server left behind: its TMPDIR, and those ``files`` in /dev/shm, and those that the TMPDIR lists, that
    are this user's."""
    for file in {*files, *listed(folder)}:
        with suppress(OSError):
            found = os.lstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                os.unlink(file)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def listed(folder: str | None) -> list[str]:
    """The files in /dev/shm that a server's TMPDIR lists."""
    with suppress(OSError), open(os.path.join(folder or os.devnull, LIST), errors="replace") as file:
        return [name[0] for line in file if (name := SHARED_MEMORY.search(f" {line.rstrip()}")) is not None]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
