"""Offloading of a learner's tensors to host memory and back, without replacing any tensor object.

Parameters, gradients and optimizer state are views of few storages (Megatron's buffers). A storage is emptied
in place and filled again, so that all views stay valid.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from parallel.megatron import platform

BLOCK_BYTES = 2**26
"""torch rounds every pinned block up to a power of two, so that one for each storage could take twice its size."""


class Offloaded:
    """Tensors that are offloaded until ``restore``. Until then their storages are empty and must not be used.

    ``dropped``: gradients, whose bytes are not kept. The next backward pass begins by setting its buffers to zero. The
    optimizer has no copies of them, as they are float32 already.
    """

    def __init__(self, tensors: Iterable[Tensor], dropped: Iterable[Tensor] = ()):
        gradients = _distinct_storages(dropped)
        kept = _distinct_storages(tensors)
        self._kept = [(storage, storage.nbytes()) for storage in kept.values()]
        self._blocks = _host_blocks(sum(size for _, size in self._kept))
        for storage, there, here in self._places():
            here.copy_(_bytes_of(storage)[there])
        self._gradients = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage, _ in (*self._kept, *self._gradients):
            storage.resize_(0)
        platform.return_free_memory()

    def restore(self) -> None:
        """Fill all storages, bitwise as before, but for gradients, whose bytes may be any."""
        for storage, size in self._kept:
            storage.resize_(size)
        for storage, there, here in self._places():
            _bytes_of(storage)[there].copy_(here)
        for storage, size in self._gradients:
            storage.resize_(size)

    def _places(self) -> Iterator[tuple[UntypedStorage, slice, Tensor]]:
        """The parts of storages, end to end, and the bytes of the blocks that each takes."""
        taken = 0
        for storage, size in self._kept:
            done = 0
            while done < size:
                number, start = divmod(taken + done, BLOCK_BYTES)
                count = min(size - done, BLOCK_BYTES - start)
                yield storage, slice(done, done + count), self._blocks[number][start : start + count]
                done += count
            taken += size


def _distinct_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The distinct storages by their identities, of tensors on this process's device (an optimizer may count
    steps on the host)."""
    device = platform.device().type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return {storage._cdata: storage for storage in storages}


def _host_blocks(size: int) -> list[Tensor]:
    sizes = [min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES)]
    return [torch.empty(count, dtype=torch.uint8, pin_memory=platform.has_cuda()) for count in sizes]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
