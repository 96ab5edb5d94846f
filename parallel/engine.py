"""The learner's engines: log-probs and updates of a policy, values and updates of a critic.

An engine is a Megatron-Core model on packed micro-batches, in every layout of tensor, sequence, context, expert,
pipeline (plain or interleaved) and data parallelism. A policy replays the experts that its micro-batches carry
(``PackedBatch.experts_TLK``), and returns those that it has chosen (``logprobs_and_experts``). A critic chooses its own:
its router is another one. Log-probs and entropies of tokens with a kept set (``PackedBatch.kept``) are those of the
softmax over it, for a reference policy too.

Every method that touches weights is a collective: all ranks call it, in the same order. Micro-batches are
this data-parallel rank's own; the tensor-, context- and pipeline-parallel ranks of one data-parallel rank pass the
same ones. Losses and scores are computed on the last pipeline stage, which sends them to all others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
from parallel.megatron import platform
from parallel.megatron.groups import groups_of_this_process, join_groups
from parallel.megatron.lora import Lora, without_adapters
from parallel.megatron.model import (
    Backbone,
    LogprobGPTModel,
    PackedGPTModel,
    ValueGPTModel,
    make_backbone,
)
from parallel.megatron.moe import Replay
from parallel.megatron.optimizer import LEAST_LOSS_SCALE, build_optimizer, build_scheduler
from parallel.megatron.schedule import Forward, NonFiniteError, Schedule
from parallel.packing import PackedBatch
from parallel.planning.adapters import check_lora
from parallel.planning.architecture import Architecture, read_architecture, read_hf_config
from parallel.planning.layout import check_trainable, validate_layout
from parallel.weights import hf_conversion
from parallel.weights.hf_files import HuggingFaceWeights
from parallel.weights.peft_adapter import save_adapter
from tracing import span

TIMEOUT_S = 1800.0

LossFunction = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, Any]]
"""(micro-batch, logprobs_T, entropy_T) -> (scalar loss, any output).

It runs on the last pipeline stage alone. Its output travels to the other stages by pickle: tensors in it should
be on the CPU.
"""

ValueLossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, values_T) -> (scalar loss, any output): see ``LossFunction``."""

GradScale = Callable[[list[Any]], float]
"""(outputs of this rank's losses, one per micro-batch) -> one factor, the same on all ranks."""


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
    """None where no experts were replayed."""


