"""Tiny mixture-of-experts models and multi-process runs of them. Functions named ``work_*`` run in every spawned rank."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from parallel.megatron_engine import MegatronEngine
from parallel.packing import PackedBatch
from tests.megatron_workers import VOCAB, weighted_loss, weights_of

EXPERTS = 4
FAMILIES = ("qwen3_moe", "mixtral")


def make_moe_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes) -> Path:
    """A tiny random model in ``folder``; norm weights are random too. Experts and dense MLPs differ in size where a family has both."""
    fields = dict(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.15, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(seed)
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**{**fields, "num_local_experts": EXPERTS, **changes}))
    else:
        fields |= {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**fields, **changes}))
    model = model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + 1.0)
            elif name.endswith("gate.weight"):  # routes that differ from token to token
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def gradients_by_name(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Of a plain (not distributed) optimizer, before its next update: whole gradients by Hugging Face name, as weights are exported."""
    parameters = list(engine.model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = weights_of(engine)
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
    return found


def transformers_gradients(folder: Path, batch: PackedBatch, temperature: float, out: Path) -> dict[str, torch.Tensor]:
    """The gradient of ``weighted_loss`` by transformers, one sequence after the other, by the names under which it saves tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    logits_TV = torch.cat([model(row[None]).logits[0] for row in batch.tokens_T.split(batch.lengths)])
    logp_TV = torch.log_softmax(logits_TV / temperature, -1)
    logprobs_T = logp_TV.gather(1, batch.targets_T[:, None]).squeeze(1)
    weighted_loss(batch, logprobs_T, -(logp_TV.exp() * logp_TV).sum(-1))[0].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(out)
    return load_file(out / "model.safetensors")
