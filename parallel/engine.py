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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema.layout import LayoutConfig
from configs.schema.model import ModelConfig
from parallel.engine_base import TIMEOUT_S, DifferingExperts, Engine, GradScale, Training, UpdateResult
from parallel.megatron import platform
from parallel.megatron.lora import Lora, without_adapters
from parallel.megatron.model import Backbone, LogprobGPTModel, ValueGPTModel
from parallel.megatron.moe import Replay
from parallel.megatron.schedule import Forward, NonFiniteError
from parallel.packing import PackedBatch
from parallel.weights import hf_conversion
from parallel.weights.hf_files import HuggingFaceWeights
from parallel.weights.peft_adapter import save_adapter

LossFunction = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, Any]]
"""(micro-batch, logprobs_T, entropy_T) -> (scalar loss, any output).

It runs only on the last pipeline stage. Its output travels to the other stages by pickle: tensors in it should
be on the CPU.
"""

ValueLossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, values_T) -> (scalar loss, any output): see ``LossFunction``."""


class MegatronEngine(Engine):
    """A policy or, frozen, the reference policy, which has log-probs and export only. ``logprob_chunk_tokens``:
    see ``linear_logprobs``. ``lora``: adapters are trained, and nothing else."""

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        training: Training | None,
        *,
        seed: int,
        logprob_chunk_tokens: int,
        timeout_s: float = TIMEOUT_S,
        pieces: int | None = None,
        lora: Lora | None = None,
    ):
        """pieces: ``RunConfig.numerics_pieces``. None, with aligned numerics: as many as layout.tp. The rest: see
        ``Engine``."""
        self._chunk_tokens, self._fp32_lm_head = logprob_chunk_tokens, model.fp32_lm_head
        pieces = (pieces or layout.tp) if model.numerics == "aligned" else None
        super().__init__(model, layout, training, seed=seed, timeout_s=timeout_s, pieces=pieces, lora=lora)

    def _make_chunk(self, backbone: Backbone) -> LogprobGPTModel:
        return LogprobGPTModel(backbone, chunk_tokens=self._chunk_tokens, fp32_lm_head=self._fp32_lm_head)

    def logprobs(self, microbatches: Sequence[PackedBatch], *, temperature: float) -> list[Tensor]:
        """logprobs_T of each micro-batch's targets: float32, in nats, on the device, without gradient, on the response
        mask. Off it they mean nothing (see ``LogprobGPTModel``).

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        return self._scores(microbatches, _logprob_forward(temperature, with_entropy=False))

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
        scored = self._scores(blank, _logprob_forward(temperature, with_entropy=False, records=True))
        recorded: list[Tensor] = []
        for batch in blank:
            assert batch.experts_TLK is not None  # written above
            # Byte by byte, since NCCL has no int16. Every id is 0 but on the ranks that wrote it.
            for group in self.groups.of_one_dp_rank:
                dist.all_reduce(batch.experts_TLK.view(torch.uint8), dist.ReduceOp.MAX, group=group)
            recorded.append(batch.experts_TLK)
        return list(zip(scored, recorded, strict=True))

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
        The same on all ranks, not all of them, and only with one pipeline stage.

        ``grad_scale`` is called once, on every rank, after backward and the sum over ranks. Its factor
        multiplies all gradients before norm, clipping and step, as if it had multiplied every loss: for
        normalisers that are known only after the forward pass. The losses and their outputs stay unscaled. A
        float16 model's step may be skipped: see ``UpdateResult``.

        All ranks pass the same number of micro-batches, at least one. Raises NonFiniteError on all ranks, with
        unchanged weights, if a loss, the factor or the gradient's norm is not finite; ValueError for a frozen
        engine or without micro-batches.
        """
        replays: list[Replay] = []
        forward = _logprob_forward(temperature, with_entropy=True, replays=replays)
        result = self._update_weights(microbatches, forward, loss_fn, grad_scale, forward_only)
        return replace(result, differing_experts=self._differing_experts(microbatches, replays))

    def _differing_experts(
        self, microbatches: Sequence[PackedBatch], replays: Sequence[Replay]
    ) -> DifferingExperts | None:
        """A collective if experts are replayed: each rank has counted its own layers and tokens."""
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

        For a single process: each of several has only its own part. Nothing is updated. Raises NonFiniteError
        if the gradient is not finite, ValueError for a frozen engine or without micro-batches.
        """
        outputs = self._accumulate_gradient(
            microbatches, _logprob_forward(temperature, with_entropy=True), loss_fn
        )
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


class ValueEngine(Engine):
    """A critic: the backbone of a policy's folder, and a head that starts at zero (see ``ValueGPTModel``)."""

    def _make_chunk(self, backbone: Backbone) -> ValueGPTModel:
        return ValueGPTModel(backbone)

    def values(self, microbatches: Sequence[PackedBatch]) -> list[Tensor]:
        """values_T of each micro-batch: float32, on the device, without gradient; index t as for log-probs.

        All ranks of a data-parallel group pass the same number of micro-batches.
        """
        return self._scores(microbatches, _value_forward)

    def update(self, microbatches: Sequence[PackedBatch], loss_fn: ValueLossFunction) -> UpdateResult:
        """One optimizer step, like ``MegatronEngine.update``."""
        return self._update_weights(microbatches, _value_forward, loss_fn)


def _logprob_forward(
    temperature: float, *, with_entropy: bool, replays: list[Replay] | None = None, records: bool = False
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
        result: Any = model.logprobs(batch, packed, temperature=temperature, with_entropy=with_entropy)
        return result if with_entropy or not model.post_process else result[:1]

    return forward


def _value_forward(model: ValueGPTModel, batch: PackedBatch) -> tuple[Tensor] | Tensor:
    packed = model.pack(batch.cu_seqlens, batch.positions_T, prompts=batch.prompts)
    result = model.values(tokens_T=batch.tokens_T, packed=packed)
    return (result,) if model.post_process else result