class _Engine:
    """The common base of a policy's and a critic's engine: a Megatron-Core model and, unless it is frozen, its
    optimizer.

    ``chunks`` is this rank's part of the model: several if the pipeline is interleaved, else one.

    ``optimizer=None`` makes a frozen engine, which scores only. The learning-rate schedule ends after
    ``total_optimizer_steps``. Several engines may live in one process and share one layout. There is no
    dropout: for the same micro-batch and weights the scoring pass and ``update``'s forward pass give bitwise
    equal results. ``timeout_s`` seconds, rounded up to whole minutes, is the deadline of collectives in
    Megatron's own groups, which do not take it from the default group.

    Needs ``platform.init_distributed`` first. Raises ValueError for a layout, model or schedule that does not
    fit. ``make_chunk`` makes a part of the model, whose weights are set here. ``lora``: the optimizer has the
    adapters alone, which ``checkpoint`` holds too.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig | None,
        *,
        make_chunk: Callable[[Backbone], PackedGPTModel],
        total_optimizer_steps: int,
        recompute: str,
        seed: int,
        timeout_s: float,
        pieces: int | None = None,
        lora: Lora | None = None,
    ):
        hf_config = read_hf_config(model.path)
        layout = layout.resolved(dist.get_world_size())
        validate_layout(hf_config, layout, num_processes=dist.get_world_size())
        if lora is not None:
            check_lora(lora.config, read_architecture(hf_config))
        if optimizer is not None:
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
            recompute=recompute if optimizer else "none",
            sequence_parallel=layout.sp,
            pieces=pieces,
            lora=lora,
        )
        vp_stages = range(layout.vpp) if layout.vpp > 1 else [None]
        self.chunks = [make_chunk(backbone_of(stage)).to(platform.device()) for stage in vp_stages]
        hf_conversion.load_hf(self.chunks, model.path)
        hf_conversion.initialise_adapters(self.chunks, seed)
        self._lora = lora
        self._described_adapters = lora and base_model.describe(model.path, lora.config)
        self._optimizer_config = optimizer
        self._optimizer: Any = None  # Megatron's; None while frozen
        self._offloaded: Offloaded | None = None
        if optimizer is None:
            self._trained = []
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        else:
            self._build_optimizer(optimizer, total_optimizer_steps)
        self._schedule = Schedule(self._trained or self.chunks, self.groups, layout.microbatch_multiple)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        # Reduced once, after the last micro-batch: gradients are float32 sums whatever the model's dtype.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=config.distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self._trained = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in self.chunks]
        self._optimizer = build_optimizer(self._trained, config, self.dtype)
        # AdamW's state exists from the start, so that checkpoints before and after the first step are alike.
        checkpoint.initialise_optimizer_state(self._optimizer)
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

    @property
    def is_frozen(self) -> bool:
        return self._optimizer_config is None

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; the engine is unusable until ``restore``. No
        collective."""
        if self._offloaded is None:
            self._offloaded = Offloaded(self.chunks, self._trained, self._optimizer)

    def restore(self) -> None:
        """Move them back to the device, bitwise unchanged."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _scores(
        self, microbatches: Sequence[PackedBatch], forward: Forward, num_results: int
    ) -> list[tuple[Tensor, ...]]:
        """See ``Schedule.scores``."""
        self._require_weights("a forward pass")
        for chunk in self.chunks:
            chunk.eval()
        return self._schedule.scores(microbatches, forward, num_results)

    def _update_weights(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        loss_fn: Callable,
        grad_scale: GradScale | None,
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
        with span("optimizer step"):
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
        for part in checkpoint.optimizer_parts(self._optimizer):
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), max_norm=self._optimizer_config.clip_grad, total_norm=grad_norm
            )
        self._lr_scheduler.step(1)
        self._optimizer.step_with_ready_grads()
        return float(self._optimizer.param_groups[0]["lr"])

    def _require_optimizer(self, action: str) -> None:
        if self.is_frozen:
            raise ValueError(f"{action} needs an optimizer; this engine was built frozen (optimizer=None)")
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
        return checkpoint.load(
            saved,
            chunks=self.chunks,
            optimizer=self._optimizer,
            scheduler=self._lr_scheduler,
            adapters=self._described_adapters,
        )


class MegatronEngine(_Engine):
    """A policy or, frozen, the reference policy, which has log-probs and export only. ``logprob_chunk_tokens``:
    see ``linear_logprobs``. ``lora``: adapters are trained, and nothing else."""

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig | None,
        *,
        total_optimizer_steps: int,
        recompute: str,
        seed: int,
        logprob_chunk_tokens: int,
        timeout_s: float = TIMEOUT_S,
        pieces: int | None = None,
        lora: Lora | None = None,
    ):
        """pieces: ``RunConfig.numerics_pieces``. None, with aligned numerics: as many as layout.tp. The rest: see
        ``_Engine``."""
        super().__init__(
            model,
            layout,
            optimizer,
            make_chunk=partial(
                LogprobGPTModel, chunk_tokens=logprob_chunk_tokens, fp32_lm_head=model.fp32_lm_head
            ),
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
            pieces=pieces or layout.tp if model.numerics == "aligned" else None,
            lora=lora,
        )

    def logprobs(
        self, microbatches: Sequence[PackedBatch], *, temperature: float, with_entropy: bool = False
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(logprobs_T, entropy_T or None) of each micro-batch's targets: float32, in nats, on the device,
        without gradient, on the response mask. Off it they mean nothing (see ``LogprobGPTModel``).

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        results = self._scores(
            microbatches, _logprob_forward(temperature, with_entropy), 2 if with_entropy else 1
        )
        return [(logprobs_T, entropy_T[0] if entropy_T else None) for logprobs_T, *entropy_T in results]

    def logprobs_and_experts(
        self, microbatches: Sequence[PackedBatch], *, temperature: float, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """(logprobs_T, experts_TLK) of each micro-batch: as ``logprobs`` with the learner's own choice of experts,
        and this choice, of every token and layer with experts, on every rank.

        dtype: of the ids, uint8 or int16. Raises ValueError for a dense model.
        """
        experts = self.architecture.experts
        if experts is None:
            raise ValueError(
                f"the {self.architecture.model_type} model has no experts to record; use logprobs"
            )
        shape, device = (sum(experts.is_sparse), experts.experts_per_token), platform.device()
        blank = [
            batch.with_fields(
                experts_TLK=torch.zeros((batch.num_tokens, *shape), dtype=dtype, device=device),
                is_replayed_T=torch.zeros(batch.num_tokens, dtype=torch.bool, device=device),
            )
            for batch in microbatches
        ]
        scored = self._scores(blank, _logprob_forward(temperature, False, records=True), 1)
        recorded: list[Tensor] = []
        for batch in blank:
            assert batch.experts_TLK is not None  # written above
            # Byte by byte, since NCCL has no int16. Every id is 0 but on the ranks that wrote it.
            for group in self.groups.of_one_dp_rank:
                dist.all_reduce(batch.experts_TLK.view(torch.uint8), dist.ReduceOp.MAX, group=group)
            recorded.append(batch.experts_TLK)
        return [(logprobs_T, ids_TLK) for (logprobs_T,), ids_TLK in zip(scored, recorded, strict=True)]

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the policy is the model that it started from, in the same layout and for no memory."""
        return without_adapters(self.chunks)

    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        temperature: float,
        grad_scale: GradScale | None = None,
        forward_only: Sequence[bool] = (),
    ) -> UpdateResult:
        """One optimizer step on the plain sum of the micro-batches' losses over all data-parallel ranks.

        ``forward_only``: of each micro-batch whether its gradient is known to be zero, so that it gets no backward pass.
        The same on all ranks, not all of them, and with one pipeline stage alone.

        ``grad_scale`` is called once, on every rank, after backward and the sum over ranks. Its factor
        multiplies all gradients before norm, clipping and step, as if it had multiplied every loss: for
        normalisers that are known only after the forward pass. The losses and their outputs stay unscaled. A
        float16 model's step may be skipped: see ``UpdateResult``.

        All ranks pass the same number of micro-batches, at least one. Raises NonFiniteError on all ranks, with
        unchanged weights, if a loss, the factor or the gradient's norm is not finite; ValueError for a frozen
        engine or without micro-batches.
        """
        replays: list[Replay] = []
        forward = _logprob_forward(temperature, True, replays)
        result = self._update_weights(microbatches, forward, loss_fn, grad_scale, forward_only)
        return replace(result, differing_experts=self._differing_experts(microbatches, replays))

    def _differing_experts(
        self, microbatches: Sequence[PackedBatch], replays: Sequence[Replay]
    ) -> DifferingExperts | None:
        """A collective where experts are replayed: each rank has counted its own layers and tokens."""
        experts = self.architecture.experts
        if experts is None or microbatches[0].experts_TLK is None:
            return None
        counts_L = torch.zeros(sum(experts.is_sparse), dtype=torch.int64, device=platform.device())
        for replay in replays:
            for layer, count in replay.differing.items():
                counts_L[layer] += count
        for group in self.groups.of_one_dp_rank:
            dist.all_reduce(counts_L, group=group)
        tokens = sum(int(b.response_mask_T[b.is_replayed_T].sum()) for b in microbatches)
        return DifferingExperts(by_layer=tuple(counts_L.tolist()), tokens=tokens)

    def gradient(
        self, microbatches: Sequence[PackedBatch], loss_fn: LossFunction, *, temperature: float
    ) -> tuple[Tensor, list[Any]]:
        """The gradient of ``update``, of all parameters as one float32 vector, and the losses' outputs.

        For a single process: each of several has its own part alone. Nothing is updated. Raises NonFiniteError
        if the gradient is not finite, ValueError for a frozen engine or without micro-batches.
        """
        outputs = self._accumulate_gradient(microbatches, _logprob_forward(temperature, True), loss_fn)
        parameters: list[Any] = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        loss_scale = float(self._optimizer.get_loss_scale())
        gradient = torch.cat([p.main_grad.flatten().float() for p in parameters]) / loss_scale
        if not gradient.isfinite().all():
            raise NonFiniteError(
                f"the gradient is not finite at a loss scale of {loss_scale}{self._bad_parameters()}"
            )
        return gradient, outputs

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of this pipeline stage; see ``hf_conversion.export_hf``."""
        self._require_weights("export_hf")
        return hf_conversion.export_hf(self.chunks)

    def export_plan(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """(Hugging Face name, shape) of what ``export_hf`` yields, in its order; see ``hf_conversion.export_plan``."""
        return hf_conversion.export_plan(self.chunks)

    def load_weights(self, weights: HuggingFaceWeights) -> None:
        """Replace the model's weights, but not the optimizer's copies: training cannot continue from these."""
        self._require_weights("load_weights")
        hf_conversion.load_weights(self.chunks, weights)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with this model's weights, all or nothing; see
        ``hf_conversion.save_hf``."""
        self._require_weights("save_hf")
        hf_conversion.save_hf(self.chunks, self.source, folder)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters as a folder of ``peft``, all or nothing; see ``peft_adapter``. For an engine with ``lora``."""
        assert self._lora is not None
        save_adapter(self.chunks, self._lora.config, self.source, folder)


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
        timeout_s: float = TIMEOUT_S,
    ):
        """See ``_Engine``."""
        super().__init__(
            model,
            layout,
            optimizer,
            make_chunk=ValueGPTModel,
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
        )

    def values(self, microbatches: Sequence[PackedBatch]) -> list[Tensor]:
        """values_T of each micro-batch: float32, on the device, without gradient; index t as for log-probs.

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        return [values_T for (values_T,) in self._scores(microbatches, _value_forward, 1)]

    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss_fn: ValueLossFunction,
        *,
        grad_scale: GradScale | None = None,
    ) -> UpdateResult:
        """One optimizer step, in every respect like ``MegatronEngine.update``."""
        return self._update_weights(microbatches, _value_forward, loss_fn, grad_scale)


