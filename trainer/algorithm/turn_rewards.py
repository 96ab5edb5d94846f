"""Rewards of turns (``advantage.credit: turn``): the place of each in the packed tokens, and the credit of
each turn.

``_V`` is over all turn rewards of the whole step, ``_E`` over its episodes. An episode's reward is the sum of
its turns' rewards.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.packing import PackedBatch
from trainer.algorithm.kl_reward import token_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """The turn rewards of the whole step, the same on every rank."""

    rewards_V: Tensor
    """In the dtype of the episodes' rewards."""
    sequence_ids_V: Tensor
    """int64: the sequence of the turn."""
    places_V: Tensor
    """int64: the packed place of the turn's last token, from the start of its sequence."""


def rewards_at_turns(
    values_V: Tensor, turns: TurnRewards, batch: PackedBatch, episode_of_S: Tensor, penalty_T: Tensor
) -> Tensor:
    """r_t = sum of the values of the turns that end at t - penalty_t on response tokens of this rank, 0 elsewhere.
    [V], [S], [T] -> [T]

    The last response token of a sequence also gets the values of the other sequences of its episode, so each
    sequence of a forked episode has the whole reward.

    ``values_V`` are the rewards, or an estimator's values for them.
    """
    values_V = values_V.to(torch.float64)
    own_S = torch.zeros(len(episode_of_S), dtype=torch.float64).index_add(0, turns.sequence_ids_V, values_V)
    # At most as many episodes as sequences. In the order of the sequences' own sums, so that a sequence without a
    # fork gets exactly 0 from others.
    whole_E = torch.zeros_like(own_S).index_add(0, episode_of_S[turns.sequence_ids_V], values_V)
    of_others_S = whole_E[episode_of_S] - own_S

    ids_S = batch.sequence_ids_S
    rewards_T = token_rewards(of_others_S[ids_S], penalty_T, batch.response_mask_T, batch.cu_seqlens)
    row_of_S = torch.full_like(episode_of_S, -1)
    row_of_S[ids_S] = torch.arange(len(ids_S))
    rows_V = row_of_S[turns.sequence_ids_V]
    is_here_V = rows_V >= 0
    places = batch.cu_seqlens[rows_V[is_here_V]] + turns.places_V[is_here_V]
    return rewards_T.index_add(0, places, values_V[is_here_V])
