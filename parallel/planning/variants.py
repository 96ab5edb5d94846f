"""Refuses the models of a supported family that the learner, or SGLang, would not compute exactly."""

from collections.abc import Mapping
from typing import Any

from parallel.planning.config_fields import (
    check_rope_by_kind,
    check_rope_by_layers,
    check_rope_numbers,
    check_rope_type,
    check_served_rope,
    field_error,
    read_size,
    rope_of,
    rope_type_of,
    rotated_share,
)
from parallel.planning.config_parts import BY_GROUPS
from parallel.planning.families import Family

DEQUANTISED = ("fp8", "mxfp4")
"""Each a ``quant_method`` of a published ``quantization_config`` that ``tandem dequantise`` reads."""


def refuse_variants(hf_config: Mapping[str, Any], kind: str, family: Family) -> None:
    """kind: the model_type. Raises ValueError, which names the field of config.json."""
    _refuse_quantised(hf_config)
    if family.plain_windows:
        check_rope_by_layers(hf_config)
    if family.is_gemma:
        _check_gemma(hf_config)
    check_rope_type(rope_type_of(hf_config), kind)
    check_rope_numbers(hf_config)
    check_served_rope(hf_config, kind)
    if family.has_sinks:
        _check_gpt_oss(hf_config, kind)
    for name, is_set in (_of_layers(hf_config, kind, family) | _of_experts(hf_config, family)).items():
        if is_set:
            value = hf_config.get(name, rotated_share(hf_config, family))
            raise field_error(
                f"{name}={value!r}, which the learner does not compute; use a {kind} without it"
            )
    if kind == "qwen3_next":
        _refuse_unread_rotation(hf_config, rotated_share(hf_config, family))
    if family.has_window:
        _refuse_short_window(hf_config, kind, family.default_window)


def _refuse_quantised(hf_config: Mapping[str, Any]) -> None:
    if hf_config.get("quantization_config") is None:
        return
    method = check_dequantised(hf_config)["quant_method"]
    raise field_error(
        f"quantization_config with quant_method={method!r}, which the learner does not read; write the model in bfloat16 by `tandem "
        "dequantise FOLDER OUT`, and use OUT"
    )


