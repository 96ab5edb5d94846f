"""A real Slurm, and two hosts that are network namespaces, for tests: up in a few seconds, and gone with the
process that asked for it.

    with two_hosts() as cluster:     hosta (10.77.0.1) and hostb (10.77.0.2), joined by a link that can be cut; no Slurm
    with slurm_on_two_hosts() as cluster:   both: one node per host, the controller on hosta

Several can be up on one machine at a time: each has a folder, namespaces and ports of its own.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DEADLINE_S = 400.0
ANSWER_S = 180.0
"""Deadline of one command: those of Slurm wait for a busy controller."""
HOSTS = ("hosta", "hostb")
ADDRESSES = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}


@dataclass(slots=True, kw_only=True)
class Cluster:
    base: Path
    env: dict[str, str]
    """Of every command: how Slurm's commands find this Slurm, and how ours are found."""
    logs: list[Path] = field(default_factory=list)
    """Files or folders of logs, whose ends are shown if a wait fails."""

    def command(self, *command: str, on: str | None = None) -> list[str]:
        """The command line that runs ``command`` on a host; by default on the first."""
        return [str(HERE / "on.sh"), on or HOSTS[0], *command]

    def start(
        self, *command: str, on: str | None = None, cwd: Path | None = None, log: Path
    ) -> subprocess.Popen:
        """In the background, in a process group of its own."""
        self.logs.append(log)
        with log.open("ab") as out:
            line = self.command(*command, on=on)
            return subprocess.Popen(
                line,
                cwd=cwd,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def run(
        self, *command: str, on: str | None = None, cwd: Path | None = None, timeout_s: float = ANSWER_S
    ) -> str:
        """The command's output. If the command fails, the test fails with its output."""
        done = self._run(*command, on=on, cwd=cwd, timeout_s=timeout_s)
        assert done.returncode == 0, (
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{self.ends_of_logs()}"
        )
        return done.stdout

    def _run(
        self, *command: str, on: str | None = None, cwd: Path | None = None, timeout_s: float = ANSWER_S
    ) -> subprocess.CompletedProcess:
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        return subprocess.run(
            self.command(*command, on=on), cwd=cwd, env=self.env, timeout=timeout_s, **pipes
        )

    def ask(self, *command: str) -> str:
        """The answer of Slurm's controller; asked again if it is too busy."""
        deadline = time.monotonic() + ANSWER_S
        while (done := self._run(*command)).returncode != 0 and time.monotonic() < deadline:
            time.sleep(0.5)
        return done.stdout if done.returncode == 0 else self.run(*command)

    def tandem(self, *arguments: str, cwd: Path, timeout_s: float = 120.0) -> str:
        return self.run(sys.executable, "-m", "launch", *arguments, cwd=cwd, timeout_s=timeout_s)

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of ``scontrol show job``: JobState, Restarts, ExitCode, Reason, ..."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def steps(self, job_id: str) -> dict[str, str]:
        """Node lists by step name, of the steps that run now."""
        lines = self.ask("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%j|%N").splitlines()
        return dict(line.strip().split("|") for line in lines if line.strip())

    def wait_for_job(self, job_id: str, *states: str, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Its fields once it is in one of ``states``."""
        self.wait_for(
            lambda: self.job(job_id)["JobState"] in states,
            f"job {job_id} to be {' or '.join(states)}",
            deadline_s=deadline_s,
        )
        return self.job(job_id)

    def wait_for(self, condition: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {deadline_s:.0f} s for {what}{self.ends_of_logs()}")
            time.sleep(0.5)

    def cut(self) -> None:
        """Cut the link between the hosts. On hosta, where learner and sampler are, every request stays
        unanswered."""
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def _link(self, state: str) -> None:
        subprocess.run(
            ["ip", "-n", f"{self.base.name}-hostb", "link", "set", "link0", state], check=True, timeout=20
        )

    def ends_of_logs(self, lines: int = 40) -> str:
        """For the message of a failure."""
        files = [
            file
            for log in [*self.logs, self.base / "log"]
            for file in (sorted(log.rglob("*")) if log.is_dir() else [log])
        ]
        said = []
        for file in files:
            if file.is_file():
                end = "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
                said.append(f"\n--- {file} (its end)\n{end}")
        return "".join(said)

    def assert_no_process_of(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        """On neither node: nothing whose command line or working directory lies in ``folder``, but for what
        ``start`` keeps here."""
        deadline = time.monotonic() + deadline_s
        while left := processes_of(folder):
            if time.monotonic() > deadline:
                pytest.fail(f"after {deadline_s:.0f} s still running: {left}{self.ends_of_logs()}")
            time.sleep(0.2)


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            line = " ".join(process.cmdline())
            if str(folder) in line or str(folder) in process.cwd():
                found.append(f"{process.pid} {line}")
    return found


@contextlib.contextmanager
def two_hosts() -> Iterator[Cluster]:
    _skip_without(slurm=False)
    with _held("hosts") as cluster:
        yield cluster


@contextlib.contextmanager
def slurm_on_two_hosts() -> Iterator[Cluster]:
    _skip_without(slurm=True)
    with _held("slurm-hosts") as cluster:
        yield cluster


@contextlib.contextmanager
def _held(kind: str) -> Iterator[Cluster]:
    # Its name is part of namespaces' and sockets' names, which must be short.
    base = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))
    base.chmod(0o755)
    settings = {"TANDEM_CLUSTER": str(base), "SLURM_CONF": str(base / "etc/slurm.conf")}
    cluster = Cluster(base=base, env=_clean_environment() | settings)
    (base / "log").mkdir()
    with (base / "log" / "hold.log").open("ab") as log:
        holder = subprocess.Popen(
            [str(HERE / "hold.sh"), kind],
            env=cluster.env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        cluster.wait_for(
            lambda: (base / "up").exists() or holder.poll() is not None,
            "the cluster to be up",
            deadline_s=120,
        )
        assert holder.poll() is None, f"the cluster did not start{cluster.ends_of_logs()}"
        yield cluster
    finally:
        holder.stdin.close()
        try:
            holder.wait(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(holder.pid, 9)
            raise


def _clean_environment() -> dict[str, str]:
    """This process's environment without the variables that a job or torchrun around the tests would have set."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "TORCHELASTIC", "TANDEM"))
    }
    return own | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _skip_without(*, slurm: bool) -> None:
    """Skip, with the reason, if there cannot be such a cluster. Every other problem is a failure."""
    if os.geteuid() != 0:
        pytest.skip("needs root: Slurm's daemons and network namespaces")
    needed = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol") * slurm + (
        "ip",
        "nsenter",
        "unshare",
    )
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(
            f"not installed: {', '.join(missing)}; bash launch/install_test_tools.sh installs them on Debian, as root"
        )
    probe = [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "sh",
        "-c",
        "ip link add name one type veth peer name two",
    ]
    if reason := _refused(probe):
        pytest.skip(f"network namespaces are not permitted here: {reason}")


def _refused(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stderr.strip() if done.returncode else ""
