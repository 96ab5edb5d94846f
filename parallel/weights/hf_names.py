"""Names of tensors in Megatron and in Hugging Face folders, with the global numbers of layers and experts."""

import re
from functools import cache
from itertools import chain

from parallel.planning.architecture import Architecture

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
TOP = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}

_ATTENTION = {
    # Transformer Engine fuses the norm.
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
}
_BIAS_OF_QKV = {"self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv")}
_QK_NORMS = {f"self_attention.{x}_layernorm.weight": (f"self_attn.{x}_norm.weight",) for x in "qk"}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
}
_DENSE_MLP = {
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_SINKS = {
    "self_attention.core_attention.sinks": ("self_attn.sinks",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
}
DOWN = "self_attention.linear_down.weight"
_LATENT = {
    DOWN: ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up.weight": ("self_attn.kv_b_proj.weight",),
}
_LATENT_QUERIES = {
    DOWN: ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up.weight": ("self_attn.q_b_proj.weight",),
}
"""Where queries come from a short vector too. Otherwise they come from ``linear_q``."""
LINEAR_IN, CONVOLUTION = "self_attention.linear_in.weight", "self_attention.conv_weight"
_RECURRENT = {
    LINEAR_IN: ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    CONVOLUTION: ("linear_attn.conv1d.weight",),
    "self_attention.dt_bias": ("linear_attn.dt_bias",),
    "self_attention.A_log": ("linear_attn.A_log",),
    "self_attention.norm_weight": ("linear_attn.norm.weight",),
    "self_attention.linear_proj.weight": ("linear_attn.out_proj.weight",),
}
_SEPARATE = {LINEAR_IN: tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))}
"""Where a folder has a gated delta net's inputs apart."""
_FUSED = {
    "qkv": {"self_attention.linear_qkv.weight": ("self_attn.qkv_proj.weight",)},
    "gate_up": {"mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",)},
}
"""In a family whose folders hold fused matrices: q, k and v, or gate and up, one above the other."""
_OF_INPUTS = ("input_layernorm.weight", "layer_norm_weight", "pre_mlp_layernorm.weight")
"""Ends of the names of norms before attention and MLP."""
_OF_OUTPUTS = {
    "behind": {
        "self_attn_bda.weight": ("post_attention_layernorm.weight",),
        "mlp_bda.weight": ("post_feedforward_layernorm.weight",),
    },
    "both": {
        "self_attn_bda.weight": ("post_self_attn_layernorm.weight",),
        "mlp_bda.weight": ("post_mlp_layernorm.weight",),
    },
}
"""Norms of the outputs of attention and MLP, by ``Family.norms``. "behind" has no others."""
_OF_OUTPUTS["gemma3_text"] = _OF_OUTPUTS["behind"] | {
    name: ("pre_feedforward_layernorm.weight",)
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
}
# MLPs of layers with experts; {} is the expert's number.
_ROUTER = "mlp.router.weight"
_SHARED = tuple(f"mlp.shared_experts.linear_{part}.weight" for part in ("fc1", "fc2"))
_FC1, _FC2 = (f"mlp.experts.local_experts.{{}}.linear_{part}.weight" for part in ("fc1", "fc2"))
_EXPERT_MLP = {
    "qwen3_moe": {
        _ROUTER: ("mlp.gate.weight",),
        _FC1: ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        _FC2: ("mlp.experts.{}.down_proj.weight",),
    },
    "mixtral": {
        _ROUTER: ("block_sparse_moe.gate.weight",),
        _FC1: ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        _FC2: ("block_sparse_moe.experts.{}.w2.weight",),
    },
}
_EXPERT_MLP["deepseek_v2"] = _EXPERT_MLP["qwen3_moe"] | {
    _SHARED[0]: ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    _SHARED[1]: ("mlp.shared_experts.down_proj.weight",),
}
_EXPERT_MLP["deepseek_v3"] = _EXPERT_MLP["deepseek_v2"] | {
    "mlp.router.correction_bias": ("mlp.gate.e_score_correction_bias",)
}
_BIASES = {name: name.replace(".weight", ".bias") for name in (_ROUTER, _FC1, _FC2)}
_EXPERT_MLP["gpt_oss"] = {
    _ROUTER: ("mlp.router.weight",),
    _BIASES[_ROUTER]: ("mlp.router.bias",),
    _FC1: ("mlp.experts.gate_up_proj",),
    _BIASES[_FC1]: ("mlp.experts.gate_up_proj_bias",),
    _FC2: ("mlp.experts.down_proj",),
    _BIASES[_FC2]: ("mlp.experts.down_proj_bias",),
}
"""One tensor has all experts of a layer, [E, ...]: of each the transposed matrix, and gate and up row by row in turn."""
_EXPERT_MLP["qwen3_next"] = _EXPERT_MLP["qwen3_moe"] | {
    _SHARED[0]: ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    _SHARED[1]: ("mlp.shared_expert.down_proj.weight",),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
}
_KEPT = re.compile(r"\.e_score_correction_bias$|\.router\.correction_bias$")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+(?=\.)")
# Transformer Engine's grouped experts are numbered at the end.
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


