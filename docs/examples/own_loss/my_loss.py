"""An objective, an advantage and an importance weight. Tensors carry their shape in their names (docs/notation.md)."""

import torch

LIMIT = 20.0


def objective(current_logprobs_T, old_logprobs_T, advantages_T, *, strength):
    """A spring instead of PPO's clip: -r A + strength / 2 (log r)^2 per token."""
    log_ratio_T = (current_logprobs_T - old_logprobs_T).clamp(-LIMIT, LIMIT)
    spring_T = strength / 2 * log_ratio_T.square()
    return -log_ratio_T.exp() * advantages_T + spring_T, {"spring": spring_T}


def advantage(rewards_S, group_ids_S):
    """The reward less the median of its group, which one outlier does not move."""
    _, group_of_S = group_ids_S.unique(return_inverse=True)
    advantages_S = torch.zeros_like(rewards_S)
    for group in range(int(group_of_S.max()) + 1):
        is_here_S = group_of_S == group
        advantages_S[is_here_S] = rewards_S[is_here_S] - rewards_S[is_here_S].median()
    return advantages_S


def weight(log_ratio_N, *, highest):
    """A smooth bound instead of truncation: highest * rho / (highest - 1 + rho), which is 1 where rho is 1."""
    ratio_N = log_ratio_N.clamp(-LIMIT, LIMIT).exp()
    weights_N = highest * ratio_N / (highest - 1 + ratio_N)
    return weights_N, {"above_1": weights_N > 1}
