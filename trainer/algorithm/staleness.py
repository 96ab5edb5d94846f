"""Diagnostics by the age of tokens, if groups are sampled ahead of their step (``rollout.max_staleness``).

The lag of a token is the number of updates between its sampling and its step. At lag 0 the same weights have
sampled and scored it, so the gap is the mismatch of the two engines alone. From lag 1 on, staleness adds to
it. ``trainer/metric_names.py`` defines the metrics; they merge exactly over micro-batches and ranks.
"""

import torch
from torch import Tensor

from trainer.algorithm.kl import bounded, excess
from trainer.algorithm.mismatch import bucket_labels
from trainer.algorithm.segments import max_per_sequence
from trainer.ranks.metrics import Metric

LAG_EDGES = (0, 1, 2, 4, 8, 16)
"""Upper edges of the buckets of lags; the last bucket is open."""


def staleness_metrics(
    lag_N: Tensor,
    *,
    train_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    weights_N: Tensor,
    keep_N: Tensor,
    bounds_S: Tensor,
) -> dict[str, Metric]:
    """Lags of the response tokens, and the gap and its correction by lag.

    weights_N: the correction's. keep_N: bool, False for tokens that it rejected.
    """
    train_N, rollout_N, lags_N = (
        x_N.to(torch.float64) for x_N in (train_logprobs_N, rollout_logprobs_N, lag_N)
    )
    newest_S, oldest_S = -max_per_sequence(-lags_N, bounds_S), max_per_sequence(lags_N, bounds_S)
    has_tokens_S = bounds_S.diff() > 0
    metrics = {
        "mean": Metric.mean(lags_N),
        "max": Metric.max(lags_N),
        "mixed_fraction": Metric.mean(newest_S != oldest_S, has_tokens_S),
    }
    log_ratio_N = train_N - rollout_N
    gap_N, ratio_N = (rollout_N.exp() - train_N.exp()).abs(), bounded(log_ratio_N).exp()
    values_XN = {
        "abs_prob_mean": (Metric.mean, gap_N),
        "abs_prob_max": (Metric.max, gap_N),
        "logprob_gap_max": (Metric.max, log_ratio_N.abs()),
        "k3": (Metric.mean, excess(log_ratio_N)),
        "weight_mean": (Metric.mean, weights_N.to(torch.float64)),
        "ess": (Metric.ess, ratio_N),
        "kept_fraction": (Metric.mean, keep_N),
    }
    bucket_N = torch.bucketize(lags_N, torch.tensor(LAG_EDGES, dtype=torch.float64, device=lags_N.device))
    for bucket, label in enumerate(bucket_labels(LAG_EDGES)):
        here_N = bucket_N == bucket
        count = torch.count_nonzero(here_N).item()
        if count:
            metrics[f"by_lag/{label}/tokens"] = Metric.sum(count)
            for name, (measure, x_N) in values_XN.items():
                metrics[f"by_lag/{label}/{name}"] = measure(x_N, here_N)
    return {f"staleness/{name}": metric for name, metric in metrics.items()}