def expert_of(name: str) -> int | None:
    """The number of the expert that the tensor ``name`` belongs to; None for any other tensor."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[0])


def with_expert(name: str, expert: int) -> str:
    """The name of the same tensor of another expert."""
    return _EXPERT.sub(str(expert), name)


def is_of_all_experts(hf_name: str) -> bool:
    """Whether the Hugging Face tensor has a layer's experts one after another."""
    return re.search(r"\.experts\.(gate_up|down)_proj(_bias)?$", hf_name) is not None


def ungrouped(name: str) -> str:
    """The tensor's name in a model whose experts are separate modules."""
    return _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1", name)


def is_kept_float32(name: str) -> bool:
    """Whether the tensor of this Hugging Face or Megatron name is float32 whatever the model's dtype, in the learner, in
    folders, and at the servers: the bias of a choice of experts, whose ties would fall otherwise."""
    return _KEPT.search(name) is not None


def is_left_out(name: str, architecture: Architecture) -> bool:
    """Whether the Hugging Face tensor belongs to a layer that predicts further tokens, which is neither loaded nor
    exported."""
    if architecture.recurrent is not None and name.startswith("mtp."):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first = architecture.num_layers
    return match is not None and first <= int(match[1]) < first + architecture.further_layers


def hf_names(name: str, architecture: Architecture) -> tuple[str, ...]:
    """The Hugging Face tensors of a Megatron tensor, in order."""
    if name in TOP:
        return (TOP[name],)
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.LAYER.REST
    suffixes = _layer_parts(architecture, int(layer))[_EXPERT.sub("{}", rest)]
    return tuple(f"model.layers.{layer}.{suffix.format(expert_of(rest))}" for suffix in suffixes)


def _layer_parts(architecture: Architecture, layer: int) -> dict[str, tuple[str, ...]]:
    """{name of a layer's tensor in Megatron: Hugging Face names}, with and without Transformer Engine. {} is an expert's
    number."""
    experts = architecture.experts
    is_sparse = experts is not None and experts.is_sparse[layer]
    return _parts_of_kind(architecture, architecture.is_recurrent(layer), is_sparse)


@cache
def _parts_of_kind(a: Architecture, is_recurrent: bool, is_sparse: bool) -> dict[str, tuple[str, ...]]:
    mlp = _EXPERT_MLP[a.family.experts or ""] if is_sparse else _DENSE_MLP
    if is_recurrent:
        return _LAYER | mlp | _RECURRENT | (_SEPARATE if a.family.separate_inputs else {})
    if a.latent is not None:
        queries = {"self_attention.linear_q.weight": ("self_attn.q_proj.weight",)}
        return _LAYER | mlp | _LATENT | (_LATENT_QUERIES if a.latent.query_rank is not None else queries)
    parts = _LAYER | _ATTENTION | mlp
    parts |= _BIAS_OF_QKV if a.qkv_bias else {}
    parts |= _QK_NORMS if a.qk_norm or a.family.whole_qk_norm else {}
    parts |= _OF_OUTPUTS.get(a.model_type, _OF_OUTPUTS.get(a.family.norms, {}))
    parts |= _SINKS if a.family.has_sinks else {}
    for matrix in a.family.fused:
        parts |= _FUSED[matrix]
    is_behind = a.family.norms == "behind"
    return {rest: names for rest, names in parts.items() if not (is_behind and rest.endswith(_OF_INPUTS))}


