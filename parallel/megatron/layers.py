"""The layers of Megatron's ``GPTModel``: the packed core attention, dense and sparse layers.

Megatron's own rotary embedding is off (``position_embedding_type="none"``). The core attention rotates queries
and keys from one table per micro-batch, after Megatron's query/key norm and so at the same place in the
mathematics. That handles every static rope_type of transformers exactly, on packed sequences, and without a
Python loop over them.
"""

from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from numerics.delta_rule import ChunkPlan
from parallel.megatron import accumulation, aligned, moe, platform
from parallel.megatron.attention import PackedPlan, Scoring, packed_attention, paired_in_halves, rotate
from parallel.megatron.config import uses_transformer_engine
from parallel.megatron.context_parallel import SplitPlan, split_attention
from parallel.megatron.gated_activation import geglu, swiglu, use_gated_activation
from parallel.megatron.latent_attention import LatentAttention
from parallel.megatron.linear_attention import GatedDeltaNet, GatedSelfAttention
from parallel.megatron.lora import Lora, add_adapters
from parallel.megatron.norms import (
    AlignedRMSNorm,
    AllHeadsNorm,
    CentredOutputNorm,
    CentredRMSNorm,
    OutputNorm,
    RMSNorm,
    sharded_rows,
)
from parallel.megatron.shared_prompts import SharedPlan, shared_attention
from parallel.planning.architecture import Architecture
from parallel.planning.model_parts import Experts, Recurrent

