"""A model's architecture, read from its config.json without torch, for checks before a start. What a family may be is in
``families.py``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.reading.files import text_of
from configs.reading.named_files import fix_model_path
from parallel.planning.config_fields import (
    field_error,
    read_field,
    read_flag,
    read_positive_number,
    read_size,
    read_windows,
    rotary_size_of,
    yarn_scale,
)
from parallel.planning.config_parts import read_experts, read_recurrent
from parallel.planning.families import SUPPORTED, Family, family_of
from parallel.planning.model_parts import Experts, Latent, Recurrent
from parallel.planning.variants import check_dequantised, refuse_variants

ROTATED_IN_FLOAT32 = (64, 128, 256, 512)
"""Sizes of heads that SGLang 0.5.23 rotates on GPUs by a kernel of its own, with float32 tables and products
(``RotaryEmbedding.__init__``). Heads of other sizes, and all on CPU, get tables and products in the model's dtype."""

CHUNK = 64
"""Tokens of a chunk of the gated delta rule (``numerics/delta_rule.py``)."""

WINDOW_BLOCK = 512
"""Queries of one call under a window: its mask has as many rows, and a block sees at most as many keys beyond the window."""

SINK_SIZE = 8
"""Numbers of a head by which a sink makes it longer: CUDA's kernels want multiples of it."""


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
    score_scale: float | None = None
    """Of the scores of attention. None: head_dim ** -0.5. Of ``latent``: its own."""
    windows: tuple[int | None, ...] = ()
    """By layer the tokens that a token sees, itself included; None: all before it. Empty: no layer has a window."""
    latent: Latent | None = None
    """None: keys and values are products of the hidden state."""
    recurrent: Recurrent | None = None
    """None: every layer has attention."""
    experts: Experts | None = None
    """None for a dense model."""
    further_layers: int = 0
    """Layers after the last one of a published folder that predict further tokens (multi-token prediction).
    They are neither loaded nor exported."""

    @property
    def family(self) -> Family:
        return SUPPORTED[self.model_type]

    @property
    def value_dim(self) -> int:
        """Numbers of a value's head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotated_head(self) -> int:
        """Numbers that are rotated together: a head, or with ``latent`` its rotated part."""
        return self.head_dim if self.latent is None else self.rotary_size

    @property
    def needs_own_attention(self) -> bool:
        """Whether attention is none of Transformer Engine's."""
        return self.latent is not None or self.needs_own_layers

    @property
    def needs_own_layers(self) -> bool:
        """Whether Megatron's layers for Transformer Engine lack a part of this model's."""
        family = self.family
        has_norms = family.norms != "before" or family.whole_qk_norm or family.centred_norms
        return any(self.windows) or family.has_sinks or family.is_interleaved or has_norms

    @property
    def attention_numbers(self) -> tuple[int, int]:
        """Numbers of a layer's attention matrices: (those that tensor-parallel ranks split, those that each has whole).

        H (A + 2 K) D and A D H, with a gate H A D more; of latent attention, with a query rank q (H where there is none), rank
        r and values of V, q A D, r A (D - R + V) and A V H, and whole H (q + r + R).
        """
        heads, h = self.num_heads, self.hidden_size
        if self.latent is None:
            with_gates = 2 if self.recurrent is not None else 1
            product = h * (with_gates * heads + 2 * self.num_kv_heads) * self.head_dim
            return product + heads * self.head_dim * h, 0
        latent, of_queries = self.latent, self.latent.query_rank or 0
        both = self.head_dim - self.rotary_size + latent.value_dim
        split = (of_queries or h) * heads * self.head_dim + latent.rank * heads * both
        return split + heads * latent.value_dim * h, h * (of_queries + latent.rank + self.rotary_size)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.is_recurrent[layer]

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and self.experts.is_sparse[layer]

    @property
    def num_attentions(self) -> int:
        """Layers with attention, which a server keeps keys and values for."""
        return self.num_layers - (sum(self.recurrent.is_recurrent) if self.recurrent is not None else 0)

    def mixer_numbers(self, layer: int) -> tuple[int, int]:
        """``attention_numbers``, or those of the layer's gated delta net: H of each number that it makes of a token, and its
        outputs A V H."""
        r = self.recurrent
        if r is None or not r.is_recurrent[layer]:
            return self.attention_numbers
        return self.hidden_size * (r.key_heads * sum(r.group_rows) + r.value_heads * r.value_dim), 0

    def mixer_vectors(self, layer: int) -> tuple[int, int]:
        """Further numbers of a layer's attention or gated delta net, split and whole: biases, convolutions and norms."""
        r = self.recurrent
        if r is not None and r.is_recurrent[layer]:
            return r.convolved * r.width + 2 * r.value_heads, r.value_dim
        if self.latent is not None:
            return self.split_vectors, (self.latent.query_rank or 0) + self.latent.rank
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.split_vectors, norms + (self.hidden_size if self.family.has_sinks else 0)

    @property
    def split_vectors(self) -> int:
        """Numbers of attention, beside its matrices, that tensor-parallel ranks split: biases of queries, keys and
        values, sinks, and norms over all heads."""
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        bias += self.num_heads if self.family.has_sinks else 0
        return bias + (
            (self.num_heads + self.num_kv_heads) * self.head_dim if self.family.whole_qk_norm else 0
        )

    @property
    def layer_norms(self) -> int:
        """Norms of the hidden size in a layer."""
        return 4 if self.family.norms == "both" else 2


