"""The watchdog, with small processes in a server's place."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout.servers.watched_process import WATCHDOG
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
