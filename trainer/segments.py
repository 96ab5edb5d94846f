"""Sums and extremes per sequence of packed tokens, and back to tokens.

Legend: S sequences, T packed tokens, R runs (stretches of consecutive valid tokens within a sequence). All functions are differentiable
in ``x_T`` or ``x_S`` and never mix two sequences, so a sequence has the same result in whatever batch it is packed.
"""

import torch
from torch import Tensor

_BLOCK = 256


def sum_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S], in x_T's dtype. Mask x_T first: what lies off the mask counts, and NaN spreads over its sequence."""
    return _reduce(x_T, cu_seqlens, "sum", 0.0)


def max_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S]; -inf for a sequence without tokens."""
    return _reduce(x_T, cu_seqlens, "max", -torch.inf)


def count_per_sequence(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Valid tokens of each sequence, int64 [S]: a difference of running totals, exact since they are integers.

    Totals are kept per block, and counted within the block that a boundary cuts: one for each token would be 8 bytes where a mask has 1.
    """
    bounds = cu_seqlens.to(device=mask_T.device, dtype=torch.int64)
    blocks = torch.nn.functional.pad(mask_T, (0, _BLOCK - mask_T.numel() % _BLOCK)).view(-1, _BLOCK)
    totals = blocks.sum(1)
    totals = totals.cumsum(0) - totals
    cut, places = bounds // _BLOCK, bounds % _BLOCK
    before = blocks[cut] & (torch.arange(_BLOCK, device=mask_T.device) < places[:, None])
    return (totals[cut] + before.sum(1)).diff()


def spread(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Every token gets its sequence's value. [S] -> [T]"""
    return x_S.repeat_interleave(_lengths(cu_seqlens, x_S.device), output_size=int(cu_seqlens[-1]))


def run_boundaries(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Boundaries like cu_seqlens, int64 on the CPU, that cut before each run of valid tokens; they also hold every sequence's start.

    The tokens off the mask that follow a run share its part, so sums per part of masked values are sums per run.
    """
    starts_T = mask_T.cpu().clone()
    starts_T[1:] &= ~mask_T[:-1].cpu()
    inner = cu_seqlens[:-1].to(torch.int64)
    starts_T[inner[inner < mask_T.numel()]] = True
    return torch.cat([starts_T.nonzero().flatten(), torch.tensor([mask_T.numel()])])


def _reduce(x_T: Tensor, cu_seqlens: Tensor, reduce: str, initial: float) -> Tensor:
    offsets = cu_seqlens.to(device=x_T.device, dtype=torch.int64)
    # unsafe: torch's check of offsets reads them back from the device each time; packing made them.
    return torch.segment_reduce(x_T, reduce, offsets=offsets, initial=initial, unsafe=True)


def _lengths(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    return torch.diff(cu_seqlens).to(device=device, dtype=torch.int64)
