"""Ends all processes that a session's leader leaves behind, and the leader itself if it stays stopped.

``python -I session_guard.py PID TIMEOUT_S NOTE``, started by the leader PID. The guard makes the file NOTE when
it kills a leader that was stopped (SIGSTOP) and so held up the whole run.

    leader (a learner rank, a role) ── forks ──> checkpoint writers, resource trackers, reward workers, ...
        └─ starts ──> guard, in its own session: waits for the leader's end, then SIGKILL to the leader's session

A leader that gets SIGKILL ends none of its children, and its supervisor may have been killed with it. A leader
counts as stopped only if every look within TIMEOUT_S finds it in that state. (A guard that is stopped with the
whole job does not look.) Standard library only: the guard starts beside every role, under ``-I``, whatever the
working directory and PYTHONPATH are.
"""

import os
import select
import signal
import sys
from contextlib import suppress

ROUNDS = 100
"""Several, because a process may start another between two looks."""
LOOK_EVERY_S = 10.0


def main(leader: int, timeout_s: float, note: str) -> None:
    with suppress(ProcessLookupError, FileNotFoundError):
        wait_for_end(leader, timeout_s, note)
    for _ in range(ROUNDS):
        survivors = session_members(leader)
        if not survivors:
            return
        for pid in survivors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for_end(leader: int, timeout_s: float, note: str) -> None:
    poll = select.poll()
    poll.register(os.pidfd_open(leader), select.POLLIN)
    every_s, looks = min(LOOK_EVERY_S, timeout_s), 0
    while os.getppid() == leader and not poll.poll(every_s * 1000):
        looks = looks + 1 if process_state(leader) == b"T" else 0
        if (looks - 1) * every_s >= timeout_s:
            with suppress(OSError), open(note, "w") as file:
                file.write(f"(pid {leader}) had been stopped (SIGSTOP) for {timeout_s:.0f} s, and was killed")
            os.kill(leader, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """The living processes of a session. Its number is not reused while one of them lives."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(entry)) == session and process_state(int(entry)) not in (b"Z", b"X"):
                    pids.append(int(entry))
    return pids


def process_state(pid: int) -> bytes:
    """One letter: T is stopped, Z and X have ended. Raises FileNotFoundError or ProcessLookupError."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The state follows the program's name in parentheses, which may hold blanks.
        return stat.read().rpartition(b")")[2].split()[0]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
