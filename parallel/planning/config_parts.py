"""Reads experts and recurrent layers from config.json. Each function raises ValueError for numbers that contradict each other."""

from collections.abc import Mapping
from typing import Any, Literal

from parallel.planning.config_fields import (
    field_error,
    read_field,
    read_flag,
    read_positive_number,
    read_size,
)
from parallel.planning.families import Family
from parallel.planning.model_parts import Experts, Recurrent

BY_GROUPS: dict[str, tuple[Literal["softmax", "sigmoid"], tuple[str, ...]]] = {
    "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy")),
    "deepseek_v3": ("sigmoid", ("noaux_tc",)),
}
"""By ``Family.experts``: the score of experts, and the ``topk_method`` that may choose among them."""


def read_experts(hf_config: Mapping[str, Any], kind: str, family: Family, num_layers: int) -> Experts | None:
    if family.experts is None:
        return None
    if family.experts in BY_GROUPS:
        return _read_grouped_experts(hf_config, kind, family, num_layers)
    has_shared, has_clamp = family.experts == "qwen3_next", family.experts == "gpt_oss"
    size_name, norm_topk, dense, every = "intermediate_size", True, [], 1
    if family.experts in ("qwen3_moe", "qwen3_next"):
        size_name = "moe_intermediate_size"
        norm_topk = read_flag(hf_config, "norm_topk_prob", default=has_shared)
        dense = _read_dense_layers(hf_config, num_layers)
        every = read_size(hf_config, "decoder_sparse_step", default=1)
    # Recent versions of transformers write Mixtral's name for either family.
    count_name = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    count, chosen = _read_counts(hf_config, count_name)
    is_sparse = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if not any(is_sparse):
        raise field_error(
            f"mlp_only_layers={dense} and decoder_sparse_step={every}, which leave none of the {num_layers} layers "
            "with experts; restore it, or use a dense model"
        )
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=read_size(hf_config, size_name),
        norm_topk=norm_topk,
        is_sparse=is_sparse,
        shared_size=read_size(hf_config, "shared_expert_intermediate_size") if has_shared else 0,
        has_shared_gate=has_shared,
        clamp=read_positive_number(hf_config, "swiglu_limit") if has_clamp else None,
    )


def _read_dense_layers(hf_config: Mapping[str, Any], num_layers: int) -> list[int]:
    dense = hf_config.get("mlp_only_layers")
    if dense is None:
        return []
    if not isinstance(dense, list) or not all(type(n) is int and 0 <= n < num_layers for n in dense):
        raise field_error(
            f"mlp_only_layers={dense!r}; it must be a list of numbers of its {num_layers} layers, from 0"
        )
    return dense


def _read_grouped_experts(
    hf_config: Mapping[str, Any], kind: str, family: Family, num_layers: int
) -> Experts:
    """Of DeepSeek's models and of GLM-4.5 and later, which name their fields alike."""
    count, chosen = _read_counts(hf_config, "n_routed_experts")
    default = None if kind in BY_GROUPS else 1  # SGLang has none for DeepSeek's models
    groups, best = (read_size(hf_config, name, default=default) for name in ("n_group", "topk_group"))
    if hf_config.get("topk_method") == "greedy" and groups > 1:
        raise field_error(f"n_group={groups}, which topk_method='greedy' contradicts; restore it")
    if (
        count % groups
        or best > groups
        or chosen > best * count // groups
        or (groups > 1 and count < 2 * groups)
    ):
        raise field_error(
            f"n_group={groups} and topk_group={best}, which do not fit n_routed_experts={count} and "
            f"num_experts_per_tok={chosen}; restore it"
        )
    dense = read_field(hf_config, "first_k_dense_replace")
    if type(dense) is not int or not 0 <= dense < num_layers:
        raise field_error(
            f"first_k_dense_replace={dense!r}, which leaves none of the {num_layers} layers with experts, or is no "
            "number of layers; restore it, or use a dense model"
        )
    is_sparse = tuple(layer >= dense for layer in range(num_layers))
    kinds = hf_config.get("mlp_layer_types")
    if kinds is not None and kinds != ["sparse" if sparse else "dense" for sparse in is_sparse]:
        raise field_error(
            f"mlp_layer_types={kinds!r}, which first_k_dense_replace={dense} contradicts; restore it"
        )
    if kind in BY_GROUPS:
        for name in ("topk_method", "scoring_func", "moe_layer_freq"):
            read_field(hf_config, name)
    size = read_size(hf_config, "moe_intermediate_size")
    score = BY_GROUPS[family.experts or ""][0]
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=size,
        norm_topk=read_flag(hf_config, "norm_topk_prob", default=score == "sigmoid"),
        is_sparse=is_sparse,
        score=score,
        float32_logits=True,
        has_bias=score == "sigmoid",
        scale=read_positive_number(hf_config, "routed_scaling_factor"),
        shared_size=size * read_size(hf_config, "n_shared_experts"),
        num_groups=groups,
        top_groups=best,
    )


def _read_counts(hf_config: Mapping[str, Any], count_name: str) -> tuple[int, int]:
    """(experts, experts of a token)."""
    count = read_size(hf_config, count_name)
    chosen = read_size(hf_config, "num_experts_per_tok")
    if chosen > count:
        raise field_error(f"num_experts_per_tok={chosen}, more than its {count_name}={count}; restore it")
    return count, chosen


def read_recurrent(hf_config: Mapping[str, Any], num_layers: int) -> Recurrent:
    kinds = hf_config.get("layer_types")
    if "full_attention_interval" not in hf_config and isinstance(kinds, list) and "full_attention" in kinds:
        raise ValueError(
            f"config.json lacks 'full_attention_interval', which SGLang reads; add it: by its layer_types it is "
            f"{kinds.index('full_attention') + 1}"
        )
    every = read_size(hf_config, "full_attention_interval")
    is_recurrent = tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if kinds is not None and kinds != ["linear_attention" if r else "full_attention" for r in is_recurrent]:
        raise field_error(
            f"layer_types={kinds!r}, which full_attention_interval={every} contradicts; restore it"
        )
    if len(set(is_recurrent)) == 1:
        raise field_error(
            f"full_attention_interval={every} and {num_layers} layers, which gives layers of only one kind; restore it"
        )
    key_heads, value_heads = (read_size(hf_config, f"linear_num_{part}_heads") for part in ("key", "value"))
    if value_heads % key_heads:
        raise field_error(
            f"linear_num_value_heads={value_heads}, not a multiple of linear_num_key_heads={key_heads}; restore it"
        )
    return Recurrent(
        is_recurrent=is_recurrent,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=read_size(hf_config, "linear_key_head_dim"),
        value_dim=read_size(hf_config, "linear_value_head_dim"),
        width=read_size(hf_config, "linear_conv_kernel_dim"),
    )
