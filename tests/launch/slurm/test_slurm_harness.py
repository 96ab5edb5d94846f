"""The clusters that other tests run on do what those tests build on: steps on nodes, pre-emption, a link that
can be cut, nothing left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slurm.cluster import (
    ADDRESSES,
    ROOT,
    Cluster,
    plain_slurm,
    processes_of,
    slurm_on_two_hosts,
)

# Two job steps, each of which says where it is and ends at SIGTERM; the script asks for its own requeue at
# SIGUSR1.
JOB = """#!/bin/bash
#SBATCH --nodes=2 --open-mode=append --output=job.log --signal=B:USR1@60
trap 'scontrol requeue $SLURM_JOB_ID' USR1
for name in learner serve; do
  [ $name = learner ] && node=0 || node=1
  nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
  timeout 300 srun --exact --nodes=1 --ntasks=1 --nodelist=${nodes[node]} --job-name=$name \
    bash -c "echo $name ${SLURM_RESTART_COUNT:-0} \\$SLURMD_NODENAME \\$(hostname) >> started.log; while [ ! -e end ]; do sleep 0.2; done" &
  steps+=($!)
done
for step in "${steps[@]}"; do while kill -0 $step 2>/dev/null; do wait $step; done; done
"""


def submit(cluster: Cluster, folder: Path) -> str:
    (folder / "job.sh").write_text(JOB)
    cluster.logs += [folder / "job.log", folder / "started.log"]
    return cluster.run("sbatch", "--parsable", "job.sh", cwd=folder).strip()


def started(folder: Path) -> list[str]:
    file = folder / "started.log"
    return sorted(file.read_text().splitlines()) if file.exists() else []


def test_steps_on_two_nodes_and_both_ways_of_being_requeued(tmp_path):
    with plain_slurm() as cluster:
        job = submit(cluster, tmp_path)
        host = os.uname().nodename
        expected = []
        for start in range(3):
            expected = sorted([*expected, f"learner {start} n1 {host}", f"serve {start} n2 {host}"])
            cluster.wait_for(
                lambda expected=expected: started(tmp_path) == expected,
                f"both steps of start {start}",
                deadline_s=240,
            )
            assert cluster.steps(job).items() >= {"learner": "n1", "serve": "n2"}.items()
            if start == 0:
                cluster.run("scontrol", "requeue", job)
            if start == 1:
                cluster.run("scancel", "--batch", "--signal=USR1", job)
        (tmp_path / "end").touch()
        ended = cluster.wait_for_job(job, "COMPLETED", deadline_s=240)
        assert (ended["Restarts"], ended["ExitCode"]) == ("2", "0:0")
        cluster.assert_no_process_of(tmp_path)


def test_slurm_on_two_hosts_that_can_be_cut_apart(tmp_path):
    with slurm_on_two_hosts() as cluster:
        job = submit(cluster, tmp_path)
        cluster.wait_for(
            lambda: started(tmp_path) == ["learner 0 hosta hosta", "serve 0 hostb hostb"],
            "both steps",
            deadline_s=240,
        )
        reach = f"exec 3<>/dev/tcp/{ADDRESSES['hostb']}/22"  # nobody listens there: refused at once by a host that is reached

        def answer(host: str) -> str:
            line = cluster.command("timeout", "2", "bash", "-c", reach, on=host)
            return subprocess.run(line, env=cluster.env, capture_output=True, text=True).stderr

        assert "refused" in answer("hosta") and "refused" in answer("hostb")
        cluster.cut()
        assert "refused" not in answer("hosta")
        cluster.mend()
        cluster.wait_for(lambda: "refused" in answer("hosta"), "the link to be mended", deadline_s=120)
        (tmp_path / "end").touch()
        cluster.wait_for_job(job, "COMPLETED", deadline_s=240)


HOLDER = """
import sys, time
from pathlib import Path
from tests.support.slurm.cluster import slurm_on_two_hosts
with slurm_on_two_hosts() as cluster:
    cluster.run("sbatch", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 1000")
    cluster.wait_for(lambda: "step" in cluster.run("squeue", "--steps", "--noheader", "--format=step"), "a step", deadline_s=240)
    print(cluster.base, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_is_left_of_a_cluster_whose_user_is_gone(number):
    # A shell starts its background jobs, such as a whole test run, with SIGINT ignored, and children inherit
    # that.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler){HOLDER}"
    user = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    base = Path(user.stdout.readline().strip() or pytest.fail("no cluster came up"))
    assert base.is_dir() and processes_of(base)
    user.send_signal(number)
    user.wait(timeout=60)
    lasting = Cluster(base=base, nodes=("hosta", "hostb"), has_hosts=True, env={})
    lasting.wait_for(lambda: not base.exists(), "the cluster to be gone", deadline_s=240)
    lasting.wait_for(lambda: not processes_of(base), "its processes to be gone", deadline_s=120)
    assert not [name for name in os.listdir("/run/netns") if name.startswith(base.name)]
