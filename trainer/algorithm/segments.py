"""Sums and extremes per sequence of packed tokens, and back to tokens.

``_N`` runs over only the valid tokens, end to end: packed tokens without a mask. All functions are
differentiable in ``x_T`` or ``x_S`` and never mix sequences, so a sequence's result does not depend on its
batch.

On the CPU, without gradient, numpy works on the same memory: torch's reductions by segment are scalar loops
there, 4 to 7 times slower, and its search for a mask's places is 10 times slower.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class ValidTokens(NamedTuple):
    """The places of a batch's valid tokens. ``bounds_S`` is to [N] what ``cu_seqlens`` is to [T]."""

    mask_T: Tensor
    places_N: Tensor
    """int64, into [T]."""
    bounds_S: Tensor
    """int64 [S + 1], on the mask's device."""

    def pick(self, x_T: Tensor) -> Tensor:
        """[T] -> [N]"""
        return x_T.index_select(0, self.places_N)

    def put_back(self, x_N: Tensor) -> Tensor:
        """[N] -> [T]; zero off the mask."""
        return x_N.new_zeros(self.mask_T.shape).scatter_(0, self.places_N, x_N)

    def run_bounds(self) -> Tensor:
        """``bounds_S`` with further boundaries wherever tokens off the mask separate two valid ones; int64,
        in [N]."""
        cuts = (self.places_N.diff() != 1).nonzero().flatten() + 1
        return torch.cat([cuts, self.bounds_S]).unique()


def valid_tokens(mask_T: Tensor, cu_seqlens: Tensor) -> ValidTokens:
    places_N = (
        torch.from_numpy(np.flatnonzero(mask_T.numpy())) if mask_T.is_cpu else mask_T.nonzero().flatten()
    )
    return ValidTokens(mask_T, places_N, torch.searchsorted(places_N, cu_seqlens.to(places_N)))


def sum_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S], in x_T's dtype. x_T must be masked: values off the mask count, and NaN spreads to its sequence."""
    if _suits_numpy(x_T):
        return _by_numpy(np.add, x_T, cu_seqlens, of_none=0.0)
    offsets = cu_seqlens.to(device=x_T.device, dtype=torch.int64)
    # unsafe: torch's check would read the offsets back from the device each time, and packing made them
    # valid.
    return torch.segment_reduce(x_T, "sum", offsets=offsets, initial=0.0, unsafe=True)


def max_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S]; -inf for a sequence without tokens, NaN for one with a NaN."""
    if _suits_numpy(x_T):
        return _by_numpy(np.maximum, x_T, cu_seqlens, of_none=-np.inf)
    owners_T = spread(torch.arange(cu_seqlens.numel() - 1, device=x_T.device), cu_seqlens)
    return x_T.new_full((cu_seqlens.numel() - 1,), -torch.inf).scatter_reduce(0, owners_T, x_T, "amax")


def _suits_numpy(x_T: Tensor) -> bool:
    return (
        x_T.is_cpu
        and x_T.dtype in (torch.float32, torch.float64)
        and not (x_T.requires_grad and torch.is_grad_enabled())
    )


def _by_numpy(reduction: np.ufunc, x_T: Tensor, cu_seqlens: Tensor, *, of_none: float) -> Tensor:
    bounds = cu_seqlens.cpu().numpy()
    has_tokens_S = bounds[1:] > bounds[:-1]
    x = x_T.detach().numpy()
    result_S = np.full(len(has_tokens_S), of_none, dtype=x.dtype)
    if has_tokens_S.any():  # reduceat would give a sequence without tokens the next one's first
        result_S[has_tokens_S] = reduction.reduceat(x[: bounds[-1]], bounds[:-1][has_tokens_S])
    return torch.from_numpy(result_S)


def count_per_sequence(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Valid tokens of each sequence, int64 [S], as a difference of running totals."""
    totals = mask_T.new_zeros(mask_T.numel() + 1, dtype=torch.int64)
    torch.cumsum(mask_T, 0, out=totals[1:])
    return totals[cu_seqlens.to(device=mask_T.device, dtype=torch.int64)].diff()


def spread(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Every token gets its sequence's value. [S] -> [T]"""
    lengths_S = torch.diff(cu_seqlens).to(device=x_S.device, dtype=torch.int64)
    return x_S.repeat_interleave(lengths_S, output_size=int(cu_seqlens[-1]))
