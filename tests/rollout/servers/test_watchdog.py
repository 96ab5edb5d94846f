"""The watchdog, with small processes in a server's place."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout.servers import watchdog
from rollout.servers.watched_process import LONGEST_FOLDER, WATCHDOG, end_watched, start_watched
from tests.support.process_groups import assert_all_end, group_of

TREE = "sleep 600 & sleep 600 & echo started; wait"
"""A 'server' with two children."""


def start_tree(command: str, before: Callable[[], object] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", str(WATCHDOG), "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=before,
    )


def test_the_end_of_the_lifeline_ends_the_whole_group():
    with start_tree(TREE) as watchdog:
        watchdog.stdout.readline()
        members = group_of(watchdog.pid)
        assert len(members) >= 4
        watchdog.stdin.close()
        assert_all_end(members)


def test_a_server_that_ends_hands_on_its_code_and_leaves_nothing():
    with start_tree("sleep 600 & echo started; exit 7") as watchdog:
        watchdog.stdout.readline()
        members = group_of(watchdog.pid)
        assert watchdog.wait(20) == 7
        assert_all_end(members)


def test_a_killed_watchdog_takes_the_server_with_it():
    with start_tree("echo $$; exec sleep 600") as watchdog:
        server = psutil.Process(int(watchdog.stdout.readline()))
        watchdog.kill()
        assert_all_end([server])


@pytest.mark.parametrize(("given", "expected"), [(0o000, "0022"), (0o002, "0022"), (0o077, "0077")])
def test_no_other_user_may_write_to_what_a_server_makes(given, expected):
    """SGLang's unix sockets among them, whose messages its processes unpickle."""
    with start_tree("umask", lambda: os.umask(given)) as watchdog:
        assert watchdog.stdout.read().decode().strip() == expected


HANDLER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGWINCH, lambda *_: print("going on", flush=True))
print("started", flush=True)
while True:
    signal.pause()
"""
"""A 'server' with a handler of its own for SIGTERM, as SGLang has."""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_server_outlasts_sigterm_exactly_where_its_owner_ignores_it(ignored):
    command = f"exec {sys.executable} -c '{HANDLER}'"
    with start_tree(
        command, (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)) if ignored else None
    ) as watchdog:
        assert watchdog.stdout.readline() == b"started\n"
        (server,) = psutil.Process(watchdog.pid).children()
        os.killpg(watchdog.pid, signal.SIGTERM)
        if ignored:
            # Of two that can be delivered SIGTERM would come first, by its number.
            server.send_signal(signal.SIGWINCH)
            assert watchdog.stdout.readline() == b"going on\n"
            watchdog.stdin.close()
        else:
            assert watchdog.wait(20) == 3
        assert_all_end([server])


MAKER = """
import mmap, os, sys, tempfile, time
tempfile.NamedTemporaryFile(delete=False).close()
for name in sys.argv[2:]:
    with open(f"/dev/shm/{name}".replace("PID", str(os.getpid())), "w+b") as file:
        file.truncate(10)
        globals()[name] = mmap.mmap(file.fileno(), 10)
print(os.getpid(), os.environ["TMPDIR"], flush=True)
os.mkfifo(sys.argv[1])
open(sys.argv[1])
"""
"""A part of a 'server': it makes files, as SGLang does, and waits."""
KEPT = "torch_1_2_3", "other-file"
"""Not made by the server, or of an unknown kind: names that are kept, as the test's own files."""


