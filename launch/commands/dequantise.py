"""``tandem dequantise``: writes a folder with quantised weights in bfloat16, for learner and servers to load."""

import shutil
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from launch.checks.arguments import BadInput, as_bad_input, check_new_folder
from launch.checks.disk_space import free_bytes
from parallel.planning.architecture import dequantised_architecture, read_hf_config
from parallel.planning.memory import size_text
from parallel.planning.variants import check_dequantised
from rollout.guarded_process import own_name, remove_abandoned_in
from trainer.tracking.console import duration

if TYPE_CHECKING:
    from parallel.weights.quantised import DequantisedWeights

REPORT_EVERY_S = 10.0


def dequantise(folder: Path, out: Path) -> None:
    """Write ``out``, which appears complete or not at all. Raises BadInput."""
    with as_bad_input():
        check_new_folder("OUT", out)
    with as_bad_input("FOLDER: "):
        weights = _open(folder)
    size = sum(_bytes_of(weights, name) for name in weights.headers)
    free = free_bytes(out)
    if free is not None and free < size:
        raise BadInput(
            f"OUT: the disk of {out} has {size_text(free)} free, and the model in bfloat16 takes {size_text(size)}; free space, or name "
            "a folder on a larger disk"
        )
    remove_abandoned_in(out.parent)  # of commands that were killed, each up to as large as the model
    partial = out.with_name(own_name("tandem-dequantise-"))
    began = time.monotonic()
    try:
        _write(weights, out, partial, size)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    took = duration(time.monotonic() - began)
    print(
        f"wrote {out}: {weights.num_quantised} of {len(weights.headers)} tensors were quantised; {size_text(size)} in {took}"
    )


def _open(folder: Path) -> "DequantisedWeights":
    """The weights, whose names and shapes are those of a model that Tandem loads. Raises ValueError otherwise."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; name a Hugging Face folder")
    hf_config = read_hf_config(folder)
    if hf_config.get("quantization_config") is None:
        raise ValueError(
            f"config.json of {folder} has no quantization_config, so its weights are not quantised; use the folder as it is"
        )
    quantisation = check_dequantised(hf_config)
    architecture = dequantised_architecture(hf_config)

    from parallel.weights.hf_headers import header_problems
    from parallel.weights.quantised import DequantisedWeights

    weights = DequantisedWeights(folder, quantisation, architecture)
    if problems := header_problems(weights.headers, architecture, folder):
        raise ValueError("\n".join(problems))
    return weights


def _bytes_of(weights: "DequantisedWeights", name: str) -> int:
    header = weights.headers[name]
    return prod(header.shape) * {"F64": 8, "F32": 4}.get(header.dtype, 2)


def _write(weights: "DequantisedWeights", out: Path, partial: Path, size: int) -> None:
    import torch
    from safetensors import SafetensorError

    from parallel.weights.hf_files import MAX_SHARD_BYTES, ShardWriter, finish_folder

    began = reported = time.monotonic()
    done = 0
    try:
        partial.mkdir(parents=True)
        writer = ShardWriter(partial, number=0, max_shard_bytes=MAX_SHARD_BYTES)
        for name in weights.headers:
            with as_bad_input("FOLDER: "):
                tensor = weights.read(name)
            writer.add(name, tensor)
            done += tensor.nbytes
            now = time.monotonic()
            if now - reported >= REPORT_EVERY_S and done < size:
                rate, reported = done / (now - began), now
                print(
                    f"{size_text(done)} of {size_text(size)}, {size_text(round(rate))}/s, {duration((size - done) / rate)} left",
                    flush=True,
                )
        writer.flush()
        finish_folder(partial, out, writer.shards, source=weights.folder, dtype=torch.bfloat16)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"OUT: {out} cannot be written: {error}; the partial folder was removed. Free space there, or name a folder on another disk"
        ) from error
