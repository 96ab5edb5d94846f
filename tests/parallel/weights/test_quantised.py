"""Folders in FP8 and MXFP4: every code against a slow loop and transformers, and the folder that ``tandem dequantise`` writes against
both engines' loaders."""

import errno
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

from launch.checks.arguments import BadInput
from launch.cli import app
from launch.commands import dequantise
from parallel.planning.architecture import architecture_of
from parallel.planning.memory import size_text
from parallel.weights import hf_files
from parallel.weights.hf_headers import INDEX, SINGLE, weight_problems
from parallel.weights.quantised import from_fp8, from_mxfp4
from tests.parallel.megatron.test_model import assert_same_weights, weights_on_disk
from tests.support.megatron_workers import make_engine
from tests.support.model_folders import make_model_folder
from tests.support.moe_workers import assert_is_transformers, make_moe_model

LENGTHS = [5, 60, 2, 33, 5, 71]
TINY = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MATRIX = re.compile(r"(_proj|_mqa)\.weight$")


# --- numbers


def e4m3(code: int) -> float:
    """By the definition: a sign, four bits of exponent with bias 7, three of fraction; without infinities."""
    sign, exponent, fraction = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    return sign * (fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


def e2m1(code: int) -> float:
    """By the definition: a sign, two bits of exponent with bias 1, one of fraction."""
    sign, exponent, fraction = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else (2 + fraction) * 2.0 ** (exponent - 2))


def slow_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Number by number: the product in float32, then bfloat16."""
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for i, row in enumerate(codes.tolist()):
        for j, code in enumerate(row):
            scale = np.float32(scales[i // block[0], j // block[1]].item())
            out[i, j] = torch.tensor(np.float32(e4m3(code)) * scale).to(torch.bfloat16)
    return out


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 2**16),
)
def test_fp8_is_a_slow_loop_with_blocks_of_any_size(shape, block, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(
        0, 2, shape, generator=generator
    )
    grid = [-(-size // of_block) for size, of_block in zip(shape, block, strict=True)]
    scales = torch.randn(grid, generator=generator)
    q = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    found = from_fp8(q, scales, block)
    assert same_bits(found, slow_fp8(codes, scales, block))
    if not any(size % of_block for size, of_block in zip(shape, block, strict=True)):
        theirs = Fp8Dequantize(None)._dequantize_one(q, scales, torch.bfloat16)
        assert same_bits(found, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_of_fp8(dtype):
    codes = torch.tensor([code for code in range(256) if code & 127 != 127]).view(2, 127)
    q = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[3e-5, 1.7, 0.0]], dtype=dtype)
    assert same_bits(from_fp8(q, scales, (128, 50)), slow_fp8(codes, scales, (128, 50)))
    assert same_bits(from_fp8(q, scales[0, 1], None), slow_fp8(codes, scales[:, 1:2], (2, 127)))


def test_every_code_of_mxfp4_under_every_exponent():
    experts, outputs, groups = 3, 17, 5
    blocks = torch.arange(experts * outputs * groups * 16).view(experts, outputs, groups, 16) % 256
    exponents = torch.arange(experts * outputs * groups).view(experts, outputs, groups)
    found = from_mxfp4(blocks.to(torch.uint8), exponents.to(torch.uint8))
    assert found.is_contiguous()
    slow = torch.empty(experts, 32 * groups, outputs, dtype=torch.float64)
    for e, o, g, b in np.ndindex(*blocks.shape):
        byte, power = int(blocks[e, o, g, b]), 2.0 ** (int(exponents[e, o, g]) - 127)
        slow[e, 32 * g + 2 * b, o] = e2m1(byte & 15) * power
        slow[e, 32 * g + 2 * b + 1, o] = e2m1(byte >> 4) * power
    assert exponents.min() == 0 and exponents.max() == 254
    assert same_bits(found, slow.to(torch.bfloat16))
    usual = exponents.clamp(64, 190).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks.to(torch.uint8), usual)
    assert same_bits(from_mxfp4(blocks.to(torch.uint8), usual), theirs)


# --- folders


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(q, scales) of the greatest number per block over 448."""
    scales = torch.stack(
        [
            torch.stack([part.abs().max() / 448 for part in rows.split(block[1], 1)])
            for rows in weight.split(block[0])
        ]
    )
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[: len(weight), : weight.shape[1]].clamp(min=1e-9)
    return (weight / spread).to(torch.float8_e4m3fn), scales


