"""Weight-only rounding: the learner rounds what it sends to a coarser grid, and sends it in a dtype that every server
holds. The servers compute in that dtype, with the rounded numbers.

This has the error of quantised weights, on any device, and neither the speed nor the memory of quantised kernels, nor
the error of rounded activations. It is the rollout side of a study of mismatch. SGLang's own INT8 (w8a8_int8) does not
work for training: its layers hold INT8 from the start, and cut 2-byte weights, a checkpoint's or an update's, to whole
numbers, nearly all of which are zero.

Every grid of integers or FP8 has a scale per block b of a matrix:

    s_b = max |W| over b / G        W' = s_b snap(W / s_b)

    int8             b an output channel (a row)              G = 127   snap to whole numbers
    int4             b 32 numbers of a row, one after another G = 7     snap to whole numbers
    int3, int2       b as in int4                             G = 3, 1  snap to whole numbers
    fp8_e4m3         b the matrix                             G = 448   snap to float8_e4m3fn, ties to even
    fp8_e4m3_block   b 128 x 128 numbers                      G = 448   snap to float8_e4m3fn, ties to even

``bf16`` and ``fp16`` round every tensor to the nearest number of that dtype. Sources: absmax quantisation by rows, as in
LLM.int8() (Dettmers et al. 2022); groups of 32, as in GGML's and AWQ's INT4; per tensor and per 128 x 128 block FP8, as
in DeepSeek-V3 (2024).
"""

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema.rollout import Precision
from parallel.weights.hf_names import is_kept_float32

MATRIX = re.compile(r"\.(q|k|v|qkv|o|gate|up|gate_up|down)_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")
"""Hugging Face names of the matrices that quantised kernels multiply with. Embeddings, output head, router, norms and
biases stay as they are."""
WHOLE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of every tensor."""
INT8_MAX, INT4_MAX, INT3_MAX, INT2_MAX, FP8_MAX = 127, 7, 3, 1, 448
GROUP = 32
"""Numbers of a row that share a scale in int4, int3 and int2."""
BLOCK = 128
"""Rows and columns that share a scale in fp8_e4m3_block."""
TINY_SUM = 1.5 * 2.0**14
"""A number of magnitude 2^14: float32 keeps multiples of 2^-9 beside it."""
AT_ONCE = {"cpu": 2**17, "cuda": 2**25}
"""Numbers that are rounded at a time, by device. What a CPU reads several times should come from a core's cache; a GPU
should not wait for the start of kernels."""


def is_rounded(name: str, precision: Precision | None) -> bool:
    """Whether the tensor of this Hugging Face name is rounded."""
    if is_kept_float32(name):
        return False
    return precision in WHOLE_DTYPES or (precision is not None and MATRIX.search(name) is not None)


def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """See ``round_into``; in the shape and dtype of ``weight``."""
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    round_into(out, weight, precision)
    return out


@torch.no_grad()
def round_into(out: Tensor, weight: Tensor, precision: Precision) -> None:
    """Write the nearest number of the grid for each weight, [out, in] for all but bf16 and fp16, into ``out``, contiguous
    and of the same shape. A block of zeros stays. Numbers above 65504 become infinite in fp16.

    An ``out`` of 2 bytes rounds the numbers of the grid once more, by up to 2^-9 of each in bfloat16; half a step of
    int8 is 2^-8 of a row's greatest.
    """
    at_once = AT_ONCE["cpu" if weight.device.type == "cpu" else "cuda"]
    if precision in WHOLE_DTYPES:
        for part, numbers in zip(out.view(-1).split(at_once), weight.reshape(-1).split(at_once), strict=True):
            part.copy_(numbers.to(WHOLE_DTYPES[precision]))
        return
    height, width, greatest, snap = GRIDS[precision]
    scale = None
    if height is None:  # one block, whose greatest is known before the first part is rounded
        scale, height = (
            _scale_of(weight.float() if weight.dtype != torch.float32 else weight, (0, 1), greatest),
            1,
        )
    rows = max(1, at_once // (height * weight.shape[1])) * height
    for part, numbers in zip(out.split(rows), weight.split(rows), strict=True):
        is_there = part.dtype == torch.float32
        work = part.copy_(numbers) if is_there else numbers.to(torch.float32)
        if scale is not None:
            _snap(work, scale, snap)
        elif width is None:
            _snap(work, _scale_of(work, (1,), greatest), snap)
        else:
            blocks = _blocks(work, height, width)
            _snap(blocks, _scale_of(blocks, (1, 3), greatest), snap)
            blocks = blocks.view(blocks.shape[0] * height, -1)[: work.shape[0], : work.shape[1]]
            work = blocks if blocks.data_ptr() != work.data_ptr() else work
        if work.data_ptr() != part.data_ptr():
            part.copy_(work)


def _scale_of(blocks: Tensor, within: tuple[int, ...], greatest: int) -> Tensor:
    """within: the dimensions that lie inside of a block."""
    most, least = blocks.amax(dim=within, keepdim=True), blocks.amin(dim=within, keepdim=True)
    return torch.maximum(most, -least) / greatest


def _snap(numbers: Tensor, scale: Tensor, snap: Callable[[Tensor], object]) -> None:
    """In place. snap: rounds to the grid of scale 1, in place."""
    numbers.div_(torch.where(scale > 0, scale, 1.0))
    snap(numbers)
    numbers.mul_(scale)


def _to_fp8(numbers: Tensor) -> None:
    """As ``to(torch.float8_e4m3fn)`` and back, which on CPU takes one number at a time: 3 bits of mantissa, and from
    2^-6 down whole multiples of 2^-9; ties to even. For magnitudes up to 448."""
    is_tiny = (numbers.abs() - 2.0**-6).view(
        torch.int32
    ) >> 31  # all bits set; torch.where takes one at a time too
    multiples = ((numbers + TINY_SUM) - TINY_SUM).view(torch.int32)
    bits = numbers.view(torch.int32)
    bits.add_((bits >> 20 & 1) + 0x7FFFF).bitwise_and_(~0xFFFFF)  # of float32's 23 bits, 20 go
    bits.bitwise_and_(~is_tiny).bitwise_or_(multiples & is_tiny)


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """[rows of blocks, height, columns of blocks, width], a view where the blocks divide the matrix. Else blocks at the
    lower and right edges are filled up with zeros, which change no block's greatest."""
    rows, columns = matrix.shape
    filled = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    return filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)


GRIDS: dict[Precision, tuple[int | None, int | None, int, Callable[[Tensor], object]]] = {
    "int8": (1, None, INT8_MAX, torch.round_),
    "int4": (1, GROUP, INT4_MAX, torch.round_),
    "int3": (1, GROUP, INT3_MAX, torch.round_),
    "int2": (1, GROUP, INT2_MAX, torch.round_),
    "fp8_e4m3": (None, None, FP8_MAX, _to_fp8),
    "fp8_e4m3_block": (BLOCK, BLOCK, FP8_MAX, _to_fp8),
}
"""(rows of a block, columns of a block, greatest number of the grid, rounding to it at scale 1); None: all."""
