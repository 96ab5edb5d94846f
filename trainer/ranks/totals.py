"""What ranks tell each other: small sums over data-parallel ranks, as functions that the mathematics is
handed, and rank 0's answers."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.megatron import platform
from trainer.ranks.interruption import INTERRUPTIONS

T = TypeVar("T")

Total = Callable[[Tensor], Tensor]
"""Sums a small float64 tensor over all ranks, the same on each of them. ``alone`` where one rank holds
everything."""


def alone(sums: Tensor) -> Tensor:
    return sums


def total_over(group: dist.ProcessGroup | None) -> Total:
    """The Total of a process group; None means that this rank holds everything."""
    if group is None or dist.get_world_size(group) == 1:
        return alone

    def total(sums: Tensor) -> Tensor:
        # Gathered and added in rank order: every rank gets the same bits whatever algorithm an all-reduce
        # would pick.
        mine = sums.detach().to(device=platform.device(), dtype=torch.float64).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return torch.stack(everyone).sum(0).to(sums.device)

    return total


def on_first_rank(ask: Callable[[], T]) -> T | None:
    """Rank 0 calls ``ask`` and gets its answer; the others call nothing and get None. A collective: all ranks
    raise what interrupted rank 0."""
    answer, interruption = None, None
    if dist.get_rank() == 0:
        try:
            answer = ask()
        except INTERRUPTIONS as error:
            interruption = error
    shared = [interruption]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise shared[0]
    return answer
