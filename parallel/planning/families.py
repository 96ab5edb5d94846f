"""The families of models, by the model_type of config.json: the parts of a supported one, and why another is
refused.

The page docs/model.md has both tables; a test compares it with this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary frequencies that do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of one model_type have in common. A text in place of True or False is the field of config.json that
    says so."""

    title: str
    """Its models, for messages and the page."""
    layers: str
    """What its layers become in Megatron-Core, for the page."""
    qkv_bias: bool | str = False
    """Whether queries, keys and values have a bias."""
    qkv_bias_by_default: bool = False
    """Whether they have one if config.json lacks the field that says so."""
    qk_norm: bool | str = False
    """Whether queries and keys are normalised, head by head."""
    whole_qk_norm: bool = False
    """Whether queries and keys are normalised over the numbers of all heads at once."""
    norms: Literal["before", "behind", "both"] = "before"
    """Where attention and MLP have a norm: of their input, of their output, or of both."""
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    """Matrices that a folder holds as one: queries, keys and values; gate and up."""
    has_window: bool = False
    """Whether the field ``sliding_window`` by itself limits the tokens that a token sees. SGLang 0.5.23 computes no window there."""
    default_window: int | None = None
    """transformers' ``sliding_window`` of such a family if config.json has none."""
    serves_windows: bool = False
    """Whether SGLang computes windows too, in the layers that ``layer_types`` names."""
    plain_windows: bool = False
    """Whether layers with a window rotate by the plain frequencies, whatever scales the others'."""
    is_interleaved: bool = False
    """Whether the numbers of a rotated pair are neighbours. False: they are in the two halves. Of latent attention config.json
    says it."""
    rotated_share: float | None = None
    """The share of a head that is rotated if config.json does not say. None: config.json may not have a share
    below 1."""
    needs_head_dim: bool = False
    """Whether config.json must have head_dim, since transformers' default does not follow from the hidden
    size."""
    rope_types: tuple[str, ...] = STATIC_ROPE_TYPES
    is_recurrent: bool = False
    """Whether layers are gated delta nets (linear attention), as ``layer_types`` or ``full_attention_interval`` says. The
    others' attention then has a gate at its output."""
    centred_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    is_gemma: bool = False
    """Whether, as in Gemma 3, the gate of an MLP is a GELU, embeddings are the output layer too and are multiplied by the root of the
    hidden size, scores by ``query_pre_attn_scalar`` ** -0.5, and layers with a window rotate by a base of their own."""
    separate_inputs: bool = False
    """Whether a folder holds a gated delta net's queries, keys and values, gates and decays each as a matrix, not by key head."""
    is_latent: bool = False
    """Whether keys and values are products of one short vector of each token (MLA)."""
    has_sinks: bool = False
    """Whether each head has a learned score of no key, which takes its part of the softmax. SGLang's code of these families has
    biases of the output projection, the router and the experts too."""
    experts: Literal["qwen3_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"] | None = (
        None
    )
    """By whose fields of config.json its experts are read, and by whose names their tensors. None: it has none."""


_LATENT = (
    "latent attention (MLA): keys and values of every head are products of one short vector of each token"
)
_IN_GROUPS = "within the best groups where there are groups, and a shared expert"
_GROUPED = f"first layers dense, then experts by sigmoid with a frozen correction bias, {_IN_GROUPS}; MTP layers are left out"
_BEHIND = "norms behind attention and MLP, none before"
_DEEPSEEK_V3 = Family(
    title="DeepSeek-V3, V3.1 and R1, in bfloat16",
    layers=f"{_LATENT}; {_GROUPED}",
    is_latent=True,
    rope_types=("default", "yarn"),
    experts="deepseek_v3",
)

_DELTA_NETS = (
    "gated delta nets (linear attention); every fourth layer or so attention with norms of q and k, a quarter of each head rotated, and "
    "a gate at its output; norms multiply by 1 + weight"
)
_QWEN3_NEXT = Family(
    title="Qwen3-Next-80B-A3B",
    layers=f"{_DELTA_NETS}; experts by softmax in every layer, and a shared expert with its own gate; MTP layers are left out",
    qk_norm=True,
    needs_head_dim=True,
    rotated_share=0.25,
    rope_types=("default",),
    is_recurrent=True,
    centred_norms=True,
    experts="qwen3_next",
)

