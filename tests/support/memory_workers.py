"""What torch really holds on a rank of the learner, for the planner's arithmetic to be compared with."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema.layout import LayoutConfig
from parallel.checkpoints.checkpoint import optimizer_parts
from parallel.engine import MegatronEngine
from tests.support.megatron_workers import make_batch, make_engine, weighted_loss


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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _parameters(engine: MegatronEngine) -> list[Tensor]:
    return [p for chunk in engine.chunks for p in chunk.parameters()]


def _states(engine: MegatronEngine) -> Iterable[Tensor]:
    """Moments, steps and float32 weights, but no parameter of the model itself."""
    own = {p.untyped_storage().data_ptr() for p in _parameters(engine)}
    for part in optimizer_parts(engine._optimizer):
        inner = part.optimizer
        found = [p for group in inner.param_groups for p in group["params"]]
        found += [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        yield from (t for t in found if t.untyped_storage().data_ptr() not in own)


def work_memory(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What one update of each job's engine holds on this rank, in bytes. A job has a folder, a layout, a
    dtype, ...: see ``_measure``.

    Starting processes costs more than the work, so all layouts of as many ranks run in one set of them.
    """
    from megatron.core import parallel_state  # after parallel.megatron.setup

    found = {}
    for name, job in jobs.items():
        found[name] = _measure(**job)
        parallel_state.destroy_model_parallel()
    return found


def _measure(
    folder: Path,
    layout: dict[str, Any],
    *,
    lengths: list[int],
    microbatches: int,
    vocab: int,
    **settings: Any,
) -> dict[str, int]:
    """``lengths`` are those of each micro-batch's sequences; ``settings`` are ``make_engine``'s."""
    engine = make_engine(folder, layout=LayoutConfig(**layout), **settings)
    batches = [make_batch(lengths, vocab=vocab) for _ in range(microbatches)]
    kept = KeptBytes(_parameters(engine))
    with kept.watch():
        engine.update(batches, weighted_loss, temperature=1.0)
    parameters = _parameters(engine)
    return {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": bytes_of(_states(engine)),
        "activations": kept.peak,
        "left": kept.now,
        "tokens": batches[0].num_tokens,
    }
