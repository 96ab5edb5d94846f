"""A config, two tiny models and hardware with round numbers, for estimates of seconds by hand.

``ROUND`` computes 100 TFLOP/s of float32, half of it attained, reads 1000 GB/s, half of it attained, and sends 100 GB/s
within a node and 10 between, half of both; a collective takes 1 ms. Overheads are 0 unless a test sets them.
"""

from pathlib import Path

import pytest

from configs.schema.hardware import HardwareConfig, Overheads
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture, read_architecture
from parallel.planning.decoding import Decoder, Lengths
from parallel.planning.machine import Machine
from parallel.planning.memory import GIB
from parallel.planning.server_memory import RolloutMemory, rollout_memory

MODELS = Path(__file__).resolve().parents[2] / "tests" / "model_configs"
TINY = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "intermediate_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
DENSE = read_architecture(TINY)
EXPERTS = read_architecture(
    TINY
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }
)
NO_OVERHEADS: dict[str, float] = dict.fromkeys(Overheads.model_fields, 0.0)


def hardware(collective_s: float = 1e-3, attained: float = 0.5, **changes) -> HardwareConfig:
    overheads = {name: changes.pop(name) for name in [*changes] if name in NO_OVERHEADS}
    shares = ("train_matmul", "train_attention", "prefill_matmul", "prefill_attention", "memory", "links")
    content = {
        "name": "round",
        "source": "made",
        "memory_gib": 80,
        "peak_tflops": {"float32": 100, "bfloat16": 200, "float16": 200},
        "memory_gb_s": 1000,
        "node_link_gb_s": 100,
        "network_gb_s": 10,
        "attained": dict.fromkeys(shares, attained),
        "overheads": NO_OVERHEADS | {"collective_s": collective_s} | overheads,
    }
    return HardwareConfig.model_validate(content | changes)


ROUND = Machine(hardware=hardware(), gpus_per_node=8)
ALIKE = Lengths(prompt=10, response=100, longest=100, spread=0.0)


def run_config(**changes) -> RunConfig:
    """4 prompts of 2 responses, float32, no shared prompts, layers not computed again."""
    content = {
        "model": {"path": "unused", "dtype": "float32"},
        "task": {"type": "countdown"},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 100, "dtype": "float32"},
        "learner": {"token_budget": 436, "share_prompts": False},
    }
    for name, block in changes.items():
        content[name] = {**content.get(name, {}), **block}
    return RunConfig.model_validate(content)


def server(
    architecture: Architecture, tp: int = 1, gib: float = 80, max_tokens: int | None = None
) -> RolloutMemory:
    return rollout_memory(architecture, tp, dtype="float32", gpu_bytes=int(gib * GIB), max_tokens=max_tokens)


def decoding_seconds(decoder: Decoder, responses: int, cached: float) -> float:
    """Of one step: the formula of ``Decoder``."""
    d = decoder
    touched = d.experts_s * (1 - (1 - d.chosen) ** responses)
    longer = max(d.weights_s + touched + d.read_s * cached, d.product_s * responses + d.pair_s * cached)
    return d.fixed_s + d.each_s * responses + longer


def close(seconds: float) -> float:
    return pytest.approx(seconds, rel=1e-9)
