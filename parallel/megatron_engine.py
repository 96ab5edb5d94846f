"""The learner's engines: a policy's log-probs, a critic's values and the updates of either, of a Megatron-Core model on packed
micro-batches, over data- and tensor-parallel ranks.

Every method that touches weights is a collective: all ranks call it, in the same order. Micro-batches are this data-parallel
rank's own; tensor-parallel ranks of one data-parallel rank pass the same ones.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel.megatron_setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from configs.schema.layout import LayoutConfig
from configs.schema.learner import OptimizerConfig
from configs.schema.model import ModelConfig
from parallel import checkpoint, hf_conversion, platform
from parallel.layout import Architecture, read_hf_config, validate_layout
from parallel.megatron_model import LogprobGPTModel, PackedGPTModel, ValueGPTModel, build_model, build_value_model
from parallel.packing import PackedBatch

logger = logging.getLogger(__name__)

LossFunction = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, Any]]
"""(micro-batch, logprobs_T, entropy_T) -> (scalar loss, anything to be handed back)."""

ValueLossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, values_T) -> (scalar loss, anything to be handed back)."""

GradScale = Callable[[list[Any]], float]
"""(what this rank's losses handed back, one per micro-batch) -> one factor, the same on all ranks."""

_Forward = Callable[[Any, PackedBatch], Any]
"""(model, micro-batch) -> what the loss takes after the micro-batch: a tuple of tensors."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is NaN or infinite. Raised on all ranks, before any weight or optimizer state has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where this process stands."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    is_stage_first: bool
    """Whether this rank writes and sends the weights of its pipeline stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One optimizer step. ``grad_norm`` is the norm over all parameters before clipping; ``outputs`` one entry per micro-batch."""

    grad_norm: float
    lr: float
    outputs: list[Any]


class _Engine:
    """What a policy's engine and a critic's share: a model in Megatron-Core and, unless it is frozen, its optimizer.

    ``optimizer=None`` makes a frozen engine, which scores only. ``total_optimizer_steps`` is where the learning-rate schedule ends.
    Several engines may live in one process; they share one layout. There is no dropout: what the scoring pass computes and what
    ``update`` hands to its loss are bitwise equal for the same micro-batch and weights. ``timeout_s`` seconds, rounded up to whole
    minutes, is the deadline of collectives in Megatron's own groups, which do not take it from the default group.

    Needs ``platform.init_distributed`` first. Raises ValueError for a layout, model or schedule that does not fit.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig | None,
        *,
        build: Callable[..., PackedGPTModel],
        total_optimizer_steps: int,
        recompute: str,
        seed: int,
        timeout_s: float,
    ):
        hf_config = read_hf_config(model.path)
        layout = layout.resolved(dist.get_world_size())
        validate_layout(hf_config, layout, num_processes=dist.get_world_size())
        _join_groups(layout, seed, timeout_s)
        self.groups = _groups()
        self.source = model.path
        self.dtype = getattr(torch, model.dtype)
        self.model = build(model.path, hf_config, dtype=self.dtype, recompute=recompute if optimizer else "none")
        hf_conversion.load_hf([self.model], model.path)
        self._optimizer_config = optimizer
        if optimizer is None:
            self.model.requires_grad_(False)
            self._chunk = self.model
        else:
            self._build_optimizer(optimizer, total_optimizer_steps)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        # One bucket, reduced once after the last micro-batch: gradients are float32 sums whatever the model's dtype.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=config.distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self._chunk = DistributedDataParallel(self.model.config, ddp_config, self.model)
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
                use_distributed_optimizer=config.distributed,
            ),
            [self._chunk],
        )
        # AdamW's state exists from the start, so that a checkpoint has the same content before the first step and after it.
        checkpoint.initialise_optimizer_state(self._optimizer)
        self._scheduler = _scheduler(self._optimizer, config, total_steps)
        # The loss carries global weights: gradients are summed, never divided by token or rank counts.
        self.model.config.finalize_model_grads_func = lambda chunks, num_tokens=None, **rest: finalize_model_grads(chunks, None, **rest)

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def is_frozen(self) -> bool:
        return self._optimizer_config is None

    @torch.no_grad()
    def _score(self, microbatches: Sequence[PackedBatch], forward: _Forward) -> list:
        """What ``forward`` gives for each micro-batch. All ranks of a data-parallel group pass the same number of micro-batches."""
        self._chunk.eval()
        return self._run(microbatches, forward, None) if microbatches else []

    def _update(
        self, microbatches: Sequence[PackedBatch], forward: _Forward, loss_fn: Callable, grad_scale: GradScale | None
    ) -> UpdateResult:
        outputs = self._backward(microbatches, forward, loss_fn)
        if grad_scale is not None:
            self._scale_gradients(grad_scale(outputs))
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient's norm is {grad_norm}{self._bad_parameters()}; nothing was updated")
        return UpdateResult(grad_norm=grad_norm, lr=self._step(grad_norm), outputs=outputs)

    def _backward(self, microbatches: Sequence[PackedBatch], forward: _Forward, loss_fn: Callable) -> list[Any]:
        """The gradient of the summed losses into Megatron's gradient buffers; returns what the losses handed back."""
        self._require_optimizer("update")
        if not microbatches:
            raise ValueError("update needs at least one micro-batch on every rank")
        self._chunk.train()
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses: list[Tensor] = []

        def attach_loss(batch: PackedBatch) -> Callable:
            def compute(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Any]:
                loss, handed_back = loss_fn(batch, *output)
                losses.append(loss.detach())
                if not loss.requires_grad:  # a constant; the empty sum ties it to the graph
                    loss = loss + output[0][:0].sum()
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), handed_back

            return compute

        outputs = self._run(microbatches, forward, attach_loss)
        self._check_losses(losses)
        return outputs

    def _scale_gradients(self, factor: float) -> None:
        if not math.isfinite(factor):
            raise NonFiniteError(f"grad_scale gave {factor}; nothing was updated")
        # The buffers hold the sums over ranks by now (the distributed optimizer: of this rank's shard), the optimizer no copy yet.
        self._chunk.scale_gradients(factor)

    def _run(
        self, microbatches: Sequence[PackedBatch], forward: _Forward, attach_loss: Callable[[PackedBatch], Callable] | None
    ) -> list:
        """All micro-batches through Megatron's schedule: with losses and backward where ``attach_loss`` gives a loss, else forward."""

        def forward_step(batches: Iterator[PackedBatch], chunk):
            batch = next(batches).to(platform.device())
            output = forward(getattr(chunk, "module", chunk), batch)
            return output, attach_loss(batch) if attach_loss else (lambda found, non_loss_data: found)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=self._chunk,
            num_microbatches=len(microbatches),
            seq_length=max(batch.num_tokens for batch in microbatches),
            micro_batch_size=1,
            forward_only=attach_loss is None,
            collect_non_loss_data=attach_loss is None,
        )

    def _check_losses(self, losses: Sequence[Tensor]) -> None:
        """All ranks learn whether any of them has a loss that is not finite."""
        values = torch.stack([loss.float() for loss in losses]) if losses else torch.zeros(1, device=platform.device())
        bad = (~values.isfinite()).any().float()
        if self.groups.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            here = {i: value for i, value in enumerate(values.tolist()) if not math.isfinite(value)}
            where = f"micro-batches {here} of rank {self.groups.rank}" if here else "another rank"
            raise NonFiniteError(f"the loss is not finite on {where}; nothing was updated")

    def _bad_parameters(self) -> str:
        names = [n for n, p in self.model.named_parameters() if not p.main_grad.isfinite().all()]
        return f" (not finite on rank {self.groups.rank}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""

    def _step(self, grad_norm: float) -> float:
        """Clip, set this step's learning rate, step. Returns the learning rate."""
        for part in checkpoint.optimizer_parts(self._optimizer):
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=self._optimizer_config.clip_grad, total_norm=grad_norm)
        self._scheduler.step(1)
        self._optimizer.step_with_ready_grads()
        return float(self._optimizer.param_groups[0]["lr"])

    def _require_optimizer(self, action: str) -> None:
        if self.is_frozen:
            raise ValueError(f"{action} needs an optimizer; this engine was built frozen (optimizer=None)")

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a resumable checkpoint at ``folder``, all or nothing; see ``checkpoint.save``."""
        self._require_optimizer("save")
        checkpoint.save(folder, model=self.model, optimizer=self._optimizer, scheduler=self._scheduler, extra=extra)

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint: weights, optimizer, schedule and random state. Returns what ``save`` was given as ``extra``."""
        self._require_optimizer("load")
        return checkpoint.load(folder, model=self.model, optimizer=self._optimizer, scheduler=self._scheduler)


