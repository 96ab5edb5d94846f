"""One step's samples on one rank: the packed sequences, their split into micro-batches, and scalars of the whole
step.

``*_S`` here are of the *whole* step, on every rank, indexed by sequence id. ``packed`` holds this rank's
sequences alone.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from configs.schema.objective import AggregationConfig
from parallel.packing import PackedBatch
from rollout.records import Group, Trajectory
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.aggregation import GlobalCounts, aggregation_weights, units
from trainer.algorithm.correction import Correction
from trainer.algorithm.segments import count_per_sequence
from trainer.batch.exact_turns import require_exact_turns
from trainer.batch.plan import BatchPlan, pack_trajectories, packed_length, plan_batches
from trainer.ranks.totals import Total


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    packed: PackedBatch
    rows: list[list[list[int]]]
    """Minibatch -> micro-batch -> rows of ``packed``. Score and update use the same micro-batches, hence
    bitwise equal log-probs."""
    rewards_S: Tensor
    group_ids_S: Tensor
    lengths_S: Tensor | None = None
    """int64, places in a packed batch. None where this rank has the whole step."""

    def minibatches(self) -> list[list[PackedBatch]]:
        """This rank's micro-batches of each optimizer step."""
        return [[self.packed.select(rows) for rows in microbatches] for microbatches in self.rows]

    def microbatches(self) -> list[PackedBatch]:
        return [microbatch for minibatch in self.minibatches() for microbatch in minibatch]

    def with_fields(self, **tensors: Tensor) -> "StepBatch":
        """The batch with these ``_T`` fields of this rank's share set."""
        return replace(self, packed=self.packed.with_fields(**tensors))

    def scattered(self, parts: Sequence[Tensor]) -> Tensor:
        """Join one tensor per micro-batch, in the order of ``microbatches()``, to [T] of this rank's share, float32 on
        the CPU."""
        bounds = self.packed.cu_seqlens.tolist()
        out_T = torch.zeros(self.packed.num_tokens, dtype=torch.float32)
        for row, values_T in self.by_row(parts, range(len(bounds) - 1)):
            out_T[bounds[row] : bounds[row + 1]] = values_T
        return out_T

    def by_row(self, parts: Sequence[Tensor], wanted: Container[int]) -> Iterator[tuple[int, Tensor]]:
        """(row of ``packed``, its values) for the wanted rows, from one tensor per micro-batch as in ``scattered``."""
        bounds = self.packed.cu_seqlens.tolist()
        flat = (rows for minibatch in self.rows for rows in minibatch)
        for rows, part_T in zip(flat, parts, strict=True):
            part_T, start = part_T.float().cpu(), 0
            for row in rows:
                length = bounds[row + 1] - bounds[row]
                if row in wanted:
                    yield row, part_T[start : start + length]
                start += length

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

        aggregation_T is zero on rejected tokens; ``denominator`` says which tokens the mean is over. A
        correction that follows from the forward pass leaves ``importance_weights_T`` unset.
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
            counts = GlobalCounts.of(count_per_sequence(part_T, bounds_of_units)).summed(total)
            weights_T[places] = aggregation_weights(
                part_T, bounds_of_units, mode=mode, constant=config.constant, counts=counts
            )
        return weights_T


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a step: its own trajectories, and the scalars of all trajectories."""

    trajectories: list[Trajectory]
    sequence_ids: list[int]
    rows: list[list[list[int]]]
    lengths: list[int]
    """Of the whole step: places in a packed batch."""
    rewards: list[float]
    """Of the whole step. 0 where a sample is left out."""
    group_ids: list[int]
    """Of the whole step. A sample that is left out has a group of its own, so that no baseline counts it."""


def split_groups(
    groups: Sequence[Group],
    *,
    num_minibatches: int,
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int = 1,
    needs_siblings: bool = False,
) -> list[Share]:
    """One Share per data-parallel rank, by the balanced plan of ``plan_batches``.

    A sample without a score is left out: its tokens are off the response mask, so that loss, correction and metrics
    do not see them, and its group's baseline is without it.

    needs_siblings: whether advantages compare siblings. A sample whose siblings are all without a score is then left
        out too.
    """
    trajectories = [t for group in groups for t in _without_unscored(group, needs_siblings)]
    lengths = [packed_length(t.token_ids) for t in trajectories]
    plan: BatchPlan = plan_batches(
        lengths,
        num_minibatches=num_minibatches,
        sequences_per_group=len(groups[0].trajectories),
        dp_size=dp_size,
        token_budget=token_budget,
        microbatch_multiple=microbatch_multiple,
    )
    shares = []
    for rank in range(dp_size):
        ids = plan.sequence_ids(rank)
        shares.append(
            Share(
                trajectories=[trajectories[i] for i in ids],
                sequence_ids=ids,
                rows=plan.rows(rank),
                lengths=lengths,
                rewards=[t.reward or 0.0 for t in trajectories],
                group_ids=[
                    t.group_id if t.reward is not None else -1 - number
                    for number, t in enumerate(trajectories)
                ],
            )
        )
    return shares


def _without_unscored(group: Group, needs_siblings: bool) -> list[Trajectory]:
    """The group's trajectories, those that are left out without reward and response."""
    scored = sum(t.reward is not None for t in group.trajectories)
    if scored == len(group.trajectories):
        return group.trajectories
    is_alone = needs_siblings and scored == 1
    return [
        replace(t, reward=None, response_mask=np.zeros_like(t.response_mask))
        if t.reward is None or is_alone
        else t
        for t in group.trajectories
    ]


def step_batch(share: Share, *, newest: int | None = None) -> StepBatch:
    """newest: see ``pack_trajectories``.

    Raises:
        TurnsDiffer: see ``require_exact_turns``.
    """
    packed = pack_trajectories(share.trajectories, share.sequence_ids, newest=newest)
    require_exact_turns(share.trajectories, packed)
    return StepBatch(
        packed=packed,
        rows=share.rows,
        rewards_S=torch.tensor(share.rewards, dtype=torch.float32),
        group_ids_S=torch.tensor(share.group_ids, dtype=torch.int64),
        lengths_S=torch.tensor(share.lengths, dtype=torch.int64),
    )
