"""Objects between ranks that are None in most steps ("nothing happened", "nobody failed"): one number says whether there is
one, and only then it is pickled. All ranks call these functions together."""

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_first_rank(mine: T) -> T:
    """Rank 0's object, on all ranks."""
    is_there = torch.tensor([mine is not None], dtype=torch.uint8)
    dist.broadcast(is_there, src=0)
    shared: list = [mine]
    if is_there.item():
        dist.broadcast_object_list(shared, src=0)
    return shared[0] if is_there.item() else None  # pyright: ignore[reportReturnType] - None is T then


def raise_on_all_ranks(failure: str | None, what: str) -> None:
    """Raise OSError on every rank if rank 0 could not write ``what``, and so left what was there before as it was."""
    failure = from_first_rank(failure)
    if failure is not None:
        raise OSError(f"could not write {what}: {failure}; what was there before is unchanged")


def from_all_ranks(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object of each rank of ``group`` (None: of all), in the order of ranks."""
    everyone: list = [mine] * dist.get_world_size(group)
    if len(everyone) > 1:
        is_there = torch.tensor([mine is not None], dtype=torch.uint8)
        dist.all_reduce(is_there, dist.ReduceOp.MAX, group=group)
        if is_there.item():
            dist.all_gather_object(everyone, mine, group=group)
    return everyone
