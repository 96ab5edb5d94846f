"""The tracker against its record, a real MLflow sqlite store read back, and servers that hang or are not
there."""

import contextlib
import errno
import io
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RunConfig
from configs.schema.alarms import AlarmsConfig
from launch.roles.learn import warn_of_lost_lines
from rollout.client import RolloutError
from trainer.loop import tell_of_failed_rewards
from trainer.ranks.interruption import StopRequested
from trainer.sampling import Sampled
from trainer.tracking import metrics_file, mlflow_thread
from trainer.tracking import tracker as tracking
from trainer.tracking.console import HEADER_EVERY, columns_of, duration, header, row
from trainer.tracking.held_out import BestAccuracy
from trainer.tracking.ledger import LEDGER, Ledger, read_ledger
from trainer.tracking.metrics_file import read_metrics, rows_from_the_end
from trainer.tracking.provenance import provenance
from trainer.tracking.tracker import Tracker, flatten

FULL = {
    "reward/mean": 0.512,
    "eval/accuracy": 0.25,
    "mismatch/abs_prob_mean": 1.23e-4,
    "mismatch/abs_prob_max": 0.031,
    "mismatch/k3": 2.5e-6,
    "mismatch/ess": 0.998,
    "mismatch/kept_fraction": 1.0,
    "response/length_mean": 10.25,
    "loss/total": -0.0123,
    "policy/ref_kl": 1.5e-3,
    "policy/entropy": 1.234,
    "optim/grad_norm": 0.321,
    "throughput/tokens_per_s": 123456.0,
    "time/sampling": 3.21,
    "time/logprobs": 0.4,
    "time/update": 1.5,
    "time/sync": 0.2,
    "staleness/mean": 0.75,
    "time/step": 5.5,
}


def make_config(**fields) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "model"}, "task": {"type": "countdown"}, "steps": 4, **fields}
    )


@pytest.fixture
def tmp_path(tmp_path, empty_mlflow_store) -> Path:
    """A run folder: the store, which has its tables already, is in the one that it lies in."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(empty_mlflow_store, tmp_path / mlflow_thread.STORE)
    return folder


@pytest.fixture(autouse=True)
def no_server_from_outside(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(autouse=True)
def time_to_close(monkeypatch):
    """For what is read from the store afterwards, also on a slow machine."""
    monkeypatch.setattr(tracking, "CLOSE_DEADLINE_S", 300.0)


def client_of(run_dir: Path):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{mlflow_thread.store_file(run_dir)}")


def only_run(run_dir: Path):
    client = client_of(run_dir)
    experiment = client.get_experiment_by_name("tandem")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


# ---- the sqlite store


@pytest.mark.filterwarnings("ignore:metric .* is not in")
def test_sqlite_store_holds_params_metrics_artifacts_and_status(tmp_path):
    # More params than one request takes.
    config = make_config(rollout={"server_args": {f"flag-{i}": i for i in range(150)}})
    (tmp_path / "config.yaml").write_text("name: written by whoever made the folder\n")
    tracker = Tracker(config, tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {**FULL, "reward/mean": step / 8, **{f"many/{i}": float(i) for i in range(1100)}})
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "a.png").write_bytes(b"png")
    (tmp_path / "report.html").write_text("hello", encoding="utf-8")
    tracker.artifact(tmp_path / "report.html")
    tracker.artifact(figures)
    tracker.close("FINISHED")

    client, run = only_run(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        mlflow_thread.mlflow_name(k): v for k, v in flatten(config.model_dump(mode="json")).items()
    }
    assert run.data.params["rollout.server_args.flag-149"] == "149"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
        (1, 0.125),
        (2, 0.25),
        (3, 0.375),
    ]
    assert run.data.metrics["many/1099"] == 1099.0
    assert {a.path for a in client.list_artifacts(run.info.run_id)} == {
        "config.yaml",
        "report.html",
        "figures",
    }
    assert (tmp_path.parent / "mlartifacts").is_dir()
    assert run.info.run_name == "run seed 0"
    assert run.data.tags["tandem.version.torch"] and run.data.tags["tandem.version.python"]
    assert (tmp_path / "mlflow_run_id").read_text(encoding="utf-8") == run.info.run_id
    assert (tmp_path / "config.yaml").read_text() == "name: written by whoever made the folder\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (ValueError("x"), "FAILED"),
        (RolloutError("x"), "FAILED"),
        (StopRequested("x"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(1), "KILLED"),
    ],
)
def test_status_follows_the_way_out(tmp_path, error, status):
    tracker = Tracker(make_config(launch={"stop_grace_s": 120.0}), tmp_path)
    try:
        with tracker:
            tracker.log(1, {"reward/mean": 1.0})
            if error is not None:
                raise error
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        assert raised is error
    tracker.close("FAILED")  # a second close changes nothing
    assert only_run(tmp_path)[1].info.status == status


@pytest.mark.filterwarnings("ignore:metric .* is not in")
def test_names_that_mlflow_refuses_do_not_lose_the_others(tmp_path):
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5, "/odd//name@x": 1.0, "..": 2.0})
    _, run = only_run(tmp_path)
    assert run.data.metrics == {"reward/mean": 0.5, "odd/name_x": 1.0, "unnamed": 2.0}


def test_a_metric_without_a_line_in_the_table_is_told_once(tmp_path):
    with Tracker(make_config(), tmp_path) as tracker, pytest.warns(UserWarning) as told:
        tracker.log(1, {"reward/mean": 0.5, "reward/maen": 1.0})
        tracker.log(2, {"reward/mean": 0.5, "reward/maen": 1.0})
    assert [str(w.message) for w in told] == [
        "metric 'reward/maen' is not in trainer/metric_names.py; add it there"
    ]


@settings(deadline=None)
@given(st.text(max_size=400))
def test_mlflow_names_are_valid(name):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_thread.mlflow_name(name))


def test_tracking_uri_precedence(tmp_path, monkeypatch):
    assert mlflow_thread.tracking_uri(make_config(), tmp_path) == f"sqlite:///{tmp_path.parent / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    assert mlflow_thread.tracking_uri(make_config(), tmp_path) == "sqlite:///elsewhere.db"
    assert (
        mlflow_thread.tracking_uri(make_config(tracking={"uri": "sqlite:///mine.db"}), tmp_path)
        == "sqlite:///mine.db"
    )


def test_letters_that_mean_something_in_a_uri_do_not_lead_the_store_elsewhere(tmp_path):
    """A ? began the URI's query, so that the database was a file beside the folder of the runs; %20 was a space."""
    run_dir = tmp_path / "what? 100%20" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    shutil.copy(tmp_path.parent / mlflow_thread.STORE, run_dir.parent)
    tracker = Tracker(make_config(), run_dir)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close("FINISHED")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    # MLflow itself leaves an empty folder elsewhere.
    assert all(run_dir.parent in path.parents for path in files)
    artifacts = run_dir.parent / "mlartifacts" / (run_dir / "mlflow_run_id").read_text() / "artifacts"
    assert (artifacts / "config.yaml").is_file()


