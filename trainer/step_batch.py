"""One step's samples on one rank: the packed sequences, the plan that splits them, and what is known of the whole batch.

Legend: S sequences, T packed tokens. ``*_S`` here are of the *whole* step, on every rank, indexed by sequence id; ``packed``
holds this rank's sequences alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema.objective import AggregationConfig
from parallel.packing import PackedBatch
from rollout.records import Group, Trajectory
from trainer.aggregation import GlobalCounts, aggregation_weights, count_valid
from trainer.batching import BatchPlan, pack_trajectories, plan_batches
from trainer.correction import Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    packed: PackedBatch
    rows: list[list[list[int]]]
    """Minibatch -> micro-batch -> rows of ``packed``. Score and update use the same micro-batches, hence bitwise equal log-probs."""
    rewards_S: Tensor
    group_ids_S: Tensor

    def minibatches(self) -> list[list[PackedBatch]]:
        """Per optimizer step, this rank's micro-batches."""
        return [[self.packed.select(rows) for rows in microbatches] for microbatches in self.rows]

    def microbatches(self) -> list[PackedBatch]:
        return [microbatch for minibatch in self.minibatches() for microbatch in minibatch]

    def with_scores(self, **scores: Sequence[Tensor] | None) -> "StepBatch":
        """Set ``old_logprobs_T`` or ``ref_logprobs_T`` from one tensor per micro-batch, in the order of ``microbatches()``."""
        fields = {name: self._scatter(parts) for name, parts in scores.items() if parts is not None}
        return replace(self, packed=self.packed.with_fields(**fields))

    def _scatter(self, parts: Sequence[Tensor]) -> Tensor:
        bounds = self.packed.cu_seqlens.tolist()
        out_T = torch.zeros(self.packed.num_tokens, dtype=torch.float32)
        flat = (rows for minibatch in self.rows for rows in minibatch)
        for rows, part_T in zip(flat, parts, strict=True):
            part_T, start = part_T.float().cpu(), 0
            for row in rows:
                length = bounds[row + 1] - bounds[row]
                out_T[bounds[row] : bounds[row + 1]] = part_T[start : start + length]
                start += length
        return out_T

    def with_advantages(self, advantages_S: Tensor) -> "StepBatch":
        """Every token of a sequence gets its sequence's advantage (S of the whole step)."""
        lengths = torch.diff(self.packed.cu_seqlens).to(torch.int64)
        advantages_T = advantages_S[self.packed.sequence_ids_S].to(torch.float32).repeat_interleave(lengths)
        return replace(self, packed=self.packed.with_fields(advantages_T=advantages_T))

    def with_loss_weights(self, correction: Correction, config: AggregationConfig, group: dist.ProcessGroup | None) -> "StepBatch":
        """loss_weights_T = aggregation_T * w_T * keep_T, normalised by counts of each minibatch over all ranks of ``group``."""
        aggregation_T = torch.zeros(self.packed.num_tokens, dtype=torch.float32)
        bounds = self.packed.cu_seqlens.tolist()
        for microbatches in self.rows:
            rows = [row for microbatch in microbatches for row in microbatch]
            part = self.packed.select(rows)
            counts = sum_counts(count_valid(part.response_mask_T, part.cu_seqlens), group)
            places = torch.cat([torch.arange(bounds[r], bounds[r + 1]) for r in rows])
            aggregation_T[places] = aggregation_weights(
                part.response_mask_T, part.cu_seqlens, mode=config.type, constant=config.constant, counts=counts
            )
        loss_weights_T = aggregation_T * correction.weights_T * correction.keep_T
        return replace(self, packed=self.packed.with_fields(aggregation_T=aggregation_T, loss_weights_T=loss_weights_T))


def sum_counts(counts: GlobalCounts, group: dist.ProcessGroup | None) -> GlobalCounts:
    """Counts over all ranks of ``group``; None means that this rank holds everything."""
    if group is None or dist.get_world_size(group) == 1:
        return counts
    everyone: list[GlobalCounts | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, counts, group=group)
    return GlobalCounts(tokens=sum(c.tokens for c in everyone), sequences=sum(c.sequences for c in everyone))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank is sent of a step: its own trajectories, and the scalars of all of them."""

    trajectories: list[Trajectory]
    sequence_ids: list[int]
    rows: list[list[list[int]]]
    rewards: list[float]
    group_ids: list[int]


def split_groups(groups: Sequence[Group], *, num_minibatches: int, dp_size: int, token_budget: int) -> list[Share]:
    """One Share per data-parallel rank, by the balanced plan of ``plan_batches``."""
    trajectories = [t for group in groups for t in group.trajectories]
    plan: BatchPlan = plan_batches(
        [len(t.token_ids) - 1 for t in trajectories],
        num_minibatches=num_minibatches,
        sequences_per_group=len(groups[0].trajectories),
        dp_size=dp_size,
        token_budget=token_budget,
    )
    shares = []
    for rank in range(dp_size):
        ids = plan.sequence_ids(rank)
        shares.append(
            Share(
                trajectories=[trajectories[i] for i in ids],
                sequence_ids=ids,
                rows=plan.rows(rank),
                rewards=[t.reward for t in trajectories],
                group_ids=[t.group_id for t in trajectories],
            )
        )
    return shares


def step_batch(share: Share) -> StepBatch:
    return StepBatch(
        packed=pack_trajectories(share.trajectories, share.sequence_ids),
        rows=share.rows,
        rewards_S=torch.tensor(share.rewards, dtype=torch.float32),
        group_ids_S=torch.tensor(share.group_ids, dtype=torch.int64),
    )