def rewrite(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def to_fp8(folder: Path, block: tuple[int, int] | None) -> dict[str, Tensor]:
    """Quantise a folder in place, each weight in another file than its scales. Returns the weights by a slow loop."""
    stored, scales, expected = {}, {}, {}
    for name, weight in load_file(folder / SINGLE).items():
        if not MATRIX.search(name):
            stored[name] = weight if name.endswith("_bias") else weight.bfloat16()
            expected[name] = stored[name]
            continue
        by = block or tuple(weight.shape)
        stored[name], of_blocks = quantise(weight, by)
        expected[name] = slow_fp8(stored[name].view(torch.uint8), of_blocks, by)
        scales[f"{name}_scale_inv" if block else f"{name}_scale"] = of_blocks if block else of_blocks[0, 0]
        if not block:
            scales[name.replace("weight", "input_scale")] = torch.tensor(1.0)
    files = {"model-1.safetensors": scales, "model-2.safetensors": stored}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / SINGLE).unlink()
    mapping = {name: file for file, tensors in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))
    rewrite(
        folder,
        quantization_config={"quant_method": "fp8", "weight_block_size": list(block) if block else None},
    )
    return expected


def to_mxfp4(folder: Path) -> None:
    weights = load_file(folder / SINGLE)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save(folder, {name: t if t.dtype == torch.uint8 else t.bfloat16() for name, t in weights.items()})
    rewrite(folder, quantization_config={"quant_method": "mxfp4"})


def tandem_dequantise(folder: Path, out: Path):
    return CliRunner().invoke(app, ["dequantise", str(folder), str(out)])


def assert_both_engines_load(out: Path, scratch: Path) -> None:
    """The learner's logits and gradients are those of transformers, and it exports the same bits."""
    assert weight_problems(out, architecture_of(out)) == []
    assert_is_transformers(out, LENGTHS, scratch / "gradients")
    make_engine(out, dtype="bfloat16").save_hf(scratch / "again")
    assert_same_weights(out, scratch / "again")


@pytest.mark.parametrize(("kind", "block"), [("deepseek_v3", (16, 20)), ("qwen3_moe", None)])
def test_a_folder_in_fp8_is_written_in_bfloat16(tmp_path, monkeypatch, kind, block):
    folder, out = make_moe_model(tmp_path / "m", kind), tmp_path / "new" / "out"
    if kind == "deepseek_v3":  # a layer that predicts further tokens, which is left out
        further = {f"model.layers.2.{part}.weight": torch.ones(8, 8) for part in ("eh_proj", "enorm")}
        save(folder, load_file(folder / SINGLE) | further)
        rewrite(folder, num_nextn_predict_layers=1)
    expected = to_fp8(folder, block)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(dequantise, "REPORT_EVERY_S", 0)
    monkeypatch.setattr(hf_files, "MAX_SHARD_BYTES", 20_000)
    done = tandem_dequantise(folder, out)
    assert done.exit_code == 0, done.output
    *progress, last = done.output.splitlines()
    written = {name: weight for name, weight in expected.items() if ".layers.2." not in name}
    quantised = sum(1 for name in written if MATRIX.search(name))
    size = sum(weight.nbytes for weight in written.values())
    assert re.fullmatch(
        rf"wrote {out}: {quantised} of {len(written)} tensors were quantised; {size_text(size)} in \d+s", last
    )
    assert len(progress) == len(written) - 1
    line_form = rf"[\d.]+ K?i?B of {size_text(size)}, [\d.]+ [KM]?i?B/s, \d+s left"
    assert all(re.fullmatch(line_form, line) for line in progress)
    found = weights_on_disk(out)
    assert found.keys() == written.keys()
    assert all(found[n].dtype == w.dtype and torch.equal(found[n], w) for n, w in written.items())
    assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == size
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    changed = {"quantization_config", "dtype", "num_nextn_predict_layers"}
    assert after.keys() == before.keys() - {"quantization_config"} and after["dtype"] == "bfloat16"
    assert all(after[key] == before[key] for key in after.keys() - changed)
    assert (out / "tokenizer.json").read_text() == "{}" and [*out.parent.iterdir()] == [out]
    assert_both_engines_load(out, tmp_path)


def test_a_folder_in_mxfp4_is_written_as_transformers_writes_it(tmp_path):
    folder = make_moe_model(tmp_path / "m", "gpt_oss", intermediate_size=32)
    to_mxfp4(folder)
    done = tandem_dequantise(folder, tmp_path / "out")
    assert done.exit_code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    assert_same_weights(tmp_path / "out", tmp_path / "theirs")
    assert_both_engines_load(tmp_path / "out", tmp_path)


# --- bad input


def fp8_folder(folder: Path) -> Path:
    to_fp8(make_model_folder(folder, TINY), (16, 16))
    return folder


def mxfp4_folder(folder: Path) -> Path:
    to_mxfp4(make_moe_model(folder, "gpt_oss", intermediate_size=32))
    return folder


def with_tensors(file: str, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Damage to a file, with its index."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / file)
        change(weights)
        save_file(weights, folder / file)
        if (folder / INDEX).exists():
            mapping = json.loads((folder / INDEX).read_text())["weight_map"]
            kept = {name: where for name, where in mapping.items() if where != file or name in weights}
            (folder / INDEX).write_text(json.dumps({"weight_map": kept}))

    return damage


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, **changes)


