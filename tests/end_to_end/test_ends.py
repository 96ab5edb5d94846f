"""A run that is interrupted, or one of whose processes dies: an exit code, an error, and no process left."""

import contextlib
import re
import signal
from pathlib import Path

import psutil
import pytest

from configs.loader import load_config
from launch.processes.supervisor import RoleFailed, Supervisor
from launch.roles.start import folder_of, role
from tests.support.whole_runs import (
    RECIPE,
    SMALL,
    SMOKE,
    assert_nothing_left,
    finish,
    processes_of,
    start,
    steps_of,
    wait_for,
    wait_for_steps,
)
from trainer.engine_agreement import EXACT_TOLERANCE

pytestmark = pytest.mark.engines


def test_an_interrupt_while_the_engines_start_leaves_no_process_and_exit_code_130(folder):
    """In the middle of training: test_router.py."""
    process = start("train", RECIPE, *SMALL, "steps=1000", "evaluation.at_ends=false", cwd=folder)
    wait_for(lambda: victims("serve", folder), process, "the serve role to start")
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert_nothing_left(folder)


def test_the_ranks_of_a_killed_torchrun_end_with_it(folder):
    """They are in sessions of their own, so the supervisor cannot reach them; they wait for servers."""
    settings = [f"model.path={folder / 'model'}", "layout.dp=2", f"launch.runs_dir={folder / 'runs'}"]
    config = load_config(RECIPE, settings)
    run = folder_of(config)
    with pytest.raises(RoleFailed) as failed, Supervisor(grace_s=5) as supervisor:
        supervisor.start(role("learn", run, config, ranks=2))
        wait_for(lambda: len(list(run.path.glob("roles/rank-*.beat"))) == 2, None, "the ranks to start")
        assert len(victims("learner rank", folder)) == 2
        (torchrun,) = victims("torchrun", folder)
        torchrun.kill()
        supervisor.wait_until_done("learn")
    assert f"the learn role ended with signal SIGKILL (its torchrun, pid {torchrun.pid})" in str(failed.value)
    assert_nothing_left(folder)


def victims(name: str, folder: Path) -> list[psutil.Process]:
    """The processes of a run that a crash can hit."""
    marks = {
        "learner rank": lambda line: "learn" in line and "launch.roles.rendezvous" not in line,
        "torchrun": lambda line: "launch.roles.rendezvous" in line,
        "sample": lambda line: "sample" in line,
        "serve": lambda line: "serve" in line,
    }
    found = []
    for process in processes_of(folder):
        # It, or its parent, has ended meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            # A rank's writers of checkpoints have its command line, but are no children of torchrun.
            is_rank = name != "learner rank" or "launch.roles.rendezvous" in process.parent().cmdline()
            # The title of a rank that is a fork is one word to psutil.
            if marks[name](" ".join(process.cmdline()).split()) and is_rank:
                found.append(process)
    return found


def test_a_learner_rank_that_dies_ends_the_run_with_an_error_and_no_process(folder):
    """A server that dies: test_lost_server.py. The run has every term of the loss at once, and a bfloat16
    rollout, whose gap to the learner shows."""
    # With checkpoints: their writer is a process of a rank's, in no group of the supervisor's.
    settings = [
        *SMALL,
        "steps=1000",
        "evaluation.at_ends=false",
        "checkpoint.every=1",
        "rollout.max_server_restarts=0",
    ]
    process = start("train", SMOKE, *settings, cwd=folder)
    wait_for_steps(folder, 2, process)
    for name in ("sample", "serve"):  # the import takes more than three CPU seconds, and 330 MiB
        assert not any("libtorch" in part.path for part in victims(name, folder)[0].memory_maps()), (
            f"{name} needs no torch"
        )
    found = victims("learner rank", folder)
    assert len(found) == 2
    found[-1].kill()
    said = finish(process)
    assert process.returncode == 1, said
    named = rf"rank \d of this node \(pid {found[-1].pid}\) was killed by SIGKILL"
    assert "role ended with" in said and re.search(named, said), said
    assert re.search(r"Saved: step \d+, in .*continue with `tandem resume ", said), said
    for step in steps_of(folder):
        assert step["mismatch/logprob_gap_max"] > EXACT_TOLERANCE and step["mismatch/ess"] > 0.9
        assert step["loss/kl"] > 0 and step["loss/entropy"] < 0 and step["optim/grad_norm"] > 0
    assert_nothing_left(folder)
