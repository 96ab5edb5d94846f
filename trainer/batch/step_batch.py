"""One step's samples on one rank: the packed sequences, their split into micro-batches, and scalars of the whole
step.

``*_S`` here are of the *whole* step, on every rank, indexed by sequence id. ``packed`` holds this rank's
sequences alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import AggregationConfig
from parallel.packing import PackedBatch
from trainer.algorithm.advantages import Advantages, RewardParts
from trainer.algorithm.aggregation import GlobalCounts, aggregation_weights, units
from trainer.algorithm.correction import Correction
from trainer.algorithm.segments import count_per_sequence, spread
from trainer.algorithm.turn_rewards import TurnRewards
from trainer.batch.exact_turns import require_exact_turns
from trainer.batch.plan import Routing, pack_trajectories
from trainer.batch.sharing_out import Share
from trainer.ranks.totals import Total


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    packed: PackedBatch
    rows: list[list[list[int]]]
    """Minibatch -> micro-batch -> rows of ``packed``. Score and update use the same micro-batches, hence
    bitwise equal log-probs."""
    rewards_S: Tensor
    group_ids_S: Tensor
    episode_ids_S: Tensor | None = None
    """int64, from 0. None: each sequence is a separate episode, since nothing forked."""
    turn_rewards: TurnRewards | None = None
    """Of the whole step. None: ``credit: episode``."""
    reward_parts: RewardParts | None = None
    """None: the advantages do not need them."""
    lengths_S: Tensor | None = None
    """int64, places in a packed batch. None if this rank has the whole step."""
    group_sizes: tuple[int, ...] = ()
    """Sequences of each group. Empty if this rank has the whole step."""
    masked: frozenset[int] = frozenset()
    """See ``Share``. Their tokens are off the response mask."""

    @property
    def num_episodes(self) -> int:
        """Of the whole step."""
        return len(self.rewards_S) if self.episode_ids_S is None else int(self.episode_ids_S.max()) + 1

    def per_episode(self, x_S: Tensor, total: Total, rows: Sequence[int] | None = None) -> Tensor:
        """Sums over the sequences of each episode of a step with forks, on all ranks. [S] of these rows (None: all of this
        rank) -> [E]"""
        sums_E = torch.zeros(self.num_episodes, dtype=torch.float64)
        return total(sums_E.index_add_(0, self.episodes_of(rows), x_S.to(sums_E)))

    def episodes_of(self, rows: Sequence[int] | None = None) -> Tensor:
        """The episode of each of these rows (None: of all), in a step with forks."""
        assert self.episode_ids_S is not None
        return self.episode_ids_S[
            self.packed.sequence_ids_S if rows is None else self.packed.sequence_ids_S[rows]
        ]

    def first_sequences(self) -> Tensor:
        """The number of each episode's first sequence, in a step with forks. [E]"""
        assert self.episode_ids_S is not None
        numbers_S = torch.arange(len(self.episode_ids_S))
        return torch.zeros(self.num_episodes, dtype=torch.int64).scatter_reduce(
            0, self.episode_ids_S, numbers_S, "amin", include_self=False
        )

    def minibatches(self) -> list[list[PackedBatch]]:
        """This rank's micro-batches of each optimizer step."""
        return [[self.packed.select(rows) for rows in microbatches] for microbatches in self.rows]

    def microbatches(self) -> list[PackedBatch]:
        return [microbatch for minibatch in self.minibatches() for microbatch in minibatch]

    def with_fields(self, **tensors: Tensor) -> "StepBatch":
        """The batch with these ``_T`` fields of this rank's share set."""
        return replace(self, packed=self.packed.with_fields(**tensors))

    def with_old_of(self, correction: CorrectionConfig) -> "StepBatch":
        """In bypass mode ``old`` is the rollout. In decoupled mode the batch stays as it is."""
        if correction.mode == "decoupled":
            return self
        return self.with_fields(old_logprobs_T=self.packed.rollout_logprobs_T)

    def scattered(self, parts: Sequence[Tensor]) -> Tensor:
        """Join one tensor per micro-batch, in the order of ``microbatches()``, to [T, ...] of this rank's share, on the
        CPU."""
        bounds = self.packed.cu_seqlens.tolist()
        out_T = torch.zeros((self.packed.num_tokens, *parts[0].shape[1:]), dtype=parts[0].dtype)
        flat = (rows for minibatch in self.rows for rows in minibatch)
        for rows, part_T in zip(flat, parts, strict=True):
            values = part_T.cpu().split([bounds[row + 1] - bounds[row] for row in rows])
            for row, values_T in zip(rows, values, strict=True):
                out_T[bounds[row] : bounds[row + 1]] = values_T
        return out_T

    def with_advantages(self, advantages: Advantages) -> "StepBatch":
        returns = {} if advantages.returns_T is None else {"returns_T": advantages.returns_T}
        return self.with_fields(advantages_T=advantages.advantages_T, **returns)

    def with_loss_weights(
        self,
        correction: Correction,
        aggregation: AggregationConfig,
        denominator: Literal["kept", "all"],
        total: Total,
    ) -> "StepBatch":
        """Set ``importance_weights_T`` and ``aggregation_T``, with a critic's values also ``value_aggregation_T``,
        from counts of each minibatch over all ranks.

        aggregation_T is zero on rejected tokens; ``denominator`` says over which tokens the mean is. If the
        loss computes the correction in its forward pass, ``importance_weights_T`` stays unset.
        """
        mask_T, keep_T = self.packed.response_mask_T, correction.keep_T
        counted_T = keep_T if denominator == "kept" else mask_T
        fields = {
            "importance_weights_T": None if correction.weights_T is None else correction.weights_T.float(),
            "aggregation_T": self._aggregation(counted_T, aggregation, total) * keep_T,
        }
        if self.packed.values_T is not None:  # all ranks have a critic, or none
            fields["value_aggregation_T"] = self._aggregation(mask_T, aggregation, total)
        return self.with_fields(**fields)

    def _aggregation(self, counted_T: Tensor, config: AggregationConfig, total: Total) -> Tensor:
        weights_T = torch.zeros(self.packed.num_tokens, dtype=torch.float32)
        bounds = self.packed.cu_seqlens.tolist()
        for microbatches in self.rows:
            rows = [row for microbatch in microbatches for row in microbatch]
            places = torch.cat([torch.arange(bounds[r], bounds[r + 1]) for r in rows])
            lengths = [0, *(bounds[r + 1] - bounds[r] for r in rows)]
            cu_seqlens = torch.tensor(lengths).cumsum(0).to(torch.int32)
            part_T = counted_T[places]
            mode, bounds_of_units = units(config.type, self.packed.response_mask_T[places], cu_seqlens)
            tokens_S = count_per_sequence(part_T, bounds_of_units)
            if self.episode_ids_S is None or mode != config.type:  # each turn counts by itself
                counts, tokens_S = GlobalCounts.of(tokens_S).summed(total), None
            else:
                tokens_E = self.per_episode(tokens_S, total, rows)
                counts, tokens_S = GlobalCounts.of(tokens_E), tokens_E[self.episodes_of(rows)]
            weights_T[places] = aggregation_weights(
                part_T, bounds_of_units, mode=mode, constant=config.constant, counts=counts, tokens_S=tokens_S
            )
        return weights_T