def check_dequantised(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``quantization_config``, if ``tandem dequantise`` reads such weights. Raises ValueError otherwise."""
    quantisation = hf_config.get("quantization_config")
    fields: Mapping[str, Any] = quantisation if isinstance(quantisation, Mapping) else {}
    method = fields.get("quant_method")
    if method not in DEQUANTISED:
        raise field_error(
            f"quantization_config with quant_method={method!r}, which Tandem does not read (`tandem dequantise` reads "
            f"{' and '.join(DEQUANTISED)}); use the model as it was before it was quantised"
        )
    sizes = fields.get("weight_block_size")
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if sizes is not None and not (is_pair and all(type(size) is int and size > 0 for size in sizes)):
        raise field_error(
            f"weight_block_size={sizes!r} in its quantization_config; it must be two whole numbers above 0: restore it"
        )
    return fields


def _of_layers(hf_config: Mapping[str, Any], kind: str, family: Family) -> dict[str, bool]:
    """Fields of attention, of the MLP and of the whole model, and whether each makes it another one."""
    types = hf_config.get("layer_types")
    further = any(t != "full_attention" for t in types) if isinstance(types, list) else bool(types)
    return {
        # SGLang's code of these families computes no windows.
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "attn_output_gate": family.is_recurrent and not hf_config.get("attn_output_gate", True),
        # Of the gate behind a gated delta net's norm, which SGLang reads.
        "output_gate_type": family.is_recurrent
        and hf_config.get("output_gate_type") not in (None, "swish", "silu"),
        "layer_types": further and not (family.serves_windows or family.is_recurrent),
        "attention_bias": family.qkv_bias is False and bool(hf_config.get("attention_bias")),
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "hidden_act": not family.is_gemma and hf_config.get("hidden_act", "silu") != "silu",
        "attn_logit_softcapping": hf_config.get("attn_logit_softcapping") is not None,
        "final_logit_softcapping": hf_config.get("final_logit_softcapping") is not None,
        "use_bidirectional_attention": bool(hf_config.get("use_bidirectional_attention")),
        "is_causal": not hf_config.get("is_causal", True),
        # Only SGLang's code has these: chunks of sparse attention, and rotated pairs of neighbours.
        "dual_chunk_attention_config": bool(hf_config.get("dual_chunk_attention_config")),
        "rope_is_neox_style": not hf_config.get("rope_is_neox_style", True),
        "partial_rotary_factor": family.rotated_share is None and rotated_share(hf_config, family) != 1.0,
        # transformers' DeepSeek-V2 always interleaves, SGLang as it says.
        "rope_interleave": kind == "deepseek_v2" and not hf_config.get("rope_interleave", True),
        # SGLang reads all sizes there.
        "text_config": hf_config.get("text_config") is not None,
    }


def _of_experts(hf_config: Mapping[str, Any], family: Family) -> dict[str, bool]:
    """The same for fields of experts, of a dense model too."""
    score, methods = BY_GROUPS.get(family.experts or "", ("", ()))
    grouped, of_next = bool(methods), family.experts == "qwen3_next"
    shared = "shared_expert_intermediate_size"
    return {
        "router_jitter_noise": bool(hf_config.get("router_jitter_noise")),
        "router_bias": bool(hf_config.get("router_bias")),
        shared: not of_next and bool(hf_config.get(shared)),
        # SGLang puts experts into all layers of such a model.
        "mlp_only_layers": of_next and bool(hf_config.get("mlp_only_layers")),
        "decoder_sparse_step": of_next and hf_config.get("decoder_sparse_step", 1) != 1,
        "n_shared_experts": not grouped and bool(hf_config.get("n_shared_experts")),
        "scoring_func": grouped and hf_config.get("scoring_func", score) != score,
        "topk_method": grouped and "topk_method" in hf_config and hf_config["topk_method"] not in methods,
        "norm_topk_prob": score == "softmax" and bool(hf_config.get("norm_topk_prob")),
        # SGLang takes 1.702 whatever it says.
        "swiglu_alpha": family.has_sinks and hf_config.get("swiglu_alpha", 1.702) != 1.702,
        "moe_layer_freq": grouped and hf_config.get("moe_layer_freq", 1) != 1,
    }


def _check_gemma(hf_config: Mapping[str, Any]) -> None:
    check_rope_by_kind(hf_config)
    # SGLang has no other activation, and takes the embeddings for the output layer whatever config.json says.
    for name, value in (("hidden_activation", "gelu_pytorch_tanh"), ("tie_word_embeddings", True)):
        if hf_config.get(name, value) != value:
            raise field_error(
                f"{name}={hf_config[name]!r}, which SGLang does not compute; it must be {value!r}"
            )


def _check_gpt_oss(hf_config: Mapping[str, Any], kind: str) -> None:
    if not hf_config.get("attention_bias"):
        raise field_error(f"attention_bias={hf_config.get('attention_bias')!r}; it must be true: restore it")


def _refuse_short_window(hf_config: Mapping[str, Any], kind: str, default: int | None) -> None:
    fields = {"sliding_window": default, **hf_config}
    if fields["sliding_window"] is None:
        return
    window, positions = (read_size(fields, name) for name in ("sliding_window", "max_position_embeddings"))
    if window < positions:
        raise field_error(
            f"sliding_window={window!r}, which SGLang does not compute in a {kind}, with "
            f"max_position_embeddings={positions!r}; set sliding_window to null and max_position_embeddings to at most {window!r}: up to "
            "that length both are the same"
        )


def _refuse_unread_rotation(hf_config: Mapping[str, Any], share: float) -> None:
    """Of a Qwen3-Next, whose rope parameters SGLang does not read."""
    theta = rope_of(hf_config).get("rope_theta", hf_config.get("rope_theta", 10_000.0))
    for name, value, default in (("rope_theta", theta, 10_000.0), ("partial_rotary_factor", share, 0.25)):
        if hf_config.get(name, default) != value:
            raise field_error(
                f"{name}={value!r} in its rope parameters, where SGLang does not read it; write it beside them too"
            )
