"""Rewards per token: the score at a response's end, less a penalty on every response token (KL in the reward).

Rewards and penalties have the same unit.
"""

import torch
from torch import Tensor

from configs.schema.objective import AdaptiveController, Estimator, KLConfig
from parallel.packing import PackedBatch
from trainer.algorithm.inputs import require_numbers
from trainer.algorithm.kl import ESTIMATORS, adaptive_coefficient
from trainer.algorithm.segments import count_per_sequence
from trainer.ranks.metrics import Metric
from trainer.ranks.totals import Total


def kl_to_reference(batch: PackedBatch, estimator: Estimator) -> Tensor:
    """The estimate of KL(old || ref) of each response token, 0 on all others. [T], nats, without gradient

    The penalty is this estimate times the coefficient; an adaptive controller measures the estimate's mean
    over response tokens. Raises ValueError if old or ref log-probs are missing, and if one of a response
    token is not finite, or above 0.
    """
    if batch.old_logprobs_T is None or batch.ref_logprobs_T is None:
        raise ValueError(
            "KL in the reward needs old_logprobs_T and ref_logprobs_T: score the batch with learner and reference first"
        )
    for name in ("old_logprobs_T", "ref_logprobs_T"):
        require_numbers(batch, name)
    kl_T = ESTIMATORS[estimator](batch.old_logprobs_T.detach(), batch.ref_logprobs_T.detach())
    return torch.where(batch.response_mask_T, kl_T, 0.0)


def token_rewards(rewards_S: Tensor, penalty_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """r_t = [t is its sequence's last response token] * score - penalty_t on response tokens, 0 elsewhere.
    [S], [T] -> [T]

    Off the mask the penalty does not matter, not even NaN. The score of a sequence without response tokens is
    lost.

    Source: Ziegler et al. 2019 (arXiv 1909.08593) eq. 2, with the penalty spread over its tokens.
    """
    rewards_T = torch.where(mask_T, -penalty_T, 0.0)
    counts_S = count_per_sequence(mask_T, cu_seqlens)
    answered_S = counts_S > 0
    last = mask_T.nonzero().flatten()[(counts_S.cumsum(0) - 1)[answered_S]]
    rewards_T[last] += rewards_S[answered_S]
    return rewards_T


class KLInReward:
    """The KL term of the reward (``kl.place: reward``), with a coefficient that may follow the measured KL."""

    def __init__(self, config: KLConfig):
        self._config = config
        self.coefficient = config.coefficient if config.in_reward else 0.0
        """Applied to the next step."""

    @property
    def state(self) -> float | None:
        """The coefficient for a checkpoint; None if no controller changes it."""
        return self.coefficient if self._is_adaptive else None

    def load_state(self, state: float | None) -> None:
        """Continue from a checkpoint's ``state``. Without a controller the coefficient stays the config's."""
        if self._is_adaptive and state is not None:
            self.coefficient = state

    @property
    def _is_adaptive(self) -> bool:
        return isinstance(self._config.controller, AdaptiveController)

    def penalty(
        self, batch: PackedBatch, *, num_samples: int, total: Total, trains_policy: bool = True
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """coefficient * KL_t of each token; None without such a term. Afterwards the controller updates the
        coefficient.

        num_samples: samples of the whole step; an episode that forked is one. Every rank of ``total`` must call.
        trains_policy: whether the step updates the policy. If it does not, as in the critic's warm-up, the
        coefficient stays as it is: no update would reduce the KL, and the coefficient would drift far from a
        useful value. It also stays if all responses are masked, and no KL is measured.
        """
        if self.coefficient == 0:
            return None, {}
        kl_T = kl_to_reference(batch, self._config.estimator)
        sums = torch.stack([kl_T.sum(dtype=torch.float64), batch.response_mask_T.sum().to(torch.float64)])
        kl_sum, tokens = total(sums).tolist()
        measured, penalty_T = kl_sum / max(tokens, 1), self.coefficient * kl_T
        metrics = {
            "policy/kl_coefficient": Metric.quotient(self.coefficient, 1),
            "policy/kl_in_reward": Metric.quotient(measured, 1),
        }
        match self._config.controller:
            case AdaptiveController(target=target, horizon=horizon) if trains_policy and tokens:
                self.coefficient = adaptive_coefficient(
                    self.coefficient, measured, target=target, horizon=horizon, num_samples=num_samples
                )
        return penalty_T, metrics
