"""One step's samples on one rank: the packed sequences, their split into micro-batches, and scalars of the whole
step.

``*_S`` here are of the *whole* step, on every rank, indexed by sequence id. ``packed`` holds this rank's
sequences alone.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from configs.schema.objective import AggregationConfig
from parallel.packing import PackedBatch, same_prompts
from rollout.records import LOGPROBS, MASK, VERSIONS, Group, Trajectory
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.aggregation import GlobalCounts, aggregation_weights, units
from trainer.algorithm.correction import Correction
from trainer.algorithm.segments import count_per_sequence
from trainer.algorithm.turn_rewards import TurnRewards
from trainer.batch.exact_turns import require_exact_turns
from trainer.batch.plan import BatchPlan, Prompts, Routing, pack_trajectories, packed_length, plan_batches
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
    """int64, from 0. None: each sequence is an episode of its own, as without forks."""
    turn_rewards: TurnRewards | None = None
    """Of the whole step. None: ``credit: episode``."""
    lengths_S: Tensor | None = None
    """int64, places in a packed batch. None where this rank has the whole step."""
    group_sizes: tuple[int, ...] = ()
    """Sequences of each group. Empty where this rank has the whole step."""

    @property
    def num_episodes(self) -> int:
        """Of the whole step."""
        return len(self.rewards_S) if self.episode_ids_S is None else int(self.episode_ids_S.max()) + 1

    def per_episode(self, x_S: Tensor, total: Total, rows: Sequence[int] | None = None) -> Tensor:
        """Sums over the sequences of each episode of the step, on all ranks. [S] of these rows (None: all of this
        rank) -> [E]"""
        sums_E = torch.zeros(self.num_episodes, dtype=torch.float64)
        return total(sums_E.index_add_(0, self.episodes_of(rows), x_S.to(sums_E)))

    def episodes_of(self, rows: Sequence[int] | None = None) -> Tensor:
        """The episode of each of these rows (None: of all)."""
        numbers = self.packed.sequence_ids_S if rows is None else self.packed.sequence_ids_S[rows]
        return numbers if self.episode_ids_S is None else self.episode_ids_S[numbers]

    def first_sequences(self) -> Tensor:
        """The number of each episode's first sequence. [E]"""
        if self.episode_ids_S is None:
            return torch.arange(len(self.rewards_S))
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

    def scattered(self, parts: Sequence[Tensor]) -> Tensor:
        """Join one tensor per micro-batch, in the order of ``microbatches()``, to [T, ...] of this rank's share, on the
        CPU."""
        bounds = self.packed.cu_seqlens.tolist()
        out_T = torch.zeros((self.packed.num_tokens, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for row, values_T in self.by_row(parts, range(len(bounds) - 1)):
            out_T[bounds[row] : bounds[row + 1]] = values_T
        return out_T

    def by_row(self, parts: Sequence[Tensor], wanted: Container[int]) -> Iterator[tuple[int, Tensor]]:
        """(row of ``packed``, its values) for the wanted rows, from one tensor per micro-batch as in ``scattered``."""
        bounds = self.packed.cu_seqlens.tolist()
        flat = (rows for minibatch in self.rows for rows in minibatch)
        for rows, part_T in zip(flat, parts, strict=True):
            part_T, start = part_T.cpu(), 0
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
            tokens_S = count_per_sequence(part_T, bounds_of_units)
            if self.episode_ids_S is None or mode != config.type:  # turns are counted each by itself
                counts, tokens_S = GlobalCounts.of(tokens_S).summed(total), None
            else:
                tokens_E = self.per_episode(tokens_S, total, rows)
                counts, tokens_S = GlobalCounts.of(tokens_E), tokens_E[self.episodes_of(rows)]
            weights_T[places] = aggregation_weights(
                part_T, bounds_of_units, mode=mode, constant=config.constant, counts=counts, tokens_S=tokens_S
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
    episode_ids: list[int]
    """Of the whole step, from 0. The sequences of a sample that forked have one."""
    group_sizes: list[int]
    """Sequences of each group, without those that fill up a minibatch."""
    turn_rewards: TurnRewards | None = None
    """Of the whole step."""


def split_groups(
    groups: Sequence[Group],
    *,
    num_minibatches: int,
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int = 1,
    needs_siblings: bool = False,
    credits_turns: bool = False,
    shares_prompts: bool = False,
) -> list[Share]:
    """One Share per data-parallel rank, by the balanced plan of ``plan_batches``. Minibatch i is the i-th run of
    whole groups.

    A sample without a score is left out: its tokens are off the response mask, so that loss, correction and metrics
    do not see them, and its group's baseline is without it.

    needs_siblings: whether advantages compare siblings. A sample whose siblings are all without a score is then left
        out too.
    credits_turns: whether advantages are of turns, so that ``turn_rewards`` are needed.
    shares_prompts: whether the model computes a prompt once for the sequences of a micro-batch that begin with it.

    Raises:
        ValueError: the groups do not divide into minibatches, or a sequence is longer than the budget.
    """
    if len(groups) % num_minibatches:
        raise ValueError(
            f"{len(groups)} groups do not divide into {num_minibatches} minibatches; change learner.minibatches"
        )
    by_group = [_without_unscored(group, needs_siblings) for group in groups]
    trajectories, minibatches = _minibatches(
        by_group, len(groups) // num_minibatches, multiple=dp_size * microbatch_multiple
    )
    lengths = [packed_length(t.token_ids) for t in trajectories]
    plan: BatchPlan = plan_batches(
        lengths,
        minibatches=minibatches,
        dp_size=dp_size,
        token_budget=token_budget,
        microbatch_multiple=microbatch_multiple,
        prompts=_prompts(trajectories) if shares_prompts else None,
    )
    episodes = _episode_ids(trajectories)
    rewards_of_turns = turn_rewards(trajectories, episodes) if credits_turns else None
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
                    t.group_id if t.reward is not None else -1 - episode
                    for t, episode in zip(trajectories, episodes, strict=True)
                ],
                episode_ids=episodes,
                group_sizes=[len(group) for group in by_group],
                turn_rewards=rewards_of_turns,
            )
        )
    return shares


