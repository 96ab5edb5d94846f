"""A run with two servers that loses one of them, then the sample role, then both servers: it goes on with what is
left, or waits, and gets each back."""

import contextlib
import signal

import psutil
import pytest

from rollout.tiny_model import make_tiny_countdown_model
from tests.support.whole_runs import (
    RECIPE,
    SMALL,
    assert_nothing_left,
    finish,
    processes_of,
    start,
    steps_of,
    wait_for,
    wait_for_steps,
)
from trainer.tracking.ledger import LEDGER, imbalance, read_ledger

pytestmark = pytest.mark.engines

HELD_REWARD = """
import time
from pathlib import Path

def score(prompt, response, reference):
    while Path("hold").exists():
        time.sleep(0.05)
    return len(response) / 14
"""


def processes_with(folder, words: str) -> list[psutil.Process]:
    """Those with ``words`` in their command, oldest first."""
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if words in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def schedulers(folder) -> list[psutil.Process]:
    """The process of each server that computes."""
    return processes_with(folder, "sglang.launch_server")


def test_servers_and_the_sample_role_may_end_and_come_back_and_no_step_is_lost(tmp_path):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    (tmp_path / "my_reward.py").write_text(HELD_REWARD)
    settings = [
        "rollout.replicas=2",
        "rollout.max_staleness=1",
        "layout.dp=2",
        "evaluation.at_ends=false",
        "steps=1000",
        "launch.heartbeat_timeout_s=5",
        "reward={type: function, function: 'my_reward:score', timeout_s: 600}",
    ]
    process = start("train", RECIPE, *SMALL, *settings, cwd=tmp_path)
    wait_for_steps(tmp_path, 2, process)
    victim = schedulers(tmp_path)[-1]
    victim.kill()
    lost_at = len(steps_of(tmp_path))
    wait_for_steps(tmp_path, lost_at + 3, process)
    assert steps_of(tmp_path)[-1]["sync/servers"] == 1
    (tmp_path / "hold").touch()
    log = tmp_path / "runs/latest/logs/serve.log"
    wait_for(lambda: "are ready again" in log.read_text(), process, "the server's second life")
    (tmp_path / "hold").unlink()
    wait_for(lambda: steps_of(tmp_path)[-1]["sync/servers"] == 2, process, "an update of both servers")
    wait_for_steps(tmp_path, len(steps_of(tmp_path)) + 3, process)
    (role,) = processes_with(tmp_path, "launch sample")
    role.kill()
    wait_for_steps(tmp_path, len(steps_of(tmp_path)) + 4, process)
    stopped, killed = schedulers(tmp_path)[-2:]
    stopped.suspend()
    killed.kill()
    wait_for_steps(tmp_path, len(steps_of(tmp_path)) + 4, process)
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130 and "interrupted" in said, said
    assert "the sample role ended with signal SIGKILL" in said and "a successor goes on" in said, said
    steps = steps_of(tmp_path)
    numbers = list(range(1, len(steps) + 1))
    assert [step["step"] for step in steps] == [step["sync/version"] for step in steps] == numbers
    gaps = [
        step["staleness/by_lag/le_0/logprob_gap_max"]
        for step in steps
        if "staleness/by_lag/le_0/tokens" in step
    ]
    assert max(gaps) <= 1e-4
    assert max(step["staleness/max"] for step in steps) <= 1
    ledger = read_ledger(tmp_path / "runs/latest" / LEDGER)
    # The interrupt may fall between the two records of a step.
    assert len(steps) - len(ledger) in (0, 1) and imbalance(ledger) is None
    assert "was killed by SIGKILL" in log.read_text()
    assert_nothing_left(tmp_path)
