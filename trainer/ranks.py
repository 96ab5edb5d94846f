"""Small sums over data-parallel ranks: what the mathematics needs to know of the whole step, as functions that it is handed."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import platform

Total = Callable[[Tensor], Tensor]
"""Sums a small float64 tensor over all ranks, the same on each of them. ``alone`` where one rank holds everything."""


def alone(sums: Tensor) -> Tensor:
    return sums


def total_over(group: dist.ProcessGroup | None) -> Total:
    """The Total of a process group; None means that this rank holds everything."""
    if group is None or dist.get_world_size(group) == 1:
        return alone

    def total(sums: Tensor) -> Tensor:
        # Gathered and added in rank order: every rank gets the same bits whatever algorithm an all-reduce would pick.
        mine = sums.detach().to(device=platform.device(), dtype=torch.float64).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return torch.stack(everyone).sum(0).to(sums.device)

    return total
