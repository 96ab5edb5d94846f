"""Rounding to every grid against a slow loop, its properties, and which tensors of a model it touches."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema.rollout import ROUNDED, Precision, RolloutConfig
from launch.roles.learn import compare_engines
from parallel.weights.precision import MATRIX, is_rounded, packed_form, rounded
from trainer.turns import OwnDevices

PRECISIONS = get_args(Precision)
SCALED = [precision for precision in PRECISIONS if precision not in ("bf16", "fp16")]
WHOLE = {most: [float(n) for n in range(-most, most + 1)] for most in (127, 7, 3, 1)}
E4M3 = sorted(
    sign * value
    for sign in (-1, 1)
    for value in [
        *(m * 2.0**-9 for m in range(8)),  # below 2^-6
        # (8, 7) is NaN.
        *((8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)),
    ]
)
"""Every number of e4m3, by its definition: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""


def blocks_of(precision: str, rows: int, columns: int) -> tuple[list[list[tuple[int, int]]], list[float]]:
    """(the places of each block, the numbers of its grid)."""
    height, width, grid = {
        "int8": (1, columns, WHOLE[127]),
        "int4": (1, 32, WHOLE[7]),
        "int3": (1, 32, WHOLE[3]),
        "int2": (1, 32, WHOLE[1]),
        "fp8_e4m3": (rows, columns, E4M3),
        "fp8_e4m3_block": (128, 128, E4M3),
    }[precision]
    return [
        [(i, j) for i in range(top, min(top + height, rows)) for j in range(left, min(left + width, columns))]
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ], grid


