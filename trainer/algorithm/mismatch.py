"""Diagnostics of the gap between the two engines, and of its correction. ``trainer/metric_names.py`` defines the
metrics; its symbols are used here too.

Axes: R responses (sequences with a valid token), B buckets, P pieces of responses, X several kinds of sums or
maxima. Every function takes tensors of any part of a batch, detaches them, computes in float64 and returns
metrics that merge exactly over micro-batches and ranks. A metric that counted nothing is absent, or has no
value.

Sources: formulas of rollout correction (Y. Li, 2025), section 4; F. Yao et al., "Your efficient RL framework
secretly brings you off-policy RL training" (2025) for Δp per response, the sign of k1 and the reward under
the learner's policy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema.correction import LOG_RATIO_BOUND
from trainer.algorithm.kl import bounded
from trainer.algorithm.segments import max_per_sequence, sum_per_sequence
from trainer.ranks.metrics import Metric, Metrics, Reduction

LENGTH_EDGES = (64, 256, 1024, 4096)
"""Upper edges, in tokens, of the buckets of response length and of position in the response (from 1); the
last bucket is open."""

RESPONSE_MAX_EDGES = (0.001, 0.01, 0.1, 0.25, 0.5)
RESPONSE_MEAN_EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Upper edges of the bins of a response's max and mean Δp; a value on an edge belongs to the bin below it."""
HIGH_GAP = 0.5
"""The engines contradict each other in a response whose greatest Δp is over this."""

NEAR_ONE = (0.9, 1.1)
"""A ratio within these counts as numerical noise."""


class SampledGap(NamedTuple):
    """The greatest distances between the two engines on a sampled token."""

    probability: float
    """Greatest Δp."""
    nats: float
    """Greatest |d|, unbounded."""

    @classmethod
    def of(cls, metrics: Metrics) -> "SampledGap | None":
        """From merged metrics; None if no token was compared. If tokens have lags, only those with lag 0
        count."""
        part = "staleness/by_lag/le_0" if "staleness/mean" in metrics else "mismatch"
        names = (f"{part}/abs_prob_max", f"{part}/logprob_gap_max")
        return cls(*(metrics[name].parts[0] for name in names)) if names[0] in metrics else None


def mismatch_metrics(
    train_logprobs_N: Tensor, rollout_logprobs_N: Tensor, bounds_S: Tensor
) -> dict[str, Metric]:
    """Distance of ``train`` from ``rollout`` before any correction, over tokens, over responses, by length of the
    response and by position in it."""
    bounds_R = _response_bounds(bounds_S)
    _require_lengths(bounds_R, train_logprobs_N=train_logprobs_N, rollout_logprobs_N=rollout_logprobs_N)
    lengths_R = bounds_R.diff()
    if not lengths_R.numel():
        return {}
    train_N, rollout_N = _float64_copy(train_logprobs_N), _float64_copy(rollout_logprobs_N)
    log_ratio_N = train_N - rollout_N
    metrics = _perplexities(train_N, rollout_N, bounds_R, lengths_R.to(train_N.device))
    # Probabilities less 1: neither difference nor correlation sees the shift, and near 1 expm1 keeps the digits
    # that exp loses. From here on both tensors are overwritten.
    train_N, rollout_N = train_N.expm1_(), rollout_N.expm1_()
    metrics["prob_pearson"] = Metric.pearson(rollout_N, train_N)
    gap_N = rollout_N.sub_(train_N).abs_()
    k3_N, ratio_metrics = _ratios(log_ratio_N)
    del train_N, rollout_N, log_ratio_N
    metrics |= ratio_metrics

    # Each response is cut at the edges of the position buckets. All sums and maxima by response, length and
    # position combine these pieces.
    counts_RB = _lengths_by_position(lengths_R)
    bounds_P = bounds_of(counts_RB.flatten())
    gap_RB, k3_RB = (sum_per_sequence(x_N, bounds_P).view_as(counts_RB).cpu() for x_N in (gap_N, k3_N))
    sums_XRB = torch.stack([counts_RB.to(torch.float64), gap_RB, k3_RB])
    maxima_XRB = torch.stack(
        [max_per_sequence(x_N, bounds_P).view_as(counts_RB).cpu() for x_N in (gap_N, k3_N)]
    )
    sums_XB, maxima_XR = sums_XRB.sum(1), maxima_XRB.amax(2)
    count, gap_sum, k3_sum = sums_XB.sum(1).tolist()
    metrics |= {
        "abs_prob_mean": Metric.quotient(gap_sum, count),
        "abs_prob_max": Metric(reduction=Reduction.MAX, parts=(maxima_XR[0].max().item(),)),
        "k3": Metric.quotient(k3_sum, count),
    }
    metrics |= _response_gaps(gap_RB.sum(1) / lengths_R, maxima_XR[0])
    metrics |= _by_bucket("by_length", *_by_length(sums_XRB.sum(2), maxima_XR, lengths_R))
    metrics |= _by_bucket("by_position", sums_XB, maxima_XRB.amax(1))
    return {f"mismatch/{name}": metric for name, metric in metrics.items()}


