"""Tiny mixture-of-experts models, transformers' results for them, and their jobs in several processes.
Imported by spawned ranks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.schema.layout import LayoutConfig
from parallel.megatron.groups import destroy_groups
from parallel.packing import PackedBatch
from tests.support.layout_workers import by_hf_names, work_layout
from tests.support.megatron_workers import VOCAB, make_batch, make_engine, weighted_loss

EXPERTS = 4
GROUPED_FIELDS = {
    "n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT_FIELDS = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
}  # fmt: skip
GROUPED = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT_FIELDS | {"topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT_FIELDS | {"n_group": 2, "topk_group": 1}),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, LATENT_FIELDS | {"rms_norm_eps": 1e-6}),
}
"""Families whose experts are read by DeepSeek-V3's fields: config class, model class, and the fields of the family alone."""


YARN_OF_GPT_OSS = dict(
    rope_type="yarn", rope_theta=150_000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
    truncate=False,
)  # fmt: skip


def make_moe_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes) -> Path:
    """A tiny random model in ``folder``; norm weights and biases are random too. Experts and dense MLPs differ in size
    where a family has both."""
    fields = dict(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.15, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(seed)
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**{**fields, "num_local_experts": EXPERTS, **changes}))
    elif kind == "gpt_oss":
        own = {
            "num_local_experts": EXPERTS,
            "intermediate_size": 24,
            "sliding_window": 7,
            "rope_parameters": YARN_OF_GPT_OSS,
        }
        model = GptOssForCausalLM(GptOssConfig(**{**fields, **own, **changes}))
    elif kind in GROUPED:
        config_class, model_class, own = GROUPED[kind]
        model = model_class(config_class(**{**fields, **GROUPED_FIELDS, **own, **changes}))
    else:
        fields |= {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**fields, **changes}))
    model = model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            elif name.endswith(("gate.weight", "router.weight")):
                # Routes that differ clearly from token to token.
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return folder


def assert_is_transformers(
    folder: Path, lengths: list[int], scratch: Path, loose: tuple[str, ...] = (), temperature: float = 0.7
) -> None:
    """Logits of packed sequences within 1e-5 of transformers', and the gradient of two micro-batches within 1e-5 of its norm, or
    5e-5 for names that end in ``loose``."""
    batch = make_batch(lengths)
    engine = make_engine(folder, distributed=False)
    model = engine.chunks[0]
    with torch.no_grad():
        found = model.logits(tokens_T=batch.tokens_T, packed=model.pack(batch.cu_seqlens, batch.positions_T))
    wanted, wanted_gradients = by_transformers(folder, batch, temperature, scratch)
    assert wanted.std() > 0.1  # the logits are not all alike
    assert (found - wanted).abs().max() <= 1e-5
    minibatch = [batch.select([0, 1, 2]), batch.select([*range(3, len(lengths))])]
    engine.update(minibatch, weighted_loss, temperature=temperature)
    gradients = by_hf_names(engine, lambda p: p.main_grad)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        tolerance = 5e-5 if name.endswith(loose) else 1e-5
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm(), name


def by_transformers(
    folder: Path, batch: PackedBatch, temperature: float, out: Path
) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits [T, V], the gradient of ``weighted_loss`` by the names under which transformers saves tensors),
    sequence by sequence. Its routers take the experts that the batch carries."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        if batch.experts_TLK is not None:
            give_experts(model, batch.experts_TLK[start:end], batch.is_replayed_T[start:end])
        logits.append(model(batch.tokens_T[None, start:end]).logits[0])
    logits_TV = torch.cat(logits)
    logp_TV = torch.log_softmax(logits_TV / temperature, -1)
    logprobs_T = logp_TV.gather(1, batch.targets_T[:, None]).squeeze(1)
    weighted_loss(batch, logprobs_T, -(logp_TV.exp() * logp_TV).sum(-1))[0].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(out)  # which takes the experts apart, by the same code as for weights
    return logits_TV.detach(), load_file(out / "model.safetensors")


def give_experts(model, experts_TLK: Tensor, is_replayed_T: Tensor) -> None:
    """Replace the forward passes of the model's routers by ones that take these experts of one sequence, written out
    from the definition."""
    config = model.config
    mlps = [layer.mlp for layer in model.model.layers]
    gates = [getattr(mlp, "gate", getattr(mlp, "router", None)) for mlp in mlps]
    gates = [gate for gate in gates if gate is not None]
    for number, gate in enumerate(gates):

        def forward(hidden, gate=gate, number=number):
            logits_TE = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            logits_TE = logits_TE + getattr(gate, "bias", 0.0)
            bias_E = getattr(gate, "e_score_correction_bias", None)
            p_TE = logits_TE.float().softmax(-1) if bias_E is None else logits_TE.float().sigmoid()
            scores_TE = p_TE.detach() + (0.0 if bias_E is None else bias_E)
            groups = getattr(config, "n_group", None) or 1
            for scores_E in scores_TE if groups > 1 else []:
                count = 1 if bias_E is None else 2
                sums = [float(part.topk(count).values.sum()) for part in scores_E.chunk(groups)]
                for group in sorted(range(groups), key=lambda g: sums[g])[: groups - config.topk_group]:
                    scores_E.chunk(groups)[group].fill_(-torch.inf)
            own_TK = scores_TE.topk(config.num_experts_per_tok).indices
            ids_TK = torch.stack(
                [experts_TLK[t, number].long() if is_replayed_T[t] else own_TK[t] for t in range(len(own_TK))]
            )
            weights_TK = p_TE.gather(1, ids_TK)
            if getattr(config, "norm_topk_prob", True):
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            return logits_TE, weights_TK * getattr(config, "routed_scaling_factor", 1.0), ids_TK

        gate.forward = forward


def assert_same_choice(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Every rank chose the experts that one process chose, in every layer of its sequences."""
    assert set().union(*(found["chosen"] for found in ranks)) == set(wanted["chosen"])
    for found in ranks:
        for sequence, ids_TLK in found["chosen"].items():
            assert torch.equal(ids_TLK, wanted["chosen"][sequence]), f"sequence {sequence}"


def work_layouts(
    cases: dict[str, tuple[dict[str, Any], dict[str, tuple], dict[Path, Path]]],
) -> dict[str, dict[str, Any]]:
    """Per case ``work_layout``'s results of its jobs, one case after another; folders (keys) go through its
    layout and out again."""
    found = {}
    for name, (sizes, jobs, saves) in cases.items():
        layout = LayoutConfig(**sizes)
        found[name] = work_layout(layout, jobs)
        for source, out in saves.items():
            make_engine(source, layout=layout).save_hf(out)
        destroy_groups()
    return found
