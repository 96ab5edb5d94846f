"""Megatron's optimizer from a run's config: AdamW, a loss scale for float16, and the learning-rate schedule."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from configs.schema.learner import OptimizerConfig
from parallel.megatron import platform

FIRST_LOSS_SCALE, LEAST_LOSS_SCALE = 2.0**16, 1.0
"""Loss scales of a float16 model. Megatron ignores one overflow, then halves the scale on each. After a thousand
steps without one it doubles the scale, and ignores one again."""


def build_optimizer(
    trained: Sequence[Module], config: OptimizerConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW for a model's chunks inside Megatron's DistributedDataParallel. ``dtype`` is the model's.

    It is torch's (``setup``). On GPUs each number is read and written once, by one kernel; the default there takes as much
    memory again as a moment of every parameter. On CPU it updates one parameter after another.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            initial_loss_scale=FIRST_LOSS_SCALE,
            min_loss_scale=LEAST_LOSS_SCALE,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
        ),
        trained,
    )
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            group["foreach"], group["fused"] = False, platform.has_cuda()
    return optimizer


def optimizer_parts(optimizer) -> list:
    """The optimizers inside a chained one, or the optimizer itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def optimizer_tensors(optimizer) -> Iterator[Tensor]:
    """What an optimizer updates, and its state. Of a float32 model the former are the model's own parameters."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def own_tensors(optimizer, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """``optimizer_tensors`` but for the model's own ``parameters``: moments, steps and float32 weights."""
    taken = {p.untyped_storage()._cdata for p in parameters}
    return (t for t in optimizer_tensors(optimizer) if t.untyped_storage()._cdata not in taken)


def gradient_buffers(trained: Sequence[Any]) -> Iterator[Tensor]:
    """The gradients of a model's chunks inside Megatron's DistributedDataParallel."""
    for chunk in trained:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def build_scheduler(optimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Step k of n (from 1) runs at lr k / warmup while warming up. A decaying schedule would reach min_lr at step n + 1: at
    step n the default min_lr, 0, would teach nothing. The schema has warm-ups end before that.

    Without a warm-up these are the rates of Megatron-LM and transformers. With one, the first step of theirs has rate 0: the n
    steps here have the rates of their schedule of n + 1 steps, from its second step on.
    """
    warmup_steps = max(config.warmup_steps, 1)  # the first step has lr
    decay_steps = max(total_steps, warmup_steps) + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        # On resume the running config decides the schedule, and the checkpoint the number of steps.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
