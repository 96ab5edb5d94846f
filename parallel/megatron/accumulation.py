"""Sums of products in float32: gradients of matrices over micro-batches and chunks of tokens."""

from types import SimpleNamespace

import torch
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.tensor_parallel import layers


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, total in float32 whatever the dtype of the factors. On CUDA the product is not rounded to the
    dtype of its factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def use_in_linear_layers() -> None:
    """In Megatron's own linear layers (``gradient_accumulation_fusion``), instead of Apex's kernel: a
    gradient is not written and read again before it is added."""

    def add_gradient(inputs_TI: Tensor, grad_TO: Tensor, main_grad_OI: Tensor) -> None:
        add_product(main_grad_OI, grad_TO.t(), inputs_TI)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_gradient)
    layers._grad_accum_fusion_available = True
