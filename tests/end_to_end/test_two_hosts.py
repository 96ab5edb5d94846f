"""Learner and sampler on one host, the servers on another: the quickstart's config with real addresses, and a
network that fails.

Each run loses the network in the middle of sampling: right after a step's line, with a server that samples
two responses at a time. The job on a real Slurm is pre-empted before, in both ways; until the first, learner and
servers take turns on both nodes.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.loader import load_config, resolved_yaml
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.slurm.cluster import ADDRESSES, HOSTS, Cluster, slurm_on_two_hosts, two_hosts
from tests.support.slurm.runs import (
    RECIPE,
    SETTINGS,
    assert_whole,
    checkpoints_of,
    steps_of,
    submit,
    wait_for_steps,
)

STEPS = 9
SHORT_CUT_S = 4.0
SLOW = ("rollout.server_args={max-running-requests: 1}", "launch.peer_timeout_s=12", f"steps={STEPS}")
pytestmark = [pytest.mark.engines, pytest.mark.cluster]


def placed(placement: str, nodes: int) -> list[str]:
    """Each side on ``nodes`` nodes, with a replica on every one."""
    counts = (
        f"{field}={nodes}" for field in ("launch.nodes.learner", "launch.nodes.rollout", "rollout.replicas")
    )
    return [f"launch.placement={placement}", *counts]


def prepared(cluster: Cluster, cwd: Path) -> tuple[Path, dict[str, str]]:
    """The run folder, and for each role what is to be typed on its host, as `tandem prepare` prints it."""
    # One learner rank: that ranks agree where they stop is seen in the job on Slurm.
    said = cluster.tandem("prepare", RECIPE, *SETTINGS, *SLOW, "layout.dp=1", cwd=cwd)
    run = (cwd / "runs" / "latest").resolve()
    everywhere = [line for line in said.splitlines() if line.startswith(("cd ", "export "))]
    lines = {
        name: re.search(rf"^\S+ -m .*\b{name} {re.escape(str(run))}.*$", said, re.MULTILINE)
        for name in ("serve", "sample", "learn")
    }
    assert all(lines.values()), said
    cluster.logs += [run / "roles", run / "logs"]
    return run, {name: "\n".join(["set -o pipefail", *everywhere, line[0]]) for name, line in lines.items()}


def start(cluster: Cluster, cwd: Path, lines: dict[str, str]) -> dict[str, subprocess.Popen]:
    hosts = {"serve": "hostb", "sample": "hosta", "learn": "hosta"}
    return {
        name: cluster.start("bash", "-c", lines[name], on=host, cwd=cwd, log=cwd / f"{name}.out")
        for name, host in hosts.items()
    }


def wait_for_end(cluster: Cluster, role: subprocess.Popen, what: str) -> int:
    cluster.wait_for(lambda: role.poll() is not None, f"{what} to end")
    return role.returncode


def end(cluster: Cluster, cwd: Path, roles: dict[str, subprocess.Popen]) -> None:
    """Those that still run, as a person does who has typed them: their whole process groups."""
    for name, role in roles.items():
        if role.poll() is None:
            os.killpg(role.pid, signal.SIGTERM)
            wait_for_end(cluster, role, name)
    cluster.assert_no_process_of(cwd)


def have_joined_the_learner(run: Path) -> bool:
    """Whether a server of the run has ever been in a process group with the learner, as SGLang says in its log."""
    return any("init custom process group" in log.read_text() for log in run.glob("logs/*.log"))


def test_by_the_commands_of_prepare(tmp_path):
    with two_hosts() as cluster:
        make_tiny_countdown_model(tmp_path / "model", seed=0)
        run, lines = prepared(cluster, tmp_path)
        roles = start(cluster, tmp_path, lines)

        def reached(count: int) -> bool:
            ended = [name for name, role in roles.items() if role.poll() is not None]
            if ended and len(steps_of(run)) < count:
                pytest.fail(f"{ended} ended{cluster.ends_of_logs()}")
            return len(steps_of(run)) >= count

        cluster.wait_for(lambda: reached(2), "2 steps")
        assert ADDRESSES["hostb"] in (run / "roles" / "serve-0.json").read_text()
        assert ADDRESSES["hosta"] in (run / "roles" / "sample.json").read_text()
        cluster.cut()
        before = len(steps_of(run))
        time.sleep(SHORT_CUT_S)
        assert len(steps_of(run)) == before, "the cut was not in the middle of sampling"
        cluster.mend()
        cluster.wait_for(lambda: reached(before + 2), "two more steps after a short cut")

        cluster.cut()
        assert wait_for_end(cluster, roles["learn"], "the learner, cut off from the servers for good,") == 1
        complete = len(steps_of(run))
        assert before + 2 <= complete < STEPS and checkpoints_of(run) == [complete]
        error = (run / "roles" / "learn.error").read_text()
        assert ADDRESSES["hostb"] in error, error
        end(cluster, tmp_path, roles)

        cluster.mend()
        roles = start(cluster, tmp_path, lines)
        assert wait_for_end(cluster, roles["learn"], "the learner, which resumes,") == 0, (
            cluster.ends_of_logs()
        )
        assert wait_for_end(cluster, roles["sample"], "the sample role") == 0, cluster.ends_of_logs()
        end(cluster, tmp_path, roles)
        assert_whole(run, STEPS, tmp_path)


def test_a_job_that_is_preempted_twice_and_loses_a_node_goes_on_by_itself(tmp_path):
    with slurm_on_two_hosts() as cluster:
        make_tiny_countdown_model(tmp_path / "model", seed=0)
        check = [sys.executable, "-m", "launch", "check-cluster", RECIPE, *SETTINGS]
        checked = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *check, cwd=tmp_path, timeout_s=120)
        for host in HOSTS:
            assert f"{host}: nothing found that would keep a run from working" in checked, checked

        job, run = submit(cluster, tmp_path, *SLOW, *placed("colocated", 2), "launch.slurm.max_restarts=20")
        wait_for_steps(cluster, job, run, 1)
        first_node = {name: "hosta" for name in ("learn-0", "sample", "serve-0")}
        second_node = {name: "hostb" for name in ("learn-1", "serve-1")}
        assert cluster.steps(job).items() >= (first_node | second_node).items()
        status = cluster.tandem("status", str(run), cwd=tmp_path)
        assert re.search(r"^state +running$", status, re.MULTILINE), status
        assert re.search(rf"^job +{job} RUNNING on host\[?a", status, re.MULTILINE), status

        wait_for_steps(cluster, job, run, 2)
        assert not have_joined_the_learner(run), "the servers of each node copy from the learner on it"
        # SIGTERM to every process of the job, as a pre-emption. It stays held until its sides are separate.
        cluster.run("scontrol", "requeuehold", job)
        cluster.wait_for_job(job, "PENDING", "REQUEUE_HOLD")
        cluster.wait_for(
            lambda: checkpoints_of(run) == steps_of(run)[-1:], "the checkpoint of the last complete step"
        )
        separate = load_config(run / "config.yaml", placed("separate", 1))
        (run / "config.yaml").write_text(resolved_yaml(separate))
        cluster.run("scontrol", "release", job)

        def is_started_again(restarts: int) -> bool:
            state = cluster.job(job)
            return (state["Restarts"], state["JobState"]) == (str(restarts), "RUNNING")

        # The start before it may have gone further than was asked: a busy machine looks late.
        cluster.wait_for(lambda: is_started_again(1), "the job to be started again")
        wait_for_steps(cluster, job, run, max(4, len(steps_of(run)) + 1))
        assert (
            cluster.steps(job).items() >= {"learn-0": "hosta", "sample": "hosta", "serve-0": "hostb"}.items()
        )
        assert have_joined_the_learner(run)
        cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit

        # Steps may be faster than the signal's way through Slurm and the batch script.
        cluster.wait_for(lambda: is_started_again(2), "the job to be started again after its signal")
        wait_for_steps(cluster, job, run, max(6, len(steps_of(run)) + 1))
        cluster.cut()
        cluster.wait_for(lambda: cluster.job(job)["Restarts"] == "3", "the job to be requeued")
        complete = len(steps_of(run))
        assert 6 <= complete < STEPS
        # Slurm may notice before the learner does, which then has Slurm's KillWait for it.
        cluster.wait_for(
            lambda: checkpoints_of(run)[-1:] == steps_of(run)[-1:], "the checkpoint of the last complete step"
        )

        cluster.mend()
        ended = cluster.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
        log = (run / "logs" / f"slurm-{job}.log").read_text()
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
        # By the requeue's SIGTERM to everything, servers too, and by USR1.
        first, second = [int(step) for step in re.findall(r"stopped after step (\d+) on request", log)][:2]
        assert 2 <= first < 4 <= second < STEPS - 1, log
        # The lost node comes back with its old step, which Slurm then kills by a number that the new start's
        # has too: that is one more lost server or some, each of which costs a start and no step.
        starts_lost = re.findall(
            r"^tandem: (?:the (?:learn-0|serve-0) role ended|stopped after step)", log, re.MULTILINE
        )
        assert len(starts_lost) == int(ended["Restarts"]), log
        assert_whole(run, STEPS, tmp_path)
        assert re.search(r"^state +finished$", cluster.tandem("status", str(run), cwd=tmp_path), re.MULTILINE)
        assert f"==> {run}/logs/serve-0.log <==" in cluster.tandem("logs", str(run), cwd=tmp_path)
        cluster.assert_no_process_of(tmp_path)
