"""The critic's loss: squared error of values against returns, with PPO's clipping, as a plain sum over tokens
of loss times weight.

Values and returns have the unit of rewards. Index t is the state in which ``targets_T[t]`` is chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.packing import PackedBatch, require_per_token
from trainer.algorithm.inputs import may_be_broken, require_fields, require_numbers
from trainer.ranks.metrics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Result of ``clipped_value_loss``, both [T]."""

    loss_T: Tensor
    """With gradient."""
    clipped_T: Tensor
    """bool: the clipped branch has the greater loss, so the token has no gradient."""


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None
) -> ValueLoss:
    """PPO's value loss: the larger of the errors of the value and of the value clipped to within ``clip`` of
    the old one.

    With V the critic's value now, V_old the one that the advantages came from and R the return,
        l = 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2);    clip None: l = 0.5 (V - R)^2.
    The gradient with respect to V is zero where the clipped value has the larger error, V - R elsewhere.
    Expects finite input.

    Source: Schulman et al. 2016 (arXiv 1506.02438) for the squared error; OpenAI Baselines' PPO2 for the
    clipping, which the PPO paper does not describe. Differs from both: the mean is left to aggregation.
    """
    error_T = (values_T - returns_T).square()
    if clip is None:
        return ValueLoss(loss_T=0.5 * error_T, clipped_T=torch.zeros_like(values_T, dtype=torch.bool))
    held_error_T = (values_T.clamp(old_values_T - clip, old_values_T + clip) - returns_T).square()
    return ValueLoss(loss_T=0.5 * torch.maximum(error_T, held_error_T), clipped_T=held_error_T > error_T)


def value_loss(
    batch: PackedBatch, values_T: Tensor, *, value_clip: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """The scalar loss of a micro-batch, with gradient to ``values_T`` [T], and its metrics.

    loss = sum_t l_t * value_aggregation_t     over response tokens t, l_t of ``clipped_value_loss`` against ``batch.values_T``.
    Weights hold the global normalisers, so losses and gradients of micro-batches and ranks add up. Values off the
    response mask do not matter, not even NaN. Without response tokens loss and gradient are exact zeros,
    still connected to the graph. If a response token's value is not finite, neither is the loss.

    Metrics: ``critic/*``; ``explained_variance`` combines two of them.

    Raises ValueError naming the fields of ``batch`` that are not set, values that are not one float32 per
    token, and the sequence of a response token whose value, return or weight in ``batch`` is not finite.
    """
    names = ("values_T", "returns_T", "value_aggregation_T")
    require_fields(batch, names, "let the critic score it, and give it advantages and weights")
    require_per_token("values_T", values_T, batch.num_tokens)
    mask_T = batch.response_mask_T
    # Replaced before any arithmetic: NaN times a zero weight would still be NaN, in the gradient too.
    assert (
        batch.values_T is not None and batch.returns_T is not None and batch.value_aggregation_T is not None
    )
    values_T, old_values_T, returns_T, weights_T = (
        torch.where(mask_T, x_T, 0.0)
        for x_T in (values_T, batch.values_T, batch.returns_T, batch.value_aggregation_T)
    )
    if any(map(may_be_broken, (old_values_T, returns_T, weights_T))):
        for name in names:
            require_numbers(batch, name)
    result = clipped_value_loss(values_T, old_values_T, returns_T, clip=value_clip)
    loss = (result.loss_T * weights_T).sum()
    metrics = {
        "critic/loss": Metric.loss(loss.item()),
        "critic/value_mean": Metric.mean(values_T, mask_T),
        "critic/return_mean": Metric.mean(returns_T, mask_T),
        "critic/clip_fraction": Metric.mean(result.clipped_T, mask_T),
        "critic/return_std": Metric.std(returns_T, mask_T),
        "critic/error_std": Metric.std(returns_T - old_values_T, mask_T),
    }
    return loss, metrics


def explained_variance(numbers: Mapping[str, float]) -> float | None:
    """1 - Var(R - V_old) / Var(R) over response tokens, exact under any split: from the merged ``value_loss``
    metrics.

    1: the values predict every return; 0: they predict as well as one constant; below 0: worse. None if there
    are no returns, or if all returns are equal, which leaves nothing to explain.
    """
    if "critic/return_std" not in numbers:
        return None
    spread, error_spread = numbers["critic/return_std"], numbers["critic/error_std"]
    # Equal returns leave a rounding error: that of a difference of squares, and that of advantages plus values.
    if spread <= max(1e-6 * abs(numbers["critic/return_mean"]), 1e-10 * error_spread):
        return None
    return 1 - (error_spread / spread) ** 2
