"""How Megatron's tensors are called and how Hugging Face's: strings alone, with the global numbers of layers
and experts."""

import re
from collections.abc import Iterator

from parallel.planning.layout import Architecture

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
TOP = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}

_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": (
        "input_layernorm.weight",
    ),  # Transformer Engine fuses the norm
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
# The MLP of a layer with experts; {} is the expert's number.
_ROUTER = "mlp.router.weight"
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
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+(?=\.)")
# Transformer Engine's grouped experts are numbered at the end.
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


def expert_of(name: str) -> int | None:
    """The number of the expert whose tensor ``name`` is, None for any other tensor."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[0])


def with_expert(name: str, expert: int) -> str:
    """The name of the same tensor of another expert."""
    return _EXPERT.sub(str(expert), name)


def ungrouped(name: str) -> str:
    """The name that the tensor has where experts are modules of their own."""
    return _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1", name)


def hf_names(name: str, architecture: Architecture) -> tuple[str, ...]:
    """The Hugging Face tensors that a Megatron tensor is made of, in order."""
    if name in TOP:
        return (TOP[name],)
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.LAYER.REST
    expert = expert_of(rest)
    suffixes = (
        _LAYER[rest] if rest in _LAYER else _EXPERT_MLP[architecture.model_type][_EXPERT.sub("{}", rest)]
    )
    return tuple(f"model.layers.{layer}.{suffix.format(expert)}" for suffix in suffixes)


def all_hf_names(architecture: Architecture) -> set[str]:
    """Every tensor that a folder of this model must have."""
    found = {TOP[EMBEDDING], TOP[FINAL_NORM]} | (set() if architecture.tied else {TOP[OUTPUT]})
    for layer in range(architecture.num_layers):
        for rest in _layer_names(architecture, layer):
            found.update(hf_names(f"decoder.layers.{layer}.{rest}", architecture))
    return found


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of everything that a folder of this model must have, as config.json asks for it."""
    a = architecture
    heads, kv_heads, dense = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
    of_experts = a.experts.intermediate_size if a.experts else dense
    rows = {
        "q_proj": heads,
        "k_proj": kv_heads,
        "v_proj": kv_heads,
        "q_norm": a.head_dim,
        "k_norm": a.head_dim,
    }
    rows |= {
        "embed_tokens": a.vocab_size,
        "lm_head": a.vocab_size,
        "gate": a.experts.num_experts if a.experts else 0,
    }
    columns = {"o_proj": heads}
    of_mlp = {
        wide: (
            rows | dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), wide),
            columns | dict.fromkeys(("down_proj", "w2"), wide),
        )
        for wide in (dense, of_experts)
    }
    shapes = {}
    for name in all_hf_names(a):
        module, kind = name.split(".")[-2:]
        rows_here, columns_here = of_mlp[of_experts if ".experts." in name else dense]
        is_vector = kind == "bias" or module.endswith("norm")
        shapes[name] = (rows_here.get(module, a.hidden_size),) + (
            () if is_vector else (columns_here.get(module, a.hidden_size),)
        )
    return shapes


def _layer_names(architecture: Architecture, layer: int) -> Iterator[str]:
    """Megatron's, with and without Transformer Engine."""
    experts = architecture.experts
    is_sparse = experts is not None and experts.is_sparse[layer]
    for rest in _LAYER:
        is_absent = (
            (rest.endswith(".bias") and not architecture.qkv_bias)
            or (re.search(r"[qk]_layernorm", rest) and not architecture.qk_norm)
            or (rest.startswith("mlp.") and is_sparse)
        )
        if not is_absent:
            yield rest
    if experts is not None and is_sparse:
        yield _ROUTER
        for expert in range(experts.num_experts):
            yield from (_FC1.format(expert), _FC2.format(expert))
