"""Runs one server, SGLang's or the router, so that none of its processes outlives its owner.

``python -I watchdog.py COMMAND...``

    owner (a role) --stdin pipe--> watchdog --child--> server --> its own processes
                                   └─ one session and process group of its own ──┘

The whole group ends in each of three cases:
  * The owner dies in whatever way, SIGKILL included: the kernel closes its end of the pipe, and the watchdog
    reads the end of file.
  * The server exits by itself: the watchdog kills the rest of the group and exits with the server's code.
  * The watchdog is killed: the kernel sends the server SIGKILL (PR_SET_PDEATHSIG), and the server's workers
    have asked the kernel for the same.
SIGTERM to the group reaches the server directly; the watchdog only waits for it. An owner may ignore SIGTERM
(in a Slurm job it comes to every process at once). The server must then outlast it too, though it has a handler
of its own: the signal is blocked in it. Standard library only: the watchdog starts before anything heavy, under
``-I``, whatever the working directory and PYTHONPATH are.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
OWNER_GONE_EXIT_CODE = 75


def main(command: list[str]) -> int:
    # SGLang's processes unpickle what comes over unix sockets below /tmp, to which whoever may write to the file may connect.
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
    code = _wait_for_server_or_owner(server)
    if code is None:
        os.killpg(0, signal.SIGKILL)  # this process too
        return OWNER_GONE_EXIT_CODE
    _kill_rest_of_group()
    return code if code >= 0 else 128 - code


def _wait_for_server_or_owner(server: subprocess.Popen) -> int | None:
    """The server's exit code, or None when the owner's end of standard input closed first."""
    exited = os.pidfd_open(server.pid)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if exited in ready:
            return server.wait()
        if not os.read(sys.stdin.fileno(), 4096):
            return None


def _kill_rest_of_group() -> None:
    """SIGKILL to all other processes of this group; this one still has to exit with the server's code."""
    group = os.getpgrp()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with suppress(ProcessLookupError):
            if os.getpgid(int(entry)) == group:
                os.kill(int(entry), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