def by_hand(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Number by number, in Python's own floats: the nearest number of its block's grid, and the width of the grid
    there."""
    numbers, result, widths = weight.tolist(), torch.zeros_like(weight), torch.zeros_like(weight)
    blocks, grid = blocks_of(precision, *weight.shape)
    for places in blocks:
        step = max(abs(numbers[i][j]) for i, j in places) / grid[-1]
        for i, j in places:
            nearest = min(range(len(grid)), key=lambda n, x=numbers[i][j]: abs(grid[n] * step - x))
            result[i, j] = grid[nearest] * step
            around = grid[max(nearest - 1, 0) : nearest + 2]
            widths[i, j] = max(b - a for a, b in pairwise(around)) * step
    return result, widths


def drawn(seed: int, rows: int, columns: int, scale: float) -> Tensor:
    """Numbers with outliers, zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(rows, columns, generator=generator)
    weight[torch.rand(rows, columns, generator=generator) < 0.05] *= 50.0
    weight[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    weight[seed % rows] *= seed % 3 > 0
    return weight


def test_int8_by_hand():
    weight = torch.tensor([[12.7, -0.04, 0.06, 6.35], [0.0, 0.0, 0.0, 0.0], [-1e-3, 1e-3, 4e-6, -4e-6]])
    expected = torch.tensor(
        [[12.7, 0.0, 0.1, 6.4], [0.0, 0.0, 0.0, 0.0], [-1e-3, 1e-3, 1e-3 / 127, -1e-3 / 127]]
    )
    assert torch.allclose(rounded(weight, "int8"), expected, rtol=1e-5, atol=0)


def test_int4_by_hand():
    """A scale for each 32 numbers: the outlier of the second group does not touch the first."""
    weight = torch.tensor([[0.7, 0.34, -0.06, 0.0] * 8 + [70.0, 4.9, 5.1, -70.0]])
    expected = torch.tensor([[0.7, 0.3, -0.1, 0.0] * 8 + [70.0, 0.0, 10.0, -70.0]])
    assert torch.allclose(rounded(weight, "int4"), expected, rtol=1e-5, atol=0)


def test_fp8_by_hand():
    """With a greatest number of 448 the scale is 1. 17 lies between 16 and 18, 19 between 18 and 20: both go to the even
    mantissa. The least numbers are whole multiples of 2^-9 = 0.00195."""
    weight = torch.tensor([[448.0, 17.0, 19.0], [1.0625, -0.001, 0.003]])
    expected = torch.tensor([[448.0, 16.0, 20.0], [1.0, -0.001953125, 0.00390625]])
    assert torch.equal(rounded(weight, "fp8_e4m3"), expected)
    far = torch.zeros(129, 129)
    far[0, 0], far[0, 1], far[128, 128] = 448.0, 17.0, 17.0
    assert rounded(far, "fp8_e4m3_block")[0, 1] == 16.0
    assert rounded(far, "fp8_e4m3_block")[128, 128] == 17.0, "a block of its own"
    assert rounded(far, "fp8_e4m3")[128, 128] == 16.0


def test_the_grid_of_e4m3_is_torchs():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert sorted(set(every[~every.isnan()].tolist())) == sorted(set(E4M3)) and E4M3[-1] == 448.0


def test_numbers_are_rounded_to_e4m3_as_torch_does():
    """All of float32 up to 448 in steps, with every middle between two neighbours, where ties go to even."""
    middles = [(a + b) / 2 for a, b in pairwise(E4M3)]
    around = [math.nextafter(middle, side) for middle in middles for side in (-math.inf, math.inf)]
    numbers = torch.tensor([*E4M3, *middles, *around, 0.0, -0.0, 1e-30, -1e-45], dtype=torch.float64).float()
    numbers = torch.cat([numbers, torch.linspace(-448, 448, 100_003), torch.linspace(-0.05, 0.05, 100_003)])
    assert torch.equal(rounded(numbers.view(1, -1), "fp8_e4m3")[0], numbers.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("precision", SCALED)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    columns=st.sampled_from([1, 2, 31, 32, 33, 65]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_nearest_number_of_the_grid(precision, seed, rows, columns, scale):
    weight = drawn(seed, rows, columns, scale)
    found, (expected, width) = rounded(weight, precision), by_hand(weight, precision)
    assert found.isfinite().all()
    # Where a number lies in the middle of two, both are right.
    is_near = (found - expected).abs() <= 1e-5 * expected.abs()
    in_the_middle = ((weight - found).abs() - (weight - expected).abs()).abs() <= 1e-4 * width
    assert (is_near | in_the_middle).all()
    again = rounded(found, precision)
    assert torch.allclose(again, found, rtol=1e-5, atol=0), "a number of the grid stays where it is"
    assert torch.equal(rounded(-4 * weight, precision), -4 * found)
    assert (found[weight == 0] == 0).all()


@pytest.mark.parametrize("precision", ["fp8_e4m3_block"])
@pytest.mark.parametrize("shape", [(128, 128), (129, 130), (200, 300), (1, 257)])
def test_blocks_at_the_edges(precision, shape):
    weight = drawn(5, *shape, 1.0)
    found, expected = rounded(weight, precision), torch.empty_like(weight)
    for top in range(0, shape[0], 128):
        for left in range(0, shape[1], 128):
            block = weight[top : top + 128, left : left + 128]
            expected[top : top + 128, left : left + 128] = rounded(block, "fp8_e4m3")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_whole_dtypes(precision, dtype):
    weight = drawn(3, 7, 33, 1.0)
    assert torch.equal(rounded(weight, precision), weight.to(dtype).float())
    assert torch.equal(rounded(weight.to(dtype), precision), weight.to(dtype))
    vector = torch.tensor([1.0, 1.001])  # a norm
    assert rounded(vector, precision).shape == vector.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("precision", "most"), [("int8", 255), ("int4", 15 * 128), ("int2", 3 * 128), ("fp8_e4m3", 255)]
)
def test_shape_dtype_and_the_weight_itself_stay_and_few_values_are_left(precision, most, dtype):
    weight = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = weight.clone()
    found = rounded(weight, precision)
    assert (found.shape, found.dtype) == (weight.shape, dtype) and torch.equal(weight, before)
    for row, old in zip(found, weight, strict=True):
        assert len(row.unique()) <= min(most, len(old.unique()) - 1)


def test_what_is_not_finite_is_not_hidden():
    weight = torch.ones(2, 64)
    weight[0, 3] = math.nan
    for precision in SCALED:
        assert rounded(weight, precision)[0].isnan().any(), precision


EXPERTS = {
    "qwen3_moe": ["mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"],
    "mixtral": ["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.3.w2"],
    "glm4_moe": ["mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"],
    "deepseek_v3": ["mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"],
}
"""Names in files and servers; today's transformers stacks them."""


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "llama", "phi3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"]
)
def test_just_the_matrices_of_the_layers_are_rounded(kind):
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        pad_token_id=None,
    )
    experts = (
        dict(
            num_experts=4,
            num_local_experts=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        )
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
    assert packed_form("model.layers.1.mlp.up_proj.weight", (3, 5), "int4").nbytes == 32
    assert packed_form("model.norm.weight", (5,), "int4") is None
    assert packed_form("model.layers.1.mlp.up_proj.weight", (3, 5), "bf16") is None
    for precision in PRECISIONS:
        changed = {name for name in linear | others if is_rounded(name, precision)}
        assert changed == (linear if precision in SCALED else linear | others), precision
    assert not any(is_rounded(name, None) for name in linear | others)
    assert not any(is_rounded("model.layers.1.mlp.gate.e_score_correction_bias", p) for p in PRECISIONS)
    assert ROUNDED.keys() == {*PRECISIONS}
    assert RolloutConfig().rounding is None and "weight-only" in RolloutConfig(precision="int4").rounding


@pytest.mark.parametrize(
    ("rollout", "first_step", "sent"),
    [({}, 1, False), ({"quantization": "fp8"}, 1, False), ({"precision": "int4"}, 1, True), ({}, 7, True)],
)
def test_servers_get_rounded_weights_before_they_sample_a_first_time(rollout, first_step, sent):
    """What they loaded from disk is not rounded; SGLang rounds to FP8 by itself."""
    calls = []
    sync = SimpleNamespace(
        take_over=lambda *, sends: calls.append("restore" if sends else "take over"),
        prove=lambda temperature: calls.append("prove") or 0.0,
    )
    config = SimpleNamespace(rollout=RolloutConfig(**rollout))
    compare_engines(
        SimpleNamespace(
            config=config, first_step=first_step, weight_sync=sync, tracker=None, devices=OwnDevices()
        )
    )
    assert calls == ["restore" if sent else "take over", "prove"]


@pytest.mark.parametrize(
    ("rollout", "checks_gap", "how"),
    [
        ({}, True, "agree"),
        (
            {"dtype": "bfloat16"},
            False,
            "differ, since they do not both compute in float32, and no limit is checked",
        ),
        ({"precision": "int4"}, False, "differ, since the servers' weights are rounded"),
    ],
)
def test_engines_are_said_to_agree_where_that_was_checked(rollout, checks_gap, how):
    run = Mock(config=SimpleNamespace(rollout=RolloutConfig(**rollout)), first_step=1, devices=OwnDevices())
    run.weight_sync.checks_gap, run.weight_sync.prove.return_value = checks_gap, 3.3e-2
    compare_engines(run)
    (text,) = run.tracker.say.call_args.args
    assert text.startswith(f"before the first step, learner and servers {how}: log-probs of a probe prompt")
    assert text.endswith("differ by 3.3e-02 nats at most")
