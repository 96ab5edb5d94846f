"""Megatron-Core ``GPTModel`` from a Hugging Face config.json, dense or with experts, as policy or as critic.

Legend: H hidden size, F rotary frequencies. Its layers: ``layers.py``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from numerics.delta_rule import plan_chunks
from parallel.megatron import aligned, moe, platform
from parallel.megatron.attention import PackedPlan, plan_packing, rotary_tables
from parallel.megatron.config import transformer_config
from parallel.megatron.context_parallel import split_context
from parallel.megatron.layers import PackedSequences, block_spec
from parallel.megatron.lora import Lora, adapters_only, freeze_base
from parallel.megatron.rotary import rotary_frequencies, window_frequencies
from parallel.megatron.shared_prompts import plan_shared_prompts
from parallel.megatron.vocab_parallel import linear_logprobs
from parallel.packing import PackedBatch
from parallel.planning.architecture import Architecture, padded_vocab_size, read_architecture
from parallel.planning.layout import check_numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The common input of every model of one Hugging Face folder."""

    architecture: Architecture
    config: TransformerConfig
    inv_freq_F: Tensor
    attention_factor: float
    window_freq_F: Tensor | None
    """Of layers with a window, if these differ. Their attention factor is 1."""
    pieces: int | None
    """``RunConfig.numerics_pieces`` of aligned numerics; None: default numerics."""
    vp_stage: int | None
    """Number of this rank's chunk; None if the pipeline is not interleaved."""
    lora: Lora | None = None
    """None: the model has no adapters."""


class PackedGPTModel(GPTModel):
    """A ``GPTModel`` on packed micro-batches, whose last stage is the subclass's ``_postprocess``.

    ``shares_output``: the output layer's weight is the embedding's. On the last of several pipeline stages it is
    a copy, which Megatron keeps equal by summing the gradients of both.
    """

    def __init__(self, backbone: Backbone, *, shares_output: bool):
        architecture, config, vp_stage = backbone.architecture, backbone.config, backbone.vp_stage
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, architecture, vp_stage, backbone.pieces, backbone.lora),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shares_output,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        moe.mark_expert_parameters(self)
        if self.pre_process:
            embedding: nn.Module = self.embedding
            embedding.register_forward_hook(_in_rows)
            if architecture.family.is_gemma:
                factor = torch.tensor(architecture.hidden_size**0.5, dtype=config.params_dtype).item()
                # Its output, since a tied output layer reads the weight.
                embedding.register_forward_hook(partial(_scaled, factor))
        layers: Any = self.decoder.layers
        for layer in layers:
            # Megatron's records gradients here in a pass without any too, and norms of outputs would keep their inputs.
            layer.bias_dropout_add_exec_handler = nullcontext
        self.architecture = architecture
        self.inv_freq_F = backbone.inv_freq_F.to(platform.device())
        self.attention_factor = backbone.attention_factor
        self.window_freq_F = backbone.window_freq_F
        if self.window_freq_F is not None:
            self.window_freq_F = self.window_freq_F.to(platform.device())
        # Attention of Transformer Engine and of context parallelism, and that of ``numerics``, take whole sequences.
        has_transformer_engine = platform.uses_transformer_engine(config.params_dtype)
        self.uses_transformer_engine = has_transformer_engine and not architecture.needs_own_attention
        is_whole = self.uses_transformer_engine or config.context_parallel_size > 1
        # A gated delta net would need the state at a prompt's end for each of its samples.
        self.shares_prompts = not is_whole and backbone.pieces is None and architecture.recurrent is None
        self.lora = backbone.lora
        if self.lora is not None:
            freeze_base(self)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """All that a checkpoint holds of the model: with adapters, only the adapters."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state if self.lora is None else adapters_only(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """The state of ``sharded_state_dict``."""
        if self.lora is None:
            return super().load_state_dict(state_dict, strict, assign)
        wanted = adapters_only(dict(self.named_parameters())).keys()
        if wanted != state_dict.keys():
            raise ValueError(f"adapters differ: {', '.join(sorted(wanted ^ state_dict.keys())[:5])}")
        return super().load_state_dict(state_dict, False, assign)

    def pack(
        self,
        cu_seqlens: Tensor,
        positions_T: Tensor,
        *,
        prompts: tuple[Tensor, Tensor] | None = None,
        experts_TLK: Tensor | None = None,
        is_replayed_T: Tensor | None = None,
        counted_T: Tensor | None = None,
        records: bool = False,
    ) -> PackedSequences:
        """The plan and rotary tables of a micro-batch, and the experts that are replayed (see ``moe.Replay``).

        prompts: see ``PackedBatch.prompts``. They are computed once where this model can (``shares_prompts``) and no
        experts are replayed or recorded: samples of one prompt may have been sent to different ones.

        records: the routers choose by themselves, and write their choice into ``experts_TLK``.
        """
        device = positions_T.device
        plan = self._plan(cu_seqlens, device, prompts if experts_TLK is None else None)
        longest = int(torch.diff(cu_seqlens).max())
        if longest > self.architecture.max_positions:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds max_position_embeddings={self.architecture.max_positions}"
            )
        positions_T = plan.to_model_order(positions_T)
        dtype = platform.rotary_dtype(self.config.params_dtype, self.architecture.rotated_head)
        cos_T1F, sin_T1F = rotary_tables(self.inv_freq_F, self.attention_factor, positions_T, dtype)
        window_tables = None
        if self.window_freq_F is not None:
            window_tables = rotary_tables(self.window_freq_F, 1.0, positions_T, dtype)
        routing = None
        if experts_TLK is not None and records:
            routing = _recording(plan, experts_TLK)
        elif experts_TLK is not None and is_replayed_T is not None:
            routing = _replay(plan, experts_TLK, is_replayed_T, counted_T)
        bounds = plan.cu_seqlens.to(device)
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            plan=plan,
            cos_T1F=cos_T1F,
            sin_T1F=sin_T1F,
            window_tables=window_tables,
            chunks=None if self.architecture.recurrent is None else plan_chunks(plan.cu_seqlens, device),
            routing=routing,
        )

    def _plan(
        self, cu_seqlens: Tensor, device: torch.device, prompts: tuple[Tensor, Tensor] | None
    ) -> PackedPlan:
        multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        if prompts is not None and self.shares_prompts:
            return plan_shared_prompts(cu_seqlens, *prompts, device, multiple=multiple)
        group = self.pg_collection.cp
        if group.size() > 1:
            whole = plan_packing(cu_seqlens, device)
            return split_context(
                whole, device, size=group.size(), rank=group.rank(), group=group, multiple=multiple
            )
        keep_order = self.uses_transformer_engine  # it needs no reordering
        return plan_packing(cu_seqlens, device, keep_order=keep_order, multiple=multiple)

    def _run_packed(self, tokens_T: Tensor, packed: PackedSequences):
        """The result of ``_postprocess``, in the plan's order."""
        return self(packed.plan.to_model_order(tokens_T).unsqueeze(0), None, None, packed_seq_params=packed)


