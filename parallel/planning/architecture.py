"""A model's architecture, read from its config.json without torch, for checks before a start. What a family may be is in
``families.py``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel.planning.config_fields import (
    check_rope_by_layers,
    check_rope_numbers,
    check_rope_type,
    read_field,
    read_positive_number,
    read_size,
    read_windows,
    rope_type_of,
    rotary_size_of,
    rotated_share,
    yarn_scale,
)
from parallel.planning.families import Family, family_of

ROTATED_IN_FLOAT32 = (64, 128, 256, 512)
"""Sizes of heads that SGLang 0.5.23 rotates on GPUs by a kernel of its own, with float32 tables and products
(``RotaryEmbedding.__init__``). Heads of other sizes, and all on CPU, get tables and products in the model's dtype."""


WINDOW_BLOCK = 512
"""Queries of one call under a window: its mask has as many rows, and a block sees at most as many keys beyond the window."""


SINK_SIZE = 8
"""Numbers of a head by which a sink makes it longer: CUDA's kernels want multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a model. Router weights are the chosen experts' scores: a softmax over all
    experts, or a sigmoid of each.

    ``norm_topk``: whether the weights are divided by their sum. ``is_sparse``: per layer, whether it has
    experts or a dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    is_sparse: tuple[bool, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"
    float32_logits: bool = False
    """Whether the router's logits are float32 whatever the model's dtype is, as in transformers and on SGLang's GPUs."""
    has_bias: bool = False
    """Whether experts are chosen by score + bias. The bias is kept as it was loaded: the loss has no gradient of it."""
    scale: float = 1.0
    """By which the weights are multiplied at last."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token goes through beside its experts; 0: there is none."""
    clamp: float | None = None
    """Greatest gate, and greatest up in either direction, of experts with gpt-oss's activation: gate sigmoid(1.702 gate)
    (up + 1). None: silu(gate) up. The former have biases, and one tensor of a folder has all experts of a layer."""
    num_groups: int = 1
    """Groups of equally many experts, in their order. A token's experts are of its ``top_groups`` best groups, by the best
    expert of each, or with a sigmoid by the sum of the two best."""
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose keys and values are products of one short vector of each token (multi-head latent attention, MLA;
    DeepSeek-V2, arXiv 2405.04434, 2.1).

    A head of a query or a key has ``head_dim`` numbers, of which ``rotary_size`` are rotated. These are the same in all
    keys of a token.
    """

    query_rank: int | None
    """Numbers of the vector that queries are products of. None: they are products of the hidden state."""
    rank: int
    """Numbers of the vector that keys and values are products of."""
    value_dim: int
    """Numbers of a value's head."""
    is_interleaved: bool
    """Whether the numbers of a rotated pair are neighbours. False: they are in the two halves."""
    scale: float
    """Of the scores of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The numbers of config.json that decide the model. ``vocab_size`` has no padding rows.

    ``intermediate_size`` is that of dense MLPs; a model with experts in every layer does not use it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys, and of values where they are not ``latent``."""
    intermediate_size: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_size: int
    """Numbers of each head, from the first, that are rotated."""
    is_interleaved: bool = False
    """Whether the numbers of a rotated pair are neighbours. False: they are in the two halves. Of ``latent``: its own."""
    whole_qk_norm: bool = False
    """Whether queries and keys are normalised over the numbers of all heads at once."""
    norms: Literal["before", "behind", "both"] = "before"
    """Where attention and MLP have a norm: of their input, of their output, or of both."""
    windows: tuple[int | None, ...] = ()
    """By layer the tokens that a token sees, itself included; None: all before it. Empty: no layer has a window."""
    has_sinks: bool = False
    """Whether each head has a learned score of no key, which takes its part of the softmax. The output projection, the router
    and the experts of such a model have biases."""
    latent: Latent | None = None
    """None: keys and values are products of the hidden state."""
    experts: Experts | None = None
    """None for a dense model."""
    further_layers: int = 0
    """Layers behind the last one of a published folder that predict further tokens (multi-token prediction). They are
    neither loaded nor exported."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value's head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotated_head(self) -> int:
        """Numbers of what is rotated by itself: a head, or of ``latent`` its rotated part."""
        return self.head_dim if self.latent is None else self.rotary_size

    @property
    def needs_own_attention(self) -> bool:
        """Whether attention is none of Transformer Engine's."""
        return self.latent is not None or self.needs_own_layers

    @property
    def needs_own_layers(self) -> bool:
        """Whether Megatron's layers for Transformer Engine lack a part of this model's."""
        has_norms = self.norms != "before" or self.whole_qk_norm
        return bool(any(self.windows) or self.has_sinks or has_norms or self.is_interleaved)

    @property
    def attention_numbers(self) -> tuple[int, int]:
        """Numbers of a layer's attention matrices: (those that tensor-parallel ranks split, those that each has whole).

        H (A + 2 K) D and A D H; of latent attention, with a query rank q (H where there is none), rank r and values of V,
        q A D, r A (D - R + V) and A V H, and whole H (q + r + R).
        """
        heads, h = self.num_heads, self.hidden_size
        if self.latent is None:
            return h * (heads + 2 * self.num_kv_heads) * self.head_dim + heads * self.head_dim * h, 0
        latent, of_queries = self.latent, self.latent.query_rank or 0
        both = self.head_dim - self.rotary_size + latent.value_dim
        split = (of_queries or h) * heads * self.head_dim + latent.rank * heads * both
        return split + heads * latent.value_dim * h, h * (of_queries + latent.rank + self.rotary_size)

    @property
    def attention_norms(self) -> int:
        """Numbers of the norms inside a layer's attention."""
        if self.latent is not None:
            return (self.latent.query_rank or 0) + self.latent.rank
        return 2 * self.head_dim if self.qk_norm else 0

    @property
    def split_vectors(self) -> int:
        """Numbers of a layer's attention, beside its matrices, that tensor-parallel ranks split: biases of queries, keys and
        values, sinks, and norms over all heads."""
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        bias += self.num_heads if self.has_sinks else 0
        return bias + ((self.num_heads + self.num_kv_heads) * self.head_dim if self.whole_qk_norm else 0)

    @property
    def layer_norms(self) -> int:
        """Norms of the hidden size in a layer."""
        return 4 if self.norms == "both" else 2


