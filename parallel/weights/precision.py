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
    fp8_e4m3         b the matrix                             G = 448   snap to float8_e4m3fn, ties to even
    fp8_e4m3_block   b 128 x 128 numbers                      G = 448   snap to float8_e4m3fn, ties to even

``bf16`` and ``fp16`` round every tensor to the nearest number of that dtype. Sources: absmax quantisation by rows, as in
LLM.int8() (Dettmers et al. 2022); groups of 32, as in GGML's and AWQ's INT4; per tensor and per 128 x 128 block FP8, as
in DeepSeek-V3 (2024).
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema.rollout import Precision

MATRIX = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")
"""Hugging Face names of the matrices that quantised kernels multiply with. Embeddings, output head, router, norms and
biases stay as they are."""
WHOLE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of every tensor."""
INT8_MAX, INT4_MAX, FP8_MAX = 127, 7, 448
GROUP = 32
"""Numbers of a row that share a scale in int4."""
BLOCK = 128
"""Rows and columns that share a scale in fp8_e4m3_block."""
TINY_SUM = 1.5 * 2.0**14
"""A number of magnitude 2^14: float32 keeps multiples of 2^-9 beside it."""
IN_CACHE = 2**17
"""Numbers that are rounded at a time: what is read several times should come from a core's cache."""


def with_precision(
    tensors: Iterable[tuple[str, Tensor]], precision: Precision
) -> Iterator[tuple[str, Tensor]]:
    """The same names in the same order, one tensor rounded at a time."""
    for name, tensor in tensors:
        is_rounded = precision in WHOLE_DTYPES or MATRIX.search(name)
        yield name, rounded(tensor, precision) if is_rounded else tensor


@torch.no_grad()
def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """The nearest number of the grid for each weight, in the shape and dtype of ``weight``, [out, in] for all but bf16
    and fp16. A block of zeros stays. Numbers above 65504 become infinite in fp16.

    A weight of 2 bytes rounds the numbers of the grid once more, by up to 2^-9 of each in bfloat16; half a step of
    int8 is 2^-8 of a row's greatest.
    """
    if precision in WHOLE_DTYPES:
        return weight.to(WHOLE_DTYPES[precision]).to(weight.dtype)
    work = weight.to(torch.float32, copy=True)
    match precision:
        case "int8":
            for rows in work.split(max(1, IN_CACHE // work.shape[1])):
                _snap(rows, (1,), INT8_MAX, torch.round_)
        case "int4":
            work = _in_blocks(work, 1, GROUP, lambda blocks: _snap(blocks, (1, 3), INT4_MAX, torch.round_))
        case "fp8_e4m3":
            _snap(work, (0, 1), FP8_MAX, _in_parts(_to_fp8))
        case "fp8_e4m3_block":
            work = _in_blocks(work, BLOCK, BLOCK, lambda blocks: _snap(blocks, (1, 3), FP8_MAX, _to_fp8))
    return work.to(weight.dtype)


def _snap(blocks: Tensor, within: tuple[int, ...], greatest: int, snap: Callable[[Tensor], object]) -> None:
    """In place. within: the dimensions that lie inside of a block. snap: rounds to the grid of scale 1, in place."""
    most, least = blocks.amax(dim=within, keepdim=True), blocks.amin(dim=within, keepdim=True)
    scale = torch.maximum(most, -least) / greatest
    blocks.div_(torch.where(scale > 0, scale, 1.0))
    snap(blocks)
    blocks.mul_(scale)


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


def _in_parts(work: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """``work`` in place on one part after the other."""

    def on_parts(numbers: Tensor) -> None:
        for part in numbers.view(-1).split(IN_CACHE):
            work(part)

    return on_parts


def _in_blocks(matrix: Tensor, height: int, width: int, work: Callable[[Tensor], None]) -> Tensor:
    """The matrix after ``work`` in place on its blocks, [rows of blocks, height, columns of blocks, width]. Blocks at
    the lower and right edges are filled up with zeros, which change no block's greatest."""
    rows, columns = matrix.shape
    filled = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    blocks = filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)
    for some in blocks.split(max(1, IN_CACHE // (height * filled.shape[1]))):
        work(some)
    return filled[:rows, :columns].contiguous()
