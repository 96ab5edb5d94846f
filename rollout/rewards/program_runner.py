"""Runs the program of a response against its tests: ``python -I program_runner.py``, one process per response.

    code.py ── one JSON line (``Job``) ──> this process ── fork ──> limits ── exec ──> the program, once per test
            <── one JSON line (answer) ──  kills the program and all that it started: after each test, and once our
                                           parent closes its end of the input

This process runs no code of the program itself, and it adopts orphans, so a daemon cannot escape. It needs
only the standard library and the guard of environments. The program sees neither the expected output nor the
parent's environment.

The answer: ``{"outcomes": [...]}``, for each test that ran ``passed``, ``failed``, ``timed_out``, ``too_much_output`` or
``too_many_processes``; or ``{"error": ...}`` if the program could not be started.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
import uuid

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "environments"))
from tandem_worker.guard import (  # pyright: ignore[reportMissingImports]
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end_descendants,
    set_of_process,
)

del sys.path[0]

SPARE_OUTPUT = 2**20
"""Bytes that a program may print beyond twice the length of the expected output."""
LARGEST_FILE = 64 * 2**20
"""Most bytes of a file that a program writes."""
SHARED_MEMORY = 64 * 2**20
"""Most bytes in a program's /dev/shm; the limit of its memory, if that is less."""
OPEN_FILES = 128
LOOK_EVERY_S = 0.05
"""Time between two counts of a program's processes."""
PARENTS = {"none": 0, "namespaces": 1, "bubblewrap": 2}
"""Number of our and bubblewrap's processes above a program, by sandbox."""
NOBODY = 65534
SIZE_SINCE, NO_NAMESPACES_SINCE = [0, 7], [0, 8]
"""First versions of bubblewrap with --size, and with --disable-userns."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 41, (319, 29, 64, 68)),
    "aarch64": (0xC00000B7, 198, (279, 194, 190, 186)),
}
"""By machine: its AUDIT_ARCH; the numbers of socket, and of memfd_create, shmget, semget and msgget."""
OWNER = 0
"""Descriptor of the pipe from our parent."""


class OwnerGone(Exception):
    """Our parent has closed its end of the pipe, or is gone."""


def main():
    set_of_process(PR_SET_CHILD_SUBREAPER, 1)
    # A program that forks without end must not keep this process from counting, so it runs before all others
    # if it may. Root may, and only root's programs escape RLIMIT_NPROC. The processes that it forks do not.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        line = sys.stdin.buffer.readline()
        if line.endswith(b"\n"):  # otherwise our parent is gone
            os.write(1, json.dumps(run_tests(json.loads(line))).encode() + b"\n")
    except (OwnerGone, BrokenPipeError):
        pass
    finally:
        end_descendants()


def run_tests(job):
    outcomes = []
    for test in job["tests"]:
        folder = os.path.abspath(f"test-{len(outcomes)}")
        os.mkdir(folder)
        try:
            outcome, error = run_test(job, test, folder)
        finally:
            with contextlib.suppress(RecursionError):  # our parent removes what is nested too deep
                shutil.rmtree(folder, ignore_errors=True)
        if error is not None:
            return {"error": error}
        outcomes.append(outcome)
        if outcome != "passed" and (job["stop_at_failure"] or outcome != "failed"):
            break
    return {"outcomes": outcomes}


def run_test(job, test, folder):
    """(outcome, None), or (None, why the program could not be started)."""
    is_assertions = "code" in test
    source, expected = job["program"], "" if is_assertions else test["output"]
    proof = f"tandem {uuid.uuid4()}"
    if is_assertions:  # the proof shows that the program reached its end: an earlier exit(0) is not a success
        source = f"{source}\n\n{test['code']}\n\n__import__('os').write(1, {proof.encode()!r})\n"
    with open(os.path.join(folder, "program.py"), "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    outcome, printed, code, told, said = run_program(
        job, folder, test.get("input", ""), SPARE_OUTPUT + 2 * len(expected)
    )
    if outcome is not None:
        return outcome, None
    error = why_not_started(job, code, told, said)
    if error is not None:
        return None, error
    text = printed.decode(errors="replace")
    is_right = proof in text if is_assertions else lines_of(text) == lines_of(expected)
    return "passed" if code == 0 and is_right else "failed", None


def run_program(job, folder, given, most_output):
    """Run the program in ``folder`` with the input ``given`` -> what ``watch`` returns, and the arguments of
    ``why_not_started``."""
    stdin, errors = os.memfd_create("input"), os.memfd_create("errors")
    output, output_writer = os.pipe()
    # The program gets neither end of this pipe, so it cannot claim that it was not started.
    status, status_writer = os.pipe()
    try:
        write_all(stdin, given.encode(errors="replace"))
        pid = os.fork()
        if pid == 0:
            become_program(job, folder, stdin, output_writer, errors, status_writer)
        os.close(output_writer)
        os.close(status_writer)
        output_writer = status_writer = -1
        try:
            outcome, printed = watch(pid, output, job, most_output)
        finally:
            code = end_program(pid)
        os.set_blocking(status, False)
        return outcome, printed, code, read_some(status), os.pread(errors, 2**12, 0)
    finally:
        for descriptor in (stdin, errors, output, output_writer, status, status_writer):
            if descriptor >= 0:
                os.close(descriptor)


def why_not_started(job, code, told, said):
    """Why a program was never started although its process has ended; None if it was started.

    told: JSON lines of the forked process, {"error": ...}, and of bubblewrap, which gives an "exit-code" only
    for a program that it started. said: the error output, which only bubblewrap writes before the start.
    """
    lines = [json.loads(line) for line in told.splitlines()]
    for line in lines:
        if "error" in line:
            return line["error"]
    # Above 128, bubblewrap was killed from outside the sandbox: no process inside can reach it.
    if job["sandbox"] == "bubblewrap" and 0 < code < 128 and not any("exit-code" in line for line in lines):
        words = said.decode(errors="replace").strip().splitlines()
        return words[0] if words else f"{job['bwrap']} ended with exit code {code}"
    return None


def lines_of(text):
    """The lines to compare, without blanks at their ends and without blank lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def write_all(descriptor, content):
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)


