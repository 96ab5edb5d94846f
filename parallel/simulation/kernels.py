"""Stand-ins, for tensors without numbers, of a GPU's fused kernels: the tensors kept for backward, and the
FLOPs.

torch composes attention and RMSNorm of many operations for tensors of the ``meta`` device, each with a result of its
own. On CUDA both are one kernel, without Transformer Engine too, and so are the operations of ``triton_kernels``.

Legend: N sequences, A query heads, K key/value heads, n queries, L keys, D head dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.megatron import accumulation, gated_activation, vocab_parallel
from parallel.megatron import attention as packed_attention
from parallel.simulation.device import NotKnown, SimulatedDevice

LOWER_RIGHT = object()
"""Stands for torch's mask of the last n of L tokens, a tensor that cannot be made without numbers."""


@contextmanager
def fused(device: SimulatedDevice) -> Iterator[None]:
    """Inside, operations of simulated tensors that are one kernel on a GPU make only their results, no intermediate tensors."""

    def attention(query, key, value, attn_mask=None, *args, is_causal=False, **kwargs):
        if is_causal or attn_mask is LOWER_RIGHT:
            return _Attention.apply(query, key, value, None, device)
        if isinstance(attn_mask, Tensor) and attn_mask.shape == (query.shape[2], key.shape[2]):
            return _Attention.apply(query, key, value, attn_mask, device)
        raise NotKnown(
            "attention is simulated if it is causal or has a mask of one number for each query and key"
        )

    def norm(x, normalized_shape, weight=None, eps=None):
        return _RMSNorm.apply(x, weight)

    def sums(product_CV, *args, **kwargs):
        return torch.empty((4, len(product_CV)), dtype=torch.float32, device=product_CV.device)

    def add_product(total, left, right):
        device.flops += 2 * total.numel() * left.shape[1]

    kernels: dict[tuple[Any, str], Callable[..., Any]] = {
        (F, "scaled_dot_product_attention"): attention,
        (F, "rms_norm"): norm,
        (vocab_parallel, "_chunk_sums"): sums,
        (vocab_parallel, "_grad_product"): lambda product_CV, *args: product_CV,
        (accumulation, "add_product"): add_product,
        (gated_activation, "_activated"): lambda gate_up: torch.empty_like(gate_up.chunk(2, -1)[0]),
        (gated_activation, "_gradient"): lambda grad, gate_up: torch.empty_like(gate_up),
        (packed_attention, "_rotated"): lambda heads, *args, **kwargs: torch.empty(
            heads.shape, dtype=heads.dtype, device=heads.device
        ),
    }
    with ExitStack() as inside:
        for (place, name), kernel in kernels.items():
            inside.enter_context(patch.object(place, name, _of_simulated(getattr(place, name), kernel)))
        masks = patch.object(packed_attention, "causal_lower_right", lambda queries, keys: LOWER_RIGHT)
        inside.enter_context(masks)
        yield


def _of_simulated(real: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: (kernel if x.is_meta else real)(x, *args, **kwargs)


def attention_flops(query: Tensor, key: Tensor, *, is_causal: bool = True) -> int:
    """FLOPs of the forward pass of causal attention of the last n of L tokens: two products of 2 D each for every query
    and every key up to it, n (L - (n - 1) / 2) pairs; with a mask of numbers n L. Backward has five such
    products instead of two."""
    sequences, heads, n, dim = query.shape
    pairs = n * key.shape[2] - (n * (n - 1) // 2 if is_causal else 0)
    return 4 * sequences * heads * dim * pairs


class _Attention(torch.autograd.Function):
    """Flash attention (Dao, arXiv 2307.08691): keeps queries, keys, values, output, a float32 sum per query, and a mask of
    numbers, if there is one."""

    @staticmethod
    def forward(ctx, query_NAnD, key_NKLD, value_NKLD, mask_nL, device):
        # The kernel's output lies as [N, n, A, D] in memory, like the queries that it gets.
        out = torch.empty_like(query_NAnD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
            1, 2
        )
        sums_NAn = torch.empty(query_NAnD.shape[:3], dtype=torch.float32, device=out.device)
        ctx.save_for_backward(query_NAnD, key_NKLD, value_NKLD, out, sums_NAn, mask_nL)
        ctx.device = device
        device.flops += attention_flops(query_NAnD, key_NKLD, is_causal=mask_nL is None)
        return out

    @staticmethod
    def backward(ctx, grad):
        query_NAnD, key_NKLD, value_NKLD, *_, mask_nL = ctx.saved_tensors
        ctx.device.flops += attention_flops(query_NAnD, key_NKLD, is_causal=mask_nL is None) * 5 // 2
        gradients = (torch.empty_like(x) for x in (query_NAnD, key_NKLD, value_NKLD))
        return *gradients, None, None


class _RMSNorm(torch.autograd.Function):
    """Keeps the input, the weight and a float32 1 / rms per row."""

    @staticmethod
    def forward(ctx, x, weight):
        r = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, r)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
