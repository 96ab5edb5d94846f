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
import re
from collections.abc import Sequence
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
from trainer.mismatch import (
    ValidTokens,
    kept_metrics,
    mismatch_metrics,
    rejection_metrics,
    valid_tokens,
    veto_metrics,
    weight_metrics,
)
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
    left_to_loss = config.mode == "bypass" or batch.old_logprobs_T is None
    log_ratio_T = None if left_to_loss else _log_ratio(batch, batch.old_logprobs_T)
    # A sum is finite only where all of its terms are, and a difference only where both sides are: one pass instead of two searches.
    if log_ratio_T is None or not log_ratio_T.sum().isfinite():
        _require_finite(batch, "rollout_logprobs_T", "the server returned it: check the served weights and dtype")
        _require_finite(batch, "old_logprobs_T", "the learner's forward pass produced it: check its weights and dtype")
    _require_finite(batch, "ref_logprobs_T", "the reference's forward pass produced it: check its weights and dtype")
    if log_ratio_T is None:
        mask_T = batch.response_mask_T
        return Correction(weights_T=mask_T.to(batch.rollout_logprobs_T.dtype), keep_T=mask_T, metrics={})
    return _corrected(batch, batch.old_logprobs_T, log_ratio_T, config, total)


def correct_current(batch: PackedBatch, current_logprobs_T: Tensor, config: CorrectionConfig) -> Correction:
    """The same of a micro-batch against the policy that is being trained, inside the loss.

    Raises ValueError for weights that are normalised: their mean over the step is known to ``correct`` alone.
    """
    if isinstance(config.weight, ImportanceWeight) and config.weight.normalise:
        raise ValueError("normalised weights need old_logprobs_T before the update; score the batch with the learner first")
    return _corrected(batch, current_logprobs_T, _log_ratio(batch, current_logprobs_T), config, alone)


def _corrected(
    batch: PackedBatch, train_logprobs_T: Tensor, log_ratio_T: Tensor, config: CorrectionConfig, total: Total
) -> Correction:
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    valid = valid_tokens(mask_T, cu_seqlens)
    metrics = mismatch_metrics(train_logprobs_T, batch.rollout_logprobs_T, mask_T, cu_seqlens, valid=valid)
    weights_T, weighed = _weigh(log_ratio_T, mask_T, cu_seqlens, config.weight, total, valid)
    metrics |= weighed
    valid_S = valid.lengths_S
    # What takes or leaves whole sequences is decided and counted by sequence, and brought to the tokens once.
    keep_T, keep_S = mask_T, torch.ones_like(valid_S, dtype=torch.bool)
    for name, rule in zip(rule_names(config.reject), config.reject, strict=True):
        passed, boundaries = _passed(log_ratio_T, mask_T, cu_seqlens, rule)
        if boundaries is cu_seqlens:
            metrics |= rejection_metrics(name, valid_S * passed, valid_S)
            keep_S = keep_S & passed
        else:
            passed_T = mask_T & (passed if boundaries is None else spread(passed, boundaries))
            metrics |= rejection_metrics(name, count_per_sequence(passed_T, cu_seqlens), valid_S)
            keep_T = keep_T & passed_T
    if config.veto is not None:
        # Zero off the mask, the log-ratio is below no veto there.
        below_S = count_per_sequence(log_ratio_T < math.log(config.veto), cu_seqlens)
        metrics |= rejection_metrics("veto", valid_S * (below_S == 0), valid_S) | veto_metrics(below_S)
        keep_S = keep_S & (below_S == 0)
    kept_S = (valid_S if keep_T is mask_T else count_per_sequence(keep_T, cu_seqlens)) * keep_S
    metrics |= kept_metrics(kept_S, valid_S)
    if not keep_S.all():
        keep_T = keep_T & spread(keep_S, cu_seqlens)
    return Correction(weights_T=weights_T, keep_T=keep_T, metrics=metrics)


def _log_ratio(batch: PackedBatch, train_logprobs_T: Tensor) -> Tensor:
    """log rho, detached; 0 off the mask. [T]"""
    return torch.where(batch.response_mask_T, train_logprobs_T.detach() - batch.rollout_logprobs_T, 0.0)


