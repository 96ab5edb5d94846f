"""Gated delta nets (linear attention; S. Yang et al., "Gated Delta Networks", arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Legend: T tokens, A value heads of this rank, N numbers of a key's head, V of a value's.

Queries, keys and values of a token see its last few tokens by a convolution of each number. The rule and the convolution are in
``numerics/delta_rule.py``; both start from zero at a sequence's first token. The rule's outputs are normed
head by head, and multiplied by a gate.

The layer's matrices are grouped by key head, whose value heads are neighbours, so tensor parallelism splits all of them alike.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from numerics.delta_rule import ChunkPlan, causal_convolution, gated_delta_rule, gated_norm, log_decay, unit
from parallel.megatron import platform
from parallel.planning.model_parts import Recurrent


class GatedDeltaNet(MegatronModule):
    """Megatron's ``self_attention`` slot: [T, 1, H] -> ([T, 1, H], None); under sequence parallelism a part of T each."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        recurrent: Recurrent,
        **unused,
    ):
        super().__init__(config)
        r = recurrent
        self.tp_group, self.recurrent = pg_collection.tp, r
        ranks = self.tp_group.size()
        split = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": self.tp_group,
        }
        rows = r.key_heads * sum(r.group_rows)
        self.linear_in = ColumnParallelLinear(config.hidden_size, rows, gather_output=False, **split)
        self.conv_weight = self._split_parameter(r.convolved // ranks, 1, r.width)
        self.dt_bias = self._split_parameter(r.value_heads // ranks)
        self.A_log = self._split_parameter(r.value_heads // ranks)
        whole = torch.ones(r.value_dim, dtype=config.params_dtype, device=platform.device())
        self.norm_weight = nn.Parameter(whole)
        self.linear_proj = RowParallelLinear(
            r.value_heads * r.value_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **split,
        )

    def _split_parameter(self, *shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype, device=platform.device()))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any, **unused
    ) -> tuple[Tensor, Tensor | None]:
        product = self.linear_in(hidden_states)[0].squeeze(1)
        # Each rank's heads have a part of the gradient of the norm that all heads share.
        norm = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        inputs = (product, self.conv_weight, self.A_log, self.dt_bias, norm, packed_seq_params.chunks)
        # What the rule keeps for its gradient is many times its input. A layer that is recomputed keeps it but once.
        if torch.is_grad_enabled() and self.config.recompute_granularity is None:
            out = checkpoint(self._mix, *inputs, use_reentrant=True, preserve_rng_state=False)
        else:
            out = self._mix(*inputs)
        return self.linear_proj(out.unsqueeze(1))

    def _mix(
        self,
        product: Tensor,
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        plan: ChunkPlan,
    ) -> Tensor:
        """[T, A V], of the product of each token with ``linear_in``."""
        r, dtype = self.recurrent, product.dtype
        groups_TGD = product.unflatten(-1, (-1, sum(r.group_rows)))
        query, key, value, gate, step, decay = groups_TGD.split(r.group_rows, -1)
        # Rounded to the model's dtype where SGLang rounds: after the convolution, after the rule, and at the
        # end.
        mixed = torch.cat((query, key, value), -1).flatten(1).float()
        mixed = F.silu(causal_convolution(mixed, conv_weight.squeeze(1).float(), plan.position_T))
        mixed_TGD = mixed.to(dtype).float().unflatten(-1, (groups_TGD.shape[1], -1))
        query, key, value = mixed_TGD.split(r.group_rows[:3], -1)
        shared = r.value_heads // r.key_heads
        query_TAN, key_TAN = (unit(x).repeat_interleave(shared, 1) for x in (query, key))
        value_TAV, gate_TAV = (x.flatten(1).unflatten(-1, (-1, r.value_dim)) for x in (value, gate))
        log_decay_TA, step_TA = log_decay(a_log, decay.flatten(1), dt_bias), step.flatten(1).float().sigmoid()
        out_TAV, _ = gated_delta_rule(query_TAN, key_TAN, value_TAV, log_decay_TA, step_TA, plan)
        return gated_norm(out_TAV.to(dtype), gate_TAV, norm, self.config.layernorm_epsilon).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        assert metadata is not None
        own = dict(self.named_parameters(recurse=False))
        split = {"conv_weight": 0, "dt_bias": 0, "A_log": 0}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = make_sharded_tensors_for_checkpoint(own, prefix, split, sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


class GatedSelfAttention(SelfAttention):
    """Megatron's attention with a gate at its output, even if a key/value head is copied to several ranks."""

    def get_query_key_value_tensors(self, *arguments, **options):
        parts: Any = super().get_query_key_value_tensors(*arguments, **options)
        query, key, value, gate = parts
        copies = gate.shape[2] // query.shape[2]
        # Megatron gives a rank its own query heads of the group, and the gates of all.
        return query, key, value, gate.chunk(copies, 2)[self.pg_collection.tp.rank() % copies]
