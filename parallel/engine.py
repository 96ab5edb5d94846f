"""The learner's engines: a policy's log-probs, a critic's values and the updates of either, of a
Megatron-Core model on packed micro-batches, in every layout of tensor, sequence, expert, pipeline (plain or
interleaved) and data parallelism.

Every method that touches weights is a collective: all ranks call it, in the same order. Micro-batches are
this data-parallel rank's own; the tensor- and pipeline-parallel ranks of one data-parallel rank pass the same
ones. Every rank gets the results: losses and scores come to be on the last pipeline stage, which hands them
to the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from configs.schema.layout import LayoutConfig
from configs.schema.learner import OptimizerConfig
from configs.schema.model import ModelConfig
from parallel.checkpoints import checkpoint
from parallel.checkpoints.checkpoint import WholeCheckpoint
from parallel.checkpoints.offload import Offloaded
from parallel.megatron import platform
from parallel.megatron.groups import groups_of_this_process, join_groups
from parallel.megatron.model import (
    LogprobGPTModel,
    PackedGPTModel,
    ValueGPTModel,
    build_model,
    build_value_model,
)
from parallel.megatron.optimizer import LEAST_LOSS_SCALE, build_optimizer, build_scheduler
from parallel.packing import PackedBatch
from parallel.planning.layout import Architecture, read_architecture, read_hf_config, validate_layout
from parallel.weights import hf_conversion
from parallel.weights.hf_files import HuggingFaceWeights

LossFunction = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, Any]]
"""(micro-batch, logprobs_T, entropy_T) -> (scalar loss, anything to be handed back).

It runs on the last pipeline stage alone. What it hands back travels to the others by pickle: tensors in it
should be on the CPU.
"""

ValueLossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, values_T) -> (scalar loss, anything to be handed back): see ``LossFunction``."""

GradScale = Callable[[list[Any]], float]
"""(what this rank's losses handed back, one per micro-batch) -> one factor, the same on all ranks."""

_Forward = Callable[[Any, PackedBatch], Any]
"""(chunk of the model, micro-batch) -> what the loss takes after the micro-batch, a tuple of [T] tensors; of
any but the last chunk, what it hands to the next."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is NaN or infinite. Raised on all ranks, before any weight or optimizer state
    has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One optimizer step, the same on every rank of a data-parallel rank.

    ``grad_norm`` is the norm over all parameters before clipping; ``outputs`` has one entry per micro-batch.
    ``skipped``: the scaled gradient did not fit float16, so that nothing moved but the loss scale, from a
    second time on (the norm is infinite, the rate 0); None without scale.
    """

    grad_norm: float
    lr: float
    outputs: list[Any]
    skipped: bool | None


