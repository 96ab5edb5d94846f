"""Weights from learner to servers: full Hugging Face tensors, flattened into buckets, and their broadcast. Matrices that are
rounded to a grid are packed in their bucket (``numerics/grids.py``), if the servers accept that.

Each pipeline stage of the learner has a process group with the servers. Rank 0, the sender, is the first rank of
the stage; the servers' tensor-parallel ranks follow, replica by replica. The groups have a rendezvous store of
their own, so that a server that dies can never hang the training collectives. ``trainer/weight_sync.py``
decides when to send, and talks HTTP.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _abort_process_group,
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)

from configs.schema.rollout import Precision
from parallel.megatron import platform
from parallel.planning.memory import BUCKET_BYTES, NUM_BUFFERS
from parallel.weights.hf_names import is_kept_float32
from parallel.weights.precision import is_packed, is_rounded, packed_form, round_into

T = TypeVar("T")

ALONE_BYTES = {"cuda": 16 * 2**20, "cpu": 2**20}
"""Size by device from which a unit is a bucket by itself, and is copied on neither side. Smaller ones share a
bucket, since each broadcast costs a round trip."""
PACKED_PART = 4
"""Buckets of packed matrices are smaller by this. Their numbers take as long to pack as those of four times the bytes to
send, and the receivers wait meanwhile."""
CHECK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive tensors of one dtype as one flat byte string, in the order of ``names``; packed ones among them.

    With one dtype per bucket every byte offset is a multiple of the item size, as the receiver's views need.
    """

    names: list[str]
    dtype: torch.dtype
    shapes: list[list[int]]
    bytes: Tensor
    """uint8 [sum of sizes]."""
    is_last: bool


class Buffers:
    """Memory for ``NUM_BUFFERS`` buckets in turns. So for the buckets of small tensors, and so for those of one unit, which
    may come between them.

    It is kept between transfers: on CPU new memory costs as much as the copy into it.
    """

    def __init__(self, device: str) -> None:
        """device: its type."""
        self._num = NUM_BUFFERS[device]
        self._kept: dict[bool, list[Tensor]] = {False: [], True: []}
        """The one taken last comes first."""

    def take(self, size: int, place: torch.device, *, is_alone: bool = False) -> Tensor:
        """uint8 [at least size]; its content stays until the ``NUM_BUFFERS``-th next call for the same kind of bucket."""
        kept = self._kept[is_alone]
        flat = kept.pop() if len(kept) == self._num else None
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=torch.uint8, device=place)
        kept.insert(0, flat)
        return flat

    def release(self) -> None:
        """Free a GPU's memory for training between transfers; its allocator gives it back at once later."""
        for kept in self._kept.values():
            kept[:] = [flat for flat in kept if flat.device.type == "cpu"]