def test_runs_share_a_store_where_the_file_system_is_local(tmp_path, monkeypatch):
    assert mlflow_thread.file_system_of(Path("/proc")) == "proc"
    monkeypatch.setattr(mlflow_thread, "file_system_of", lambda folder: "ext4")
    assert mlflow_thread.store_file(tmp_path) == tmp_path.parent / "mlflow.db"
    monkeypatch.setattr(mlflow_thread, "file_system_of", lambda folder: "nfs4")
    assert mlflow_thread.store_file(tmp_path) == tmp_path / "mlflow.db"
    monkeypatch.setattr(mlflow_thread, "file_system_of", lambda folder: "ext4")
    (tmp_path / "mlflow.db").touch()
    assert mlflow_thread.store_file(tmp_path) == tmp_path / "mlflow.db", "a run stays with its own"


@pytest.mark.parametrize("part", ["mlflow.db", "mlflow.lock", "mlartifacts"])
def test_a_run_beside_another_user_s_store_has_its_own(tmp_path, monkeypatch, part):
    above = tmp_path.parent
    monkeypatch.setattr(mlflow_thread, "file_system_of", lambda folder: "ext4")
    monkeypatch.setattr(mlflow_thread.os, "access", lambda path, mode: path != above / part)
    if part != "mlflow.db":  # which is there
        assert mlflow_thread.store_file(tmp_path) == above / "mlflow.db", "nobody's yet"
        (above / part).touch()
    assert mlflow_thread.store_file(tmp_path) == tmp_path / "mlflow.db"


def test_a_link_in_place_of_the_lock_costs_its_target_nothing(tmp_path):
    precious = tmp_path.parent / "precious"
    precious.write_text("all that I have")
    (tmp_path.parent / "mlflow.lock").symlink_to(precious)
    assert mlflow_thread.store_file(tmp_path) == tmp_path / "mlflow.db"
    thread = mlflow_thread.MlflowThread(make_config(), tmp_path, [], {})
    (tmp_path / "mlflow.lock").symlink_to(precious)
    with pytest.raises(ValueError, match="is a link"), thread._others_kept_out():
        pass
    assert precious.read_text() == "all that I have"


