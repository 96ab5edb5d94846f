"""A run that is interrupted, or one of whose processes dies: an exit code, an error, and no process left."""

import contextlib
import re
import signal
from pathlib import Path

import psutil
import pytest

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

pytestmark = pytest.mark.engines
PHASES = {"while the engines start": 0, "in the middle of training": 2}


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_leaves_no_process_and_exit_code_130(folder, phase):
    process = start("train", RECIPE, *SMALL, "steps=1000", "evaluation.at_ends=false", cwd=folder)
    if PHASES[phase]:
        wait_for_steps(folder, PHASES[phase], process)
    else:
        wait_for(lambda: victims("serve", folder), process, "the serve role to start")
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert_nothing_left(folder)


def victims(name: str, folder: Path) -> list[psutil.Process]:
    """The processes of a run that a crash can hit."""
    marks = {
        "learner rank": lambda line: "learn" in line and "launch.roles.rendezvous" not in line,
        "torchrun": lambda line: "launch.roles.rendezvous" in line,
        "sample": lambda line: "sample" in line,
        "serve": lambda line: "serve" in line,
        "sglang": lambda line: "sglang.launch_server" in line,
    }
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(
            psutil.NoSuchProcess, AttributeError
        ):  # it, or its parent, has ended meanwhile
            # A rank's writers of checkpoints have its command line, but are no children of torchrun.
            is_rank = name != "learner rank" or "launch.roles.rendezvous" in process.parent().cmdline()
            if marks[name](process.cmdline()) and is_rank:
                found.append(process)
    return found


NAMED = {
    "learner rank": r"rank \d of this node \(pid {pid}\) was killed by SIGKILL",
    "torchrun": r"ended with signal SIGKILL \(its torchrun, pid {pid}\)",
    "sglang": r"(?s)\(pid {pid}\) had been stopped \(SIGSTOP\) for 1 s, and was killed.*replica 0 \(pid {pid}\) was killed by SIGKILL",
}  # fmt: skip


@pytest.mark.parametrize("victim", NAMED)
def test_any_process_that_dies_ends_the_run_with_an_error_and_no_process(folder, victim):
    # With checkpoints: their writer is a process of a rank's, in no group of the supervisor's.
    settings = [
        *SMALL,
        "steps=1000",
        "evaluation.at_ends=false",
        "checkpoint.every=1",
        "launch.heartbeat_timeout_s=1",
    ]
    process = start("train", RECIPE, *settings, cwd=folder)
    wait_for_steps(folder, 2, process)
    found = victims(victim, folder)
    assert found, f"no {victim} found"
    if victim == "sglang":  # stopped, it would hold the run until the collective's timeout
        found[-1].suspend()
    else:
        found[-1].kill()
    said = finish(process)
    assert process.returncode == 1, said
    assert "role ended with" in said and re.search(NAMED[victim].format(pid=found[-1].pid), said), said
    assert re.search(r"Saved: step \d+, in .*go on with `tandem resume ", said), said
    if victim == "sglang":  # the learner is well, and loses nothing
        newest = (
            folder
            / "runs"
            / "latest"
            / "checkpoints"
            / f"step_{steps_of(folder)[-1]['step']:06d}"
            / "complete.json"
        )
        assert newest.exists(), said
    assert_nothing_left(folder)