class MegatronEngine(_Engine):
    """A policy; frozen, it is the reference policy: log-probs and export only. ``logprob_chunk_tokens``: see ``linear_logprobs``."""

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig | None,
        *,
        total_optimizer_steps: int,
        logprob_chunk_tokens: int,
        recompute: str,
        seed: int,
        timeout_s: float = 1800.0,
    ):
        super().__init__(
            model,
            layout,
            optimizer,
            build=partial(build_model, chunk_tokens=logprob_chunk_tokens),
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
        )

    def logprobs(
        self, microbatches: Sequence[PackedBatch], *, temperature: float, with_entropy: bool = False
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(logprobs_T, entropy_T or None) of each micro-batch's targets: float32, in nats, on the device, without gradient.

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        return self._score(microbatches, _logprobs(temperature, with_entropy))

    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        temperature: float,
        grad_scale: GradScale | None = None,
    ) -> UpdateResult:
        """One optimizer step on the plain sum of the micro-batches' losses over all data-parallel ranks.

        ``grad_scale`` is called once, on every rank, after backward and the sum over ranks. Its factor multiplies all gradients before
        norm, clipping and step, as if it had multiplied every loss: for normalisers that are known only after the forward. The losses
        themselves, and what they hand back, stay unscaled.

        All ranks pass the same number of micro-batches, at least one. Raises NonFiniteError on all ranks, weights untouched,
        where any loss, the factor or the gradient's norm is not finite; ValueError for a frozen engine or without micro-batches.
        """
        return self._update(microbatches, _logprobs(temperature, True), loss_fn, grad_scale)

    def gradient(self, microbatches: Sequence[PackedBatch], loss_fn: LossFunction, *, temperature: float) -> tuple[Tensor, list[Any]]:
        """The gradient that ``update`` would step on, of all parameters as one float32 vector, and what the losses handed back.

        For a single process: with several, each has but its own part of it. Nothing is updated.
        """
        outputs = self._backward(microbatches, _logprobs(temperature, True), loss_fn)
        return torch.cat([p.main_grad.flatten().float() for p in self.model.parameters() if p.requires_grad]), outputs

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on every rank in one order; see ``hf_conversion.export_hf``."""
        return hf_conversion.export_hf([self.model])

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with this model's weights, all or nothing; see ``hf_conversion.save_hf``."""
        hf_conversion.save_hf([self.model], self.source, folder)


