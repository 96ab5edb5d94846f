"""Correction of the gap between rollout and learner: importance weights and a keep mask, between recompute
and loss.

rho = pi_train / pi_rollout of a token. train is old in decoupled mode before the update. Inside the loss it is
current (in bypass mode, and if current is old). Order: log-ratio -> aggregated to its level -> bounded to +-20
-> exp -> weight bound -> normalised. Rejection and veto act on the mask only. Weights carry no gradient and
never change advantages.

    correct           a whole step's batch, before the update     trainer/loop.py
    correct_current   a micro-batch, in the update's forward      trainer/algorithm/policy_loss.py
    the rest          pure functions of log-ratios and masks
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from configs.schema.correction import (
    CorrectionConfig,
    DifferenceRule,
    DivergenceRule,
    FunctionWeight,
    ImportanceWeight,
    Level,
    NoWeight,
    RatioRule,
    RejectionRule,
    WeightConfig,
)
from parallel.packing import PackedBatch, require_per_token
from trainer.algorithm.inputs import may_be_broken, require_numbers
from trainer.algorithm.kl import bounded, excess
from trainer.algorithm.mismatch import (
    mismatch_metrics,
    rejection_metrics,
    rule_metrics,
    veto_metrics,
    weight_metrics,
)
from trainer.algorithm.own_parts import WEIGHT, call, metrics_of, require_weights
from trainer.algorithm.segments import (
    ValidTokens,
    count_per_sequence,
    max_per_sequence,
    spread,
    sum_per_sequence,
    valid_tokens,
)
from trainer.algorithm.staleness import staleness_metrics
from trainer.ranks.metrics import Metric
from trainer.ranks.totals import Total, alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights and mask of the loss, and the metrics of the gap."""

    weights_T: Tensor | None
    """float, detached; zero off the response mask. None: the loss computes weights and mask in its forward
    pass (``correct_current``), and ``keep_T`` is the response mask."""
    keep_T: Tensor
    """bool; the response mask without rejected tokens."""
    metrics: dict[str, Metric]


class _Tokens(NamedTuple):
    """The response tokens of a batch: their log-probs and places, without gradient."""

    valid: ValidTokens
    train_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    log_ratio_N: Tensor
    lag_N: Tensor | None


def _tokens(batch: PackedBatch, train_logprobs_T: Tensor) -> _Tokens:
    valid = valid_tokens(batch.response_mask_T, batch.cu_seqlens)
    train_N, rollout_N = valid.pick(train_logprobs_T.detach()), valid.pick(batch.rollout_logprobs_T)
    lag_N = None if batch.lag_T is None else valid.pick(batch.lag_T)
    return _Tokens(valid, train_N, rollout_N, train_N - rollout_N, lag_N)


def scored_old(batch: PackedBatch, config: CorrectionConfig) -> Tensor | None:
    """The learner's own log-probs from before the update. [T]

    None if the update's forward pass gives them: in bypass mode, in which ``old_logprobs_T`` is the rollout,
    and if current is old.
    """
    return None if config.mode == "bypass" else batch.old_logprobs_T


def correct(batch: PackedBatch, config: CorrectionConfig, total: Total = alone) -> Correction:
    """Weights and keep mask of a step's sequences (this rank's share), before its first update.

    Only this function decides when a correction is computed: without ``scored_old`` the forward pass of the
    loss computes it (``weights_T`` is None, no metrics). Raises ValueError for a response token whose
    log-prob is not finite, or above 0 (naming the sequence).
    """
    old_T = scored_old(batch, config)
    tokens = None if old_T is None else _tokens(batch, old_T)
    if tokens is None or any(
        may_be_broken(x_N, logprobs=True) for x_N in (tokens.rollout_logprobs_N, tokens.train_logprobs_N)
    ):
        require_numbers(batch, "rollout_logprobs_T")
        require_numbers(batch, "old_logprobs_T")
    require_numbers(batch, "ref_logprobs_T")
    if tokens is None:
        mask_T = batch.response_mask_T
        return Correction(weights_T=None, keep_T=mask_T, metrics={})
    return _corrected(tokens, batch.cu_seqlens, config, total)


def correct_current(batch: PackedBatch, current_logprobs_T: Tensor, config: CorrectionConfig) -> Correction:
    """Weights and keep mask of a micro-batch against the policy that is being trained, inside the loss.

    Raises ValueError for normalised weights, whose mean over the step only ``correct`` knows, and for rollout
    log-probs of response tokens that are not finite, or above 0. If current log-probs are like that,
    ``policy_loss`` returns a NaN loss.
    """
    if isinstance(config.weight, ImportanceWeight) and config.weight.normalise:
        raise ValueError(
            "normalised weights need old_logprobs_T before the update; score the batch with the learner first"
        )
    require_per_token("current_logprobs_T", current_logprobs_T, batch.num_tokens)
    tokens = _tokens(batch, current_logprobs_T)
    if may_be_broken(tokens.rollout_logprobs_N, logprobs=True):
        require_numbers(batch, "rollout_logprobs_T")
    return _corrected(tokens, batch.cu_seqlens, config, alone)


