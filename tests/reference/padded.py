"""The chain from log-probs to loss on padded tensors, as padded systems write it: one row per response,
whole-tensor operations, no loops over tokens. An oracle for whole batches, and the opponent of
``benchmarks/loss_math.py``; vectorised to be fast, not to be plain.

Legend: B responses, L places up to the longest, of which the first ``lengths_B[b]`` hold response tokens; K
edges of position buckets. Padding is zero (``with_zeros`` makes it so), so log-ratios, k3 and the like are
zero there and sums need no mask; a response is a row's beginning, without gaps, so its positions are columns.
float32 where the trainer's mathematics has float32, float64 where it has float64. One configuration:
decoupled, token weights truncated from above, a geometric rejection rule and a veto, the mean over kept
tokens, PPO's clip with dual clip.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BOUND = 20.0
LENGTH_EDGES = (64, 256, 1024, 4096)
RESPONSE_MAX_EDGES = (0.001, 0.01, 0.1, 0.25, 0.5)
RESPONSE_MEAN_EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    lengths_B: Tensor
    """int64, at least 1."""
    mask_BL: Tensor
    rollout_logprobs_BL: Tensor
    old_logprobs_BL: Tensor
    advantages_BL: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCorrection:
    weights_BL: Tensor
    keep_BL: Tensor
    metrics: dict[str, float]


def with_zeros(batch: PaddedBatch, *names: str) -> PaddedBatch:
    """What these fields hold off the mask replaced by zero, even NaN."""
    return replace(batch, **{name: torch.where(batch.mask_BL, getattr(batch, name), 0.0) for name in names})


def correct(
    batch: PaddedBatch,
    *,
    weight_upper: float,
    geometric_lower: float,
    geometric_upper: float,
    veto: float,
    high_gap: float = 0.5,
) -> PaddedCorrection:
    mask_BL, lengths_B = batch.mask_BL, batch.lengths_B
    log_ratio_BL = batch.old_logprobs_BL - batch.rollout_logprobs_BL
    if any(is_broken(x_BL, 0.01) for x_BL in (batch.rollout_logprobs_BL, batch.old_logprobs_BL)):
        raise ValueError("a log-prob is not finite, or above 0")
    metrics = mismatch_metrics(batch, high_gap)
    ratio_BL = log_ratio_BL.clamp(-BOUND, BOUND).exp()
    weights_BL = torch.where(mask_BL, ratio_BL.clamp(max=weight_upper), 0.0)
    metrics |= weight_metrics(ratio_BL, weights_BL, mask_BL, lengths_B, weight_upper)
    geometric_B = (log_ratio_BL.sum(1, dtype=torch.float64) / lengths_B).clamp(-BOUND, BOUND)
    passed_B = (geometric_B >= math.log(geometric_lower)) & (geometric_B <= math.log(geometric_upper))
    low_B = (log_ratio_BL < math.log(veto)).sum(1)
    outside = {
        "above_upper": geometric_B > math.log(geometric_upper),
        "below_lower": geometric_B < math.log(geometric_lower),
    }
    metrics |= statistic_metrics("ratio_geometric", geometric_B.expm1(), outside)
    metrics |= rejection_metrics("ratio_geometric", passed_B, lengths_B) | rejection_metrics(
        "veto", low_B == 0, lengths_B
    )
    metrics |= {
        "mismatch/veto/tokens": low_B.sum().item(),
        "mismatch/veto/sequences": (low_B > 0).sum().item(),
    }
    passed_B = passed_B & (low_B == 0)
    metrics |= rejection_metrics("total", passed_B, lengths_B)
    metrics["mismatch/kept_fraction"] = 1 - metrics["mismatch/rejected/total/tokens"]
    return PaddedCorrection(weights_BL=weights_BL, keep_BL=mask_BL & passed_B[:, None], metrics=metrics)


def mismatch_metrics(batch: PaddedBatch, high_gap: float) -> dict[str, float]:
    lengths_B, count = batch.lengths_B, batch.lengths_B.sum().item()
    train_BL, rollout_BL = (
        x_BL.to(torch.float64, copy=True) for x_BL in (batch.old_logprobs_BL, batch.rollout_logprobs_BL)
    )
    log_ratio_BL = train_BL - rollout_BL
    train_B, rollout_B = train_BL.sum(1), rollout_BL.sum(1)
    log_ratio_B = train_B - rollout_B
    log_ppl_train_B, log_ppl_rollout_B, diff_B = (
        -x_B / lengths_B for x_B in (train_B, rollout_B, log_ratio_B)
    )
    metrics = {
        "log_ppl_train": log_ppl_train_B.mean().item(),
        "log_ppl_rollout": log_ppl_rollout_B.mean().item(),
        "ppl_train": log_ppl_train_B.clamp(-BOUND, BOUND).exp().mean().item(),
        "ppl_rollout": log_ppl_rollout_B.clamp(-BOUND, BOUND).exp().mean().item(),
        "ppl_ratio": diff_B.clamp(-BOUND, BOUND).exp().mean().item(),
        "log_ppl_diff_mean": diff_B.mean().item(),
        "log_ppl_diff_abs": diff_B.abs().mean().item(),
        "log_ppl_diff_max": diff_B.max().item(),
        "log_ppl_diff_min": diff_B.min().item(),
        "chi2_sequence": torch.expm1(2 * log_ratio_B.clamp(-BOUND, BOUND)).mean().item(),
    }
    train_BL, rollout_BL = train_BL.expm1_(), rollout_BL.expm1_()  # probabilities less 1
    metrics["prob_pearson"] = pearson(rollout_BL, train_BL, count)
    gap_BL = rollout_BL.sub_(train_BL).abs_()
    del train_BL, rollout_BL
    metrics |= {"abs_prob_mean": gap_BL.sum().item() / count, "abs_prob_max": gap_BL.max().item()}
    low_log, high_log = extremes(log_ratio_BL, batch.mask_BL)
    bounded_BL = log_ratio_BL.clamp_(-BOUND, BOUND)
    excess_BL = torch.expm1(bounded_BL)
    excess, squares = excess_BL.sum().item(), dot(excess_BL, excess_BL)
    metrics |= {
        "k1": -log_ratio_B.sum().item() / count,
        "logprob_gap_max": max(-low_log, high_log),
        "ratio_mean": 1 + excess / count,
        "ratio_max": math.exp(min(max(high_log, -BOUND), BOUND)),
        "ratio_min": math.exp(min(max(low_log, -BOUND), BOUND)),
        "ratio_outside_fraction": torch.count_nonzero((excess_BL < 0.9 - 1) | (excess_BL > 1.1 - 1)).item()
        / count,
        "chi2_token": (squares + 2 * excess) / count,
    }
    k3_BL = excess_BL.sub_(bounded_BL)
    metrics["k3"] = k3_BL.sum().item() / count
    del log_ratio_BL, bounded_BL, excess_BL
    metrics |= by_response_and_bucket(gap_BL, k3_BL, lengths_B, high_gap)
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def by_response_and_bucket(
    gap_BL: Tensor, k3_BL: Tensor, lengths_B: Tensor, high_gap: float
) -> dict[str, float]:
    edges = [edge for edge in (0, *LENGTH_EDGES) if edge < gap_BL.shape[1]] + [gap_BL.shape[1]]
    # A response's position is its column.
    columns = [slice(low, high) for low, high in itertools.pairwise(edges)]
    gap_sum_BK, k3_sum_BK = (torch.stack([x_BL[:, c].sum(1) for c in columns], 1) for x_BL in (gap_BL, k3_BL))
    gap_max_BK, k3_max_BK = (
        torch.stack([x_BL[:, c].amax(1) for c in columns], 1) for x_BL in (gap_BL, k3_BL)
    )
    counts_BK = torch.stack([(lengths_B - c.start).clamp(0, c.stop - c.start) for c in columns], 1)
    mean_B, max_B = gap_sum_BK.sum(1) / lengths_B, gap_max_BK.amax(1)
    metrics = {
        "response_abs_prob_max_mean": max_B.mean().item(),
        "response_abs_prob_mean_mean": mean_B.mean().item(),
        "response_abs_prob_mean_max": mean_B.max().item(),
        "response_abs_prob_over": (max_B > high_gap).double().mean().item(),
        **shares("response_abs_prob_max_share", max_B, RESPONSE_MAX_EDGES),
        **shares("response_abs_prob_mean_share", mean_B, RESPONSE_MEAN_EDGES),
    }
    bucket_B = torch.bucketize(lengths_B, torch.tensor(LENGTH_EDGES))
    for k, label in enumerate(labels(LENGTH_EDGES)):
        rows_B = bucket_B == k
        if rows_B.any():
            pieces = (
                counts_BK[rows_B],
                gap_sum_BK[rows_B],
                gap_max_BK[rows_B],
                k3_sum_BK[rows_B],
                k3_max_BK[rows_B],
            )
            metrics |= bucket(f"by_length/{label}", *pieces)
        if k < len(columns) and counts_BK[:, k].any():
            pieces = (counts_BK[:, k], gap_sum_BK[:, k], gap_max_BK[:, k], k3_sum_BK[:, k], k3_max_BK[:, k])
            metrics |= bucket(f"by_position/{label}", *pieces)
    return metrics


def bucket(
    name: str, counts: Tensor, gap_sum: Tensor, gap_max: Tensor, k3_sum: Tensor, k3_max: Tensor
) -> dict[str, float]:
    count = counts.sum().item()
    return {
        f"{name}/abs_prob_mean": gap_sum.sum().item() / count,
        f"{name}/abs_prob_max": gap_max.max().item(),
        f"{name}/k3": k3_sum.sum().item() / count,
        f"{name}/k3_max": k3_max.max().item(),
    }


def weight_metrics(
    raw_BL: Tensor, weights_BL: Tensor, mask_BL: Tensor, lengths_B: Tensor, upper: float
) -> dict[str, float]:
    count, metrics = lengths_B.sum().item(), {}
    for name, w_BL in (("raw_", raw_BL), ("", weights_BL)):
        # Less 1, so that the standard deviation keeps its digits; the mean and the ESS follow from the same
        # two sums.
        less_one_BL = torch.where(mask_BL, w_BL.double() - 1, 0.0)
        sums_B, squares = less_one_BL.sum(1), dot(less_one_BL, less_one_BL)
        mean = sums_B.sum().item() / count
        low, high = extremes(less_one_BL, mask_BL)
        means_B = sums_B / lengths_B
        metrics |= {
            f"{name}weight_mean": 1 + mean,
            f"{name}weight_std": math.sqrt(max(squares / count - mean * mean, 0.0)),
            f"{name}weight_min": 1 + low,
            f"{name}weight_max": 1 + high,
            f"{name}sequence_weight_mean": 1 + means_B.mean().item(),
            f"{name}sequence_weight_std": means_B.std(correction=0).item(),
            f"{name}sequence_weight_min": 1 + means_B.min().item(),
            f"{name}sequence_weight_max": 1 + means_B.max().item(),
            "ess" if name else "ess_bounded": (1 + mean) ** 2 / (1 + 2 * mean + squares / count),
        }
    metrics["truncated_fraction"] = torch.count_nonzero((raw_BL > upper) & mask_BL).item() / count
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def rejection_metrics(name: str, passed_B: Tensor, lengths_B: Tensor) -> dict[str, float]:
    """Of rules that take or reject whole responses, as all of this configuration do."""
    rejected = (~passed_B).double().mean().item()
    return {
        f"mismatch/rejected/{name}/tokens": lengths_B[~passed_B].sum().item() / lengths_B.sum().item(),
        f"mismatch/rejected/{name}/sequences": rejected,
        f"mismatch/rejected/{name}/touched_sequences": rejected,
    }


def statistic_metrics(name: str, ratio_less_one_B: Tensor, outside: dict[str, Tensor]) -> dict[str, float]:
    """Of a rule that compares a ratio of each response."""
    metrics = {side: rows_B.double().mean().item() for side, rows_B in outside.items()} | {
        "statistic_mean": 1 + ratio_less_one_B.mean().item(),
        "statistic_std": ratio_less_one_B.std(correction=0).item(),
        "statistic_min": 1 + ratio_less_one_B.min().item(),
        "statistic_max": 1 + ratio_less_one_B.max().item(),
    }
    return {f"mismatch/rejected/{name}/{key}": value for key, value in metrics.items()}


def policy_loss(
    batch: PaddedBatch,
    correction: PaddedCorrection,
    current_logprobs_BL: Tensor,
    entropy_BL: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, float]]:
    """The mean over kept tokens of PPO's clipped loss times the weights, with gradient to
    ``current_logprobs_BL``, and its metrics."""
    keep_BL, advantages_BL = correction.keep_BL, batch.advantages_BL
    tokens, kept = batch.lengths_B.sum().item(), torch.count_nonzero(keep_BL).item()
    log_ratio_BL = current_logprobs_BL - batch.old_logprobs_BL
    ratio_BL = log_ratio_BL.clamp(-BOUND, BOUND).exp()
    fixed_BL = ratio_BL.detach()
    clipped_BL = ((advantages_BL > 0) & (fixed_BL > 1 + clip_high)) | (
        (advantages_BL < 0) & (fixed_BL < 1 - clip_low)
    )
    dual_BL = (advantages_BL < 0) & (fixed_BL > dual_clip)
    held_BL = torch.where(dual_BL, dual_clip, fixed_BL.clamp(1 - clip_low, 1 + clip_high))
    loss_BL = -advantages_BL * torch.where(clipped_BL | dual_BL, held_BL, ratio_BL)
    loss = (loss_BL * torch.where(keep_BL, correction.weights_BL, 0.0)).sum() / max(kept, 1)
    del held_BL, loss_BL
    kept_ratio_BL = torch.where(keep_BL, fixed_BL, 0.0)
    with torch.no_grad():
        metrics = {
            "policy/ratio_mean": kept_ratio_BL.sum(dtype=torch.float64).item() / kept,
            "policy/ratio_min": torch.where(keep_BL, fixed_BL, math.inf).min().item(),
            "policy/ratio_max": kept_ratio_BL.max().item(),
            "policy/clip_fraction": torch.count_nonzero(clipped_BL & keep_BL).item() / kept,
            "policy/dual_clip_fraction": torch.count_nonzero(dual_BL & keep_BL).item() / kept,
            "policy/entropy": entropy_BL.sum(dtype=torch.float64).item() / tokens,
            "policy/ppo_kl": -log_ratio_BL.sum(dtype=torch.float64).item() / tokens,
            "loss/policy": loss.item(),
            "loss/kl": 0.0,
            "loss/entropy": 0.0,
            "loss/total": loss.item(),
        }
    if is_broken(advantages_BL, math.inf) or is_broken(batch.old_logprobs_BL, 0.01):
        raise ValueError("an advantage or a log-prob is not finite, or a log-prob is above 0")
    if is_broken(current_logprobs_BL, 0.01):
        loss = loss * math.nan
    return loss, metrics


def pearson(x_BL: Tensor, y_BL: Tensor, count: int) -> float:
    """Zero off the mask, which no sum sees."""
    x, y, xx, yy, xy = x_BL.sum().item(), y_BL.sum().item(), dot(x_BL, x_BL), dot(y_BL, y_BL), dot(x_BL, y_BL)
    return (count * xy - x * y) / math.sqrt(count * xx - x * x) / math.sqrt(count * yy - y * y)


def is_broken(x_BL: Tensor, at_most: float) -> bool:
    """As the packed side checks its inputs; zeros off the mask do no harm."""
    low, high = torch.stack(torch.aminmax(x_BL.detach())).tolist()
    return not (math.isfinite(low) and math.isfinite(high) and high <= at_most)


def extremes(x_BL: Tensor, mask_BL: Tensor) -> tuple[float, float]:
    """Least and greatest on the mask. The padding's zero counts only where all the rest lies on one side of
    it."""
    low, high = (x.item() for x in torch.aminmax(x_BL))
    if low == 0 or high == 0:
        low, high = (x.item() for x in torch.aminmax(x_BL[mask_BL]))
    return low, high


def dot(x_BL: Tensor, y_BL: Tensor) -> float:
    return torch.dot(x_BL.flatten(), y_BL.flatten()).item()


def shares(name: str, values_B: Tensor, edges: tuple[float, ...]) -> dict[str, float]:
    counts = torch.bincount(
        torch.bucketize(values_B, torch.tensor(edges, dtype=torch.float64)), minlength=len(edges) + 1
    ).tolist()
    return {
        f"{name}/{label}": count / len(values_B) for label, count in zip(labels(edges), counts, strict=True)
    }


def labels(edges: tuple[float, ...]) -> list[str]:
    return [f"le_{edge:g}" for edge in edges] + [f"over_{edges[-1]:g}"]
