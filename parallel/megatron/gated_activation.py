"""The gated activation of MLPs and experts, silu(gate) up or gelu(gate) up, as one operation (N. Shazeer, arXiv 2002.05202)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.transformer.spec_utils import ModuleSpec


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) up of the halves gate and up of the last dimension.

    Of Megatron's own four operations autograd keeps two tensors more than the halves, and adds 0 to one of them.
    """
    return _SwiGLU.apply(gate_up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) up, of the GELU's approximation with a tanh."""
    return _GeGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _activated(gate_up)

    @staticmethod
    def backward(ctx, grad):
        return _gradient(grad, *ctx.saved_tensors)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat((of_gate, F.gelu(gate, approximate="tanh").mul_(grad)), -1)


def _activated(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda:
        from parallel.megatron import triton_kernels

        return triton_kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """With s = sigmoid(gate): d silu(gate) / d gate = s (1 + gate (1 - s))."""
    if gate_up.is_cuda:
        from parallel.megatron import triton_kernels

        return triton_kernels.swiglu_gradient(grad, gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)), -1)


def use_gated_activation(
    layer: ModuleSpec, activation: Callable[[Tensor], Tensor], *, has_experts: bool
) -> None:
    """In a layer's specification. Megatron uses it instead of Transformer Engine's, with
    ``use_te_activation_func``."""
    submodules: Any = layer.submodules
    mlp = submodules.mlp.submodules
    parts = (mlp.experts.submodules, mlp.shared_experts.submodules) if has_experts else (mlp,)
    for part in parts:
        part.activation_func = activation