def weight_metrics(
    raw_N: Tensor,
    weights_N: Tensor,
    bounds_S: Tensor,
    *,
    lower: float | None = None,
    upper: float | None = None,
) -> dict[str, Metric]:
    """Importance weights before the bound (``raw_N``) and after it (``weights_N``, before any normalisation).

    A sequence's weight is repeated on each of its tokens. If there are no weights, pass rho as ``raw_N`` and
    ones as ``weights_N``. A ``lower`` or ``upper`` of None is no bound, and has no metric.
    """
    bounds_R = _response_bounds(bounds_S)
    _require_lengths(bounds_R, raw_N=raw_N, weights_N=weights_N)
    if bounds_R.numel() == 1:
        return {}
    metrics: dict[str, Metric] = {}
    if upper is not None:
        metrics["mismatch/truncated_fraction"] = Metric.mean(raw_N > upper)
    if lower is not None:
        metrics["mismatch/below_lower_fraction"] = Metric.mean(raw_N < lower)
    metrics |= _weight_spreads("raw_", "ess", _float64_copy(raw_N), bounds_R)
    return metrics | _weight_spreads("", "ess_bounded", _float64_copy(weights_N), bounds_R)


def rejection_metrics(passed_S: Mapping[str, Tensor], kept_S: Tensor, valid_S: Tensor) -> dict[str, Metric]:
    """Shares that each rule rejected, and that all rules together rejected (``total``).

    The arguments are each sequence's numbers of response tokens: those that passed the rule of that name, those
    that are kept, and all.
    """
    passed_XS = torch.stack([*passed_S.values(), kept_S])
    touched_XS = passed_XS < valid_S
    rejected_XS = touched_XS & (passed_XS == 0)
    counts_X = torch.stack([passed_XS, rejected_XS, touched_XS]).sum(2).T.tolist()
    tokens, responses = valid_S.sum().item(), torch.count_nonzero(valid_S).item()
    metrics = {"mismatch/kept_fraction": Metric.quotient(counts_X[-1][0], tokens)}
    for name, (passed, rejected, touched) in zip([*passed_S, "total"], counts_X, strict=True):
        metrics |= {
            f"mismatch/rejected/{name}/tokens": Metric.quotient(tokens - passed, tokens),
            f"mismatch/rejected/{name}/sequences": Metric.quotient(rejected, responses),
            f"mismatch/rejected/{name}/touched_sequences": Metric.quotient(touched, responses),
        }
    return metrics