def _corrected(tokens: _Tokens, cu_seqlens: Tensor, config: CorrectionConfig, total: Total) -> Correction:
    valid, log_ratio_N, bounds_S = tokens.valid, tokens.log_ratio_N, tokens.valid.bounds_S
    metrics = mismatch_metrics(tokens.train_logprobs_N, tokens.rollout_logprobs_N, bounds_S)
    weights_N, weighed = _weigh(log_ratio_N, valid, config.weight, total)
    metrics |= weighed
    valid_S = bounds_S.diff()
    # Rules on whole sequences are decided and counted by sequence, and spread to the tokens once.
    keep_N, keep_S, passed_S = None, None, {}
    for name, rule in zip(rule_names(config.reject), config.reject, strict=True):
        judged = _judged(tokens, rule)
        passed, bounds = judged.passed, judged.bounds
        metrics |= rule_metrics(
            name,
            judged.of_any,
            lower=judged.lower,
            upper=judged.upper,
            is_log_ratio=isinstance(rule, RatioRule),
        )
        if bounds is bounds_S:
            passed_S[name], keep_S = valid_S * passed, _both(keep_S, passed)
        else:
            passed_N = passed if bounds is None else spread(passed, bounds)
            passed_S[name] = count_per_sequence(passed_N, bounds_S)
            keep_N = _both(keep_N, passed_N)
    if config.veto is not None:
        below_S = count_per_sequence(log_ratio_N < math.log(config.veto), bounds_S)
        spared_S = below_S == 0
        passed_S["veto"], keep_S = valid_S * spared_S, _both(keep_S, spared_S)
        metrics |= veto_metrics(below_S)
    kept_S, keep_T = valid_S, valid.mask_T
    if keep_N is not None:
        kept_S, keep_T = count_per_sequence(keep_N, bounds_S), valid.put_back(keep_N)
    if keep_S is not None:
        kept_S, keep_T = kept_S * keep_S, keep_T & spread(keep_S, cu_seqlens)
    metrics |= rejection_metrics(passed_S, kept_S, valid_S)
    if tokens.lag_N is not None:
        metrics |= staleness_metrics(
            tokens.lag_N,
            train_logprobs_N=tokens.train_logprobs_N,
            rollout_logprobs_N=tokens.rollout_logprobs_N,
            weights_N=weights_N,
            keep_N=valid.pick(keep_T),
            bounds_S=bounds_S,
        )
    return Correction(weights_T=valid.put_back(weights_N), keep_T=keep_T, metrics=metrics)


def _both(keep: Tensor | None, passed: Tensor) -> Tensor:
    return passed if keep is None else keep & passed


def _weigh(
    log_ratio_N: Tensor, valid: ValidTokens, config: WeightConfig, total: Total
) -> tuple[Tensor, dict[str, Metric]]:
    match config:
        case NoWeight():
            ratio_N, ones_N = level_ratio(log_ratio_N, valid, "token"), torch.ones_like(log_ratio_N)
            return ones_N, weight_metrics(ratio_N, ones_N, valid.bounds_S)
        case FunctionWeight():
            weights_N, recorded = call(
                WEIGHT, config, log_ratio_N, bounds_S=lambda: valid.bounds_S, segment_bounds=valid.run_bounds
            )
            weights_N = weights_N.detach()
            require_weights(config, weights_N, log_ratio_N)
            metrics = weight_metrics(level_ratio(log_ratio_N, valid, "token"), weights_N, valid.bounds_S)
            return weights_N, metrics | metrics_of(WEIGHT, recorded)
        case ImportanceWeight(level=level, bound=bound, lower=lower, upper=upper):
            ratio_N = level_ratio(log_ratio_N, valid, level)
            weights_N = bounded_weights(ratio_N, bound, lower=lower, upper=upper)
            metrics = weight_metrics(ratio_N, weights_N, valid.bounds_S, lower=lower, upper=upper)
            if config.normalise:
                sums = total(weight_sums(weights_N, valid, level)).tolist()
                mean = sums[0] / sums[1] if sums[0] > 0 else 1.0
                metrics["mismatch/weight_normaliser"] = Metric.quotient(mean, 1)
                weights_N = weights_N / mean
            return weights_N, metrics
        case _:
            assert_never(config)


def _bounds(valid: ValidTokens, level: Level) -> Tensor:
    return valid.run_bounds() if level in ("segment", "segment_geometric") else valid.bounds_S


def _group_log_ratio(log_ratio_N: Tensor, valid: ValidTokens, level: Level) -> tuple[Tensor, Tensor]:
    """The log-ratio of each sequence or segment, float64, and their boundaries."""
    bounds = _bounds(valid, level)
    # float64: the exp of a sum over thousands of tokens is compared with bounds like 1.001.
    sums_S = sum_per_sequence(log_ratio_N.to(torch.float64), bounds)
    if level in ("geometric", "segment_geometric"):
        sums_S = sums_S / bounds.diff().clamp(min=1)
    return sums_S, bounds


