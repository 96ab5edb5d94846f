"""Correction of the gap between rollout and learner: importance weights and a keep mask, between recompute and loss.

Legend: S sequences, T packed tokens. rho = pi_train / pi_rollout of a token, where train is old (decoupled mode, before the update) or
current (inside the loss: in bypass mode, and where current is old); log-probs are nats.
Order: log-ratio -> aggregated to its level -> bounded to +-20 -> exp -> weight bound -> normalised. Rejection and veto act on the mask
only. Weights carry no gradient, and advantages never change because of them.

    correct           a whole step's batch, before the update     trainer/loop.py
    correct_current   a micro-batch, in the update's forward      trainer/policy_loss.py
    the rest          pure functions of log-ratios and masks
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from configs.schema.correction import (
    CorrectionConfig,
    DivergenceRule,
    ImportanceWeight,
    Level,
    NoWeight,
    RatioRule,
    RejectionRule,
)
from parallel.packing import PackedBatch
from trainer.kl import bounded, excess
from trainer.metrics import Metric
from trainer.mismatch import kept_metrics, mismatch_metrics, rejection_metrics, veto_metrics, weight_metrics
from trainer.ranks import Total, alone
from trainer.segments import count_per_sequence, max_per_sequence, run_boundaries, spread, sum_per_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the loss multiplies its tokens with, and what was found on the way."""

    weights_T: Tensor
    """float, detached; zero off the response mask."""
    keep_T: Tensor
    """bool; the response mask less what was rejected."""
    metrics: dict[str, Metric]


def correct(batch: PackedBatch, config: CorrectionConfig, total: Total = alone) -> Correction:
    """Weights and keep mask of a step's sequences (this rank's share), before its first update.

    In bypass mode, and without ``old_logprobs_T``, it is left to the loss: weights of one, nothing rejected, no metrics.
    Raises ValueError for a response token whose log-prob is not finite (naming the sequence).
    """
    _require_finite(batch, "rollout_logprobs_T", "the server returned it: check the served weights and dtype")
    _require_finite(batch, "old_logprobs_T", "the learner's forward pass produced it: check its weights and dtype")
    _require_finite(batch, "ref_logprobs_T", "the reference's forward pass produced it: check its weights and dtype")
    if config.mode == "bypass" or batch.old_logprobs_T is None:
        mask_T = batch.response_mask_T
        return Correction(weights_T=mask_T.to(batch.rollout_logprobs_T.dtype), keep_T=mask_T, metrics={})
    return _corrected(batch, batch.old_logprobs_T, config, total)


def correct_current(batch: PackedBatch, current_logprobs_T: Tensor, config: CorrectionConfig) -> Correction:
    """The same of a micro-batch against the policy that is being trained, inside the loss. ``normalise`` needs ``correct``."""
    return _corrected(batch, current_logprobs_T, config, alone)


def _corrected(batch: PackedBatch, train_logprobs_T: Tensor, config: CorrectionConfig, total: Total) -> Correction:
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    train_T = torch.where(mask_T, train_logprobs_T.detach(), 0.0)
    rollout_T = torch.where(mask_T, batch.rollout_logprobs_T, 0.0)
    log_ratio_T = train_T - rollout_T
    metrics = mismatch_metrics(train_T, rollout_T, mask_T, cu_seqlens)
    weights_T, weighed = _weigh(log_ratio_T, mask_T, cu_seqlens, config.weight, total)
    metrics |= weighed
    keep_T = mask_T
    for rule in config.reject:
        passed_T = passes(log_ratio_T, mask_T, cu_seqlens, rule)
        metrics |= rejection_metrics(rule_name(rule), passed_T, mask_T, cu_seqlens)
        keep_T = keep_T & passed_T
    if config.veto is not None:
        below_T = mask_T & (log_ratio_T < math.log(config.veto))
        passed_T = spread(count_per_sequence(below_T, cu_seqlens) == 0, cu_seqlens)
        metrics |= rejection_metrics("veto", passed_T, mask_T, cu_seqlens) | veto_metrics(below_T, mask_T, cu_seqlens)
        keep_T = keep_T & passed_T
    metrics |= kept_metrics(keep_T, mask_T, cu_seqlens)
    return Correction(weights_T=weights_T, keep_T=keep_T, metrics=metrics)


def _weigh(
    log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, config: NoWeight | ImportanceWeight, total: Total
) -> tuple[Tensor, dict[str, Metric]]:
    match config:
        case NoWeight():
            ratio_T, ones_T = level_ratio(log_ratio_T, mask_T, cu_seqlens, "token"), mask_T.to(log_ratio_T.dtype)
            return ones_T, weight_metrics(ratio_T, ones_T, mask_T, cu_seqlens)
        case ImportanceWeight(level=level, bound=bound, lower=lower, upper=upper):
            ratio_T = level_ratio(log_ratio_T, mask_T, cu_seqlens, level)
            weights_T = bounded_weights(ratio_T, bound, lower=lower, upper=upper) * mask_T
            metrics = weight_metrics(ratio_T, weights_T, mask_T, cu_seqlens, lower=lower, upper=upper)
            if config.normalise:
                sums = total(weight_sums(weights_T, mask_T, cu_seqlens, level)).tolist()
                mean = sums[0] / sums[1] if sums[0] > 0 else 1.0
                metrics["mismatch/weight_normaliser"] = Metric.quotient(mean, 1)
                weights_T = weights_T / mean
            return weights_T, metrics
        case _:
            assert_never(config)