SUPPORTED: dict[str, Family] = {
    "qwen2": Family(
        title="Qwen2 and Qwen2.5, dense",
        layers="attention with biases on q, k and v; gated MLP",
        qkv_bias=True,
    ),
    "qwen3": Family(
        title="Qwen3, dense",
        layers="attention with norms of q and k; gated MLP",
        qk_norm=True,
        needs_head_dim=True,
    ),
    "llama": Family(title="Llama 2, 3, 3.1 to 3.3, dense", layers="attention; gated MLP"),
    "mistral": Family(
        title="Mistral 7B v0.2 and later, Nemo, Small 24B (text)",
        layers="attention; gated MLP",
        has_window=True,
        default_window=4096,
    ),
    "phi3": Family(
        title="Phi-3 4k and Phi-4 14B, dense",
        layers="attention; gated MLP; the folder's fused qkv_proj and gate_up_proj are taken apart and fused again",
        fused=("qkv", "gate_up"),
        has_window=True,
        rope_types=("default",),  # Phi-3's "yarn" means longrope
    ),
    "olmo2": Family(
        title="OLMo 2, dense",
        layers=f"attention with norms of all queries and of all keys; gated MLP; {_BEHIND}",
        whole_qk_norm=True,
        norms="behind",
        rope_types=("default",),
    ),
    "olmo3": Family(
        title="Olmo 3, dense",
        layers="OLMo 2's, three of four with a sliding window; YaRN rotates those without a window",
        whole_qk_norm=True,
        norms="behind",
        serves_windows=True,
        plain_windows=True,
        rope_types=("default", "yarn"),
    ),
    "glm4": Family(
        title="GLM-4 0414 9B and 32B, GLM-Z1",
        layers="attention with biases as config.json says, half of each head rotated in neighbouring pairs; gated MLP; norms before and "
        "behind attention and MLP",
        qkv_bias="attention_bias",
        qkv_bias_by_default=True,
        needs_head_dim=True,
        norms="both",
        fused=("gate_up",),
        rotated_share=0.5,
        rope_types=("default",),
        is_interleaved=True,
    ),
    "gemma3_text": Family(
        title="Gemma 3 270M and 1B, and larger ones saved as a text model",
        layers="attention with norms of q and k, most layers with a sliding window and their own rotation; MLP gated by a GELU; norms "
        "before and behind attention and MLP, which multiply by 1 + weight; embeddings multiplied by a number",
        qk_norm=True,
        needs_head_dim=True,
        norms="both",
        serves_windows=True,
        rope_types=("default", "linear"),
        centred_norms=True,
        is_gemma=True,
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        layers="attention with norms of q and k; experts by softmax, dense layers where config.json names them",
        qk_norm=True,
        experts="qwen3_moe",
    ),
    "mixtral": Family(
        title="Mixtral",
        layers="attention; experts by softmax in every layer",
        has_window=True,
        rope_types=("default",),  # SGLang scales nothing there
        experts="mixtral",
    ),
    "gpt_oss": Family(
        title="gpt-oss 20B and 120B, in bfloat16",
        layers="attention with a learned sink in each head's softmax, every other layer with a sliding window, biases in all matrices; "
        "experts by softmax of the chosen logits, with biases and a clamped gate",
        qkv_bias=True,
        needs_head_dim=True,
        has_sinks=True,
        serves_windows=True,
        rope_types=("default", "yarn"),
        experts="gpt_oss",
    ),
    "glm4_moe": Family(
        title="GLM-4.5, GLM-4.5-Air and GLM-4.6",
        layers="attention with biases and norms as config.json says, half of each head rotated; first layers dense, then experts by "
        "sigmoid with a frozen correction bias, and a shared expert; multi-token-prediction (MTP) layers are left out",
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        rotated_share=0.5,
        rope_types=("default",),
        experts="deepseek_v3",
    ),
    "deepseek_v2": Family(
        title="DeepSeek-V2, V2-Lite and Coder-V2",
        layers=f"{_LATENT}; first layers dense, then experts by softmax, {_IN_GROUPS}",
        is_latent=True,
        rope_types=("default", "yarn"),
        experts="deepseek_v2",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(_DEEPSEEK_V3, title="GLM-4.7-Flash"),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        title="Qwen3.5, dense, saved as a text model",
        layers=f"{_DELTA_NETS}; gated MLP; MTP layers are left out",
        separate_inputs=True,
        experts=None,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT, title="Qwen3.5 with experts, saved as a text model", separate_inputs=True
    ),
}