def test_runs_that_start_together_stand_side_by_side_in_one_store(tmp_path):
    """In a process each: one makes the tables, and none loses a metric to another's lock."""
    (tmp_path.parent / mlflow_thread.STORE).unlink()
    code = """
import pathlib, sys
from configs.schema import RunConfig
from trainer.tracking import tracker as tracking
tracking.CLOSE_DEADLINE_S = 300.0
config = RunConfig.model_validate({"model": {"path": "m"}, "task": {"type": "countdown"}, "seed": int(sys.argv[2])})
with tracking.Tracker(config, pathlib.Path(sys.argv[1])) as tracker:
    for step in range(1, 21):
        tracker.log(step, {"reward/mean": step / 100})
"""
    folders = [tmp_path.parent / f"run-{seed}" for seed in range(3)]
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen([*command, str(folder), str(seed)], stdout=subprocess.DEVNULL)
        for seed, folder in enumerate(folders)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    client = client_of(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name("tandem").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run-0 seed 0", "run-1 seed 1", "run-2 seed 2"]
    for run in runs:
        assert (
            run.info.status == "FINISHED"
            and len(client.get_metric_history(run.info.run_id, "reward/mean")) == 20
        )


def test_provenance_names_the_commit_of_a_checkout_and_of_nothing_else(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert "mlflow.source.git.commit" not in provenance(tmp_path)
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    clean = provenance(tmp_path)
    assert len(clean["mlflow.source.git.commit"]) == 40 and clean["tandem.uncommitted_changes"] == "false"
    (tmp_path / "a").write_text("2")
    assert provenance(tmp_path)["tandem.uncommitted_changes"] == "true"
    (tmp_path / "inside").mkdir()
    assert "mlflow.source.git.commit" not in provenance(tmp_path / "inside"), (
        "installed inside another checkout"
    )
    assert clean["tandem.version.torch"]


# ---- metrics.jsonl


def test_lines_are_on_disk_when_log_returns_and_hold_what_was_logged(tmp_path):
    tracker = Tracker(make_config(), tmp_path)
    tracker.log(1, FULL)
    first = read_metrics(tmp_path / "metrics.jsonl")
    tracker.log(2, {"reward/mean": 1})
    second = read_metrics(tmp_path / "metrics.jsonl")
    tracker.close("FINISHED")
    assert [{k: v for k, v in line.items() if k != "elapsed_s"} for line in first] == [{"step": 1, **FULL}]
    assert second[1]["reward/mean"] == 1.0
    assert 0 <= second[0]["elapsed_s"] <= second[1]["elapsed_s"] < 60


@pytest.fixture
def full_disk(monkeypatch):
    """While it is set, a line finds room for its first bytes alone."""
    is_full, open_file = threading.Event(), Path.open

    class File(io.FileIO):
        was_full = False

        def write(self, content):
            if is_full.is_set() and self.was_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.was_full = is_full.is_set()
            return super().write(content[:7] if self.was_full else content)

    def opened(path, mode="r", buffering=-1, **named):
        return File(path, mode) if buffering == 0 else open_file(path, mode, buffering, **named)

    monkeypatch.setattr(Path, "open", opened)
    return is_full


def test_lines_that_a_full_disk_does_not_take_are_written_later(tmp_path, capsys, full_disk):
    tracker, ledger = Tracker(make_config(), tmp_path), Ledger(tmp_path / LEDGER, keep_until=0)
    stats = SimpleNamespace(first_group=0, prompts=["p"], without_signal=[], failed_rewards=0)
    for step in (1, 2, 3, 4):
        (full_disk.clear, full_disk.set)[step in (2, 3)]()
        tracker.log(step, FULL)
        ledger.enter(step, stats)
    full_disk.set()
    tracker.log(5, FULL)
    ledger.enter(5, stats)
    full_disk.clear()
    ledger.close()
    tracker.close("FINISHED")
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [line.step for line in read_ledger(tmp_path / LEDGER)] == [1, 2, 3, 4, 5]
    said, logged = capsys.readouterr().out, (tmp_path / "console.log").read_text()
    assert said == logged and said.count("metrics.jsonl cannot be written (No space left on device)") == 1


@pytest.mark.parametrize("waits", [False, True])
def test_an_evaluation_that_a_full_disk_does_not_take_joins_its_line_later(
    tmp_path, capsys, full_disk, monkeypatch, waits
):
    """waits: the disk has no room for a line either; otherwise for none of a second file."""
    written = metrics_file.write_whole

    def write_whole(path: Path, content: bytes, **named) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written(path, content, **named)

    is_full = full_disk if waits else threading.Event()
    monkeypatch.setattr(metrics_file, "write_whole", write_whole)
    with Tracker(make_config(), tmp_path) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": 0.1 * step})
    with Tracker(make_config(), tmp_path, resumed_from_step=2) as tracker:
        is_full.set()
        tracker.log(2, {"eval/accuracy": 0.5})
        tracker.log(2, {"eval/count": 4})
        is_full.clear()
        tracker.log(3, {"reward/mean": 0.3})
    rows = [
        {k: v for k, v in row.items() if k != "elapsed_s"} for row in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert rows == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2, "eval/accuracy": 0.5, "eval/count": 4.0},
        {"step": 3, "reward/mean": 0.3},
    ]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (No space left on device)") == 1


@pytest.mark.parametrize("status", ["FINISHED", "FAILED"])
def test_metrics_that_are_lost_on_a_full_disk_are_told_of(tmp_path, capsys, full_disk, status):
    tracker = Tracker(make_config(), tmp_path)
    full_disk.set()
    tracker.log(1, FULL)
    with pytest.raises(OSError, match="last lines") if status == "FINISHED" else contextlib.nullcontext():
        tracker.close(status)
    assert status == "FINISHED" or "metrics.jsonl are lost (No space" in capsys.readouterr().err


def test_a_console_that_takes_nothing_does_not_end_the_run(tmp_path, monkeypatch):
    tracker = Tracker(make_config(), tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        tracker.log(1, FULL)
        monkeypatch.undo()
        tracker.close("FINISHED")
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert "1/" in (tmp_path / "console.log").read_text()


def test_values_that_are_not_finite(tmp_path, caplog):
    with Tracker(make_config(), tmp_path) as tracker:
        for step in (1, 2):
            tracker.log(step, {"mismatch/k3": math.nan, "optim/grad_norm": math.inf, "reward/mean": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert [(r["mismatch/k3"], r["optim/grad_norm"]) for r in map(json.loads, text.splitlines())] == [
        (None, None)
    ] * 2
    assert [m for m in caplog.messages if "mismatch/k3" in m] == [
        "metric mismatch/k3 is nan; recorded as null (this is logged once)"
    ]
    assert len([m for m in caplog.messages if "optim/grad_norm" in m]) == 1
    assert only_run(tmp_path)[1].data.metrics == {"reward/mean": 0.5}


def test_a_file_behind_a_step_without_any_number_is_sent(tmp_path):
    """Both were one request, and that of rows alone."""
    (tmp_path / "report.html").write_text("hello", encoding="utf-8")
    items = [mlflow_thread.Row(1, 0, {}), mlflow_thread.Artifact(tmp_path / "report.html")]
    thread = mlflow_thread.MlflowThread(make_config(), tmp_path, items, {})
    thread.start()
    thread.finish("FINISHED", 300.0)
    client, run = only_run(tmp_path)
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["report.html"]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 999).map(lambda step: json.dumps({"step": step, "a/b": 0.5})),
            st.integers(0, 999).map(
                lambda step: json.dumps({"step": step, "ü" * (step % 40): 0.5}, ensure_ascii=False)
            ),
            st.sampled_from(["", "{", "[1]", "{}", '{"step": 1, "a/b": "0.5"}']),
        ),
        unique_by=lambda line: line.partition(",")[0],  # read_metrics joins two of one step
    ),
    st.integers(1, 200),
    st.booleans(),
)
def test_rows_from_the_end_are_those_of_the_file_backwards(lines, block, ends):
    """However the blocks cut its lines."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(metrics_file, "BLOCK_BYTES", block):
        path = Path(folder) / "metrics.jsonl"
        path.write_text("\n".join(lines) + "\n" * ends, encoding="utf-8")
        rows = read_metrics(path)[::-1]
        assert [*rows_from_the_end(path)] == rows
        assert [*rows_from_the_end(path, with_metric="a/b")] == [
            found for place, found in enumerate(rows) if place == 0 or "a/b" in found
        ]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "9" * 5000,
        '{"step": 2, "elapsed_s": NaN}',
        f'{{"step": {10**400}}}',
        '{"step": 2.0}',
        '{"step": 2, "reward/mean": "0.5"}',
        '{"step": 2, "eval/accuracy": [1]}',
    ],
    ids=["deeper than Python reads", "longer than an int", "NaN", "no float", "no step", "text", "list"],
)
def test_a_line_that_is_no_row_of_numbers_is_left_out(tmp_path, line, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "reward/mean": null}}\n{line}\n')
    assert read_metrics(path) == [*rows_from_the_end(path)] == [{"step": 1, "reward/mean": None}]
    assert [*caplog.messages] == [f"{path}: line 2 not readable as a step and numbers, left out"]


def test_resume_drops_later_steps_and_the_torn_line_and_goes_on(tmp_path):
    lines = [{"step": s, "elapsed_s": 10.0 * s, "reward/mean": s / 10} for s in (0, 1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4, "rew', encoding="utf-8")
    with Tracker(make_config(), tmp_path, resumed_from_step=2) as tracker:
        assert tracker.elapsed_before_s == 20.0
        tracker.log(3, {"reward/mean": 0.9})
    rows = read_metrics(path)
    assert [(r["step"], r["reward/mean"]) for r in rows] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.9)]
    assert rows[3]["elapsed_s"] >= 20.0
    client, run = only_run(tmp_path)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.9)]
    assert run.data.tags["tandem.resumed_from_step"] == "2"


@pytest.mark.parametrize("lost", [(), ("metrics",), ("ledger",), ("metrics", "ledger")])
def test_a_resume_without_the_lines_of_the_steps_before_says_so(tmp_path, capsys, lost):
    if "metrics" not in lost:
        (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    if "ledger" not in lost:
        entry = {"step": 3, "first": 0, "prompts": ["p"], "without_signal": [], "failed_rewards": 0}
        (tmp_path / LEDGER).write_text(f"{json.dumps(entry)}\n")
    with Tracker(make_config(), tmp_path, resumed_from_step=3) as tracker:
        ledger = Ledger(tmp_path / LEDGER, keep_until=3)
        warn_of_lost_lines(tracker, ledger, 3)
        ledger.close()
    said = capsys.readouterr().out
    assert re.findall(r"(\w+)\.jsonl has no line of step 3, from which the run continues", said) == [*lost]


def test_resume_ends_the_interrupted_mlflow_run_and_names_it(tmp_path):
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.1})
    client, before = only_run(tmp_path)
    client.update_run(before.info.run_id, status="RUNNING")  # as a crash leaves it
    client.delete_tag(before.info.run_id, mlflow_thread.COMPLETE_UNTIL)
    with Tracker(make_config(), tmp_path, resumed_from_step=1) as tracker:
        tracker.log(2, {"reward/mean": 0.2})
    runs = client.search_runs([before.info.experiment_id])
    assert {r.info.run_id: r.info.status for r in runs}[before.info.run_id] == "KILLED"
    after = next(r for r in runs if r.info.run_id != before.info.run_id)
    assert after.data.tags["tandem.continues_run"] == before.info.run_id
    assert len(client.get_metric_history(after.info.run_id, "reward/mean")) == 2


@pytest.mark.parametrize(
    ("resumed_from", "changed", "runs"),
    [(2, {}, 1), (1, {}, 2), (2, {"steps": 77}, 2)],
    ids=["stopped", "a step redone", "other config"],
)
def test_a_stopped_run_is_one_run_for_mlflow_where_nothing_has_to_be_taken_back(
    tmp_path, resumed_from, changed, runs
):
    with Tracker(make_config(), tmp_path) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": step / 10})
    client, before = only_run(tmp_path)
    with Tracker(make_config(**changed), tmp_path, resumed_from_step=resumed_from) as tracker:
        tracker.log(resumed_from + 1, {"reward/mean": 0.9})
    assert not tracker._mlflow._first, "the history is not kept once it is sent"
    found = client.search_runs([before.info.experiment_id])
    newest = (tmp_path / "mlflow_run_id").read_text(encoding="utf-8")
    assert len(found) == runs and (newest == before.info.run_id) == (runs == 1)
    history = client.get_metric_history(newest, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [
        *((s, s / 10) for s in range(1, resumed_from + 1)),
        (resumed_from + 1, 0.9),
    ]
    run = client.get_run(newest)
    assert (run.info.status, run.data.tags["tandem.resumed_from_step"]) == ("FINISHED", str(resumed_from))
    assert run.data.tags[mlflow_thread.COMPLETE_UNTIL] == str(resumed_from + 1)


def test_a_later_evaluation_of_a_step_joins_its_line(tmp_path):
    """Also of the step that a resumed run goes on from: its evaluation may have been interrupted."""
    path = tmp_path / "metrics.jsonl"
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.1, "mismatch/k3": math.nan})
        tracker.log(2, {"reward/mean": 0.2})
    with Tracker(make_config(), tmp_path, resumed_from_step=2) as tracker:
        tracker.log(2, {"eval/accuracy": 0.5})
        tracker.log(2, {"eval/count": 4})
        tracker.log(3, {"reward/mean": 0.3})
    rows = [{k: v for k, v in row.items() if k != "elapsed_s"} for row in read_metrics(path)]
    assert rows == [
        {"step": 1, "reward/mean": 0.1, "mismatch/k3": None},
        {"step": 2, "reward/mean": 0.2, "eval/accuracy": 0.5, "eval/count": 4.0},
        {"step": 3, "reward/mean": 0.3},
    ]


def test_a_folder_with_metrics_is_refused_unless_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path} already holds the metrics of a run; use another `name`")
    ):
        Tracker(make_config(), tmp_path)


# ---- servers that do not answer


@pytest.fixture
def hanging_server(monkeypatch):
    """Accepts connections (into its backlog) and never answers. Its address has a password, which no config takes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://user:secret@127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield address


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def wait_for_problem(tracker: Tracker) -> None:
    deadline = time.monotonic() + 300.0
    while tracker._mlflow.problem is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hanging_server_holds_up_neither_steps_nor_the_end(tmp_path, monkeypatch, hanging_server, caplog):
    monkeypatch.setattr(tracking, "CLOSE_DEADLINE_S", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    tracker = Tracker(make_config(), tmp_path)
    started = time.monotonic()
    for step in range(1, 101):
        tracker.log(step, FULL)
    assert time.monotonic() - started < 50.0  # less than one request that hangs
    started = time.monotonic()
    tracker.close("FINISHED")
    assert time.monotonic() - started < 50.0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 100
    said = [m for m in caplog.messages if "did not take everything within" in m]
    assert len(said) == 1 and "secret" not in said[0]
    assert said[0].endswith(
        "metrics.jsonl has every metric, and MLflow lacks 102 items and the status of this run"
    )
    assert f"  ! {said[0]}\n" in (tmp_path / "console.log").read_text()


def test_a_server_that_is_not_there_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.01)  # many attempts
    uri = closed_port()
    tracker = Tracker(make_config(tracking={"uri": uri}), tmp_path)
    for step in range(1, 51):
        tracker.log(step, FULL)
    wait_for_problem(tracker)
    tracker.close("FINISHED")
    assert not tracker._mlflow.is_alive()
    assert (
        len(
            [
                m
                for m in caplog.messages
                if uri in m and "training continues, and MLflow is tried again later" in m
            ]
        )
        == 1
    )
    (said,) = [m for m in caplog.messages if "MLflow lacks 52 items and the status of this run" in m]
    assert uri in said and "again later" not in said
    assert f"  ! {said}\n" in (tmp_path / "console.log").read_text()


