"""Ends what a process leaves behind in its session, and that process where it stays stopped (SIGSTOP), which
would hold the whole run.

``python -I session_guard.py PID TIMEOUT_S NOTE``, started by that process, the session's leader. NOTE: a file
to make when it was stopped.

    leader (a learner rank, a role) ── forks, spawns ──> checkpoint writers, resource trackers, reward
    workers, ...
        └─ starts ──> guard, in a session of its own: waits for the leader's end, then SIGKILL to all that is
        left of its session

A leader that gets SIGKILL ends nothing by itself, and its supervisor may have been killed with it. Time alone
never makes it a stopped one: it must be found in that state at every look of TIMEOUT_S, and a guard that is
stopped itself, with all of a job, looks no more. Standard library only: it starts beside every role, under
``-I``, whatever the working directory and PYTHONPATH are.
"""

import os
import select
import signal
import sys
from contextlib import suppress

ROUNDS = 100
"""A process may start another one between two looks."""


LOOK_EVERY_S = 10.0


def main(leader: int, timeout_s: float, note: str) -> None:
    with suppress(ProcessLookupError, FileNotFoundError):
        wait_for_end(leader, timeout_s, note)
    for _ in range(ROUNDS):
        left = members(leader)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for_end(leader: int, timeout_s: float, note: str) -> None:
    poll = select.poll()
    poll.register(os.pidfd_open(leader), select.POLLIN)
    looks = 0
    while os.getppid() == leader and not poll.poll(min(LOOK_EVERY_S, timeout_s) * 1000):
        looks = looks + 1 if state(leader) == b"T" else 0
        if looks * LOOK_EVERY_S >= timeout_s:
            with suppress(OSError), open(note, "w") as file:
                file.write(f"(pid {leader}) had been stopped (SIGSTOP) for {timeout_s:.0f} s, and was killed")
            os.kill(leader, signal.SIGKILL)


def members(session: int) -> list[int]:
    """The living processes of a session. Its number belongs to nobody else while one of them is there."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(entry)) == session and state(int(entry)) not in (b"Z", b"X"):
                    found.append(int(entry))
    return found


def state(pid: int) -> bytes:
    """One letter: T is stopped, Z and X have ended. Raises FileNotFoundError or ProcessLookupError."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The name of the program, in parentheses, may hold blanks; after it comes the state.
        return stat.read().rpartition(b")")[2].split()[0]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