def _in_rows(module: nn.Module, inputs: tuple, embeddings: Tensor) -> Tensor:
    """The same [T, 1, H], whose strides tell that it is T rows. Megatron's are those of a transposed [1, T, H], from which torch
    makes T products of one row each where the matrix is frozen: slower, and rounded otherwise than one product."""
    return embeddings.flatten(0, 1).unsqueeze(1)


def _scaled(factor: float, module: nn.Module, inputs: tuple, embeddings: Tensor) -> Tensor:
    return embeddings * factor


def _replay(
    plan: PackedPlan, experts_TLK: Tensor, is_replayed_T: Tensor, counted_T: Tensor | None
) -> moe.Replay:
    if counted_T is not None:
        counted_T = plan.without_dummies(plan.to_model_order(counted_T & is_replayed_T))
    return moe.Replay(
        experts_TLK=plan.to_model_order(experts_TLK),
        is_replayed_T=plan.to_model_order(is_replayed_T),
        counted_T=counted_T,
    )


def _recording(plan: PackedPlan, experts_TLK: Tensor) -> moe.Recording:
    places_T = torch.arange(len(experts_TLK), device=experts_TLK.device)
    order_T = plan.to_model_order(places_T)
    is_token_T = plan.without_dummies(torch.ones_like(order_T, dtype=torch.bool))
    return moe.Recording(experts_TLK=experts_TLK, order_T=order_T, is_token_T=is_token_T)


