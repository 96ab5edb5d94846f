"""Advantages from rewards. An estimator is a pure function here and a member of ``AdvantageConfig``.

``_S`` is over the sequences of the whole step, on all ranks, since a group must always be complete. ``_E`` is
over the step's episodes; an episode that does not fork is one sequence. ``_R`` is over the parts of a reward. ``_T`` and
``_N`` are of one rank.
Rewards, values, returns and advantages have the same unit.

    by sequence (S)    grpo, gdpo, rloo, opo,         every response token gets its sequence's advantage
                       own function
    by token (T)       discounted_returns, gae        recurrences over response tokens, which skip tool tokens between them
    whiten             over the tokens of all ranks; gdpo: over the episodes of the step

With ``credit: turn`` grpo compares turns, and the recurrences get each turn's reward at its end
(``turn_rewards.py``).
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from configs.schema.objective import (
    AdvantageConfig,
    FunctionAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RlooAdvantage,
)
from parallel.packing import FLOATS, PackedBatch, require_per_token
from trainer.algorithm.inputs import require_numbers
from trainer.algorithm.kl_reward import token_rewards
from trainer.algorithm.own_parts import ADVANTAGE, call, metrics_of
from trainer.algorithm.segments import count_per_sequence, spread, sum_per_sequence
from trainer.algorithm.turn_rewards import TurnRewards, rewards_at_turns
from trainer.ranks.metrics import Metric
from trainer.ranks.totals import Total, alone

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    advantages_T: Tensor
    """Zero off the response mask, in the rewards' dtype, without gradient."""
    returns_T: Tensor | None
    """The critic's target, likewise; None for estimators without one."""
    metrics: dict[str, Metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """The parts of a weighted reward, of the whole step and the same on every rank."""

    values_SR: Tensor
    """Unweighted; the sequences of a forked episode have the same."""
    weights_R: Tensor


def compute_advantages(
    batch: PackedBatch,
    rewards_S: Tensor,
    group_ids_S: Tensor,
    config: AdvantageConfig,
    *,
    episode_ids_S: Tensor | None = None,
    turn_rewards: TurnRewards | None = None,
    reward_parts: RewardParts | None = None,
    penalty_T: Tensor | None = None,
    total: Total = alone,
) -> Advantages:
    """The advantage of each token of this rank's ``batch``, by the estimator that ``config`` names.

    ``rewards_S`` and ``group_ids_S`` are of the whole step, indexed by ``batch.sequence_ids_S``, and the same
    on every rank. ``penalty_T`` [T] is subtracted from the rewards of response tokens (the KL of
    ``kl_reward``); estimators by sequence then use the sum of a sequence's token rewards.

    ``episode_ids_S`` [S], from 0, gives the sequences of a forked episode the same id; they share one reward.
    Estimators by sequence count the episode once, and give its advantage to each of its tokens. Recurrences
    over tokens give the reward to the last token of each sequence. None: each sequence is an episode of its
    own.

    ``turn_rewards`` are those of the whole step, for ``credit: turn``. With ``credit: episode``, or if it is
    None, only ``rewards_S`` count. ``reward_parts`` are for gdpo, which reads them instead of ``rewards_S``.

    A group id below 0 marks a sample that is left out.

    The arithmetic is float64, so that the float32 results do not depend on the split over ranks.

    Every rank of ``total`` must call. Raises ValueError if shapes do not match, if a reward, value or penalty
    is not finite (naming the sequence), for gae without values, and for gdpo without parts.
    """
    _require_rewards(rewards_S, group_ids_S, batch.sequence_ids_S)
    step = _Step(batch, rewards_S, group_ids_S, episode_ids_S, turn_rewards, reward_parts, penalty_T, total)
    mask_T = batch.response_mask_T
    advantages_T, own_metrics = _estimate(config, step)
    returns_T = None
    if isinstance(config, GaeAdvantage):
        returns_T = (advantages_T + step.values_T()).to(rewards_S.dtype)
    if _is_whitened(config):
        advantages_T = whiten(advantages_T, mask_T, total)
    advantages_T = torch.where(mask_T, advantages_T, 0.0).to(rewards_S.dtype)
    metrics = own_metrics | _advantage_metrics(advantages_T, mask_T)
    return Advantages(advantages_T=advantages_T, returns_T=returns_T, metrics=metrics)


class _Step:
    """The rewards of the whole step in float64, by episode and by token of this rank."""

    def __init__(
        self,
        batch: PackedBatch,
        rewards_S: Tensor,
        group_ids_S: Tensor,
        episode_ids_S: Tensor | None,
        turn_rewards: TurnRewards | None,
        reward_parts: RewardParts | None,
        penalty_T: Tensor | None,
        total: Total,
    ):
        self._batch, self._group_ids_S, self._total = batch, group_ids_S, total
        self._reward_parts = reward_parts
        self.mask_T, self.cu_seqlens = batch.response_mask_T, batch.cu_seqlens
        self._rewards_S = rewards_S.to(torch.float64)
        self._episode_of_S = torch.arange(len(rewards_S)) if episode_ids_S is None else episode_ids_S
        self.turn_rewards = turn_rewards
        self.groups_E = _one_per_episode(group_ids_S, self._episode_of_S)
        self.rewards_E = _one_per_episode(self._rewards_S, self._episode_of_S)
        """The rewards of episodes, less the penalties of their tokens."""
        self._penalty_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
        if penalty_T is not None:
            self._penalty_T = _response_values("penalty_T", penalty_T, batch)
            self.rewards_E -= self._of_episodes(sum_per_sequence(self._penalty_T, self.cu_seqlens))

    def lengths_E(self) -> Tensor:
        """Response tokens of each episode."""
        return self._of_episodes(count_per_sequence(self.mask_T, self.cu_seqlens))

    def to_tokens(self, x_E: Tensor) -> Tensor:
        """Every token of this rank gets its episode's value."""
        return spread(x_E[self._episode_of_S[self._batch.sequence_ids_S]], self.cu_seqlens)

    def rewards_T(self) -> Tensor:
        """The reward at each turn's or sequence's end, less the penalty on every response token."""
        if self.turn_rewards is not None:
            return self._at_turns(self.turn_rewards, self.turn_rewards.rewards_V)
        rewards_S = self._rewards_S[self._batch.sequence_ids_S]
        return token_rewards(rewards_S, self._penalty_T, self.mask_T, self.cu_seqlens)

    def grpo_of_turns(self, turns: TurnRewards, *, normalize_by_std: bool) -> Tensor:
        """GRPO over a group's turns. A token gets the sum over the turns that end with it or later."""
        groups_V = self._group_ids_S[turns.sequence_ids_V]
        credits_V = grpo(turns.rewards_V.to(torch.float64), groups_V, normalize_by_std=normalize_by_std)
        return discounted_returns(self._at_turns(turns, credits_V), self.mask_T, self.cu_seqlens, gamma=1.0)

    def gdpo_of_parts(self) -> Tensor:
        """GDPO's advantages of episodes."""
        if self._reward_parts is None:
            raise ValueError("`advantage: gdpo` needs the parts of a reward of type weighted")
        values_SR = self._reward_parts.values_SR.to(torch.float64)
        values_ER = torch.stack([_one_per_episode(v_S, self._episode_of_S) for v_S in values_SR.T], dim=1)
        return gdpo(values_ER, self._reward_parts.weights_R, self.groups_E)

    def values_T(self) -> Tensor:
        """The critic's, 0 off the response mask."""
        if self._batch.values_T is None:
            raise ValueError(
                "`advantage: gae` needs values_T: configure a `critic:` and let it score the batch first"
            )
        return _response_values("values_T", self._batch.values_T, self._batch)

    def _of_episodes(self, here_S: Tensor) -> Tensor:
        """Sums over the sequences of each episode, on all ranks. ``here_S`` has this rank's sequences."""
        sums_E = torch.zeros(len(self.groups_E), dtype=torch.float64)
        episodes_S = self._episode_of_S[self._batch.sequence_ids_S]
        return self._total(sums_E.index_add(0, episodes_S, here_S.to(torch.float64)))

    def _at_turns(self, turns: TurnRewards, values_V: Tensor) -> Tensor:
        return rewards_at_turns(values_V, turns, self._batch, self._episode_of_S, self._penalty_T)


def _estimate(config: AdvantageConfig, step: _Step) -> tuple[Tensor, dict[str, Metric]]:
    """The estimator's advantages [T] in float64, before whitening, and the metrics of the user's function."""
    match config:
        case GrpoAdvantage(normalize_by_std=by_std) if step.turn_rewards is not None:
            return step.grpo_of_turns(step.turn_rewards, normalize_by_std=by_std), {}
        case GrpoAdvantage(normalize_by_std=by_std):
            return step.to_tokens(grpo(step.rewards_E, step.groups_E, normalize_by_std=by_std)), {}
        case GdpoAdvantage():
            return step.to_tokens(step.gdpo_of_parts()), {}
        case ReinforcePlusPlusBaselineAdvantage():
            return step.to_tokens(grpo(step.rewards_E, step.groups_E, normalize_by_std=False)), {}
        case RlooAdvantage():
            return step.to_tokens(rloo(step.rewards_E, step.groups_E)), {}
        case OpoAdvantage():
            return step.to_tokens(opo(step.rewards_E, step.groups_E, step.lengths_E())), {}
        case FunctionAdvantage():
            advantages_E, recorded = call(
                ADVANTAGE, config, step.rewards_E, step.groups_E, lengths_S=step.lengths_E
            )
            return step.to_tokens(advantages_E.detach()), metrics_of(ADVANTAGE, recorded)
        case ReinforcePlusPlusAdvantage(gamma=gamma):
            return discounted_returns(step.rewards_T(), step.mask_T, step.cu_seqlens, gamma=gamma), {}
        case GaeAdvantage(gamma=gamma, lam=lam):
            values_T = step.values_T()
            return gae(step.rewards_T(), values_T, step.mask_T, step.cu_seqlens, gamma=gamma, lam=lam), {}
        case _:
            assert_never(config)


def _is_whitened(config: AdvantageConfig) -> bool:
    match config:
        case ReinforcePlusPlusAdvantage() | ReinforcePlusPlusBaselineAdvantage():
            return True
        case GaeAdvantage(whiten=whiten):
            return whiten
        case _:
            return False


def grpo(rewards_S: Tensor, group_ids_S: Tensor, *, normalize_by_std: bool) -> Tensor:
    """A_s = r_s - mean of its group, divided by (std of its group + 1e-6) where ``normalize_by_std``. [S],
    [S] -> [S]

    The standard deviation is the unbiased one (n - 1). A group of one has no baseline and keeps its raw
    reward. A group of equal rewards has advantages of exactly zero. The members of a group may lie anywhere.

    Sources: Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300); without the division: Liu et al. 2025 (Dr.
    GRPO, arXiv 2503.20783). Differs from the paper: unbiased std and the epsilon, as in common implementations.
    """
    group_of_S = _group_of(group_ids_S)
    sizes_S = _group_sizes(group_of_S)
    advantages_S = _less_baseline(rewards_S, torch.ones_like(rewards_S), group_of_S)
    if normalize_by_std:
        # A group of one has variance 1 - 1 = 0 over n - 1 = 0; its advantage is replaced below.
        variance_S = _group_sum(advantages_S.square(), group_of_S) / (sizes_S - 1).clamp(min=1)
        advantages_S = advantages_S / (variance_S.sqrt() + STD_EPSILON)
    return torch.where(sizes_S == 1, rewards_S, advantages_S)


def gdpo(parts_SR: Tensor, weights_R: Tensor, group_ids_S: Tensor) -> Tensor:
    """A_s = (x_s - mean x) / sqrt(variance of x + 1e-8) with x_s = sum_k w_k grpo(r_k)_s, r_k the k-th part of the reward.
    [S, R], [R], [S] -> [S]

    ``grpo`` is the one above, divided by the standard deviation. Mean and unbiased variance are over all samples of the step but
    those that are left out (group ids below 0), which get 0.

    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242). Differs from the paper: unbiased deviations and the epsilons.
    """
    of_parts = [grpo(part_S, group_ids_S, normalize_by_std=True) for part_S in parts_SR.T]
    sums_S = torch.stack(of_parts, dim=1) @ weights_R.to(parts_SR.dtype)
    return whiten(sums_S, group_ids_S >= 0, alone)


def rloo(rewards_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """A_s = r_s - mean of its siblings' rewards = n / (n - 1) (r_s - mean of its group of n). [S], [S] -> [S]

    A group of one keeps its raw reward, a group of equal rewards has exact zeros.

    Source: Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free!"); for language models
    Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    sizes_S = _group_sizes(_group_of(group_ids_S)).to(rewards_S.dtype)
    return grpo(rewards_S, group_ids_S, normalize_by_std=False) * sizes_S / (sizes_S - 1).clamp(min=1)


def opo(rewards_S: Tensor, group_ids_S: Tensor, lengths_S: Tensor) -> Tensor:
    """A_s = r_s - sum_i(l_i r_i) / sum_i l_i over its group, l the number of response tokens. [S], [S], [S]
    -> [S]

    This baseline has the least gradient variance if a sequence's squared gradient norm grows with its length.
    A group of one keeps its raw reward, a group of equal rewards has exact zeros. A group without response
    tokens has no weights; its result is finite but meaningless.

    Source: Hao et al. 2025 (arXiv 2505.23585), which leaves groups of one open.
    """
    group_of_S = _group_of(group_ids_S)
    advantages_S = _less_baseline(rewards_S, lengths_S.to(rewards_S.dtype), group_of_S)
    return torch.where(_group_sizes(group_of_S) == 1, rewards_S, advantages_S)


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_t', t' the next response token of the sequence, 0 after the last; 0 off the mask.
    [T] -> [T]

    Whitened, they are REINFORCE++'s advantages. Source: Hu 2025 (arXiv 2501.03262).
    """
    returns_N = _discounted_sums(rewards_T[mask_T], _tokens_left(mask_T, cu_seqlens), gamma)
    return torch.zeros_like(rewards_T).masked_scatter(mask_T, returns_N)


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """A_t = d_t + gamma lam A_t' with d_t = r_t + gamma V_t' - V_t, t' the next response token; 0 off the
    mask. [T] -> [T]

    V and A are 0 after a sequence's last response token: a response that was cut off at its length limit is
    not bootstrapped. Advantages plus values are the returns that the critic learns from.

    Source: Schulman et al. 2016 (arXiv 1506.02438). Differs from it: time counts only response tokens, so
    gamma and lam skip the tokens between them.
    """
    left_N = _tokens_left(mask_T, cu_seqlens)
    rewards_N, values_N = rewards_T[mask_T], values_T[mask_T]
    next_values_N = torch.where(left_N > 0, values_N.roll(-1), 0.0)
    advantages_N = _discounted_sums(rewards_N + gamma * next_values_N - values_N, left_N, gamma * lam)
    return torch.zeros_like(rewards_T).masked_scatter(mask_T, advantages_N)


def whiten(x_T: Tensor, mask_T: Tensor, total: Total) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the valid places of all ranks, unbiased variance (n - 1); 0 off
    the mask. [T] -> [T]

    Equal values, or a single one, become zeros (up to the rounding of the mean).
    """
    # Mean first: a sum of squares less the squared sum loses the digits of a small spread around a large mean.
    kept_T = torch.where(mask_T, x_T.to(torch.float64), 0.0)
    count, total_x = total(torch.stack([mask_T.sum().to(torch.float64), kept_T.sum()]))
    centred_T = torch.where(mask_T, kept_T - total_x / count.clamp(min=1), 0.0)
    variance = total(centred_T.square().sum()) / (count - 1).clamp(min=1)
    return (centred_T * (variance + VARIANCE_EPSILON).rsqrt()).to(x_T.dtype)


def _one_per_episode(x_S: Tensor, episode_of_S: Tensor) -> Tensor:
    """[S] -> [E], for values that all sequences of an episode share."""
    x_E = x_S.new_zeros(int(episode_of_S.max()) + 1 if len(x_S) else 0)
    return x_E.index_put((episode_of_S,), x_S)


def _group_of(group_ids_S: Tensor) -> Tensor:
    return torch.unique(group_ids_S, return_inverse=True)[1]


def _group_sum(x_S: Tensor, group_of_S: Tensor) -> Tensor:
    """Every sequence gets the sum over its group."""
    return torch.zeros_like(x_S).index_add(0, group_of_S, x_S)[group_of_S]


def _group_sizes(group_of_S: Tensor) -> Tensor:
    return _group_sum(torch.ones_like(group_of_S), group_of_S)


def _less_baseline(rewards_S: Tensor, weights_S: Tensor, group_of_S: Tensor) -> Tensor:
    """Reward minus the weighted mean of its group; exactly zero where a group's rewards are equal."""
    zeros_S = torch.zeros_like(rewards_S)
    least_S = zeros_S.scatter_reduce(0, group_of_S, rewards_S, "amin", include_self=False)[group_of_S]
    # After subtracting the group's smallest reward, equal rewards are exact zeros, and so is their mean.
    shifted_S = rewards_S - least_S
    weight_S = _group_sum(weights_S, group_of_S).clamp(min=1)
    return shifted_S - _group_sum(weights_S * shifted_S, group_of_S) / weight_S


def _tokens_left(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of response tokens that follow each response token in its sequence, int64 [N]."""
    counts_S = count_per_sequence(mask_T, cu_seqlens)
    ends_N = counts_S.cumsum(0).repeat_interleave(counts_S)
    return ends_N - 1 - torch.arange(ends_N.numel(), device=ends_N.device)


def _discounted_sums(x_N: Tensor, left_N: Tensor, decay: float) -> Tensor:
    """y_n = x_n + decay y_(n+1) within each sequence, by doubling: log2(longest) passes over all tokens.

    After k passes y_n is the sum of its first 2^k terms. The order of a sequence's sum does not depend on its
    batch.
    """
    y_N, span = x_N.clone(), 1
    longest = int(left_N.max()) if left_N.numel() else 0
    while span <= longest:
        later_N = y_N[span:].masked_fill(left_N[:-span] < span, 0.0)
        y_N[:-span].add_(later_N, alpha=decay**span)
        span *= 2
    return y_N


def _advantage_metrics(advantages_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    return {
        "advantage/mean": Metric.mean(advantages_T, mask_T),
        "advantage/std": Metric.std(advantages_T, mask_T),
        "advantage/min": Metric.min(advantages_T, mask_T),
        "advantage/max": Metric.max(advantages_T, mask_T),
    }


def _require_rewards(rewards_S: Tensor, group_ids_S: Tensor, sequence_ids_S: Tensor) -> None:
    if rewards_S.shape != group_ids_S.shape or rewards_S.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards_S.shape)} and group ids {tuple(group_ids_S.shape)} must both be [S], one per sequence"
        )
    if rewards_S.dtype not in FLOATS:
        raise ValueError(
            f"rewards are {str(rewards_S.dtype).removeprefix('torch.')}; pass float32, which advantages are rounded to"
        )
    beyond = sequence_ids_S[(sequence_ids_S < 0) | (sequence_ids_S >= rewards_S.numel())].tolist()
    if beyond:
        raise ValueError(
            f"sequence {beyond[0]} of the batch has no reward: {rewards_S.numel()} rewards; pass those of the whole step"
        )
    broken = (~torch.isfinite(rewards_S)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"reward of sequence {broken[0]} is {rewards_S[broken[0]].item()} ({len(broken)} such); rewards must be finite"
        )


def _response_values(name: str, x_T: Tensor, batch: PackedBatch) -> Tensor:
    """float64 [T], detached, 0 off the response mask. Raises ValueError for one that is not finite there."""
    require_per_token(name, x_T, batch.num_tokens)
    require_numbers(batch, name, x_T)
    return torch.where(batch.response_mask_T, x_T.detach().to(torch.float64), 0.0)
