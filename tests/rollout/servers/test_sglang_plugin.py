"""The plugin of CPU servers, by itself; tests/rollout/servers/test_sglang.py looks for it in a real server."""

import subprocess
import sys

import pytest

from rollout.servers.command import PLUGIN

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(("before", "method"), [("", "fork"), (THREAD, "spawn")], ids=["alone", "a thread"])
def test_processes_are_forked_where_no_other_thread_could_hold_a_lock(before, method):
    code = f"""
import multiprocessing, threading, tandem_sglang
multiprocessing.set_start_method("spawn", force=True)
{before}
assert tandem_sglang.fork_processes("result") == "result"
print(multiprocessing.get_start_method())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == (method, 0), done.stderr


def test_sglang_finds_it_on_its_path():
    code = "from importlib.metadata import entry_points as e; print([p.load().__module__ for p in e(group='sglang.srt.plugins')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert "'tandem_sglang'" in done.stdout, done.stderr
