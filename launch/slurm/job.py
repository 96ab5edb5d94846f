"""A Slurm job, seen from inside and from outside: ``RUN/job.json`` {job_id, cluster, nodes, restart}, and
``RUN/restarts.json``."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.processes.run_folder import RunFolder, write_json
from trainer.file_system import read_file

TIMEOUT_S = 60
"""Seconds that a command to Slurm's controller may take."""
FORGOTTEN = "Invalid job id"
"""In squeue's error for a job that Slurm has forgotten: it ended some time ago."""
NO_ANSWER = re.compile("(?i)Unable to contact|timed out|Unexpected message|Zero Bytes|standby mode")
"""In errors of commands to a controller that is down, busy or starting, and has not seen the request."""
PATIENCE_S = 600.0
"""Time for such a controller to answer a job that needs it to begin, or to be requeued."""
ASK_AGAIN_S = 5.0
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""States of a job that has ended and will not run again."""
ASKED_OF_SLURM = (
    "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "GPU_FREQ", "CPUS_PER_GPU", "CPUS_PER_TASK",
    "MEM_PER_GPU", "NTASKS_PER_GPU", "NTASKS_PER_TRES", "TRES_PER_TASK", "TRES_BIND", "CORE_SPEC", "THREADS_PER_CORE", "HINT",
    "EXACT", "WORKING_DIR", "REMOTE_CWD",
)  # fmt: skip
"""Requests that Slurm's commands take from the environment, as SLURM_NAME (srun) and SBATCH_NAME (sbatch).

An allocation exports its own requests for the sruns inside it. A job that is submitted from there, by ``salloc`` or in a notebook's
job, inherits them, even if it requested something else, and each srun that does not override them fails."""


class OtherCluster(RuntimeError):
    """The job is of another cluster than the one whose Slurm is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of this process."""

    id: str
    names: frozenset[str]
    """All names of the job: an element of an array has its own number, and ARRAY_ELEMENT."""
    nodes: tuple[str, ...]
    restart: int
    cluster: str | None = None

    @classmethod
    def of_environment(cls) -> "Job":
        """Raises BadInput outside a job."""
        env = os.environ
        if "SLURM_JOB_ID" not in env or "SLURM_JOB_NODELIST" not in env:
            error = "job: this process is not inside a Slurm job"
            raise BadInput(f"{error}; submit the script that `tandem slurm` writes")
        names = {env["SLURM_JOB_ID"]}
        if "SLURM_ARRAY_JOB_ID" in env:
            names.add(f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}")
        return cls(
            id=env["SLURM_JOB_ID"],
            names=frozenset(names),
            nodes=tuple(ask_slurm("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()),
            restart=int(env.get("SLURM_RESTART_COUNT", 0)),
            cluster=env.get("SLURM_CLUSTER_NAME"),
        )

    def record(self, folder: RunFolder) -> None:
        """An element of an array is recorded as ARRAY_ELEMENT, as ``tandem slurm`` does: its log has this name."""
        name = next(iter(self.names - {self.id}), self.id)
        write_json(folder.job, record(name, self.cluster, nodes=self.nodes, restart=self.restart), flush=True)

    def is_recorded(self, folder: RunFolder) -> bool:
        """Whether this job ran the folder last."""
        return recorded_job(folder) in self.names and not _differ(_cluster_of(folder), self.cluster)

    def requeue(self) -> None:
        """Requeue this job, which soon ends this process. Raises RuntimeError if Slurm refuses, or does not answer for
        PATIENCE_S."""
        try:
            ask_slurm("scontrol", "requeue", self.id, patience_s=PATIENCE_S)
        except RuntimeError as error:
            # Slurm has requeued the job itself, after it lost a node, and gives the other nodes KillWait to end.
            if "is pending execution" not in str(error):
                raise


def record(job: str, cluster: str | None, *, nodes: Sequence[str] = (), restart: int = 0) -> dict:
    """The content of job.json. A job's number is unique only within its cluster, and two clusters may share a file system."""
    return {"job_id": job, "cluster": cluster, "nodes": list(nodes), "restart": restart}


def recorded_job(folder: RunFolder) -> str | None:
    """The job that last ran this folder, or was submitted to run it."""
    job = read_file(folder.job, {"job_id": (str, int)}, [])
    return None if job is None else str(job["job_id"])


def _cluster_of(folder: RunFolder) -> str | None:
    """The cluster of ``recorded_job``; None if it was unknown."""
    job = read_file(folder.job, {"cluster": str}, [])
    return None if job is None else job["cluster"]


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one.casefold() != other.casefold()


def cluster_here(timeout_s: float = TIMEOUT_S) -> str | None:
    """The name of the cluster that this host's commands ask; None if Slurm does not say."""
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    try:
        config = ask_slurm("scontrol", "show", "config", timeout_s=timeout_s)
    except RuntimeError:
        return None
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return found[1] if found else None


