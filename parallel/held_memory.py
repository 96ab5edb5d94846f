"""What torch really holds on a rank of the learner, for the arithmetic of ``parallel/planning/memory.py`` to be compared
with: in tests, and by ``tandem selftest``."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parallel.engine import MegatronEngine
from parallel.megatron.optimizer import own_tensors


class _Kept:
    """A tensor that autograd keeps, from its saving until the node that saved it is freed."""

    def __init__(self, tensor: Tensor, count: "KeptBytes"):
        self.tensor, self.count = tensor, count
        count.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self.count.remove(self.tensor.untyped_storage())


class KeptBytes:
    """Bytes of the storages that autograd keeps inside ``watch``, each once, parameters left out; and their
    peak."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.left_out = {p.untyped_storage().data_ptr() for p in parameters}
        self.uses: dict[int, int] = {}
        self.now = self.peak = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if place not in self.left_out:
            self.uses[place] = self.uses.get(place, 0) + 1
            self.now += storage.nbytes() if self.uses[place] == 1 else 0
            self.peak = max(self.peak, self.now)

    def remove(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if place not in self.left_out:
            self.uses[place] -= 1
            self.now -= storage.nbytes() if self.uses[place] == 0 else 0

    def watch(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor
        )


def lasting_bytes(engine: MegatronEngine) -> dict[str, int]:
    """Bytes of an engine with an optimizer, by the names of ``LearnerMemory``."""
    parameters: list[Any] = [p for chunk in engine.chunks for p in chunk.parameters()]
    return {
        "parameters": _bytes_of(parameters),
        "gradients": _bytes_of(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": _bytes_of(own_tensors(engine._optimizer, parameters)),
    }


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