def level_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """The log-ratio at a level, given to every token it is of: [T] -> [T], unbounded; ``log_ratio_T`` must be 0 off the mask.

    token: log rho_t. sequence: sum of log rho over the sequence's valid tokens. geometric: that sum over their number. segment: the sum
    over the token's own run of consecutive valid tokens.
    """
    if level == "token":
        return log_ratio_T
    boundaries = run_boundaries(mask_T, cu_seqlens) if level == "segment" else cu_seqlens
    # float64: a sum over thousands of tokens, whose exp is compared with bounds like 1.001.
    sums_S = sum_per_sequence(log_ratio_T.to(torch.float64), boundaries)
    if level == "geometric":
        sums_S = sums_S / count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return spread(sums_S, boundaries)


def level_ratio(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """exp of the bounded log-ratio at ``level``; 1 off the mask. [T] -> [T]"""
    ratio_T = bounded(level_log_ratio(log_ratio_T, mask_T, cu_seqlens, level)).exp().to(log_ratio_T.dtype)
    return ratio_T if level == "token" else torch.where(mask_T, ratio_T, 1.0)


def bounded_weights(ratio_T: Tensor, bound: str, *, lower: float | None, upper: float | None) -> Tensor:
    """truncate: min(rho, upper). clip: into [lower, upper]. mask: rho within [lower, upper], else 0. none: rho. [T] -> [T]

    Truncation is one-sided: what the learner finds less likely than the rollout did keeps its ratio. mask is IcePop's.
    """
    match bound:
        case "truncate":
            return ratio_T.clamp(max=upper)
        case "clip":
            return ratio_T.clamp(lower, upper)
        case "mask":
            return torch.where((ratio_T >= lower) & (ratio_T <= upper), ratio_T, 0.0)
        case "none":
            return ratio_T
    raise ValueError(f"unknown weight bound {bound!r}; choose truncate, clip, mask or none")


def weight_sums(weights_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """(sum of weights, their number), float64 [2], over tokens, sequences or segments with valid tokens, as the level has it."""
    weights_T = weights_T.to(torch.float64)
    if level == "token":
        return torch.stack([weights_T.sum(), mask_T.sum().to(torch.float64)])
    boundaries = run_boundaries(mask_T, cu_seqlens) if level == "segment" else cu_seqlens
    counts_S = count_per_sequence(mask_T, boundaries)
    means_S = sum_per_sequence(weights_T, boundaries) / counts_S.clamp(min=1)
    return torch.stack([means_S.sum(), (counts_S > 0).sum().to(torch.float64)])


def passes(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, rule: RejectionRule) -> Tensor:
    """Which tokens a rule keeps, bool [T]; what it says off the mask means nothing. ``log_ratio_T`` must be 0 off the mask."""
    match rule:
        case RatioRule(level=level, lower=lower, upper=upper):
            # Compared as logs: exp would round away what bounds like 1.0001 tell apart.
            at_level_T = bounded(level_log_ratio(log_ratio_T, mask_T, cu_seqlens, level))
            return (at_level_T >= (math.log(lower) if lower else -math.inf)) & (at_level_T <= math.log(upper))
        case DivergenceRule(rule=kind, reduce=reduce, upper=upper):
            d_T = bounded(log_ratio_T).square() / 2 if kind == "k2" else excess(log_ratio_T)
            return _reduced(d_T, mask_T, cu_seqlens, reduce) <= upper
        case _:
            assert_never(rule)


def _reduced(divergence_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, reduce: str) -> Tensor:
    """Token by token, or each sequence's sum, mean or maximum, given to its tokens. Zero off the mask, as k2 and k3 of 0 are."""
    if reduce == "token":
        return divergence_T
    if reduce == "max":
        return spread(max_per_sequence(divergence_T, cu_seqlens), cu_seqlens)
    sums_S = sum_per_sequence(divergence_T.to(torch.float64), cu_seqlens)
    if reduce == "mean":
        sums_S = sums_S / count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return spread(sums_S, cu_seqlens)


def rule_name(rule: RejectionRule) -> str:
    """As metrics call it: ratio_geometric, k3_mean, ..."""
    match rule:
        case RatioRule():
            return f"ratio_{rule.level}"
        case DivergenceRule():
            return f"{rule.rule}_{rule.reduce}"
        case _:
            assert_never(rule)


def _require_finite(batch: PackedBatch, name: str, fix: str) -> None:
    values_T = getattr(batch, name)
    if values_T is None:
        return
    broken_T = batch.response_mask_T & ~torch.isfinite(values_T)
    if not broken_T.any():
        return
    broken = broken_T.nonzero().flatten().cpu()
    rows = torch.searchsorted(batch.cu_seqlens.to(broken.dtype), broken, right=True) - 1
    ids = batch.sequence_ids_S[rows.unique()].tolist()
    raise ValueError(
        f"{name} is {values_T[broken[0]].item()} on a response token of sequence {ids[0]} "
        f"({broken.numel()} such tokens, sequences {ids[:10]}); {fix}"
    )
