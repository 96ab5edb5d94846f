"""KL estimators: golden values and gradients, a loop from the formulas, expectations by summing over a small
vocabulary; the controller."""

import math
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.objective import Estimator
from tests.reference import objectives as slow
from tests.support.golden_cases import load
from trainer.algorithm.kl import ESTIMATORS, K3_BOUND, adaptive_coefficient, bounded, excess

STRAIGHT_THROUGH = [name for name in ESTIMATORS if name.endswith("_straight_through")]


def test_every_estimator_of_the_config_is_here():
    assert set(ESTIMATORS) == set(typing.get_args(Estimator))


@pytest.mark.parametrize("case", load("kl"), ids=lambda c: c.name)
def test_golden_value_and_gradient(case):
    current = torch.from_numpy(case.arrays["logp"]).requires_grad_()
    ref = torch.from_numpy(case.arrays["ref_logp"])
    kl = ESTIMATORS[case.params["estimator"]](current, ref)
    (gradient,) = torch.autograd.grad(kl.sum(), current)
    torch.testing.assert_close(kl, torch.from_numpy(case.arrays["out_kl"]), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(
        gradient, torch.from_numpy(case.arrays["out_grad_logp"]), rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_matches_a_loop_over_tokens(name, rows):
    current, ref = torch.tensor(rows, dtype=torch.float64).unbind(1)
    current.requires_grad_()
    values = ESTIMATORS[name](current, ref)
    (gradient,) = torch.autograd.grad(values.sum(), current)
    expected = [slow.kl(*row, name) for row in rows]
    assert values.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-12)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_has_the_value_of_one_bit_by_bit_and_the_gradient_of_k2(name):
    generator = torch.Generator().manual_seed(0)
    current = (-5 * torch.rand(500, generator=generator)).requires_grad_()
    ref = -5 * torch.rand(500, generator=generator)
    value = ESTIMATORS[name](current, ref)
    assert torch.equal(value, ESTIMATORS[name.removesuffix("_straight_through")](current, ref))
    (found,) = torch.autograd.grad(value.sum(), current)
    (expected,) = torch.autograd.grad(ESTIMATORS["k2"](current, ref).sum(), current)
    assert torch.equal(found, expected)


def test_by_hand():
    current, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    values = {name: estimator(current, ref).item() for name, estimator in ESTIMATORS.items()}
    k1, k3 = math.log(2), 0.5 + math.log(2) - 1
    assert values == pytest.approx({
        "k1": k1, "k2": k1**2 / 2, "k3": k3, "abs": k1,
        "k1_straight_through": k1, "k3_straight_through": k3, "abs_straight_through": k1,
    })  # fmt: skip
    assert ESTIMATORS["abs"](ref, current).item() == pytest.approx(k1)


def _policies():
    generator = torch.Generator().manual_seed(3)
    current = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    return current, ref


@pytest.mark.parametrize("name", ["k1", "k3", "k1_straight_through", "k3_straight_through"])
def test_expectation_is_the_divergence(name):
    logits, ref = _policies()
    logprobs = logits.log_softmax(0).detach()
    divergence = (logprobs.exp() * (logprobs - ref)).sum()
    assert (logprobs.exp() * ESTIMATORS[name](logprobs, ref)).sum().item() == pytest.approx(
        divergence.item(), rel=1e-12
    )


def test_expected_gradients_as_documented():
    logits, ref = _policies()
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()

    def gradient(of):
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    forward = gradient((logprobs.exp() * (logprobs - ref)).sum())
    reverse = gradient((ref.exp() * (ref - logprobs)).sum())
    expected = {"k1": torch.zeros_like(forward), "k2": forward, "k3": reverse} | dict.fromkeys(
        STRAIGHT_THROUGH, forward
    )
    for name, gradient_V in expected.items():
        torch.testing.assert_close(
            gradient((probs * ESTIMATORS[name](logprobs, ref)).sum()), gradient_V, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_gradcheck(name):
    generator = torch.Generator().manual_seed(1)
    current = (-torch.rand(8, generator=generator, dtype=torch.float64)).requires_grad_()
    ref = -1 - torch.rand(8, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ESTIMATORS[name](x, ref), current)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-4, -3e-4, 1e-3])
    exact = torch.expm1(d.double()) - d.double()
    torch.testing.assert_close(excess(d).double(), exact, rtol=2e-3, atol=0)
    assert not torch.allclose((d.exp() - d - 1).double(), exact, rtol=2e-3, atol=0), (
        "the plain formula passes too"
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_extremes_stay_finite(name):
    current = torch.tensor([-1e4, 0.0], requires_grad=True)
    ref = torch.tensor([0.0, -1e4])
    value = ESTIMATORS[name](current, ref)
    (gradient,) = torch.autograd.grad(value.sum(), current)
    assert value.isfinite().all() and gradient.isfinite().all()
    if name == "k3":
        assert (value.tolist(), gradient.tolist()) == ([K3_BOUND, K3_BOUND], [0.0, 0.0])


def test_bounded():
    assert bounded(torch.tensor([1e4, -1e4, 3.0])).tolist() == [20.0, -20.0, 3.0]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),  # 10 % above
        (0.095, 0.5 * (1 - 0.05 * 64 / 1000)),
        (5.0, 0.5 * (1 + 0.2 * 64 / 1000)),  # far above: heeded as 20 %
        (-0.3, 0.5 * (1 - 0.2 * 64 / 1000)),  # k1's estimate can be negative
    ],
)
def test_adaptive_coefficient_by_hand(measured, expected):
    found = adaptive_coefficient(0.5, measured, target=0.1, horizon=1000, num_samples=64)
    assert found == pytest.approx(expected, rel=1e-12)


def test_adaptive_coefficient_brings_a_kl_that_falls_with_it_to_its_target():
    coefficient = 0.01
    for _ in range(2000):
        coefficient = adaptive_coefficient(
            coefficient, 0.02 / coefficient, target=0.1, horizon=1000, num_samples=100
        )
    assert coefficient == pytest.approx(0.2, rel=1e-6)


def test_adaptive_coefficient_refuses_what_would_break_it():
    with pytest.raises(ValueError, match="measured KL is nan"):
        adaptive_coefficient(0.5, math.nan, target=0.1, horizon=1000, num_samples=1)
    with pytest.raises(ValueError, match="set the horizon above 200"):
        adaptive_coefficient(0.5, 0.1, target=0.1, horizon=200, num_samples=1000)
