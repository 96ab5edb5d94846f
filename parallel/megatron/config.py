"""Megatron's config of a model: the fixed settings, and those that follow from architecture, layout and
numerics."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import aligned, moe, platform
from parallel.planning.architecture import Architecture, last_stage_layers


def uses_transformer_engine(architecture: Architecture, dtype: torch.dtype) -> bool:
    """Whether the model's layers are Transformer Engine's."""
    return platform.uses_transformer_engine(dtype) and not architecture.needs_own_layers


def _keep_values(tensor: Tensor) -> Tensor:
    return tensor


_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # The default refuses variable lengths, even for dense models.
    "moe_token_dispatcher_type": "alltoall",
    # DDP is built with it; otherwise it divides gradients by the data-parallel size.
    "calculate_per_token_loss": True,
    # Parameters come from the checkpoint, and nothing is drawn. Megatron's initialisation runs all the same, since it
    # marks parameters as shards, which gradient norm, export and checkpoints read.
    "perform_initialization": True,
    **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _keep_values),
    # They need Apex or CUDA.
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of Megatron's config that no layout changes, and no model but those of ``_of_sinks``."""


def _activation(architecture: Architecture, *, is_aligned: bool) -> Callable[[Tensor], Tensor]:
    """Of the MLP's gate."""
    if architecture.family.has_sinks:
        return _sigmoid_gate
    if architecture.family.is_gemma:
        return F.gelu
    return aligned.silu if is_aligned else F.silu


def _sigmoid_gate(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate)


def _of_sinks(architecture: Architecture) -> dict[str, Any]:
    """Fields that a model with sinks changes: biases in all matrices, and gpt-oss's experts."""
    experts = architecture.experts
    if not architecture.family.has_sinks or experts is None:
        return {}
    return {"add_bias_linear": True, "activation_func_clamp_value": experts.clamp, "glu_linear_offset": 1.0}


def transformer_config(
    architecture: Architecture,
    dtype: torch.dtype,
    recompute: str,
    *,
    sequence_parallel: bool,
    is_aligned: bool,
    has_adapters: bool,
) -> TransformerConfig:
    """Megatron's config: ``_ALWAYS``, and sizes of the architecture and of Megatron's groups. has_adapters: layers are
    Megatron's own, also where Transformer Engine is installed."""
    pipeline_parallel = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    last = last_stage_layers(architecture.num_layers, pipeline_parallel, virtual or 1)
    has_engine = uses_transformer_engine(architecture, dtype)
    is_even = architecture.num_layers % pipeline_parallel == 0
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        **(_ALWAYS | _of_sinks(architecture)),
        num_layers=architecture.num_layers,
        num_layers_in_last_pipeline_stage=None if is_even else last,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        softmax_scale=architecture.score_scale,
        ffn_hidden_size=architecture.intermediate_size,
        layernorm_epsilon=architecture.norm_eps,
        activation_func=_activation(architecture, is_aligned=is_aligned),
        # Transformer Engine's layers have their own such sums, which were not tried.
        gradient_accumulation_fusion=not has_engine,
        # The activation that it names is ours: ``use_gated_activation``.
        use_te_activation_func=not (is_aligned or architecture.family.has_sinks),
        add_qkv_bias=architecture.qkv_bias,
        # Megatron would sum the gradients of norms over all heads over tensor-parallel ranks, of which each has its own part.
        qk_layernorm=architecture.qk_norm,
        attention_output_gate=architecture.recurrent is not None,
        # If layers are of two kinds, each layer has its own place in a checkpoint.
        hetereogenous_dist_checkpoint=architecture.recurrent is not None,
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
        use_cpu_initialization=not platform.is_gpu(),
        persist_layer_norm=has_engine,
        **moe.config_fields(architecture.experts, is_grouped=has_engine and not has_adapters),
        **(full if recompute == "full" else {}),
    )
