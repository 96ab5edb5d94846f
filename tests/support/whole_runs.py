"""Whole runs: the command as a user starts it, on a tiny model made here; waited for, and looked for afterwards."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainer.metric_names import find_entry

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    # A shell starts its background jobs, such as a whole test run, with SIGINT ignored, and children inherit
    # that.
    interruptible = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", interruptible, sys.executable, "-m", "launch", *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, *, deadline_s: float = DEADLINE_S) -> str:
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return said


def run(*arguments: str, cwd: Path, exit_code: int = 0) -> str:
    """The output of a command that ends with ``exit_code`` and leaves no process of its folder."""
    process = start(*arguments, cwd=cwd)
    output = finish(process)
    assert process.returncode == exit_code, output
    assert_nothing_left(cwd)
    return output


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process whose command line or working directory is inside ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                str(folder) in " ".join(process.cmdline()) or str(folder) in process.cwd()
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # of another test's folder, which is gone
                raise
    return found


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while left := processes_of(folder):
        assert time.monotonic() < deadline, f"still running: {[p.cmdline() for p in left]}"
        time.sleep(0.1)


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.2)


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen) -> None:
    metrics = folder / "runs" / "latest" / "metrics.jsonl"
    wait_for(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, process, f"{count} steps"
    )


def steps_of(folder: Path) -> list[dict]:
    text = (folder / "runs" / "latest" / "metrics.jsonl").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may still be being written
    steps = [step for step in map(json.loads, lines) if step["step"] > 0]
    names = {name for step in steps for name in step} - {"step", "elapsed_s"}
    assert {name for name in names if find_entry(name) is None} == set(), "not in trainer/metric_names.py"
    return steps


RECIPE = str(ROOT / "configs/recipes/countdown_tiny.yaml")
SMOKE = str(ROOT / "configs/debug/countdown_smoke.yaml")
SMALL = [
    "model.path=model",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.max_prompts=16",
    "evaluation.every=0",
]
