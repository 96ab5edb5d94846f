"""Configs for simulated ranks: small models of which there is config.json alone."""

import json
from pathlib import Path

from configs.loader import load_config
from configs.schema import RunConfig

DENSE = dict(
    model_type="qwen3", vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0,
    tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(
    model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[],
)  # fmt: skip


def small_model(folder: Path, kind: str = "qwen3", **changes) -> Path:
    folder.mkdir(parents=True)
    fields = DENSE if kind == "qwen3" else DENSE | EXPERTS
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    return folder


def small_config(
    model: Path, *overrides: str, budget: int = 256, recompute: str = "full", **layout
) -> RunConfig:
    """Responses of 64 tokens, micro-batches of 256, bfloat16."""
    file = model.parent / f"{model.name}.yaml"
    file.write_text("kind: train\ntask: {type: countdown}\n")
    sizes = [f"layout.{name}={str(size).lower()}" for name, size in ({"dp": 1} | layout).items()]
    settings = [
        f"model.path={model}", "model.dtype=bfloat16", "rollout.max_new_tokens=64", f"learner.token_budget={budget}",
        f"learner.recompute={recompute}", "learner.optimizer.lr=1e-4",
    ]  # fmt: skip
    config = load_config(file, [*settings, *sizes, *overrides])
    assert isinstance(config, RunConfig)
    return config