def step_batch(
    share: Share, *, newest: int | None = None, routing: Routing | None = None, share_prompts: bool = False
) -> StepBatch:
    """newest, routing, share_prompts: see ``pack_trajectories``.

    Raises:
        TurnsDiffer: see ``require_exact_turns``.
    """
    packed = pack_trajectories(
        share.trajectories, share.sequence_ids, newest=newest, routing=routing, share_prompts=share_prompts
    )
    require_exact_turns(share.trajectories, packed)
    if share.masked:
        is_trained_S = torch.tensor([number not in share.masked for number in share.sequence_ids])
        is_trained_T = spread(is_trained_S, packed.cu_seqlens)
        packed = packed.with_fields(response_mask_T=packed.response_mask_T & is_trained_T)
    has_forks = len(set(share.episode_ids)) < len(share.episode_ids)
    return StepBatch(
        packed=packed,
        rows=share.rows,
        rewards_S=torch.tensor(share.rewards, dtype=torch.float32),
        group_ids_S=torch.tensor(share.group_ids, dtype=torch.int64),
        episode_ids_S=torch.tensor(share.episode_ids, dtype=torch.int64) if has_forks else None,
        lengths_S=torch.tensor(share.lengths, dtype=torch.int64),
        group_sizes=tuple(share.group_sizes),
        turn_rewards=share.turn_rewards,
        reward_parts=share.reward_parts,
        masked=share.masked,
    )
