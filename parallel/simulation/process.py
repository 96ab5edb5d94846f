"""This process as one rank of a run that has no other: its process group, its device, and the weights that are not there.

The environment variable ``TANDEM_SIMULATED`` must be set before anything of ``parallel.megatron`` is imported.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import parallel.engine_base
from parallel.megatron import platform
from parallel.megatron.groups import destroy_groups
from parallel.planning.architecture import architecture_of
from parallel.simulation.device import META, Memory, SimulatedDevice
from parallel.simulation.kernels import fused
from parallel.simulation.ranks import Collectives
from parallel.weights import hf_conversion
from parallel.weights.hf_files import HuggingFaceWeights
from parallel.weights.hf_names import all_hf_names, hf_shapes


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[tuple[SimulatedDevice, Collectives]]:
    """Inside, this process is rank ``rank`` of ``world_size``."""
    if platform.device() != META:
        raise RuntimeError("the device is a real one; set TANDEM_SIMULATED before anything is imported")
    collectives = Collectives()
    device = SimulatedDevice(collectives)
    new_group = dist.new_group

    def fake_group(*args, backend=None, pg_options=None, **kwargs):
        return new_group(*args, backend="fake", **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    stand_ins = [
        (dist, "new_group", fake_group),
        # What another rank would send is not known. A rank has what it has itself.
        (dist, "broadcast_object_list", lambda objects, *args, **kwargs: None),
        # torch's own asks for the device's backend, to send messages together.
        (dist, "batch_isend_irecv", lambda messages: [m.op(m.tensor, m.peer, m.group) for m in messages]),
        (hf_conversion, "HuggingFaceWeights", WeightsWithoutNumbers),
        (parallel.engine_base, "Offloaded", partial(_OnHost, device.memory)),
        (torch, "tensor", partial(_tensor, torch.tensor)),
        # Whether many parameters are updated in one call follows from the device.
        (sys.modules[Optimizer.__module__], "_get_foreach_kernels_supported_devices", lambda: ["meta"]),
    ]
    with ExitStack() as inside:
        for owner, name, stand_in in stand_ins:
            inside.enter_context(patch.object(owner, name, stand_in))
        inside.callback(dist.destroy_process_group)
        inside.callback(destroy_groups)
        inside.enter_context(device)
        inside.enter_context(fused(device))
        yield device, collectives


class _OnHost:
    """``Offloaded`` without bytes."""

    def __init__(self, memory: Memory, tensors: Iterable[Tensor]):
        self._memory, self._tensors = memory, list(tensors)
        memory.to_host(self._tensors)

    def restore(self) -> None:
        self._memory.from_host(self._tensors)


def _tensor(make: Callable[..., Tensor], data: Any, **kwargs) -> Tensor:
    """``torch.tensor``, which reads numbers past the device's dispatch."""
    read = tree_map_only(Tensor, lambda x: x.item() if x.is_meta and not x.dim() else x, data)
    return make(read, **kwargs)


class WeightsWithoutNumbers(HuggingFaceWeights):
    """The tensors that a folder's config.json asks for, on the simulated device. No file is read."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        architecture = architecture_of(folder)
        self._names, self._shapes = all_hf_names(architecture), hf_shapes(architecture)

    @property
    def names(self) -> set[str]:
        return set(self._names)

    def read(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device=META)