@dataclass(slots=True)
class PlannedBucket:
    is_alone: bool
    """Whether it is one unit by itself. Of the others one is filled at a time."""
    tensors: list[tuple[str, Sequence[int]]] = field(default_factory=list)
    """(name, shape) in the order of the export."""
    last_unit: int = 0
    """The unit of the export that completes it."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(shape) for _, shape in self.tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Which tensors are sent in which buckets. It is known before the first tensor is gathered."""

    buckets: list[PlannedBucket]
    """In the order of sending."""
    dtype: torch.dtype
    """As which they are sent, but for tensors that are float32 everywhere."""
    precision: Precision | None
    """To which they are rounded."""
    packs: bool
    """Whether matrices rounded to a grid are sent as their scales and a byte for each number
    (``numerics/grids.py``)."""

    @property
    def names(self) -> list[str]:
        """In the order of sending."""
        return [name for bucket in self.buckets for name in bucket.names]

    @property
    def shapes(self) -> list[list[int]]:
        return [shape for bucket in self.buckets for shape in bucket.shapes]

    @property
    def packed_to(self) -> Precision | None:
        """The grid of packed matrices, if there are any."""
        return self.precision if self.packs else None

    def dtype_of(self, name: str) -> torch.dtype:
        """As which the tensor is sent. All tensors of a bucket have the same."""
        return _dtype_of(name, self.dtype)

    def form_of(self, name: str) -> str:
        """As which the tensor is announced to servers with Tandem's plugin: ``bfloat16``, or ``bfloat16/int8`` if it is
        packed."""
        dtype = dtype_name(self.dtype_of(name))
        return f"{dtype}/{self.packed_to}" if is_packed(name, self.packed_to) else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """As requests name it."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_kept_float32(name) else dtype


def _bytes_of(name: str, shape: Sequence[int], dtype: torch.dtype, packed_to: Precision | None) -> int:
    form = packed_form(name, shape, packed_to)
    return torch.Size(shape).numel() * _dtype_of(name, dtype).itemsize if form is None else form.nbytes


def plan_transfer(
    units: Iterable[Sequence[tuple[str, Sequence[int]]]],
    *,
    dtype: torch.dtype,
    device: str,
    precision: Precision | None = None,
    packs: bool = False,
    max_bytes: int | None = None,
    alone_bytes: int | None = None,
) -> TransferPlan:
    """Group units, each of one or several ``(name, shape)`` that lie together, into buckets.

    packs: whether the servers take packed matrices: those with Tandem's plugin do.

    A unit of ``alone_bytes`` or more, larger than a bucket, or of another dtype is one by itself. All others fill buckets of at most
    ``max_bytes``, past the large ones between them. None: ``BUCKET_BYTES`` and ``ALONE_BYTES`` of the device type.
    """
    packed_to = precision if packs else None
    part = 1 if packed_to is None else PACKED_PART
    max_bytes = max_bytes or BUCKET_BYTES[device] // part
    alone_bytes = alone_bytes or ALONE_BYTES[device] // part
    planned: list[PlannedBucket] = []
    filling: PlannedBucket | None = None
    free = 0
    for place, unit in enumerate(chain.from_iterable(_apart(unit, packed_to) for unit in units)):
        sent_as = _dtype_of(unit[0][0], dtype)
        size = sum(_bytes_of(name, shape, dtype, packed_to) for name, shape in unit)
        if size >= min(alone_bytes, max_bytes) or sent_as != dtype:
            bucket = PlannedBucket(is_alone=True)
            planned.append(bucket)
        else:
            if filling is None or size > free:
                filling, free = PlannedBucket(is_alone=False), max_bytes
                planned.append(filling)
            free -= size
            bucket = filling
        bucket.tensors.extend(unit)
        bucket.last_unit = place
    planned.sort(key=lambda bucket: bucket.last_unit)
    return TransferPlan(buckets=planned, dtype=dtype, precision=precision, packs=packs)


def _apart(
    unit: Sequence[tuple[str, Sequence[int]]], packed_to: Precision | None
) -> Iterable[Sequence[tuple[str, Sequence[int]]]]:
    """Tensors that are packed no longer lie together, and the receivers need not wait for the next one to be packed."""
    if any(is_packed(name, packed_to) for name, _ in unit):
        return [[tensor] for tensor in unit]
    return [unit]


def make_buckets(
    tensors: Iterable[tuple[str, Tensor]], plan: TransferPlan, buffers: Buffers
) -> Iterator[Bucket]:
    """The buckets of ``plan``, each as soon as the last of its tensors has come from ``tensors``: the planned names
    with full tensors, in the order of the export.

    Tensors that lie one after another in memory are sent from there. Others are converted and copied into buffers, or
    rounded or packed into them: a bucket's bytes stay until the ``NUM_BUFFERS``-th next bucket is requested.

    Raises ValueError if a tensor was not planned, or is missing.
    """
    filling_of: dict[str, _Filling] = {}
    for bucket in plan.buckets:
        filling = _Filling(plan, bucket, partial(buffers.take, is_alone=bucket.is_alone))
        filling_of |= dict.fromkeys(filling.names, filling)
    for name, tensor in tensors:
        filling = filling_of.pop(name, None)
        if filling is None or not filling.fits(name, tensor):
            raise ValueError(f"{name} of shape {list(tensor.shape)} was not planned")
        filling.add(name, tensor)
        if name == filling.names[-1]:
            yield filling.bucket(is_last=not filling_of)
    if filling_of:
        raise ValueError(f"{len(filling_of)} planned tensors did not come, such as {next(iter(filling_of))}")


class _Filling:
    """A bucket in the making. Its tensors come in the order of its names."""

    def __init__(
        self, plan: TransferPlan, bucket: PlannedBucket, take: Callable[[int, torch.device], Tensor]
    ):
        """take: gives memory, see ``Buffers.take``."""
        self._take = take
        self.names, self._shapes = bucket.names, bucket.shapes
        self._plan, self._dtype = plan, plan.dtype_of(self.names[0])
        self._sizes = [_bytes_of(name, shape, plan.dtype, plan.packed_to) for name, shape in bucket.tensors]
        self._size = sum(self._sizes)
        self._number = self._filled = 0
        self._first: Tensor | None = None
        """Begins the memory in which all tensors so far lie; None once they are copied."""
        self._buffer: Tensor | None = None

    def fits(self, name: str, tensor: Tensor) -> bool:
        return (name, list(tensor.shape)) == (self.names[self._number], self._shapes[self._number])

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach()
        is_as_it_is = not is_rounded(name, self._plan.precision)
        size = self._sizes[self._number]
        if self._number == 0 and is_as_it_is and self._can_stay(tensor):
            self._first = tensor
        elif self._first is not None and not (is_as_it_is and self._follows(self._first, tensor)):
            self._part(0, self._filled, tensor.device).copy_(_bytes_from(self._first, self._filled))
            self._first = None
        if self._first is None:
            self._write(self._part(self._filled, size, tensor.device), name, tensor)
        self._number, self._filled = self._number + 1, self._filled + size

    def _write(self, part: Tensor, name: str, tensor: Tensor) -> None:
        precision = self._plan.precision
        form = packed_form(name, tensor.shape, self._plan.packed_to)
        if form is not None:
            form.pack_into(part, tensor)
        elif precision is not None and is_rounded(name, precision):
            round_into(part.view(self._dtype).view(tensor.shape), tensor, precision)
        else:
            part.view(self._dtype).view(tensor.shape).copy_(tensor)

    def _can_stay(self, tensor: Tensor) -> bool:
        return tensor.dtype == self._dtype and tensor.is_contiguous()

    def _follows(self, first: Tensor, tensor: Tensor) -> bool:
        """Whether the tensor lies after the ones that were added."""
        is_next = tensor.data_ptr() == first.data_ptr() + self._filled
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        return self._can_stay(tensor) and same and is_next

    def _part(self, start: int, size: int, device: torch.device) -> Tensor:
        """uint8 [size]: these bytes of the bucket's memory."""
        if self._buffer is None:
            self._buffer = self._take(self._size, device)
        return self._buffer[start : start + size]

    def bucket(self, *, is_last: bool) -> Bucket:
        if self._first is not None:
            flat = _bytes_from(self._first, self._size)
        else:
            assert self._buffer is not None
            flat = self._buffer[: self._size]
        return Bucket(names=self.names, dtype=self._dtype, shapes=self._shapes, bytes=flat, is_last=is_last)


