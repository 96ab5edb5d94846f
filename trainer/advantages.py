"""Advantages from rewards. An estimator is a pure function here and a member of ``AdvantageConfig``.

Legend: S sequences of the whole step, over all ranks: a group must never be seen in part.
"""

from typing import assert_never

import torch
from torch import Tensor

from configs.schema.objective import AdvantageConfig, GrpoAdvantage

STD_EPSILON = 1e-6


def compute_advantages(rewards_S: Tensor, group_ids_S: Tensor, config: AdvantageConfig) -> Tensor:
    """The advantage of each sequence, by the estimator that ``config`` names. [S], [S] -> [S]

    Raises ValueError where the two do not match, and for a reward that is not finite.
    """
    if rewards_S.shape != group_ids_S.shape or rewards_S.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards_S.shape)} and group ids {tuple(group_ids_S.shape)} must both be [S], one per sequence")
    broken = (~torch.isfinite(rewards_S)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"reward of sequence {broken[0]} is {rewards_S[broken[0]].item()} ({len(broken)} such); rewards must be finite")
    match config:
        case GrpoAdvantage():
            return grpo(rewards_S, group_ids_S, normalize_by_std=config.normalize_by_std)
        case _:
            assert_never(config)


def grpo(rewards_S: Tensor, group_ids_S: Tensor, *, normalize_by_std: bool) -> Tensor:
    """A_s = r_s - mean of its group, divided by (std of its group + 1e-6) where ``normalize_by_std``. [S], [S] -> [S]

    The standard deviation is the unbiased one (n - 1). A group of one has no baseline and keeps its raw reward. Where all rewards of
    a group are equal its advantages are exactly zero. Groups are told apart by id alone; their members may stand anywhere.

    Sources: Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300); without the division: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783).
    Differs from the paper: unbiased std and the epsilon, as common implementations have it.
    """
    _, group_of_S = torch.unique(group_ids_S, return_inverse=True)
    num_groups = int(group_of_S.max()) + 1 if group_of_S.numel() else 0
    zeros = rewards_S.new_zeros(num_groups)
    sizes = zeros.index_add(0, group_of_S, torch.ones_like(rewards_S))
    # Measured from the group's least reward, equal rewards are exact zeros, whose mean is an exact zero too.
    least = zeros.scatter_reduce(0, group_of_S, rewards_S, "amin", include_self=False)
    shifted_S = rewards_S - least[group_of_S]
    centred_S = shifted_S - (zeros.index_add(0, group_of_S, shifted_S) / sizes)[group_of_S]
    advantages_S = centred_S
    if normalize_by_std:
        variance = zeros.index_add(0, group_of_S, centred_S.square()) / (sizes - 1).clamp(min=1)
        advantages_S = centred_S / (variance.sqrt() + STD_EPSILON)[group_of_S]
    return torch.where((sizes == 1)[group_of_S], rewards_S, advantages_S)