MOST_LAYERS = 10_000
"""Far above any model. A larger number comes from a damaged file, whose checks would not end."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError where the file is missing or no JSON object."""
    path = Path(folder) / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"model.path={folder}: cannot read config.json ({error.strerror}); give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} nests its values too deep to be read; restore it") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not an object")
    return loaded


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture in config.json. Raises ValueError for a model or variant that this learner does not
    compute exactly, and for missing or impossible sizes."""
    kind = hf_config.get("model_type")
    family = family_of(kind)
    assert isinstance(kind, str)  # it is the name of a family
    _refuse_variants(hf_config, kind, family)
    heads = read_size(hf_config, "num_attention_heads", kind)
    hidden_size = read_size(hf_config, "hidden_size", kind)
    num_layers = read_size(hf_config, "num_hidden_layers", kind)
    if num_layers > MOST_LAYERS:
        raise ValueError(
            f"config.json has num_hidden_layers={num_layers}, more than {MOST_LAYERS}; restore it"
        )
    # Of latent attention every head has keys and values of its own.
    kv_heads = heads
    if not family.is_latent:
        kv_heads = read_size(hf_config, "num_key_value_heads", kind, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}; restore it"
        )
    if not family.is_latent and hf_config.get("head_dim") is None and hidden_size % heads:
        raise ValueError(
            f"config.json has hidden_size={hidden_size}, which does not divide by num_attention_heads={heads}, and no head_dim; restore it"
        )
    if family.whole_qk_norm and hf_config.get("head_dim") not in (None, hidden_size // heads):
        raise ValueError(
            f"config.json has head_dim={hf_config['head_dim']!r}, of which SGLang's {kind} knows nothing; it must be "
            f"{hidden_size // heads} (hidden_size / num_attention_heads)"
        )
    latent, head_dim, rotary_size = _read_heads(hf_config, kind, family, hidden_size // heads)
    return Architecture(
        model_type=kind,
        vocab_size=read_size(hf_config, "vocab_size", kind),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=read_size(hf_config, "intermediate_size", kind),
        norm_eps=read_positive_number(hf_config, "rms_norm_eps", kind),
        max_positions=read_size(hf_config, "max_position_embeddings", kind),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=_has(hf_config, family.qkv_bias),
        qk_norm=_has(hf_config, family.qk_norm),
        rotary_size=rotary_size,
        is_interleaved=family.is_interleaved,
        whole_qk_norm=family.whole_qk_norm,
        norms=family.norms,
        has_sinks=family.has_sinks,
        windows=read_windows(hf_config, kind, num_layers) if family.serves_windows else (),
        latent=latent,
        experts=_read_experts(hf_config, kind, family, num_layers),
        further_layers=_further_layers(hf_config) if family.experts == "deepseek_v3" else 0,
    )


def _read_heads(
    hf_config: Mapping[str, Any], kind: str, family: Family, default: int
) -> tuple[Latent | None, int, int]:
    """(latent, head_dim, rotary_size). default: head_dim where config.json does not say."""
    if not family.is_latent:
        head_dim = read_size(hf_config, "head_dim", kind, default=default)
        return None, head_dim, rotary_size_of(hf_config, family, head_dim)
    # head_dim is the size of the rotated part here, where transformers writes it.
    rotary_size = read_size(hf_config, "qk_rope_head_dim", kind)
    head_dim = rotary_size + read_size(hf_config, "qk_nope_head_dim", kind)
    value_dim = read_size(hf_config, "v_head_dim", kind)
    if rotary_size % 2 or value_dim > head_dim:
        raise ValueError(
            f"config.json has qk_rope_head_dim={rotary_size} and v_head_dim={value_dim}; the first must be even, and the second at "
            f"most {head_dim} (qk_nope_head_dim + qk_rope_head_dim)"
        )
    has_query_rank = hf_config.get("q_lora_rank") is not None
    latent = Latent(
        query_rank=read_size(hf_config, "q_lora_rank", kind) if has_query_rank else None,
        rank=read_size(hf_config, "kv_lora_rank", kind),
        value_dim=value_dim,
        is_interleaved=bool(hf_config.get("rope_interleave", True)),
        scale=head_dim**-0.5 * yarn_scale(hf_config) ** 2,
    )
    return latent, head_dim, rotary_size


def _further_layers(hf_config: Mapping[str, Any]) -> int:
    count = hf_config.get("num_nextn_predict_layers") or 0
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise ValueError(
            f"config.json has num_nextn_predict_layers={count!r}; it must be a whole number of at least 0, at most {MOST_LAYERS}"
        )
    return count


def _has(hf_config: Mapping[str, Any], part: bool | str) -> bool:
    """``part`` of ``Family``: a fact, or the field that says so."""
    return part if isinstance(part, bool) else bool(hf_config.get(part))


def _read_experts(hf_config: Mapping[str, Any], kind: str, family: Family, num_layers: int) -> Experts | None:
    if family.experts in _BY_GROUPS:
        return _read_grouped_experts(hf_config, kind, family, num_layers)
    clamp = None
    if family.experts == "gpt_oss":
        size_name, norm_topk, dense, every = "intermediate_size", True, (), 1
        clamp = read_positive_number(hf_config, "swiglu_limit", kind)
    elif family.experts == "mixtral":
        size_name, norm_topk, dense, every = "intermediate_size", True, (), 1
    elif family.experts == "qwen3_moe":
        size_name, norm_topk = "moe_intermediate_size", bool(hf_config.get("norm_topk_prob", False))
        dense = hf_config.get("mlp_only_layers") or ()
        every = read_size(hf_config, "decoder_sparse_step", kind, default=1)
    else:
        return None
    # Recent versions of transformers write Mixtral's name for either family.
    count_name = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    count, chosen = _read_counts(hf_config, count_name, kind)
    is_sparse = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if not any(is_sparse):
        raise ValueError(
            f"config.json has mlp_only_layers={list(dense)} and decoder_sparse_step={every}, which leave none of the {num_layers} layers "
            "with experts; restore it, or use a dense model"
        )
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=read_size(hf_config, size_name, kind),
        norm_topk=norm_topk,
        is_sparse=is_sparse,
        clamp=clamp,
    )


_BY_GROUPS: dict[str, tuple[Literal["softmax", "sigmoid"], tuple[str, ...]]] = {
    "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy")),
    "deepseek_v3": ("sigmoid", ("noaux_tc",)),
}
"""By ``Family.experts``: the score of experts, and the ``topk_method`` that may choose among them."""


def _read_grouped_experts(
    hf_config: Mapping[str, Any], kind: str, family: Family, num_layers: int
) -> Experts:
    """Of DeepSeek's models and of GLM-4.5 and later, which name their fields alike."""
    count, chosen = _read_counts(hf_config, "n_routed_experts", kind)
    default = None if kind in _BY_GROUPS else 1  # SGLang has none for DeepSeek's models
    groups, best = (read_size(hf_config, name, kind, default=default) for name in ("n_group", "topk_group"))
    if hf_config.get("topk_method") == "greedy" and groups > 1:
        raise ValueError(
            f"config.json has n_group={groups}, which topk_method='greedy' contradicts; restore it"
        )
    if (
        count % groups
        or best > groups
        or chosen > best * count // groups
        or (groups > 1 and count < 2 * groups)
    ):
        raise ValueError(
            f"config.json has n_group={groups} and topk_group={best}, which do not fit n_routed_experts={count} and "
            f"num_experts_per_tok={chosen}; restore it"
        )
    dense = read_field(hf_config, "first_k_dense_replace", kind)
    if type(dense) is not int or not 0 <= dense < num_layers:
        raise ValueError(
            f"config.json has first_k_dense_replace={dense!r}, which leaves none of the {num_layers} layers with experts, or is no "
            "number of layers; restore it, or use a dense model"
        )
    is_sparse = tuple(layer >= dense for layer in range(num_layers))
    kinds = hf_config.get("mlp_layer_types")
    if kinds is not None and kinds != ["sparse" if sparse else "dense" for sparse in is_sparse]:
        raise ValueError(
            f"config.json has mlp_layer_types={kinds!r}, which first_k_dense_replace={dense} contradicts; restore it"
        )
    if kind in _BY_GROUPS:
        for name in ("topk_method", "scoring_func", "moe_layer_freq"):
            read_field(hf_config, name, kind)
    size = read_size(hf_config, "moe_intermediate_size", kind)
    score = _BY_GROUPS[family.experts or ""][0]
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=size,
        norm_topk=bool(hf_config.get("norm_topk_prob", score == "sigmoid")),
        is_sparse=is_sparse,
        score=score,
        float32_logits=True,
        has_bias=score == "sigmoid",
        scale=read_positive_number(hf_config, "routed_scaling_factor", kind),
        shared_size=size * read_size(hf_config, "n_shared_experts", kind),
        num_groups=groups,
        top_groups=best,
    )


