"""Small sums over data-parallel ranks, as functions to pass to the mathematics, and calls that rank 0 makes for
all ranks, or all ranks make together."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.megatron import platform
from trainer.ranks.interruption import INTERRUPTIONS

T = TypeVar("T")

Total = Callable[[Tensor], Tensor]
"""Sums a small float64 tensor over all ranks; every rank gets the same bits. ``alone`` if one rank holds all."""


def alone(sums: Tensor) -> Tensor:
    return sums


def total_over(group: dist.ProcessGroup | None) -> Total:
    """The Total of a process group; ``alone`` for None."""
    if group is None or dist.get_world_size(group) == 1:
        return alone

    def total(sums: Tensor) -> Tensor:
        # Gathered and added in rank order: the bits must not depend on the algorithm of an all-reduce.
        mine = sums.detach().to(device=platform.device(), dtype=torch.float64).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return torch.stack(everyone).sum(0).to(sums.device)

    return total


def on_first_rank(ask: Callable[[], T]) -> T | None:
    """Call ``ask`` on rank 0 and return its answer there, None elsewhere. A collective: an interruption of rank 0
    is raised on all ranks."""
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


def on_all_ranks(work: Callable[[], T]) -> T:
    """The result of this rank's ``work()``. A collective: an interruption of any rank is raised on all ranks, that of the
    lowest rank where there are several."""
    result, interruption = None, None
    try:
        result = work()
    except INTERRUPTIONS as error:
        interruption = error
    interruptions: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(interruptions, interruption)
    for interruption in interruptions:
        if interruption is not None:
            raise interruption
    return cast("T", result)
