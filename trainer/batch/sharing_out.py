"""Divides the samples of a step over data-parallel ranks. Pure; the ranks pack their shares themselves
(``step_batch.py``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from parallel.packing import same_prompts
from rollout.records import (
    LOGPROBS,
    MASK,
    VERSIONS,
    FinishReason,
    Group,
    Status,
    Trajectory,
    different_rewards,
)
from trainer.algorithm.advantages import RewardParts
from trainer.algorithm.turn_rewards import TurnRewards
from trainer.batch.plan import Prompts, packed_length, plan_batches


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
    """Of the whole step. A sample that is left out has its own group, so that no baseline counts it."""
    episode_ids: list[int]
    """Of the whole step, from 0. The sequences of a forked sample have the same id."""
    group_sizes: list[int]
    """Sequences of each group, without those that fill up a minibatch."""
    turn_rewards: TurnRewards | None = None
    """Of the whole step."""
    reward_parts: RewardParts | None = None
    """Of the whole step."""
    masked: frozenset[int] = frozenset()
    """Of the whole step: numbers of the sequences whose tokens do not enter the loss, though their rewards count."""


def share_out(
    groups: Sequence[Group],
    *,
    num_minibatches: int,
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int = 1,
    needs_siblings: bool = False,
    credits_turns: bool = False,
    part_weights: Mapping[str, float] | None = None,
    shares_prompts: bool = False,
    parts_no_signal: bool = False,
    masks_truncated: bool = False,
) -> list[Share]:
    """One Share of a step's groups per data-parallel rank, by the balanced plan of ``plan_batches``.

    A sample without a score is left out: its tokens are off the response mask, so loss, correction and
    metrics do not see them, and its group's baseline does not count it. A masked sample differs in that the baseline
    counts it; each rank masks its own sequences after packing (``step_batch``).

    Args:
        num_minibatches: minibatch i is the i-th run of whole groups.
        token_budget: of a micro-batch.
        microbatch_multiple: the number of each rank's micro-batches in a minibatch is a multiple of this.
        needs_siblings: whether advantages compare siblings. A sample whose siblings are all without a score is then left
            out too.
        credits_turns: whether advantages are of turns, so that ``turn_rewards`` are needed.
        part_weights: of the parts of the reward, if advantages need these parts.
        shares_prompts: whether the model computes a prompt once for the sequences of a micro-batch that begin with it.
        parts_no_signal: whether groups of which all rewards are equal, and masked sequences, are packed apart.
        masks_truncated: whether truncated samples are masked.

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
    masked = _truncated(trajectories) if masks_truncated else frozenset()
    lengths = [packed_length(t.token_ids) for t in trajectories]
    plan = plan_batches(
        lengths,
        minibatches=minibatches,
        dp_size=dp_size,
        token_budget=token_budget,
        microbatch_multiple=microbatch_multiple,
        prompts=_prompts(trajectories) if shares_prompts else None,
        apart=_without_signal(by_group) | masked if parts_no_signal else frozenset(),
    )
    numbers: dict[tuple[int, int], int] = {}
    episodes = [numbers.setdefault((t.group_id, t.sibling_id), len(numbers)) for t in trajectories]
    # Data of the whole step is one object for all ranks, of which there may be hundreds.
    of_step = partial(
        Share,
        lengths=lengths,
        rewards=[t.reward or 0.0 for t in trajectories],
        group_ids=[
            t.group_id if t.reward is not None else -1 - episode
            for t, episode in zip(trajectories, episodes, strict=True)
        ],
        episode_ids=episodes,
        group_sizes=[len(group) for group in by_group],
        turn_rewards=turn_rewards(trajectories, episodes) if credits_turns else None,
        reward_parts=None if part_weights is None else reward_parts(trajectories, part_weights),
        masked=masked,
    )
    sequence_ids = [plan.sequence_ids(rank) for rank in range(dp_size)]
    return [
        of_step(trajectories=[trajectories[i] for i in own], sequence_ids=own, rows=plan.rows(rank))
        for rank, own in enumerate(sequence_ids)
    ]


def _without_signal(by_group: Sequence[Sequence[Trajectory]]) -> frozenset[int]:
    """The numbers of the sequences of groups whose scored samples all have the same reward."""
    rewards = [different_rewards(group) for group in by_group]
    of_group = [len(values) <= 1 for values, group in zip(rewards, by_group, strict=True) for _ in group]
    return frozenset(number for number, is_flat in enumerate(of_group) if is_flat)


def _truncated(trajectories: Sequence[Trajectory]) -> frozenset[int]:
    """The numbers of all sequences of truncated samples: a limit of tokens cut off the last turn of the first
    sequence, or the episode."""
    truncated = {
        (t.group_id, t.sibling_id)
        for t in trajectories
        if t.branch == 0 and (t.finish_reason == FinishReason.LENGTH or t.status == Status.TOKEN_LIMIT)
    }
    return frozenset(n for n, t in enumerate(trajectories) if (t.group_id, t.sibling_id) in truncated)


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


def turn_rewards(trajectories: Sequence[Trajectory], episode_ids: Sequence[int]) -> TurnRewards:
    """The reward of each turn, for the samples with a score. The last turn of an episode's first sequence
    gets the part of the episode's reward that no turn earned, even if it is 0: an episode has at least one
    reward."""
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
                # A packed place predicts the token after it.
                rows.append(((turn.reward or 0.0) + (rest or 0.0), sequence, turn.end - 2))
    rewards, sequences, places = zip(*rows, strict=True) if rows else ((), (), ())
    return TurnRewards(
        rewards_V=torch.tensor(rewards, dtype=torch.float32),
        sequence_ids_V=torch.tensor(sequences, dtype=torch.int64),
        places_V=torch.tensor(places, dtype=torch.int64),
    )


def reward_parts(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> RewardParts:
    """The parts of each sequence's reward; 0 for samples without a score."""
    rows = [[t.reward_parts[name] if t.reward is not None else 0.0 for name in weights] for t in trajectories]
    return RewardParts(
        values_SR=torch.tensor(rows, dtype=torch.float64),
        weights_R=torch.tensor(list(weights.values()), dtype=torch.float64),
    )


def _without_unscored(group: Group, needs_siblings: bool) -> list[Trajectory]:
    """The group's trajectories; those that are left out have no reward and no response."""
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
