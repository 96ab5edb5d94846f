"""The loss of INT8 weights in a dtype that every server can hold: tensors are rounded to the INT8 grid and sent
as ordinary ones.

SGLang's own INT8 (w8a8_int8) does not work for training: its layers hold INT8 from the start, and cut 2-byte
weights, a checkpoint's or an update's, to whole numbers, nearly all of which are zero.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

GREATEST = 127
"""The grid goes from -127 to 127."""
MATRIX = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")
"""Hugging Face names of the matrices that INT8 kernels multiply with. Embeddings, output head, router, norms and
biases stay as they are."""


def with_int8_matrices(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same names in the same order, the layers' matrices rounded."""
    for name, tensor in tensors:
        yield name, rounded_to_int8(tensor) if MATRIX.search(name) else tensor


@torch.no_grad()
def rounded_to_int8(weight: Tensor) -> Tensor:
    """``s_o round(W_oi / s_o)`` with ``s_o = max_i |W_oi| / 127``: symmetric, one scale per output channel. A row
    of zeros stays.

    ``weight`` is [out, in] in any floating dtype; the result has its shape and dtype. A dtype of 2 bytes rounds
    the values of the grid once more, by up to 2^-9 of each; half a step of the grid is 2^-8 of a row's greatest.
    Source: the absmax quantisation of LLM.int8() (Dettmers et al. 2022), by rows; SGLang's W8A8Int8Config
    serves weights of this kind.
    """
    rows = weight.float()
    scale_o = rows.abs().amax(dim=1, keepdim=True) / GREATEST
    grid = torch.where(scale_o > 0, rows / scale_o, 0.0).round_()
    return (grid * scale_o).to(weight.dtype)
