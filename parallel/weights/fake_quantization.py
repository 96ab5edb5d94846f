"""What INT8 weights lose, in a dtype that every server can hold: tensors rounded to the INT8 grid and sent as
ordinary ones.

SGLang's own INT8 (w8a8_int8) cannot be trained with: its layers hold INT8 from the start, so that 2-byte
weights, of the checkpoint as of an update, are cut to whole numbers, which is zero for nearly all of them.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

GREATEST = 127
"""The grid is symmetric: -127 to 127."""
MATRIX = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")
"""Hugging Face names of what INT8 kernels multiply with: not embeddings, output head, router, norms and
biases."""


def with_int8_matrices(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same names in the same order, the layers' matrices rounded."""
    for name, tensor in tensors:
        yield name, rounded_to_int8(tensor) if MATRIX.search(name) else tensor


@torch.no_grad()
def rounded_to_int8(weight: Tensor) -> Tensor:
    """``s_o round(W_oi / s_o)`` with ``s_o = max_i |W_oi| / 127``: symmetric, a scale for each output
    channel. A row of zeros stays.

    Args: weight [out, in] in any floating dtype. Returns the same shape and dtype; in one of 2 bytes the
    values are those of the grid, rounded to it once more (2^-9 of each, where half a step of the grid is 2^-8
    of a row's greatest).
    Source: the absmax quantisation of LLM.int8() (Dettmers et al. 2022), by rows; SGLang's W8A8Int8Config
    serves weights of this kind.
    """
    rows = weight.float()
    scale_o = rows.abs().amax(dim=1, keepdim=True) / GREATEST
    grid = torch.where(scale_o > 0, rows / scale_o, 0.0).round_()
    return (grid * scale_o).to(weight.dtype)
