"""Small things between ranks, by fewer messages than ``torch.distributed`` needs, which sends the size of every pickle
before it. All ranks call these functions together.

    objects that are None in most steps ("nothing happened", "nobody failed")    one number says whether there is one
    bytes of a few kilobytes                                                     the size goes along, in a buffer with room
"""

from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")
ROOM = 8192
"""Bytes of the buffer in which all ranks send short messages, each after its size."""
_SIZE = np.dtype(np.int64)


def from_first_rank(mine: T) -> T:
    """Rank 0's object, on all ranks."""
    is_there = torch.tensor([mine is not None], dtype=torch.uint8)
    dist.broadcast(is_there, src=0)
    shared: list = [mine]
    if is_there.item():
        dist.broadcast_object_list(shared, src=0)
    return shared[0] if is_there.item() else None  # pyright: ignore[reportReturnType] - None is T then


def from_all_ranks(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object of each rank of ``group`` (None: of all), in the order of ranks."""
    everyone: list = [mine] * dist.get_world_size(group)
    if len(everyone) > 1:
        is_there = torch.tensor([mine is not None], dtype=torch.uint8)
        dist.all_reduce(is_there, dist.ReduceOp.MAX, group=group)
        if is_there.item():
            dist.all_gather_object(everyone, mine, group=group)
    return everyone


def bytes_of_all_ranks(mine: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The bytes of each rank of ``group``, in the order of ranks. If they are short on every rank, one
    message carries them."""
    rows = _gathered(mine, ROOM, group)
    sizes = [int(row[: _SIZE.itemsize].view(_SIZE)[0]) for row in rows]
    if _SIZE.itemsize + max(sizes) > ROOM:
        rows = _gathered(mine, _SIZE.itemsize + max(sizes), group)
    return [row[_SIZE.itemsize :][:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _gathered(mine: bytes, room: int, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """Of each rank: the size of its bytes, and as many of them as there is room for."""
    row = np.zeros(room, dtype=np.uint8)
    row[: _SIZE.itemsize].view(_SIZE)[0] = len(mine)
    fitting = np.frombuffer(mine, dtype=np.uint8)[: room - _SIZE.itemsize]
    row[_SIZE.itemsize :][: len(fitting)] = fitting
    rows = [torch.empty(room, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.from_numpy(row), group=group)
    return [row.numpy() for row in rows]
