"""Weights from learner to servers: full Hugging Face tensors, flattened into buckets and broadcast.

Each pipeline stage of the learner has a process group with the servers. Rank 0, the sender, is the first rank of
the stage; the servers' tensor-parallel ranks follow, replica by replica. The groups have a rendezvous store of
their own, so that a server that dies can never hang the training collectives. ``trainer/weight_sync.py``
decides when to send, and talks HTTP.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from parallel.megatron import platform

T = TypeVar("T")

BUCKET_BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""Bucket size by device. On a GPU buckets are large, since the requests' latency counts. On CPU the copies count:
a small bucket stays in the cache until it is sent, and the receiver's allocator reuses the last bucket's memory
(see ``rollout.servers.command.REUSED_MEMORY``)."""
CHECK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive tensors of one dtype as one flat byte string, in the order of ``names``.

    With one dtype per bucket every byte offset is a multiple of the item size, as the receiver's views need.
    """

    names: list[str]
    dtype: torch.dtype
    shapes: list[list[int]]
    bytes: Tensor
    """uint8 [sum of sizes]."""
    is_last: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the bytes, by name."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = torch.Size(shape).numel() * self.dtype.itemsize
            yield name, self.bytes[start : start + size].view(self.dtype).view(shape)
            start += size


class Buffers:
    """Memory for two buckets in turns: one is filled while the other is sent.

    It is kept between transfers: on CPU new memory costs as much as the copy into it.
    """

    def __init__(self) -> None:
        self._flat: list[Tensor | None] = [None, None]

    def take(self, size: int, place: torch.device) -> Tensor:
        """uint8 [at least size]; its content stays until the second next call."""
        self._flat.reverse()
        if self._flat[0] is None or self._flat[0].numel() < size:
            self._flat[0] = torch.empty(size, dtype=torch.uint8, device=place)
        return self._flat[0]

    def release(self) -> None:
        """Free a GPU's memory for training between transfers; its allocator gives it back at once later."""
        self._flat = [flat if flat is not None and flat.device.type == "cpu" else None for flat in self._flat]


def make_buckets(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    buffers: Buffers | None = None,
    max_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Group ``(name, full tensor)`` pairs into buckets of at most ``max_bytes`` (None: ``BUCKET_BYTES`` of the
    device); a larger tensor gets a bucket of its own.

    Each tensor is converted and copied into one of two buffers: a bucket's bytes stay until the second next
    bucket is requested. A tensor that fills a bucket is sent without a copy, unless its dtype changes.
    """
    buffers = buffers or Buffers()
    filling = _Filling(dtype)
    for name, tensor in tensors:
        size, limit = tensor.numel() * dtype.itemsize, max_bytes or BUCKET_BYTES[tensor.device.type]
        if filling.names and filling.size + size > limit:
            yield filling.bucket(is_last=False)
            filling = _Filling(dtype)
        if size >= limit and tensor.dtype == dtype and tensor.is_contiguous():
            filling.adopt(name, tensor)
            continue
        if not filling.names:
            filling.buffer = buffers.take(max(size, limit), tensor.device)
        filling.add(name, tensor)
    if filling.names:
        yield filling.bucket(is_last=True)


class _Filling:
    """A bucket in the making."""

    def __init__(self, dtype: torch.dtype):
        self.names: list[str] = []
        self.size = 0
        self.buffer: Tensor
        self._shapes: list[list[int]] = []
        self._dtype = dtype

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * self._dtype.itemsize
        self.buffer[self.size : self.size + size].view(self._dtype).view(tensor.shape).copy_(tensor.detach())
        self._append(name, tensor, size)

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Use the tensor's own memory as the bucket."""
        self.buffer = tensor.detach().view(-1).view(torch.uint8)
        self._append(name, tensor, tensor.nbytes)

    def _append(self, name: str, tensor: Tensor, size: int) -> None:
        self.names.append(name)
        self._shapes.append(list(tensor.shape))
        self.size += size

    def bucket(self, *, is_last: bool) -> Bucket:
        flat = self.buffer[: self.size]
        return Bucket(names=self.names, dtype=self._dtype, shapes=self._shapes, bytes=flat, is_last=is_last)


class WeightBroadcaster:
    """Rank 0 of a transfer group: create it, send the receivers its ``port`` over HTTP, ``join``, ``start`` each
    bucket, ``close``.

    ``join``, and ``wait`` on the result of ``start``, block until the receivers have done their part. A receiver
    that refuses never will, and reports that only in its HTTP answer: meanwhile ``check`` is called repeatedly,
    and ends the wait by an exception. ``address`` is this host's address for the receivers.
    """

    def __init__(
        self,
        *,
        world_size: int,
        backend: str,
        timeout_s: float,
        address: str = "127.0.0.1",
        group_name: str | None = None,
    ):
        """group_name: None for a name that is unique in this process."""
        self._timeout = timedelta(seconds=timeout_s)
        # A store listens on every interface, unless it gets a listening socket. Port 0 leaves no moment in
        # which another process can take the port.
        listening = socket.create_server((address, 0))
        port, descriptor = listening.getsockname()[1], listening.detach()
        options = {"wait_for_workers": False, "master_listen_fd": descriptor}
        self._store = TCPStore(address, port, world_size, True, self._timeout, **options)
        self._backend, self._group, self._line = backend, None, Line()
        self.address, self.port, self.world_size = address, port, world_size
        self.group_name = group_name or f"tandem-weights-{port}"

    def join(self, check: Callable[[], None]) -> None:
        """Return when every rank is in the group."""
        self._group = self._line.begin(self._make_group).wait(check)

    def _make_group(self) -> dist.ProcessGroup:
        # init_process_group would replace the learner's default group; torch has no public constructor of a
        # second, independent world.
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
        assert isinstance(group, dist.ProcessGroup)  # rank 0 is a member
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def start(self, bucket: Bucket) -> "UnderWay[None]":
        """Begin to send one bucket, after all earlier ones. Its bytes must stay until the result is there."""
        return self._line.begin(lambda: self._broadcast_bucket(bucket.bytes))

    def _broadcast_bucket(self, flat: Tensor) -> None:
        with platform.side_stream(flat.device):
            dist.broadcast(flat, src=0, group=self._group)

    def close(self) -> None:
        self._line.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)


class UnderWay(Generic[T]):
    """The result of work in another thread."""

    def __init__(self, result: Future[T]):
        self._result = result

    def wait(self, check: Callable[[], None]) -> T:
        """The result of the work. ``check()`` is called every 50 ms until then; its exception ends the wait, but
        not the work."""
        while True:
            try:
                return self._result.result(timeout=CHECK_EVERY_S)
            except TimeoutError:
                if self._result.done():  # in the meantime, or with a TimeoutError of its own
                    return self._result.result()
                check()


class Line:
    """Runs work in order in a daemon thread, which, unlike an executor's, does not keep the process from ending
    when work never ends (a receiver is gone).
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Callable[[], object], Future] | None] = SimpleQueue()
        threading.Thread(target=self._run_works, name="weight-transfer", daemon=True).start()

    def begin(self, work: Callable[[], T]) -> UnderWay[T]:
        """Run ``work()`` after all earlier work has ended or failed."""
        result: Future[T] = Future()
        self._works.put((work, result))
        return UnderWay(result)

    def close(self) -> None:
        """End the thread after all work that was begun."""
        self._works.put(None)

    def _run_works(self) -> None:
        while (item := self._works.get()) is not None:
            work, result = item
            try:
                result.set_result(work())
            except BaseException as error:  # the caller's thread gets it
                result.set_exception(error)
            del item, work, result  # they hold the last bucket's memory
