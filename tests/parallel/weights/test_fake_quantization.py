"""Rounding to the INT8 grid against a slow loop, its properties, and which tensors of a model it touches."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema.rollout import RolloutConfig
from launch.roles.learn import compare_engines
from parallel.weights.fake_quantization import GREATEST, MATRIX, rounded_to_int8, with_int8_matrices
from trainer.turns import OwnDevices


def by_hand(weight: Tensor) -> Tensor:
    """Row by row and number by number, in Python's own floats: the nearest of the 255 multiples of the row's
    greatest / 127."""
    rows = []
    for row in weight.tolist():
        step = max(abs(x) for x in row) / GREATEST
        rows.append(
            [
                min((n * step for n in range(-GREATEST, GREATEST + 1)), key=lambda value, x=x: abs(value - x))
                for x in row
            ]
        )
    return torch.tensor(rows)


def test_the_grid_by_hand():
    weight = torch.tensor([[12.7, -0.04, 0.06, 6.35], [0.0, 0.0, 0.0, 0.0], [-1e-3, 1e-3, 4e-6, -4e-6]])
    expected = torch.tensor(
        [[12.7, 0.0, 0.1, 6.4], [0.0, 0.0, 0.0, 0.0], [-1e-3, 1e-3, 1e-3 / 127, -1e-3 / 127]]
    )
    assert torch.allclose(rounded_to_int8(weight), expected, rtol=1e-5, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_nearest_point_of_the_grid(seed, rows, columns, scale):
    weight = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    rounded = rounded_to_int8(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / GREATEST
    assert torch.allclose(rounded, by_hand(weight), rtol=1e-4, atol=1e-4 * step.max().item())
    assert ((rounded - weight).abs() <= 0.5001 * step).all()
    assert torch.allclose(rounded_to_int8(rounded), rounded, rtol=1e-5, atol=0), (
        "a point of the grid stays where it is"
    )
    assert torch.allclose(rounded_to_int8(-4 * weight), -4 * rounded, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shape_and_dtype_stay_and_255_values_are_left(dtype):
    weight = torch.randn(4, 4096, dtype=torch.float32).to(dtype)
    rounded = rounded_to_int8(weight)
    assert (rounded.shape, rounded.dtype) == (weight.shape, dtype)
    assert all(
        len(row.unique()) <= 2 * GREATEST + 1 < len(before.unique())
        for row, before in zip(rounded, weight, strict=True)
    )


EXPERTS = {
    "qwen3_moe": ["mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"],
    "mixtral": ["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.3.w2"],
}
"""Names in files and servers; today's transformers stacks them."""


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral"])
def test_just_the_matrices_of_the_layers_are_rounded(kind):
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    experts = (
        dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        if kind in EXPERTS
        else {}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **experts, head_dim=8))
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    linear = {name for name in linear if name != "lm_head.weight" and not name.endswith(".gate.weight")}
    linear |= {f"model.layers.1.{name}.weight" for name in EXPERTS.get(kind, [])}
    others = {name for name, _ in model.named_parameters() if name not in linear and ".experts." not in name}
    assert linear and others and {name for name in linear | others if MATRIX.search(name)} == linear
    tensors = [(name, torch.randn(3, 5)) for name in sorted(linear | others)]
    sent = list(with_int8_matrices(tensors))
    assert [name for name, _ in sent] == [name for name, _ in tensors]
    assert {
        name
        for (name, before), (_, after) in zip(tensors, sent, strict=True)
        if not torch.equal(before, after)
    } == linear


@pytest.mark.parametrize(
    ("quantization", "first_step", "sent"),
    [("none", 1, False), ("fp8", 1, False), ("fake_int8", 1, True), ("none", 7, True)],
)
def test_servers_get_rounded_weights_before_they_sample_a_first_time(quantization, first_step, sent):
    """What they loaded from disk is not rounded; SGLang rounds to FP8 by itself."""
    calls = []
    sync = SimpleNamespace(
        take_over=lambda *, sends: calls.append("restore" if sends else "take over"),
        probe=lambda temperature: calls.append("probe") or 0.0,
    )
    config = SimpleNamespace(rollout=RolloutConfig(quantization=quantization))
    compare_engines(
        SimpleNamespace(
            config=config, first_step=first_step, weight_sync=sync, tracker=None, turns=OwnDevices()
        )
    )
    assert calls == ["restore" if sent else "take over", "probe"]