class LogprobGPTModel(PackedGPTModel):
    """A policy: its last stage returns (logprobs_T, entropy_T) of given targets rather than logits."""

    def __init__(self, backbone: Backbone, *, chunk_tokens: int, fp32_lm_head: bool):
        super().__init__(backbone, shares_output=backbone.architecture.tied)
        self.chunk_tokens = chunk_tokens
        self.whole_logits = None
        if backbone.pieces is not None:
            self.whole_logits = partial(
                aligned.whole_logits, vocab_size=backbone.architecture.vocab_size, group=self.pg_collection.tp
            )
        self.head_dtype = torch.float32 if fp32_lm_head else backbone.config.params_dtype

    def logprobs(
        self, batch: PackedBatch, packed: PackedSequences, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """float32 (logprobs_T, entropy_T or None) in the order of the batch on the last stage, hidden states on earlier ones.
        They are of the response tokens (of the first token, where there is none) and 0 elsewhere: nobody asks for those, and
        logits are most of a small model's work."""
        plan, mask_T, kept = packed.plan, batch.response_mask_T, batch.kept
        predictions = plan.predictions(mask_T)
        request = {
            "places_R": predictions.places_R,
            "targets_T": batch.targets_T[predictions.tokens_R],
            "temperature": temperature,
            "with_entropy": with_entropy,
            "kept": kept.at(predictions.tokens_R) if kept is not None and self.post_process else None,
        }
        result = self._run_request(batch.tokens_T, packed, request)
        if not self.post_process:
            return result
        logprobs_R, entropy_R = result
        entropy_T = None if entropy_R is None else plan.scattered(entropy_R, predictions, mask_T)
        return plan.scattered(logprobs_R, predictions, mask_T), entropy_T

    def logits(self, *, tokens_T: Tensor, packed: PackedSequences) -> Tensor:
        """[T, V] over the full vocabulary, gathered over ranks, without padding: for studies, not for training."""
        result = self._run_request(tokens_T, packed, None)
        return packed.plan.to_batch_order(result) if self.post_process else result

    def _run_request(self, tokens_T: Tensor, packed: PackedSequences, request: dict | None):
        # An attribute, not an argument: Megatron would pass extra_block_kwargs to layers, not to _postprocess.
        self._request = request
        result = self._run_packed(tokens_T, packed)
        self._request = None  # its kept ids may be larger than the logits
        return result

    def _postprocess(self, hidden_states, **unused):
        if not self.post_process:
            return hidden_states
        weight_VH = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert weight_VH is not None  # on the last stage
        # Forward gathers, or does nothing; backward sums over tensor-parallel ranks, each of which has the
        # gradient of its own part of the vocabulary.
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True
            )
        else:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        hidden_TH = hidden_states.squeeze(1)
        if self._request is None:
            logits_TV = tensor_parallel.gather_from_tensor_model_parallel_region(
                hidden_TH.to(self.head_dtype) @ weight_VH.to(self.head_dtype).t()
            )
            return logits_TV[:, : self.architecture.vocab_size]
        request = dict(self._request)
        return linear_logprobs(
            hidden_TH[request.pop("places_R")],
            weight_VH,
            vocab_size=self.architecture.vocab_size,
            chunk_tokens=self.chunk_tokens,
            group=self.pg_collection.tp,
            dtype=self.head_dtype,
            whole_logits=self.whole_logits,
            **request,
        )


class ValueGPTModel(PackedGPTModel):
    """A critic: the same backbone, with a linear head H -> 1 without bias instead of the vocabulary.

    The head starts at zero, so that every value is exactly 0 until the first update, and the first advantages
    follow from the returns alone. A random head would add noise of any size to them. The head's gradient is not
    zero, since the hidden states are not; the backbone's gradient is zero only in the first step.
    """

    def __init__(self, backbone: Backbone):
        super().__init__(backbone, shares_output=False)
        if self.post_process:
            # A critic has no logits, and GPTModel always gives the last stage an output layer.
            del self.output_layer
            config = backbone.config
            self.value_head = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            nn.init.zeros_(self.value_head.weight)
            # The head is replicated. Under sequence parallelism each tensor-parallel rank has its own tokens'
            # gradient, and Megatron sums them; otherwise each rank has the whole gradient.
            self.value_head.weight.sequence_parallel = config.sequence_parallel

    sharded_state_dict = MegatronModule.sharded_state_dict  # GPTModel's looks for the output layer's weight

    def values(self, *, tokens_T: Tensor, packed: PackedSequences) -> Tensor:
        """float32 values_T in the order of ``tokens_T`` on the last stage, hidden states on earlier ones.

        V_t = w . h_t, h_t the final hidden state at input token t: the value of the state in which
        ``targets_T[t]`` is chosen.
        """
        result = self._run_packed(tokens_T, packed)
        return packed.plan.to_batch_order(result) if self.post_process else result

    def _postprocess(self, hidden_states, **unused):
        if not self.post_process:
            return hidden_states
        # float32: a bfloat16 product would round a value of 1 to steps of 1/128.
        values_T11 = F.linear(hidden_states.float(), self.value_head.weight.float())
        if self.config.sequence_parallel:
            # Every rank's loss covers all values: backward keeps this rank's tokens and sums nothing.
            values_T11 = tensor_parallel.gather_from_sequence_parallel_region(
                values_T11, tensor_parallel_output_grad=False
            )
        return values_T11.flatten()


def make_backbone(
    folder: Path,
    hf_config: Mapping[str, Any],
    vp_stage: int | None,
    *,
    dtype: torch.dtype,
    recompute: str,
    sequence_parallel: bool,
    pieces: int | None,
    lora: Lora | None,
) -> Backbone:
    """For a chunk of a policy or a critic. Needs Megatron's parallel groups. Fields: see ``Backbone``."""
    architecture = read_architecture(hf_config)
    if pieces is not None:
        check_numerics(pieces, architecture)
    inv_freq_F, attention_factor = rotary_frequencies(folder, hf_config)
    return Backbone(
        architecture=architecture,
        config=transformer_config(
            architecture,
            dtype,
            recompute,
            sequence_parallel=sequence_parallel,
            is_aligned=pieces is not None,
            has_adapters=lora is not None,
        ),
        inv_freq_F=inv_freq_F,
        attention_factor=attention_factor,
        window_freq_F=window_frequencies(hf_config),
        pieces=pieces,
        vp_stage=vp_stage,
        lora=lora,
    )
