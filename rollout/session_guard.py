"""Ends what a process leaves behind in its session: ``python -I session_guard.py PID``, started by that process, the session's leader.

    leader (a learner rank, a role) ── forks, spawns ──> checkpoint writers, resource trackers, reward workers, ...
        └─ starts ──> guard, in a session of its own: waits for the leader's end, then SIGKILL to all that is left of its session

A leader that gets SIGKILL ends nothing by itself, and its supervisor may have been killed with it.
Standard library only: it starts beside every role, under ``-I``, whatever the working directory and PYTHONPATH are.
"""

import os
import select
import signal
import sys
from contextlib import suppress

ROUNDS = 100
"""A process may start another one between two looks."""


def main(leader: int) -> None:
    with suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(leader), select.POLLIN)
        while os.getppid() == leader and not poll.poll():
            pass
    for _ in range(ROUNDS):
        left = members(leader)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def members(session: int) -> list[int]:
    """The living processes of a session. Its number belongs to nobody else while one of them is there."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(entry)) == session and not is_zombie(int(entry)):
                    found.append(int(entry))
    return found


def is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The name of the program, in parentheses, may hold blanks; after it comes the state.
        return stat.read().rpartition(b")")[2].split()[0] in b"ZX"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]))
