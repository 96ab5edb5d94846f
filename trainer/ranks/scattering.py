"""Samples from rank 0 to the ranks that train on them.

A share's objects are pickled without the content of their numpy arrays (pickle's protocol 5, PEP 574): this header has some
hundred bytes for a sample. The content goes as plain bytes of one tensor for each share, which is received where it stays,
and the arrays of the receiver are views of it. Ranks with the same share (tensor-, context- and pipeline-parallel siblings)
are sent the same bytes.

``torch.distributed.scatter_object_list`` would copy every byte four times at rank 0 (pickle, tensor, padding to the longest
rank's, list), once more for each sibling.
"""

import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_ALIGNMENT = 16
"""Bytes: the content of every array begins at a multiple of it."""


class _Header(NamedTuple):
    objects: bytes
    """A pickle that names its buffers, which follow apart."""
    sizes: list[int]
    """Bytes of each of them, in order."""


def scatter(shares: Sequence[T] | None, share_of: Callable[[int], int]) -> T:
    """This rank's share. A collective of all ranks.

    Args:
        shares: on rank 0, one for each data-parallel rank; None elsewhere. Arrays in them are received read-only if they
            were.
        share_of: the place in ``shares`` for a rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    header: list[_Header | None] = [None]
    if rank:
        dist.scatter_object_list(header, None, src=0)
        assert header[0] is not None
        content = torch.empty(_end(header[0].sizes), dtype=torch.uint8)
        if len(content):
            dist.recv(content, src=0)
        return _joined(header[0], content)
    assert shares is not None
    receivers: dict[int, list[int]] = {}
    for other in range(1, world_size):
        receivers.setdefault(share_of(other), []).append(other)
    taken_apart = {number: _taken_apart(shares[number]) for number in receivers}
    headers = [taken_apart[share_of(r)][0] if r else None for r in range(world_size)]
    dist.scatter_object_list(header, headers, src=0)
    for number, (share_header, buffers) in taken_apart.items():
        content = _end_to_end(share_header.sizes, buffers)
        if len(content):
            for sending in [dist.isend(content, dst=receiver) for receiver in receivers[number]]:
                assert sending is not None
                sending.wait()
    return shares[share_of(0)]


def _taken_apart(share: object) -> tuple[_Header, list[np.ndarray]]:
    buffers: list[pickle.PickleBuffer] = []
    objects = pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return _Header(objects, [len(array) for array in arrays]), arrays


def _joined(header: _Header, content: Tensor) -> Any:
    whole = content.numpy()
    buffers = [
        whole[start : start + size] for start, size in zip(_starts(header.sizes), header.sizes, strict=True)
    ]
    return pickle.loads(header.objects, buffers=buffers)


def _end_to_end(sizes: Sequence[int], buffers: Sequence[np.ndarray]) -> Tensor:
    content = np.zeros(_end(sizes), dtype=np.uint8)
    for start, buffer in zip(_starts(sizes), buffers, strict=True):
        content[start : start + len(buffer)] = buffer
    return torch.from_numpy(content)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(map(_rounded, sizes))][:-1]


def _end(sizes: Sequence[int]) -> int:
    return sum(map(_rounded, sizes))


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
