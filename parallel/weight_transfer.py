"""Learner -> server weights: full Hugging Face tensors, flattened into buckets, broadcast in a process group of its own.

Who is in the group: rank 0 is the learner's rank 0; the servers' tensor-parallel ranks follow, replica after replica. The
group is apart from the learner's own groups (another rendezvous store), so a server that dies can never hang the training
collectives. Non-goals: choosing when to send, and talking HTTP; ``trainer/weight_sync.py`` does both.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

T = TypeVar("T")

BUCKET_BYTES = 512 * 2**20
CHECK_EVERY_S = 0.05


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
    """Rank 0 of the transfer group: make it, tell the receivers its ``port`` over HTTP, ``join``, ``broadcast`` buckets, ``close``.

    ``join`` and ``broadcast`` block until the receivers have done their part. A receiver that has refused never will, and says
    so only in its HTTP answer: ``check`` is called again and again meanwhile and ends the wait by raising.
    """

    def __init__(self, *, world_size: int, backend: str, timeout_s: float, address: str = "127.0.0.1"):
        self._timeout = timedelta(seconds=timeout_s)
        # Port 0: the store takes a free port itself, so nothing can take it in between.
        self._store = dist.TCPStore(address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self._backend, self._group = backend, None
        self.address, self.port, self.world_size = address, self._store.port, world_size
        self.group_name = f"tandem-weights-{self.port}"

    def join(self, check: Callable[[], None]) -> None:
        """Return when every rank is in the group."""
        self._group = _run_checked(self._make_group, check)

    def _make_group(self) -> dist.ProcessGroup:
        # init_process_group would replace the learner's default group; a second, independent world has no public constructor.
        group, _ = _new_process_group_helper(
            self.world_size,
            0,
            [],
            Backend(self._backend),
            PrefixStore(self.group_name, self._store),
            group_name=self.group_name,
            backend_options=None,
            timeout=self._timeout,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def broadcast(self, bucket: Bucket, check: Callable[[], None]) -> None:
        """Send one bucket; returns when this side's part of the broadcast is done."""
        _run_checked(lambda: dist.broadcast(bucket.bytes, src=0, group=self._group), check)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _run_checked(work: Callable[[], T], check: Callable[[], None]) -> T:
    """``work()`` in a thread, with ``check()`` every 50 ms until it is done. Where check raises, the thread is left behind (a daemon)."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # handed to the caller's thread, whatever it is
            result.set_exception(error)

    threading.Thread(target=run, name="weight-transfer", daemon=True).start()
    while True:
        try:
            return result.result(timeout=CHECK_EVERY_S)
        except TimeoutError:
            if result.done():  # between the timeout and here, or with a TimeoutError of its own
                return result.result()
            check()
