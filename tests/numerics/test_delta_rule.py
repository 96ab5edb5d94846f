"""The gated delta rule in chunks against its recurrence, token by token; the convolution against torch's."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from numerics.delta_rule import (
    CHUNK,
    causal_convolution,
    gated_delta_rule,
    gated_norm,
    log_decay,
    plan_chunks,
    unit,
)
from parallel.planning import architecture

CPU = torch.device("cpu")
BOUNDS = torch.tensor([0, 5, 65, 67, 218, 348, 349])
"""Sequences of one chunk and of several, and of one token."""


def recurrence(
    query, key, value, log_decay, step, bounds: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    outs, ends = [], []
    for row, (start, end) in enumerate(pairwise(bounds.tolist())):
        state = torch.zeros(*key.shape[1:], value.shape[-1]) if starts is None else starts[row]
        for t in range(start, end):
            state = state * log_decay[t].exp()[:, None, None]
            wrong = value[t] - torch.einsum("anv,an->av", state, key[t])
            state = state + torch.einsum("an,av->anv", key[t], wrong * step[t, :, None])
            outs.append(torch.einsum("anv,an->av", state, query[t]) / query.shape[-1] ** 0.5)
        ends.append(state)
    return torch.stack(outs), torch.stack(ends)


@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("has_starts", [False, True])
def test_chunks_compute_the_recurrence(has_starts, size):
    """Outputs, last states and gradients, of packed sequences."""
    torch.manual_seed(0)
    total, heads, key_dim, value_dim = int(BOUNDS[-1]), 3, 8, 12
    query, key = (unit(torch.randn(total, heads, key_dim)) for _ in range(2))
    value, decay, step = (
        torch.randn(total, heads, value_dim),
        -torch.rand(total, heads),
        torch.rand(total, heads),
    )
    inputs = [x.requires_grad_() for x in (query.detach(), key.detach(), value, decay, step)]
    starts = torch.randn(len(BOUNDS) - 1, heads, key_dim, value_dim) if has_starts else None
    found = gated_delta_rule(*inputs, plan_chunks(BOUNDS, CPU, size), starts)
    wanted = recurrence(*inputs, BOUNDS, starts)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    weights = [torch.randn_like(x) for x in wanted]
    gradients = [
        torch.autograd.grad([(x * w).sum() for x, w in zip(results, weights, strict=True)], inputs)
        for results in (found, wanted)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_convolution_sees_its_own_sequence_alone():
    torch.manual_seed(0)
    x_TD, weight_DW = torch.randn(int(BOUNDS[-1]), 6), torch.randn(6, 4)
    found = causal_convolution(x_TD, weight_DW, plan_chunks(BOUNDS, CPU).position_T)
    for start, end in pairwise(BOUNDS.tolist()):
        padded = F.pad(x_TD[start:end].t(), (3, 0))
        wanted = F.conv1d(padded[None], weight_DW[:, None], groups=6)[0].t()
        torch.testing.assert_close(found[start:end], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_convolution_may_be_wider_than_its_batch(tokens):
    x_TD, weight_DW = torch.randn(tokens, 6), torch.randn(6, 4)
    wanted = F.conv1d(F.pad(x_TD.t(), (3, 0))[None], weight_DW[:, None], groups=6)[0].t()
    torch.testing.assert_close(causal_convolution(x_TD, weight_DW, torch.arange(tokens)), wanted)


def test_a_length_of_almost_nothing_by_hand():
    assert unit(torch.tensor([1e-3, 0.0])).tolist() == pytest.approx([0.5**0.5, 0.0])


def test_bfloat16_is_rounded_once_at_the_end():
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((50, 16), (50, 16), (16,))
    )
    exact = gated_norm(x.float(), gate.float(), weight.float(), 1e-6)
    assert torch.equal(gated_norm(x, gate, weight, 1e-6), exact.bfloat16())
    exact = log_decay(weight.float(), x.float(), gate[0].float())
    assert torch.equal(log_decay(weight, x, gate[0]), exact) and exact.dtype == torch.float32


def test_the_plan_counts_chunks_of_the_rules_size():
    """Planning has no torch, so that it cannot import the rule."""
    assert architecture.CHUNK == CHUNK