def _read_counts(hf_config: Mapping[str, Any], count_name: str, kind: str) -> tuple[int, int]:
    """(experts, experts of a token)."""
    count = read_size(hf_config, count_name, kind)
    chosen = read_size(hf_config, "num_experts_per_tok", kind)
    if chosen > count:
        raise ValueError(
            f"config.json has num_experts_per_tok={chosen}, more than its {count_name}={count}; restore it"
        )
    return count, chosen


def _refuse_variants(hf_config: Mapping[str, Any], kind: str, family: Family) -> None:
    if family.plain_windows:
        check_rope_by_layers(hf_config, kind)
    check_rope_type(rope_type_of(hf_config), kind)
    check_rope_numbers(hf_config, kind)
    layer_types = hf_config.get("layer_types")
    score, methods = _BY_GROUPS.get(family.experts or "", ("", ()))
    grouped = bool(methods)
    refused = {
        # SGLang's code of these families computes no windows.
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "layer_types": not family.serves_windows
        and (
            any(t != "full_attention" for t in layer_types)
            if isinstance(layer_types, list)
            else bool(layer_types)
        ),
        "attention_bias": family.qkv_bias is False and bool(hf_config.get("attention_bias")),
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": family.rotated_share is None and rotated_share(hf_config, family) != 1.0,
        "quantization_config": hf_config.get("quantization_config") is not None,
        "router_jitter_noise": bool(hf_config.get("router_jitter_noise")),
        "router_bias": bool(hf_config.get("router_bias")),
        "shared_expert_intermediate_size": bool(hf_config.get("shared_expert_intermediate_size")),
        "n_shared_experts": not grouped and bool(hf_config.get("n_shared_experts")),
        "scoring_func": grouped and hf_config.get("scoring_func", score) != score,
        "topk_method": grouped and hf_config.get("topk_method", methods[0]) not in methods,
        "norm_topk_prob": score == "softmax" and bool(hf_config.get("norm_topk_prob")),
        # transformers' DeepSeek-V2 always interleaves, SGLang as it says.
        "rope_interleave": kind == "deepseek_v2" and not hf_config.get("rope_interleave", True),
        # SGLang takes 1.702 whatever it says.
        "swiglu_alpha": family.has_sinks and hf_config.get("swiglu_alpha", 1.702) != 1.702,
        "moe_layer_freq": grouped and hf_config.get("moe_layer_freq", 1) != 1,
    }
    if family.has_sinks and not hf_config.get("attention_bias"):
        raise ValueError(
            f"config.json of a {kind} model has attention_bias={hf_config.get('attention_bias')!r}; it must be true: restore it"
        )
    if family.has_sinks and refused["quantization_config"]:
        raise ValueError(
            f"config.json has quantization_config={hf_config['quantization_config']!r}, which the learner does not read; load the {kind} "
            "with transformers (quantization_config=Mxfp4Config(dequantize=True)) and write it by save_pretrained(FOLDER, "
            "save_original_format=False)"
        )
    for name, is_set in refused.items():
        if is_set:
            value = hf_config.get(name, rotated_share(hf_config, family))
            raise ValueError(
                f"config.json has {name}={value!r}, which the learner does not compute; use a {kind} without it"
            )
    window, positions = (hf_config.get(name) for name in ("sliding_window", "max_position_embeddings"))
    if family.has_window and window is not None and (type(positions) is not int or window < positions):
        raise ValueError(
            f"config.json has sliding_window={window!r}, which SGLang does not compute in a {kind}, with "
            f"max_position_embeddings={positions!r}; set sliding_window to null and max_position_embeddings to at most {window!r}: up to "
            "that length both are the same"
        )


def last_stage_layers(num_layers: int, stages: int, chunks: int = 1) -> int | None:
    """Layers of the last of ``stages`` pipeline stages: as many as every other one has, or, where they do not divide and no
    stage has several ``chunks``, those that are left when every other one has its equal share, rounded up. None: none is left,
    or chunks would be unequal."""
    if num_layers % (stages * chunks) == 0:
        return num_layers // stages
    left = num_layers - -(-num_layers // stages) * (stages - 1)
    return left if chunks == 1 and left > 0 else None


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary with as many padding rows as it takes to divide by the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel
