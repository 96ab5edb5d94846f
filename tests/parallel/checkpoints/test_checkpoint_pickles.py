"""A checkpoint that somebody made to run code: whichever file holds the code, it does not run, and one error says
so. The hashes are right."""

import io
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from configs.loader import resolved_yaml
from configs.schema.learner import CheckpointConfig
from configs.schema.objective import AggregationConfig
from launch.commands import results
from launch.processes.run_folder import RunFolder, write_json
from launch.roles import table
from launch.studies import replay as replays
from parallel.checkpoints import pickles
from parallel.checkpoints.checkpoint import CheckpointError
from parallel.checkpoints.files import write_manifest
from tests.parallel.checkpoints.test_checkpoint_damage import Data, flip
from tests.support.megatron_workers import (
    learner_config,
    make_batch,
    make_engine,
    make_hf_model,
    weighted_loss,
    weights_of,
)
from tests.trainer.studies.test_replay import recorded
from trainer.batch.files import batch_file
from trainer.checkpointing import Checkpointer
from trainer.recording import write_batch

REFUSED = (
    r"holds (the object posix\.mkdir|a pickle that cannot be read), which is no part of a Tandem checkpoint"
)


class Code:
    """Its pickle makes the folder ``marker`` when it is loaded."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


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
    engine.save(folder, {"step": 1, "version": 1, "sampler": {}})
    return folder


def in_metadata(folder: Path, code: Code) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(code))


def hidden_in_metadata(folder: Path, code: Code) -> None:
    """In a place that nobody looks at."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"x": code}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, code: Code) -> None:
    torch.save({**torch.load(folder / "common.pt", weights_only=False), "x": code}, folder / "common.pt")


def in_common_as_plain_pickle(folder: Path, code: Code) -> None:
    (folder / "common.pt").write_bytes(pickle.dumps(code))


def in_an_object_of_a_tensor_file(folder: Path, code: Code) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(
        name
        for name, kind in metadata.state_dict_metadata.items()
        if isinstance(kind, BytesStorageMetadata) and "random" in name
    )
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    file = folder / metadata.storage_data[index].relative_path
    start = file.stat().st_size
    with file.open("ab") as stream:
        torch.save([code], stream)
    metadata.storage_data[index] = _StorageInfo(file.name, start, file.stat().st_size - start)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PLACES = (
    in_metadata,
    hidden_in_metadata,
    in_common,
    in_common_as_plain_pickle,
    in_an_object_of_a_tensor_file,
)


@pytest.mark.parametrize("put", PLACES)
@pytest.mark.parametrize("careless", [False, True])
def test_nothing_runs_and_the_error_says_so(engine, saved, tmp_path, monkeypatch, put, careless):
    """Through the way that a run goes on by; where the environment asks torch to unpickle everything too."""
    shutil.copytree(saved, tmp_path / "step_000001")
    marker = tmp_path / "marker"
    put(tmp_path / "step_000001", Code(marker))
    write_manifest(tmp_path / "step_000001", world_size=1)
    if careless:
        monkeypatch.setenv(pickles.CARELESS, "1")
    before = dict(os.environ)
    with pytest.raises(CheckpointError, match=REFUSED):
        Checkpointer(tmp_path, CheckpointConfig()).restore(
            SimpleNamespace(engine=engine, critic=None), Data()
        )
    assert not marker.exists()
    assert dict(os.environ) == before


def test_the_code_is_code(tmp_path):
    pickle.loads(pickle.dumps(Code(tmp_path / "marker")))
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize(("module", "name"), [
    ("torch", "serialization.load"), ("torch", "load"), ("torch.serialization", "os.system"), ("builtins", "eval"),
])  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(module, name):
    """In both of the forms that pickles have had for a name."""
    short = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    for content in (f"c{module}\n{name}\n.".encode(), b"\x80\x04" + b"".join(short) + b"\x93."):
        with pytest.raises(pickle.UnpicklingError, match="is no part of a checkpoint"):
            pickles.MetadataUnpickler(io.BytesIO(content)).load()


@pytest.mark.engines
def test_export_and_replay_of_damaged_and_foreign_runs(model, tmp_path, capfd):
    """Export takes the checkpoint before a damaged one and says so; neither command runs what a foreign run
    holds."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = learner_config(model, data_parallel=1, sharded=True, aggregation=AggregationConfig())
    run.config.write_text(resolved_yaml(config))
    engine, weights = make_engine(model), {}
    for step in (1, 2):
        engine.update([make_batch([9, 5, 12])], weighted_loss, temperature=1.0)
        engine.save(run.checkpoints / f"step_{step:06d}", {})
        weights[step] = weights_of(engine)
        write_batch(batch_file(run.batches, step + 1), recorded())
    flip(run.checkpoints / "step_000002" / "__0_1.distcp", 5000, 0)
    results.export(run.path, tmp_path / "out")
    said = capfd.readouterr().out
    assert (
        "step_000002 is damaged: __0_1.distcp is damaged" in said and "exporting step_000001 instead" in said
    )
    exported = make_engine(tmp_path / "out")
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights_of(exported).items())

    # What their processes do, in this one.
    replays.write_request(run, 3, ["disabled"])
    with pytest.raises(CheckpointError, match=r"step_000002 is damaged: __0_1\.distcp is damaged"):
        replays.answer_request(run, config)
    shutil.rmtree(run.checkpoints / "step_000002")
    marker = tmp_path / "marker"
    hidden_in_metadata(run.checkpoints / "step_000001", Code(marker))
    write_manifest(run.checkpoints / "step_000001", world_size=1)
    replays.write_request(run, 2, ["disabled"])
    write_json(run.export_request, {"step": None})
    for role in (table.export, replays.answer_request):
        with pytest.raises(CheckpointError, match=REFUSED):
            role(run, config)
    assert not marker.exists() and not any(run.export.glob("*"))