class _Engine:
    """What a policy's engine and a critic's share: a model in Megatron-Core and, unless it is frozen, its
    optimizer.

    ``chunks`` is this rank's part of the model: several where the pipeline is interleaved, else one.

    ``optimizer=None`` makes a frozen engine, which scores only. ``total_optimizer_steps`` is where the
    learning-rate schedule ends. Several engines may live in one process; they share one layout. There is no
    dropout: what the scoring pass computes and what ``update`` hands to its loss are bitwise equal for the
    same micro-batch and weights. ``timeout_s`` seconds, rounded up to whole minutes, is the deadline of
    collectives in Megatron's own groups, which do not take it from the default group.

    Needs ``platform.init_distributed`` first. Raises ValueError for a layout, model or schedule that does not
    fit.
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
        if (
            optimizer is not None
            and model.dtype == "float16"
            and read_architecture(hf_config).experts is not None
        ):
            # Megatron gives the experts' optimizer a loss scale of its own, which would part from the one
            # that the loss is multiplied by.
            raise ValueError(
                "model.dtype=float16 cannot train a model with experts, whose gradients have two loss scales; use bfloat16"
            )
        join_groups(layout, seed, timeout_s)
        self.groups = groups_of_this_process()
        self.source = model.path
        self.dtype = getattr(torch, model.dtype)
        build = partial(
            build, dtype=self.dtype, recompute=recompute if optimizer else "none", sequence_parallel=layout.sp
        )
        self.chunks = [
            build(model.path, hf_config, vp_stage=s)
            for s in (range(layout.vpp) if layout.vpp > 1 else [None])
        ]
        self._microbatch_multiple = layout.microbatch_multiple
        hf_conversion.load_hf(self.chunks, model.path)
        self._optimizer_config = optimizer
        self._optimizer: Any = None  # Megatron's; None while frozen
        self._offloaded: Offloaded | None = None
        if optimizer is None:
            self._trained = []
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        else:
            self._build_optimizer(optimizer, total_optimizer_steps)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        # Reduced once, after the last micro-batch: gradients are float32 sums whatever the model's dtype.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=config.distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self._trained = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in self.chunks]
        self._optimizer = build_optimizer(self._trained, config, self.dtype)
        # AdamW's state exists from the start, so that a checkpoint has the same content before the first step
        # and after it.
        checkpoint.initialise_optimizer_state(self._optimizer)
        self._scheduler = build_scheduler(self._optimizer, config, total_steps)
        # The loss carries global weights: gradients are summed, never divided by token or rank counts.
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self._optimizer.scale_loss if self.dtype == torch.float16 else None
            chunk.config.finalize_model_grads_func = lambda chunks, num_tokens=None, **rest: (
                finalize_model_grads(chunks, None, **rest)
            )

    @property
    def architecture(self) -> Architecture:
        return self.chunks[0].architecture

    @property
    def is_frozen(self) -> bool:
        return self._optimizer_config is None

    def offload(self) -> None:
        """Weights and optimizer state to host memory; until ``restore`` the engine can do nothing else. No
        collective."""
        if self._offloaded is None:
            self._offloaded = Offloaded(self.chunks, self._trained, self._optimizer)

    def restore(self) -> None:
        """Back on the device, bitwise as they were."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    @torch.no_grad()
    def _score(
        self, microbatches: Sequence[PackedBatch], forward: _Forward, num_results: int
    ) -> list[tuple[Tensor, ...]]:
        """The ``num_results`` float32 tensors that ``forward`` gives for each micro-batch, on every rank.

        All ranks of a data-parallel group pass the same number of micro-batches: any number.
        """
        for chunk in self.chunks:
            chunk.eval()
        if not microbatches:
            return []
        fill = -len(microbatches) % self._microbatch_multiple
        found = self._run([*microbatches, *[microbatches[-1]] * fill], forward, None)[: len(microbatches)]
        return (
            found
            if self.groups.pp_size == 1
            else self._tensors_of_last_stage(found, microbatches, num_results)
        )

    def _tensors_of_last_stage(
        self, found: list[tuple[Tensor, ...]], microbatches: Sequence[PackedBatch], num_results: int
    ) -> list[tuple[Tensor, ...]]:
        """``found`` of the last pipeline stage, in one message."""
        lengths = [batch.num_tokens for batch in microbatches]
        if self.groups.pp_rank == self.groups.pp_size - 1:
            everything = torch.stack([torch.cat(parts) for parts in zip(*found, strict=True)])
        else:
            everything = torch.empty(
                (num_results, sum(lengths)), dtype=torch.float32, device=platform.device()
            )
        dist.broadcast(everything, src=self._last_stage, group=self.groups.pp_group)
        return list(zip(*(row_T.split(lengths) for row_T in everything), strict=True))

    @property
    def _last_stage(self) -> int:
        """The rank that holds the end of this rank's pipeline."""
        return dist.get_global_rank(self.groups.pp_group, self.groups.pp_size - 1)

    def _update(
        self,
        microbatches: Sequence[PackedBatch],
        forward: _Forward,
        loss_fn: Callable,
        grad_scale: GradScale | None,
    ) -> UpdateResult:
        outputs = self._backward(microbatches, forward, loss_fn)
        if grad_scale is not None:
            self._scale_gradients(grad_scale(outputs))
        loss_scale = float(self._optimizer.get_loss_scale())
        if self._optimizer.prepare_grads():
            if loss_scale <= LEAST_LOSS_SCALE:
                where = self._bad_parameters()
                raise NonFiniteError(
                    f"the gradient is not finite at a loss scale of {loss_scale}{where}; nothing was updated"
                )
            return UpdateResult(grad_norm=math.inf, lr=0.0, outputs=outputs, skipped=True)
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient's norm is {grad_norm}{self._bad_parameters()}; nothing was updated"
            )
        lr = self._step(grad_norm)
        return UpdateResult(
            grad_norm=grad_norm,
            lr=lr,
            outputs=outputs,
            skipped=False if self.dtype == torch.float16 else None,
        )

    def _backward(
        self, microbatches: Sequence[PackedBatch], forward: _Forward, loss_fn: Callable
    ) -> list[Any]:
        """The gradient of the summed losses into Megatron's gradient buffers; returns what the losses handed
        back."""
        self._require_optimizer("update")
        if not microbatches:
            raise ValueError("update needs at least one micro-batch on every rank")
        if len(microbatches) % self._microbatch_multiple:
            raise ValueError(
                f"an interleaved pipeline of {self.groups.pp_size} stages updates on a multiple of {self._microbatch_multiple} "
                f"micro-batches, got {len(microbatches)}; see trainer.batch.plan.plan_batches"
            )
        for trained in self._trained:
            trained.train()
            trained.zero_grad_buffer()
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
        return outputs if self.groups.pp_size == 1 else self._objects_of_last_stage(outputs)

    def _objects_of_last_stage(self, outputs: list[Any]) -> list[Any]:
        found = [outputs]
        dist.broadcast_object_list(found, src=self._last_stage, group=self.groups.pp_group)
        return found[0]

    def _scale_gradients(self, factor: float) -> None:
        if not math.isfinite(factor):
            raise NonFiniteError(f"grad_scale gave {factor}; nothing was updated")
        # The buffers hold the sums over ranks by now (the distributed optimizer: of this rank's shard), the
        # optimizer no copy yet.
        for trained in self._trained:
            trained.scale_gradients(factor)

    def _run(
        self,
        microbatches: Sequence[PackedBatch],
        forward: _Forward,
        attach_loss: Callable[[PackedBatch], Callable] | None,
    ) -> list:
        """All micro-batches through Megatron's schedule: with losses and backward where ``attach_loss`` gives
        a loss, else forward.

        What the losses hand back, or what ``forward`` gives, on the last pipeline stage; nothing on the
        others.
        """
        chunks: list[Any] = self._trained or self.chunks

        def forward_step(batches: Iterator[PackedBatch], chunk):
            batch = next(batches).to(platform.device())
            output = forward(getattr(chunk, "module", chunk), batch)
            if attach_loss is None and isinstance(output, tuple):
                output = torch.stack(
                    output
                )  # of a model with experts, Megatron asks any output for its device
            return output, attach_loss(batch) if attach_loss else (lambda found, non_loss_data: found)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=len(microbatches),
            seq_length=max(batch.num_tokens for batch in microbatches),
            micro_batch_size=1,
            forward_only=attach_loss is None,
            collect_non_loss_data=attach_loss is None,
        )

    def _check_losses(self, losses: Sequence[Tensor]) -> None:
        """All ranks learn whether any of them has a loss that is not finite."""
        values = (
            torch.stack([loss.float() for loss in losses])
            if losses
            else torch.zeros(1, device=platform.device())
        )
        bad = (~values.isfinite()).any().float()
        if self.groups.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            here = {i: value for i, value in enumerate(values.tolist()) if not math.isfinite(value)}
            where = f"micro-batches {here} of rank {self.groups.rank}" if here else "another rank"
            raise NonFiniteError(f"the loss is not finite on {where}; nothing was updated")

    def _bad_parameters(self) -> str:
        names = [
            n
            for chunk in self.chunks
            for n, p in chunk.named_parameters()
            if not p.main_grad.isfinite().all()
        ]
        return (
            f" (not finite on rank {self.groups.rank}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
            if names
            else ""
        )

    def _step(self, grad_norm: float) -> float:
        """Clip, set this step's learning rate, step. Returns the learning rate."""
        for part in checkpoint.optimizer_parts(self._optimizer):
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), max_norm=self._optimizer_config.clip_grad, total_norm=grad_norm
            )
        self._scheduler.step(1)
        self._optimizer.step_with_ready_grads()
        return float(self._optimizer.param_groups[0]["lr"])

    def _require_optimizer(self, action: str) -> None:
        if self.is_frozen:
            raise ValueError(f"{action} needs an optimizer; this engine was built frozen (optimizer=None)")

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a resumable checkpoint at ``folder``, all or nothing; see ``checkpoint.save``."""
        self._require_optimizer("save")
        checkpoint.save(
            folder, chunks=self.chunks, optimizer=self._optimizer, scheduler=self._scheduler, extra=extra
        )

    def load(self, saved: Path | WholeCheckpoint) -> dict[str, Any]:
        """Go on from a checkpoint: weights, optimizer, schedule and random state. Returns what ``save`` was
        given as ``extra``."""
        self._require_optimizer("load")
        return checkpoint.load(
            saved, chunks=self.chunks, optimizer=self._optimizer, scheduler=self._scheduler
        )


class MegatronEngine(_Engine):
    """A policy; frozen, it is the reference policy: log-probs and export only. ``logprob_chunk_tokens``: see
    ``linear_logprobs``."""

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
            build=partial(build_model, chunk_tokens=logprob_chunk_tokens, fp32_lm_head=model.fp32_lm_head),
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
        )

    def logprobs(
        self, microbatches: Sequence[PackedBatch], *, temperature: float, with_entropy: bool = False
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(logprobs_T, entropy_T or None) of each micro-batch's targets: float32, in nats, on the device,
        without gradient.

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        found = self._score(microbatches, _logprobs(temperature, with_entropy), 2 if with_entropy else 1)
        return [(logprobs_T, entropy_T[0] if entropy_T else None) for logprobs_T, *entropy_T in found]

    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        temperature: float,
        grad_scale: GradScale | None = None,
    ) -> UpdateResult:
        """One optimizer step on the plain sum of the micro-batches' losses over all data-parallel ranks.

        ``grad_scale`` is called once, on every rank, after backward and the sum over ranks. Its factor
        multiplies all gradients before norm, clipping and step, as if it had multiplied every loss: for
        normalisers that are known only after the forward. The losses themselves, and what they hand back,
        stay unscaled. A float16 model's step may be skipped: see ``UpdateResult``.

        All ranks pass the same number of micro-batches, at least one. Raises NonFiniteError on all ranks,
        weights untouched, where any loss, the factor or the gradient's norm is not finite; ValueError for a
        frozen engine or without micro-batches.
        """
        return self._update(microbatches, _logprobs(temperature, True), loss_fn, grad_scale)

    def gradient(
        self, microbatches: Sequence[PackedBatch], loss_fn: LossFunction, *, temperature: float
    ) -> tuple[Tensor, list[Any]]:
        """The gradient that ``update`` would step on, of all parameters as one float32 vector, and what the
        losses handed back.

        For a single process: with several, each has but its own part of it. Nothing is updated. Raises
        NonFiniteError where it is not finite, ValueError for a frozen engine or without micro-batches.
        """
        outputs = self._backward(microbatches, _logprobs(temperature, True), loss_fn)
        parameters: list[Any] = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        loss_scale = float(self._optimizer.get_loss_scale())
        gradient = torch.cat([p.main_grad.flatten().float() for p in parameters]) / loss_scale
        if not gradient.isfinite().all():
            raise NonFiniteError(
                f"the gradient is not finite at a loss scale of {loss_scale}{self._bad_parameters()}"
            )
        return gradient, outputs

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of this pipeline stage, in one order on all its ranks; see
        ``hf_conversion.export_hf``."""
        return hf_conversion.export_hf(self.chunks)

    def load_weights(self, weights: HuggingFaceWeights) -> None:
        """Other weights in the place of the model's; an optimizer's own copies stay as they are, so this is
        no way to go on training."""
        hf_conversion.load_weights(self.chunks, weights)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with this model's weights, all or nothing; see
        ``hf_conversion.save_hf``."""
        hf_conversion.save_hf(self.chunks, self.source, folder)


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
        return [values_T for (values_T,) in self._score(microbatches, _values, 1)]

    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss_fn: ValueLossFunction,
        *,
        grad_scale: GradScale | None = None,
    ) -> UpdateResult:
        """One optimizer step, in every respect like ``MegatronEngine.update``."""
        return self._update(microbatches, _values, loss_fn, grad_scale)


def _logprobs(temperature: float, with_entropy: bool) -> _Forward:
    def forward(model: LogprobGPTModel, batch: PackedBatch) -> tuple[Tensor, ...] | Tensor:
        found: Any = model.logprobs(
            tokens_T=batch.tokens_T,
            targets_T=batch.targets_T,
            packed=model.pack(batch.cu_seqlens, batch.positions_T),
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return found if with_entropy or not model.post_process else found[:1]

    return forward


def _values(model: ValueGPTModel, batch: PackedBatch) -> tuple[Tensor] | Tensor:
    found = model.values(tokens_T=batch.tokens_T, packed=model.pack(batch.cu_seqlens, batch.positions_T))
    return (found,) if model.post_process else found
