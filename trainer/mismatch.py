"""Diagnostics of the gap between the two engines: what the rollout says of its tokens against what the learner says of them.

Legend: T packed tokens. rho = pi_old / pi_rollout of a token; log-probs are nats. Every metric looks at response tokens alone, carries its
reduction, and merges exactly over micro-batches and ranks.
"""

import torch
from torch import Tensor

from trainer.kl import bounded, excess
from trainer.metrics import Metric


def mismatch_metrics(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, response_mask_T: Tensor) -> dict[str, Metric]:
    """How far ``old`` is from ``rollout``, before anything is corrected.

        abs_prob_mean, abs_prob_max   |pi_rollout - pi_old| of the sampled tokens
        k1                            mean of log pi_rollout - log pi_old, estimates KL(rollout || old); may be negative
        k3                            mean of rho - 1 - log rho (log rho bounded to +-20), the same KL, never negative
        logprob_gap_max               max |log pi_rollout - log pi_old|
        ratio_mean, ratio_max, ratio_min   of rho (log rho bounded); the mean estimates 1 where the two engines agree
    """
    log_ratio_T = _float64(old_logprobs_T) - _float64(rollout_logprobs_T)
    gap_T = (_float64(rollout_logprobs_T).exp() - _float64(old_logprobs_T).exp()).abs()
    ratio_T = bounded(log_ratio_T).exp()
    return {
        "mismatch/abs_prob_mean": Metric.mean(gap_T, response_mask_T),
        "mismatch/abs_prob_max": Metric.max(gap_T, response_mask_T),
        "mismatch/k1": Metric.mean(-log_ratio_T, response_mask_T),
        "mismatch/k3": Metric.mean(excess(log_ratio_T), response_mask_T),
        "mismatch/logprob_gap_max": Metric.max(log_ratio_T.abs(), response_mask_T),
        "mismatch/ratio_mean": Metric.mean(ratio_T, response_mask_T),
        "mismatch/ratio_max": Metric.max(ratio_T, response_mask_T),
        "mismatch/ratio_min": Metric.min(ratio_T, response_mask_T),
    }


def correction_metrics(
    ratio_T: Tensor, weights_T: Tensor, truncated_T: Tensor, keep_T: Tensor, response_mask_T: Tensor
) -> dict[str, Metric]:
    """What a correction made of the gap.

        ess                                   (sum rho)^2 / (N sum rho^2) of the ratios *before* the weight bound: after it, a
                                              collapse would look healthy. 1: all alike; 1 / N: one outweighs the rest
        weight_mean, weight_max, weight_min   of the weights as the loss sees them, after the bound
        truncated_fraction                    tokens whose ratio was above the bound
        kept_fraction                         tokens that no rule rejected
    """
    return {
        "mismatch/ess": Metric.ess(ratio_T, response_mask_T),
        "mismatch/weight_mean": Metric.mean(weights_T, response_mask_T),
        "mismatch/weight_max": Metric.max(weights_T, response_mask_T),
        "mismatch/weight_min": Metric.min(weights_T, response_mask_T),
        "mismatch/truncated_fraction": Metric.mean(truncated_T, response_mask_T),
        "mismatch/kept_fraction": Metric.mean(keep_T, response_mask_T),
    }


def _float64(values_T: Tensor) -> Tensor:
    return values_T.detach().to(torch.float64)