def _prompts(trajectories: Sequence[Trajectory]) -> Prompts:
    ids, lengths = same_prompts([t.token_ids for t in trajectories], [t.response_mask for t in trajectories])
    return Prompts(ids_S=ids, lengths_S=lengths)


def _minibatches(
    by_group: Sequence[Sequence[Trajectory]], groups_each: int, *, multiple: int
) -> tuple[list[Trajectory], list[list[int]]]:
    """(sequences of the step, the numbers of each minibatch's). Forks make minibatches uneven: they are filled up to
    the multiple with sequences that are numbered last."""
    trajectories = [t for group in by_group for t in group]
    bounds = [0, *accumulate(len(group) for group in by_group)]
    minibatches = [
        list(range(bounds[first], bounds[first + groups_each]))
        for first in range(0, len(by_group), groups_each)
    ]
    for minibatch in minibatches:
        for _ in range(-len(minibatch) % multiple):
            trajectories.append(_without_response(trajectories[minibatch[0]]))
            minibatch.append(len(trajectories) - 1)
    return trajectories, minibatches


def _without_response(trajectory: Trajectory) -> Trajectory:
    """The beginning of a sequence, as a further one of its sample. It has nothing to train on."""
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:2],
        response_mask=np.zeros(2, dtype=MASK),
        rollout_logprobs=np.zeros(2, dtype=LOGPROBS),
        token_versions=np.zeros(2, dtype=VERSIONS),
        experts=None,
        is_replayed=None,
        num_kept=None,
        kept_ids=None,
        turns=[],
        branch=-1,
    )


def _episode_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault((t.group_id, t.sibling_id), len(numbers)) for t in trajectories]


def turn_rewards(trajectories: Sequence[Trajectory], episode_ids: Sequence[int]) -> TurnRewards:
    """What each turn has earned, of the samples with a score. The last turn of an episode's first sequence has what no
    turn has earned, if only 0: an episode has one reward at least."""
    rows: list[tuple[float, int, int]] = []
    unearned = dict[int, float]()
    for trajectory, episode in zip(trajectories, episode_ids, strict=True):
        if trajectory.reward is not None:
            earned = sum(turn.reward or 0.0 for turn in trajectory.turns)
            unearned[episode] = unearned.get(episode, trajectory.reward) - earned
    for sequence, (trajectory, episode) in enumerate(zip(trajectories, episode_ids, strict=True)):
        for number, turn in enumerate(trajectory.turns, start=1):
            rest = unearned.pop(episode, None) if number == len(trajectory.turns) else None
            if trajectory.reward is not None and (turn.reward is not None or rest is not None):
                # A packed place holds the token after it.
                rows.append(((turn.reward or 0.0) + (rest or 0.0), sequence, turn.end - 2))
    rewards, sequences, places = zip(*rows, strict=True) if rows else ((), (), ())
    return TurnRewards(
        rewards_V=torch.tensor(rewards, dtype=torch.float32),
        sequence_ids_V=torch.tensor(sequences, dtype=torch.int64),
        places_V=torch.tensor(places, dtype=torch.int64),
    )


def _without_unscored(group: Group, needs_siblings: bool) -> list[Trajectory]:
    """The group's trajectories, those that are left out without reward and response."""
    scored = {t.sibling_id for t in group.trajectories if t.reward is not None}
    siblings = {t.sibling_id for t in group.trajectories}
    if scored == siblings:
        return group.trajectories
    is_alone = needs_siblings and len(scored) == 1
    return [
        replace(t, reward=None, response_mask=np.zeros_like(t.response_mask))
        if t.reward is None or is_alone
        else t
        for t in group.trajectories
    ]


def step_batch(
    share: Share, *, newest: int | None = None, routing: Routing | None = None, share_prompts: bool = False
) -> StepBatch:
    """newest, routing, share_prompts: see ``pack_trajectories``.

    Raises:
        TurnsDiffer: see ``require_exact_turns``.
    """
    packed = pack_trajectories(
        share.trajectories,
        share.sequence_ids,
        newest=newest,
        routing=routing,
        share_prompts=share_prompts,
    )
    require_exact_turns(share.trajectories, packed)
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
    )
