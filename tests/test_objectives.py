"""The clipped objective: against a loop over tokens written from the formula, by hand, and at its edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.objectives import clipped


def slow_clipped(current, old, advantage, *, clip_low, clip_high, dual_clip):
    """(loss, d loss / d current, clipped, dual clipped) of one token."""
    log_ratio = current - old
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    slope = -advantage * ratio if abs(log_ratio) <= 20 else 0.0
    held = -advantage * max(1 - clip_low, min(1 + clip_high, ratio))
    loss, was_clipped = -advantage * ratio, False
    if held > loss:
        loss, slope, was_clipped = held, 0.0, True
    if dual_clip is not None and advantage < 0 and loss > -dual_clip * advantage:
        return -dual_clip * advantage, 0.0, was_clipped, True
    return loss, slope, was_clipped, False


tokens = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3)), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(tokens, st.floats(0, 0.9), st.floats(0, 2), st.none() | st.floats(1.01, 10))
def test_matches_a_loop_over_tokens(rows, clip_low, clip_high, dual_clip):
    current, old, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    current.requires_grad_()
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    result = clipped(current, old, advantages, **bounds)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    expected = [slow_clipped(*row, **bounds) for row in rows]
    losses, slopes, was_clipped, was_dual = zip(*expected, strict=True)
    torch.testing.assert_close(result.loss_T.detach(), torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert (result.clipped_T.tolist(), result.dual_clipped_T.tolist()) == (list(was_clipped), list(was_dual))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the bounds: plain
        (1.5, 2.0, -2.56, 0.0),  # A > 0 above 1 + 0.28: held
        (0.5, 2.0, -1.0, -1.0),  # A > 0 below: plain, pulled back up
        (0.5, -2.0, 1.6, 0.0),  # A < 0 below 1 - 0.2: held
        (1.5, -2.0, 3.0, 3.0),  # A < 0 above: plain, up to dual clip
        (5.0, -2.0, 6.0, 0.0),  # A < 0 far above: held at 3 |A|
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_by_hand(ratio, advantage, loss, slope):
    current = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    result = clipped(
        current, torch.tensor([-1.0]), torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    assert (result.loss_T.item(), gradient.item()) == pytest.approx((loss, slope), abs=1e-12)


def test_equal_logprobs_give_ratio_one_bitwise_and_the_policy_gradient():
    logprobs = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 20
    advantages = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    current = logprobs.clone().requires_grad_()
    result = clipped(current, logprobs, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    assert torch.equal(result.ratio_T, torch.ones(1000))
    assert torch.equal(result.loss_T.detach(), -advantages)
    assert torch.equal(gradient, -advantages)


def test_extreme_log_ratios_stay_finite():
    current = torch.tensor([0.0, -1e4, 0.0, -1e4], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    result = clipped(current, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=None)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    assert torch.isfinite(result.loss_T).all()
    assert gradient.tolist() == [0.0] * 4