def test_a_damaged_store_is_told_once_on_the_console_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.01)
    mlflow_thread.store_file(tmp_path).write_bytes(b"no database" * 1000)
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, FULL)
        wait_for_problem(tracker)
        for step in range(2, 51):
            tracker.log(step, FULL)
        said = capsys.readouterr().out
    assert said.count("MLflow at ") == said.count("  ! MLflow at sqlite:///") == 1
    assert "file is not a database" in said and "training continues, and MLflow is tried again later" in said
    last = capsys.readouterr().out
    assert last.count("  ! MLflow at sqlite:///") == 1 and "again later" not in last
    assert "metrics.jsonl has every metric, and MLflow lacks 52 items" in last
    assert said + last == (tmp_path / "console.log").read_text()


def test_an_outage_that_has_passed_does_not_hide_the_end_of_tracking(tmp_path, monkeypatch):
    attempts = [OSError("no answer"), None, RuntimeError("a plugin's defect")]
    may_try = threading.Semaphore(0)

    def send_all(thread: mlflow_thread.MlflowThread, rejected: type[Exception]) -> None:
        assert may_try.acquire(timeout=300.0)
        if error := attempts.pop(0):
            raise error

    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.01)
    monkeypatch.setattr(mlflow_thread.MlflowThread, "_send_all", send_all)
    tracker = Tracker(make_config(), tmp_path)
    may_try.release()
    wait_for_problem(tracker)
    tracker.log(1, FULL)
    may_try.release(2)
    tracker._mlflow.join(300.0)
    tracker.log(2, FULL)
    console = (tmp_path / "console.log").read_text()
    assert "OSError: no answer; training continues, and MLflow is tried again later" in console
    assert "  ! MLflow tracking ended (RuntimeError: a plugin's defect); training continues" in console
    tracker.close("FINISHED")
    assert (tmp_path / "console.log").read_text() == console


