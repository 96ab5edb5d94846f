"""A short soak: an asynchronous run of two-turn episodes with two servers loses one of them, then the sample role,
then both servers. It continues with what is left, or waits, and gets each back. When no restart is left, the next lost
server ends it."""

import random
import re

import pytest

from benchmarks.studies.soak import SETTINGS, LongRun, Recovery, soak
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.whole_runs import SMALL, assert_nothing_left, steps_of

pytestmark = pytest.mark.engines


def test_servers_and_the_sample_role_may_end_and_come_back_as_often_as_allowed_and_no_step_is_lost(tmp_path):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    environment = "environment={type: tokens, environment: docs.examples.try_again.try_again:TryAgain}"
    settings = [
        *SETTINGS, *SMALL, environment, "steps=1000", "evaluation.at_ends=false", "checkpoint.every=0",
        "rollout.max_server_restarts=3", "launch.heartbeat_timeout_s=1",
    ]  # fmt: skip
    run = LongRun(tmp_path, settings)
    recoveries: list[Recovery] = []
    kinds = ("server killed", "sample role killed", "both servers killed")
    try:
        # It checks steps, versions, gaps and the ledger.
        soak(run, kinds, random.Random(0), recoveries.append)
        # Stopped, a server would hold the run until the collective's timeout.
        victim = run.processes_with("tandem_launch_server", without="watchdog.py")[0]
        victim.suspend()
        assert run.wait_for_end() == 1
        run.check(has_ended=True)
    finally:
        run.kill()
    assert [recovery.kind for recovery in recoveries] == [*kinds]
    assert {recovery.lost_steps for recovery in recoveries} == {0}
    first, second, _ = recoveries
    while_one_was_lost = steps_of(tmp_path)[first.at_step : second.at_step]
    assert {step["sync/servers"] for step in while_one_was_lost} == {1, 2}
    assert all(step["episode/turns_mean"] == 2 for step in steps_of(tmp_path)), "a random model tries twice"
    said = run.console.read_text()
    assert "the sample role ended with signal SIGKILL" in said and "its successor continues" in said
    stopped = rf"\(pid {victim.pid}\) had been stopped \(SIGSTOP\) for 1 s, and was killed"
    ended = rf"(?s){stopped}.*replica \d \(pid {victim.pid}\) was killed by SIGKILL"
    assert "role ended with" in said and re.search(ended, said), said
    assert re.search(r"Saved: step \d+, in .*continue with `tandem resume ", said), said
    newest = f"step_{steps_of(tmp_path)[-1]['step']:06d}"  # the learner is well, and loses nothing
    assert (tmp_path / "runs/latest/checkpoints" / newest / "complete.json").exists(), said
    serve = (tmp_path / "runs/latest/logs/serve.log").read_text()
    assert (
        "was killed by SIGKILL" in serve and "are ready again, and wait for the next weight update" in serve
    )
    assert_nothing_left(tmp_path)
