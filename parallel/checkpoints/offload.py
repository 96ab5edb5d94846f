"""Offloading of a learner's tensors to host memory and back, without replacing any tensor object.

Parameters, gradients and optimizer state are views of few storages (Megatron's buffers). A storage is emptied
in place and filled again, so that all views stay valid.
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
    """Tensors that are offloaded until ``restore``. Until then their storages are empty and must not be used.

    Gradients are not kept: the next backward pass begins by setting its buffers to zero.

    Args:
        chunks: of the model.
        trained: the chunks as Megatron wraps them; empty without an ``optimizer``.
    """

    def __init__(
        self, chunks: Sequence[Module], trained: Sequence[DistributedDataParallel], optimizer: Any | None
    ):
        if optimizer is not None:
            optimizer.zero_grad()  # drops its own copies of the gradients, as the next backward pass would
        gradients = _distinct_storages(buffer.grad_data for buffer in _buffers(trained))
        kept = _distinct_storages(_lasting_tensors(chunks, trained, optimizer))
        self._kept = [(storage, _host_copy(storage)) for key, storage in kept.items() if key not in gradients]
        self._gradients = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage, _ in (*self._kept, *self._gradients):
            storage.resize_(0)
        platform.return_free_memory()

    def restore(self) -> None:
        """Fill all storages: bitwise as before, gradients with zeros."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes_of(storage).zero_()


def _buffers(trained: Sequence[Any]) -> Iterator[Any]:
    """Megatron's buffers of the wrapped chunks."""
    for chunk in trained:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _lasting_tensors(
    chunks: Sequence[Module], trained: Sequence[DistributedDataParallel], optimizer: Any | None
) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    yield from (buffer.param_data for buffer in _buffers(trained) if buffer.param_data is not None)
    for part in optimizer_parts(optimizer) if optimizer is not None else ():
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _distinct_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The distinct storages by their identities, of tensors on this process's device (an optimizer may count
    steps on the host)."""
    device = platform.device().type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return {storage._cdata: storage for storage in storages}


def _host_copy(storage: UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=platform.has_cuda())
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
