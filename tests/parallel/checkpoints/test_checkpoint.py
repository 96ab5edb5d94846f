"""Checkpoints: a resumed run equals one that never stopped, bitwise; a failed or partial checkpoint is never picked
and harms no other."""

import errno
import json
import os
import random
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from configs.schema.layout import LayoutConfig
from parallel.checkpoints import checkpoint, writers
from parallel.checkpoints.checkpoint import CheckpointError, DiskFull
from parallel.checkpoints.files import latest_valid, prune, step_folder
from parallel.megatron import optimizer
from parallel.megatron.optimizer import optimizer_parts
from tests.support.megatron_workers import (
    make_batch,
    make_engine,
    make_hf_model,
    run_ranks,
    weighted_loss,
    weights_of,
    work_checkpoint,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3", tied=True)


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def choose_as_on_gpus(monkeypatch):
    """The fused AdamW, which torch has on CPU too."""
    monkeypatch.setattr(optimizer, "platform", SimpleNamespace(has_cuda=lambda: True))


@pytest.mark.parametrize(
    "dtype, distributed", [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_going_on_equals_never_having_stopped(folder, tmp_path, dtype, distributed, fused, monkeypatch):
    if fused:
        choose_as_on_gpus(monkeypatch)
    settings = dict(dtype=dtype, distributed=distributed, schedule="cosine", weight_decay=0.1)
    batch = make_batch([9, 5, 12])
    first = make_engine(folder, **settings)
    for _ in range(2):
        first.update([batch], weighted_loss, temperature=1.0)
    first.save(tmp_path / "step_000002", {"data": [1, 2], "name": "x"})
    second = make_engine(folder, **settings)
    # Whatever it did before is gone.
    second.update([make_batch([3, 4], seed=9)], weighted_loss, temperature=1.0)
    torch.manual_seed(123)
    assert second.load(tmp_path / "step_000002") == {"data": [1, 2], "name": "x"}
    for _ in range(3):  # three: a step counter that is shared or wrong shows after the first
        results = [engine.update([batch], weighted_loss, temperature=1.0) for engine in (first, second)]
        assert results[0].lr == results[1].lr and results[0].grad_norm == results[1].grad_norm
    assert_equal(weights_of(first), weights_of(second))
    steps = [
        state["step"]
        for part in optimizer_parts(second._optimizer)
        for state in part.optimizer.state.values()
    ]
    assert {float(step) for step in steps} == {5.0} and len({id(step) for step in steps}) == len(steps)
    assert all(group["fused"] == fused for group in second._optimizer.param_groups)


def test_an_optimizer_of_gpus_steps_as_one_of_cpus_and_goes_on_there(folder, tmp_path, monkeypatch):
    batch, there = make_batch([9, 5, 12]), make_engine(folder)
    with monkeypatch.context() as patch:
        choose_as_on_gpus(patch)
        gpu = make_engine(folder)
    for engine in (gpu, there):
        engine.update([batch], weighted_loss, temperature=1.0)
    gpu.save(tmp_path / "step_000001", {})
    here = make_engine(folder)
    here.load(tmp_path / "step_000001")
    assert not any(group["fused"] for group in here._optimizer.param_groups)
    for engine in (here, there):
        engine.update([batch], weighted_loss, temperature=1.0)
    wanted = weights_of(there)
    for name, weight in weights_of(here).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_before_the_first_step(folder, tmp_path, distributed):
    batch = make_batch([9, 5, 12])
    first, second = (make_engine(folder, distributed=distributed) for _ in range(2))
    first.save(tmp_path / "step_000000", {})
    second.load(tmp_path / "step_000000")
    for engine in (first, second):
        engine.update([batch], weighted_loss, temperature=1.0)
    assert_equal(weights_of(first), weights_of(second))


def test_random_state_is_restored(folder, tmp_path):
    """Of torch, numpy, Python and Megatron's tracker, which forks torch's generator by name."""

    def drawn() -> tuple[list[float], float, float, dict[str, Any]]:
        tracked = {name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()}
        return torch.rand(3).tolist(), float(numpy.random.rand()), random.random(), tracked

    engine = make_engine(folder)
    for seed, tracked in ((5, torch.get_rng_state()), (6, torch.manual_seed(7).get_state())):
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        get_cuda_rng_tracker().set_states({"a generator": tracked})
        if seed == 5:
            engine.save(tmp_path / "step_000001", {})
            wanted = drawn()
    engine.load(tmp_path / "step_000001")
    assert drawn() == wanted


@pytest.mark.parametrize("distributed", [True, False])
def test_the_running_config_decides_the_optimizers_settings(folder, tmp_path, distributed):
    make_engine(folder, distributed=distributed).save(tmp_path / "step_000001", {})
    settings = {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3}
    engine = make_engine(folder, distributed=distributed, **settings)
    engine.load(tmp_path / "step_000001")
    engine.update([make_batch([4, 6])], weighted_loss, temperature=1.0)
    for part in optimizer_parts(engine._optimizer):
        for group in part.optimizer.param_groups:
            assert (group["betas"], group["eps"]) == (settings["betas"], settings["eps"])
            assert group["weight_decay"] in (0.0, settings["weight_decay"])


@pytest.mark.parametrize(
    ("settings", "lr"), [({"lr": 1e-3}, 1e-3), ({"schedule": "cosine", "min_lr": 3e-4, "steps": 1}, 3e-4)]
)
def test_the_running_config_decides_the_learning_rate(folder, tmp_path, settings, lr):
    """Also the least one, which a step after a decay has."""
    batch = make_batch([4, 6])
    first = make_engine(folder, **settings | {"lr": 1e-2, "min_lr": 0.0})
    first.update([batch], weighted_loss, temperature=1.0)
    first.save(tmp_path / "step_000001", {})
    second = make_engine(folder, **settings)
    second.load(tmp_path / "step_000001")
    assert second.update([batch], weighted_loss, temperature=1.0).lr == pytest.approx(lr)


def test_partial_checkpoints_are_never_picked(folder, tmp_path):
    assert latest_valid(tmp_path / "nowhere") is None
    engine = make_engine(folder)
    for step in (1, 2, 3, 4):
        engine.save(step_folder(tmp_path, step), {"step": step})
    (tmp_path / "step_000004" / "complete.json").unlink()
    largest = max((tmp_path / "step_000003").glob("*.distcp"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    (tmp_path / ".step_000009.partial").mkdir()
    (tmp_path / "step_000008").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert latest_valid(tmp_path) == tmp_path / "step_000002"
    with pytest.raises(
        CheckpointError,
        match=r"step_000003 is damaged: __0_\d.distcp has \d+ bytes, of which \d+ were written",
    ):
        engine.load(tmp_path / "step_000003")


def test_retention_keeps_the_newest(folder, tmp_path):
    engine = make_engine(folder)
    for step in (9, 10, 11):
        engine.save(step_folder(tmp_path, step), {})
    prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000011"]


# Bytes per file: fails at the first small file, at common.pt, at the tensors.
@pytest.mark.parametrize("limit", [20, 2_000, 60_000])
def test_a_write_that_fails_leaves_the_previous_checkpoint(folder, tmp_path, limit):
    """The operating system refuses files above a size."""
    engine = make_engine(folder)
    engine.save(tmp_path / "step_000001", {"position": 1})
    engine.update([make_batch([4, 6])], weighted_loss, temperature=1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"could not write checkpoint .*step_000002.*earlier checkpoints are unchanged",
        ):
            engine.save(tmp_path / "step_000002", {"position": "x" * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001"]
    assert make_engine(folder).load(latest_valid(tmp_path)) == {"position": 1}
    engine.save(tmp_path / "step_000002", {"position": 2})  # and it works again once there is room
    assert latest_valid(tmp_path).name == "step_000002"


def test_a_save_starts_no_process(folder, tmp_path, monkeypatch):
    """A fork of a process with threads may hang before its first line, and a signal to a job reaches every process."""

    def refuse(*arguments):
        raise AssertionError("a checkpoint was to start a process")

    for name in ("fork", "posix_spawn"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("_posixsubprocess.fork_exec", refuse)
    before = psutil.Process().children(recursive=True)
    engine = make_engine(folder)
    engine.save(tmp_path / "step_000001", {})
    assert psutil.Process().children(recursive=True) == before
    files = sorted(path.name for path in (tmp_path / "step_000001").glob("*.distcp"))
    assert len(files) > 1, "of several writers"
    assert make_engine(folder).load(latest_valid(tmp_path)) == {}


def test_too_little_space_is_seen_before_writing(folder, tmp_path, monkeypatch):
    engine = make_engine(folder)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFull, match="GB free"):
        engine.save(tmp_path / "step_000001", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "tells"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, False), (errno.EROFS, False)],
)
def test_an_error_of_no_space_is_found_in_its_text(number, tells):
    assert (
        checkpoint.tells_of_no_space(f"rank 3: {OSError(number, os.strerror(number), 'common.pt')}") == tells
    )


@pytest.mark.parametrize("name", ["common.pt", ".metadata.tmp", "metadata.json", "complete.json"])
def test_each_file_that_finds_no_space_is_a_full_disk(folder, tmp_path, monkeypatch, name):
    """Of a disk that fills after it was looked at. torch's stream into a file tells of no reason."""
    engine = make_engine(folder)
    engine.save(tmp_path / "step_000001", {})
    with monkeypatch.context() as patch, pytest.raises(DiskFull, match=r"step_000002.*No space left"):
        patch.setattr(
            checkpoint, "_require_space", lambda partial, state: (partial / name).symlink_to("/dev/full")
        )
        engine.save(tmp_path / "step_000002", {})
    engine.save(tmp_path / "step_000003", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003"]
    assert make_engine(folder).load(tmp_path / "step_000001") == {}


def test_extra_must_be_json(folder, tmp_path):
    with pytest.raises(ValueError, match="must be JSON"):
        make_engine(folder).save(tmp_path / "step_000001", {"x": object()})


def test_another_model_is_refused(folder, tmp_path):
    make_engine(folder).save(tmp_path / "step_000001", {})
    other = make_hf_model(tmp_path / "other", "qwen3", intermediate_size=64)
    with pytest.raises(CheckpointError, match="cannot be loaded into this run"):
        make_engine(other).load(tmp_path / "step_000001")


def test_the_manifest_lists_every_file(folder, tmp_path):
    make_engine(folder).save(tmp_path / "step_000001", {})
    listed = json.loads((tmp_path / "step_000001" / "complete.json").read_text())["files"]
    there = {p.name for p in (tmp_path / "step_000001").iterdir()} - {"complete.json"}
    assert set(listed) == there and "extra.json" in there


@pytest.mark.engines
@pytest.mark.parametrize("distributed", [True, False])
def test_two_ranks_resume_bitwise_and_under_another_layout(tmp_path, distributed):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    settings = dict(distributed=distributed)
    target = tmp_path / "step_000002"
    dp2 = dict(dp=2)
    saved = run_ranks(work_checkpoint, 2, tmp_path / "a", folder, dp2, settings, target, False)
    again = run_ranks(work_checkpoint, 2, tmp_path / "b", folder, dp2, settings, target, True)
    for first, second in zip(saved, again, strict=True):
        assert_equal(first["at"], second["at"])
        assert_equal(first["after"], second["after"])
        assert first["said"] == second["said"] == [], "a healthy checkpoint gets no warning of Megatron"
    tp2 = run_ranks(work_checkpoint, 2, tmp_path / "c", folder, dict(tp=2), settings, target, True)
    for rank in tp2:
        assert_equal(saved[0]["at"], rank["at"])
        for name, tensor in saved[0]["after"].items():
            torch.testing.assert_close(rank["after"][name], tensor, rtol=1e-5, atol=1e-6)


def _fail(*arguments):
    raise OSError("no such disk")


def _find_no_space(*arguments):
    """As torch's archive does, which is closed behind a write that has failed."""
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904


def work_full_disk_of_rank_0(folder: Path, root: Path) -> list[str]:
    """What a save raises here where each of the files that rank 0 alone writes finds no space, and its copies of tensors no
    memory."""
    engine = make_engine(folder, layout=LayoutConfig(dp=2))
    said = []
    alone = (*writers.WRITTEN_BY_RANK_0, (writers, "_save_common"))
    for owner, name in (*alone, (FileSystemWriterAsync, "preload_tensors")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as raised:
            if dist.get_rank() == 0:
                patch.setattr(owner, name, _fail)
            engine.save(root / "step_000002", {})
        said.append(str(raised.value))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskFull) as raised:
        if dist.get_rank() == 0:
            patch.setattr(filesystem_async, "_write_item", _find_no_space)
        engine.save(root / "step_000002", {})
    said.append(str(raised.value))
    engine.save(root / "step_000003", {})
    return said


@pytest.mark.engines
def test_a_file_that_rank_0_alone_cannot_write_leaves_no_rank_waiting(folder, tmp_path):
    """The disk fills after space was looked for. The other ranks are in Megatron's collectives then."""
    ranks = run_ranks(work_full_disk_of_rank_0, 2, tmp_path / "ranks", folder, tmp_path / "checkpoints")
    for said in ranks:
        assert len(said) == 5 and "No space left on device" in said.pop()
        for text in said:
            assert "could not write" in text and "rank 0: " in text and "no such disk" in text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def work_faults_on_rank_1(folder: Path, root: Path) -> list[str]:
    """What each of three actions raises here, of which each fails on rank 1 alone."""
    engine = make_engine(folder, layout=LayoutConfig(dp=2))
    engine.save(root / "step_000001", {})
    faults = [
        ("_random_state", _fail, lambda: engine.save(root / "step_000002", {})),
        ("damage", lambda *arguments: ["x.distcp is damaged"], lambda: engine.load(root / "step_000001")),
        ("_set_random_state", _fail, lambda: engine.load(root / "step_000001")),
    ]
    said = []
    for name, fault, action in faults:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as raised:
            if dist.get_rank() == 1:
                patch.setattr(checkpoint, name, fault)
            action()
        said.append(str(raised.value))
    return said


@pytest.mark.engines
def test_a_failure_of_one_rank_is_raised_on_all(folder, tmp_path):
    ranks = run_ranks(work_faults_on_rank_1, 2, tmp_path / "ranks", folder, tmp_path / "checkpoints")
    for said in ranks:
        assert "could not write" in said[0] and "rank 1: OSError: no such disk" in said[0]
        assert said[1].endswith("step_000001 is damaged: x.distcp is damaged")
        assert "cannot be loaded into this run: rank 1: OSError: no such disk" in said[2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