def rule_metrics(
    name: str, statistic: Tensor, *, lower: float, upper: float, is_log_ratio: bool
) -> dict[str, Metric]:
    """The statistic that a rejection rule compares with its bounds, one number per token, response or segment.

    is_log_ratio: statistic and bounds are logarithms of a ratio; the metrics describe the ratio itself.
    """
    prefix, shift = f"mismatch/rejected/{name}", 1.0 if is_log_ratio else 0.0
    metrics = {f"{prefix}/above_upper": Metric.mean(statistic > upper)}
    if lower > -math.inf:
        metrics[f"{prefix}/below_lower"] = Metric.mean(statistic < lower)
    if not statistic.numel():
        return metrics
    # Ratios less 1, so that the standard deviation keeps its digits.
    shifted = torch.expm1(_float64(statistic)) if is_log_ratio else _float64(statistic)
    low, high = (x.item() for x in torch.aminmax(shifted))
    return metrics | {
        f"{prefix}/statistic_mean": Metric.quotient(
            shift * shifted.numel() + shifted.sum().item(), shifted.numel()
        ),
        f"{prefix}/statistic_std": Metric.std(shifted),
        f"{prefix}/statistic_min": Metric(reduction=Reduction.MIN, parts=(shift + low,)),
        f"{prefix}/statistic_max": Metric(reduction=Reduction.MAX, parts=(shift + high,)),
    }


def veto_metrics(below_S: Tensor) -> dict[str, Metric]:
    """Counts of the veto, from each sequence's number of tokens whose unbounded ratio is below its threshold."""
    return {
        "mismatch/veto/tokens": Metric.sum(below_S.sum().item()),
        "mismatch/veto/sequences": Metric.sum(torch.count_nonzero(below_S).item()),
    }


def routing_metrics(by_layer: Sequence[int], tokens: int, is_sparse: Sequence[bool]) -> dict[str, Metric]:
    """Share of response tokens, and of their layers, whose replayed experts are not the router's own choice.

    by_layer: number of tokens that differ, for each layer with experts. tokens: number of tokens whose
    experts were replayed. is_sparse: for every layer of the model, whether it has experts.
    """
    layers = [number for number, sparse in enumerate(is_sparse) if sparse]
    return {
        "mismatch/experts_differ": Metric.quotient(sum(by_layer), tokens * len(layers)),
        **{
            f"mismatch/experts_differ/layer_{number}": Metric.quotient(count, tokens)
            for number, count in zip(layers, by_layer, strict=True)
        },
    }


def reward_metrics(
    rewards_S: Tensor, sequence_log_ratio_S: Tensor, counted_S: Tensor | None = None
) -> dict[str, Metric]:
    """The mean reward of the samples, and an estimate of the mean reward under the learner's own policy.

    The estimate is self-normalised: biased by O(1 / S), and within the range of the rewards.

    sequence_log_ratio_S: sum of d over a response, bounded to +-20 here. The bound replaces the usual shift
    by the greatest log-ratio, which would differ from one part of the batch to the next. counted_S: bool,
    False for sequences without a valid token (None: all count).
    """
    if counted_S is not None:
        rewards_S, sequence_log_ratio_S = rewards_S[counted_S], sequence_log_ratio_S[counted_S]
    weights_S = bounded(_float64(sequence_log_ratio_S)).exp()
    return {
        "reward/as_sampled": Metric.mean(rewards_S),
        "reward/importance_weighted": Metric.weighted_mean(rewards_S, weights_S),
        "reward/importance_ess": Metric.ess(weights_S),
    }


def negative_fraction(estimates: Iterable[float]) -> Metric:
    """Share of minibatches whose estimate of a KL divergence (policy/ppo_kl) is negative.

    k1 of KL(old || current) is unbiased for samples of old. These are samples of rollout. Negative values in
    most minibatches are therefore a sign of bias; a few are noise.
    """
    estimates = list(estimates)
    return Metric.quotient(sum(e < 0 for e in estimates), len(estimates))


def bounds_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _lengths_by_position(lengths_R: Tensor) -> Tensor:
    """Tokens of each response in each bucket of positions. [R] -> [R, B]; rows add up to the lengths."""
    edges = _edges((0, *LENGTH_EDGES, torch.iinfo(torch.int64).max), torch.int64)
    return torch.minimum(lengths_R[:, None], edges).diff(dim=1)


