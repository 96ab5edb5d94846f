"""``tandem stop`` against supervisors in processes of their own, whose learner is a few lines of Python."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from launch.commands import status as looks
from launch.commands import stop as stopping_command
from launch.processes.heartbeat import Beat, beat_file
from launch.processes.run_folder import RunFolder, write_json
from parallel.checkpoints.files import write_manifest
from tests.support.command import tandem

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60
SUPERVISOR = """
    import signal, sys, time
    from pathlib import Path
    from launch.processes.run_folder import RunFolder
    from launch.processes.stopping import StopSignals, ending, wait_for_learner
    from launch.processes.supervisor import Interrupted, Role, Supervisor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's `&` leaves it
    folder = RunFolder(Path(sys.argv[1]))
    folder.claim()
    learner = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
    try:
        with Supervisor(grace_s=5, ending=ending(folder)) as supervisor, StopSignals(folder, supervisor) as signals:
            supervisor.start(Role(name="learn", command=learner, log=folder.logs / "learn.log"))
            Path(sys.argv[1], "supervised").touch()
            wait_for_learner(supervisor, signals, timeout_s=60.0)
    except Interrupted:
        sys.exit(130)
"""
LEARNER = """
    import sys, time
    from pathlib import Path
    from launch.processes.run_folder import RunFolder
    from launch.processes.stopping import StopListener, Stopped, report_stopped
    from parallel.checkpoints.files import write_manifest
    folder = RunFolder(Path(sys.argv[1]))
    listener = StopListener(folder, is_first_rank=True)
    folder.announce("learn", {})
    deadline = time.monotonic() + 60
    while not listener.reason():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (folder.checkpoints / "step_000003").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_000003", world_size=1)
    report_stopped(folder, Stopped(step=3, reason=listener.reason()))
"""
NOT_READY = "import time; time.sleep(300)"


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    launch = {"stop_timeout_s": 60.0, "stop_grace_s": 5.0}
    config = {
        "name": "tiny",
        "steps": 9,
        "model": {"path": "m"},
        "task": {"type": "countdown"},
        "launch": launch,
    }
    folder.config.write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def supervisor(folder):
    """Starts a supervisor of the folder with a learner, and waits until ``ready`` exists."""
    started: list[subprocess.Popen] = []

    def start(learner: str, ready: str) -> subprocess.Popen:
        code, learner = textwrap.dedent(SUPERVISOR), textwrap.dedent(learner)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder.path), learner],
            cwd=ROOT,
            start_new_session=True,
        )
        started.append(process)
        wait_until(lambda: (folder.path / ready).exists())
        return process

    yield start
    for process in started:
        process.terminate()  # ends a supervisor that a failed test has left, with its learner
        process.wait(timeout=DEADLINE_S)


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_stops_with_its_checkpoint_and_the_command_that_goes_on_is_said(folder, supervisor, tmp_path):
    process = supervisor(LEARNER, "roles/learn.json")
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"stopping {folder.path}: the step is finished or dropped" in done.stdout
    assert f"stopped after step 3: SIGUSR1; it continues with `tandem resume {folder.path}`" in done.stdout
    assert process.wait(timeout=DEADLINE_S) == 0
    again = tandem("stop", "run", cwd=tmp_path)
    assert again.returncode == 0 and "is not running: stopped after step 3" in again.stdout


@pytest.mark.parametrize("options", [[], ["--now"]])
def test_a_run_that_still_starts_ends_at_once(folder, supervisor, tmp_path, options):
    process = supervisor(NOT_READY, "supervised")
    done = tandem("stop", "run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"nothing was saved; start again with `tandem train {folder.config}`" in done.stdout
    assert process.wait(timeout=DEADLINE_S) == 130


@pytest.mark.parametrize(("kind", "command"), [("sft", "sft"), ("train", "eval")])
def test_a_run_without_checkpoints_ends_at_once_and_is_begun_by_its_own_command(
    folder, supervisor, tmp_path, kind, command
):
    config = yaml.safe_load(folder.config.read_text()) | {"kind": kind}
    if kind == "sft":
        config = {name: config[name] for name in ("kind", "steps", "model", "launch")}
        config |= {"data": {"type": "countdown"}, "output": "out"}
    else:
        write_json(folder.request, {"first_gpu": 0})
    folder.config.write_text(yaml.safe_dump(config))
    process = supervisor(NOT_READY, "supervised")
    done = tandem("stop", "run", cwd=tmp_path)
    assert (done.returncode, process.wait(timeout=DEADLINE_S)) == (0, 130), done.stderr
    assert "finished or dropped" not in done.stdout
    assert f"start again with `tandem {command} {folder.config}`" in done.stdout


def test_now_ends_a_run_at_once_and_names_the_checkpoint_that_is_there(folder, supervisor, tmp_path):
    saved = folder.checkpoints / "step_000002"
    saved.mkdir(parents=True)
    write_manifest(saved, world_size=1)
    process = supervisor(LEARNER, "roles/learn.json")
    done = tandem("stop", "run", "--now", cwd=tmp_path)
    assert (done.returncode, process.wait(timeout=DEADLINE_S)) == (0, 130), done.stderr
    assert f"saved step 2; continue with `tandem resume {folder.path}`" in done.stdout


def test_a_process_without_the_lock_gets_no_signal(folder, monkeypatch, tmp_path):
    """As if the kernel's table named a number that another process has by now."""
    folder.claim()
    with subprocess.Popen([sys.executable, "-c", NOT_READY]) as other:
        monkeypatch.setattr(RunFolder, "holders", lambda _: [other.pid])
        done = tandem("stop", "run", cwd=tmp_path)
        assert done.returncode == 1 and "does not have its lock open: no signal was sent" in done.stderr
        assert other.poll() is None
        other.kill()


