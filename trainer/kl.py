"""Per-token estimators of KL(current || ref) from the log-probs of sampled tokens, and the bound that every log-ratio shares.

Legend: T packed tokens. All log-probs are nats. Source: J. Schulman, "Approximating KL divergence" (2020).
The expectation of k1 and k3 over samples of ``current`` is the KL; k2 is biased, with a bias that vanishes as the two meet.
As a term of the loss only their gradients matter: that of k2 is an unbiased estimate of the KL's gradient, that of k1 has
expectation zero, that of k3 estimates the gradient of the reverse divergence KL(ref || current).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to +-20 before exp, so no ratio leaves [2e-9, 5e8] and float32 never overflows, not even squared."""

K3_BOUND = 10.0
"""k3 of a token is at most this in the loss, where a single exp(20) would be the whole gradient."""

Estimator = Literal["k1", "k2", "k3"]


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
    """exp(d) - d - 1 with d = log pi_ref - log pi_current, at most K3_BOUND (zero gradient beyond). [T] -> [T]

    The bound is the reference implementation's; it is reached where ref gives a token 14 times current's probability, or e^-11 of it.
    """
    return excess(ref_logprobs_T - current_logprobs_T).clamp(max=K3_BOUND)


def excess(log_ratio_T: Tensor) -> Tensor:
    """rho - 1 - log rho >= 0 of a log-ratio, bounded. expm1 keeps the digits that exp(d) - 1 loses near d = 0."""
    d_T = bounded(log_ratio_T)
    return torch.expm1(d_T) - d_T


ESTIMATORS: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
