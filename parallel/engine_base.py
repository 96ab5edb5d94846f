"""What the engines of a policy and of a critic have in common: the model, its optimizer, an update, checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from configs.schema.layout import LayoutConfig
from configs.schema.learner import OptimizerConfig
from configs.schema.model import ModelConfig
from parallel.checkpoints import base_model, checkpoint
from parallel.checkpoints.checkpoint import WholeCheckpoint
from parallel.checkpoints.offload import Offloaded
from parallel.megatron import moe, platform
from parallel.megatron.groups import groups_of_this_process, join_groups
from parallel.megatron.lora import Lora
from parallel.megatron.model import Backbone, PackedGPTModel, make_backbone
from parallel.megatron.optimizer import (
    LEAST_LOSS_SCALE,
    build_optimizer,
    build_scheduler,
    gradient_buffers,
    optimizer_parts,
    own_tensors,
)
from parallel.megatron.schedule import Forward, NonFiniteError, Schedule
from parallel.packing import PackedBatch
from parallel.planning.adapters import check_lora
from parallel.planning.architecture import Architecture, read_architecture, read_hf_config
from parallel.planning.layout import check_trainable, validate_layout
from parallel.weights import hf_conversion
from tracing import span

GradScale = Callable[[list[Any]], float]
"""(outputs of this rank's losses, one per micro-batch) -> one factor, the same on all ranks."""


TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an engine trains. The learning-rate schedule ends after ``total_steps``."""

    optimizer: OptimizerConfig
    total_steps: int
    recompute: str = "none"
    """``learner.recompute``."""
    freeze_router: bool = False
    """``learner.freeze_router``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingExperts:
    """The router's own choice against the experts that were replayed, at the response tokens of this data-parallel
    rank. Layers before see the replayed experts."""

    by_layer: tuple[int, ...]
    """Of each layer with experts: tokens whose own set of experts is another."""
    tokens: int
    """Response tokens whose experts were replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One optimizer step, the same on every rank of a data-parallel rank.

    ``grad_norm`` is the norm over all parameters before clipping; ``outputs`` has one entry per micro-batch.
    ``skipped``: the scaled gradient did not fit float16, and weights stayed as they were (the norm is infinite,
    the rate 0); from the second skip on the loss scale falls. None without a loss scale.
    """

    grad_norm: float
    lr: float
    outputs: list[Any]
    skipped: bool | None
    differing_experts: DifferingExperts | None = None
    """None if no experts were replayed."""


class Engine(ABC):
    """The common base of a policy's and a critic's engine: a Megatron-Core model and, unless it is frozen, its
    optimizer.

    ``chunks`` is this rank's part of the model: several if the pipeline is interleaved, else one.

    ``training=None`` makes a frozen engine, which scores only. Several engines may live in one process and share one
    layout. There is no dropout: for the same micro-batch and weights the scoring pass and ``update``'s forward pass give
    bitwise equal results. ``timeout_s`` seconds, rounded up to whole minutes, is the deadline of collectives in
    Megatron's own groups, which do not take it from the default group.

    Needs ``platform.init_distributed`` first. Raises ValueError for a layout or model that does not fit. ``lora``: the
    optimizer has only the adapters, which ``checkpoint`` holds too.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        training: Training | None,
        *,
        seed: int,
        timeout_s: float = TIMEOUT_S,
        pieces: int | None = None,
        lora: Lora | None = None,
    ):
        hf_config = read_hf_config(model.path)
        layout = layout.resolved(dist.get_world_size())
        validate_layout(hf_config, layout, num_processes=dist.get_world_size())
        if lora is not None:
            check_lora(lora.config, read_architecture(hf_config))
        if training is not None:
            check_trainable(read_architecture(hf_config), model.dtype)
        join_groups(layout, seed, timeout_s)
        self.groups = groups_of_this_process()
        self.source = model.path
        self.dtype = getattr(torch, model.dtype)
        backbone_of = partial(
            make_backbone,
            model.path,
            hf_config,
            dtype=self.dtype,
            recompute=training.recompute if training else "none",
            sequence_parallel=layout.sp,
            pieces=pieces,
            lora=lora,
        )
        vp_stages = range(layout.vpp) if layout.vpp > 1 else [None]
        self.chunks = [self._make_chunk(backbone_of(stage)).to(platform.device()) for stage in vp_stages]
        hf_conversion.load_hf(self.chunks, model.path)
        hf_conversion.initialise_adapters(self.chunks, seed)
        self._lora = lora
        self._described_adapters = lora and base_model.describe(model.path, lora.config)
        self._training = training
        self._optimizer: Any = None  # Megatron's; None while frozen
        self._offloaded: Offloaded | None = None
        self._offloaded_state: Offloaded | None = None
        if training is None:
            self._trained = []
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        else:
            if training.freeze_router:
                moe.freeze_routers(self.chunks)
            self._build_optimizer(training.optimizer, training.total_steps)
        self._schedule = Schedule(self._trained or self.chunks, self.groups, layout.microbatch_multiple)

    @abstractmethod
    def _make_chunk(self, backbone: Backbone) -> PackedGPTModel:
        """A part of the model, whose weights are set later."""

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        # Reduced once, after the last micro-batch: gradients are float32 sums whatever the model's dtype.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=config.distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self._trained = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in self.chunks]
        self._optimizer = build_optimizer(self._trained, config, self.dtype)
        # AdamW's state exists from the start, so that checkpoints before and after the first step are alike.
        checkpoint.initialise_optimizer_state(self._optimizer)
        self._offload_state(config)
        self._lr_scheduler = build_scheduler(self._optimizer, config, total_steps)
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
    def shares_prompts(self) -> bool:
        """Whether a prompt is computed once for the sequences of a micro-batch that begin with it
        (``PackedBatch.prompt_ids_S``)."""
        return self.chunks[0].shares_prompts

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; the engine is unusable until ``restore``. No
        collective."""
        if self._offloaded is None:
            tensors = [*self._parameters(), *(t for chunk in self.chunks for t in chunk.buffers())]
            if self._offloaded_state is None and self._optimizer is not None:
                tensors += own_tensors(self._optimizer, self._parameters())
            self._offloaded = Offloaded(tensors, dropped=gradient_buffers(self._trained))

    def restore(self) -> None:
        """Move them back to the device, bitwise unchanged."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _offload_state(self, config: OptimizerConfig) -> None:
        if config.offload:
            with span("offload the optimizer's state"):
                self._offloaded_state = Offloaded(own_tensors(self._optimizer, self._parameters()))

    def _parameters(self) -> Iterator[Tensor]:
        return (p for chunk in self.chunks for p in chunk.parameters())

    @contextmanager
    def _state_there(self) -> Iterator[None]:
        """Inside, the optimizer's state is on the device."""
        if self._offloaded_state is not None:
            with span("restore the optimizer's state"):
                self._offloaded_state.restore()
            self._offloaded_state = None
        try:
            yield
        finally:
            self._offload_state(self._training.optimizer)

    def _scores(self, microbatches: Sequence[PackedBatch], forward: Forward) -> list[Tensor]:
        """See ``Schedule.scores``."""
        self._require_weights("a forward pass")
        for chunk in self.chunks:
            chunk.eval()
        return self._schedule.scores(microbatches, forward)

    def _update_weights(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        loss_fn: Callable,
        grad_scale: GradScale | None = None,
        forward_only: Sequence[bool] = (),
    ) -> UpdateResult:
        outputs = self._accumulate_gradient(microbatches, forward, loss_fn, forward_only)
        if grad_scale is not None:
            self._scale_gradients(grad_scale(outputs))
        loss_scale = float(self._optimizer.get_loss_scale())
        with span("prepare gradients"):
            is_not_finite = self._optimizer.prepare_grads()
        if is_not_finite:
            if loss_scale <= LEAST_LOSS_SCALE:
                raise NonFiniteError(
                    f"the gradient is not finite at a loss scale of {loss_scale}{self._bad_parameters()}; nothing was updated"
                )
            return UpdateResult(grad_norm=math.inf, lr=0.0, outputs=outputs, skipped=True)
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient's norm is {grad_norm}{self._bad_parameters()}; nothing was updated"
            )
        skipped = False if self.dtype == torch.float16 else None
        with span("optimizer step"), self._state_there():
            lr = self._optimizer_step(grad_norm)
        return UpdateResult(grad_norm=grad_norm, lr=lr, outputs=outputs, skipped=skipped)

    def _accumulate_gradient(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        loss_fn: Callable,
        forward_only: Sequence[bool] = (),
    ) -> list[Any]:
        """Put the gradient of the summed losses into Megatron's gradient buffers; see ``Schedule.add_gradient``."""
        self._require_optimizer("update")
        for trained in self._trained:
            trained.train()
            trained.zero_grad_buffer()
        self._optimizer.zero_grad()
        return self._schedule.add_gradient(microbatches, forward, loss_fn, forward_only)

    def _scale_gradients(self, factor: float) -> None:
        if not math.isfinite(factor):
            raise NonFiniteError(f"grad_scale gave {factor}; nothing was updated")
        # The buffers already hold the sums over ranks (under the distributed optimizer of this rank's shard),
        # and the optimizer has no copy yet.
        for trained in self._trained:
            trained.scale_gradients(factor)

    def _bad_parameters(self) -> str:
        parameters = (item for chunk in self.chunks for item in chunk.named_parameters())
        trained = ((name, parameter) for name, parameter in parameters if parameter.requires_grad)
        names = [name for name, parameter in trained if not parameter.main_grad.isfinite().all()]
        if not names:
            return ""
        more = ", ..." if len(names) > 5 else ""
        return f" (not finite on rank {self.groups.rank}: {', '.join(names[:5])}{more})"

    def _optimizer_step(self, grad_norm: float) -> float:
        """Clip the gradient, set this step's learning rate, step. Returns the learning rate."""
        for part in optimizer_parts(self._optimizer):
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), max_norm=self._training.optimizer.clip_grad, total_norm=grad_norm
            )
        self._lr_scheduler.step(1)
        self._optimizer.step_with_ready_grads()
        return float(self._optimizer.param_groups[0]["lr"])

    def _require_optimizer(self, action: str) -> None:
        if self._training is None:
            raise ValueError(f"{action} needs an optimizer; this engine was built frozen (training=None)")
        self._require_weights(action)

    def _require_weights(self, action: str) -> None:
        """On a GPU the error would be an invalid argument of some kernel."""
        if self._offloaded is not None:
            raise RuntimeError(
                f"{action} needs the weights, which `offload` moved to host memory; call `restore` before"
            )

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a resumable checkpoint at ``folder``, all or nothing; see ``checkpoint.save``."""
        self._require_optimizer("save")
        with self._state_there():
            checkpoint.save(
                folder,
                chunks=self.chunks,
                optimizer=self._optimizer,
                scheduler=self._lr_scheduler,
                extra=extra,
                adapters=self._described_adapters,
            )

    def load(self, saved: Path | WholeCheckpoint) -> dict[str, Any]:
        """Restore weights, optimizer, schedule and random state. Returns the ``extra`` given to ``save``."""
        self._require_optimizer("load")
        with self._state_there():
            return checkpoint.load(
                saved,
                chunks=self.chunks,
                optimizer=self._optimizer,
                scheduler=self._lr_scheduler,
                adapters=self._described_adapters,
            )
