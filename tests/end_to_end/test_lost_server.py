"""A short soak: an asynchronous run of two-turn episodes with two servers loses one of them, then the sample role,
then both servers. It goes on with what is left, or waits, and gets each back."""

import random
import signal

import pytest

from benchmarks.studies.soak import SETTINGS, LongRun, Recovery, soak
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.whole_runs import SMALL, assert_nothing_left, steps_of

pytestmark = pytest.mark.engines


def test_servers_and_the_sample_role_may_end_and_come_back_and_no_step_is_lost(tmp_path):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    environment = "environment={type: tokens, environment: docs.examples.try_again.try_again:TryAgain}"
    run = LongRun(
        tmp_path,
        [*SETTINGS, *SMALL, environment, "steps=1000", "evaluation.at_ends=false", "checkpoint.every=0"],
    )
    recoveries: list[Recovery] = []
    kinds = ("server killed", "sample role killed", "both servers killed")
    try:
        soak(
            run, kinds, random.Random(0), recoveries.append
        )  # it checks steps, versions, gaps and the ledger
        run.supervisor.send_signal(signal.SIGINT)
        assert run.wait_for_end() == 130
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
    assert "the sample role ended with signal SIGKILL" in said and "a successor goes on" in said
    serve = (tmp_path / "runs/latest/logs/serve.log").read_text()
    assert "was killed by SIGKILL" in serve and "are ready again, for the next update" in serve
    assert_nothing_left(tmp_path)