_OWN_TOKENIZER = (
    "its tokenizer is a program in the model's folder, which is not run; save the model with a tokenizer of transformers and model_type "
    "deepseek_v3"
)
_MLA = "its latent attention (MLA) differs from DeepSeek-V3's, and the learner computes no other"
_SPARSE = "it chooses the tokens that a token sees (sparse attention), which the learner's packed attention does not compute"
_HYBRID = "some layers are recurrent (state space or linear attention), and the learner computes only those of Qwen3-Next and Qwen3.5"
_WITH_VISION = "it takes pictures too, and an export would lose what reads them; train its text model, saved with model_type"
_STREAMS = (
    "its layers have several streams and their own tables of embeddings, which the learner does not compute"
)
_WINDOWS = "some of its layers see a sliding window of tokens, of which the server's code for this family was not tried"
_SEES = "it takes pictures, sound or video, which this trainer's prompts do not have; use its text model, if that is a separate family"
_PARALLEL = (
    "its attention and MLP read the same input, one beside the other, which the learner does not compute"
)
_OLD = "its layers have LayerNorm or an MLP without a gate, which the learner does not compute"

REFUSED: dict[str, str] = {
    "kimi_k2": _OWN_TOKENIZER,
    **dict.fromkeys(("minicpm3", "longcat_flash", "mistral4", "youtu"), _MLA),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    **dict.fromkeys(
        (
            "kimi_linear", "jamba", "mamba", "mamba2",
            "falcon_mamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "bamba", "zamba2", "minimax", "lfm2", "lfm2_moe",
            "olmo_hybrid", "recurrent_gemma",
        ),
        _HYBRID,
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), f"{_WITH_VISION} qwen3_5_text or qwen3_5_moe_text"),
    "gemma": "SGLang computes its GELU without the approximation by a tanh that it was trained with",
    "gemma2": "it caps scores and logits by a tanh, which the learner does not compute",
    "gemma3": f"{_WITH_VISION} gemma3_text",
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _STREAMS),
    "exaone4": "some layers rotate nothing, or see a sliding window, by its own rules, which the learner does not compute",
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "some layers see chunks of tokens and rotate nothing, which the learner does not compute",
    ),
    **dict.fromkeys(("ministral", "mimo_v2_flash"), _WINDOWS),
    **dict.fromkeys(
        (
            "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni_moe", "mllama", "mistral3", "pixtral",
            "llava", "llava_next", "glm4v", "glm4v_moe", "gemma4", "phi4_multimodal", "kimi_k25",
        ),
        _SEES,
    ),
    "qwen2_moe": "its shared expert has its own gate, which was tested in the learner only for Qwen3-Next and Qwen3.5",
    "phimoe": "its norms have a bias and its router samples by SparseMixer, which the learner does not compute",
    "minimax_m2": "it normalises queries and keys over all heads at once, which the learner does not compute",
    **dict.fromkeys(("cohere", "cohere2", "phi", "gptj", "gpt_neox", "falcon"), _PARALLEL),
    **dict.fromkeys(("gpt2", "opt", "bloom", "starcoder2"), _OLD),
    "smollm3": "layers of it rotate nothing, which the learner does not compute",
}  # fmt: skip
"""Families that people request: model_type -> the reason why they are refused."""


def family_of(model_type: object) -> Family:
    """The family of a config.json. Raises ValueError for an unsupported one, with the reason if it is
    known."""
    if isinstance(model_type, str) and model_type in SUPPORTED:
        return SUPPORTED[model_type]
    reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
    supported = ", ".join(f"{name} ({family.title})" for name, family in SUPPORTED.items())
    raise ValueError(
        f"model_type {model_type!r} is not supported{f': {reason}' if reason else ''}; supported are {supported}"
    )


def check_served_class(hf_config: Mapping[str, Any], model_type: str) -> None:
    """Raises ValueError for a config.json whose ``architectures``, by which SGLang chooses its code, is not the family's class
    for causal language models. transformers, and the learner, go by model_type."""
    names = hf_config.get("architectures")
    wanted = f"{model_type.removesuffix('_text')}_for_causal_lm".replace("_", "")
    found = [str(name).replace("_", "").lower() for name in names] if isinstance(names, list) else []
    if found != [wanted]:
        raise ValueError(
            f"config.json of a {model_type} model has architectures={names!r}, by which SGLang would not serve a {model_type} for "
            "generation; restore the file that came with the model"
        )
