"""What ``tandem status`` and ``tandem logs`` say of run folders in every state, and that a look does not
disturb a run."""

import contextlib
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.checks.sockets import _processes
from launch.commands import train as training
from launch.commands.list_runs import run_table
from launch.commands.logs import log_files
from launch.commands.status import brief_state, status
from launch.processes.going_on import next_command, way_on
from launch.processes.heartbeat import read_beats
from launch.processes.locks import _kernel_name_of, holders_of
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.started_by import read_commands
from launch.processes.stopping import Stopped
from launch.processes.supervisor import RoleFailed
from launch.studies.replay import read_result
from parallel.checkpoints.files import write_manifest
from parallel.planning.architecture import read_hf_config
from tracing.reading import read_trace
from trainer.file_system import read_required
from trainer.tracking.ledger import read_ledger
from trainer.tracking.metrics_file import GrowingMetrics, read_metrics, rows_from_the_end
from trainer.tracking.samples import read_samples

ROOT = Path(__file__).resolve().parents[3]
NOW = 1_000_000.0


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "roles").mkdir(parents=True)
    folder.config.write_text("name: tiny\nsteps: 40\n")
    return folder


def train(folder: RunFolder, steps: int, *, ago_s: float = 5.0) -> None:
    lines = [{"step": 0, "eval/accuracy": 0.125}]
    lines += [
        {"step": n, "time/step": 2.0, "reward/mean": n / 100, "mismatch/ess": 1.0}
        for n in range(1, steps + 1)
    ]
    file = folder.path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(file, (NOW - ago_s, NOW - ago_s))


def checkpoint(folder: RunFolder, step: int, *, ago_s: float) -> None:
    saved = folder.checkpoints / f"step_{step:06d}"
    saved.mkdir(parents=True)
    write_manifest(saved, world_size=1)
    os.utime(saved / "complete.json", (NOW - ago_s, NOW - ago_s))


def lines_of(folder: RunFolder) -> dict[str, str]:
    found = status(folder, now=NOW)
    return dict([("state", found.state), *found.lines])


def test_a_running_run_tells_step_pace_time_left_and_results(folder):
    train(folder, 30)
    checkpoint(folder, 20, ago_s=120.0)
    folder.claim()
    folder.announce("sample", {"address": "tcp://10.0.0.1:7"})
    found = lines_of(folder)
    assert found["state"] == "running"
    assert found["step"] == "30 of 40 (75%), 2.0 s a step, about 20s left; the last one 5s ago"
    assert found["reward"] == "0.255 (mean of the last 10 steps; 0.155 before)"
    assert found["held out"] == "12.5% at step 0"
    assert found["checkpoint"] == "step 20, written 2m00s ago"
    assert found["sample"] == "listens at tcp://10.0.0.1:7"


def test_the_reward_is_that_before_dynamic_sampling_selects(folder):
    rows = [{"step": n, "time/step": 2.0, "reward/mean": 0.9, "reward/before_selection": 0.1} for n in (1, 2)]
    found = dict(status(folder, now=NOW, rows=rows).lines)
    assert found["reward"] == "0.100 (mean of the last 2 steps)"


@pytest.mark.parametrize(
    ("accuracies", "text"),
    [
        ([0.1, 0.3], "30.0% at step 1, 10.0% at step 0"),
        ([0.1, 0.3, 0.5, 0.4], "40.0% at step 3, 50.0% at step 2, 30.0% at step 1; first 10.0% at step 0"),
        ([0.5, 0.1, 0.2, 0.3], "30.0% at step 3, 20.0% at step 2, 10.0% at step 1; best 50.0% at step 0"),
        (
            [0.1, 0.6, 0.2, 0.6, 0.3, 0.4, 0.5],
            "50.0% at step 6, 40.0% at step 5, 30.0% at step 4; best 60.0% at step 1; first 10.0% at step 0",
        ),
    ],
)
def test_of_many_accuracies_the_newest_the_best_and_the_first_are_told(folder, accuracies, text):
    lines = [{"step": n, "time/step": 2.0, "eval/accuracy": value} for n, value in enumerate(accuracies)]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lines_of(folder)["held out"] == text


