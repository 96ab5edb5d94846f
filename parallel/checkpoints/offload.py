"""A learner's tensors in host memory while others use its device, and back, with every tensor object as
Megatron made it.

Parameters, gradients and optimizer state are views of few storages (Megatron's buffers). A storage is emptied
in place and filled again, so whatever refers to it, by whatever view, goes on doing so.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.distributed import DistributedDataParallel

from parallel.checkpoints.checkpoint import optimizer_parts
from parallel.megatron import platform


class Offloaded:
    """Between being made and ``restore``, nothing may touch the engine's tensors: their storages are empty.

    Gradients are not kept: the next backward pass begins by setting its buffers to zero.

    Args:
        chunks: of the model. trained: the same as Megatron wraps them, empty where there is no ``optimizer``.
    """

    def __init__(
        self, chunks: Sequence[Module], trained: Sequence[DistributedDataParallel], optimizer: Any | None
    ):
        if optimizer is not None:
            optimizer.zero_grad()  # its own copies of the gradients, which the next backward pass would throw away
        gradients = _storages(
            buffer.grad_data
            for chunk in trained
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        kept = _storages(_lasting(chunks, trained, optimizer))
        self._kept = [(storage, _host_copy(storage)) for key, storage in kept.items() if key not in gradients]
        self._gradients = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage, _ in (*self._kept, *self._gradients):
            storage.resize_(0)
        platform.return_free_memory()

    def restore(self) -> None:
        """Everything bitwise as it was; gradients zero."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes_of(storage).zero_()


def _lasting(
    chunks: Sequence[Module], trained: Sequence[DistributedDataParallel], optimizer: Any | None
) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    for chunk in trained:
        yield from (
            buffer.param_data
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            if buffer.param_data is not None
        )
    for part in optimizer_parts(optimizer) if optimizer is not None else ():
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Each once, by what identifies it; of tensors on this process's device alone (an optimizer may count its
    steps on the host)."""
    device = platform.device().type
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return {storage._cdata: storage for storage in found}


def _host_copy(storage: UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=platform.has_cuda())
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