def cut(folder: Path) -> None:
    file = folder / "model-2.safetensors"
    os.truncate(file, file.stat().st_size - 10)


Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.experts.down_proj"
SCALES, WEIGHTS = "model-1.safetensors", "model-2.safetensors"


@pytest.mark.parametrize(
    ("make", "damage", "message"),
    [
        (fp8_folder, config(quantization_config=None), "has no quantization_config, so .*; use the folder as it is"),
        (fp8_folder, config(quantization_config={"quant_method": "gptq"}), "quant_method='gptq', .* reads fp8 and mxfp4"),
        (fp8_folder, config(quantization_config=["fp8"]), "quant_method=None, which Tandem does not read"),
        (fp8_folder, config(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}), r"weight_block_size=\[128\]"),
        (
            fp8_folder,
            config(quantization_config={"quant_method": "fp8"}),
            r"scale_inv is BF16 \(\d, \d\); with weight_block_size=None and .* it must be floats, one number",
        ),
        (fp8_folder, config(quantization_config={"quant_method": "mxfp4"}), "no tensor of .* is in mxfp4.*remove quantization_config"),
        (fp8_folder, config(model_type="gemma2"), "gemma2.*caps scores and logits"),
        (fp8_folder, config(intermediate_size=32), "another shape than its config.json asks for"),
        (fp8_folder, lambda folder: (folder / "config.json").unlink(), "has no config.json; name a Hugging Face folder"),
        (fp8_folder, cut, "model-2.safetensors is no readable .* cut short or overwritten; download or copy it again"),
        (fp8_folder, with_tensors(SCALES, lambda t: t.pop(f"{UP}_scale_inv")), rf"{UP} is in FP8 and has no scales \({UP}_scale_inv\)"),
        (
            fp8_folder,
            with_tensors(SCALES, lambda t: t.update({f"{Q}_scale_inv": torch.ones(1, 2)})),
            rf"{Q}_scale_inv is F32 \(1, 2\); with weight_block_size=\[16, 16\] and {Q} \(32, 16\) it must be floats, \(2, 1\)",
        ),
        (
            fp8_folder,
            with_tensors(SCALES, lambda t: t.update({f"{Q}_scale_inv": torch.ones(2, 1, dtype=torch.uint8)})),
            rf"{Q}_scale_inv is U8 \(2, 1\)",
        ),
        (
            fp8_folder,
            with_tensors(WEIGHTS, lambda t: t[Q].view(torch.uint8)[3, 5:6].fill_(0xFF)),
            f"has NaN in {Q}; download the folder again",
        ),
        (fp8_folder, with_tensors(SCALES, lambda t: t[f"{Q}_scale_inv"][1].fill_(math.nan)), f"has NaN in {Q}; download"),
        (fp8_folder, with_tensors(WEIGHTS, lambda t: t.pop(Q)), "lacks 1 tensors that its config.json asks for"),
        (mxfp4_folder, with_tensors(SINGLE, lambda t: t[f"{DOWN}_scales"][1, 2].fill_(255)), f"has NaN in {DOWN}; download"),
        (mxfp4_folder, with_tensors(SINGLE, lambda t: t.pop(f"{DOWN}_scales")), rf"{DOWN}_blocks has no scales \({DOWN}_scales\)"),
        (
            mxfp4_folder,
            with_tensors(SINGLE, lambda t: t.update({f"{DOWN}_scales": torch.ones(4, 32, 2, dtype=torch.uint8)})),
            rf"{DOWN}_blocks is U8 \(4, 32, 1, 16\) and {DOWN}_scales U8 \(4, 32, 2\); they must be U8 of",
        ),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_dequantised_is_refused(tmp_path, make, damage, message):
    folder = make(tmp_path / "m")
    damage(folder)
    done = tandem_dequantise(folder, tmp_path / "out")
    assert isinstance(done.exception, BadInput), done.output
    assert re.match(f"FOLDER: .*{message}", str(done.exception)), done.exception
    assert [*tmp_path.iterdir()] == [folder]


def test_a_disk_without_room_is_refused_before_and_leaves_nothing(tmp_path, monkeypatch):
    folder, out = fp8_folder(tmp_path / "m"), tmp_path / "out"
    size = sum(header.numel() * 2 for name, header in weights_on_disk(folder).items() if "scale" not in name)
    monkeypatch.setattr(dequantise, "free_bytes", lambda _: size - 1)
    refused = tandem_dequantise(folder, out)
    assert re.match(r"OUT: the disk of .* KiB free, and the model in bfloat16 takes", str(refused.exception))
    monkeypatch.setattr(dequantise, "free_bytes", lambda _: size)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf_files, "save_file", full)
        failed = tandem_dequantise(folder, out)
    assert re.match("OUT: .* cannot be written: .*No space left.*removed", str(failed.exception))
    assert isinstance(refused.exception, BadInput) and isinstance(failed.exception, BadInput)
    assert [*tmp_path.iterdir()] == [folder]
    assert tandem_dequantise(folder, out).exit_code == 0
