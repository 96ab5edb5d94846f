"""Weight-only rounding: the learner rounds what it sends to a coarser grid (``numerics/grids.py``). The servers compute
with the rounded numbers, in a dtype that every server has.

Servers with Tandem's plugin are sent a scale for each block and a byte for each number. All others are sent the rounded
numbers in the dtype in which they compute. Both have the same numbers then.

This has the error of quantised weights, on any device, and neither the speed nor the memory of quantised kernels, nor
the error of rounded activations. It is the rollout side of a study of mismatch. SGLang's own INT8 (w8a8_int8) does not
work for training: its layers hold INT8 from the start, and cut 2-byte weights, a checkpoint's or an update's, to whole
numbers, nearly all of which are zero.

``bf16`` and ``fp16`` round every tensor to the nearest number of that dtype, and are sent in the servers' dtype.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema.rollout import Precision
from numerics.grids import GRIDS, Packed
from parallel.weights.hf_names import is_kept_float32

MATRIX = re.compile(
    r"\.(q|k|v|qkv|o|q_a|q_b|kv_b|gate|up|gate_up|down)_proj\.weight$|\.kv_a_proj_with_mqa\.weight$|"
    r"\.linear_attn\.(in_proj_(qkvz|qkv|z)|out_proj)\.weight$|\.experts\.\d+\.w[123]\.weight$"
)
"""Hugging Face names of the matrices that quantised kernels multiply with. Embeddings, output head, router, norms and
biases stay as they are."""
WHOLE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of every tensor."""
AT_ONCE = {"cpu": 2**17, "cuda": 2**25}
"""Numbers that are rounded to a dtype at a time, by device. What a CPU reads twice should come from a core's cache."""


def is_rounded(name: str, precision: Precision | None) -> bool:
    """Whether the tensor of this Hugging Face name is rounded."""
    if is_kept_float32(name):
        return False
    return precision in WHOLE_DTYPES or (precision is not None and MATRIX.search(name) is not None)


def is_packed(name: str, precision: Precision | None) -> bool:
    """Whether the tensor of this Hugging Face name can be sent packed: it is rounded to a grid with scales."""
    return precision in GRIDS and is_rounded(name, precision)


def packed_form(name: str, shape: Sequence[int], precision: Precision | None) -> Packed | None:
    """How the tensor of this Hugging Face name is packed; None: not at all."""
    if precision is None or not is_packed(name, precision):
        return None
    rows, columns = shape
    return Packed(GRIDS[precision], rows, columns)


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
    if precision in WHOLE_DTYPES:
        at_once = AT_ONCE["cpu" if weight.device.type == "cpu" else "cuda"]
        for part, numbers in zip(out.view(-1).split(at_once), weight.reshape(-1).split(at_once), strict=True):
            part.copy_(numbers.to(WHOLE_DTYPES[precision]))
        return
    form = Packed(GRIDS[precision], *weight.shape)
    packed = torch.empty(form.nbytes, dtype=torch.uint8, device=weight.device)
    form.pack_into(packed, weight)
    form.unpack_into(out, form.scales_of(packed), form.numbers_of(packed))
