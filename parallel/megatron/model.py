"""Megatron-Core ``GPTModel`` from a Hugging Face config.json, dense or with experts, as policy or as critic.

Legend: H hidden size, F rotary frequencies.

Megatron's own rotary embedding is off (``position_embedding_type="none"``). The core attention rotates queries
and keys from one table per micro-batch, after Megatron's query/key norm and so at the same place in the
mathematics. That handles every static rope_type of transformers exactly, on packed sequences, and without a
Python loop over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from parallel.kept_sets import KeptSets
from parallel.megatron import aligned, moe, platform
from parallel.megatron.attention import PackedPlan, packed_attention, plan_packing, rotary_tables, rotate
from parallel.megatron.context_parallel import SplitPlan, split_attention, split_context
from parallel.megatron.lora import Lora, adapters_only, add_adapters, freeze_base
from parallel.megatron.rms_norm import rms_norm
from parallel.megatron.shared_prompts import SharedPlan, plan_shared_prompts, shared_attention
from parallel.megatron.vocab_parallel import linear_logprobs
from parallel.planning.families import SUPPORTED, family_of
from parallel.planning.layout import (
    Architecture,
    Experts,
    check_numerics,
    check_rope_type,
    padded_vocab_size,
    read_architecture,
    rotated_share,
)


def rotary_frequencies(folder: Path, hf_config: Mapping[str, Any]) -> tuple[Tensor, float]:
    """(inv_freq [F] float32, attention factor) that transformers computes for this config.json.

    Raises ValueError for a rope_type whose frequencies depend on the sequence length (dynamic, longrope).
    """
    # transformers and its Llama take three CPU seconds to import, and nothing else in a rank's start needs them.
    if (plain := plain_rotary(hf_config)) is not None:
        theta, size = plain
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0
    return rotary_frequencies_of_transformers(folder, str(hf_config.get("model_type")))


def plain_rotary(hf_config: Mapping[str, Any]) -> tuple[float, int] | None:
    """(theta, numbers of a head that are rotated) of a config.json with plain frequencies that names theta and the head's
    size. None for any other, such as one that leaves either to a default of transformers."""
    family = family_of(hf_config.get("model_type"))
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    thetas = {
        fields["rope_theta"]
        for fields in (hf_config, rope)
        if isinstance(fields.get("rope_theta"), int | float)
    }
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    is_plain = rope.keys() <= known and rope.get("rope_type", "default") == "default"
    share = rotated_share(hf_config, family)
    head_dim = hf_config.get("head_dim")
    if head_dim is None and hf_config.get("model_type") in ("llama", "qwen2", "mistral", "phi3"):
        head_dim = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    is_whole = share == 1.0 or family.rotated_share is not None
    if len(thetas) != 1 or not is_plain or not is_whole or not isinstance(head_dim, int):
        return None
    return thetas.pop(), int(head_dim * share)


def rotary_frequencies_of_transformers(folder: Path, model_type: str) -> tuple[Tensor, float]:
    """``rotary_frequencies`` of any config.json, by transformers itself."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = config.rope_parameters["rope_type"]
    check_rope_type(kind, model_type)
    is_part = SUPPORTED[model_type].rotated_share is not None
    plain = Glm4MoeRotaryEmbedding if is_part else LlamaRotaryEmbedding
    compute: Any = plain.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    inv_freq_F, attention_factor = compute(config, device=torch.device("cpu"))
    return inv_freq_F.float(), float(attention_factor)


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The micro-batch for every layer: Megatron's packed-sequence fields, the plan, the rotary tables, and what
    decides its experts beside the routers."""

    plan: PackedPlan
    cos_T1F: Tensor
    sin_T1F: Tensor
    routing: moe.Routing | None = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, also under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device())
        )
        # Megatron then sums this weight's gradient over tensor-parallel ranks, which see different tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class AlignedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return aligned.rms_norm(x, self.weight, self.eps)


class PackedCoreAttention(nn.Module):
    """Megatron's ``core_attention`` slot without Transformer Engine, or where sequences are split over
    context-parallel ranks: rotation, then causal attention within each sequence."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        super().__init__()
        self.scale = softmax_scale
        self.dtype = platform.attention_dtype(config.params_dtype)

    def forward(
        self, query_TAD, key_TKD, value_TKD, attention_mask, *, packed_seq_params: PackedSequences, **unused
    ) -> Tensor:
        packed, plan = packed_seq_params, packed_seq_params.plan
        query_TAD, key_TKD = (rotate(x, packed.cos_T1F, packed.sin_T1F) for x in (query_TAD, key_TKD))
        settings = {"scale": self.scale, "dtype": self.dtype}
        if isinstance(plan, SplitPlan):
            return split_attention(query_TAD, key_TKD, value_TKD, plan, **settings).flatten(1)
        if isinstance(plan, SharedPlan):
            return shared_attention(query_TAD, key_TKD, value_TKD, plan, **settings).flatten(1)
        return packed_attention(query_TAD, key_TKD, value_TKD, plan.buckets, **settings).flatten(1)


