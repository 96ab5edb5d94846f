"""Tiny models with gated delta nets. Imported by spawned ranks."""

from pathlib import Path

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.megatron_workers import VOCAB

FIELDS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "full_attention_interval": 2, "num_hidden_layers": 3,
    "rms_norm_eps": 1e-3,  # by a smaller one the norm of a short output multiplies its rounding
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
FAMILIES = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {"intermediate_size": 48}),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS | {"intermediate_size": 48}),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS),
}


def make_recurrent_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes) -> Path:
    """A tiny random model in ``folder``; norm weights, steps and decays are random too."""
    fields = dict(
        vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(seed)
    config_class, model_class, own = FAMILIES[kind]
    model = model_class(config_class(**{**fields, **FIELDS, **own, **changes})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1)
            elif parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + float("linear_attn.norm" in name))
            elif name.endswith(("conv1d.weight", "mlp.gate.weight")):
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder
