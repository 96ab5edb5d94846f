"""Every objective: against loops from the formulas, by hand, at its edges, and what it is equal to where it
should be.

Legend: S sequences, T packed tokens.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import objectives as slow
from tests.reference.objectives import Token
from trainer.algorithm.objectives import (
    GSPO_LOG_BOUND,
    ObjectiveLoss,
    cispo,
    clipped,
    dppo,
    geometric_mean_weights,
    gmpo,
    gspo,
    policy_gradient,
    sapo,
)

PER_TOKEN = {"clipped": clipped, "cispo": cispo, "sapo": sapo, "dppo": dppo}
PER_SEQUENCE = {"gspo": gspo, "gmpo": gmpo}
PARAMETERS = {
    "clipped": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.3},
    "cispo": {"clip_low": 0.2, "clip_high": 0.28},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "dppo": {"max_decrease": 0.2, "max_increase": 0.1, "ratio_max": 5.0},
    "policy_gradient": {},
}


def run(name, current_T, old_T, advantages_T, mask_T=None, cu_seqlens=None, **parameters) -> ObjectiveLoss:
    """Without a mask: one sequence, all valid."""
    mask_T = torch.ones(current_T.numel(), dtype=torch.bool) if mask_T is None else mask_T
    cu_seqlens = torch.tensor([0, current_T.numel()]) if cu_seqlens is None else cu_seqlens
    parameters = PARAMETERS[name] | parameters
    if name == "policy_gradient":
        return policy_gradient(current_T, advantages_T)
    if name in PER_SEQUENCE:
        return PER_SEQUENCE[name](current_T, old_T, advantages_T, mask_T, cu_seqlens, **parameters)
    return PER_TOKEN[name](current_T, old_T, advantages_T, **parameters)


def double(*values, requires_grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def value_and_slope(name, ratio, advantage, *, old=0.25, **parameters):
    """(loss, d loss / d log pi_current, result) of a sequence of one token."""
    current = torch.tensor([math.log(old * ratio)], dtype=torch.float64, requires_grad=True)
    result = run(name, current, double(math.log(old)), double(advantage), **parameters)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    return result.loss_T.item(), gradient.item(), result


advantages = st.floats(-3, 3).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
tokens = st.builds(Token, st.floats(-30, 0), st.floats(-30, 0), advantages, st.floats(0.1, 3), st.booleans())
sequences = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=5)
bounds = {"clip_low": st.floats(0, 0.9), "clip_high": st.floats(0, 2)}
parameters_of = {
    "clipped": st.fixed_dictionaries(bounds | {"dual_clip": st.none() | st.floats(1.01, 10)}),
    "gspo": st.fixed_dictionaries(bounds),
    "gmpo": st.fixed_dictionaries(bounds),
    "cispo": st.fixed_dictionaries(bounds),
    "sapo": st.fixed_dictionaries(
        {"temperature_positive": st.floats(0.1, 5), "temperature_negative": st.floats(0.1, 5)}
    ),
    "dppo": st.fixed_dictionaries(
        {"max_decrease": st.floats(0, 1), "max_increase": st.floats(0, 1), "ratio_max": st.floats(0.5, 30)}
    ),
    "policy_gradient": st.just({}),
}


def packed(rows):
    flat = [token for row in rows for token in row]
    current, old, advantage, weight, counts = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*flat, strict=True)
    )
    return (
        current.requires_grad_(),
        old,
        advantage,
        weight,
        counts.bool(),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
    )


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n != "gmpo"])
@settings(max_examples=60, deadline=None)
@given(rows=sequences, data=st.data())
def test_matches_a_loop_over_tokens(name, rows, data):
    parameters = data.draw(parameters_of[name])
    current, old, advantage, _, mask, cu_seqlens = packed(rows)
    result = run(name, current, old, advantage, mask, cu_seqlens, **parameters)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    expected = [pair for row in rows for pair in slow.OBJECTIVES[name](row, **parameters)]
    losses, slopes = (double(*column) for column in zip(*expected, strict=True))
    torch.testing.assert_close(result.loss_T.detach(), losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, slopes, rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(rows=sequences, parameters=parameters_of["gmpo"])
def test_gmpo_matches_a_loop_over_sequences(rows, parameters):
    current, old, advantage, weight, mask, cu_seqlens = packed(rows)
    loss_T = gmpo(current, old, advantage, mask, cu_seqlens, **parameters).loss_T * geometric_mean_weights(
        weight, mask, cu_seqlens
    )
    expected = [slow.gmpo(row, **parameters) for row in rows]
    firsts = loss_T.detach()[cu_seqlens[:-1]]
    torch.testing.assert_close(firsts, double(*(loss for loss, _ in expected)), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(loss_T.detach(), firsts.repeat_interleave(cu_seqlens.diff()), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(loss_T[cu_seqlens[:-1]].sum(), current)
    torch.testing.assert_close(
        gradient, double(*(slope for _, row in expected for slope in row)), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "flags"),
    [
        (1.1, 2.0, -2.2, -2.2, (False, False)),  # inside the bounds: plain
        (1.5, 2.0, -2.56, 0.0, (True, False)),  # A > 0 above 1 + 0.28: held
        (0.5, 2.0, -1.0, -1.0, (False, False)),  # A > 0 below: plain, pulled back up
        (0.5, -2.0, 1.6, 0.0, (True, False)),  # A < 0 below 1 - 0.2: held
        (1.5, -2.0, 3.0, 3.0, (False, False)),  # A < 0 above: plain, up to dual clip
        (2.9, -2.0, 5.8, 5.8, (False, False)),
        (5.0, -2.0, 6.0, 0.0, (False, True)),  # A < 0 far above: held at 3 |A|
        (5.0, 2.0, -2.56, 0.0, (True, False)),  # dual clip is for A < 0 alone
        (5.0, 0.0, 0.0, 0.0, (False, False)),  # there is nothing to hold
        (0.5, 0.0, 0.0, 0.0, (False, False)),
    ],
)
def test_clipped_by_hand(ratio, advantage, loss, slope, flags):
    *found, result = value_and_slope("clipped", ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert found == pytest.approx([loss, slope], abs=1e-12)
    assert (result.clipped_T.item(), result.dual_clipped_T.item()) == flags
    assert result.ratio_T.item() == pytest.approx(ratio)


def test_without_dual_clip_a_negative_advantage_has_no_ceiling():
    loss, slope, result = value_and_slope("clipped", 5.0, -2.0, dual_clip=None)
    assert (loss, slope, result.dual_clipped_T.item()) == (pytest.approx(10.0), pytest.approx(10.0), False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "is_clipped"),
    [
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, 1.28, True),
        (0.5, 2.0, 0.8, True),
        (1.5, -2.0, 1.28, True),
        (0.5, -2.0, 0.8, True),
        (1.5, 0.0, 1.28, False),  # there is nothing that the bound changes
    ],
)
def test_cispo_by_hand_every_token_keeps_its_gradient(ratio, advantage, weight, is_clipped):
    loss, slope, result = value_and_slope("cispo", ratio, advantage, old=0.25)
    assert (loss, slope) == pytest.approx(
        (-weight * advantage * math.log(0.25 * ratio), -weight * advantage), rel=1e-12
    )
    assert result.clipped_T.item() is is_clipped


def test_cispo_with_clip_low_of_one_leaves_small_ratios():
    assert value_and_slope("cispo", 0.01, 1.0, clip_low=1.0)[1] == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -4.0, -2.0),  # 4 sigmoid(0) = 2, so the value is -2 A and the slope -A
        (1.0, -2.0, 2.0, 2.0),  # tau 2: (4 / 2) / 2 = 1
        # sigmoid(log 3) = 3/4: value -3, slope -4 (3/4) (1/4) r.
        (
            1 + math.log(3),
            1.0,
            -3.0,
            -0.75 * (1 + math.log(3)),
        ),
        (1 + math.log(3) / 2, -1.0, 1.5, 0.75 * (1 + math.log(3) / 2)),  # the same gate at tau 2
        (1 - math.log(2), 1.0, -4 / 3, -8 / 9 * (1 - math.log(2))),  # sigmoid(-log 2) = 1/3
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, slope):
    *found, result = value_and_slope(
        "sapo", ratio, advantage, temperature_positive=1.0, temperature_negative=2.0
    )
    assert found == pytest.approx([loss, slope], rel=1e-12)
    assert result.clipped_T is None


@pytest.mark.parametrize(
    ("old", "current", "advantage", "is_masked"),
    [
        (0.5, 0.59, 1.0, False),
        (0.5, 0.61, 1.0, True),  # + 0.11, above 0.1
        (0.5, 0.2, 1.0, False),  # down with A > 0: pulled back up
        (0.5, 0.31, -1.0, False),
        (0.5, 0.29, -1.0, True),  # - 0.21, below -0.2
        (0.5, 0.9, -1.0, False),
        (0.01, 0.04, 1.0, False),  # four times likelier, yet little has moved
        (0.5, 0.2, 0.0, False),  # there is nothing to mask
    ],
)
def test_dppo_by_hand(old, current, advantage, is_masked):
    loss, slope, result = value_and_slope("dppo", current / old, advantage, old=old)
    expected = 0.0 if is_masked else -advantage * current / old
    assert (loss, slope) == pytest.approx((expected * math.log(current), expected), rel=1e-12)
    assert result.clipped_T.item() is is_masked


def test_dppo_bounds_the_weight_of_the_gradient():
    assert value_and_slope("dppo", 30.0, 1.0, old=0.001, ratio_max=20.0)[1] == pytest.approx(-20.0)


def test_gspo_by_hand():
    current, old = double(0.6, 0.3, 0.5).log().requires_grad_(), double(0.5, 0.4, 0.5).log()
    result = run(
        "gspo",
        current,
        old,
        double(2.0, -1.0, 1.0),
        torch.tensor([True, True, False]),
        clip_low=0.04,
        clip_high=0.1,
    )
    s = math.sqrt(0.6 / 0.5 * 0.3 / 0.4)  # 0.9487, below 1 - 0.04
    assert result.ratio_T.tolist() == pytest.approx([s] * 3)
    assert result.loss_T.tolist()[:2] == pytest.approx([-2 * s, 0.96])
    (gradient,) = torch.autograd.grad(result.loss_T[:2].sum(), current)
    assert gradient.tolist() == pytest.approx([-2 * s, 0.0, 0.0])
    assert result.clipped_T.tolist()[:2] == [False, True]


def test_gmpo_by_hand():
    current, old = double(0.6, 0.3, 0.5).log().requires_grad_(), double(0.3, 0.4, 0.5).log()
    mask = torch.tensor([True, True, False])
    result = run("gmpo", current, old, double(2.0, 1.0, 9.0), mask, clip_low=0.4, clip_high=0.4)
    ratio = math.sqrt(math.exp(0.4) * 0.75)  # log 2 is held at 0.4
    assert result.loss_T.tolist() == pytest.approx([-1.5 * ratio] * 3)
    (gradient,) = torch.autograd.grad(result.loss_T[0], current)
    assert gradient.tolist() == pytest.approx([0.0, -1.5 * ratio / 2, 0.0])
    assert result.clipped_T.tolist()[:2] == [True, False]
    assert result.ratio_T.tolist()[:2] == pytest.approx([2.0, 0.75])  # before the bound


def test_gmpo_marks_the_tokens_that_are_held_on_the_side_of_their_advantage():
    ratios, signs = double(2.0, 0.5, 2.0, 0.5, 2.0, 0.5), double(1.0, 1.0, -1.0, -1.0, 0.0, 0.0)
    result = run("gmpo", ratios.log(), double(*[0.0] * 6), signs)
    assert result.clipped_T.tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "current", "old", "advantage", "parameters"),
    [
        ("gmpo", -0.5, -1.0, 1.0, {"clip_high": 0.5}),
        ("gmpo", -1.0, -0.5, -1.0, {"clip_low": 0.5}),
        ("dppo", 0.0, math.log(0.5), 1.0, {"max_increase": 0.5}),
        ("dppo", math.log(0.5), 0.0, -1.0, {"max_decrease": 0.5}),
    ],
)
def test_what_lies_on_a_bound_is_not_clipped(name, current, old, advantage, parameters):
    result = run(name, double(current), double(old), double(advantage), **parameters)
    assert not result.clipped_T.item()


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_SEQUENCE])
def test_only_the_loss_has_a_gradient(name):
    result = run(name, double(-1.0, -2.0, requires_grad=True), double(-1.5, -1.0), double(1.0, -1.0))
    assert result.loss_T.requires_grad and not result.ratio_T.requires_grad


def test_geometric_mean_weights():
    weights = double(2.0, 8.0, torch.nan, 0.0, 5.0, torch.nan)
    mask = torch.tensor([True, True, False, True, True, False])
    found = geometric_mean_weights(weights, mask, torch.tensor([0, 3, 5, 6]))
    assert found.tolist() == pytest.approx([4.0, 4.0, 4.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("advantage", [1.3, -0.7])
@pytest.mark.parametrize("scale", [0.001, 0.3, 3.0])
def test_gspo_token_form_equals_the_sequence_form_where_advantages_are_equal(advantage, scale):
    generator = torch.Generator().manual_seed(int(1000 * scale))
    lengths = [5, 1, 9, 4, 7]
    old = -torch.rand(26, generator=generator, dtype=torch.float64) * 4
    current = (old + scale * torch.randn(26, generator=generator, dtype=torch.float64)).requires_grad_()
    bounds = {"clip_low": 0.1, "clip_high": 0.15}

    token_form = torch.zeros((), dtype=torch.float64)
    result = run(
        "gspo",
        current,
        old,
        torch.full_like(old, advantage),
        None,
        torch.tensor([0, *lengths]).cumsum(0),
        **bounds,
    )
    for loss_T in result.loss_T.split(lengths):
        token_form = token_form + loss_T.mean() / len(lengths)

    sequence_form = torch.zeros((), dtype=torch.float64)
    for mine, before in zip(current.split(lengths), old.split(lengths), strict=True):
        s = (mine - before).mean().exp()
        sequence_form = sequence_form - torch.minimum(s * advantage, s.clamp(0.9, 1.15) * advantage) / len(
            lengths
        )

    assert token_form.item() == pytest.approx(sequence_form.item(), rel=1e-12)
    (found,), (expected,) = (
        torch.autograd.grad(token_form, current),
        torch.autograd.grad(sequence_form, current),
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert scale > 0.001 or found.abs().min() > 0
    assert scale < 3 or (found == 0).any(), "no sequence was clipped"


def test_gspo_token_form_differs_where_advantages_do():
    current, old = double(-1.0, -2.0, requires_grad=True), double(-1.01, -2.02)
    (found,) = torch.autograd.grad(run("gspo", current, old, double(1.0, -0.5)).loss_T.sum(), current)
    s = math.exp(0.015)
    assert found.tolist() == pytest.approx([-s, 0.5 * s])


@pytest.mark.parametrize("name", PARAMETERS)
def test_at_current_equal_to_old_the_gradient_is_that_of_the_policy_gradient(name):
    logprobs = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 20
    advantage = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    # gmpo knows a sequence's mean advantage alone: sequences of one token, whose mean it is.
    cu_seqlens = torch.arange(1001)
    current = logprobs.clone().requires_grad_()
    result = run(name, current, logprobs, advantage, torch.ones(1000, dtype=torch.bool), cu_seqlens)
    (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
    torch.testing.assert_close(gradient, -advantage, rtol=1e-6, atol=0)
    if result.ratio_T is not None:
        assert torch.equal(result.ratio_T, torch.ones(1000))
    if result.clipped_T is not None:
        assert not result.clipped_T.any()
    if name in ("clipped", "gspo", "gmpo"):
        assert torch.equal(result.loss_T.detach(), -advantage)


def test_at_current_equal_to_old_gmpo_spreads_the_mean_advantage():
    current = double(-1.0, -2.0, -3.0, requires_grad=True)
    result = run("gmpo", current, current.detach(), double(1.0, 2.0, -6.0))
    (gradient,) = torch.autograd.grad(result.loss_T.mean(), current)
    assert gradient.tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_extreme_log_ratios_stay_finite(name, dual_clip):
    current = torch.tensor([0.0, -1e4, 0.0, -1e4], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    options = {"dual_clip": dual_clip} if name == "clipped" else {}
    # One sequence each: gspo and gmpo get the extremes themselves, not their mean.
    for mask in (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)):
        result = run(
            name, current, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), mask, torch.arange(5), **options
        )
        (gradient,) = torch.autograd.grad(result.loss_T.sum(), current)
        assert result.loss_T.isfinite().all() and gradient.isfinite().all()
        assert result.ratio_T is None or result.ratio_T.isfinite().all()
        if name == "clipped":
            assert gradient.tolist() == [0.0] * 4


def test_the_mean_over_a_long_response_of_float32_keeps_its_digits():
    current_T, old_T = torch.full((1 << 17,), -0.9, requires_grad=True), torch.full((1 << 17,), -1.0)
    loss = run("gmpo", current_T, old_T, torch.ones_like(old_T)).loss_T[0].item()
    assert -loss == pytest.approx(math.exp((current_T[0] - old_T[0]).item()), rel=1e-6)


def test_gspo_ratio_is_bounded():
    result = run("gspo", double(0.0, 0.0), double(-1e4, -1e4), double(-1.0, -1.0))
    assert result.ratio_T.tolist() == pytest.approx([math.exp(GSPO_LOG_BOUND)] * 2)


@pytest.mark.parametrize("name", ["clipped", "sapo", "gmpo", "gspo"])
def test_gradcheck(name):
    """cispo, dppo and policy gradient stop a gradient or have none of a ratio; gspo's stops cancel in a
    sequence's mean (equal A)."""
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(6, generator=generator, dtype=torch.float64)
    current = (old + 0.1 * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = (
        double(1.0, 1.0, 1.0, -2.0, -2.0, -2.0)
        if name == "gspo"
        else torch.randn(6, generator=generator, dtype=torch.float64)
    )
    cu_seqlens = torch.tensor([0, 3, 6])
    parameters = {"clip_low": 0.9, "clip_high": 0.9} if name != "sapo" else {}
    assert torch.autograd.gradcheck(
        lambda x: run(name, x, old, advantage, None, cu_seqlens, **parameters).loss_T.view(2, 3).mean(1),
        current,
    )
