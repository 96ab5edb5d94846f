"""Nothing is left of the clusters that other tests run on, whatever becomes of their users."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slurm.cluster import ROOT, Cluster, processes_of

pytestmark = pytest.mark.cluster

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
    lasting = Cluster(base=base, env={})
    lasting.wait_for(lambda: not base.exists(), "the cluster to be gone", deadline_s=240)
    lasting.wait_for(lambda: not processes_of(base), "its processes to be gone", deadline_s=120)
    assert not [name for name in os.listdir("/run/netns") if name.startswith(base.name)]
