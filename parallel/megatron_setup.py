"""What Megatron-Core 0.16 needs before its first use: import this module before ``megatron.core``, on every platform.

On CPU and CUDA alike it silences warnings about absent kernels and repairs the distributed optimizer's checkpoints; without CUDA
``parallel.megatron_cpu`` puts its stand-ins in place besides, first.
"""

import warnings

import torch

# Before the imports below, which warn.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|dynamic_context|script_method|custom_fwd|custom_bwd).*")
# Of every expert under sequence parallelism: experts are not split, whatever the rest of the layer is.
warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel size is 1.")

import parallel.megatron_cpu  # noqa: E402, F401


def _repair_distributed_optimizer() -> None:
    """Torch's AdamW keeps a ``step`` tensor per parameter; Megatron's distributed optimizer loses it, then shares one.

    Without this, loading a checkpoint fails with KeyError('step'), or (one tensor shared by all parameters) every parameter
    advances the step of all others, silently. TE's and Apex's Adam keep ``step`` elsewhere and pass through unchanged.
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


def install() -> None:
    """Put the repairs in place, once. Called on import."""
    if not getattr(torch, "_tandem_megatron_repaired", False):
        torch._tandem_megatron_repaired = True
        _repair_distributed_optimizer()


install()
