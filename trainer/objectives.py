"""Policy objectives: per-token losses of log-probs and advantages. How tokens are averaged is aggregation's business.

Legend: T packed tokens. Log-probs are nats, losses have the unit of advantages. Every function expects finite input; what lies
off the response mask is replaced before it comes here (``policy_loss``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kl import bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """What ``clipped`` returns, all [T]."""

    loss_T: Tensor
    """With gradient."""
    ratio_T: Tensor
    """pi_current / pi_old, detached."""
    clipped_T: Tensor
    """bool: the clipped branch is the greater loss, so the token has no gradient of its own."""
    dual_clipped_T: Tensor
    """bool: A < 0 and the loss was held at -c A."""


def clipped(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> ClippedLoss:
    """PPO's clipped surrogate, with separate bounds (DAPO's clip-higher) and dual clip.

    With r = pi_current / pi_old of a token (the log-ratio bounded to +-20) and A its advantage,
        l = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(l, -dual_clip A)  where A < 0 and dual_clip is set, else l.
    r is exactly 1 where the log-probs are equal. Gradient flows to current_logprobs_T alone where old and A carry none.

    Sources: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; Ye et al. 2019 (arXiv 1912.09729) for dual clip; Yu et al. 2025 (DAPO).
    Differs from the papers: the bound of the log-ratio.
    """
    ratio_T = bounded(current_logprobs_T - old_logprobs_T).exp()
    plain_T = -advantages_T * ratio_T
    held_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(plain_T, held_T)
    dual_clipped_T = torch.zeros_like(loss_T, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantages_T
        dual_clipped_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_clipped_T, ceiling_T, loss_T)
    return ClippedLoss(loss_T=loss_T, ratio_T=ratio_T.detach(), clipped_T=held_T > plain_T, dual_clipped_T=dual_clipped_T)
