"""Megatron's process groups of a layout, and this process's ranks in them."""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from configs.schema.layout import LayoutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Ranks of this process. Megatron numbers tensor-parallel neighbours first, then context, data, pipeline."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    tp_rank: int
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    of_one_dp_rank: tuple[Any, ...]
    """Process groups: sums over each of them in turn are sums over all processes that share one data-parallel rank's batch."""

    @property
    def is_stage_first(self) -> bool:
        """Whether this rank is the first of its pipeline stage, which writes and sends its weights. Stages are consecutive
        ranks."""
        return self.rank % (self.world_size // self.pp_size) == 0

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of another process of this run."""
        inner = self.world_size // (self.dp_size * self.pp_size)
        return rank // inner % self.dp_size


def join_groups(layout: LayoutConfig, seed: int, timeout_s: float) -> None:
    """Build Megatron's process groups once per process. A second engine must have the same layout, and shares
    the first's deadline."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
        model_parallel_cuda_manual_seed(seed)
        return
    running = _running_sizes()
    asked = {name: getattr(layout, name) for name in running}
    if asked != running:
        raise ValueError(
            f"this process already runs a layout of {_text(running)}; a second engine cannot have {_text(asked)}"
        )


def _text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def destroy_groups() -> None:
    """End Megatron's process groups, of which each has threads and sockets, for another layout in this process. No engine
    may be left. A collective."""
    dist.barrier()  # another rank may still read from this one
    for group in parallel_state._global_process_group_list or []:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _running_sizes() -> dict[str, int]:
    """The sizes that, with the number of processes, decide Megatron's process groups."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def groups_of_this_process() -> Groups:
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_group=parallel_state.get_data_parallel_group(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        of_one_dp_rank=(
            parallel_state.get_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        ),
    )
