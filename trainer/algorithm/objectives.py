"""Policy objectives: per-token losses of log-probs and advantages. ``aggregation`` averages them.

Losses have the unit of advantages. r = pi_current / pi_old of a token, A its advantage, sg[.] without
gradient; old and A carry no gradient. Every function expects finite input: ``policy_loss`` first replaces
values off the response mask. Every function bounds log r to +-20; the papers do not.

    clipped          PPO, with DAPO's clip-higher and dual clip     gradient of a token at current = old: -A (per nat of log pi_current)
    gspo             the sequence's ratio instead of the token's    -A
    gmpo             one term per sequence, a geometric mean        -(mean A of the sequence), as the others if A is constant in it
    cispo            policy gradient, weight the clipped ratio      -A
    sapo             a smooth gate instead of the clip              -A
    dppo             masked by the change of the probability        -A
    policy_gradient  no ratio                                       -A, whatever old is
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.algorithm.kl import bounded
from trainer.algorithm.segments import count_per_sequence, spread, sum_per_sequence

GSPO_LOG_BOUND = 10.0
"""The log of GSPO's sequence ratio is at most this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveLoss:
    """Result of an objective, all [T]; None for a quantity that it does not have."""

    loss_T: Tensor
    """With gradient."""
    ratio_T: Tensor | None = None
    """pi_current / pi_old that the objective bounds (of a token; of a sequence in ``gspo``), detached."""
    clipped_T: Tensor | None = None
    """bool: the ratio (in ``dppo`` the probability) lies beyond a bound that changes this token's loss or
    gradient."""
    dual_clipped_T: Tensor | None = None
    """bool: A < 0 and the loss was held at -c A."""
    off_policy_T: Tensor | None = None
    """bool: the tokens that ``without_off_policy`` has masked."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Values that a user's objective records, by their names."""