def _ratios(log_ratio_N: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    """k3 of each token, and the metrics of rho and its logarithm. Overwrites ``log_ratio_N``.

    The diagnostics' cost is their passes over N numbers, so there are few passes.
    """
    log_extremes, total = torch.stack(torch.aminmax(log_ratio_N)), log_ratio_N.sum().item()
    (low_log, high_log), (low, high) = log_extremes.tolist(), torch.expm1(bounded(log_extremes)).tolist()
    bounded_N = log_ratio_N.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    excess_N = torch.expm1(bounded_N)
    count, excess, squares = excess_N.numel(), excess_N.sum().item(), (excess_N @ excess_N).item()
    near_low, near_high = NEAR_ONE
    outside = torch.count_nonzero((excess_N < near_low - 1) | (excess_N > near_high - 1)).item()
    k3_N = excess_N.sub_(bounded_N)
    return k3_N, {
        "k1": Metric.quotient(0.0 - total, count),
        "logprob_gap_max": Metric(reduction=Reduction.MAX, parts=(max(0.0 - low_log, high_log),)),
        "ratio_mean": Metric.quotient(count + excess, count),
        "ratio_max": Metric(reduction=Reduction.MAX, parts=(1 + high,)),
        "ratio_min": Metric(reduction=Reduction.MIN, parts=(1 + low,)),
        "ratio_outside_fraction": Metric.quotient(outside, count),
        "chi2_token": Metric.quotient(squares + 2 * excess, count),
    }


def _perplexities(
    train_N: Tensor, rollout_N: Tensor, bounds_R: Tensor, lengths_R: Tensor
) -> dict[str, Metric]:
    train_R, rollout_R = (sum_per_sequence(x_N, bounds_R) for x_N in (train_N, rollout_N))
    sums_XR = torch.stack([train_R, rollout_R, train_R - rollout_R])
    log_ppl_XR = (0 - sums_XR) / lengths_R  # 0, not -0, of equal policies
    diff_R = log_ppl_XR[2]
    names = ("log_ppl_train", "log_ppl_rollout", "ppl_train", "ppl_rollout", "ppl_ratio")
    names += ("log_ppl_diff_mean", "log_ppl_diff_abs", "chi2_sequence")
    chi2_R = torch.expm1(2 * bounded(sums_XR[2]))
    return {
        **_means(
            names, torch.stack([*log_ppl_XR[:2], *bounded(log_ppl_XR).exp(), diff_R, diff_R.abs(), chi2_R])
        ),
        "log_ppl_diff_max": Metric.max(diff_R),
        "log_ppl_diff_min": Metric.min(diff_R),
    }


def _response_gaps(mean_R: Tensor, max_R: Tensor) -> Metrics:
    return {
        **_means(("response_abs_prob_max_mean", "response_abs_prob_mean_mean"), torch.stack([max_R, mean_R])),
        "response_abs_prob_mean_max": Metric.max(mean_R),
        "response_abs_prob_over": Metric.mean(max_R > HIGH_GAP),
        **_shares("response_abs_prob_max_share", max_R, RESPONSE_MAX_EDGES),
        **_shares("response_abs_prob_mean_share", mean_R, RESPONSE_MEAN_EDGES),
    }


def _means(names: Sequence[str], rows: Tensor) -> dict[str, Metric]:
    """The mean over responses of each row, under its name."""
    return {
        name: Metric.quotient(total, rows.shape[1])
        for name, total in zip(names, rows.sum(1).tolist(), strict=True)
    }


def _shares(name: str, values_R: Tensor, edges: tuple[float, ...]) -> Metrics:
    bins_R = torch.bucketize(values_R.cpu(), _edges(edges, torch.float64))
    counts = torch.bincount(bins_R, minlength=len(edges) + 1).tolist()
    return {
        f"{name}/{label}": Metric.quotient(count, values_R.numel())
        for label, count in zip(bucket_labels(edges), counts, strict=True)
    }


def _by_length(sums_XR: Tensor, maxima_XR: Tensor, lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and maxima by response to sums and maxima by bucket of its length. [X, R] -> [X, B], each"""
    bucket_R, buckets = torch.bucketize(lengths_R, _edges(LENGTH_EDGES, torch.int64)), len(LENGTH_EDGES) + 1
    sums_XB = sums_XR.new_zeros(len(sums_XR), buckets).index_add(1, bucket_R, sums_XR)
    lowest_XB = maxima_XR.new_full((len(maxima_XR), buckets), -torch.inf)
    return sums_XB, lowest_XB.scatter_reduce(1, bucket_R.expand_as(maxima_XR), maxima_XR, "amax")


def _by_bucket(name: str, sums_XB: Tensor, maxima_XB: Tensor) -> dict[str, Metric]:
    """Metrics of the buckets that have tokens, from the number of tokens, the sums of Δp and k3, and their
    maxima."""
    metrics = {}
    columns = zip(bucket_labels(LENGTH_EDGES), *sums_XB.tolist(), *maxima_XB.tolist(), strict=True)
    for label, count, gap_sum, k3_sum, gap_max, k3_max in columns:
        if count:
            metrics |= {
                f"{name}/{label}/abs_prob_mean": Metric.quotient(gap_sum, count),
                f"{name}/{label}/abs_prob_max": Metric(reduction=Reduction.MAX, parts=(gap_max,)),
                f"{name}/{label}/k3": Metric.quotient(k3_sum, count),
                f"{name}/{label}/k3_max": Metric(reduction=Reduction.MAX, parts=(k3_max,)),
            }
    return metrics


@cache
def _edges(edges: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """The edges on the CPU, read-only."""
    return torch.tensor(edges, dtype=dtype)


@cache
def bucket_labels(edges: tuple[float, ...]) -> list[str]:
    """The names of the buckets with these upper edges, and of the open one."""
    return [f"le_{edge:g}" for edge in edges] + [f"over_{edges[-1]:g}"]


def _weight_spreads(prefix: str, ess: str, weights_N: Tensor, bounds_R: Tensor) -> dict[str, Metric]:
    """Overwrites ``weights_N``."""
    sums_R = sum_per_sequence(weights_N, bounds_R)
    squares = (weights_N @ weights_N).item()
    metrics = _spread_of(f"mismatch/{prefix}weight", weights_N, sums_R.sum().item())
    total, count = metrics[f"mismatch/{prefix}weight_mean"].parts
    means_R = sums_R / bounds_R.diff().to(weights_N.device)
    return metrics | {
        f"mismatch/{ess}": Metric(reduction=Reduction.ESS, parts=(total, squares, count)),
        **_spread_of(f"mismatch/{prefix}sequence_weight", means_R, means_R.sum().item()),
    }


def _spread_of(name: str, weights: Tensor, total: float) -> dict[str, Metric]:
    """Mean, extremes and standard deviation of weights with a known sum. Overwrites ``weights``."""
    low, high = (x.item() for x in torch.aminmax(weights))
    return {
        f"{name}_mean": Metric.quotient(total, weights.numel()),
        f"{name}_min": Metric(reduction=Reduction.MIN, parts=(low,)),
        f"{name}_max": Metric(reduction=Reduction.MAX, parts=(high,)),
        # Summed separately: the total less the count would keep the rounding of a sum of numbers near 1.
        f"{name}_std": Metric.std(weights.sub_(1)),
    }


def _response_bounds(bounds_S: Tensor) -> Tensor:
    """The boundaries of the sequences that have a valid token, int64 [R + 1] on the CPU."""
    return bounds_S.to(device="cpu", dtype=torch.int64).unique_consecutive()


def _require_lengths(bounds_R: Tensor, **values_N: Tensor) -> None:
    """Raises ValueError unless there is one value per valid token: broadcasting would hide a single one."""
    for name, x_N in values_N.items():
        if x_N.shape != (int(bounds_R[-1]),):
            num_valid = int(bounds_R[-1])
            raise ValueError(
                f"{name} has shape {tuple(x_N.shape)}, the responses {num_valid} valid tokens; pass one value for each"
            )


def _float64_copy(values: Tensor) -> Tensor:
    """A copy that the caller may overwrite."""
    return values.detach().to(torch.float64, copy=True)


def _float64(values: Tensor) -> Tensor:
    return values.detach().to(torch.float64)