def test_a_holder_that_would_die_of_the_signal_gets_none(folder, tmp_path):
    """A run that has claimed its folder and has no supervisor yet: here, this process."""
    folder.claim()
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        done = tandem("stop", "run", cwd=tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done.returncode == 1 and "does not accept requests yet; call `tandem stop` again" in done.stderr


def test_a_run_of_another_user_is_named_with_its_user(folder, monkeypatch, tmp_path):
    folder.claim()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stopping_command.os, "listdir", refuse)
    monkeypatch.setattr(stopping_command.os, "getuid", lambda: 12345)
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 1 and "and you are 12345: only" in done.stderr
    assert f"pid {os.getpid()}" in done.stderr


def test_a_run_on_another_host_is_told_of_and_left_alone(folder, tmp_path):
    beat = Beat(
        who="learner rank 0", pid=1, started="0", host="node7", doing="sync", since=0.0, now=0.0, cpu=1.0
    )
    write_json(beat_file(folder, "rank-0"), asdict(beat))
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 1 and "on node7 (learner rank 0 gave a sign of life" in done.stderr
    old = time.time() - 2 * stopping_command.HEARD_OF_S
    os.utime(beat_file(folder, "rank-0"), (old, old))
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 0 and "is not running: not running: interrupted" in done.stdout


def test_a_role_that_was_killed_here_a_moment_ago_is_not_looked_for_elsewhere(folder, tmp_path):
    beat = Beat(
        who="the sample role", pid=os.getpid(), started="0", host=socket.gethostname(), doing="x", since=0.0, now=0.0, cpu=1.0
    )  # fmt: skip
    write_json(beat_file(folder, "sample"), asdict(beat))
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 0 and "is not running: not running: interrupted" in done.stdout, done.stderr