def level_ratio(log_ratio_N: Tensor, valid: ValidTokens, level: Level) -> Tensor:
    """exp of the bounded log-ratio at ``level``. [N] -> [N]"""
    if level == "token":
        return bounded(log_ratio_N).exp()
    log_ratio_S, bounds = _group_log_ratio(log_ratio_N, valid, level)
    return spread(bounded(log_ratio_S).exp().to(log_ratio_N.dtype), bounds)


def bounded_weights(ratio_N: Tensor, bound: str, *, lower: float | None, upper: float | None) -> Tensor:
    """truncate: min(rho, upper). clip: into [lower, upper]. mask: rho within [lower, upper], else 0. none:
    rho. [N] -> [N]

    Truncation is one-sided: tokens that the learner finds less likely than the rollout keep their ratio. mask
    is IcePop's.
    """
    match bound:
        case "truncate":
            return ratio_N.clamp(max=upper)
        case "clip":
            return ratio_N.clamp(lower, upper)
        case "mask":
            assert lower is not None and upper is not None
            return torch.where((ratio_N >= lower) & (ratio_N <= upper), ratio_N, 0.0)
        case "none":
            return ratio_N
    raise ValueError(f"unknown weight bound {bound!r}; choose truncate, clip, mask or none")


def weight_sums(weights_N: Tensor, valid: ValidTokens, level: Level) -> Tensor:
    """(sum of weights, their number), float64 [2], over the level's tokens, sequences or segments with valid
    tokens."""
    weights_N = weights_N.to(torch.float64)
    if level == "token":
        return torch.stack([weights_N.sum(), weights_N.new_tensor(weights_N.numel())])
    bounds = _bounds(valid, level)
    counts_S = bounds.diff()
    means_S = sum_per_sequence(weights_N, bounds) / counts_S.clamp(min=1)
    return torch.stack([means_S.sum(), (counts_S > 0).sum().to(torch.float64)])


class _Judged(NamedTuple):
    """The statistic that a rule bounds: one number per token, sequence or segment."""

    statistic: Tensor
    lower: float
    upper: float
    bounds: Tensor | None
    """None for tokens, ``valid.bounds_S`` itself for sequences, else the boundaries of segments."""

    @property
    def passed(self) -> Tensor:
        return (self.statistic >= self.lower) & (self.statistic <= self.upper)

    @property
    def of_any(self) -> Tensor:
        """The statistic without sequences that have no valid token."""
        return self.statistic if self.bounds is None else self.statistic[self.bounds.diff() > 0]


def _judged(tokens: _Tokens, rule: RejectionRule) -> _Judged:
    valid, log_ratio_N = tokens.valid, tokens.log_ratio_N
    match rule:
        case RatioRule(level=level, lower=lower, upper=upper):
            at_level, bounds = log_ratio_N, None
            if level != "token":
                at_level, bounds = _group_log_ratio(log_ratio_N, valid, level)
            # Compared as logs: exp would round away differences that bounds like 1.0001 distinguish.
            return _Judged(
                bounded(at_level), math.log(lower) if lower else -math.inf, math.log(upper), bounds
            )
        case DivergenceRule(rule=kind, reduce=reduce, upper=upper):
            d_N = bounded(log_ratio_N).square() / 2 if kind == "k2" else excess(log_ratio_N)
            bounds = None if reduce == "token" else valid.bounds_S
            return _Judged(_reduced(d_N, valid.bounds_S, reduce), -math.inf, upper, bounds)
        case DifferenceRule(reduce=reduce, lower=lower, upper=upper):
            # float64: probabilities near 1 differ in digits that float32 does not have.
            dp_N = tokens.train_logprobs_N.double().exp() - tokens.rollout_logprobs_N.double().exp()
            bounds = {"token": None, "segment_mean": valid.run_bounds()}.get(reduce, valid.bounds_S)
            reduced = dp_N if bounds is None else _reduced(dp_N, bounds, reduce.removeprefix("segment_"))
            return _Judged(reduced, lower, upper, bounds)
        case _:
            assert_never(rule)


def _reduced(divergence_N: Tensor, bounds_S: Tensor, reduce: str) -> Tensor:
    """Token by token [N], or each sequence's sum, mean or maximum [S]."""
    if reduce == "token":
        return divergence_N
    if reduce == "max":
        return max_per_sequence(divergence_N, bounds_S)
    sums_S = sum_per_sequence(divergence_N.to(torch.float64), bounds_S)
    return sums_S / bounds_S.diff().clamp(min=1) if reduce == "mean" else sums_S


def rule_names(rules: Sequence[RejectionRule]) -> list[str]:
    """Names of the rules in metrics: ratio_geometric, k3_mean, difference_token. Repeated names are numbered:
    k3_mean_2."""
    names: list[str] = []
    for rule in rules:
        name = f"{rule.rule}_{rule.level if isinstance(rule, RatioRule) else rule.reduce}"
        earlier = sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in names)
        names.append(f"{name}_{earlier + 1}" if earlier else name)
    return names