def test_an_evaluation_with_too_many_failed_rewards_is_not_told_as_the_best(folder):
    """By the config's level, as for the best checkpoint and in summary.json."""
    accuracies = [0.1, 0.6, 0.5, 0.2, 0.3, 0.4]
    lines = [{"step": n, "time/step": 2.0, "eval/accuracy": value} for n, value in enumerate(accuracies)]
    lines[1]["eval/failed_fraction"] = 0.2
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "; best 50.0% at step 2; " in lines_of(folder)["held out"]
    folder.config.write_text("name: tiny\nsteps: 40\nalarms: {reward_failed_max: 0.2}\n")
    assert "; best 60.0% at step 1; " in lines_of(folder)["held out"]


def test_values_that_are_no_numbers_are_a_line(folder, caplog):
    metrics = folder.path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "time/step": 2.0}\n{"step": 2, "time/step": "2.0", "eval/accuracy": {}}\n'
    )
    assert lines_of(folder)["step"] == "1 of 40 (2%), 2.0 s a step"
    assert caplog.messages == [f"{metrics}: line 2 not readable as a step and numbers, left out"]


def test_the_time_left_counts_what_is_between_steps(folder):
    """Evaluations and checkpoints, which are no part of time/step: here one of 8 s after every fourth step."""
    lines = [
        {"step": n, "time/step": 2.0, "elapsed_s": 60.0 + 2.0 * n + 8.0 * ((n - 1) // 4)}
        for n in range(1, 26)
    ]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint(folder, 20, ago_s=1.0)
    folder.claim()
    assert "25 of 40 (62%), 2.0 s a step, about 1m00s left;" in lines_of(folder)["step"]


@pytest.mark.parametrize(
    ("evaluation", "left"),
    [
        ("{every: 0, at_ends: true}", "10m30s"),
        ("{every: 5, at_ends: true}", "30m30s"),
        ("{every: 4, at_ends: false}", "40m30s"),
        ("{every: 0, at_ends: false}", "30s"),
        ("high", "10m30s"),
    ],
)
def test_the_time_left_counts_the_evaluations_that_are_due(folder, evaluation, left):
    """Evaluations of 10 minutes, of which the last one was after step 20; steps of 2 s."""
    folder.config.write_text(f"name: tiny\nsteps: 40\nevaluation: {evaluation}\n")
    lines = [{"step": 0, "eval/accuracy": 0.1, "time/evaluation": 1.0, "elapsed_s": 1.0}]
    for n in range(1, 26):
        lines.append({"step": n, "time/step": 2.0, "elapsed_s": 2.0 * n + 600.0 * (n >= 20)})
        lines[-1] |= {"eval/accuracy": 0.2, "time/evaluation": 600.0} if n == 20 else {"time/evaluation": 0.0}
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint(folder, 20, ago_s=1.0)
    folder.claim()
    assert f"about {left} left;" in lines_of(folder)["step"]


def test_a_model_of_earlier_steps_is_told_with_the_way_to_the_newest(folder):
    checkpoint(folder, 8, ago_s=9.0)
    folder.hf.mkdir()
    write_json(folder.summary, {"steps": 8})
    assert "model" not in lines_of(folder)
    checkpoint(folder, 20, ago_s=1.0)
    for name in ("hf", "hf-step-8"):
        assert lines_of(folder)["model"] == (
            f"{name}: of earlier steps; `tandem export {folder.path} OUT` writes that of step 20"
        )
        folder.put_model_aside()


def test_a_newer_checkpoint_that_is_damaged_is_told_beside_the_one_that_is_whole(folder):
    checkpoint(folder, 16, ago_s=9.0)
    torn = folder.checkpoints / "step_000020"
    torn.mkdir()
    (torn / "weights").write_bytes(bytes(8))
    write_manifest(torn, world_size=1)
    assert lines_of(folder)["checkpoint"].startswith("step 20, ")
    (torn / "weights").write_bytes(bytes(3))
    wrong = "(step_000020: weights has 3 bytes, of which 8 were written)"
    assert lines_of(folder)["checkpoint"] == f"step 16, written 9s ago {wrong}"
    (folder.checkpoints / "step_000016" / "complete.json").unlink()
    assert lines_of(folder)["checkpoint"] == f"none {wrong}"


def test_a_look_takes_no_lock(folder):
    """Of another process's run: it is seen as running, and its claim is neither lost nor refused."""
    checkpoint(folder, 20, ago_s=1.0)
    program = (
        "import sys; from pathlib import Path; from launch.processes.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.claim(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert lines_of(folder)["state"] == "running"
        other.stdin.close()
        other.wait(timeout=30)
    state = lines_of(folder)["state"]
    assert state.startswith("not running") and state.endswith(
        f"it continues with `tandem resume {folder.path}`"
    )
    folder.claim()


def test_a_lock_of_another_file_system_is_not_this_runs(folder, tmp_path):
    """Inode numbers are of one file system."""
    lock, table = folder.path / "roles" / "lock", tmp_path / "locks"
    folder.claim()
    inode = lock.stat().st_ino
    assert holders_of(lock)
    table.write_text(
        f"1: FLOCK  ADVISORY  WRITE 1 ff:ff:{inode} 0 EOF\n2: POSIX  ADVISORY  WRITE 1{_kernel_name_of(lock)}0 EOF\n"
    )
    assert not holders_of(lock, table)
    table.write_text(
        f"1: FLOCK  ADVISORY  WRITE 1 ff:ff:{inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 1{_kernel_name_of(lock)}0 EOF\n"
    )
    assert holders_of(lock, table)


def test_a_stop_that_was_asked_for_is_seen_before_and_after_it_is_honoured(folder):
    folder.claim()
    (folder.path / "roles" / "stop.json").write_text('{"reason": "SIGUSR1"}')
    assert lines_of(folder)["state"] == "running, asked to stop: SIGUSR1"
    folder._held.pop().close()
    (folder.path / "roles" / "stopped.json").write_text('{"step": 12, "reason": "SIGUSR1"}')
    checkpoint(folder, 12, ago_s=1.0)
    found = lines_of(folder)
    assert found["state"].startswith("stopped after step 12: SIGUSR1")
    assert f"`tandem resume {folder.path}`" in found["state"]


@pytest.mark.parametrize(
    ("files", "saved", "said"),
    [
        ((), False, "start again with `tandem train {config}`"),
        ((), True, "continue with `tandem resume {path}`"),
        (("job.json",), False, "start again with `tandem slurm {config} --submit`"),
        (("job.json",), True, "continue with `tandem slurm {config} resume={path} --submit`"),
        (("job.json", "train.sbatch"), True, "continue with `sbatch {path}/train.sbatch`"),
    ],
    ids=["new", "saved", "new element of an array", "saved element of an array", "job"],
)
def test_how_a_stopped_run_goes_on_is_said_alike_everywhere(folder, monkeypatch, files, saved, said):
    """By its status, by the job that stops, and by the commands that wait for its end."""
    monkeypatch.setattr("launch.commands.status._slurm_state", lambda _: "")
    for file in files:
        (folder.path / file).write_text('{"job_id": "17_3", "restart": 0}')
    if saved:
        checkpoint(folder, 12, ago_s=1.0)
    (folder.path / "roles" / "stopped.json").write_text('{"step": 12, "reason": "SIGUSR1"}')
    said = said.format(path=folder.path, config=folder.config)
    assert way_on(folder) == said
    assert lines_of(folder)["state"].endswith(f"it continues with {said.partition(' with ')[2]}")
    here = way_on(folder, here=True)
    assert here == training._after_stop(folder, Stopped(step=12, reason="SIGUSR1")).partition("; ")[2]
    assert ("tandem resume" in here, "slurm" in here) == (saved, False), "the user runs it here"


@pytest.mark.parametrize("files", [(), ("job.json",), ("train.sbatch",)])
@pytest.mark.parametrize("saved", [False, True])
def test_the_command_that_goes_on_is_the_same_behind_a_shell(tmp_path, files, saved):
    folder = RunFolder(tmp_path / "it's $HOME" / "run 1")
    folder.path.mkdir(parents=True)
    for file in files:
        (folder.path / file).touch()
    if saved:
        checkpoint(folder, 12, ago_s=1.0)
    plain = next_command(RunFolder(Path("RUN")))
    assert plain == "tandem train RUN/config.yaml", "plain names are shown as they are"
    named = [word for word in shlex.split(next_command(folder)) if str(tmp_path) in word]
    assert named and {word.removeprefix("resume=") for word in named} <= {
        str(folder.path), str(folder.config), str(folder.script),
    }  # fmt: skip


def test_commands_in_messages_are_the_same_behind_a_shell(tmp_path):
    folder = RunFolder(tmp_path / "it's $HOME" / "run 1")
    folder.logs.mkdir(parents=True)
    folder.config.write_text("model: {path: m}\ntask: {type: countdown}\n")
    with pytest.raises(BadInput) as without_logs:
        log_files(folder, None)
    (folder.logs / "learn.log").touch()
    checkpoint(folder, 12, ago_s=1.0)
    texts = [str(without_logs.value), lines_of(folder)["logs"], training.without_report(folder)]
    with pytest.raises(BadInput) as without_model:
        training._trained_model(folder, [])
    texts += re.findall("`.*?`", str(without_model.value))
    words = [shlex.split(re.search("`(tandem .*?)`", text)[1]) for text in texts]
    assert words == [
        ["tandem", "status", str(folder.path)],
        ["tandem", "logs", str(folder.path), "--role", "NAME"],
        ["tandem", "report", str(folder.path)],
        ["tandem", "export", str(folder.path), "OUT"],
        ["tandem", "eval", str(folder.config), "model.path=OUT"],
    ]


def test_the_first_error_is_what_it_failed_by(folder):
    for role, text, age in (
        ("learn", "lost a peer", 10),
        ("sample", "ValueError: no\nsecond\nthird\nfourth\nfifth", 20),
    ):
        folder.error(role).write_text(text)
        os.utime(folder.error(role), (NOW - age, NOW - age))
    state = lines_of(folder)["state"]
    assert state.startswith("failed, by the sample role: ValueError: no")
    assert "fourth" not in state
    assert "2 more lines in" in state


def test_the_error_does_not_steer_the_terminal(folder):
    """It may hold what a model has written. An error of an older version is shown as safely as it is written now."""
    hostile = "no \x1b[2J\x1b]0;owned\x07\ud800"
    folder.report_error("sample", ValueError(hostile))
    assert folder.error("sample").read_text(encoding="utf-8") == "ValueError: no ␛[2J␛]0;owned␇\\ud800"
    folder.error("sample").write_text("ValueError: \x1b[2J")
    assert lines_of(folder)["state"] == "failed, by the sample role: ValueError: ␛[2J"


def test_a_finished_run_and_one_that_never_started(folder, tmp_path):
    folder.hf.mkdir()
    folder.summary.write_text('{"steps": 40}')
    train(folder, 40)
    found = lines_of(folder)
    assert found["state"] == "finished"
    assert "left" not in found["step"]
    fresh = RunFolder(tmp_path / "fresh")
    fresh.path.mkdir()
    fresh.config.write_text("name: fresh\nsteps: 3\n")
    found = lines_of(fresh)
    assert (found["state"], found["step"], found["checkpoint"], found["logs"]) == (
        "not started",
        "none of 3 yet",
        "none",
        "none yet",
    )


@pytest.mark.parametrize("then", [". When the cause is fixed, ", "; "])
def test_a_learner_that_ends_as_it_writes_the_report_leaves_the_command_for_it(folder, then):
    """`tandem resume` would have nothing to do."""
    model, task = {"path": "m"}, {"type": "countdown"}
    config = RunConfig.model_validate({"model": model, "task": task, "steps": 40})
    assert "tandem report" not in training.after_end(folder, config, then)
    folder.hf.mkdir()
    folder.summary.write_text('{"steps": 40}')
    said = f"All steps are done, and the model is in {folder.hf}; `tandem report {folder.path}` makes the report again"
    assert training.after_end(folder, config, then) == said


def test_a_finished_run_that_is_resumed_to_more_steps_is_not_finished(folder):
    """Its model and its summary stay, and the new part may end before its first checkpoint."""
    folder.hf.mkdir()
    folder.summary.write_text('{"steps": 40}')
    train(folder, 44)
    folder.config.write_text("name: tiny\nsteps: 60\n")
    assert lines_of(folder)["state"].startswith("not running")
    folder.error("learn").write_text("OutOfMemoryError: no memory")
    assert lines_of(folder)["state"] == "failed, by the learn role: OutOfMemoryError: no memory"
    assert brief_state(folder) == "failed"
    folder.summary.write_text('{"steps": 60}')
    assert brief_state(folder) == "finished"


def test_a_checkpoint_that_is_removed_during_the_look_is_looked_for_again(folder, monkeypatch):
    train(folder, 20)
    checkpoint(folder, 20, ago_s=1.0)
    found = iter([folder.checkpoints / "step_000016"])
    newest = RunFolder.newest_checkpoint
    monkeypatch.setattr(RunFolder, "newest_checkpoint", lambda self: next(found, None) or newest(self))
    assert lines_of(folder)["checkpoint"].startswith("step 20, ")


@pytest.mark.parametrize(
    ("config", "request_file", "summary", "lines"),
    [
        ("kind: sft", None, {"model": "/m/warm", "steps": 40}, {"model": "/m/warm"}),
        (
            "kind: train",
            "{}",
            {"model": "/m/base", "accuracy": 0.25},
            {"model": "/m/base", "held out": "25.0%"},
        ),
    ],
    ids=["warm start", "evaluation"],
)
def test_a_run_without_checkpoints_is_finished_by_its_result(folder, config, request_file, summary, lines):
    folder.config.write_text(f"name: tiny\nsteps: 40\n{config}\n")
    if request_file is not None:
        folder.request.write_text(request_file)
    folder.claim()
    assert lines_of(folder)["state"] == "running"
    folder.release()
    assert lines_of(folder)["state"].startswith("not running")
    folder.summary.write_text(json.dumps(summary))
    found = lines_of(folder)
    assert found["state"] == "finished" and lines.items() <= found.items()
    assert "step" not in found and "checkpoint" not in found


class NoProcesses:
    """A supervisor that starts nothing."""

    processes = dict

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize(
    ("command", "text", "after"),
    [
        (training.sft, "kind: sft\ndata: {type: countdown}\noutput: warm", "finished"),
        (training.evaluate, "task: {type: countdown}", "not running"),
    ],
)
def test_a_warm_start_and_an_evaluation_hold_their_folders(tmp_path, monkeypatch, command, text, after):
    """While they run; the evaluation here fails, since it has no servers."""
    seen = []

    def look(*_, **__):
        (run,) = (tmp_path / "runs").iterdir()
        seen.append((status(RunFolder(run)).state, RunFolder(run).holders()))

    def fail(*_):
        raise RoleFailed("no servers")

    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"{text}\nmodel: {{path: m}}\nlayout: {{dp: 1}}\n")
    monkeypatch.setattr(training, "load_checked", lambda parsed, *_, **__: parsed.validated())
    monkeypatch.setattr(training, "Supervisor", lambda **_: NoProcesses())
    monkeypatch.setattr(training, "run_to_end", look)
    monkeypatch.setattr(training, "start_sampling", look)
    monkeypatch.setattr(training, "wait_ready", fail)
    with contextlib.nullcontext() if command is training.sft else pytest.raises(RoleFailed):
        command(Path("config.yaml"), [])
    gc.collect()  # what the error keeps
    assert seen == [("running", [os.getpid()])]
    (run,) = (tmp_path / "runs").iterdir()
    assert status(RunFolder(run)).state.startswith(after)


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        ("RUNNING|n1,n2|None|1:00", "running", "RUNNING on n1,n2, 1:00 left"),
        ("PENDING||Resources|1:00", "waiting in the queue (PENDING, Resources)", "PENDING, Resources"),
        ("COMPLETING|n1|None|1:00", "ending (COMPLETING on n1)", "COMPLETING on n1"),
        (
            "FAILED|n1|NonZeroExitCode|1:00",
            "not running: FAILED on n1, NonZeroExitCode; `tandem logs {run} --role slurm` says why",
            "FAILED on n1, NonZeroExitCode",
        ),
    ],
)
def test_a_job_is_asked_of_slurm(folder, tmp_path, monkeypatch, answer, state, said):
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\ncase "$*" in *"--jobs=17 "*) echo "{answer}";; *) exit 1;; esac\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    (folder.path / "job.json").write_text('{"job_id": 17, "restart": 2}')
    found = lines_of(folder)
    assert found["state"] == state.format(run=folder.path)
    assert found["job"] == f"17 {said}, start 3"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.yaml", "", "holds no block of keys"),
        ("config.yaml", "name: [", "cannot be read"),
        ("config.yaml", "- tiny\n- 40\n", "holds no block of keys"),
        ("config.yaml", "name: tiny\nsteps: many\n", "lacks a sound 'steps'"),
        ("config.yaml", "[" * 3000, "cannot be read"),
        ("job.json", "[]", "holds no block of keys"),
        ("job.json", "{}", "lacks a sound 'job_id'"),
        ("job.json", "{", "cannot be read"),
        ("summary.json", "{}", "lacks a sound 'steps'"),
        ("summary.json", '{"steps": 40, "seconds": {"training": NaN}}', "cannot be read (NaN is no number)"),
        ("roles/stopped.json", '{"step": 3}', "lacks a sound 'reason'"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(folder, file, content, said):
    train(folder, 30)
    folder.hf.mkdir()
    (folder.path / file).write_text(content)
    found = lines_of(folder)
    assert found["damaged"].startswith(f"{folder.path / file} {said}") and "\n" not in found["damaged"]
    assert found["state"].startswith("not running")
    assert found["step"] == ("30, 2.0 s a step" if file == "config.yaml" else "30 of 40 (75%), 2.0 s a step")
    assert found["run"] == f"{'(name unknown)' if file == 'config.yaml' else 'tiny'} in {folder.path}"
    assert (found["checkpoint"], found["logs"], found["reward"][:5]) == ("none", "none yet", "0.255")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_lines_that_cannot_be_read_are_named_and_the_rest_is_shown(folder, name):
    train(folder, 30)
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).mkdir()
    found = lines_of(folder)
    assert found["damaged"] == f"{folder.path / name} cannot be read (Is a directory)"
    assert found["step"] == ("none of 40 yet" if name == "metrics.jsonl" else "30 of 40 (75%), 2.0 s a step")
    assert found["checkpoint"] == "none"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", lambda folder: read_metrics(folder.metrics)),
        ("metrics.jsonl", lambda folder: GrowingMetrics(folder.metrics).read()),
        ("metrics.jsonl", lambda folder: [*rows_from_the_end(folder.metrics)]),
        ("ledger.jsonl", lambda folder: [*read_ledger(folder.path / "ledger.jsonl")]),
        ("roles/serve.json", lambda folder: folder.read_address("serve")),
        ("roles/rank-0.beat", read_beats),
        ("commands.jsonl", lambda folder: read_commands(folder.commands)),
        ("train.sbatch", next_command),
        ("samples/step_000001.jsonl", lambda folder: read_samples(folder.path / "samples/step_000001.jsonl")),
        ("hf/config.json", lambda folder: read_hf_config(folder.hf)),
        ("trace/learn-1.jsonl", lambda folder: read_trace(folder.path)),
        ("replay/step_000001.json", lambda folder: read_result(folder, 1)),
        ("roles/serve.json", lambda folder: [*_processes(folder)]),
        ("request.json", lambda folder: read_required(folder.request)),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder, monkeypatch, name, read):
    """Who opens a pipe waits for its writer. This writer is for a reader that does open it, and so fails here."""
    monkeypatch.setattr("parallel.checkpoints.files.READ_AGAIN_S", ())
    pipe = folder.path / name
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["x"])
    writer.start()
    try:
        if read is read_beats:
            assert read(folder) == [] and writer.is_alive()
        else:
            with pytest.raises((OSError, ValueError), match="not a regular file"):
                read(folder)
    finally:
        if writer.is_alive():
            pipe.read_text()
        writer.join()


