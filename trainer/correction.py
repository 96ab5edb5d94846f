"""Correction of the gap between rollout and learner: importance weights and a keep mask, between recompute and loss.

Legend: T packed tokens. rho = pi_old / pi_rollout of a token; log-probs are nats.
Order: log-ratio -> bounded to +-20 -> exp -> weight bound. Weights carry no gradient, and advantages never change because of them.
A weight level is a pure function here and a member of ``WeightConfig``.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from configs.schema.correction import CorrectionConfig, NoWeight, TokenWeight, WeightConfig
from parallel.packing import PackedBatch
from trainer.kl import bounded
from trainer.metrics import Metric
from trainer.mismatch import correction_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the loss multiplies its tokens with."""

    weights_T: Tensor
    """float32, detached; zero off the response mask."""
    keep_T: Tensor
    """bool; the response mask less what was rejected."""
    metrics: dict[str, Metric]


def correct(batch: PackedBatch, config: CorrectionConfig) -> Correction:
    """Weights and keep mask of a batch whose ``old_logprobs_T`` are set, token by token, so of any part of a batch.

    Raises ValueError where ``old_logprobs_T`` is missing, and for a response token whose log-prob is not finite (naming the sequence).
    """
    if batch.old_logprobs_T is None:
        raise ValueError("old_logprobs_T is not set: score the batch with the learner before correcting it")
    _require_finite(batch, "old_logprobs_T", "the learner's forward pass produced it: check its weights and dtype")
    _require_finite(batch, "rollout_logprobs_T", "the server returned it: check the served weights and dtype")
    if batch.ref_logprobs_T is not None:
        _require_finite(batch, "ref_logprobs_T", "the reference's forward pass produced it: check its weights and dtype")
    mask_T = batch.response_mask_T
    log_ratio_T = torch.where(mask_T, (batch.old_logprobs_T - batch.rollout_logprobs_T).detach(), 0.0)
    weights_T, truncated_T = _weights(log_ratio_T, config.weight)
    weights_T = torch.where(mask_T, weights_T, 0.0).to(torch.float32)
    metrics = correction_metrics(bounded(log_ratio_T).exp(), weights_T, truncated_T, mask_T, mask_T)
    return Correction(weights_T=weights_T, keep_T=mask_T, metrics=metrics)


def truncated_token_weights(log_ratio_T: Tensor, *, upper: float) -> Tensor:
    """w_t = min(rho_t, upper), detached. [T] log rho (bounded to +-20 before exp) -> [T]

    Truncated importance sampling: one-sided, so a token that the learner finds likelier than the rollout did gets at most ``upper``.
    """
    return bounded(log_ratio_T.detach()).exp().clamp(max=upper)


def _weights(log_ratio_T: Tensor, config: WeightConfig) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether its bound changed it. [T] -> [T], [T]"""
    match config:
        case NoWeight():
            return torch.ones_like(log_ratio_T), torch.zeros_like(log_ratio_T, dtype=torch.bool)
        case TokenWeight(upper=upper):
            return truncated_token_weights(log_ratio_T, upper=upper), bounded(log_ratio_T).exp() > upper
        case _:
            assert_never(config)


def _require_finite(batch: PackedBatch, name: str, fix: str) -> None:
    values_T = getattr(batch, name)
    broken = (batch.response_mask_T & ~torch.isfinite(values_T)).nonzero().flatten().cpu()
    if not broken.numel():
        return
    rows = torch.searchsorted(batch.cu_seqlens.to(broken.dtype), broken, right=True) - 1
    ids = batch.sequence_ids_S[rows.unique()].tolist()
    raise ValueError(
        f"{name} is {values_T[broken[0]].item()} on a response token of sequence {ids[0]} "
        f"({broken.numel()} such tokens, sequences {ids[:10]}); {fix}"
    )