def test_a_finished_run_is_not_running_and_a_wrong_folder_is_refused(folder, tmp_path):
    folder.hf.mkdir()
    write_json(folder.summary, {"steps": 9})
    done = tandem("stop", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{folder.path} is not running: finished\n")
    done = tandem("stop", ".", cwd=tmp_path)
    assert done.returncode == 2 and "is not a run folder" in done.stderr


def test_ctrl_c_ends_the_wait_alone(folder, supervisor, monkeypatch, tmp_path):
    process = supervisor(LEARNER, "roles/learn.json")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stopping_command, "progress_printer", interrupt)
    done = tandem("stop", "run", cwd=tmp_path)
    assert done.returncode == 130 and "the request stands" in done.stderr
    assert process.wait(timeout=DEADLINE_S) == 0 and "stopped after step 3" in looks.status(folder).state


SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
case "$(basename $0)" in
  squeue)
    state=$(cat {state})
    case "$state" in
      OVER) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
      DOWN) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
    esac
    echo "$state" ;;
  scancel) echo OVER > {state} ;;
esac
"""


def be_in_slurm(folder, monkeypatch, tmp_path, state: str) -> Path:
    """Have job 77 run the folder, in this state, by commands that stand in for Slurm's. Returns the file of what they
    are asked."""
    programs, log = tmp_path / "programs", tmp_path / "log"
    programs.mkdir()
    for name in ("squeue", "scancel"):
        (programs / name).write_text(SLURM.format(log=log, state=tmp_path / "state"))
        (programs / name).chmod(0o755)
    (tmp_path / "state").write_text(state)
    write_json(folder.job, {"job_id": "77", "nodes": [], "restart": 0})
    (folder.path / "roles").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return log


def test_a_job_of_which_slurm_does_not_say_may_be_running(folder, monkeypatch, tmp_path):
    """stop, clean and status hold it for neither running nor ended, and say why."""
    log = be_in_slurm(folder, monkeypatch, tmp_path, "DOWN")
    why = "job 77 had {} last, and Slurm does not say whether it still runs"
    done = tandem("stop", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert why.format(folder.path) in done.stderr and "Unable to contact" in done.stderr
    assert "scancel" not in log.read_text()
    (folder.path / "metrics.lost.jsonl").touch()
    done = tandem("clean", ".", "--apply", cwd=tmp_path)
    assert why.format("run") in done.stdout and (folder.path / "metrics.lost.jsonl").exists()
    told = tandem("status", "run", cwd=tmp_path).stdout
    assert "unknown: Slurm does not say whether the job runs" in told and "Unable to contact" in told


def test_a_job_of_another_cluster_is_left_alone_whatever_this_one_calls_by_its_number(
    folder, monkeypatch, tmp_path
):
    log = be_in_slurm(folder, monkeypatch, tmp_path, "RUNNING")
    write_json(folder.job, {"job_id": "77", "cluster": "far", "nodes": [], "restart": 0})
    scontrol = tmp_path / "programs" / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'ClusterName             = near\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    done = tandem("stop", "run", "--now", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "it belongs to the cluster far, and this one is near" in done.stderr and not log.exists()
    told = tandem("status", "run", cwd=tmp_path).stdout
    assert "it belongs to the cluster far, and this one is near" in told and not log.exists()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "far")
    assert "RUNNING" in tandem("status", "run", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("state", "options", "asked"),
    [
        ("RUNNING", [], "scancel --batch --signal=TERM 77"),
        ("RUNNING", ["--now"], "scancel 77"),
        ("PENDING", [], "scancel 77"),
    ],
)
def test_a_slurm_job_is_asked_for_good(folder, monkeypatch, tmp_path, state, options, asked):
    log = be_in_slurm(folder, monkeypatch, tmp_path, state)
    (folder.path / "train.sbatch").touch()
    write_json(folder.stop_outcome, {"step": 5, "reason": "SIGTERM"})
    done = tandem("stop", "run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in log.read_text().splitlines() if line.startswith("scancel")] == [asked]
    assert (
        f"stopped after step 5: SIGTERM; it continues with `sbatch {folder.path}/train.sbatch`" in done.stdout
    )
