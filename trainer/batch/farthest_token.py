"""Describes the sampled token on which learner and servers differ most: an error that ends a run names it."""

import math
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch.step_batch import StepBatch

Measure = Literal["abs_prob_max", "logprob_gap_max"]
"""The metric whose greatest value is searched: |p - p'| or |log p - log p'|."""


def farthest_token(
    batch: StepBatch, learner_T: Tensor | None, group: dist.ProcessGroup | None, measure: Measure
) -> str:
    """Over all ranks of the data-parallel group, which call it together; the same on each.

    learner_T: the learner's log-probs of this rank's share. Of tokens with lags, those with lag 0 are compared, as for
    ``SampledGap``.
    """
    assert learner_T is not None  # a gap was measured
    everyone = [_farthest_here(batch, learner_T, measure)]
    if group is not None:
        mine, everyone = everyone[0], everyone * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    return max(everyone)[1]


def _farthest_here(batch: StepBatch, learner_T: Tensor, measure: Measure) -> tuple[float, str]:
    """(distance, its token). A distance of NaN counts as infinite; -1 if this rank has no token."""
    packed = batch.packed
    is_compared_T = packed.response_mask_T
    if packed.lag_T is not None:
        is_compared_T = is_compared_T & (packed.lag_T == 0)
    places_N = is_compared_T.nonzero()[:, 0]
    if not len(places_N):
        return -1.0, ""
    values_2N = torch.stack([learner_T, packed.rollout_logprobs_T])[:, places_N].double()
    learner_N, server_N = values_2N.exp() if measure == "abs_prob_max" else values_2N
    gap_N = (learner_N - server_N).abs().nan_to_num(nan=math.inf)
    farthest = int(gap_N.argmax())
    learner, server = values_2N[:, farthest].tolist()
    place = int(places_N[farthest])
    row = int(torch.searchsorted(packed.cu_seqlens, place, right=True)) - 1
    number, start = int(packed.sequence_ids_S[row]), int(packed.cu_seqlens[row])
    group = int(batch.group_ids_S[number])
    token = int(packed.response_mask_T[start:place].sum())
    return gap_N[farthest].item(), (
        f"group {group}, sibling {_sibling(batch, number)}, response token {token} (from 0): log-prob {learner:.9g} by the learner, "
        f"{server:.9g} by the server"
    )


def _sibling(batch: StepBatch, number: int) -> int:
    """The number of the sequence's episode among those of its group, including those without a score."""
    episodes_S = torch.arange(len(batch.group_ids_S)) if batch.episode_ids_S is None else batch.episode_ids_S
    bounds = [0, *accumulate(batch.group_sizes)]
    start, end = next(pair for pair in pairwise(bounds) if number < pair[1])
    return int(torch.searchsorted(episodes_S[start:end].unique(), episodes_S[number]))
