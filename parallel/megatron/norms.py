"""The norms of the layers, as modules in the form that Megatron makes."""

from typing import Any

import torch
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from parallel.megatron import aligned, platform
from parallel.megatron.rms_norm import rms_norm, split_rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, also under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device())
        )
        # Megatron then sums this weight's gradient over tensor-parallel ranks, which see different tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, which a dtype of two bytes would round."""

    def normed(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        # The kernel computes in float32, keeps x, and rounds once; meta: simulated.
        if x.is_cuda or x.is_meta:
            return rms_norm(x, weight, self.eps)
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


class OutputNorm(RMSNorm):
    """Megatron's slots that add the outputs of attention and MLP to their inputs: x + norm(output)."""

    def forward(self, training: bool, fused: bool):
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], x: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return x + self.normed(output if bias is None else output + bias)


class CentredOutputNorm(OutputNorm, CentredRMSNorm):
    """x + norm(output), by 1 + weight."""


class AllHeadsNorm(nn.Module):
    """RMSNorm over the numbers of all heads at once, of which each tensor-parallel rank has some: [T, 1, heads of this rank, D]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, **unused):
        """hidden_size: D, as Megatron says. heads: of all ranks."""
        super().__init__()
        self.eps, self.size, ranks = eps, heads * hidden_size, config.tensor_model_parallel_size
        self.tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self.is_split = ranks > 1
        self.weight = nn.Parameter(
            torch.ones(self.size // ranks, dtype=config.params_dtype, device=platform.device())
        )
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        if self.is_split:
            normed = split_rms_norm(flat, self.weight, self.eps, self.size, self.tp_group)
        else:
            normed = rms_norm(flat, self.weight, self.eps)
        return normed.view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return sharded_rows({"weight": self.weight}, prefix, sharded_offsets, metadata, self.tp_group)


def sharded_rows(
    parameters: dict[str, Tensor], prefix: str, sharded_offsets: tuple, metadata: dict | None, tp_group: Any
) -> dict:
    """Megatron's ``sharded_state_dict`` of parameters whose rows tensor-parallel ranks split."""
    assert metadata is not None
    groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    return make_sharded_tensors_for_checkpoint(
        parameters, prefix, dict.fromkeys(parameters, 0), sharded_offsets, **groups
    )


class AlignedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return aligned.rms_norm(x, self.weight, self.eps)