def clipped(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> ObjectiveLoss:
    """PPO's clipped surrogate, with separate bounds (DAPO's clip-higher) and dual clip.

    With r = pi_current / pi_old of a token and A its advantage,
        l = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(l, -dual_clip A)  where A < 0 and dual_clip is set, else l.
    r is exactly 1 where the log-probs are equal. A clipped token has no gradient.

    Sources: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; Ye et al. 2019 (arXiv 1912.09729) for dual clip;
    Yu et al. 2025 (DAPO). Differs from the papers: the bound of the log-ratio.
    """
    ratio_T = bounded(current_logprobs_T - old_logprobs_T).exp()
    fixed_T = ratio_T.detach()
    clipped_T, held_T = _clip(fixed_T, advantages_T, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        dual_clipped_T = torch.zeros_like(clipped_T)
    else:
        dual_clipped_T = (advantages_T < 0) & (fixed_T > dual_clip)
        held_T = torch.where(dual_clipped_T, dual_clip, held_T)
    loss_T = -advantages_T * torch.where(clipped_T | dual_clipped_T, held_T, ratio_T)
    return ObjectiveLoss(loss_T=loss_T, ratio_T=fixed_T, clipped_T=clipped_T, dual_clipped_T=dual_clipped_T)


def gspo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ObjectiveLoss:
    """GSPO in its token form: PPO's clipped surrogate with every token's ratio replaced by its sequence's.

    With n the tokens of sequence i that are on the mask [T], summed over them,
        s_i = exp((1/n) sum_t log r_t)                                log s_i bounded from above by GSPO_LOG_BOUND
        s_t = sg[s_i] pi_current,t / sg[pi_current,t]                 the value of s_i, a gradient to this token only
        loss = max(-s_t A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) A_t).
    If A is constant in a sequence, the mean over its tokens has the value and gradient of the sequence form
    in s_i. Meant for ``sequence_mean_token_mean``.

    Source: Zheng et al. 2025 (arXiv 2507.18071), sections 4.1 and 4.3. Differs from it: the bound of log s_i.
    """
    log_ratio_T = torch.where(mask_T, (current_logprobs_T - old_logprobs_T).detach(), 0.0)
    log_s_T = spread(_mean_per_sequence(log_ratio_T, mask_T, cu_seqlens), cu_seqlens)
    own_T = current_logprobs_T - current_logprobs_T.detach()
    s_T = (log_s_T + own_T).clamp(max=GSPO_LOG_BOUND).exp()
    clipped_T, held_T = _clip(s_T.detach(), advantages_T, clip_low=clip_low, clip_high=clip_high)
    return ObjectiveLoss(
        loss_T=-advantages_T * torch.where(clipped_T, held_T, s_T), ratio_T=s_T.detach(), clipped_T=clipped_T
    )


def gmpo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ObjectiveLoss:
    """GMPO: the geometric mean of a sequence's ratios, each clipped on the side where its advantage pushes
    it.

    With n the tokens of sequence i that are on the mask [T], summed over them, and A_i their mean advantage,
        x_t = min(log r_t, clip_high) where A_t > 0,  max(log r_t, -clip_low) where A_t < 0,  0 where A_t = 0
        loss of every token of i = -A_i exp((1/n) sum_t x_t),
    so ``sequence_mean_token_mean``, for which it is meant, averages one term per sequence. The bounds act on
    the log-ratio. Correction weights enter per sequence, by ``geometric_mean_weights``. All tokens of a
    sequence that are not clipped have a gradient.

    Source: Zhao et al. 2025 (arXiv 2507.20673). Differs from it: the bound of the token's log-ratio.
    """
    log_ratio_T = bounded(current_logprobs_T - old_logprobs_T)
    above_T, below_T = advantages_T > 0, advantages_T < 0
    held_T = torch.where(above_T, log_ratio_T.clamp(max=clip_high), log_ratio_T.clamp(min=-clip_low))
    x_T = torch.where(mask_T & (above_T | below_T), held_T, 0.0)
    ratio_S = _mean_per_sequence(x_T, mask_T, cu_seqlens).exp()
    advantage_S = _mean_per_sequence(torch.where(mask_T, advantages_T, 0.0), mask_T, cu_seqlens)
    outside_T = torch.where(above_T, log_ratio_T > clip_high, log_ratio_T < -clip_low) & (above_T | below_T)
    loss_T = spread(-advantage_S * ratio_S, cu_seqlens)
    return ObjectiveLoss(loss_T=loss_T, ratio_T=log_ratio_T.detach().exp(), clipped_T=outside_T)


def geometric_mean_weights(weights_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Every token's weight replaced by the geometric mean over its sequence's tokens on the mask. [T] >= 0 ->
    [T]

    So correction weights enter a product of ratios: (prod r_t)^(1/n) (prod w_t)^(1/n). One weight of zero
    makes the whole sequence's weight zero; a sequence without tokens on the mask gets 1.
    """
    log_weights_T = torch.where(mask_T, weights_T, 1.0).log()
    return spread(_mean_per_sequence(log_weights_T, mask_T, cu_seqlens).exp(), cu_seqlens)


def cispo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ObjectiveLoss:
    """CISPO: a policy gradient weighted by the clipped ratio, so that no token loses its gradient.

        loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi_current

    Source: MiniMax-M1 2025 (arXiv 2506.13585), whose experiments have no lower bound (clip_low = 1). Differs from it: the
    bound of the log-ratio.
    """
    ratio_T = bounded((current_logprobs_T - old_logprobs_T).detach()).exp()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return ObjectiveLoss(
        loss_T=-weight_T * advantages_T * current_logprobs_T,
        ratio_T=ratio_T,
        clipped_T=(weight_T != ratio_T) & (advantages_T != 0),
    )


def sapo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> ObjectiveLoss:
    """SAPO: a smooth gate of the ratio, whose gradient fades on both sides of r = 1 and never vanishes.

        loss = -(4 / tau) sigmoid(tau (r - 1)) A,  tau = temperature_positive where A > 0, else temperature_negative
    The gradient is that of -r A times 4 p (1 - p), with p the sigmoid; this factor is 1 at r = 1. The value there
    is -2 A / tau, not -A.

    Source: Gao et al. 2025 (arXiv 2511.20347) eqs. 5-6. The paper averages by ``sequence_mean_token_mean``.
    Differs from it: the bound of the log-ratio.
    """
    ratio_T = bounded(current_logprobs_T - old_logprobs_T).exp()
    # 0-dim tensors of the ratio's dtype: plain floats would make the temperatures float32.
    temperature_T = torch.where(
        advantages_T > 0, ratio_T.new_tensor(temperature_positive), ratio_T.new_tensor(temperature_negative)
    )
    gate_T = torch.sigmoid(temperature_T * (ratio_T - 1)) * (4 / temperature_T)
    return ObjectiveLoss(loss_T=-gate_T * advantages_T, ratio_T=ratio_T.detach())


def dppo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    max_decrease: float,
    max_increase: float,
    ratio_max: float,
) -> ObjectiveLoss:
    """DPPO with binary total variation: no gradient for a token whose probability has already moved too far in
    the direction of its advantage.

        loss = -sg[min(r, ratio_max)] A log pi_current  where the token is within, else 0
        within: pi_current - pi_old <= max_increase where A > 0,  pi_current - pi_old >= -max_decrease elsewhere
    |pi_current - pi_old| of the sampled token is the total variation of "this token or another". Unlike the
    ratio, it lets rare tokens move by large factors and holds likely tokens to small ones.

    Source: arXiv 2602.04879 (Divergence PPO), its binary TV form and, for ratio_max, its section 5.4. Differs
    from it: the bound of the log-ratio, and in decoupled mode pi_old. The paper's pi_old is the rollout
    (bypass mode), not recomputed.
    """
    current_T = current_logprobs_T.detach()
    ratio_T = bounded(current_T - old_logprobs_T).exp()
    moved_T = current_T.exp() - old_logprobs_T.exp()
    outside_T = torch.where(advantages_T > 0, moved_T > max_increase, moved_T < -max_decrease)
    weight_T = torch.where(outside_T, 0.0, -advantages_T * ratio_T.clamp(max=ratio_max))
    clipped_T = outside_T & (advantages_T != 0)
    return ObjectiveLoss(loss_T=weight_T * current_logprobs_T, ratio_T=ratio_T, clipped_T=clipped_T)


def policy_gradient(current_logprobs_T: Tensor, advantages_T: Tensor) -> ObjectiveLoss:
    """REINFORCE: loss = -A log pi_current. Williams 1992; with importance weights in the loss, the off-policy
    policy gradient."""
    return ObjectiveLoss(loss_T=-advantages_T * current_logprobs_T)


def without_off_policy(
    result: ObjectiveLoss,
    current_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    threshold: float,
) -> ObjectiveLoss:
    """Off-policy sequence masking of any objective.

    With n the tokens of a sequence that are on the mask [T], summed over them, a token's loss is 0 where
        A < 0  and  (1/n) sum_t (log pi_rollout,t - log pi_current,t) > threshold, in nats.
    So a response with A < 0 that the policy would hardly give any more is not unlearned further. A response
    with A > 0 is always learned from, however far the policy is from it.

    Source: DeepSeek-V3.2 2025 (arXiv 2512.02556), section 3.1, whose pi_old has the log-probs of the rollout
    engine.
    """
    drift_T = torch.where(mask_T, rollout_logprobs_T - current_logprobs_T.detach(), 0.0)
    is_far_T = spread(_mean_per_sequence(drift_T, mask_T, cu_seqlens) > threshold, cu_seqlens)
    masked_T = is_far_T & (advantages_T < 0)
    return replace(result, loss_T=torch.where(masked_T, 0.0, result.loss_T), off_policy_T=masked_T)


def _clip(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where -clip(r) A is greater than -r A, bool, and clip(r), from detached ratios. [T], [T] -> [T], [T]"""
    above_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    below_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    return above_T | below_T, ratio_T.clamp(1 - clip_low, 1 + clip_high)


def _mean_per_sequence(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over each sequence's tokens on the mask, 0 without any; x must be 0 off the mask. Sums are float64.
    [T] -> [S]"""
    sums_S = sum_per_sequence(x_T.to(torch.float64), cu_seqlens)
    return (sums_S / count_per_sequence(mask_T, cu_seqlens).clamp(min=1)).to(x_T.dtype)