def test_items_without_room_are_among_those_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_thread, "QUEUE_SIZE", 3)
    thread = mlflow_thread.MlflowThread(make_config(), tmp_path, [], {})
    for step in range(5):
        thread.put(mlflow_thread.Row(step, 0, {}))
    assert thread._lacking.endswith("MLflow lacks 5 items and the status of this run")
    thread._items.clear()
    thread._num_dropped = 0
    assert thread._lacking.endswith("MLflow lacks the status of this run")


@pytest.mark.parametrize("password", ["secret", "se@secret", "s%40secret"])
def test_no_password_of_a_server_that_is_not_there_is_said(tmp_path, monkeypatch, caplog, password):
    """MLflow's own error has the whole address."""
    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.01)
    host = closed_port().removeprefix("http://")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{password}@{host}")
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, FULL)
    said = [message for message in caplog.messages if "MLflow at" in message]
    assert f"API request to http://…@{host}/api" in said[0]
    assert "secret" not in caplog.text + (tmp_path / "console.log").read_text()


@pytest.mark.parametrize("password", ["secret", "a/secret", "a/b@secret"])
def test_no_password_is_in_the_traceback_of_a_plugin(tmp_path, monkeypatch, caplog, password):
    def fail(thread: mlflow_thread.MlflowThread) -> None:
        raise RuntimeError(f"no answer from {thread._uri}")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"foo://user:{password}@host/?password=secret")
    monkeypatch.setattr(mlflow_thread.MlflowThread, "_open_run", fail)
    Tracker(make_config(), tmp_path).close("FINISHED")
    assert "RuntimeError: no answer from foo://…@host/?password=…\n" in caplog.text
    assert "secret" not in caplog.text
    console = (tmp_path / "console.log").read_text()
    assert "  ! MLflow tracking ended (RuntimeError: no answer from foo://…@host/?password=…); " in console
    assert "secret" not in console