def _weigh(
    log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, config: NoWeight | ImportanceWeight, total: Total, valid: ValidTokens
) -> tuple[Tensor, dict[str, Metric]]:
    match config:
        case NoWeight():
            ratio_T, ones_T = level_ratio(log_ratio_T, mask_T, cu_seqlens, "token"), mask_T.to(log_ratio_T.dtype)
            return ones_T, weight_metrics(ratio_T, ones_T, mask_T, cu_seqlens, valid=valid)
        case ImportanceWeight(level=level, bound=bound, lower=lower, upper=upper):
            ratio_T = level_ratio(log_ratio_T, mask_T, cu_seqlens, level)
            weights_T = bounded_weights(ratio_T, bound, lower=lower, upper=upper) * mask_T
            metrics = weight_metrics(ratio_T, weights_T, mask_T, cu_seqlens, lower=lower, upper=upper, valid=valid)
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
    return spread(*_group_log_ratio(log_ratio_T, mask_T, cu_seqlens, level))


def _group_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """The log-ratio of each sequence or segment, float64, and the boundaries of these."""
    boundaries = run_boundaries(mask_T, cu_seqlens) if level == "segment" else cu_seqlens
    # float64: a sum over thousands of tokens, whose exp is compared with bounds like 1.001.
    sums_S = sum_per_sequence(log_ratio_T.to(torch.float64), boundaries)
    if level == "geometric":
        sums_S = sums_S / count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return sums_S, boundaries


def level_ratio(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """exp of the bounded log-ratio at ``level``; 1 off the mask. [T] -> [T]"""
    if level == "token":
        return bounded(log_ratio_T).exp()
    log_ratio_S, boundaries = _group_log_ratio(log_ratio_T, mask_T, cu_seqlens, level)
    return torch.where(mask_T, spread(bounded(log_ratio_S).exp().to(log_ratio_T.dtype), boundaries), 1.0)


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
    passed, boundaries = _passed(log_ratio_T, mask_T, cu_seqlens, rule)
    return passed if boundaries is None else spread(passed, boundaries)


def _passed(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, rule: RejectionRule) -> tuple[Tensor, Tensor | None]:
    """(what passes, bool, boundaries of what it is of): None for tokens, ``cu_seqlens`` itself for sequences, else of segments."""
    match rule:
        case RatioRule(level=level, lower=lower, upper=upper):
            at_level, boundaries = log_ratio_T, None
            if level != "token":
                at_level, boundaries = _group_log_ratio(log_ratio_T, mask_T, cu_seqlens, level)
            # Compared as logs: exp would round away what bounds like 1.0001 tell apart.
            at_level = bounded(at_level)
            return (at_level >= (math.log(lower) if lower else -math.inf)) & (at_level <= math.log(upper)), boundaries
        case DivergenceRule(rule=kind, reduce=reduce, upper=upper):
            d_T = bounded(log_ratio_T).square() / 2 if kind == "k2" else excess(log_ratio_T)
            return _reduced(d_T, mask_T, cu_seqlens, reduce) <= upper, None if reduce == "token" else cu_seqlens
        case _:
            assert_never(rule)


def _reduced(divergence_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, reduce: str) -> Tensor:
    """Token by token [T], or each sequence's sum, mean or maximum [S]. Zero off the mask, as k2 and k3 of 0 are."""
    if reduce == "token":
        return divergence_T
    if reduce == "max":
        return max_per_sequence(divergence_T, cu_seqlens)
    sums_S = sum_per_sequence(divergence_T.to(torch.float64), cu_seqlens)
    if reduce == "mean":
        sums_S = sums_S / count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return sums_S


def rule_names(rules: Sequence[RejectionRule]) -> list[str]:
    """As metrics call them: ratio_geometric, k3_mean, ...; of several of one name the later ones are numbered, ratio_token_2."""
    names: list[str] = []
    for rule in rules:
        name = f"ratio_{rule.level}" if isinstance(rule, RatioRule) else f"{rule.rule}_{rule.reduce}"
        earlier = sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in names)
        names.append(f"{name}_{earlier + 1}" if earlier else name)
    return names


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