def _logprob_forward(
    temperature: float, with_entropy: bool, replays: list[Replay] | None = None, *, records: bool = False
) -> Forward:
    """replays: gets what each call replays, with counts of the router's own choice. None: nothing is counted.
    records: the routers write their choice into the micro-batches' ``experts_TLK``, which are on the device."""

    def forward(model: LogprobGPTModel, batch: PackedBatch) -> tuple[Tensor, ...] | Tensor:
        packed = model.pack(
            batch.cu_seqlens,
            batch.positions_T,
            prompts=batch.prompts,
            experts_TLK=batch.experts_TLK,
            is_replayed_T=batch.is_replayed_T,
            counted_T=None if replays is None else batch.response_mask_T,
            records=records,
        )
        if replays is not None and isinstance(packed.routing, Replay):
            replays.append(packed.routing)
        result: Any = model.logprobs(
            tokens_T=batch.tokens_T,
            targets_T=batch.targets_T,
            mask_T=batch.response_mask_T,
            packed=packed,
            temperature=temperature,
            with_entropy=with_entropy,
            kept=batch.kept,
        )
        return result if with_entropy or not model.post_process else result[:1]

    return forward


def _value_forward(model: ValueGPTModel, batch: PackedBatch) -> tuple[Tensor] | Tensor:
    packed = model.pack(batch.cu_seqlens, batch.positions_T, prompts=batch.prompts)
    result = model.values(tokens_T=batch.tokens_T, packed=packed)
    return (result,) if model.post_process else result
