"""Small sums over data-parallel ranks, as functions to pass to the mathematics; calls that rank 0 makes for
all ranks, and calls that all ranks make together."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.megatron import platform
from parallel.rank_objects import from_all_ranks, from_first_rank
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
    answer, interruption = _attempted(ask) if dist.get_rank() == 0 else (None, None)
    interruption = from_first_rank(interruption)
    if interruption is not None:
        raise interruption
    return answer


def answer_of_first_rank(ask: Callable[[], T]) -> T:
    """As ``on_first_rank``, with the answer on all ranks."""
    outcome = _attempted(ask) if dist.get_rank() == 0 else None
    answer, interruption = from_first_rank(None if outcome == (None, None) else outcome) or (None, None)
    if interruption is not None:
        raise interruption
    return cast("T", answer)


def on_all_ranks(work: Callable[[], T]) -> T:
    """The result of this rank's ``work()``. A collective: an interruption of any rank is raised on all ranks;
    if there are several, that of the lowest rank."""
    result, mine = _attempted(work)
    for interruption in from_all_ranks(mine):
        if interruption is not None:
            raise interruption
    return cast("T", result)


def _attempted(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result, interruption): one of them is None."""
    try:
        return work(), None
    except INTERRUPTIONS as error:
        return None, error
