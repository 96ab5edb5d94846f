"""The guard of an environment, or of an agent, and the server below it.

Both processes adopt the orphans below them (PR_SET_CHILD_SUBREAPER), so a daemon of the environment cannot
escape. The guard runs no code of the user, so it survives a crash of the server, and then kills what the server has left
behind. Between two episodes the server kills what the episode has left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ALL_KINDS = 0x40000000
"""__WALL: also children that end without SIGCHLD."""
END_TIMEOUT_S = 5.0
"""Time for the kernel to end killed processes."""


def main(command=()):
    """Guard and server, or guard and ``command``. Exits as they do; 128 + number after a signal."""
    code = under_guard()
    if code is not None:
        os._exit(code)
    if command:
        become(command)
    from .server import serve  # here, so that the guard stays small

    serve()
    os._exit(0)


def under_guard():
    """Fork. -> None in the child. The parent stands guard, and returns the child's exit code after the child and all that
    it started are gone."""
    set_of_process(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child:
        return stand_guard(child)
    os.setsid()  # `os.killpg(0, SIGKILL)` in the user's code must not reach the guard
    set_of_process(PR_SET_CHILD_SUBREAPER, 1)
    end_with(guard)
    return None


def become(command):
    """Replace this process with a command that has no input. The command's orphans become children of the guard."""
    leave_to_the_user()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def leave_to_the_user():
    """Prepare for a program of the user: it gets no input, and the guard adopts its orphans."""
    set_of_process(PR_SET_CHILD_SUBREAPER, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def stand_guard(server):
    """Wait until the server ends or the parent closes its end of our pipe, then kill what is left. -> exit code"""
    wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer)
    asked_to_end = []
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_end.append(number))
    os.close(1)  # the parent sees the end of the file when the server ends
    poll = select.poll()
    poll.register(0, 0)  # only its closing: the server reads it
    poll.register(wake, select.POLLIN)
    code = None
    while code is None:
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            break
        events = dict(poll.poll())
        if 0 in events or asked_to_end:
            code = 128 + asked_to_end[0] if asked_to_end else 0
        if wake in events:
            os.read(wake, 4096)
    end_descendants()
    return code


def end_with(parent):
    """Have the kernel kill this process once the thread that started it, of the process ``parent``, has ended."""
    set_of_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(0)


def set_of_process(option, value, more=0):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, more, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def has_children():
    """Also one that has ended and was not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | ALL_KINDS)
    except ChildProcessError:
        return False
    return True


def descendants(kept=frozenset()):
    """{(pid, start time): parent} of all processes below this one, except those in ``kept`` and the ones below them. A
    zombie is included only if it is our child: no other can be reaped here. Orphans become our children. So without
    children there are none, and the node's processes, thousands on a large one, are not read."""
    if not has_children():
        return {}
    by_parent = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *rest = file.read().rpartition(b")")[2].split()
        except OSError:  # it is gone
            continue
        by_parent.setdefault(int(parent), []).append((int(name), int(rest[17]), state))
    found, waiting = {}, [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for pid, started, state in by_parent.get(parent, ()):
            if (pid, started) not in kept:
                waiting.append(pid)
                if state != b"Z" or parent == os.getpid():
                    found[pid, started] = parent
    return found


def end_descendants(kept=frozenset()):
    """Kill and reap all processes below this one but those in ``kept``. Raises TimeoutError."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        found = descendants(kept)
        if not found:
            return
        for pid, _ in found:
            # A process of another user may end by itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for (pid, _), parent in found.items():
            if parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(pid for pid, _ in found)} survive SIGKILL")
        time.sleep(0.001)  # the kernel ends them meanwhile
