"""Copies of metrics.jsonl: what TensorBoard's own reader and a reader of W&B's offline file find in them, beside steps that
are joined, run again, or added during a copy."""

import json
import socket
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from tests.support.service_files import tensorboard_values, values_of, wandb_runs
from trainer.file_system import write_whole
from trainer.tracking import metrics_file
from trainer.tracking.mlflow_thread import Status
from trainer.tracking.publisher import Publisher, missing_package, services_of
from trainer.tracking.services import ServiceError, TensorBoardService, WandbService, publish

ROWS = [
    {"step": 0, "elapsed_s": 0.5, "eval/accuracy": 0.25},
    {"step": 1, "elapsed_s": 2.0, "reward/mean": 0.5, "mismatch/k3": None},
    {"step": 2, "elapsed_s": 3.5, "reward/mean": 0.75},
]


def run_dir(tmp_path: Path, rows: list[dict] = ROWS, **tracking) -> Path:
    folder = tmp_path / "countdown-7"
    folder.mkdir()
    config = RunConfig(
        name="countdown", model={"path": "m"}, task={"type": "countdown"}, steps=3, tracking=tracking
    )
    (folder / "config.yaml").write_text(resolved_yaml(config))
    write(folder, rows)
    return folder


def write(folder: Path, rows: list[dict]) -> None:
    """As a run that is resumed, or whose last line grows: in the place of the file before."""
    write_whole(folder / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def steps_then(*changes: object, status: Status = "FINISHED"):
    """For ``publish``: makes the next change of the file at each look, and then tells the status."""
    left = list(changes)

    def wait() -> Status | None:
        if not left:
            return status
        left.pop(0)()
        return None

    return wait


class InMemory:
    """What a service would hold: of steps that only grow, each name once."""

    def __init__(self, held: int = 0):
        self.held, self.values, self.copies, self.last = held, {}, 0, -1

    def open(self, lines):
        self.copies, self.values, self.last = self.copies + 1, {}, -1
        return self.held

    def log(self, line):
        assert line["step"] >= self.last, "a service takes no step back"
        self.last = line["step"]
        new = values_of([line])
        assert not new.keys() & self.values.keys(), "sent twice"
        self.values |= new

    def close(self, status, lines):
        self.status = status


@given(data=st.data())
def test_whatever_a_run_does_the_last_copy_is_its_record(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rows: list[dict] = []

    def train():
        at = rows[-1]["step"] + 1 if rows else 0
        rows.append(
            {"step": at, "elapsed_s": data.draw(st.floats(0, 9)), "loss/total": data.draw(st.floats(0, 1))}
        )
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(rows[-1])}\n")

    def evaluate():
        if rows:
            rows[-1] |= {"elapsed_s": data.draw(st.floats(0, 9)), "eval/accuracy": 0.5}
            write(folder, rows)

    def resume():
        del rows[data.draw(st.integers(0, len(rows))) :]
        write(folder, rows)

    def act():
        for action in data.draw(st.lists(st.sampled_from([train, evaluate, resume]), max_size=4)):
            action()

    act()
    service = InMemory()
    publish(
        service, folder / "metrics.jsonl", steps_then(act, act, act, status="KILLED"), say=lambda text: None
    )
    assert service.values == values_of(rows) and service.status == "KILLED"


def test_a_copy_begins_anew_only_where_steps_were_done_again(tmp_path):
    folder, service, said = run_dir(tmp_path, ROWS[:2]), InMemory(), []
    joined = [*ROWS[:1], ROWS[1] | {"elapsed_s": 2.5, "eval/accuracy": 0.5}]
    again = [*ROWS[:1], {"step": 1, "elapsed_s": 9.0, "reward/mean": 0.1}]
    looks = steps_then(lambda: write(folder, joined), lambda: write(folder, [*joined, ROWS[2]]))
    publish(service, folder / "metrics.jsonl", looks, said.append)
    assert service.copies == 1 and service.values == values_of([*joined, ROWS[2]])
    publish(service, folder / "metrics.jsonl", steps_then(lambda: write(folder, again)), said.append)
    assert service.copies == 3 and service.values == values_of(again) and "have changed" in said[-2]


def test_a_look_reads_the_new_lines_alone(tmp_path, monkeypatch):
    """Else each step of a long run would read and compare all steps before it."""
    folder, service, read = run_dir(tmp_path, []), InMemory(), []
    parse = metrics_file._row_in
    monkeypatch.setattr(metrics_file, "_row_in", lambda line: read.append(line) or parse(line))
    rows = [{"step": step, "elapsed_s": float(step), "loss/total": 0.5} for step in range(50)]

    def add(row: dict) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n")

    looks = steps_then(*(partial(add, row) for row in rows))
    publish(service, folder / "metrics.jsonl", looks, say=lambda text: None)
    assert service.copies == 1 and service.values == values_of(rows)
    assert len([line for line in read if line]) == len(rows)


def test_an_earlier_copy_whose_last_line_grows_begins_anew(tmp_path):
    """W&B goes on behind that line: a resumed run owes the evaluation of its step."""
    folder, service, said = run_dir(tmp_path, ROWS[:2]), InMemory(held=2), []
    joined = [*ROWS[:1], ROWS[1] | {"elapsed_s": 2.5, "eval/accuracy": 0.5}]

    def evaluated() -> None:
        service.held = 0
        write(folder, joined)

    publish(service, folder / "metrics.jsonl", steps_then(evaluated), said.append)
    assert service.copies == 2 and service.values == values_of(joined)


def test_tensorboard_reads_every_value_at_its_step_and_time(tmp_path):
    folder = run_dir(tmp_path)
    for _ in range(2):  # the second copy takes the place of the first
        publish(
            TensorBoardService(folder), folder / "metrics.jsonl", lambda: "FINISHED", say=lambda text: None
        )
    events, found = tensorboard_values(folder)
    assert found == values_of(ROWS) | {(row["step"], "elapsed_s"): row["elapsed_s"] for row in ROWS}
    first, last = (events.Scalars("reward/mean")[place].wall_time for place in (0, -1))
    assert last - first == pytest.approx(1.5)
    assert abs(last - (folder / "metrics.jsonl").stat().st_mtime) < 1e-3
    (config,) = events.Tensors("config/text_summary")
    assert b"name: countdown" in config.tensor_proto.string_val[0]


def test_wandb_gets_every_value_once_and_goes_on_with_its_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SLURM_JOB_COMMENT", "of-slurm")
    monkeypatch.setattr(sys, "argv", ["of-command-line", "of-arguments"])
    folder, said = run_dir(tmp_path, ROWS[:2]), []

    def copy() -> None:
        second = int(time.time())
        while int(time.time()) == second:  # the folders of W&B are named by it
            time.sleep(0.01)
        service = WandbService(folder, project="p", entity=None, say=said.append)
        publish(service, folder / "metrics.jsonl", lambda: "FINISHED", said.append)

    copy()
    write(folder, ROWS)
    copy()
    write(folder, [ROWS[0], ROWS[1] | {"reward/mean": 0.125}])  # a resumed run did step 1 again
    copy()
    wandb.teardown()  # the end of a process: a run that is finished may still be on its way to the disk
    (first, values), (second, more), (third, again) = wandb_runs(folder)
    times = {(row["step"], "elapsed_s"): row["elapsed_s"] for row in ROWS}
    assert values | more == values_of(ROWS) | times and not values.keys() & more.keys()
    assert first == second != third and again[1, "reward/mean"] == 0.125
    assert "wandb sync" in said[0]
    everything = b"".join(file.read_bytes() for file in (folder / "wandb").rglob("*") if file.is_file())
    assert b"countdown-7" in everything, "the run's name"
    host = socket.gethostname().encode() + b"\n"
    for private in (b"of-slurm", b"of-command-line", b"of-arguments", host, b"pytest=="):
        assert private not in everything, private


def test_the_process_of_a_run_copies_what_comes_and_ends_when_told_or_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    folder = run_dir(tmp_path, ROWS[:1], tensorboard=True)
    publisher = Publisher("tensorboard", folder)
    write(folder, ROWS)
    publisher.tell("FINISHED")
    assert publisher.finish(time.monotonic() + 120) is None
    assert publisher.log_file.read_text().endswith("copied: 3 lines of {}\n".format(folder / "metrics.jsonl"))

    hangs = Publisher("tensorboard", folder)  # it was not told to end
    process = psutil.Process(hangs._process.pid)
    problem = hangs.finish(time.monotonic())
    assert "did not end in time" in problem and f"tandem publish {folder} --to tensorboard" in problem
    assert not process.is_running()


def test_a_copy_that_fails_says_so_in_a_line_and_how_to_make_it_later(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of a user
    folder = run_dir(tmp_path, wandb={})
    publisher = Publisher("wandb", folder)
    deadline = time.monotonic() + 120
    while publisher.problem() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    publisher.tell("FINISHED")  # nobody listens
    assert "API key" in publisher.finish(deadline)
    assert "--to wandb` copies all of it at any time" in publisher.finish(deadline)


def test_no_password_of_its_server_is_in_an_error_of_wandb(tmp_path, monkeypatch):
    import wandb

    def fail(**options):
        raise wandb.errors.CommError("no answer from https://me:a/secret@wandb.example/graphql")

    monkeypatch.setattr(wandb, "init", fail)
    service = WandbService(run_dir(tmp_path), project="tiny", entity=None)
    with pytest.raises(ServiceError, match=r"^W&B: no answer from https://…@wandb\.example/graphql$"):
        service.open([])


def test_services_are_those_of_the_config_and_a_missing_package_is_named(monkeypatch):
    config = RunConfig(
        model={"path": "m"}, task={"type": "countdown"}, tracking={"wandb": {}, "tensorboard": True}
    )
    assert services_of(config) == ["wandb", "tensorboard"]
    assert services_of(config.model_copy(update={"tracking": type(config.tracking)()})) == []
    assert missing_package("tensorboard") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package wandb" in missing_package("wandb") and "pip install wandb" in missing_package(
        "wandb"
    )
