"""Engines whose tensors leave the device and come back (test_colocated). Functions named ``work_*`` run in
every rank."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema.layout import LayoutConfig
from parallel.engine import MegatronEngine
from parallel.megatron.optimizer import optimizer_parts, own_tensors
from tests.support.megatron_workers import make_batch, make_engine, weighted_loss, weights_of


def work_offloaded_updates(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (dtype and optimizer), three updates that stay on the device, three with an offload before and after
    each, and the same with a state that is there only in the steps."""
    return [
        {way: _updates(folder, case, way) for way in ("resident", "offloaded", "without state")}
        for case in cases
    ]


def _updates(folder: Path, case: dict[str, Any], way: str) -> dict[str, Any]:
    offloads = way != "resident"
    engine = make_engine(folder, layout=LayoutConfig(dp="auto"), offload=way == "without state", **case)
    batch = make_batch([12, 9, 7, 11])
    mine = batch.select([row for row in range(4) if row % engine.groups.dp_size == engine.groups.dp_rank])
    found: dict[str, Any] = {"norms": [], "logprobs": [], "away": [], "unchanged": []}
    for _ in range(3):
        if offloads:
            _there_and_back(engine, found)
        found["norms"].append(engine.update([mine], weighted_loss, temperature=0.7).grad_norm)
        if offloads:
            _there_and_back(engine, found)
        found["logprobs"].append(engine.logprobs([mine], temperature=0.7)[0])
    return found | {"weights": weights_of(engine), "state": lasting_tensors(engine)}


def state_bytes(engine: MegatronEngine) -> int:
    own = own_tensors(engine._optimizer, (p for chunk in engine.chunks for p in chunk.parameters()))
    return sum(t.untyped_storage().nbytes() for t in own)


def _there_and_back(engine: MegatronEngine, found: dict[str, Any]) -> None:
    before, addresses = lasting_tensors(engine), [id(tensor) for tensor in tensors_of(engine)]
    engine.offload()
    engine.offload()  # a second time: nothing is lost
    found["away"].append(bytes_there(engine))
    engine.restore()
    if engine._training is not None and engine._training.optimizer.offload:
        found["away"].append(state_bytes(engine))
    after = lasting_tensors(engine)
    found["unchanged"].append(
        len(before) == len(after)
        and all(map(torch.equal, before, after))
        and addresses == [id(tensor) for tensor in tensors_of(engine)]
    )


def tensors_of(engine: MegatronEngine) -> list[Tensor]:
    """Weights, optimizer's weights and state, gradients."""
    return [
        *_lasting(engine),
        *(p.main_grad for chunk in engine.chunks for p in chunk.parameters() if hasattr(p, "main_grad")),
    ]


def _lasting(engine: MegatronEngine) -> list[Tensor]:
    found = [tensor for chunk in engine.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    for part in optimizer_parts(engine._optimizer) if engine._optimizer is not None else ():
        found += [p for group in part.optimizer.param_groups for p in group["params"]]
        found += [
            v for state in part.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
        ]
    return found


def lasting_tensors(engine: MegatronEngine) -> list[Tensor]:
    """Copies of all but the gradients."""
    if engine._optimizer is None:
        return [tensor.detach().clone() for tensor in _lasting(engine)]
    with engine._state_there():
        return [tensor.detach().clone() for tensor in _lasting(engine)]


def bytes_there(engine: MegatronEngine) -> int:
    """Bytes of every storage that the engine's tensors and the optimizer's gradients lie in."""
    tensors = tensors_of(engine)
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