def watch(pid, output, job, most_output):
    """Wait for the program's end or for a limit -> (outcome, None if it ended; what it printed)."""
    os.set_blocking(output, False)
    with os.fdopen(os.pidfd_open(pid), "rb", 0) as ended:
        poll = select.poll()
        poll.register(OWNER, 0)  # reports only that it was closed
        poll.register(output, select.POLLIN)
        poll.register(ended, select.POLLIN)
        printed, deadline, next_look = bytearray(), time.monotonic() + job["timeout_s"], 0.0
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timed_out", printed
            if now >= next_look:
                if processes_below(pid) + 1 - PARENTS[job["sandbox"]] > job["max_processes"]:
                    return "too_many_processes", printed
                next_look = now + LOOK_EVERY_S
            events = dict(poll.poll(1000 * max(0.0, min(deadline, next_look) - now)))
            if OWNER in events:
                raise OwnerGone
            if output in events:
                part = read_some(output)
                printed += part
                if len(printed) > most_output:
                    return "too_much_output", printed
                if not part:
                    poll.unregister(output)
            elif ended.fileno() in events:  # and all that it printed is read
                return None, printed


def read_some(output):
    with contextlib.suppress(BlockingIOError):
        return os.read(output, 2**16)
    return b""


def processes_below(pid):
    """Number of descendants of a process; 0 if the kernel does not list them."""
    count, waiting = 0, [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):  # it is gone
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                count += len(children)
                waiting += children
    return count


def end_program(pid):
    """Kill the program and all that it started -> its exit code, 128 + number after a signal."""
    with contextlib.suppress(ProcessLookupError):  # all at once: one that forks without end cannot escape
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
    _, status = os.waitpid(pid, 0)
    end_descendants()
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


# --------------------------------------------------------------------------------------------------------------------
# in the forked process


def become_program(job, folder, stdin, output, errors, status):
    """Set the limits, then replace this process with the program. The function does not return. It writes an
    error to ``status``, which closes when the program starts."""
    try:
        os.setsid()
        set_of_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        for target, descriptor in enumerate((stdin, output, errors)):
            os.dup2(descriptor, target)
        os.chdir(folder)
        inside = inside_bubblewrap(job["python_folders"]) if job["sandbox"] == "bubblewrap" else folder
        command = [job["python"], "-I", "-B", "-X", "utf8", os.path.join(inside, "program.py")]
        if job["sandbox"] == "namespaces":
            enter_namespaces(job)
        elif job["sandbox"] == "bubblewrap":
            os.set_inheritable(status, True)  # bubblewrap closes it in the sandbox
            command = bubblewrap(job, folder, status) + command
        if job["sandbox"] != "bubblewrap":
            refuse_calls(refused_calls())
        set_limits(job)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execve(command[0], command, variables(inside))
    except BaseException as error:
        os.write(status, json.dumps({"error": f"the program cannot be started: {error}"}).encode())
    finally:
        os._exit(126)


