"""The quickstart's config on a real Slurm of two nodes: placed in job steps, pre-empted in both ways, and
whole in the end."""

import re

import pytest

from tests.support.slurm.cluster import plain_slurm
from tests.support.slurm.runs import assert_whole, checkpoints_of, submit, wait_for_steps

STEPS = 15
SLOW = "rollout.server_args={max-running-requests: 4}"
"""So that a step takes longer than to look and to act."""
pytestmark = pytest.mark.engines


def test_a_run_that_is_preempted_twice_goes_on_by_itself(tmp_path):
    with plain_slurm() as cluster:
        cluster.tandem("make-tiny-model", "model", cwd=tmp_path)
        job, run = submit(cluster, tmp_path, f"steps={STEPS}", SLOW)
        wait_for_steps(cluster, job, run, 1)
        assert cluster.steps(job).items() >= {"learn-0": "n1", "sample": "n1", "serve-0": "n2"}.items()
        said = cluster.tandem("status", str(run), cwd=tmp_path)
        assert re.search(r"^state +running$", said, re.MULTILINE), said
        assert re.search(rf"^job +{job} RUNNING on n\[1-2\]", said, re.MULTILINE), said

        wait_for_steps(cluster, job, run, STEPS // 3)
        cluster.run("scontrol", "requeue", job)  # SIGTERM to every process of the job, as a pre-emption

        wait_for_steps(cluster, job, run, 2 * STEPS // 3)
        assert cluster.job(job)["Restarts"] == "1"
        cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit

        ended = cluster.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
        said = (run / "logs" / f"slurm-{job}.log").read_text()
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "2"), said
        # By the requeue's SIGTERM to everything, servers too, and by USR1.
        first, second = [int(step) for step in re.findall(r"stopped after step (\d+) on request", said)]
        assert STEPS // 3 <= first < 2 * STEPS // 3 <= second < STEPS, said
        assert checkpoints_of(run) == [second, STEPS], "the newest two: of the last stop, and of the end"
        assert_whole(run, STEPS, tmp_path)
        assert re.search(r"^state +finished$", cluster.tandem("status", str(run), cwd=tmp_path), re.MULTILINE)
        assert f"==> {run}/logs/serve-0.log <==" in cluster.tandem("logs", str(run), cwd=tmp_path)
        cluster.assert_no_process_of(tmp_path)
