"""Preparation of Megatron-Core 0.16: import this module before ``megatron.core``, on every platform.

It silences warnings about absent kernels, hides a Transformer Engine that does not import and trackers that nothing calls, chooses
torch's AdamW and norm of gradients, and repairs the distributed optimizer's checkpoints. Without CUDA ``parallel.megatron.cpu`` first
puts its stand-ins in place.
"""

import sys
import warnings
from typing import Any

import torch

# These filters must precede the imports below, which warn.
warnings.filterwarnings(
    "ignore", message=".*(Apex|Transformer Engine|dynamic_context|script_method|custom_fwd|custom_bwd).*"
)
# Megatron warns for every expert under sequence parallelism, since experts are never split.
warnings.filterwarnings(
    "ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel size is 1."
)

import parallel.megatron.transformer_engine  # noqa: E402  # isort: skip - before the stand-ins, which import Megatron

UNUSED = ("wandb", "torch.utils.tensorboard")
"""If they are installed, Megatron imports them (a third of its import time) for its own loggers, which Tandem
never calls."""
_hidden = [name for name in UNUSED if name not in sys.modules]
sys.modules |= dict.fromkeys(_hidden)  # to import them raises ImportError
import parallel.megatron.cpu  # noqa: E402, F401

import megatron.core  # noqa: E402, F401  # isort: skip

for _name in _hidden:
    del sys.modules[_name]


def _choose_torchs_optimizer() -> None:
    """torch's AdamW everywhere. Where Megatron finds Transformer Engine or Apex it would take their FusedAdam, whose
    step count is of a group of parameters, not of each: a checkpoint would then load only where it was written.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = True
    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"):
        setattr(distrib_optimizer, name, False)


def _repair_distributed_optimizer() -> None:
    """Keep the ``step`` tensors of torch's AdamW, one per parameter, through Megatron's distributed optimizer,
    which loses them, then shares one.

    Without this, loading a checkpoint fails with KeyError('step'), or all parameters share one tensor and each
    advances the step of all others, silently.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def set_states_with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return set_states(self, model_param, tensors)

    def load_with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps


def _repair_checkpoints_of_several_buckets() -> None:
    """Restore the padding between buckets, without which the distributed optimizer gathers its state, though it
    then cuts parameters out at their padded offsets.

    A copy of a tied embedding on another pipeline stage has a bucket of its own: every parameter after the
    first bucket would silently be saved as a shifted piece of its neighbours.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    gather: Any = DistributedOptimizer.get_parameter_state_dp_zero

    def gather_with_padding(self, *args, **kwargs):
        state = gather(self, *args, **kwargs)
        for i, buffer in enumerate(self.buffers if state is not None else ()):
            for tensors in state[i].values():
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[key] = _with_padding(tensors[key], buffer)
        return state

    DistributedOptimizer.get_parameter_state_dp_zero = gather_with_padding


def _with_padding(flat: torch.Tensor, buffer) -> torch.Tensor:
    """The buckets of a buffer at their own offsets; ``flat`` has them end to end."""
    if len(buffer.buckets) == 1:
        return flat
    padded = flat.new_zeros(buffer.numel)
    parts = flat.split([bucket.numel_unpadded for bucket in buffer.buckets])
    for bucket, part in zip(buffer.buckets, parts, strict=True):
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = part
    return padded


def _take_gradients_together() -> None:
    """Norm and clipping of all gradients by few operations. Megatron's own, which replaces Apex's, makes the
    host read a number of each parameter from the device, and clips a copy of each gradient that it copies
    back."""
    from megatron.core.optimizer import clip_grads

    def norm(chunk_size, no_overflow, tensor_lists, per_tensor):
        return torch.nn.utils.get_total_norm(tensor_lists[0]).view(1), None

    def scale(chunk_size, no_overflow, tensor_lists, factor):
        source, target = tensor_lists
        assert all(one is other for one, other in zip(source, target, strict=True))
        if target:  # a stage of a pipeline may have no experts
            torch._foreach_mul_(target, factor)  # pyright: ignore[reportPrivateImportUsage]

    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = norm, scale


_choose_torchs_optimizer()
_repair_distributed_optimizer()
_repair_checkpoints_of_several_buckets()
_take_gradients_together()
