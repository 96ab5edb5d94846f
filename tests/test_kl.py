"""KL estimators: golden values and gradients, and what their expectations are, by summing over a small vocabulary."""

import math

import pytest
import torch

from tests.golden_cases import load
from trainer.kl import ESTIMATORS, K3_BOUND, bounded, excess


@pytest.mark.parametrize("case", load("kl"), ids=lambda c: c.name)
def test_golden_value_and_gradient(case):
    current = torch.from_numpy(case.arrays["logp"]).requires_grad_()
    ref = torch.from_numpy(case.arrays["ref_logp"])
    kl = ESTIMATORS[case.params["estimator"]](current, ref)
    (gradient,) = torch.autograd.grad(kl.sum(), current)
    torch.testing.assert_close(kl, torch.from_numpy(case.arrays["out_kl"]), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(gradient, torch.from_numpy(case.arrays["out_grad_logp"]), rtol=1e-6, atol=1e-12)


def test_by_hand():
    current, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    values = {name: estimator(current, ref).item() for name, estimator in ESTIMATORS.items()}
    assert values == pytest.approx({"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 + math.log(2) - 1})


def _policies():
    generator = torch.Generator().manual_seed(3)
    current = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    return current, ref


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_is_the_divergence(name):
    logits, ref = _policies()
    logprobs = logits.log_softmax(0).detach()
    divergence = (logprobs.exp() * (logprobs - ref)).sum()
    assert (logprobs.exp() * ESTIMATORS[name](logprobs, ref)).sum().item() == pytest.approx(divergence.item(), rel=1e-12)


def test_expected_gradients_as_documented():
    logits, ref = _policies()
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()

    def gradient(of):
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    forward = gradient((logprobs.exp() * (logprobs - ref)).sum())
    reverse = gradient((ref.exp() * (ref - logprobs)).sum())
    expected = {"k1": torch.zeros_like(forward), "k2": forward, "k3": reverse}
    for name, estimator in ESTIMATORS.items():
        torch.testing.assert_close(gradient((probs * estimator(logprobs, ref)).sum()), expected[name], rtol=1e-9, atol=1e-12)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-4, -3e-4, 1e-3])
    exact = torch.expm1(d.double()) - d.double()
    torch.testing.assert_close(excess(d).double(), exact, rtol=2e-3, atol=0)
    assert not torch.allclose((d.exp() - d - 1).double(), exact, rtol=2e-3, atol=0), "the plain formula passes too"


def test_extremes_stay_finite():
    current = torch.tensor([-1e4, 0.0], requires_grad=True)
    ref = torch.tensor([0.0, -1e4])
    k3 = ESTIMATORS["k3"](current, ref)
    assert k3.tolist() == [K3_BOUND, K3_BOUND]
    (gradient,) = torch.autograd.grad(k3.sum(), current)
    assert gradient.tolist() == [0.0, 0.0]
    assert bounded(torch.tensor([1e4, -1e4, 3.0])).tolist() == [20.0, -20.0, 3.0]
