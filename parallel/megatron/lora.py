"""LoRA on Megatron's linear layers (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685).

Legend: I inputs and O outputs of a matrix (this rank's), R the rank, s = alpha / R.

    merged      W' = W + s B A, the product in float32, then rounded to the model's dtype
    forward     factored: W x + s B (A x)        merged: W'' x, W'' = W' rounded to the served dtype

The gradient of a merged forward passes the roundings as if they were none (straight through). With G = d loss / d y it is
G W'' for x, and that of the factored form for the adapters: s G^T (A x) for B and s (G B)^T x for A. No gradient of W is
made, and autograd keeps no W'': backward merges again.

W is frozen. A layer that is split by outputs (column-parallel) has B split likewise and the whole A on every rank; one
that is split by inputs (row-parallel) has A split and the whole B, and the layer's own sum over ranks adds the parts. A
tensor that every rank has gets its whole gradient on every rank: ``copy_to_tensor_model_parallel_region`` sums it in
backward. So no parameter needs Megatron's marks for that sum, with and without sequence parallelism.

A starts as PEFT's does, uniform in +-1 / sqrt(inputs) (Kaiming uniform with a = sqrt(5)), from the run's seed and the
tensor's name, whatever the layout. B starts at zero, and the policy as the base. Transformer Engine's linear layers are
not used (``model.py``): they fuse the norm, whose output the adapter needs. Experts have no adapters.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from configs.schema.learner import LoraConfig

A, B = "lora_a", "lora_b"
"""Names of the adapters' parameters in their layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A run's adapters."""

    config: LoraConfig
    served_dtype: torch.dtype
    """Of the weights that servers compute with."""

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank


class LoraLinear(nn.Module):
    """The part that column- and row-parallel layers have in common, put before Megatron's class by ``with_adapter``."""

    weight: nn.Parameter
    input_size: int
    """Of the whole matrix."""
    tp_group: torch.distributed.ProcessGroup
    split_axes: ClassVar[Mapping[str, int]]
    """Of the parameters that are split over tensor-parallel ranks, the dimension."""
    product: Callable[[Tensor], Tensor]
    """B (A x) for the layer's input x, in the shape of the layer's own product; each kind of layer has its own."""
    is_on = True
    """Whether the adapter takes part: see ``without_adapters``."""

    def __init__(self, *args: Any, lora: Lora, is_gated: bool, **kwargs: Any):
        """is_gated: the outputs are two halves, each split over ranks by itself (fc1)."""
        super().__init__(*args, **kwargs)
        self.lora, self._is_gated = lora, is_gated
        (outputs, inputs), rank = self.weight.shape, lora.config.rank
        settings = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.lora_a = nn.Parameter(torch.empty(rank, inputs, **settings))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank, **settings))
        for name in (A, B):
            if name in self.split_axes:
                set_tensor_model_parallel_attributes(getattr(self, name), True, self.split_axes[name], 1)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W' [O, I] of this rank, in the model's dtype; a new tensor."""
        total = self.weight.to(torch.float32, copy=True)
        total.addmm_(self.lora_b.float(), self.lora_a.float(), alpha=self.lora.scale)
        return total.to(self.weight.dtype)

    def served(self) -> Tensor:
        """W'' [O, I] of this rank, in the model's dtype."""
        return self.merged().to(self.lora.served_dtype).to(self.weight.dtype)

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        plain: Any = super()
        if not self.is_on:
            return plain._forward_impl(input=input, weight=weight, **kwargs)
        if self.lora.config.forward == "factored":
            out = plain._forward_impl(input=input, weight=weight, **kwargs)
            return torch.add(out, self.product(input), alpha=self.lora.scale)
        served = self.served()
        place = served.data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: None if tensor.data_ptr() == place else tensor,
            lambda kept: self.served() if kept is None else kept,
        ):
            out = plain._forward_impl(input=input, weight=served, **kwargs)
        if not torch.is_grad_enabled():
            return out
        return _WithGradientTo.apply(out, self.product(input.detach()), self.lora.scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        plain: Any = super()
        assert metadata is not None
        state = plain.sharded_state_dict(prefix, sharded_offsets, metadata)
        mine = make_sharded_tensors_for_checkpoint(
            {A: self.lora_a, B: self.lora_b},
            prefix,
            dict(self.split_axes),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._is_gated:
            mine[f"{prefix}{B}"] = apply_swiglu_sharded_factory(
                mine[f"{prefix}{B}"], sharded_offsets, metadata.get("singleton_local_shards", False)
            )
        return state | mine


class _ColumnAdapter(LoraLinear):
    sequence_parallel: bool
    split_axes: ClassVar = {B: 0}

    def product(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:  # this rank has its own tokens: R numbers of each are gathered, not I
            a = F.linear(x, copy_to_tensor_model_parallel_region(self.lora_a, group=self.tp_group))
            a = gather_from_sequence_parallel_region(a, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            a = copy_to_tensor_model_parallel_region(F.linear(x, self.lora_a), group=self.tp_group)
        return F.linear(a, self.lora_b)


class _RowAdapter(LoraLinear):
    split_axes: ClassVar = {A: 1}

    def product(self, x: Tensor) -> Tensor:
        whole_b = copy_to_tensor_model_parallel_region(self.lora_b, group=self.tp_group)
        return F.linear(F.linear(x, self.lora_a), whole_b)


class _WithGradientTo(torch.autograd.Function):
    """The value of ``out``, with ``out``'s gradient also sent to ``other``, times ``scale``."""

    @staticmethod
    def forward(ctx, out: Tensor, other: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad * ctx.scale, None


def with_adapter(linear: type | ModuleSpec, lora: Lora, *, is_gated: bool = False) -> ModuleSpec:
    """The specification of a layer with an adapter. linear: Megatron's column- or row-parallel class, one derived from
    it, or the specification of one."""
    params, plain = {}, linear
    if isinstance(linear, ModuleSpec):
        params, plain = linear.params, linear.module
    assert isinstance(plain, type)
    adapter = _ColumnAdapter if issubclass(plain, ColumnParallelLinear) else _RowAdapter
    layer = type(f"Lora{plain.__name__}", (adapter, plain), {})
    return ModuleSpec(module=layer, params={**params, "lora": lora, "is_gated": is_gated})


def add_adapters(layer: ModuleSpec, lora: Lora, *, has_experts: bool) -> None:
    """Put adapters into the specification of a transformer layer. has_experts: its MLP gets none."""
    parts: Any = layer.submodules
    targets = lora.config.targets
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    if "qkv" in targets:
        attention.linear_qkv = with_adapter(attention.linear_qkv, lora)
    if "proj" in targets:
        attention.linear_proj = with_adapter(attention.linear_proj, lora)
    if has_experts:
        return
    if "fc1" in targets:
        mlp.linear_fc1 = with_adapter(mlp.linear_fc1, lora, is_gated=True)
    if "fc2" in targets:
        mlp.linear_fc2 = with_adapter(mlp.linear_fc2, lora)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is one of an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def freeze_base(model: nn.Module) -> None:
    """Leave gradients only to the adapters. What enters the first layer keeps one: without it nothing that is computed
    again in backward would have any."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(lambda module, inputs, hidden: hidden.requires_grad_())


def adapted_layers(model: nn.Module) -> dict[Tensor, LoraLinear]:
    """{base weight: its layer}."""
    return {layer.weight: layer for layer in model.modules() if isinstance(layer, LoraLinear)}


def first_a(name: str, inputs: int, lora: Lora, seed: int) -> Tensor:
    """The whole A [R, inputs] that training starts from, float32. name: of the weight, with the global number of its
    layer."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6])
    bound = 1.0 / math.sqrt(inputs)
    whole = torch.empty(lora.config.rank, inputs)
    return whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


@contextmanager
def without_adapters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the models compute as the base does."""
    layers = [layer for model in models for layer in adapted_layers(model).values()]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def adapters_only(state: dict) -> dict:
    """The adapters' part of a state dict."""
    return {name: tensor for name, tensor in state.items() if is_adapter(name)}