def _block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    pieces: int | None,
    lora: Lora | None,
) -> TransformerBlockSubmodules:
    """This rank's layers, each dense or with experts, and the final norm."""
    make_layer, norm = _local_layer, RMSNorm
    if pieces is not None:
        make_layer, norm = partial(_aligned_layer, pieces), AlignedRMSNorm
    elif lora is not None:
        make_layer = partial(_adaptable_layer, config.params_dtype)
    elif platform.uses_transformer_engine(config.params_dtype):
        from megatron.core.extensions.transformer_engine import TENorm

        make_layer, norm = partial(_transformer_engine_layer, config.params_dtype), TENorm
    first = get_transformer_layer_offset(config, vp_stage)
    experts = architecture.experts
    is_sparse = experts.is_sparse if experts else (False,) * architecture.num_layers
    is_sparse = is_sparse[first : first + get_num_layers_to_build(config, vp_stage)]
    layers = {sparse: make_layer(architecture, experts if sparse else None) for sparse in set(is_sparse)}
    if lora is not None:
        for sparse, layer in layers.items():
            add_adapters(layer, lora, has_experts=sparse)
    return TransformerBlockSubmodules(layer_specs=[layers[sparse] for sparse in is_sparse], layer_norm=norm)


def _local_layer(architecture: Architecture, experts: Experts | None) -> ModuleSpec:
    """A layer without Transformer Engine."""
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts and experts.num_experts,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if experts:
        moe.use_router(spec, experts)
    return spec


def _aligned_layer(pieces: int, architecture: Architecture, experts: Experts | None) -> ModuleSpec:
    """A layer of a dense model with the operations of ``numerics``; ``check_numerics`` refuses experts."""
    spec = _local_layer(architecture, experts)
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = AlignedRMSNorm
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    attention.core_attention = aligned.AlignedCoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = AlignedRMSNorm
    attention.linear_qkv = mlp.linear_fc1 = aligned.AlignedColumnLinear
    attention.linear_proj = mlp.linear_fc2 = ModuleSpec(aligned.AlignedRowLinear, {"pieces": pieces})
    return spec


def _adaptable_layer(dtype: torch.dtype, architecture: Architecture, experts: Experts | None) -> ModuleSpec:
    """A layer whose matrices may get adapters: Megatron's own, with Transformer Engine's attention where it is used."""
    spec = _local_layer(architecture, experts)
    if platform.uses_transformer_engine(dtype) and parallel_state.get_context_parallel_world_size() == 1:
        layer: Any = spec.submodules
        layer.self_attention.submodules.core_attention = _transformer_engine_attention()
    return spec


def _transformer_engine_layer(
    dtype: torch.dtype, architecture: Architecture, experts: Experts | None
) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts and experts.num_experts,
        moe_grouped_gemm=platform.uses_grouped_gemm(dtype),
        qk_layernorm=architecture.qk_norm,
    )
    layer: Any = spec.submodules
    # Transformer Engine's own context parallelism pads every sequence to a multiple of 2 cp tokens.
    is_split = parallel_state.get_context_parallel_world_size() > 1
    attention = PackedCoreAttention if is_split else _transformer_engine_attention()
    layer.self_attention.submodules.core_attention = attention
    if experts:
        moe.use_router(spec, experts)
    return spec


