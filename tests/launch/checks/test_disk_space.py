"""Space on disks: what a checkpoint takes, what is said before a run that cannot fit, and what an export onto
a full disk leaves."""

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from configs.loader import ConfigError, load_config
from configs.schema import RunConfig
from launch.checks import disk_space
from launch.checks.arguments import BadInput
from launch.checks.disk_space import disk_lines, disk_need, disk_problems
from launch.commands import results
from launch.commands import train as training
from launch.processes.run_folder import RunFolder
from parallel.checkpoints.files import step_folder, stored_bytes, write_manifest
from parallel.planning.memory import GIB, size_text
from parallel.weights.hf_headers import SINGLE as WEIGHTS
from tests.configs.test_broken_configs import BASE, MODELS
from tests.support.megatron_workers import make_engine, make_hf_model, make_value_engine
from tests.support.model_folders import make_model_folder, write_weights

ROOT = Path(__file__).resolve().parents[3]
SHAPE = dict(hidden_size=256, intermediate_size=512, vocab_size=512, num_attention_heads=8)
"""Large enough that what is not tensors does not matter."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3", **SHAPE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "dense", MODELS["dense"])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    sft = {"kind": "sft", "model": {"path": "dense"}, "data": {"type": "countdown"}, "output": "warm"}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft))
    return tmp_path


@pytest.fixture
def free(monkeypatch) -> SimpleNamespace:
    usage = SimpleNamespace(free=0, total=2**40)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: usage)
    return usage


def config(*overrides: str) -> RunConfig:
    return load_config("run.yaml", ["layout.dp=1", *overrides])


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]
)
def test_the_estimate_is_what_a_checkpoint_takes(folder, model, tmp_path, dtype, distributed):
    overrides = (
        f"model.path={model}",
        f"model.dtype={dtype}",
        f"learner.optimizer.distributed={str(distributed).lower()}",
    )
    engine = make_engine(model, dtype=dtype, distributed=distributed)
    engine.save(step_folder(tmp_path, 1), {})
    policy = disk_need(config(*overrides, "checkpoint.every=1"))
    assert 1 <= stored_bytes(tmp_path) / policy.checkpoint < 1.03
    assert policy.largest_file <= max(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    engine.save_hf(tmp_path / "hf")
    assert 1 <= (tmp_path / "hf" / "model.safetensors").stat().st_size / policy.model < 1.03


def test_the_estimate_of_adapters_is_of_them_alone(folder, model, tmp_path):
    engine = make_engine(model, lora={"rank": 16})
    engine.save(step_folder(tmp_path, 1), {})
    need = disk_need(config(f"model.path={model}", "model.dtype=float32", "learner.lora={rank: 16}"))
    whole = disk_need(config(f"model.path={model}", "model.dtype=float32"))
    assert 1 <= stored_bytes(tmp_path) / need.checkpoint < 1.2  # a tensor's name takes more of so small a one
    assert need.checkpoint < whole.checkpoint / 2
    engine.save_hf(tmp_path / "hf")
    engine.save_adapter(tmp_path / "adapter")
    written = [tmp_path / "hf" / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors"]
    # q, k and v, and gate and up, have copies of the A that they share
    assert 1 <= sum(path.stat().st_size for path in written) / need.model < 1.2


def test_the_estimate_of_a_critic_too(folder, model, tmp_path):
    make_value_engine(model).save(step_folder(tmp_path, 1), {})
    settings = (f"model.path={model}", "model.dtype=float32")
    policy, both = disk_need(config(*settings)), disk_need(config(*settings, "advantage.type=gae"))
    assert 1 <= stored_bytes(tmp_path) / (both.checkpoint - policy.checkpoint) < 1.03


def test_how_many_checkpoints_there_are_at_once(folder):
    """One more than are kept, while the newest is written; no more than the run writes; none where it writes
    none."""
    settings = ("steps=10", "checkpoint.keep=3")
    for every, count in ((1, 4), (3, 4), (4, 3), (20, 1), (0, 0)):
        need = disk_need(config(*settings, f"checkpoint.every={every}"))
        assert need.checkpoints == count
        assert need.most == count * need.checkpoint + need.model
        assert need.least == (need.checkpoint if count else 0) + need.model


def problems(config: RunConfig) -> tuple[list[tuple[str, str]], list[str]]:
    notes: list[str] = []
    return [*disk_problems(config, notes)], notes


def test_too_little_space_is_an_error_and_perhaps_too_little_a_note(folder, free):
    run = config("steps=10", "checkpoint.every=1", "launch.runs_dir=here/runs")
    need = disk_need(run)
    free.free = need.most
    assert problems(run) == ([], [])
    free.free = need.most - 1
    (errors, (note,)) = problems(run)
    assert errors == [] and "the run needs up to" in note and "lower checkpoint.keep" in note
    free.free = need.least
    assert problems(run)[0] == []
    free.free = need.least - 1
    (((field, said),), notes) = problems(run)
    assert (field, notes) == ("launch.runs_dir", [])
    numbers = f"its disk has {size_text(free.free)} free, and the run needs {size_text(need.least)} ("
    assert said.startswith(f"launch.runs_dir=here/runs: {numbers}")
    assert "3 checkpoints at once" in said and "free space" in said


def test_a_limit_of_the_size_of_files_below_the_model_is_an_error(folder, free, monkeypatch):
    free.free, run = 2**60, config("launch.runs_dir=here/runs", "checkpoint.every=0")
    need = disk_need(run)
    for limit, count in ((resource.RLIM_INFINITY, 0), (need.model, 0), (need.model - 1, 1)):
        monkeypatch.setattr(disk_space.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        errors, notes = problems(run)
        assert (len(errors), notes) == (count, [])
    ((field, said),) = errors
    assert field == "launch.runs_dir" and f"one of {size_text(need.model)} or more" in said
    assert said.endswith("raise the limit (`ulimit -f`), or have the administrators do so")
    monkeypatch.setattr(disk_space, "LARGEST_FILE", need.model - 1)  # a model of several files
    assert problems(run) == ([], [])


def test_a_limit_of_the_size_of_files_below_those_of_a_checkpoint_is_an_error(folder, free, monkeypatch):
    """Each rank writes its share, in two files."""
    free.free = 2**60
    one, four = (config("checkpoint.every=1", f"layout.dp={dp}") for dp in (1, 4))
    need = disk_need(one)
    assert need.largest_file == need.checkpoint // 2 > need.model
    monkeypatch.setattr(disk_space.resource, "getrlimit", lambda _: (need.checkpoint // 2 - 1,) * 2)
    ((_, said),) = problems(one)[0]
    assert f"one of {size_text(need.checkpoint // 2)} or more" in said
    assert problems(four) == ([], [])


def test_what_a_resumed_run_has_written_is_not_needed_again(folder, free):
    run = config("steps=10", "checkpoint.every=1")
    for parent in ("checkpoints", "checkpoints/critic"):
        step = step_folder(folder / "before" / parent, 1)
        step.mkdir(parents=True)
        (step / "x").write_bytes(b"x" * 1000)
        write_manifest(step, world_size=1)
    resumed = run.model_copy(update={"resume": folder / "before"})
    assert disk_need(resumed).most == disk_need(run).most - 2000
    assert [field for field, _ in problems(resumed)[0]] == ["resume"]


def test_it_is_said_before_a_start(folder, free, capsys):
    """Of the learner and of a warm start; not by what writes no weights, nor where it is to run elsewhere."""
    for command, file, field in (
        (training.train, "run.yaml", "launch.runs_dir"),
        (training.sft, "sft.yaml", "output"),
    ):
        with pytest.raises(ConfigError, match=rf"{field}[\s\S]*its disk has 0 B free, and the run needs"):
            command(Path(file), ["layout.dp=1"], dry_run=True)
        command(Path(file), ["layout.dp=1"], dry_run=True, gpu_memory=80)
    free.free = 2**60
    capsys.readouterr()
    training.train(Path("run.yaml"), ["layout.dp=1", "checkpoint.every=1"], dry_run=True)
    said = capsys.readouterr().out
    assert re.search(r"# disk, in runs: up to \S+ .iB, of \S+ TiB free here: 3 checkpoints at once", said)
    free.free = 0
    training.evaluate(Path("run.yaml"), ["layout.dp=1"], dry_run=True)


def test_dry_run_tells_the_sizes(folder, free):
    free.free = 5 * GIB
    run = config("checkpoint.every=1", "checkpoint.keep=2", "steps=9")
    need = disk_need(run)
    (line,) = disk_lines(run)
    assert line == (
        f"disk, in runs: up to {size_text(need.most)}, of 5.00 GiB free here: 3 checkpoints at once of {size_text(need.checkpoint)} "
        f"each, the trained model {size_text(need.model)}"
    )


@pytest.mark.parametrize(
    ("hard", "is_error"), [(resource.RLIM_INFINITY, False), (256, False), (255, True), (64, True)]
)
def test_too_few_open_files_are_said_before_a_start(folder, free, monkeypatch, hard, is_error):
    """Roles raise their own limit up to the hard one, which alone counts."""
    limits = {resource.RLIMIT_NOFILE: (64, hard)}
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    free.free = 2**60
    told = rf"may have at most {hard} open files here, and a run needs 256\n.*raise the hard limit \(`ulimit -Hn`\)"
    expected = pytest.raises(ConfigError, match=told) if is_error else contextlib.nullcontext()
    with expected:
        training.train(Path("run.yaml"), ["layout.dp=1"], dry_run=True)


# ----------------------------------------------------------------------------------------------------------------------
# export


@pytest.fixture
def finished(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    make_model_folder(run.hf, MODELS["dense"])
    run.config.write_text("kind: train\n")
    run.summary.write_text('{"steps": 1}')
    return run


def test_an_export_onto_a_full_disk_is_one_error_and_leaves_nothing(finished, tmp_path):
    """The operating system refuses files above a size, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            BadInput,
            match=r"OUT: .*out cannot be written: .*File too large.*partial copy was removed. Free space there",
        ):
            results.export(finished.path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    results.export(finished.path, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (finished.hf / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", ["merges.txt", "templates"])
def test_an_export_of_what_cannot_be_read_says_that_it_is_the_runs(finished, tmp_path, monkeypatch, name):
    file = finished.hf / name
    file.mkdir() if name == "templates" else file.touch()

    def refusing(ask: Callable) -> Callable:
        def ask_or_refuse(path, *given, **named):
            if getattr(path, "path", path) == str(file):  # an entry of the folder
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return ask(path, *given, **named)

        return ask_or_refuse

    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    monkeypatch.setattr(shutil, "copyfile", refusing(shutil.copyfile))
    with pytest.raises(
        BadInput, match=rf"^RUN: \S+/hf cannot be read: .*denied: '\S+/hf/{name}'; the partial"
    ):
        results.export(finished.path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_says_that_a_resume_took_its_model(finished, tmp_path, monkeypatch):
    copy = shutil.copytree

    def copy_late(source: Path, target: Path) -> None:
        finished.put_model_aside()
        copy(source, target)

    with (
        monkeypatch.context() as patched,
        pytest.raises(BadInput, match=r"^RUN: \S+/hf was renamed during the copy"),
    ):
        patched.setattr(results.shutil, "copytree", copy_late)
        results.export(finished.path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_export_leaves_nothing(finished, tmp_path, monkeypatch):
    def interrupted(source, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(results.shutil, "copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.export(finished.path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_killed_export_left_beside_its_folder_is_removed_by_the_next_one(finished, tmp_path):
    make = "import os; from rollout.guarded_process import own_name; os.mkdir(own_name('tandem-export-'))"
    left = set(tmp_path.iterdir())
    subprocess.run(
        [sys.executable, "-c", make], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    (left,) = set(tmp_path.iterdir()) - left
    (left / "model.safetensors").touch()
    results.export(finished.path, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}


def test_two_exports_of_one_run_do_not_meet(finished, tmp_path):
    (finished.path / "roles").mkdir()
    with (finished.path / "roles" / "export-lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="is being exported by another process"):
            results.export(finished.path, tmp_path / "out")
    results.export(finished.path, tmp_path / "out")


def test_an_export_into_a_folder_that_another_one_made_meanwhile_keeps_that_one(
    finished, tmp_path, monkeypatch
):
    out, copy = tmp_path / "out", shutil.copytree

    def copy_late(source: Path, target: Path) -> None:
        copy(source, target)
        out.mkdir()
        (out / "of_the_other").touch()

    monkeypatch.setattr(results.shutil, "copytree", copy_late)
    with pytest.raises(BadInput, match=r"^OUT: \S+out cannot be written: .*not empty"):
        results.export(finished.path, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert [path.name for path in out.iterdir()] == ["of_the_other"]


def test_adapters_are_exported_alone(finished, tmp_path):
    """A finished run's own folder; a run without adapters has none."""
    every_weight = {"kind": "train", "model": {"path": "m"}, "task": {"type": "countdown"}}
    finished.config.write_text(json.dumps(every_weight))
    with pytest.raises(
        BadInput, match=r"trained every weight and has no adapters \(learner.lora\); leave --adapter out"
    ):
        results.export(finished.path, tmp_path / "out", adapter=True)
    finished.config.write_text(json.dumps(every_weight | {"learner": {"lora": {"rank": 2}}}))
    with pytest.raises(
        BadInput, match=r"^RUN: \S+/adapter is missing.*; leave --adapter out, or move \S+/hf away"
    ):
        results.export(finished.path, tmp_path / "out", adapter=True)
    finished.adapter.mkdir()
    config, weights = (finished.adapter / f"adapter_{name}" for name in ("config.json", "model.safetensors"))
    config.write_text("{}")
    write_weights(weights, {"a.lora_A.weight": (2, 8)})
    results.export(finished.path, tmp_path / "out", adapter=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {config.name, weights.name}
    results.export(finished.path, tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_what_is_no_disk_has_no_space_to_miss(folder):
    # That it cannot be written to is another error.
    assert [*disk_space.disk_problems(config("launch.runs_dir=/proc/runs"), [])] == []