def variables(folder):
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **kept,
        **one_thread,
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
    }


def set_limits(job):
    seconds, memory = math.ceil(job["timeout_s"]) + 1, job["memory_mib"] * 2**20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def shared_memory_of(job):
    return min(SHARED_MEMORY, job["memory_mib"] * 2**20)


def refused_calls():
    """A seccomp filter for the calls whose effect no limit bounds. It refuses, with EPERM, memory that
    belongs to no process (memfd_create, System V), and Unix sockets, through which a program could reach
    processes outside, such as SGLang's. ``socketpair`` stays allowed. Empty for a machine whose call numbers
    we do not know."""
    if os.uname().machine not in SYSTEM_CALLS:
        return b""
    architecture, make_socket, without_limit = SYSTEM_CALLS[os.uname().machine]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    call_at, architecture_at, first_argument_at = 0, 4, 16
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.EPERM)
    # (operation, lines to skip if it holds, lines to skip if it does not, value)
    lines = [(load, 0, 0, architecture_at), (equal, 1, 0, architecture), refuse]
    lines += [(load, 0, 0, call_at), (at_least, 0, 1, 0x40000000), refuse]  # the same calls by x32 numbers
    for call in without_limit:
        lines += [(equal, 0, 1, call), refuse]
    lines += [(equal, 0, 3, make_socket), (load, 0, 0, first_argument_at)]
    lines += [(equal, 0, 1, socket.AF_UNIX), refuse, allow]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def refuse_calls(filter_program):
    """Set the filter for this process and all that it starts. If the kernel does not take it, the other
    limits still hold."""
    lines = ctypes.create_string_buffer(filter_program, len(filter_program))
    program = struct.pack("@HP", len(filter_program) // 8, ctypes.addressof(lines))
    with contextlib.suppress(OSError):
        set_of_process(PR_SET_NO_NEW_PRIVS, 1)
        set_of_process(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


def enter_namespaces(job):
    """Continue as nobody in new namespaces: no network, no process but the program's, and a /dev/shm that ends with it.
    When the first process of the namespaces ends, the kernel kills the others."""
    uid, gid, max_processes = os.getuid(), os.getgid(), job["max_processes"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    # Files in /dev/shm take memory that no limit of a process counts. If the mount fails, the other limits
    # still hold.
    options = f"size={shared_memory_of(job)},mode=1777".encode()
    if not libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    # A program that can make namespaces could mount more of it.
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    # Since Linux 5.14 the kernel counts processes per namespace; before, it counts all of the user's.
    if tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit()) >= (5, 14):
        resource.setrlimit(resource.RLIMIT_NPROC, (max_processes + 1, max_processes + 1))
    first = os.fork()
    if first:
        status = os.waitpid(first, 0)[1]
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    set_of_process(PR_SET_PDEATHSIG, signal.SIGKILL)


def inside_bubblewrap(python_folders):
    """The path of a program's folder in the sandbox: /tmp, unless a Python below it is mounted there too."""
    is_taken = any(path.startswith("/tmp/") for path in python_folders)
    return "/program" if is_taken else "/tmp"


def bubblewrap(job, folder, status):
    """The beginning of the command, which says what a program sees of this machine. Files of a tmpfs take
    memory that no limit of a process counts. So /dev/shm has a size limit; if bubblewrap is too old for one,
    it is read-only."""
    python_folders, version = job["python_folders"], job["bwrap_version"]
    inside = inside_bubblewrap(python_folders)
    options = [
        "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--die-with-parent", "--bind", folder, inside,
        "--json-status-fd", str(status),
    ]  # fmt: skip
    for path in ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", *python_folders):
        options += ["--ro-bind-try", path, path]
    options += ["--proc", "/proc", "--dev", "/dev"]
    if version >= SIZE_SINCE:
        options += ["--size", str(shared_memory_of(job)), "--tmpfs", "/dev/shm"]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    # A program that can make namespaces could mount more memory.
    options += ["--disable-userns"] if version >= NO_NAMESPACES_SINCE else []
    if refused := refused_calls():
        calls = os.memfd_create("calls", 0)
        write_all(calls, refused)
        options += ["--seccomp", str(calls)]
    return [job["bwrap"], *options, "--chdir", inside, "--"]


if __name__ == "__main__":
    main()
