"""Quantised Hugging Face folders, read as bfloat16, a tensor at a time:

    fp8      W = s_b q               q float8_e4m3fn; b a block of ``weight_block_size`` numbers, or the whole matrix
    mxfp4    W = 2^(e_b - 127) q     q E2M1 (``E2M1`` and the negatives), two to a byte; b 32 numbers of a row, one after another

The product is computed in float32 and rounded to bfloat16 once. In MXFP4 it needs no rounding. Sources: DeepSeek-V3 (2024) for
scales per block; OCP Microscaling Formats (MX) 1.0 for E2M1 and for the exponents. Other tensors stay as they are.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numerics.grids import Grid, Packed
from parallel.planning.architecture import Architecture
from parallel.weights.hf_files import HuggingFaceWeights
from parallel.weights.hf_headers import FLOATING, TensorHeader, read_headers
from parallel.weights.hf_names import is_left_out

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7; the codes 8 to 15 are their negatives."""
_E4M3_NAN, _E8M0_NAN = 0x7F, 0xFF
"""Codes of NaN, the first of either sign."""
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales by which only activations, keys and values are rounded."""
_FIX = "use the config.json that came with these weights, or download the folder again"

Headers = Mapping[str, TensorHeader]
Block = tuple[int, int] | None
"""Rows and columns of a block; None: all."""
Pairs = dict[str, tuple[str, str]]
"""{tensor: (the stored tensor with its q, the stored tensor with its scales)}"""


class DequantisedWeights(HuggingFaceWeights):
    """The tensors of a quantised folder that a model of ``architecture`` is made of, in bfloat16 where they are quantised.

    quantisation: ``quantization_config`` of config.json, of a method that ``check_dequantised`` accepts.
    Raises WeightsUnreadable for a broken file. Raises ValueError for scales that are missing or do not fit, and for a
    folder that has no quantised tensor."""

    def __init__(self, folder: Path, quantisation: Mapping[str, Any], architecture: Architecture):
        stored = {
            name: header
            for name, header in read_headers(folder).items()
            if not is_left_out(name, architecture) and not name.endswith(_OF_ACTIVATIONS)
        }
        super().__init__(folder)
        sizes = quantisation.get("weight_block_size")
        self._block: Block = (sizes[0], sizes[1]) if sizes else None
        is_fp8 = quantisation["quant_method"] == "fp8"
        self._pairs: Pairs = dict(_pairs_of_fp8(stored, self._block) if is_fp8 else _pairs_of_mxfp4(stored))
        if not self._pairs:
            raise ValueError(
                f"no tensor of {folder} is in {quantisation['quant_method']}, though its config.json has quantization_config; if the "
                "weights were dequantised before, remove quantization_config from config.json"
            )
        paired = {part for pair in self._pairs.values() for part in pair}
        result = {name: header for name, header in stored.items() if name not in paired}
        for name, (q, _) in self._pairs.items():
            shape = stored[q].shape
            result[name] = TensorHeader(shape=shape if is_fp8 else _whole_shape(shape), dtype="BF16")
        files = {name: self._files[self._pairs.get(name, (name,))[0]] for name in result}
        self.headers = {name: result[name] for name in sorted(result, key=lambda name: (files[name], name))}
        """Of the tensors that ``read`` returns, in the order of the files."""

    @property
    def names(self) -> set[str]:
        return set(self.headers)

    @property
    def num_quantised(self) -> int:
        return len(self._pairs)

    def read(self, name: str) -> Tensor:
        if name not in self._pairs:
            return super().read(name)
        numbers, scales = self._pairs[name]
        q, s = super().read(numbers), super().read(scales)
        is_mxfp4 = q.dtype == torch.uint8
        is_nan = s == _E8M0_NAN if is_mxfp4 else q.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN
        if is_nan.any() or s.isnan().any():  # integers are no NaN
            raise ValueError(f"{self.folder} has NaN in {name}; download the folder again")
        return from_mxfp4(q, s) if is_mxfp4 else from_fp8(q, s, self._block)


def _pairs_of_fp8(stored: Headers, block: Block) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, header in stored.items():
        if header.dtype != "F8_E4M3":
            continue
        scales = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in stored), None)
        if scales is None:
            raise ValueError(f"{name} is in FP8 and has no scales ({name}_scale_inv); {_FIX}")
        shape, dtype = stored[scales].shape, stored[scales].dtype
        fits = len(header.shape) == 2 and dtype in FLOATING
        if block is None:
            expected = "one number"
            fits = fits and prod(shape) == 1
        else:
            expected = tuple(
                -(-size // of_block) for size, of_block in zip(header.shape, block, strict=False)
            )
            fits = fits and shape == expected
        if not fits:
            of = f"weight_block_size={list(block) if block else None} and {name} {header.shape}"
            raise ValueError(f"{scales} is {dtype} {shape}; with {of} it must be floats, {expected}; {_FIX}")
        yield name, (name, scales)


def _pairs_of_mxfp4(stored: Headers) -> Iterator[tuple[str, tuple[str, str]]]:
    for blocks, header in stored.items():
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if scales is None:
            raise ValueError(f"{blocks} has no scales ({name}_scales); {_FIX}")
        has_form = len(header.shape) == 4 and header.shape[3] == 16 and scales.shape == header.shape[:3]
        if not has_form or {header.dtype, scales.dtype} != {"U8"}:
            raise ValueError(
                f"{blocks} is {header.dtype} {header.shape} and {name}_scales {scales.dtype} {scales.shape}; they must be U8 of "
                f"[experts, outputs, groups, 16] and [experts, outputs, groups]; {_FIX}"
            )
        yield name, (blocks, f"{name}_scales")


def _whole_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    experts, outputs, groups, size = blocks
    return experts, 2 * size * groups, outputs


@torch.no_grad()
def from_fp8(q: Tensor, scales: Tensor, block: Block) -> Tensor:
    """bfloat16 [rows, columns]: each number of ``q`` times its block's scale; blocks at the ends may be smaller.

    q: float8_e4m3fn [rows, columns], contiguous, without NaN. scales: a float for each block; of any shape where ``block`` is None,
    [ceil(rows / block[0]), ceil(columns / block[1])] otherwise."""
    grid = Grid(*(block or (None, None)), greatest=448, dtype=torch.float8_e4m3fn)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    packed = Packed(grid, *q.shape)
    packed.unpack_into(out, scales.float().view(grid.scale_shape(*q.shape)), q.view(torch.uint8))
    return out


@torch.no_grad()
def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """bfloat16 [E, 32 G, O]: the transposed matrix of each of E experts, as gpt-oss's modules hold it.

    blocks: uint8 [E, O, G, 16], two E2M1 numbers to a byte, the lower four bits first. exponents: uint8 [E, O, G], biased by 127;
    255 is NaN."""
    codes = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.bfloat16)
    of_bytes = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), 1)
    powers = exponents.view(torch.float8_e8m0fnu)
    out = torch.empty(_whole_shape(tuple(blocks.shape)), dtype=torch.bfloat16)
    for expert, some, power in zip(out, blocks, powers, strict=True):
        numbers = of_bytes[some.int()].flatten(2)
        expert.copy_(numbers.mul_(power.to(torch.bfloat16).unsqueeze(-1)).flatten(1).t())
    return out