@pytest.mark.parametrize("end", ["owner ends it", "owner is gone", "server exits", "group is killed"])
def test_files_in_memory_and_in_tmpdir_end_with_a_server(end, tmp_path):
    """By SIGKILL nothing of it can remove them itself. If the watchdog is killed too, its list of them is left."""
    mine = f"tandem-test-{tmp_path.name}-{os.getpid()}"
    made, kept = [f"sgl_shm_{mine}_PID_1", f"torch_PID_{mine}"], [f"{name}-{mine}" for name in KEPT]
    pipe = tmp_path / "pipe"
    words = [sys.executable, "-c", MAKER, str(pipe), *made, *kept]
    then = f'while ! test -p "{pipe}"; do :; done; ' + ("exit 7" if end == "server exits" else "wait")
    process = start_watched(
        ["sh", "-c", f'"$0" "$@" & {then}', *words], log_file=tmp_path / "log", environment=os.environ
    )
    try:
        while len(said := (tmp_path / "log").read_text().split()) < 2 or not pipe.exists():
            assert process.poll() is None
        pid, folder = said
        paths = [Path("/dev/shm", name.replace("PID", pid)) for name in [*made, *kept]]
        assert folder == process.folder
        if end != "server exits":  # else the folder may be gone by now
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        if end == "owner is gone":
            process.stdin.close()
        if end == "group is killed":
            listed = Path(folder, watchdog.LIST)
            while not listed.exists() or len(listed.read_text().split()) < len(made):
                assert process.poll() is None
            maker = psutil.Process(int(pid))
            os.killpg(process.pid, signal.SIGKILL)
            assert_all_end([maker])
            end_watched([process])
        elif end != "owner ends it":
            assert process.wait(20) == (7 if end == "server exits" else -signal.SIGKILL)
        else:
            assert all(path.exists() for path in paths) and len(os.listdir(folder)) == 1
            end_watched([process])
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert not os.path.exists(folder)
    finally:
        end_watched([process])
        for name in kept:
            Path("/dev/shm", name).unlink()


def test_files_in_memory_are_known_before_a_server_crashes_with_its_workers(monkeypatch):
    """The workers ask the kernel to end them with it, and then nobody has mapped the files."""
    server, looks, files = subprocess.Popen(["sleep", "300"]), [], set()

    def look(pids):
        looks.append(server.pid in pids)
        server.kill()
        return {"/dev/shm/sgl_shm_mq_1_2"}

    monkeypatch.setattr(watchdog, "shared_memory_of", look)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    monkeypatch.setattr(watchdog, "shared_memory_changed_at", lambda: time.time() + 3600)
    reader, writer = os.pipe()
    with open(reader) as owner, open(writer, "w"):
        monkeypatch.setattr(sys, "stdin", owner)
        assert watchdog._wait_for_server_or_owner(server, files) == -signal.SIGKILL
    assert files == {"/dev/shm/sgl_shm_mq_1_2"} and all(looks)


def test_the_folder_of_a_server_has_a_short_path(tmp_path, monkeypatch):
    """SGLang makes unix sockets in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    process = start_watched(["true"], log_file=tmp_path / "log", environment=os.environ)
    try:
        assert len(process.folder) <= LONGEST_FOLDER < 90
    finally:
        end_watched([process])
    assert not os.path.exists(process.folder)


ADOPTER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER, as the supervisor is
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]]).returncode)
"""
OWNER = """
import os, sys, time
from pathlib import Path
import psutil
from rollout.servers import watched_process
from rollout.servers.watched_process import end_watched, server_pid, start_watched
watched_process.KILL_TIMEOUT_S = 1e9
process = start_watched(["sh", "-c", "sleep 600 & wait"], log_file=Path(sys.argv[1]), environment=os.environ)
while (pid := server_pid(process)) is None or not psutil.Process(pid).children():
    time.sleep(0.01)
(left,) = psutil.Process(pid).children()
psutil.Process(pid).kill()
while left.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
end_watched([process])
"""


def test_the_end_of_a_server_does_not_wait_for_zombies_that_somebody_else_has_adopted(tmp_path):
    """A serve role that did so told of a killed server half a minute late, after the learner that had lost
    it."""
    command = [sys.executable, "-c", ADOPTER, OWNER, str(tmp_path / "log")]
    assert (
        subprocess.run(command, timeout=120, check=False, cwd=Path(__file__).resolve().parents[3]).returncode
        == 0
    )
