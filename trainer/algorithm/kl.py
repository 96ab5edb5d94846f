"""Per-token estimators of KL(current || ref) from the log-probs of sampled tokens, and the bound that every
log-ratio shares.

Source: J. Schulman, "Approximating KL divergence" (2020). The expectation of k1 and k3 over samples of
``current`` is the KL. k2 is biased; its bias vanishes as the two policies meet. abs estimates the distance of
the log-probs instead.

In the loss only gradients matter. The gradient of k2 is an unbiased estimate of the KL's gradient. The gradient
of k1 has expectation zero. That of k3 estimates the gradient of the reverse divergence KL(ref || current). A
straight-through form has the value of its estimator, which is logged, and the gradient of k2.

``kl.unbiased`` multiplies the estimator by r = pi_current / pi_sampler, with gradient. With d = log pi_ref -
log pi_current the gradient of r k3 is -r d grad log pi_current. The gradient of r k1 has the further term r
grad log pi_current, whose expectation is zero. So over samples of any policy both estimate the gradient of
KL(current || ref). At r = 1 the gradient of r k3 is k2's.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from configs.schema.correction import LOG_RATIO_BOUND
from configs.schema.objective import Estimator

K3_BOUND = 10.0
"""k3 to the reference is at most this, in the loss and in the reward: one token with exp(20) would dominate
either."""

ERROR_BOUND = 0.2
"""Bound of the proportional error of the adaptive coefficient."""


def bounded(log_ratio_T: Tensor) -> Tensor:
    """The log-ratio within +-LOG_RATIO_BOUND; beyond it the gradient is zero. NaN stays NaN."""
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(current_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """log pi_current - log pi_ref. [T] -> [T]"""
    return current_logprobs_T - ref_logprobs_T


def k2(current_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(log pi_current - log pi_ref)^2 / 2. [T] -> [T]"""
    return 0.5 * (current_logprobs_T - ref_logprobs_T).square()


def k3(current_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log pi_ref - log pi_current, at most K3_BOUND (zero gradient beyond). [T] ->
    [T]

    The bound is the reference implementation's. k3 reaches it if ref gives a token 14 times current's
    probability, or e^-11 of it.
    """
    return excess(ref_logprobs_T - current_logprobs_T).clamp(max=K3_BOUND)


def absolute(current_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|log pi_current - log pi_ref|; no gradient where they are equal. [T] -> [T]"""
    return (current_logprobs_T - ref_logprobs_T).abs()


def excess(log_ratio_T: Tensor) -> Tensor:
    """rho - 1 - log rho >= 0 of a bounded log-ratio d. expm1 keeps the digits that exp(d) - 1 loses near 0."""
    d_T = bounded(log_ratio_T)
    return torch.expm1(d_T) - d_T


def straight_through(estimator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator with its own value, bit by bit, and the gradient of k2 (log pi_current - log pi_ref)."""

    def with_gradient_of_k2(current_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        gradient_T = k2(current_logprobs_T, ref_logprobs_T)
        return estimator(current_logprobs_T, ref_logprobs_T).detach() + (gradient_T - gradient_T.detach())

    return with_gradient_of_k2


ESTIMATORS: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1_straight_through": straight_through(k1),
    "k3_straight_through": straight_through(k3),
    "abs_straight_through": straight_through(absolute),
}


def adaptive_coefficient(
    coefficient: float, measured: float, *, target: float, horizon: int, num_samples: int
) -> float:
    """The next coefficient of the KL in the reward: raised while the measured KL is above target, lowered
    while it is below.

        e = clip(measured / target - 1, -0.2, 0.2);  next = coefficient (1 + e num_samples / horizon)
    measured and target are KL in nats, both per token or both per sequence; horizon and num_samples count
    responses.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. Raises ValueError if measured is not finite,
    and if num_samples is so large against the horizon that the coefficient could reach zero or below.
    """
    if not math.isfinite(measured):
        raise ValueError(f"the measured KL is {measured}: look for a non-finite log-prob of old or ref")
    if ERROR_BOUND * num_samples >= horizon:
        raise ValueError(
            f"{num_samples} responses a step against kl.controller.horizon={horizon} could take the coefficient to zero or below; "
            f"set the horizon above {math.ceil(ERROR_BOUND * num_samples)}"
        )
    error = min(max(measured / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return coefficient * (1 + error * num_samples / horizon)
