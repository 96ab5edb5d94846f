"""The learner's modules under ``numerics=aligned``: forward passes of ``numerics.aligned``, which the servers run too.

A gradient is that of the plain operation at the same inputs. The two forward passes differ only in roundings.
Megatron's own code keeps embedding, residual sums and the packing, which compute no sum over a row. The embedding's sum
over ranks has one term that is not zero.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer.transformer_config import TransformerConfig

from numerics import aligned
from parallel.megatron.attention import Bucket, rotate


class _WithGradientOf(torch.autograd.Function):
    """The value of one function of tensors, with the gradient of another, which is evaluated in backward."""

    @staticmethod
    def forward(ctx, value: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return value(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        return None, None, *torch.autograd.grad(out, inputs, grad)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, pieces):
        ctx.save_for_backward(x, weight)
        return aligned.linear(x, weight, bias, pieces=pieces)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum over tensor-parallel ranks in the order of ``aligned.tree_sum``. Each rank has the whole gradient, and it
    is that of the rank's own part."""

    @staticmethod
    def forward(ctx, part, group):
        return aligned.tree_sum(_of_all_ranks(part, group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _of_all_ranks(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The parts of all ranks of the group, in their order."""
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


class AlignedColumnLinear(ColumnParallelLinear):
    """Each rank has some of the outputs, whose bits do not depend on the others."""

    def _forward_impl(
        self, input, weight, *, bias, allreduce_dgrad, sequence_parallel, tp_group, **unused
    ) -> Tensor:
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)
        return _Linear.apply(input, weight, bias, 1)


class AlignedRowLinear(RowParallelLinear):
    """Each rank has some of the inputs: of the ``pieces`` parts of a sum, an equal share. Without bias."""

    def __init__(self, *args, pieces: int, **options):
        super().__init__(*args, **options)
        self.pieces_here = pieces * self.input_size_per_partition // self.input_size

    def _forward_impl(self, input, weight, **unused) -> Tensor:
        return _Linear.apply(input, weight, None, self.pieces_here)

    def forward(self, input_):
        part = self._forward_impl(input=input_, weight=self.weight)
        out = _SumOverRanks.apply(part, self.tp_group)
        if self.sequence_parallel:
            out = mappings.scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return _WithGradientOf.apply(
        lambda x, weight: aligned.rms_norm(x, weight, eps),
        lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, eps),
        x,
        weight,
    )


def silu(x: Tensor) -> Tensor:
    return _WithGradientOf.apply(aligned.silu, F.silu, x)


class AlignedCoreAttention(nn.Module):
    """``PackedCoreAttention`` in fixed blocks."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query_TAD, key_TKD, value_TKD, attention_mask, *, packed_seq_params, **unused
    ) -> Tensor:
        packed = packed_seq_params
        query_TAD, key_TKD = (rotate(x, packed.cos_T1F, packed.sin_T1F) for x in (query_TAD, key_TKD))
        scale = query_TAD.shape[-1] ** -0.5 if self.scale is None else self.scale
        parts = [
            _bucket_attention(query_TAD, key_TKD, value_TKD, bucket, scale) for bucket in packed.plan.buckets
        ]
        return torch.cat(parts).flatten(1)


def _bucket_attention(
    query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, bucket: Bucket, scale: float
) -> Tensor:
    query_NALD, key_NKLD, value_NKLD = (
        bucket.sequences(x).transpose(1, 2) for x in (query_TAD, key_TKD, value_TKD)
    )
    out_NALD = _WithGradientOf.apply(
        lambda query, key, value: _in_blocks(query, key, value, scale),
        lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        ),
        query_NALD,
        key_NKLD,
        value_NKLD,
    )
    return out_NALD.transpose(1, 2).flatten(0, 1)


def _in_blocks(query_NALD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, scale: float) -> Tensor:
    count, heads, length, size = query_NALD.shape
    group = heads // key_NKLD.shape[1]
    sees_LL = torch.ones(length, length, dtype=torch.bool, device=query_NALD.device).tril()
    out = aligned.attention(
        query_NALD.reshape(-1, group * length, size),
        key_NKLD.flatten(0, 1),
        value_NKLD.flatten(0, 1),
        sees_LL.repeat(group, 1)[None],
        scale,
    )
    return out.view(count, heads, length, size)


def whole_logits(
    hidden_CH: Tensor, weight_VH: Tensor, *, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """[C, vocab_size] on every rank, from each rank's rows of the projection, for ``linear_logprobs``: its sums over the
    vocabulary then have one order whatever the number of ranks."""
    parts = _of_all_ranks(aligned.linear(hidden_CH, weight_VH), group)
    return torch.cat(parts, -1)[:, :vocab_size].contiguous()