accumulation.use_in_linear_layers()


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The micro-batch for every layer: Megatron's packed-sequence fields, the plan, the rotary tables, and what
    decides its experts beside the routers."""

    plan: PackedPlan
    cos_T1F: Tensor
    sin_T1F: Tensor
    window_tables: tuple[Tensor, Tensor] | None = None
    """cos and sin of layers with a window. None: they are those of all layers."""
    routing: moe.Routing | None = None
    chunks: ChunkPlan | None = None
    """For gated delta nets."""


class PackedCoreAttention(nn.Module):
    """Megatron's ``core_attention`` slot without Transformer Engine, or where sequences are split over
    context-parallel ranks: rotation, then causal attention within each sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        *,
        architecture: Architecture,
        **unused,
    ):
        """layer_number: from 1, over all stages."""
        super().__init__()
        self.scale = softmax_scale
        self.dtype = platform.attention_dtype(config.params_dtype)
        a = architecture
        self.window = a.windows[layer_number - 1] if a.windows else None
        self.paired_size = a.rotary_size if a.family.is_interleaved else 0
        self.sinks = None
        if a.family.has_sinks:
            heads = a.num_heads // config.tensor_model_parallel_size
            self.tp_group: Any = parallel_state.get_tensor_model_parallel_group()
            self.sinks = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=platform.device()))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def forward(
        self, query_TAD, key_TKD, value_TKD, attention_mask, *, packed_seq_params: PackedSequences, **unused
    ) -> Tensor:
        packed = packed_seq_params
        tables = packed.cos_T1F, packed.sin_T1F
        if self.window is not None and packed.window_tables is not None:
            tables = packed.window_tables
        heads = (query_TAD, key_TKD)
        if self.paired_size:
            heads = tuple(paired_in_halves(x, self.paired_size) for x in heads)
        query_TAD, key_TKD = (rotate(x, *tables) for x in heads)
        return self.attend(query_TAD, key_TKD, value_TKD, packed.plan).flatten(1)

    def attend(self, query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, plan: PackedPlan) -> Tensor:
        """[T, A, D] of rotated queries and keys."""
        scoring = Scoring(scale=self.scale, window=self.window, sinks_A=self.sinks)
        if isinstance(plan, SplitPlan):
            return split_attention(query_TAD, key_TKD, value_TKD, plan, scoring, dtype=self.dtype)
        if isinstance(plan, SharedPlan):
            return shared_attention(query_TAD, key_TKD, value_TKD, plan, scoring, dtype=self.dtype)
        return packed_attention(query_TAD, key_TKD, value_TKD, plan.buckets, scoring, dtype=self.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        if self.sinks is None:
            return {}
        return sharded_rows({"sinks": self.sinks}, prefix, sharded_offsets, metadata, self.tp_group)


def block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    pieces: int | None,
    lora: Lora | None,
) -> TransformerBlockSubmodules:
    """This rank's layers, each dense or with experts, and the final norm."""
    norm = CentredRMSNorm if architecture.family.centred_norms else RMSNorm
    make_layer = partial(_local_layer, config, norm)
    if pieces is not None:
        make_layer, norm = partial(_aligned_layer, config, pieces), AlignedRMSNorm
    elif lora is not None:
        make_layer = partial(_adaptable_layer, config, norm)
    elif uses_transformer_engine(architecture, config.params_dtype):
        from megatron.core.extensions.transformer_engine import TENorm

        make_layer, norm = _transformer_engine_layer, TENorm
    first = get_transformer_layer_offset(config, vp_stage)
    experts = architecture.experts
    is_sparse = experts.is_sparse if experts else (False,) * architecture.num_layers
    mine = slice(first, first + get_num_layers_to_build(config, vp_stage))
    is_sparse = is_sparse[mine]
    layers = {sparse: make_layer(architecture, experts if sparse else None) for sparse in set(is_sparse)}
    for sparse, layer in layers.items():
        if config.use_te_activation_func:
            use_gated_activation(layer, geglu if architecture.family.is_gemma else swiglu, has_experts=sparse)
        if lora is not None:
            add_adapters(layer, lora, has_experts=sparse)
    specs = [layers[sparse] for sparse in is_sparse]
    if (recurrent := architecture.recurrent) is not None:
        is_recurrent = recurrent.is_recurrent[mine]
        specs = [
            _with_delta_net(spec, recurrent) if r else spec
            for spec, r in zip(specs, is_recurrent, strict=True)
        ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _local_layer(
    config: TransformerConfig,
    norm: type,
    architecture: Architecture,
    experts: Experts | None,
    *,
    attention: type = PackedCoreAttention,
) -> ModuleSpec:
    """A layer without Transformer Engine."""
    a = architecture
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts and experts.num_experts,
        qk_layernorm=a.qk_norm or a.family.whole_qk_norm,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp if a.family.norms == "behind" else norm
    if a.family.norms != "before":
        of_output = {"config": config, "hidden_size": a.hidden_size, "eps": a.norm_eps}
        output_norm = CentredOutputNorm if a.family.centred_norms else OutputNorm
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(output_norm, of_output)
    if a.latent:
        layer.self_attention = _latent_attention(a)
    else:
        parts = layer.self_attention.submodules
        parts.core_attention = partial(attention, architecture=a)
        if a.qk_norm:
            parts.q_layernorm = parts.k_layernorm = norm
        if a.family.whole_qk_norm:
            parts.q_layernorm = ModuleSpec(AllHeadsNorm, {"heads": a.num_heads})
            parts.k_layernorm = ModuleSpec(AllHeadsNorm, {"heads": a.num_kv_heads})
        if a.recurrent is not None:
            layer.self_attention.module = GatedSelfAttention
    if experts:
        moe.use_router(spec, experts)
    return spec


def _with_delta_net(layer: ModuleSpec, recurrent: Recurrent) -> ModuleSpec:
    """The layer with a gated delta net instead of its attention."""
    submodules: Any = copy(layer.submodules)
    submodules.self_attention = ModuleSpec(GatedDeltaNet, {"recurrent": recurrent})
    return ModuleSpec(layer.module, layer.params, submodules)


def _latent_attention(architecture: Architecture) -> ModuleSpec:
    core_attention = partial(PackedCoreAttention, architecture=architecture)
    return ModuleSpec(LatentAttention, {"architecture": architecture, "core_attention": core_attention})


def _aligned_layer(
    config: TransformerConfig, pieces: int, architecture: Architecture, experts: Experts | None
) -> ModuleSpec:
    """A layer of a dense model with the operations of ``numerics``; ``check_numerics`` refuses experts."""
    core = aligned.AlignedCoreAttention
    spec = _local_layer(config, AlignedRMSNorm, architecture, experts, attention=core)
    layer: Any = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    attention.linear_qkv = mlp.linear_fc1 = aligned.AlignedColumnLinear
    attention.linear_proj = mlp.linear_fc2 = ModuleSpec(aligned.AlignedRowLinear, {"pieces": pieces})
    return spec


def _adaptable_layer(
    config: TransformerConfig, norm: type, architecture: Architecture, experts: Experts | None
) -> ModuleSpec:
    """A layer whose matrices may get adapters: Megatron's own, with Transformer Engine's attention if it is
    used."""
    spec = _local_layer(config, norm, architecture, experts)
    is_whole = parallel_state.get_context_parallel_world_size() == 1
    if uses_transformer_engine(architecture, config.params_dtype) and is_whole:
        layer: Any = spec.submodules
        layer.self_attention.submodules.core_attention = _transformer_engine_attention()
    return spec


def _transformer_engine_layer(architecture: Architecture, experts: Experts | None) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts and experts.num_experts, moe_grouped_gemm=True, qk_layernorm=architecture.qk_norm
    )
    layer: Any = spec.submodules
    if architecture.latent:
        from megatron.core.extensions.transformer_engine import TENorm

        # Otherwise it is part of the product that gives queries, keys and values.
        layer.input_layernorm = TENorm
        layer.self_attention = _latent_attention(architecture)
    else:
        # Transformer Engine's own context parallelism pads every sequence to a multiple of 2 cp tokens.
        is_split = parallel_state.get_context_parallel_world_size() > 1
        own = partial(PackedCoreAttention, architecture=architecture)
        attention = own if is_split else _transformer_engine_attention()
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