MOST_LAYERS = 10_000
"""Far above any model. A larger number comes from a damaged file, whose checks would not end."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError if the file is missing or not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        loaded = json.loads(text_of(path))
    except OSError as error:
        fix = "give a Hugging Face model folder"
        if isinstance(error, FileNotFoundError):
            fix = fix_model_path(Path(folder), path.name)
        raise ValueError(f"model.path={folder}: cannot read config.json ({error.strerror}); {fix}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} nests its values too deep to be read; restore it") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not an object")
    return loaded


def architecture_of(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder. Raises ValueError as ``read_hf_config`` and ``read_architecture`` do."""
    return read_architecture(read_hf_config(folder))


def dequantised_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that a quantised config.json has once ``tandem dequantise`` has written its weights in bfloat16. Raises
    ValueError as ``check_dequantised`` and ``read_architecture`` do."""
    check_dequantised(hf_config)
    return read_architecture({**hf_config, "quantization_config": None})


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture in config.json. Raises ValueError for a model or variant that this learner does not
    compute exactly, and for missing or impossible sizes."""
    kind = hf_config.get("model_type")
    family = family_of(kind)
    assert isinstance(kind, str)  # it is the name of a family
    refuse_variants(hf_config, kind, family)
    heads = read_size(hf_config, "num_attention_heads")
    hidden_size = read_size(hf_config, "hidden_size")
    num_layers = read_size(hf_config, "num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise field_error(f"num_hidden_layers={num_layers}, more than {MOST_LAYERS}; restore it")
    # Of latent attention every head has keys and values of its own.
    kv_heads = heads
    if not family.is_latent:
        kv_heads = read_size(hf_config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise field_error(
            f"num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}; restore it"
        )
    if not family.is_latent and hf_config.get("head_dim") is None and hidden_size % heads:
        raise field_error(
            f"hidden_size={hidden_size}, which does not divide by num_attention_heads={heads}, and no head_dim; restore it"
        )
    if family.whole_qk_norm and hf_config.get("head_dim") not in (None, hidden_size // heads):
        raise field_error(
            f"head_dim={hf_config['head_dim']!r}, of which SGLang's {kind} knows nothing; it must be "
            f"{hidden_size // heads} (hidden_size / num_attention_heads)"
        )
    latent, head_dim, rotary_size = _read_heads(hf_config, kind, family, hidden_size // heads)
    recurrent = read_recurrent(hf_config, num_layers) if family.is_recurrent else None
    size = None
    if family.experts == "qwen3_next":  # all layers have experts, and the field may lack
        size = read_size(hf_config, "moe_intermediate_size")
    return Architecture(
        model_type=kind,
        vocab_size=read_size(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=read_size(hf_config, "intermediate_size", default=size),
        norm_eps=read_positive_number(hf_config, "rms_norm_eps"),
        max_positions=read_size(hf_config, "max_position_embeddings"),
        tied=read_flag(hf_config, "tie_word_embeddings", default=family.is_gemma),
        qkv_bias=_has(hf_config, family.qkv_bias, default=family.qkv_bias_by_default),
        qk_norm=_has(hf_config, family.qk_norm),
        rotary_size=rotary_size,
        score_scale=read_positive_number(hf_config, "query_pre_attn_scalar") ** -0.5
        if family.is_gemma
        else None,
        windows=read_windows(hf_config, num_layers, family) if family.serves_windows else (),
        latent=latent,
        recurrent=recurrent,
        experts=read_experts(hf_config, kind, family, num_layers),
        further_layers=_further_layers(hf_config) if family.experts == "deepseek_v3" else 0,
    )


def _read_heads(
    hf_config: Mapping[str, Any], kind: str, family: Family, default: int
) -> tuple[Latent | None, int, int]:
    """(latent, head_dim, rotary_size). default: head_dim if config.json does not say."""
    if not family.is_latent:
        head_dim = read_size(hf_config, "head_dim", default=None if family.needs_head_dim else default)
        return None, head_dim, rotary_size_of(hf_config, family, head_dim)
    rotary_size = read_size(hf_config, "qk_rope_head_dim")
    head_dim = rotary_size + read_size(hf_config, "qk_nope_head_dim")
    value_dim = read_size(hf_config, "v_head_dim")
    if rotary_size % 2 or value_dim > head_dim:
        raise field_error(
            f"qk_rope_head_dim={rotary_size} and v_head_dim={value_dim}; the first must be even, and the second at "
            f"most {head_dim} (qk_nope_head_dim + qk_rope_head_dim)"
        )
    # transformers writes the size of the rotated part as head_dim, and rotates by that of the file, but in DeepSeek-V2.
    if kind != "deepseek_v2" and hf_config.get("head_dim", rotary_size) != rotary_size:
        raise field_error(
            f"head_dim={hf_config['head_dim']!r} beside qk_rope_head_dim={rotary_size}: transformers takes the first for "
            "the angles of rotation, and SGLang the second; remove head_dim"
        )
    latent = Latent(
        query_rank=None
        if read_field(hf_config, "q_lora_rank") is None
        else read_size(hf_config, "q_lora_rank"),
        rank=read_size(hf_config, "kv_lora_rank"),
        value_dim=value_dim,
        is_interleaved=read_flag(hf_config, "rope_interleave", default=True),
        scale=head_dim**-0.5 * yarn_scale(hf_config) ** 2,
    )
    return latent, head_dim, rotary_size


def _further_layers(hf_config: Mapping[str, Any]) -> int:
    count = hf_config.get("num_nextn_predict_layers") or 0
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise field_error(
            f"num_nextn_predict_layers={count!r}; it must be a whole number of at least 0, at most {MOST_LAYERS}"
        )
    return count


def _has(hf_config: Mapping[str, Any], part: bool | str, *, default: bool = False) -> bool:
    """``part`` of ``Family``: a fact, or the field that says so."""
    return part if isinstance(part, bool) else read_flag(hf_config, part, default=default)


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