def all_hf_names(architecture: Architecture) -> set[str]:
    """Every tensor that a folder of this model must have."""
    names = {TOP[EMBEDDING], TOP[FINAL_NORM]} | (set() if architecture.tied else {TOP[OUTPUT]})
    experts = range(architecture.experts.num_experts if architecture.experts else 0)
    for layer in range(architecture.num_layers):
        for suffix in chain.from_iterable(_layer_parts(architecture, layer).values()):
            numbers = experts if "{}" in suffix else [None]
            names.update(f"model.layers.{layer}.{suffix.format(number)}" for number in numbers)
    return names


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of every tensor that a folder of this model must have."""
    rows, columns = _rows_of_modules(architecture), _columns_of_modules(architecture)

    def shape(name: str) -> tuple[int, ...]:
        if is_of_all_experts(name):
            return _stacked_shape(name, architecture)
        if ".linear_attn." in name:
            return _recurrent_shape(name.partition(".linear_attn.")[2], architecture)
        module, kind = name.split(".")[-2:]
        if kind == "sinks":
            return (architecture.num_heads,)
        if kind == "e_score_correction_bias":
            return (rows["gate"],)
        of_mlp = _mlp_size(name, architecture)
        num_rows = of_mlp if module in _TO_MLP else rows.get(module, architecture.hidden_size)
        if kind == "bias" or module.endswith("norm"):
            return (num_rows,)
        return num_rows, of_mlp if module in _FROM_MLP else columns.get(module, architecture.hidden_size)

    return {name: shape(name) for name in all_hf_names(architecture)}


_TO_MLP, _FROM_MLP = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")


def _rows_of_modules(a: Architecture) -> dict[str, int]:
    """Where they are not the hidden size, nor an MLP's."""
    heads, kv_heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    num_experts = a.experts.num_experts if a.experts else 0
    rows = {
        "embed_tokens": a.vocab_size, "lm_head": a.vocab_size,
        "q_proj": heads if a.recurrent is None else 2 * heads,  # a gate for each head
        "k_proj": kv_heads, "v_proj": kv_heads, "qkv_proj": heads + 2 * kv_heads,
        "q_norm": heads if a.family.whole_qk_norm else a.head_dim, "k_norm": kv_heads if a.family.whole_qk_norm else a.head_dim,
        "gate_up_proj": 2 * a.intermediate_size,
        "gate": num_experts, "router": num_experts, "shared_expert_gate": 1,
    }  # fmt: skip
    if a.latent is not None:
        of_queries = a.latent.query_rank or 0
        rows |= {
            "q_a_proj": of_queries, "q_a_layernorm": of_queries, "q_b_proj": heads,
            "kv_a_proj_with_mqa": a.latent.rank + a.rotary_size, "kv_a_layernorm": a.latent.rank,
            "kv_b_proj": a.num_heads * (a.head_dim - a.rotary_size + a.value_dim),
        }  # fmt: skip
    return rows


def _columns_of_modules(a: Architecture) -> dict[str, int]:
    """Where they are not the hidden size, nor an MLP's."""
    columns = {"o_proj": a.num_heads * a.value_dim}
    if a.latent is not None:
        columns |= {"q_b_proj": a.latent.query_rank or 0, "kv_b_proj": a.latent.rank}
    return columns


def _mlp_size(name: str, a: Architecture) -> int:
    """Of the MLP that the tensor belongs to, if it belongs to one."""
    if a.experts and ".experts." in name:
        return a.experts.intermediate_size
    if a.experts and re.search(r"\.shared_experts?\.", name):
        return a.experts.shared_size
    return a.intermediate_size


def _stacked_shape(name: str, a: Architecture) -> tuple[int, ...]:
    """Of the tensor that has a layer's experts one after another."""
    assert a.experts is not None
    count, size = a.experts.num_experts, a.experts.intermediate_size
    inputs, outputs = (a.hidden_size, 2 * size) if "gate_up" in name else (size, a.hidden_size)
    return (count, outputs) if name.endswith("bias") else (count, inputs, outputs)


def _recurrent_shape(part: str, a: Architecture) -> tuple[int, ...]:
    """Of a gated delta net's tensor."""
    r, hidden_size = a.recurrent, a.hidden_size
    assert r is not None
    query, key, value, gate, step, decay = (r.key_heads * rows for rows in r.group_rows)
    inputs = {
        "qkvz": query + key + value + gate, "ba": step + decay, "qkv": query + key + value, "z": gate, "b": step, "a": decay,
    }  # fmt: skip
    if part.startswith("in_proj_"):
        return inputs[part.removeprefix("in_proj_").removesuffix(".weight")], hidden_size
    others = {
        "conv1d.weight": (r.convolved, 1, r.width), "dt_bias": (r.value_heads,), "A_log": (r.value_heads,),
        "norm.weight": (r.value_dim,), "out_proj.weight": (hidden_size, value),
    }  # fmt: skip
    return others[part]