def running_elsewhere(folder: RunFolder, job: Job | None = None) -> str | None:
    """The id of another job than ``job`` that runs this folder or is queued to run it, by Slurm; None if there is
    none. Raises RuntimeError if Slurm does not say: such a job may be running. ``job`` itself waits for PATIENCE_S.

    The lock of ``RunFolder.claim`` is not enough: on some shared file systems only one host sees it.
    """
    other, cluster = recorded_job(folder), _cluster_of(folder)
    if other is None or (job is not None and job.is_recorded(folder)) or shutil.which("squeue") is None:
        return None
    try:
        patience_s = PATIENCE_S if job is not None else 0.0
        states = ask_squeue(other, "%T", cluster=cluster, patience_s=patience_s).split()
    except RuntimeError as error:
        what = f"job {other} had {folder.path} last, and Slurm does not say whether it still runs ({error})"
        elsewhere = isinstance(error, OtherCluster)
        where = f"on {cluster}" if elsewhere else f"where `squeue --jobs={other}` answers"
        fix = f"try again {where}, or remove {folder.job} if the job has ended"
        raise RuntimeError(f"{what}; {fix}") from error
    return other if set(states) - OVER else None


def why_not_free(folder: RunFolder) -> str | None:
    """Why the folder must not be started, with the fix: a Slurm job runs it or is queued to, or Slurm does not say."""
    try:
        job = running_elsewhere(folder)
    except RuntimeError as error:
        return str(error)
    if job is None:
        return None
    return f"{folder.path} belongs to job {job}, which runs or is queued; wait for it, or end it with `scancel {job}`"


def is_finished(folder: RunFolder, config: RunConfig, note: Callable[[str], object] = lambda _: None) -> bool:
    """Whether all steps are done and the model is written. False if the model cannot be read: continuing the run writes it
    again. ``note`` then gets the reason."""
    damaged: list[str] = []
    done = folder.steps_of_model(damaged)
    for text in damaged:
        note(f"{text}, so the run does not count as finished")
    return done is not None and done >= config.steps and folder.has_final_model()


def count_failed_start(folder: RunFolder, limit: int) -> bool:
    """Count a failed start. Returns whether another start is allowed.

    A newer checkpoint than at the last failed start resets the count.
    """
    failures = _failures(folder) + 1
    if failures > limit:
        folder.restarts.unlink(missing_ok=True)  # a start by hand resets the count
        return False
    write_json(folder.restarts, {"checkpoint": _newest(folder), "failures": failures}, flush=True)
    return True


def pause_s(folder: RunFolder) -> float:
    """Pause before another start: 0, 15, 30, 60, 60, ... seconds, by the number of starts without a newer
    checkpoint.

    Without a pause, starts that fail at once would use up all restarts in seconds. When a node returns, Slurm kills
    the job's remaining processes there by a step number that the new start has too, several times (seen: two
    starts in 14 s).
    """
    failures = _failures(folder)
    return min(15.0 * 2 ** (failures - 1), 60.0) if failures else 0.0


def _failures(folder: RunFolder) -> int:
    """Number of starts since the newest checkpoint."""
    before = read_file(folder.restarts, {"failures": int}, [])
    return before["failures"] if before and before.get("checkpoint") == _newest(folder) else 0


def _newest(folder: RunFolder) -> str | None:
    newest = folder.newest_checkpoint()
    return newest.name if newest is not None else None


def ask_squeue(
    job: str, form: str, *, cluster: str | None = None, timeout_s: float = TIMEOUT_S, patience_s: float = 0.0
) -> str:
    """squeue's line of a job in the format ``form``; "" for a job that Slurm has forgotten. Raises RuntimeError if squeue
    fails in another way, or has another job of this number, so the job's state is unknown.

    cluster: of the job; None: unknown."""
    if isinstance(cluster, str) and _differ(cluster, here := cluster_here(timeout_s)):
        raise OtherCluster(f"it belongs to the cluster {cluster}, and this one is {here}")
    try:
        command = ("squeue", "--noheader", f"--jobs={job}", f"--format={form}", "--states=all")
        return ask_slurm(*command, timeout_s=timeout_s, patience_s=patience_s)
    except RuntimeError as error:
        if FORGOTTEN not in str(error):
            raise
        return ""


def ask_slurm(*command: str, timeout_s: float = TIMEOUT_S, patience_s: float = 0.0) -> str:
    """The output of a command to Slurm. Raises RuntimeError with its error if it fails.

    patience_s: time in which the command is repeated if the controller does not answer."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            wrong = " ".join(done.stderr.split()) if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        if wrong is None:
            return done.stdout
        if not NO_ANSWER.search(wrong) or time.monotonic() >= deadline:
            raise RuntimeError(f"`{' '.join(command)}` failed: {wrong}")
        time.sleep(ASK_AGAIN_S)
