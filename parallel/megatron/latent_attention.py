"""Latent attention (MLA): the keys and values of every head are products of one short vector of each token.

Legend: T tokens, A query heads of this rank, D numbers of a query's or key's head, of which R are rotated, V numbers of a
value's head, F = R / 2 rotary frequencies.

With c_q, c and k_R from one product of the hidden state h (DeepSeek-V2, arXiv 2405.04434, 2.1):

    [c_q; c; k_R] = W_down h        q = W_q norm(c_q)        [k; v] = W_kv norm(c)

A key's head is [rotated k_R; k], and k_R is the same in all heads; a query's is [rotated; plain] likewise. A model without
c_q has q = W_q h. Both engines compute the same scores. The server computes them in the space of c, and keeps [c; k_R] of
each token; the learner computes keys and values, whose attention is that of any other model.

W_down is whole on every tensor-parallel rank, as in SGLang. W_q and W_kv are split by heads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import platform
from parallel.megatron.attention import paired_in_halves, rotate
from parallel.megatron.norms import RMSNorm
from parallel.planning.architecture import Architecture


class WholeLinear(nn.Module):
    """x W^T without a bias, [.., inputs] -> [.., outputs], with the whole W on every tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig):
        super().__init__()
        shape = torch.empty(outputs, inputs, dtype=config.params_dtype, device=platform.device())
        self.weight = nn.Parameter(shape)
        # Megatron then sums its gradient over tensor-parallel ranks, which see different tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Megatron's ``self_attention`` slot: [T, 1, H] -> ([T, 1, H], None); under sequence parallelism a part of T each."""

    core_attention: Any
    """``PackedCoreAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        architecture: Architecture,
        core_attention: Callable[..., nn.Module],
        **unused,
    ):
        super().__init__(config)
        a, latent = architecture, architecture.latent
        assert latent is not None  # this is not the attention of another model
        self.tp_group = pg_collection.tp
        self.rotary_size, self.value_dim, self.head_dim = a.rotary_size, latent.value_dim, a.head_dim
        self.is_interleaved = latent.is_interleaved
        self.parts = [latent.query_rank or 0, latent.rank, a.rotary_size]
        plain = a.head_dim - a.rotary_size
        of_latent = {"config": config, "eps": config.layernorm_epsilon}
        split = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": self.tp_group,
        }
        self.linear_down = WholeLinear(a.hidden_size, sum(self.parts), config)
        if latent.query_rank is None:
            self.linear_q = ColumnParallelLinear(
                a.hidden_size, a.num_heads * a.head_dim, gather_output=False, **split
            )
        else:
            self.q_layernorm = RMSNorm(hidden_size=latent.query_rank, **of_latent)
            self.linear_q_up = ColumnParallelLinear(
                latent.query_rank, a.num_heads * a.head_dim, gather_output=False, **split
            )
        self.kv_layernorm = RMSNorm(hidden_size=latent.rank, **of_latent)
        self.linear_kv_up = ColumnParallelLinear(
            latent.rank, a.num_heads * (plain + latent.value_dim), gather_output=False, **split
        )
        self.core_attention = core_attention(config, softmax_scale=latent.scale)
        self.linear_proj = RowParallelLinear(
            a.num_heads * latent.value_dim, a.hidden_size, input_is_parallel=True, skip_bias_add=True, **split
        )

    def forward(self, hidden_states: Tensor, *, packed_seq_params, **unused) -> tuple[Tensor, Tensor | None]:
        query_TAD, key_TAD, value_TAV = self._heads(hidden_states, packed_seq_params)
        # Torch's attention needs values of the keys' size: zeros appended to them add zeros to its output.
        value_TAD = F.pad(value_TAV, (0, self.head_dim - self.value_dim))
        out_TAD = self.core_attention.attend(query_TAD, key_TAD, value_TAD, packed_seq_params.plan)
        return self.linear_proj(out_TAD[..., : self.value_dim].flatten(1).unsqueeze(1))

    def _heads(self, hidden: Tensor, packed) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys [T, A, D], and values [T, A, V], of all T tokens and this rank's heads."""
        down_q, latent, key_R = self.linear_down(hidden).split(self.parts, -1)
        query = self.linear_q_up(self.q_layernorm(down_q))[0] if self.parts[0] else self.linear_q(hidden)[0]
        both = self.linear_kv_up(self.kv_layernorm(latent))[0]
        query_TAD = query.squeeze(1).unflatten(-1, (-1, self.head_dim))
        plain = self.head_dim - self.rotary_size
        key, value = (
            both.squeeze(1).unflatten(-1, (-1, plain + self.value_dim)).split([plain, self.value_dim], -1)
        )
        # Each rank's heads give a part of the gradient of the tensors that all heads share.
        if self.config.sequence_parallel:
            key_R = gather_from_sequence_parallel_region(
                key_R, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            key_R = copy_to_tensor_model_parallel_region(key_R, group=self.tp_group)
        plain_query, query_TAR = query_TAD.split([plain, self.rotary_size], -1)
        rotated_query, rotated_key = (
            rotate(self._halves(x), packed.cos_T1F, packed.sin_T1F) for x in (query_TAR, key_R)
        )
        return (
            torch.cat((rotated_query, plain_query), -1),
            torch.cat((rotated_key.expand(-1, key.shape[1], -1), key), -1),
            value,
        )

    def _halves(self, x: Tensor) -> Tensor:
        return paired_in_halves(x, self.rotary_size) if self.is_interleaved else x
