"""Mixture-of-experts layers in Megatron-Core: configuration, layer specification and router.

Legend: T tokens of this rank, E experts, K experts per token, H hidden size, L layers with experts.

Every expert lives whole on one rank (Megatron's expert tensor-parallel size is 1): expert parallelism splits
the list of experts, and tokens travel to them and back (all-to-all). No token is dropped, and there is no loss
for balancing the experts.

Routing replay (``Replay``; W. Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv 2510.11370): tokens go to given experts, those of the server (R3) or those of the learner's own pass
before the update (R2; C. Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071, 5.3), which
``Recording`` takes down. The weights are the learner's own probabilities of these experts, so the router has its
gradient. The ids travel with the micro-batch, and each layer takes its own whenever it runs. Recomputation and the
schedules of a pipeline therefore need nothing more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from parallel.megatron import platform
from parallel.planning.model_parts import Experts


def config_fields(experts: Experts | None, *, is_grouped: bool) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` for the experts; none for a dense model. is_grouped: a rank's experts run as one
    matrix product, which only Transformer Engine's layers can do."""
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
        "moe_grouped_gemm": is_grouped,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The experts of a micro-batch's tokens, in the model's order of tokens."""

    experts_TLK: Tensor
    """uint8 or int16"""
    is_replayed_T: Tensor
    """bool: the tokens that go to these experts. The others go to the router's own choice."""
    counted_T: Tensor | None = None
    """bool: replayed tokens at which the router's own choice is compared with these experts. None: at none."""
    differing: dict[int, Tensor] = field(default_factory=dict)
    """By place among the layers with experts: counted tokens of this rank whose own set of experts is another. A layer
    that runs again, for recomputation, finds the same."""

    def choose(self, own_TK: Tensor, layer: int, group: dist.ProcessGroup | None) -> Tensor:
        """[T, K] int64 of this rank's tokens, from the router's own choice.

        layer: place among the layers with experts. group: the ranks that the tokens are split over (sequence
            parallelism); None: this rank has all.
        """
        mine = _places_of_rank(own_TK, group)
        given_TK = self.experts_TLK[mine, layer].long()
        if self.counted_T is not None:
            is_other_T = (own_TK.sort(-1).values != given_TK.sort(-1).values).any(-1)
            self.differing[layer] = torch.count_nonzero(is_other_T & self.counted_T[mine])
        return torch.where(self.is_replayed_T[mine, None], given_TK, own_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The experts that the routers of this rank choose for a micro-batch, in the batch's order of tokens."""

    experts_TLK: Tensor
    """uint8 or int16, written by each layer as it runs. Layers and tokens of other ranks stay as they are."""
    order_T: Tensor
    """int64: the batch's token at each place of the model's order."""
    is_token_T: Tensor
    """bool, in the model's order: False on dummies."""

    def choose(self, own_TK: Tensor, layer: int, group: dist.ProcessGroup | None) -> Tensor:
        """The router's own choice, as it was given. Arguments as of ``Replay``."""
        mine = _places_of_rank(own_TK, group)
        is_token_T = self.is_token_T[mine]
        written_TK = own_TK[is_token_T].to(self.experts_TLK.dtype)
        self.experts_TLK[self.order_T[mine][is_token_T], layer] = written_TK
        return own_TK


Routing = Replay | Recording
"""What decides the experts of a micro-batch, beside the router."""


def _places_of_rank(own_TK: Tensor, group: dist.ProcessGroup | None) -> slice:
    """The places of these tokens in the model's order, of which each rank of ``group`` has a part."""
    if group is None:
        return slice(None)
    return slice(group.rank() * len(own_TK), (group.rank() + 1) * len(own_TK))


class Router(TopKRouter):
    """The routing of transformers and SGLang: p_TE = softmax_E(x_TH W_EH^T), of which the K largest are the
    weights, with ``norm_topk`` divided by their sum; or p_TE = sigmoid(x_TH W_EH^T), of which those of the K largest
    p_TE + b_E are (DeepSeek-V3, arXiv 2412.19437, 2.1.2), times ``scale``. Where experts have groups, the K are of the
    token's ``top_groups`` best ones, by the largest p_TE of each (DeepSeek-V2, arXiv 2405.04434, 2.2.2), or of a sigmoid by
    the sum of the two largest p_TE + b_E.

    The logits are in the model's dtype, as in transformers and SGLang, so that a bfloat16 learner and server choose alike;
    from the softmax on numbers are float32. With ``float32_logits`` (DeepSeek, GLM) the logits are too. The bias is a
    buffer: it has no gradient, and nothing here moves it to balance the experts, since servers would then choose others.
    Megatron's own router takes the softmax of the chosen logits, which is the same only with
    ``norm_topk``, and makes its bias only on a GPU.
    """

    routing: Routing | None = None
    """Of the micro-batch under way: ``RoutedLayer`` sets it for its forward pass."""
    correction_bias: Tensor | None
    """float32 [E], added to the scores that experts are chosen by. None: there is none."""

    def __init__(self, config: TransformerConfig, pg_collection=None, *, experts: Experts):
        super().__init__(config, pg_collection)
        self.experts = experts
        bias_E = torch.zeros(experts.num_experts, device=platform.device()) if experts.has_bias else None
        self.register_buffer("correction_bias", bias_E)

    def scores(self, hidden: Tensor) -> Tensor:
        """p_TE, float32."""
        weight = self.weight
        if self.experts.float32_logits:
            hidden, weight = hidden.float(), weight.float()
        logits_TE = F.linear(hidden, weight, self.bias).flatten(0, -2)
        if self.experts.score == "sigmoid":
            return logits_TE.sigmoid()
        return logits_TE.softmax(-1, dtype=torch.float32)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights [T, E] float32, zero where not chosen; chosen [T, E] bool)."""
        if padding_mask is not None:
            raise ValueError("packed batches hold no padding: the router takes no padding mask")
        p_TE = self.scores(hidden)
        chosen_by_TE = p_TE.detach() if self.correction_bias is None else p_TE.detach() + self.correction_bias
        chosen_TK = self._within_best_groups(chosen_by_TE).topk(self.topk, -1).indices
        if self.routing is not None:
            assert self.layer_number is not None  # from 1, over all stages
            layer = sum(self.experts.is_sparse[: self.layer_number - 1])
            group = self.tp_group if self.config.sequence_parallel else None
            chosen_TK = self.routing.choose(chosen_TK, layer, group)
        weights_TK = p_TE.gather(1, chosen_TK)
        if self.experts.norm_topk:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if self.experts.scale != 1.0:
            weights_TK = weights_TK * self.experts.scale
        weights_TE = torch.zeros_like(p_TE).scatter(1, chosen_TK, weights_TK)
        return weights_TE, torch.zeros_like(p_TE, dtype=torch.bool).scatter(1, chosen_TK, True)

    def _within_best_groups(self, chosen_by_TE: Tensor) -> Tensor:
        """The scores, and -inf for experts of other groups."""
        experts = self.experts
        if experts.num_groups == 1:
            return chosen_by_TE
        by_group = chosen_by_TE.unflatten(1, (experts.num_groups, -1))
        of_group = by_group.topk(2 if experts.score == "sigmoid" else 1, -1).values.sum(-1)
        best = of_group.topk(experts.top_groups, -1).indices
        is_other = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(is_other[..., None], -torch.inf).flatten(1)


class BiasedRowLinear(RowParallelLinear):
    """Of an expert, which is whole on its rank: Megatron adds the bias, times the router's weight, to this output in place, and
    may not do so to its own layer's. The bias is marked as the weight is: Megatron would sum its gradient over tensor-parallel
    ranks, which have other experts, and count it in the norm only on the first."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.bias.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.linear(input_, self.weight), self.bias


class RoutedLayer(TransformerLayer):
    """A layer with experts. Megatron gives a layer the packed sequences, but not its router. Nothing of a pass is kept
    here after it."""

    def forward(self, *args, packed_seq_params, **kwargs):
        router = self.mlp.router
        router.routing = packed_seq_params.routing
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            router.routing = None
            # Megatron's dispatcher keeps the router's weights until its next pass, and with them this pass's graph: the
            # layer's input and its gradient.
            self.mlp.token_dispatcher.probs = None


def use_router(layer: ModuleSpec, experts: Experts) -> None:
    """Put our layer and our router into the specification of a layer with experts."""
    layer.module = RoutedLayer
    parts: Any = layer.submodules
    parts.mlp.submodules.router = partial(Router, experts=experts)
    if experts.clamp is not None:
        parts.mlp.submodules.experts.submodules.linear_fc2 = BiasedRowLinear


def freeze_routers(models: Iterable[nn.Module]) -> None:
    """Leave the routers' weights and biases no gradient, before there is an optimizer. The loss keeps its gradient through
    the routers to the hidden states."""
    for model in models:
        for module in model.modules():
            if isinstance(module, Router):
                module.requires_grad_(False)


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
