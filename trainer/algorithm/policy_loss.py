"""The loss of one micro-batch: objective, KL and entropy terms, each a plain sum over tokens of loss times
weight.

An objective is a pure function in ``objectives``, or a user's function (``own_parts``). Each is a case of
``_objective_loss`` here.
"""

import logging
import math
from functools import reduce
from operator import add
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import (
    CispoObjective,
    ClippedObjective,
    DppoObjective,
    EntropyConfig,
    FunctionObjective,
    GmpoObjective,
    GspoObjective,
    KLConfig,
    ObjectiveConfig,
    PolicyGradientObjective,
    SapoObjective,
)
from parallel.packing import PackedBatch, require_per_token
from trainer.algorithm.aggregation import Averaging, Counted, over_kept
from trainer.algorithm.correction import correct_current, scored_old
from trainer.algorithm.inputs import (
    broken_tokens,
    may_be_broken,
    require_fields,
    require_numbers,
    sequences_of,
)
from trainer.algorithm.kl import ESTIMATORS, bounded
from trainer.algorithm.objectives import (
    ObjectiveLoss,
    cispo,
    clipped,
    dppo,
    geometric_mean_weights,
    gmpo,
    gspo,
    policy_gradient,
    sapo,
    without_off_policy,
)
from trainer.algorithm.own_parts import OBJECTIVE, call, metrics_of
from trainer.ranks.metrics import Metric, Reduction