def test_a_config_or_an_error_that_is_a_pipe_or_huge_is_a_line(tmp_path):
    folder = RunFolder(tmp_path / "run")
    (folder.path / "roles").mkdir(parents=True)
    folder.config.write_text("name: tiny\nsteps: 40\n")
    os.mkfifo(folder.error("learn"))
    state = status(folder).state
    assert state.startswith("failed, by the learn role: ") and "cannot be read (not a regular file)" in state
    os.truncate(folder.config, 2**40)  # no reader may take it into the memory
    assert "config.yaml is not readable" in run_table(tmp_path)
    assert any("a file of more than 64 MiB" in text for title, text in status(folder).lines)


def test_a_damaged_file_of_a_running_run_is_named(folder):
    folder.claim()
    folder.address("serve").write_text("[]")
    (folder.path / "roles" / "stop.json").write_text("")
    lines = status(folder, now=NOW).lines
    assert [text.split()[0] for title, text in lines if title == "damaged"] == [
        str(folder.path / "roles" / "stop.json"), str(folder.address("serve")),
    ]  # fmt: skip


def test_logs_of_a_role_are_those_of_all_its_nodes(folder):
    folder.logs.mkdir()
    for name in ("serve-0", "serve-1", "learn"):
        (folder.logs / f"{name}.log").write_text(f"{name} line\n")
    assert [file.stem for file in log_files(folder, "serve")] == ["serve-0", "serve-1"]
    assert [file.stem for file in log_files(folder, None)] == ["learn", "serve-0", "serve-1"]
    with pytest.raises(BadInput, match=r"--role sampel: no such log .* there are learn, serve-0, serve-1"):
        log_files(folder, "sampel")


def test_the_commands_print_it(folder):
    folder.logs.mkdir()
    (folder.logs / "learn.log").write_text("one\ntwo\nthree\n")

    def tandem(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "launch", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    assert "none of 40 yet" in tandem("status", str(folder.path)).stdout
    assert tandem("logs", str(folder.path), "--role", "learn", "-n", "2").stdout == "two\nthree\n"
    wrong = tandem("logs", str(folder.path), "--role", "nobody")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "there are learn" in wrong.stderr