def _bytes_from(first: Tensor, size: int) -> Tensor:
    """uint8 [size]: the memory from the tensor's beginning on."""
    flat = first.as_strided((size // first.element_size(),), (1,), first.storage_offset())
    return flat.view(torch.uint8)


class WeightBroadcaster:
    """Rank 0 of a transfer group: create it, send the receivers its ``port`` over HTTP, ``join``, ``start`` each
    bucket, ``close``.

    ``join``, and ``wait`` on the result of ``start``, block until the receivers have done their part. A receiver
    that refuses never will, and reports that only in its HTTP answer: meanwhile ``check`` is called repeatedly,
    and ends the wait by an exception. ``address`` is this host's address for the receivers.
    """

    def __init__(
        self, *, world_size: int, backend: str, timeout_s: float, address: str = "127.0.0.1", group_name: str
    ):
        self._timeout = timedelta(seconds=timeout_s)
        # A store listens on every interface, unless it gets a listening socket. Port 0 leaves no moment in
        # which another process can take the port.
        listening = socket.create_server((address, 0))
        port, descriptor = listening.getsockname()[1], listening.detach()
        options = {"wait_for_workers": False, "master_listen_fd": descriptor}
        self._store = TCPStore(address, port, world_size, True, self._timeout, **options)
        self._backend, self._group, self._line, self._ends = backend, None, Line(), Line()
        self._newest: UnderWay[None] | None = None
        self._is_given_up = self._is_over = False
        self.address, self.port, self.world_size = address, port, world_size
        self.group_name = group_name

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

    def start(self, flat: Tensor) -> "UnderWay[None]":
        """Begin to send a bucket's bytes, after all earlier ones have begun. They must stay until the result is
        there. On CPU the next one meets its receivers while this one is sent."""
        begun = self._line.begin(lambda: self._broadcast(flat))
        self._newest = self._ends.begin(lambda: self._wait_to_the_end(begun))
        return self._newest

    def _broadcast(self, flat: Tensor) -> dist.Work | None:
        """None if it has ended."""
        if self._is_over:
            raise RuntimeError("the transfer was given up")
        with platform.side_stream(flat.device):
            return dist.broadcast(flat, src=0, group=self._group, async_op=flat.device.type == "cpu")

    def _wait_to_the_end(self, begun: "UnderWay[dist.Work | None]") -> None:
        """Keeps the group alive: when its last owner leaves it, gloo waits there for all unfinished
        broadcasts."""
        work = begun.wait(check=lambda: None)
        if work is not None:
            work.wait()

    def give_up(self, sign: str) -> None:
        """A receiver is gone or has refused: only ``close`` is left to do. Receivers look for the key ``sign`` in the
        group's store while they wait.

        What NCCL has under way is ended. Its kernels wait on the GPU for all receivers, and for them whatever waits for the
        whole device, such as a checkpoint. ``destroy_process_group`` would wait too. Broadcasts of gloo wait in a thread that
        nothing waits for.
        """
        if self._group is None or self._is_over:
            return
        _get_process_group_store(self._group).set(sign, "")
        self._is_given_up = True
        if self._newest is not None and not self._newest.has_ended:
            self._leave(self._group)

    def close(self) -> None:
        self._line.close()
        self._ends.close()
        if self._group is not None and not self._is_over:
            self._leave(self._group)

    def _leave(self, group: dist.ProcessGroup) -> None:
        self._is_over = True
        if self._is_given_up and self._backend == "nccl":
            _abort_process_group(group)
        else:
            dist.destroy_process_group(group)


class UnderWay(Generic[T]):
    """The result of work in another thread."""

    def __init__(self, result: Future[T]):
        self._result = result

    @property
    def has_ended(self) -> bool:
        return self._result.done()

    def wait(self, check: Callable[[], None]) -> T:
        """The result of the work. ``check()`` is called every 50 ms until then; its exception ends the wait, but
        not the work."""
        while not wait_for([self._result], timeout=CHECK_EVERY_S).done:
            check()
        return self._result.result()


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
