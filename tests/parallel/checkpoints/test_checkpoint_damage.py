"""A checkpoint with one flipped bit is never loaded; the run continues from the checkpoint before it and says
so."""

import errno
import io
import itertools
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema.learner import CheckpointConfig
from configs.schema.objective import KLConfig
from parallel.checkpoints import checkpoint, files
from parallel.checkpoints.checkpoint import CheckpointError, DamagedCheckpoint
from parallel.checkpoints.files import (
    BEST,
    MANIFEST,
    best_step,
    is_valid,
    latest_valid,
    missing,
    prune,
    read_manifest,
    write_manifest,
)
from parallel.checkpoints.hashes import hashed_while_written
from tests.support.megatron_workers import (
    clipped_loss,
    make_batch,
    make_engine,
    make_hf_model,
    make_value_batch,
    make_value_engine,
    value_weights_of,
    weighted_loss,
    weights_of,
)
from trainer.algorithm.kl_reward import KLInReward
from trainer.checkpointing import Checkpointer

FILES = (
    ".metadata",
    "__0_0.distcp",
    "__0_1.distcp",
    "common.pt",
    "complete.json",
    "extra.json",
    "metadata.json",
)


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3", tied=True)


@pytest.fixture(scope="module")
def engine(model):
    engine = make_engine(model)
    engine.update([make_batch([9, 5, 12])], weighted_loss, temperature=1.0)
    return engine


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "step_000001"
    engine.save(folder, {"position": 1, "text": "x" * 50})
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return folder


def test_a_flipped_bit_at_200_places_is_never_loaded(saved):
    draw = random.Random(12)
    for round_ in range(200):
        file = saved / FILES[round_ % len(FILES)]
        place = draw.randrange(file.stat().st_size), draw.randrange(8)
        flip(file, *place)
        with pytest.raises(DamagedCheckpoint, match=file.name):
            checkpoint.verified(saved)
        flip(file, *place)
    assert checkpoint.verified(saved).manifest == read_manifest(saved)


@pytest.mark.parametrize("name", [BEST, MANIFEST])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    """Who opens a pipe waits for its writer. This writer is for a reader that does open it, and so fails here."""
    os.mkfifo(tmp_path / name)
    writer = threading.Thread(target=(tmp_path / name).write_text, args=['{"step": 3}'])
    writer.start()
    try:
        if name == MANIFEST:
            assert "not a regular file" in (missing(tmp_path) or "")
        else:
            with pytest.raises(ValueError, match="not a regular file"):
                best_step(tmp_path)
    finally:
        if writer.is_alive():
            (tmp_path / name).read_text()
        writer.join()


@pytest.mark.parametrize("name", FILES)
def test_a_load_uses_nothing_of_a_damaged_checkpoint(engine, saved, name):
    before, random_state = weights_of(engine), torch.get_rng_state()
    place = (saved / name).stat().st_size // 2, 3
    flip(saved / name, *place)
    with pytest.raises(DamagedCheckpoint, match=name):
        engine.load(saved)
    flip(saved / name, *place)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights_of(engine).items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert is_valid(saved)


