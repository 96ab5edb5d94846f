"""``tandem publish``: what it refuses, and how long it follows a run."""

import fcntl
import importlib.util
import json
import signal
from pathlib import Path

import pytest

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from launch.checks.config import check_services
from launch.commands import publish as command
from launch.processes.run_folder import RunFolder
from tests.support.command import tandem
from tests.support.service_files import tensorboard_values, values_of

ROWS = [{"step": 1, "elapsed_s": 2.0, "reward/mean": 0.5}, {"step": 2, "elapsed_s": 3.0, "reward/mean": 0.25}]


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = RunConfig(model={"path": "m"}, task={"type": "countdown"}, steps=2)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "metrics.jsonl").write_text(f"{json.dumps(ROWS[0])}\n")
    return folder


def test_a_run_is_copied_as_it_is(run):
    done = tandem("publish", "run", "--to", "tensorboard", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    metrics = run / "metrics.jsonl"
    assert done.stdout == f"TensorBoard: `tensorboard --logdir {run.parent}`\ncopied: 1 line of {metrics}\n"
    assert tensorboard_values(run)[1][1, "reward/mean"] == 0.5


def test_a_run_is_followed_until_it_ends_or_ctrl_c(run, monkeypatch):
    looks = []

    def state(folder: RunFolder) -> str:
        looks.append(folder)
        if len(looks) == 2:
            (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        return "running" if len(looks) < 4 else "finished"

    monkeypatch.setattr(command, "brief_state", state)
    monkeypatch.setattr(command, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(command, "LOOK_EVERY_S", 0.0)
    done = tandem("publish", "run", "--to", "tensorboard", "--follow", cwd=run.parent)
    assert done.returncode == 0 and len(looks) >= 4
    _, values = tensorboard_values(run)
    assert {place: values[place] for place in values_of(ROWS)} == values_of(ROWS)

    def interrupting(folder: RunFolder) -> str:
        signal.raise_signal(signal.SIGINT)
        return "not running"  # as a run of another machine seems

    monkeypatch.setattr(command, "brief_state", interrupting)
    done = tandem("publish", "run", "--to", "tensorboard", "--follow", cwd=run.parent)
    assert done.returncode == 0 and "copied: 2 lines" in done.stdout
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_is_copied_by_one_process_at_a_time(run):
    with (run / ".publish-tensorboard.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = tandem("publish", "run", "--to", "tensorboard", cwd=run.parent)
        assert done.returncode == 2 and f"another process copies {run} to tensorboard" in done.stderr
        assert not (run / "tensorboard").exists()
    assert tandem("publish", "run", "--to", "tensorboard", cwd=run.parent).returncode == 0


def test_a_link_in_the_place_of_the_lock_empties_no_file(run):
    """As the locks of runs and exports: anybody of a group may have put it into a folder that they share."""
    (run.parent / "mine").write_text("kept")
    (run / ".publish-tensorboard.lock").symlink_to(run.parent / "mine")
    done = tandem("publish", "run", "--to", "tensorboard", cwd=run.parent)
    assert done.returncode == 2 and "is a link, and a lock must be a file" in done.stderr
    assert (run.parent / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--to", "mlflow"], "'mlflow' is not one of 'wandb'"),
        (["--to", "tensorboard", "--project", "p"], "--project and --entity belong to W&B"),
        ([], "Missing option '--to'"),
    ],
)
def test_wrong_arguments(run, arguments, told):
    done = tandem("publish", "run", *arguments, cwd=run.parent)
    assert done.returncode == 2 and told in done.stderr


def test_a_folder_without_metrics(run):
    (run / "metrics.jsonl").unlink()
    done = tandem("publish", "run", "--to", "tensorboard", cwd=run.parent)
    assert done.returncode == 2 and "has no metrics yet" in done.stderr and "--follow waits" in done.stderr
    (run / "request.json").write_text("{}")
    done = tandem("publish", "run", "--to", "tensorboard", "--follow", cwd=run.parent)
    assert done.returncode == 2 and "is no training run" in done.stderr


def test_a_package_that_is_missing(run, monkeypatch):
    """The command and, before a run starts, its config say how to install it."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(command.BadInput, match=r"--to wandb needs the package wandb, .* pip install wandb"):
        command.publish_run(
            RunFolder(run), "wandb", project=None, entity=None, follow=False, until_told=False
        )
    config = RunConfig(
        model={"path": "m"}, task={"type": "countdown"}, tracking={"wandb": {}, "tensorboard": True}
    )
    ((field, error),) = check_services(config, ["serve", "sample", "learn"])
    assert field == "tracking.wandb" and "pip install wandb, or leave it out" in error.replace("`", "")
    assert list(check_services(config, ["serve", "sample"])) == []  # nothing is trained