class ValueEngine(_Engine):
    """A critic: the backbone of a policy's folder, and a head that starts at zero (see ``ValueGPTModel``)."""

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig,
        *,
        total_optimizer_steps: int,
        recompute: str,
        seed: int,
        timeout_s: float = 1800.0,
    ):
        super().__init__(
            model,
            layout,
            optimizer,
            build=build_value_model,
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
        )

    def values(self, microbatches: Sequence[PackedBatch]) -> list[Tensor]:
        """values_T of each micro-batch: float32, on the device, without gradient; index t as for log-probs.

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        return [values_T for (values_T,) in self._score(microbatches, _values)]

    def update(
        self, microbatches: Sequence[PackedBatch], loss_fn: ValueLossFunction, *, grad_scale: GradScale | None = None
    ) -> UpdateResult:
        """One optimizer step, in every respect like ``MegatronEngine.update``."""
        return self._update(microbatches, _values, loss_fn, grad_scale)


def _logprobs(temperature: float, with_entropy: bool) -> _Forward:
    def forward(model: LogprobGPTModel, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        return model.logprobs(
            tokens_T=batch.tokens_T,
            targets_T=batch.targets_T,
            packed=model.pack(batch.cu_seqlens, batch.positions_T),
            temperature=temperature,
            with_entropy=with_entropy,
        )

    return forward


def _values(model: ValueGPTModel, batch: PackedBatch) -> tuple[Tensor]:
    return (model.values(tokens_T=batch.tokens_T, packed=model.pack(batch.cu_seqlens, batch.positions_T)),)


def _join_groups(layout: LayoutConfig, seed: int, timeout_s: float) -> None:
    """Megatron's process groups, built once per process; a second engine must ask for the same layout, and shares the first's deadline."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, distributed_timeout_minutes=math.ceil(timeout_s / 60)
        )
        model_parallel_cuda_manual_seed(seed)
    elif parallel_state.get_tensor_model_parallel_world_size() != layout.tp:
        raise ValueError(
            f"this process already runs tensor_parallel={parallel_state.get_tensor_model_parallel_world_size()}; "
            f"a second engine cannot have tensor_parallel={layout.tp}"
        )


def _groups() -> Groups:
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_group=parallel_state.get_data_parallel_group(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        is_stage_first=hf_conversion.is_stage_first(),
    )


def _scheduler(optimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Step k of n (from 1) runs at lr k / warmup while warming up, and a decaying schedule reaches min_lr at step n."""
    if total_steps < 1:
        raise ValueError(f"total_optimizer_steps={total_steps} must be at least 1")
    if config.schedule != "constant" and config.warmup_steps >= total_steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} leaves nothing of the run's {total_steps} optimizer steps for the "
            f"{config.schedule} schedule; use fewer warm-up steps or schedule: constant"
        )
    decay_steps = max(total_steps, config.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        # On resume the running config decides the schedule; the checkpoint says how far it has come.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