@pytest.mark.parametrize("name", [name for name in FILES if name != "complete.json"])
def test_a_missing_or_longer_file_is_damage(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{name} cannot be read \(No such file"):
        checkpoint.verified(saved)
    (saved / name).write_bytes(content + b"\0")
    with pytest.raises(
        DamagedCheckpoint, match=rf"{name} has {len(content) + 1} bytes, of which {len(content)} were written"
    ):
        checkpoint.verified(saved)
    (saved / name).write_bytes(content)


@pytest.mark.parametrize("name", [file for file in FILES if file.startswith(("__0_0", "complete"))])
def test_an_error_of_reading_is_damage_only_if_it_lasts(saved, monkeypatch, name):
    """The manifest says which files there are, so that without it nothing is known to be damaged."""
    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
    opened, tries = io.open, itertools.count(1)
    lasts = 2

    def open_or_fail(path: Path, *given, **named):
        if Path(path) == saved / name and next(tries) <= lasts:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *given, **named)

    monkeypatch.setattr(io, "open", open_or_fail)
    assert checkpoint.verified(saved).folder == saved
    tries, lasts = itertools.count(1), 3
    with pytest.raises(CheckpointError, match="Input/output error") as raised:
        checkpoint.verified(saved)
    assert isinstance(raised.value, DamagedCheckpoint) == (name != "complete.json")


def test_another_version_is_refused_with_the_reason(tmp_path):
    (tmp_path / "complete.json").write_text(
        '{\n "format": 1,\n "world_size": 1,\n "files": {"extra.json": 2}\n}'
    )
    with pytest.raises(
        CheckpointError, match=r"another version of Tandem wrote it \(format 1, not 2\).*export its weights"
    ) as raised:
        checkpoint.verified(tmp_path)
    assert not isinstance(raised.value, DamagedCheckpoint), "there is nothing to fall back from"
    assert "another version" in missing(tmp_path)
    write_manifest(tmp_path, world_size=1)
    text = (tmp_path / "complete.json").read_text()
    for other in (
        "[]",
        "null",
        "{}",
        "",
        text.replace('"sha256"', '"sha257"'),
        text.replace('"format": 2', '"format": 1'),
        text + " ",
        "[" * 100_000,
        "9" * 5000,
    ):
        (tmp_path / "complete.json").write_text(other)
        with pytest.raises(DamagedCheckpoint, match=r"complete\.json is damaged"):
            checkpoint.verified(tmp_path)


def test_files_are_hashed_as_they_grow(tmp_path):
    """Two files, one of them begun after the other; other files are nobody's concern here."""
    (tmp_path / "__1_0.distcp").write_text("of another rank")
    half_way, parts = threading.Event(), [bytes([i]) * 5_000_000 for i in range(4)]

    def write():
        with (
            (tmp_path / "__0_0.distcp").open("wb") as first,
            (tmp_path / "__0_1.distcp").open("wb") as second,
        ):
            for part in parts[:2]:
                first.write(part)
            half_way.wait()
            for part in parts[2:]:
                first.write(part)
                second.write(part)

    writer = threading.Thread(target=write)
    with hashed_while_written(tmp_path, "__0_*.distcp") as records:
        writer.start()
        half_way.set()
        writer.join()
    write_manifest(tmp_path, world_size=2)
    files = read_manifest(tmp_path).files
    assert records == {name: files[name] for name in ("__0_0.distcp", "__0_1.distcp")}
    assert (len(files), records["__0_0.distcp"].bytes) == (3, 20_000_000)


# ------------------------------------------------------------------------------------------------------------
# how a run goes on


class Data:
    def __init__(self):
        self.at = None

    def state(self):
        return {"position": 7}

    def load_state(self, state):
        self.at = state


def learner_of(model: Path) -> SimpleNamespace:
    """Real engines, of a policy and a critic."""
    critic = SimpleNamespace(engine=make_value_engine(model))
    return SimpleNamespace(
        engine=make_engine(model), critic=critic, version=0, is_first_rank=True, kl_in_reward=KLInReward(KLConfig())
    )  # fmt: skip


def train(learner: SimpleNamespace) -> tuple[dict, dict]:
    learner.engine.update([make_batch([9, 5, 12])], weighted_loss, temperature=1.0)
    learner.critic.engine.update([make_value_batch([9, 5, 12])], clipped_loss)
    learner.version += 1
    return weights_of(learner.engine), value_weights_of(learner.critic.engine)


def assert_same(left: dict, right: dict) -> None:
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_run_goes_on_from_the_checkpoint_before_and_says_so(model, tmp_path, capsys):
    """The policy too where the critic's is damaged; and what is damaged does not count as a checkpoint that
    is kept."""
    learner, weights = learner_of(model), {}
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(every=1, keep=2))
    for step in (1, 2):
        weights[step] = train(learner)
        checkpointer.after_step(step, learner, Data())
    damaged = tmp_path / "critic" / "step_000002" / "__0_0.distcp"
    flip(damaged, damaged.stat().st_size // 2, 5)
    assert latest_valid(tmp_path).name == "step_000002", "sizes alone do not show it"

    again, data = learner_of(model), Data()
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(every=1, keep=2))
    progress = checkpointer.restore(again, data)
    assert (progress.step, again.version, data.at) == (1, 1, {"position": 7})
    assert_same(weights_of(again.engine), weights[1][0])
    assert_same(value_weights_of(again.critic.engine), weights[1][1])
    (said,) = checkpointer.notices
    assert said in capsys.readouterr().out
    assert (
        str(damaged.parent) in said
        and "__0_0.distcp is damaged" in said
        and "continuing from step_000001 instead" in said
    )
    assert not any(
        folder.exists() for folder in (tmp_path / "step_000002", tmp_path / "critic" / "step_000002")
    )
    assert (tmp_path / "step_000002.damaged").is_dir() and (
        tmp_path / "critic" / "step_000002.damaged"
    ).is_dir()

    repeated = train(again)
    assert_same(repeated[0], weights[2][0])
    checkpointer.after_step(2, again, Data())
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_000001",
        "step_000002",
        "step_000002.damaged",
    ]
    assert Checkpointer(tmp_path, CheckpointConfig()).restore(learner_of(model), Data()).step == 2


def test_where_none_is_whole_nothing_begins_anew(engine, saved, tmp_path):
    for step in (1, 2):
        engine.save(tmp_path / f"step_{step:06d}", {})
        flip(tmp_path / f"step_{step:06d}" / "common.pt", 100, 0)
    run = SimpleNamespace(engine=engine, critic=None, is_first_rank=True)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint of this run is whole.*step_000002.*common.pt.*step_000001.*common.pt",
    ):
        Checkpointer(tmp_path, CheckpointConfig()).restore(run, Data())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]