def test_a_store_that_another_user_makes_first_is_left_to_that_user(tmp_path, monkeypatch):
    """Neither run has seen a store, and then the lock is the other user's."""
    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.01)
    shared, open_lock, taken = tmp_path.parent / mlflow_thread.STORE, mlflow_thread.open_lock, []

    def refused(path: Path):
        if path.parent == tmp_path:
            return open_lock(path)
        taken.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(mlflow_thread, "open_lock", refused)
    monkeypatch.setattr(mlflow_thread.os, "access", lambda path, mode: not (taken and path == shared))
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert taken == [shared.with_suffix(".lock")]
    assert (tmp_path / mlflow_thread.STORE).is_file()
    assert only_run(tmp_path)[1].data.metrics == {"reward/mean": 0.5}


def test_items_wait_for_a_store_that_comes_back(tmp_path, monkeypatch):
    """The sqlite file's folder appears only after the first attempt failed."""
    monkeypatch.setattr(mlflow_thread, "RETRY_S", 0.05)
    store = tmp_path / "late" / "mlflow.db"
    failed = threading.Event()
    monkeypatch.setattr(mlflow_thread.MlflowThread, "_warn_once", lambda self, kind, *rest: failed.set())
    (tmp_path / "late").write_text("a file in the way", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    tracker = Tracker(make_config(tracking={"uri": f"sqlite:///{store}"}), tmp_path / "run")
    tracker.log(1, {"reward/mean": 0.5})
    assert failed.wait(60)
    (tmp_path / "late").unlink()
    store.parent.mkdir()
    tracker.log(2, {"reward/mean": 0.6})
    tracker.close("FINISHED")
    client, run = only_run(store.parent / "run")
    assert sorted(m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")) == [0.5, 0.6]
    # Not in the current folder.
    assert (store.parent / "mlartifacts" / run.info.run_id / "artifacts" / "config.yaml").is_file()


def test_a_full_queue_drops_instead_of_waiting(tmp_path, monkeypatch, hanging_server, caplog):
    monkeypatch.setattr(tracking, "CLOSE_DEADLINE_S", 0.2)
    monkeypatch.setattr(mlflow_thread, "QUEUE_SIZE", 10)
    with Tracker(make_config(), tmp_path) as tracker:
        for step in range(1, 31):
            tracker.log(step, {"reward/mean": 0.1})
        assert len(tracker._mlflow._items) == 12  # and config: params and config.yaml
    assert len([m for m in caplog.messages if "10 items behind" in m]) == 1


# ---- console


def test_header_and_rows_line_up_and_fit():
    for num_steps in (5, 100_000):
        titles, line, empty = (
            header(num_steps),
            row(num_steps, num_steps, FULL, 123456.0),
            row(0, num_steps, {}, None),
        )
        assert len(titles) == len(line) == len(empty) <= 160
        # every cell ends in the column where its title ends
        ends = [m.end() for m in re.finditer(r"ref KL|\S+", titles)]
        assert [m.end() for m in re.finditer(r"\S+", line)] == ends
        assert [m.end() for m in re.finditer(r"\S+", empty)] == ends
        assert empty.split() == [f"0/{num_steps}"] + ["-"] * 17


def titles_of(**fields) -> list[str]:
    return re.findall(r"ref KL|\S+", header(10, columns_of(make_config(**fields))))


def test_columns_are_those_that_can_move():
    titles = "step reward heldout length loss entropy grad |Δp|max ESS tok/s sample update sync left"
    assert " ".join(titles_of()) == titles
    rejecting = {"weight": {"level": "none"}, "reject": [{"rule": "k3", "upper": 0.01}]}
    assert {"kept"} == set(titles_of(correction=rejecting)) - set(titles_of()) and "ESS" not in titles_of(
        correction=rejecting
    )
    assert {"ref KL", "logprob"} == set(titles_of(kl={"coefficient": 0.1})) - set(titles_of())
    assert "logprob" in titles_of(learner={"minibatches": 2})
    assert {"lag"} == set(titles_of(rollout={"max_staleness": 1})) - set(titles_of())


def test_the_time_left_has_the_last_evaluation_in_it(tmp_path, capsys):
    with Tracker(make_config(steps=4), tmp_path) as tracker:
        tracker.log(0, {"eval/accuracy": 0.5, "time/evaluation": 3600.0})
        tracker.log(1, {"reward/mean": 0.5, "time/step": 2.0})
        tracker.log(4, {"reward/mean": 0.5, "time/step": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["1h00m", "0s"]


@pytest.mark.parametrize(
    ("evaluation", "evaluations_left"),
    [
        ({"every": 2}, [3, 3, 2, 2, 1, 1, 0]),
        ({"every": 4}, [2, 2, 2, 2, 1, 1, 0]),
        ({"every": 4, "at_ends": False}, [1, 1, 1, 1, 0, 0, 0]),
        ({"every": 0}, [1, 1, 1, 1, 1, 1, 0]),
        ({"every": 0, "at_ends": False}, [0] * 7),
    ],
)
def test_the_time_left_has_every_evaluation_that_is_due(
    tmp_path, capsys, monkeypatch, evaluation, evaluations_left
):
    """Steps of 1 s and evaluations of 1000 s, which are no part of a step's pace."""
    config, now = make_config(steps=6, evaluation=evaluation), [0.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    with Tracker(config, tmp_path) as tracker:
        tracker.log(0, {"eval/accuracy": 0.5, "time/evaluation": 1000.0})
        for step in range(1, 7):
            is_due = config.evaluation.is_due(step, 6)
            now[0] += 1.0 + 1000.0 * is_due
            tracker.log(step, {"time/step": 1.0} | ({"time/evaluation": 1000.0} if is_due else {}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [cells[-1] for cells in lines if cells[0] in {f"{step}/6" for step in range(1, 7)}]
    assert found == [
        duration((6 - step) * 1.0 + 1000.0 * count) for step, count in enumerate(evaluations_left) if step > 0
    ]


def test_row_by_hand():
    by_hand = "3/100 0.512 25.0% 10.2 -1.23e-02 1.234 1.5e-03 0.321 3.1e-02 0.998 0.75 1.000 123k 3.2s 0.4s 1.5s 0.2s 1h02m"
    assert row(3, 100, FULL, 3725.0).split() == by_hand.split()


def test_the_reward_of_a_line_is_of_all_groups_that_were_sampled():
    selected = FULL | {"reward/before_selection": 0.113}
    assert row(3, 100, selected, 3725.0) == row(3, 100, FULL, 3725.0).replace("0.512", "0.113")


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(FULL)), st.floats(allow_nan=False, allow_infinity=False)),
    st.integers(0, 10**5),
)
def test_cells_never_run_together(metrics, step):
    assert len(row(step, 10**5, metrics, None).split()) == 18


def test_console_is_plain_in_a_pipe_and_repeats_its_header(tmp_path, capsys):
    steps = HEADER_EVERY + 1
    with Tracker(make_config(steps=steps), tmp_path) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step, {"reward/mean": 0.5, "time/step": 2.0})
        tracker.say("a line in between")
    out = capsys.readouterr().out
    assert out == (tmp_path / "console.log").read_text(encoding="utf-8")
    lines = out.splitlines()
    assert [i for i, line in enumerate(lines) if "reward" in line] == [0, HEADER_EVERY + 1]
    assert len(lines) == steps + 3 and lines[-1] == "a line in between"
    assert "\x1b" not in out
    assert lines[1].split()[0] == f"1/{steps}" and lines[1].split()[-1] == "40s"  # 20 steps left at 2 s


def test_an_alarm_is_told_when_it_begins_and_again_only_after_it_had_stopped(tmp_path, capsys):
    ess = {1: 0.9, 2: 0.2, 3: 0.1, 4: 0.9, 5: math.nan, 6: 0.15}
    chi2 = {3: 5.0, 4: 6.0}
    with Tracker(make_config(), tmp_path) as tracker:
        for step, value in ess.items():
            metrics = {"mismatch/ess": value, "mismatch/chi2_token": chi2.get(step, 0.0)}
            tracker.log(step, metrics)
    out = capsys.readouterr().out
    assert out == (tmp_path / "console.log").read_text(encoding="utf-8")
    told = [line for line in out.splitlines() if line.startswith("  ! ")]
    assert [line.split(" (alarms.")[0] for line in told] == [
        "  ! step 2: mismatch/ess is 0.2", "  ! step 3: mismatch/chi2_token is 5", "  ! step 5: mismatch/ess is nan"
    ]  # fmt: skip
    assert all("Usual cause: " in line and "Try: " in line for line in told)
    lines = out.splitlines()
    # Under its own step.
    assert all(lines[lines.index(line) - 1].split()[0].startswith(f"{line[9]}/") for line in told)


def test_a_fall_of_the_accuracy_below_the_best_is_an_alarm_also_after_a_resume(tmp_path, capsys):
    def evaluation(accuracy: float, error: float | None = 0.03) -> dict[str, float]:
        return {"eval/accuracy": accuracy, "eval/count": 400.0, "eval/accuracy_error": error}

    with Tracker(make_config(), tmp_path) as tracker:
        for step, accuracy in ((0, 0.3), (2, 0.5), (4, 0.4), (6, 0.2)):
            tracker.log(step, evaluation(accuracy))
    with Tracker(make_config(), tmp_path, resumed_from_step=4) as tracker:
        tracker.log(5, {"reward/mean": 0.5})
        tracker.log(6, evaluation(0.1, error=0.04))
    falls = {row["step"]: row.get("eval/accuracy_fall") for row in read_metrics(tmp_path / "metrics.jsonl")}
    assert falls == {
        0: None, 2: pytest.approx(-0.2 / (0.03 * 2**0.5)), 4: pytest.approx(0.1 / (0.03 * 2**0.5)),
        5: None, 6: pytest.approx(0.4 / 0.05),
    }  # fmt: skip
    told = [
        line.split(" (alarms.")[0] for line in capsys.readouterr().out.splitlines() if "accuracy_fall" in line
    ]
    assert told == ["  ! step 6: eval/accuracy_fall is 7.071", "  ! step 6: eval/accuracy_fall is 8"]


def test_an_alarm_of_evaluations_goes_on_over_the_steps_without_one(tmp_path, capsys):
    accuracies = {0: 0.5, 1: None, 2: 0.1, 3: None, 4: 0.1, 5: None, 6: 0.5, 7: None, 8: 0.1}
    with Tracker(make_config(), tmp_path) as tracker:
        for step, accuracy in accuracies.items():
            metrics = {"reward/mean": 0.5, "reward/failed_fraction": 0.0}
            if accuracy is not None:
                metrics |= {"eval/accuracy": accuracy, "eval/count": 400, "eval/accuracy_error": 0.03}
            tracker.log(step, metrics)
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "accuracy_fall is" in line]
    assert told == ["  ! step 2", "  ! step 8"]


def test_an_evaluation_whose_rewards_failed_is_no_fall_and_no_best(tmp_path, capsys):
    """Failed rewards count as wrong answers; their own alarm says so."""
    of_step = {0: (0.5, 0.0), 1: (0.1, 0.4), 2: (0.9, 0.06), 3: (0.45, 0.05), 4: (0.1, 0.0)}
    with Tracker(make_config(), tmp_path) as tracker:
        for step, (accuracy, failed) in of_step.items():
            measured = {"eval/accuracy": accuracy, "eval/count": 400, "eval/accuracy_error": 0.03}
            tracker.log(step, measured | {"eval/failed_fraction": failed})
    out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ! ")]
    assert [line.split(" is ")[0] for line in out] == [
        "  ! step 1: eval/failed_fraction",
        "  ! step 4: eval/accuracy_fall",
    ]
    falls = [row.get("eval/accuracy_fall") for row in read_metrics(tmp_path / "metrics.jsonl")]
    fall = 1 / (0.03 * 2**0.5)
    assert falls == [None, None, None, pytest.approx(0.05 * fall), pytest.approx(0.4 * fall)]


def test_an_accuracy_without_spread_is_not_exact():
    """Of 10 answers all right, then all wrong: the error of each is that of 10 throws of a coin, sqrt(1/4 / 10)."""
    of_ten = {"eval/count": 10, "eval/accuracy_error": 0.0}
    best = BestAccuracy([of_ten | {"eval/accuracy": 1.0}], max_failed=None)
    assert best.fall_to(of_ten | {"eval/accuracy": 0.0}) == {"eval/accuracy_fall": pytest.approx(20**0.5)}
    one_problem = {"eval/accuracy": 0.0, "eval/count": 8}
    assert best.fall_to(one_problem) == {} and best.fall_to({"reward/mean": 1.0}) == {}


@pytest.mark.parametrize(
    ("problems", "samples", "share"), [(2, 16, 0.5), (4, 16, 0.5), (8, 16, 0.9), (32, 1, 0.5)]
)
def test_a_policy_that_does_not_change_falls_by_chance_in_few_runs(problems, samples, share):
    """Simulated: problems that are all equally hard, where the error from problem to problem is often near 0 by chance.
    Without a floor for it up to nine of ten runs had an alarm."""
    level, runs = AlarmsConfig().accuracy_fall_max, 200
    rng = np.random.default_rng(7)
    falling = 0
    for right in rng.random((runs, 100, problems, samples)) < share:
        best, falls = BestAccuracy([], max_failed=None), []
        errors = right.mean(-1).std(-1, ddof=1) / problems**0.5
        for accuracy, error in zip(right.mean((-1, -2)), errors, strict=True):
            measured = {
                "eval/accuracy": accuracy,
                "eval/accuracy_error": error,
                "eval/count": problems * samples,
            }
            falls += best.fall_to(measured).values()
        falling += max(falls) > level
    assert falling <= runs / 10


def test_a_first_failed_reward_is_told_once(tmp_path, capsys):
    with Tracker(make_config(), tmp_path) as tracker:
        for step, failed in ((1, 0), (2, 3), (3, 4)):
            first = "prompt p7, sibling 0, not scored: KeyError: 'x' (mine.py:3 in score)" if failed else None
            stats = SimpleNamespace(failed_rewards=failed, scored=40, first_failure=first)
            tell_of_failed_rewards(SimpleNamespace(tracker=tracker), step, Sampled(groups=[], stats=stats))
    told = "  ! step 2: 3 of 40 rewards failed; the first, of prompt p7, sibling 0, not scored: KeyError: 'x' (mine.py:3 in score)\n"
    assert capsys.readouterr().out == told


def test_what_a_model_wrote_does_not_steer_the_terminal(tmp_path, capsys):
    with Tracker(make_config(), tmp_path) as tracker:
        tracker.warn_once("failed rewards", "the error: \x1b]0;owned\x07\x1b[2J\u202e")
    shown = "  ! the error: ␛]0;owned␇␛[2J\\u202e\n"
    assert capsys.readouterr().out == shown == (tmp_path / "console.log").read_text(encoding="utf-8")


# ---- processes


def test_tracking_imports_neither_mlflow_nor_torch_and_an_unclosed_tracker_lets_the_process_end(tmp_path):
    code = f"""
import sys, pathlib
from trainer.tracking.tracker import Tracker
assert not {{"mlflow", "torch", "matplotlib"}} & set(sys.modules)
from configs.schema import RunConfig
config = RunConfig.model_validate({{"model": {{"path": "m"}}, "task": {{"type": "countdown"}}}})
Tracker(config, pathlib.Path({str(tmp_path)!r})).log(1, {{"reward/mean": 1.0}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
