"""Mixture-of-experts layers of Qwen3-MoE and Mixtral in Megatron-Core: configuration, layer specification and
router.

Legend: T tokens of this rank, E experts, K experts per token, H hidden size.

Every expert lives whole on one rank (Megatron's expert tensor-parallel size is 1): expert parallelism splits
the list of experts, and tokens travel to them and back (all-to-all). No token is dropped, and there is no loss
for balancing the experts.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from parallel.megatron import platform
from parallel.planning.layout import Experts


def config_fields(experts: Experts | None) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` for the experts; none for a dense model."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        # A list also tells checkpoints that layers may differ.
        "moe_layer_freq": [int(sparse) for sparse in experts.is_sparse],
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": platform.uses_grouped_gemm(),
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
    }


class Router(TopKRouter):
    """The routing of transformers and SGLang: p_TE = softmax_E(x_TH W_EH^T), of which the K largest are the
    weights, with ``norm_topk`` divided by their sum.

    The logits are in the model's dtype, as in transformers and SGLang, so that a bfloat16 learner and server
    choose alike; from the softmax on numbers are float32. Megatron's own router takes the softmax of the chosen
    logits, which is the same only with ``norm_topk``.
    """

    def __init__(self, config: TransformerConfig, pg_collection=None, *, norm_topk: bool):
        super().__init__(config, pg_collection)
        self.norm_topk = norm_topk

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights [T, E] float32, zero where not chosen; chosen [T, E] bool)."""
        if padding_mask is not None:
            raise ValueError("packed batches hold no padding: the router takes no padding mask")
        p_TE = torch.softmax(F.linear(hidden, self.weight).flatten(0, -2), -1, dtype=torch.float32)
        weights_TK, chosen_TK = p_TE.topk(self.topk, -1)
        if self.norm_topk:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(p_TE).scatter(1, chosen_TK, weights_TK)
        return weights_TE, torch.zeros_like(p_TE, dtype=torch.bool).scatter(1, chosen_TK, True)


def use_router(layer: ModuleSpec, experts: Experts) -> None:
    """Put our router into the specification of a layer with experts."""
    parts: Any = layer.submodules
    parts.mlp.submodules.router = partial(Router, norm_topk=experts.norm_topk)


def mark_expert_parameters(model: nn.Module) -> None:
    """Have Megatron reduce experts' gradients over the ranks that hold the same expert, not the data-parallel
    ranks.

    Megatron does so by itself if experts are split. If they are not, under tensor with sequence parallelism,
    every tensor-parallel rank has all experts but only its own tokens: without this mark each rank's gradients
    would silently stay its own. With the mark experts have an optimizer of their own in every layout, so that
    any layout loads another's checkpoint.
    """
    for module in model.modules():
        for parameter in module.experts.parameters() if isinstance(module, MoELayer) else ():
            parameter.allreduce = False


def first_local_expert(layer: TransformerLayer) -> int:
    """The global number of the first expert of this layer on this rank. Needs a layer with experts."""
    return layer.mlp.local_expert_indices[0]