def _transformer_engine_attention() -> type:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class RotaryTEAttention(TEDotProductAttention):
        """Transformer Engine's packed attention on queries and keys rotated as in ``PackedCoreAttention``."""

        def forward(
            self,
            query_TAD,
            key_TKD,
            value_TKD,
            attention_mask,
            attn_mask_type,
            packed_seq_params: PackedSequences,
            **rest,
        ):
            packed = packed_seq_params
            query_TAD, key_TKD = (rotate(x, packed.cos_T1F, packed.sin_T1F) for x in (query_TAD, key_TKD))
            rest["packed_seq_params"] = PackedSeqParams(
                **{f.name: getattr(packed, f.name) for f in fields(PackedSeqParams)}
            )
            return super().forward(
                query_TAD, key_TKD, value_TKD, attention_mask, attn_mask_type=attn_mask_type, **rest
            )

    return RotaryTEAttention


def _keep_values(tensor: Tensor) -> Tensor:
    return tensor


def transformer_config(
    architecture: Architecture,
    dtype: torch.dtype,
    recompute: str,
    *,
    sequence_parallel: bool = False,
    is_aligned: bool = False,
    has_adapters: bool = False,
) -> TransformerConfig:
    """Megatron's config: sizes of the architecture and of Megatron's groups, no dropout, and no fusion that needs
    Apex or CUDA. has_adapters: layers are Megatron's own, also where Transformer Engine is installed."""
    pipeline_parallel = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=aligned.silu if is_aligned else F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual,
        # In an interleaved pipeline both neighbours may be one rank, whose batched messages would be mixed up.
        # 1F1B does not support overlap.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        variable_seq_lengths=pipeline_parallel > 1,
        # The default refuses variable lengths, even for dense models.
        moe_token_dispatcher_type="alltoall",
        # DDP is built with it; otherwise it divides gradients by the data-parallel size.
        calculate_per_token_loss=True,
        # Parameters come from the checkpoint, and nothing is drawn. Megatron's initialisation runs all the same,
        # since it marks parameters as shards, which gradient norm, export and checkpoints read.
        perform_initialization=True,
        init_method=_keep_values,
        output_layer_init_method=_keep_values,
        embedding_init_method=_keep_values,
        use_cpu_initialization=not platform.is_gpu(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=platform.uses_transformer_engine(dtype),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe.config_fields(
            architecture.experts, is_grouped=platform.uses_grouped_gemm(dtype) and not has_adapters
        ),
        **(full if recompute == "full" else {}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The common input of every model of one Hugging Face folder."""

    architecture: Architecture
    config: TransformerConfig
    inv_freq_F: Tensor
    attention_factor: float
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
            transformer_layer_spec=_block_spec(
                config, architecture, vp_stage, backbone.pieces, backbone.lora
            ),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shares_output,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        moe.mark_expert_parameters(self)
        self.architecture = architecture
        self.inv_freq_F = backbone.inv_freq_F.to(platform.device())
        self.attention_factor = backbone.attention_factor
        # Attention of Transformer Engine and of context parallelism, and that of ``numerics``, take whole sequences.
        self.uses_transformer_engine = platform.uses_transformer_engine(config.params_dtype)
        is_whole = self.uses_transformer_engine or config.context_parallel_size > 1
        self.shares_prompts = not is_whole and backbone.pieces is None
        self.lora = backbone.lora
        if self.lora is not None:
            freeze_base(self)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """All that a checkpoint holds of the model: of one with adapters the adapters alone."""
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
        cos_T1F, sin_T1F = rotary_tables(
            self.inv_freq_F, self.attention_factor, positions_T, self.config.params_dtype
        )
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
            routing=_recording(plan, experts_TLK)
            if records
            else _replay(plan, experts_TLK, is_replayed_T, counted_T),
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


def _replay(
    plan: PackedPlan, experts_TLK: Tensor | None, is_replayed_T: Tensor | None, counted_T: Tensor | None
) -> moe.Replay | None:
    if experts_TLK is None or is_replayed_T is None:
        return None
    if counted_T is not None:
        counted_T = plan.without_dummies(plan.to_model_order(counted_T & is_replayed_T))
    return moe.Replay(
        experts_TLK=plan.to_model_order(experts_TLK),
        is_replayed_T=plan.to_model_order(is_replayed_T),
        counted_T=counted_T,
    )


def _recording(plan: PackedPlan, experts_TLK: Tensor | None) -> moe.Recording | None:
    if experts_TLK is None:
        return None
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
                aligned.whole_logits,
                vocab_size=backbone.architecture.vocab_size,
                group=self.pg_collection.tp,
            )
        self.head_dtype = torch.float32 if fp32_lm_head else backbone.config.params_dtype

    def logprobs(
        self,
        *,
        tokens_T: Tensor,
        targets_T: Tensor,
        mask_T: Tensor,
        packed: PackedSequences,
        temperature: float,
        with_entropy: bool,
        kept: KeptSets | None = None,
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """float32 (logprobs_T, entropy_T or None) in the order of ``tokens_T`` on the last stage, hidden
        states on earlier ones. They are of the targets in ``mask_T`` and 0 elsewhere: nobody asks for those, and
        logits are most of a small model's work. kept: see ``linear_logprobs``."""
        plan, predictions = packed.plan, packed.plan.predictions(mask_T)
        request = {
            "places_R": predictions.places_R,
            "targets_T": targets_T[predictions.tokens_R],
            "temperature": temperature,
            "with_entropy": with_entropy,
            "kept": None if kept is None else kept.at(predictions.tokens_R),
        }
        result = self._run_request(tokens_T, packed, request)
        if not self.post_process:
            return result
        logprobs_R, entropy_R = result
        entropy_T = None if entropy_R is None else plan.scattered(entropy_R, predictions, mask_T)
        return plan.scattered(logprobs_R, predictions, mask_T), entropy_T

    def logits(self, *, tokens_T: Tensor, packed: PackedSequences) -> Tensor:
        """[T, V] over the full vocabulary, gathered over ranks, without padding: for tests, not for training."""
        result = self._run_request(tokens_T, packed, None)
        return packed.plan.to_batch_order(result) if self.post_process else result

    def _run_request(self, tokens_T: Tensor, packed: PackedSequences, request: dict | None):
        # An attribute, not an argument: Megatron would pass extra_block_kwargs to layers, not to _postprocess.
        self._request = request
        return self._run_packed(tokens_T, packed)

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
    """A critic: the same backbone, with a linear head H -> 1 without bias in place of the vocabulary.

    The head starts at zero, so that every value is exactly 0 until the first update, and the first advantages
    follow from the returns alone. A random head would add noise of any size to them. The head's gradient is not
    zero, since the hidden states are not; the backbone's gradient is zero in the first step alone.
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        # GPTModel's own method looks for the output layer's weight.
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)

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


def build_model(
    folder: Path,
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    sequence_parallel: bool = False,
    vp_stage: int | None = None,
    chunk_tokens: int = 1024,
    fp32_lm_head: bool = False,
    pieces: int | None = None,
    lora: Lora | None = None,
) -> LogprobGPTModel:
    """A chunk of the policy, with weights that ``hf_conversion.load_hf`` sets later. Needs Megatron's parallel
    groups.

    ``vp_stage`` is the number of this rank's chunk, None if each rank has one. ``fp32_lm_head``: the output
    projection runs in float32. ``pieces``: those of aligned numerics; None: default numerics. ``lora``: adapters, all that
    has gradients then; they are set later too.
    """
    backbone = _make_backbone(folder, hf_config, dtype, recompute, sequence_parallel, vp_stage, pieces, lora)
    return LogprobGPTModel(backbone, chunk_tokens=chunk_tokens, fp32_lm_head=fp32_lm_head).to(
        platform.device()
    )


def build_value_model(
    folder: Path,
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    sequence_parallel: bool = False,
    vp_stage: int | None = None,
) -> ValueGPTModel:
    """A chunk of the critic: the head is zero, the other weights are set later, as for ``build_model``."""
    return ValueGPTModel(_make_backbone(folder, hf_config, dtype, recompute, sequence_parallel, vp_stage)).to(
        platform.device()
    )


def _make_backbone(
    folder: Path,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    recompute: str,
    sequence_parallel: bool,
    vp_stage: int | None,
    pieces: int | None = None,
    lora: Lora | None = None,
) -> Backbone:
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
        pieces=pieces,
        vp_stage=vp_stage,
        lora=lora,
    )
