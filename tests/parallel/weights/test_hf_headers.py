"""Broken weights are named by their headers alone, before a process starts; what the headers allow is what
the learner loads. The umask and the folder above decide who may read written files."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.planning.architecture import architecture_of, read_architecture
from parallel.weights.hf_files import ShardWriter, finish_folder, hidden_folder
from parallel.weights.hf_headers import INDEX, SINGLE, weight_problems
from parallel.weights.hf_names import hf_shapes
from rollout.tiny_model import FAMILIES, make_tiny_countdown_model
from tests.support.model_folders import make_model_folder, write_weights

MODEL_CONFIGS = Path(__file__).parents[2] / "model_configs"
TINY = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def problems(folder: Path) -> list[str]:
    return weight_problems(folder, architecture_of(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "m", TINY)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_has_no_problems_and_no_other_shapes(tmp_path, family):
    make_tiny_countdown_model(tmp_path / "m", seed=0, family=family)
    assert problems(tmp_path / "m") == []
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "m" / SINGLE).items()}
    assert hf_shapes(architecture_of(tmp_path / "m")) == shapes


@pytest.mark.parametrize("name", sorted(path.name for path in MODEL_CONFIGS.iterdir()))
def test_headers_of_published_models_are_as_large_as_their_cards_say(name):
    """The number of parameters is in the name of the model."""
    shapes = hf_shapes(architecture_of(MODEL_CONFIGS / name))
    sizes = [part.removesuffix("B") for part in name.split("-") if part.endswith("B") and part[:1].isdigit()]
    parameters = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values()) / 1e9
    card = {"0.5": 0.49, "1.5": 1.54, "3": 3.09, "7": 7.62, "14": 14.8, "32": 32.8, "72": 72.7}.get(
        sizes[0], float(sizes[0])
    )
    assert parameters == pytest.approx(card, rel=0.04)


def split_in_two(folder: Path) -> None:
    shapes = hf_shapes(read_architecture(TINY))
    names = sorted(shapes)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in files.items():
        write_weights(folder / file, {name: shapes[name] for name in held})
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {name: file for file, held in files.items() for name in held}})
    )


def test_shards_are_as_good_as_one_file(folder):
    split_in_two(folder)
    assert problems(folder) == []


def stray(file: str, *names: str) -> Callable[[Path], object]:
    """Further tensors in a file of the folder, as a copy over an older model leaves them."""

    def damage(folder: Path) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / file).items()}
        write_weights(folder / file, shapes | dict.fromkeys(names, (32, 16)))

    return damage


def cut(file: str, size: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        with (folder / file).open("r+b") as opened:
            opened.truncate(size)

    return damage


def write(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def tensors(change: Callable[[dict], object], **options) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        shapes = hf_shapes(read_architecture(TINY))
        change(shapes)
        write_weights(folder / SINGLE, shapes, **options)

    return damage


def config(**fields) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(TINY | fields))


def sharded(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: (split_in_two(folder), damage(folder))


def header(entry: dict, size: int) -> bytes:
    text = json.dumps(entry).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


OF_NORM = {"dtype": "BF16", "shape": [16], "data_offsets": [0, 32]}
BROKEN = {
    "empty": (cut(SINGLE, 0), "model.safetensors is no readable safetensors file: it is empty; download"),
    "cut short": (cut(SINGLE, 5000), "its 5,000 bytes do not fit its header, so it was cut short"),
    "too long": (cut(SINGLE, 10**6), "its 1,000,000 bytes do not fit its header"),
    "cut in its header": (cut(SINGLE, 100), "(100 bytes); download or copy it again"),
    "not even a length": (write(SINGLE, b"abc"), "header too small (3 bytes)"),
    "no JSON": (write(SINGLE, b"\x04" + bytes(7) + b"{no}"), "invalid JSON in header"),
    "pointer of Git LFS": (write(SINGLE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "`git lfs pull` fetches them"),
    "offsets past the end": (write(SINGLE, header({"model.norm.weight": OF_NORM | {"data_offsets": [0, 3200]}}, 32)), "invalid shape"),
    "a hole between tensors": (write(SINGLE, header({"model.norm.weight": OF_NORM | {"data_offsets": [8, 40]}}, 40)), "invalid offset"),
    "unknown dtype": (write(SINGLE, header({"model.norm.weight": OF_NORM | {"dtype": "Q4"}}, 32)), "unknown variant `Q4`"),
    "missing tensor": (
        tensors(lambda shapes: shapes.pop("model.layers.1.mlp.up_proj.weight")),
        "lacks 1 tensors that its config.json asks for: model.layers.1.mlp.up_proj.weight; use the config.json that came with",
    ),
    "left over": (tensors(lambda shapes: shapes.update(extra=(3,))), "has 1 tensors that its config.json does not account for: extra"),
    "wider weights": (config(hidden_size=20), "model.embed_tokens.weight is (32, 16), not (32, 20)"),
    "more layers in the weights": (config(num_hidden_layers=1), "does not account for: model.layers.1"),
    "larger vocabulary": (config(vocab_size=40), "lm_head.weight is (32, 16), not (40, 16)"),
    "quantised": (tensors(lambda shapes: None, dtype="I16"), "are quantised: lm_head.weight (I16), model.embed_tokens.weight (I16)"),
    "missing shard": (
        sharded(lambda folder: (folder / "model-2.safetensors").unlink()), "names 1 files that are not there: model-2.safetensors",
    ),
    "broken shard": (sharded(cut("model-2.safetensors", 300)), "model-2.safetensors is no readable safetensors file"),
    "shards of two models": (
        sharded(lambda folder: shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors")),
        "model-2.safetensors holds model.layers.0.mlp.up_proj.weight, which it does not",
    ),
    "a tensor in two shards": (
        sharded(stray("model-2.safetensors", "lm_head.weight")),
        "model-2.safetensors holds lm_head.weight, which by model.safetensors.index.json is in model-1.safetensors (1 such tensors)",
    ),
    "a tensor that the index lacks": (sharded(stray("model-1.safetensors", "extra")), "which by model.safetensors.index.json is nowhere"),
    "a single file beside shards": (
        sharded(write(SINGLE, b"")), "has model.safetensors beside the files of model.safetensors.index.json, and programs differ",
    ),
    "another file without an index": (write("old.safetensors", b""), "has old.safetensors beside model.safetensors, and programs differ"),
    "index that cannot be read": (lambda folder: (folder / INDEX).symlink_to("/proc/self/mem"), "is no index of safetensors"),
    "index without a map": (sharded(write(INDEX, b"{}")), "is no index of safetensors (no key 'weight_map')"),
    "index that is no JSON": (sharded(write(INDEX, b"{")), "is no index of safetensors (Expecting"),
    "index of other folders": (sharded(write(INDEX, b'{"weight_map": {"a": "../b"}}')), "names no files of the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_named(name, folder):
    damage, says = BROKEN[name]
    damage(folder)
    found = problems(folder)
    assert any(says in line for line in found), f"{says!r} is in none of {found}"
    assert all("; " in line for line in found), "each says what to do"


def test_what_no_program_takes_for_the_model_may_lie_beside_it(folder):
    for name in ("consolidated.safetensors", ".model.safetensors.part", ".hidden.safetensors"):
        (folder / name).touch()
    assert problems(folder) == []
    split_in_two(folder)
    (folder / "old.safetensors").touch()
    assert problems(folder) == []


def test_all_broken_files_are_named_at_once(folder):
    split_in_two(folder)
    for file in ("model-1.safetensors", "model-2.safetensors"):
        cut(file, 0)(folder)
    assert [file for line in problems(folder) for file in ("model-1", "model-2") if file in line] == [
        "model-1",
        "model-2",
    ]


def test_what_the_learner_ignores_is_no_problem(folder, tmp_path):
    tensors(lambda shapes: shapes.update({"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}))(folder)
    assert problems(folder) == []
    tied = make_model_folder(tmp_path / "tied", TINY | {"tie_word_embeddings": True})
    tensors(lambda shapes: None)(tied)  # with the embedding again as lm_head
    assert problems(tied) == []


def test_a_real_file_with_float16_is_read(tmp_path):
    make_tiny_countdown_model(tmp_path / "m", seed=0)
    weights = {name: tensor.half() for name, tensor in load_file(tmp_path / "m" / SINGLE).items()}
    save_file(weights, tmp_path / "m" / SINGLE)
    assert problems(tmp_path / "m") == []


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
@pytest.mark.parametrize("above", [0o755, 0o2775], ids=oct)
def test_a_written_folder_and_its_files_have_the_modes_of_any_new_ones(folder, tmp_path, mask, above):
    parent, before = tmp_path / "of a group", os.umask(mask)
    try:
        parent.mkdir()
        parent.chmod(above)
        (parent / "new").mkdir()
        (parent / "new file").touch()
        hidden = hidden_folder(parent / "hf")
        assert stat.S_IMODE(hidden.stat().st_mode) & 0o077 == 0
        writer = ShardWriter(hidden, number=0, max_shard_bytes=1 << 20)
        writer.add("a", torch.zeros(4))
        writer.flush()
        finish_folder(hidden, parent / "hf", writer.shards, source=folder, dtype=torch.float32)
    finally:
        os.umask(before)
    assert (parent / "hf").stat().st_mode == (parent / "new").stat().st_mode
    assert not [path for path in (parent / "hf").iterdir() if path.is_dir()]
    modes = {path.name: path.stat().st_mode for path in (parent / "hf").iterdir()}
    assert SINGLE in modes and modes == dict.fromkeys(modes, (parent / "new file").stat().st_mode)