logger = logging.getLogger(__name__)


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch, with its metrics and counts."""

    loss: Tensor
    metrics: dict[str, Metric]
    counted: Counted | None
    """Counts for ``kept_factor``; None where the weights were known, or nothing can be rejected from the mean."""


def policy_loss(
    batch: PackedBatch,
    current_logprobs_T: Tensor,
    entropy_T: Tensor,
    *,
    objective: ObjectiveConfig,
    kl: KLConfig,
    entropy: EntropyConfig,
    correction: CorrectionConfig,
    aggregation: Averaging,
) -> PolicyLoss:
    """The scalar loss of a micro-batch, with gradient to ``current_logprobs_T`` [T] and ``entropy_T`` [T],
    and its metrics.

    loss = sum_t objective_t * importance_weights_t * aggregation_t
         + kl.coefficient * sum_t KL_t * aggregation_t   (if kl.place is loss; with kl.unbiased KL_t times
                                                          pi_current / pi_old and, but in bypass mode, importance_weights_t)
         - entropy.coefficient * sum_t H_t * aggregation_t     over response tokens t.
    aggregation_t holds the global normalisers, so losses and gradients of micro-batches and ranks add up. It is
    zero on rejected tokens, which leave every term and the sequence statistics of ``gspo`` and ``gmpo``. In
    ``gmpo`` importance weights enter as their geometric mean over the sequence. Tokens that
    ``correction.off_policy_mask`` masks do not enter the objective's term. Values off the response mask do
    not matter, not even NaN. Without response tokens loss and gradient are exact zeros, still connected to
    the graph. If a current log-prob of a response token is not finite, or above 0, the loss is NaN.

    Without ``old_logprobs_T`` current is old. Without ``importance_weights_T`` this function computes weights
    and rejection from current and rollout (``correction``), without gradient. With rules and ``denominator:
    kept`` the loss then still lacks one factor for the whole minibatch: ``kept_factor`` of all ``counted``.
    ``aggregation`` is the mode of aggregation_T.

    Metrics: ``loss/*``, ``policy/*``, the values that a user's objective records (``own/*``) and, if the
    correction is computed from current, ``mismatch/*`` and ``staleness/*``.

    Raises ValueError naming the fields of ``batch`` that are not set, tensors that are not one float32 per
    token, and the sequence of a response token whose advantage, weight or log-prob in ``batch`` is not
    finite, or whose log-prob there is above 0.
    """
    _require(batch, current_logprobs_T, entropy_T, correction, with_ref=kl.in_loss)
    mask_T = batch.response_mask_T
    # Replaced before any arithmetic: NaN times a zero weight would still be NaN, in the gradient too.
    current_T, entropy_T = (torch.where(mask_T, x_T, 0.0) for x_T in (current_logprobs_T, entropy_T))
    old_T, advantages_T = _old_and_advantages(batch, current_T)
    num_tokens = torch.count_nonzero(mask_T).item()
    assert batch.aggregation_T is not None
    importance_T, aggregation_T = batch.importance_weights_T, batch.aggregation_T.detach()
    metrics, counted = {}, None
    if importance_T is None:
        importance_T, aggregation_T, metrics, counted = _correct_here(
            batch, current_T, aggregation_T, correction, aggregation
        )
    importance_T = importance_T.detach()
    kept_T = mask_T & aggregation_T.bool()
    result = _objective_loss(objective, current_T, old_T, advantages_T, kept_T, batch.cu_seqlens)
    if (threshold := correction.off_policy_mask) is not None:
        result = _mask_off_policy(result, batch, current_T, advantages_T, kept_T, threshold)
    weights_T = importance_T
    if isinstance(objective, GmpoObjective):
        weights_T = geometric_mean_weights(importance_T, kept_T, batch.cu_seqlens)
    terms = {"policy": _weighted_sum(result.loss_T, weights_T * aggregation_T, kept_T)}
    metrics |= _objective_metrics(result, kept_T)
    del result, weights_T
    old_sum, current_sum = (x_T.detach().sum(dtype=torch.float64).item() for x_T in (old_T, current_T))
    metrics |= {
        "policy/entropy": _mean(entropy_T, num_tokens),
        "policy/ppo_kl": Metric.quotient(old_sum - current_sum, num_tokens),
    }
    if batch.ref_logprobs_T is not None:
        kl_T = ESTIMATORS[kl.estimator](current_T, _on_mask(batch, "ref_logprobs_T"))
        metrics["policy/ref_kl"] = _mean(kl_T, num_tokens)
        if kl.in_loss:
            if kl.unbiased:
                kl_T = kl_T * _ratio_to_rollout(current_T, old_T, importance_T, kept_T, correction)
            terms["kl"] = kl.coefficient * _weighted_sum(kl_T, aggregation_T, kept_T)
    if entropy.coefficient > 0:
        terms["entropy"] = -entropy.coefficient * _weighted_sum(entropy_T, aggregation_T, kept_T)
    loss = _nan_where_broken(reduce(add, terms.values()), batch, current_T)
    values = {"policy": 0.0, "kl": 0.0, "entropy": 0.0} | {name: term.item() for name, term in terms.items()}
    values["total"] = loss.item()
    metrics |= {f"loss/{name}": Metric.loss(value) for name, value in values.items()}
    return PolicyLoss(loss, metrics, counted)


def _old_and_advantages(batch: PackedBatch, current_T: Tensor) -> tuple[Tensor, Tensor]:
    """old_T and advantages_T, without gradient, and 0 off the mask. Raises ValueError as ``policy_loss`` does."""
    advantages_T = _on_mask(batch, "advantages_T")
    if batch.old_logprobs_T is None:
        return current_T.detach().clone(), advantages_T  # a user's objective may write to it
    return _on_mask(batch, "old_logprobs_T"), advantages_T


def _on_mask(batch: PackedBatch, field: str) -> Tensor:
    """A field of the batch, without gradient, and 0 off the mask. Raises ValueError if a value on the mask is
    broken."""
    values_T = torch.where(batch.response_mask_T, getattr(batch, field).detach(), 0.0)
    if may_be_broken(values_T, logprobs=field.endswith("logprobs_T")):
        require_numbers(batch, field)
    return values_T


def _correct_here(
    batch: PackedBatch,
    current_T: Tensor,
    aggregation_T: Tensor,
    correction: CorrectionConfig,
    averaging: Averaging,
) -> tuple[Tensor, Tensor, dict[str, Metric], Counted | None]:
    """Importance weights from current, ``aggregation_T`` without the rejected tokens, metrics, and counts if
    the mean is only over kept tokens."""
    corrected = correct_current(batch, current_T, correction)
    metrics = dict(corrected.metrics)
    if not correction.rejects_from_mean:
        return corrected.weights_T, aggregation_T * corrected.keep_T, metrics, None
    aggregation_T, counted = over_kept(
        aggregation_T, corrected.keep_T, batch.response_mask_T, batch.cu_seqlens, mode=averaging
    )
    return corrected.weights_T, aggregation_T, metrics, counted


def _mask_off_policy(
    result: ObjectiveLoss,
    batch: PackedBatch,
    current_T: Tensor,
    advantages_T: Tensor,
    kept_T: Tensor,
    threshold: float,
) -> ObjectiveLoss:
    rollout_T = _on_mask(batch, "rollout_logprobs_T")
    return without_off_policy(
        result, current_T, rollout_T, advantages_T, kept_T, batch.cu_seqlens, threshold=threshold
    )


def _nan_where_broken(loss: Tensor, batch: PackedBatch, current_T: Tensor) -> Tensor:
    """The loss, or NaN if a current log-prob is broken; the optimizer's step refuses NaN. Raises ValueError if
    weights made the loss NaN.

    A broken log-prob raises nothing here, since forward and backward passes of other ranks wait for this one.
    It needs a check because bounds hide an infinity and rejection hides a broken forward pass.
    """
    current_T = current_T.detach()
    if not may_be_broken(current_T, logprobs=True):
        if not math.isfinite(loss.item()):
            if batch.importance_weights_T is not None:
                require_numbers(batch, "importance_weights_T")
            require_numbers(batch, "aggregation_T")
        return loss
    broken = broken_tokens(batch, current_T, logprobs=True).nonzero().flatten().cpu()
    first, ids = current_T[broken[0]].item(), sequences_of(batch, broken)
    wrong = "above 0" if math.isfinite(first) else "not finite"
    logger.error("current_logprobs_T is %s, %s, on response tokens of sequences %s; check the learner's weights and dtype",
                 first, wrong, ids[:10])  # fmt: skip
    return loss * torch.nan


def _objective_loss(
    objective: ObjectiveConfig,
    current_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    kept_T: Tensor,
    cu_seqlens: Tensor,
) -> ObjectiveLoss:
    policies = (current_T, old_T, advantages_T)
    parameters = objective.model_dump(exclude={"type"})
    match objective:
        case ClippedObjective():
            return clipped(*policies, **parameters)
        case GspoObjective():
            return gspo(*policies, kept_T, cu_seqlens, **parameters)
        case GmpoObjective():
            return gmpo(*policies, kept_T, cu_seqlens, **parameters)
        case CispoObjective():
            return cispo(*policies, **parameters)
        case SapoObjective():
            return sapo(*policies, **parameters)
        case DppoObjective():
            return dppo(*policies, **parameters)
        case PolicyGradientObjective():
            return policy_gradient(current_T, advantages_T)
        case FunctionObjective():
            loss_T, recorded = call(
                OBJECTIVE, objective, *policies, mask_T=lambda: kept_T, cu_seqlens=lambda: cu_seqlens
            )
            return ObjectiveLoss(loss_T=loss_T, recorded=recorded)
        case _:
            assert_never(objective)


def _ratio_to_rollout(
    current_T: Tensor, old_T: Tensor, importance_T: Tensor, kept_T: Tensor, correction: CorrectionConfig
) -> Tensor:
    """pi_current / pi_rollout of kept tokens, with gradient, limited by the weight's bound."""
    ratio_T = bounded(current_T - old_T).exp()
    if correction.mode == "bypass":  # old is the rollout, and a weight would be the same ratio once more
        return ratio_T
    return ratio_T * torch.where(kept_T, importance_T, 0.0)


def _weighted_sum(x_T: Tensor, weights_T: Tensor, kept_T: Tensor) -> Tensor:
    """The sum over kept tokens. Weights of other tokens may be anything, even NaN."""
    return (x_T * torch.where(kept_T, weights_T, 0.0)).sum()


def _objective_metrics(result: ObjectiveLoss, kept_T: Tensor) -> dict[str, Metric]:
    num_kept = int(torch.count_nonzero(kept_T).item())
    metrics = {} if result.ratio_T is None else _ratio_metrics(result.ratio_T, kept_T, num_kept)
    metrics |= metrics_of(OBJECTIVE, result.recorded, kept_T)
    shares = {
        "policy/clip_fraction": result.clipped_T,
        "policy/dual_clip_fraction": result.dual_clipped_T,
        "policy/off_policy_fraction": result.off_policy_T,
    }
    for name, hits_T in shares.items():
        if hits_T is not None:
            metrics[name] = Metric.quotient(torch.count_nonzero(hits_T & kept_T).item(), num_kept)
    return metrics


def _ratio_metrics(ratio_T: Tensor, kept_T: Tensor, num_kept: int) -> dict[str, Metric]:
    kept_ratio_T = torch.where(kept_T, ratio_T, 0.0)
    # Ratios are positive, so zeros instead of the rest do not change the greatest.
    high = (kept_ratio_T.max().item(),) if num_kept else ()
    low = (torch.where(kept_T, ratio_T, torch.inf).min().item(),) if num_kept else ()
    return {
        "policy/ratio_mean": _mean(kept_ratio_T, num_kept),
        "policy/ratio_min": Metric(reduction=Reduction.MIN, parts=low),
        "policy/ratio_max": Metric(reduction=Reduction.MAX, parts=high),
    }


def _mean(zero_off_mask_T: Tensor, count: float) -> Metric:
    """The mean of values that are zero off the mask: no pass to mask or to count, and no float64 copy."""
    return Metric.quotient(zero_off_mask_T.detach().sum(dtype=torch.float64).item(), count)


def _require(
    batch: PackedBatch,
    current_logprobs_T: Tensor,
    entropy_T: Tensor,
    correction: CorrectionConfig,
    *,
    with_ref: bool,
) -> None:
    weights_are_known = scored_old(batch, correction) is not None
    names = ["advantages_T"] + ["importance_weights_T"] * weights_are_known + ["aggregation_T"]
    names += ["ref_logprobs_T"] * with_ref
    require_fields(batch, names, "score it and give it advantages and loss weights")
    for name, tensor in (("current_logprobs_T", current_logprobs_T), ("entropy_T", entropy_T)):
        require_per_token(name, tensor, batch.num_tokens)
