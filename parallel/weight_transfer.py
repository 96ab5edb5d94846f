"""Learner -> server weights: full Hugging Face tensors, flattened into buckets, broadcast in a process group of its own.

Who is in the group: rank 0 is the learner's rank 0; the servers' tensor-parallel ranks follow, replica after replica. The
group is apart from the learner's own groups (another rendezvous store), so a server that dies can never hang the training
collectives. Non-goals: choosing when to send, and talking HTTP; ``trainer/weight_sync.py`` does both.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive tensors of one dtype as one flat byte string, in the order of ``names``.

    One dtype per bucket keeps every tensor's byte offset a multiple of its item size, which the receiver needs to view it.
    """

    names: list[str]
    dtype: str
    shapes: list[list[int]]
    bytes: Tensor
    """uint8 [sum of sizes]."""

    def sha256(self) -> str:
        return hashlib.sha256(self.bytes.cpu().numpy().tobytes()).hexdigest()


def make_buckets(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group ``(name, full tensor)`` pairs into buckets of at most ``max_bytes`` (a larger single tensor gets its own)."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach().to(dtype)
        if pending and size + tensor.nbytes > max_bytes:
            yield _flatten(pending, dtype)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield _flatten(pending, dtype)


def _flatten(tensors: list[tuple[str, Tensor]], dtype: torch.dtype) -> Bucket:
    return Bucket(
        names=[name for name, _ in tensors],
        dtype=str(dtype).removeprefix("torch."),
        shapes=[list(t.shape) for _, t in tensors],
        bytes=torch.cat([t.contiguous().flatten().view(torch.uint8) for _, t in tensors]),
    )


class WeightBroadcaster:
    """Rank 0 of the transfer group.

    The constructor blocks until every server rank has joined (they are told to over HTTP by the caller, before), or
    raises after ``timeout_s`` seconds.
    """

    def __init__(self, *, master_address: str, master_port: int, world_size: int, backend: str, group_name: str, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(master_address, master_port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        # init_process_group would replace the learner's default group; a second, independent world has no public constructor.
        self._group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            Backend(backend),
            PrefixStore(group_name, store),
            group_name=group_name,
            backend_options=None,
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        self._store = store
        self.world_size = world_size

    def broadcast(self, bucket: Bucket) -> None:
        """Send one bucket; returns when this side's part of the broadcast is done."""
        dist.broadcast(bucket.bytes, src=0, group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
