"""Rotary frequencies of a Hugging Face config.json, as transformers computes them. F frequencies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.planning.config_fields import (
    check_rope_type,
    rope_of,
    rope_type_of,
    rotated_share,
    window_theta,
)
from parallel.planning.families import SUPPORTED, family_of


def rotary_frequencies(folder: Path, hf_config: Mapping[str, Any]) -> tuple[Tensor, float]:
    """(inv_freq [F] float32, attention factor) that transformers computes for this config.json.

    Raises ValueError for a rope_type whose frequencies depend on the sequence length (dynamic, longrope).
    """
    # transformers and its Llama take three CPU seconds to import, and nothing else in a rank's start needs them.
    if (plain := plain_rotary(hf_config)) is not None:
        return _plain_frequencies(*plain), 1.0
    return rotary_frequencies_of_transformers(folder, str(hf_config.get("model_type")))


def window_frequencies(hf_config: Mapping[str, Any]) -> Tensor | None:
    """inv_freq [F] of layers with a window, if they rotate differently from the others: without YaRN, or by
    another base. None: they do not."""
    family = family_of(hf_config.get("model_type"))
    if family.is_gemma:
        return _plain_frequencies(window_theta(hf_config), hf_config["head_dim"])
    if not family.plain_windows or rope_type_of(hf_config) == "default":
        return None
    plain = plain_rotary({**hf_config, "rope_scaling": None})
    assert plain is not None  # read_architecture has its theta
    return _plain_frequencies(*plain)


def _plain_frequencies(theta: float, size: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float) / size))


def plain_rotary(hf_config: Mapping[str, Any]) -> tuple[float, int] | None:
    """(theta, numbers of a head that are rotated) of a config.json with plain frequencies that names theta and the head's
    size. None for any other, such as one that leaves either to a default of transformers."""
    family = family_of(hf_config.get("model_type"))
    rope = rope_of(hf_config)
    thetas = {
        fields["rope_theta"]
        for fields in (hf_config, rope)
        if isinstance(fields.get("rope_theta"), int | float)
    }
    # A text's tokens have one position each, which is that of every section.
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    # gpt-oss has YaRN if config.json does not say.
    is_plain = rope.keys() <= known and rope.get("rope_type", "default") == "default"
    is_plain = is_plain and (bool(rope) or not family.has_sinks)
    share = rotated_share(hf_config, family)
    head_dim = hf_config.get("qk_rope_head_dim" if family.is_latent else "head_dim")
    if head_dim is None and hf_config.get("model_type") in (
        "llama",
        "qwen2",
        "mistral",
        "phi3",
        "olmo2",
        "olmo3",
    ):
        head_dim = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    is_whole = family.is_latent or share == 1.0 or family.rotated_share is not None
    if len(thetas) != 1 or not is_plain or not is_whole or not isinstance(head_dim, int):
        return None
    return thetas.pop(), head_dim if family.is_latent else int(head_dim * share)


def rotary_frequencies_of_transformers(folder: Path, model_type: str) -> tuple[Tensor, float]:
    """``rotary_frequencies`` of any config.json, by transformers itself."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # Of Olmo 3 and Gemma 3 by kind of layer.
    by_layers = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
    kind = (config.rope_parameters["full_attention"] if by_layers else config.rope_parameters)["rope_type"]
    check_rope_type(kind, model_type)
    is_part = SUPPORTED[model_type].rotated_share is not None
    plain = (
        Glm4MoeRotaryEmbedding if is_part else Gemma3RotaryEmbedding if by_layers else LlamaRotaryEmbedding
    )
    compute: Any = plain.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    inv_freq_F, attention_factor = compute(config, device=torch.device("cpu"), **by_layers)
    return inv_freq_F.float(), float(attention_factor)
