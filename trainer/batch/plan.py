"""The plan that splits a step's sequences into minibatches, ranks and micro-batches. Pure arithmetic.

Sequences of the whole step are numbered 0..S-1. Lengths are places in a packed
batch (``packed_length``: one less than the tokens). The same lengths give the same plan anywhere.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from parallel.packing import PackedBatch, pack_sequences
from parallel.planning.work import COPIED
from rollout.records import COUNTS, MASK, TOKEN_IDS, Trajectory

Bin = tuple[int, ...]
"""Sequences that are packed together, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Shape and dtype of the experts that are replayed."""

    layers: int
    """Layers with experts."""
    experts_per_token: int
    dtype: str
    """uint8 or int16"""

    def experts_of(self, trajectory: Trajectory) -> np.ndarray:
        """[n, L, K]; zeros for tokens whose experts are unknown. Raises ValueError for experts of another
        shape or dtype."""
        shape = (len(trajectory.token_ids), self.layers, self.experts_per_token)
        if trajectory.experts is None:
            return np.zeros(shape, dtype=self.dtype)
        found = (trajectory.experts.shape, trajectory.experts.dtype.name)
        if found != (shape, self.dtype):
            raise ValueError(
                f"prompt {trajectory.prompt_id}, sibling {trajectory.sibling_id} has experts of the shape {found[0]} in {found[1]}, the "
                f"model {shape} in {self.dtype}; sample role and learner must have the same model"
            )
        return trajectory.experts

    def is_replayed(self, trajectory: Trajectory) -> np.ndarray:
        known = trajectory.is_replayed
        return np.zeros(len(trajectory.token_ids), dtype=MASK) if known is None else known


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of S sequences. Each prompt is computed once for its sequences in a micro-batch
    (``PackedBatch.prompt_ids_S``)."""

    ids_S: Sequence[int]
    lengths_S: Sequence[int]

    def units(self, part: Sequence[int], size: int) -> list[Bin]:
        """The sequences of ``part``, in runs of at most ``size`` with one prompt."""
        of_prompt: dict[int, list[int]] = {}
        for s in part:
            of_prompt.setdefault(self.ids_S[s], []).append(s)
        return [
            tuple(members[first : first + size])
            for members in of_prompt.values()
            for first in range(0, len(members), size)
        ]

    def load(self, unit: Bin, lengths_S: Sequence[int]) -> int:
        """Places that sequences with one prompt take in the model. If there are several, each also counts
        ``COPIED`` of the prompt's places: attention copies its keys and values, which are kept for
        backward."""
        prompt, copies = self.lengths_S[unit[0]], len(unit) if len(unit) > 1 else 0
        return prompt + sum(lengths_S[s] - prompt for s in unit) + math.ceil(COPIED * copies * prompt)


EVEN_ENOUGH = 1.02
"""The search for a split ends when the fullest rank's load is at most this multiple of an even share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The split of a step's batch. Every sequence is in exactly one micro-batch."""

    microbatches: tuple[tuple[tuple[Bin, ...], ...], ...]
    """[minibatch][rank][micro-batch]. In a minibatch every rank has the same number of micro-batches, largest
    first, and after them those of sequences that are packed apart."""

    def sequence_ids(self, rank: int) -> list[int]:
        """This rank's sequences in the order in which it packs them: by minibatch, then micro-batch."""
        return [s for minibatch in self.microbatches for microbatch in minibatch[rank] for s in microbatch]

    def rows(self, rank: int) -> list[list[list[int]]]:
        """[minibatch][micro-batch] -> rows of the batch that packs ``sequence_ids(rank)`` in that order."""
        row_of = {s: row for row, s in enumerate(self.sequence_ids(rank))}
        return [
            [[row_of[s] for s in microbatch] for microbatch in minibatch[rank]]
            for minibatch in self.microbatches
        ]


def plan_batches(
    lengths_S: Sequence[int],
    *,
    minibatches: Sequence[Sequence[int]],
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int = 1,
    prompts: Prompts | None = None,
    apart: Collection[int] = frozenset(),
) -> BatchPlan:
    """Split S sequences into ranks and micro-batches of at most ``token_budget`` tokens.

    prompts: of sequences that share them. A shared prompt counts once and a little more (``Prompts.load``), and
    sequences with one prompt stay together as far as ranks stay even. None: each sequence counts by itself.

    apart: sequences that get their own micro-batches, at the end of each rank's, as far as they divide by the
    ranks.

    ``minibatches`` has the numbers of each minibatch's sequences, so an optimizer step's data depends on neither
    ``dp_size`` nor the budget. They fill ``dp_size * k`` micro-batches, which are dealt to ranks, k each. k is the
    least multiple of ``microbatch_multiple`` for which one of two packings succeeds:

    - longest first, each to the emptiest micro-batch: ranks and micro-batches then differ by at most the
      longest sequence;
    - longest first, each to the first micro-batch that has room, which packs tighter but less evenly. This
      needs at most 11/9 of the fewest micro-batches possible, plus 6/9 (Dosa 2007, first fit decreasing);
      finding the fewest is NP-hard.

    No micro-batch is empty: a minibatch's sequences divide by ``dp_size``, and each rank's by the multiple
    (the stages of an interleaved pipeline), so k is at most its sequences per rank.

    Raises ValueError for an empty sequence or one longer than the budget, and for a minibatch whose number of
    sequences is 0, or does not divide by ``dp_size`` times the multiple.
    """
    _check_inputs(lengths_S, minibatches, dp_size, token_budget, microbatch_multiple)
    multiple = dp_size * microbatch_multiple
    minibatches_by_rank = []
    for minibatch in minibatches:
        splits = [
            _split_minibatch(part, lengths_S, prompts, dp_size, token_budget, microbatch_multiple)
            for part in _parted(minibatch, apart, multiple)
        ]
        of_ranks = zip(*splits, strict=True)
        minibatches_by_rank.append(tuple(tuple(b for bins in hand for b in bins) for hand in of_ranks))
    return BatchPlan(microbatches=tuple(minibatches_by_rank))


def _parted(minibatch: Sequence[int], apart: Collection[int], multiple: int) -> list[list[int]]:
    """The sequences of a minibatch and then those that are packed apart, each a multiple of ``multiple``; all
    in one part if the other would be empty."""
    alone = [s for s in minibatch if s in apart]
    alone = alone[: len(alone) - len(alone) % multiple]
    chosen = set(alone)
    rest = [s for s in minibatch if s not in chosen]
    return [rest, alone] if rest and alone else [list(minibatch)]


def packed_length(token_ids: Sequence[int] | np.ndarray) -> int:
    """Places of a sequence in a packed batch."""
    return len(token_ids) - 1


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    sequence_ids: Sequence[int],
    *,
    newest: int | None = None,
    routing: Routing | None = None,
    share_prompts: bool = False,
) -> PackedBatch:
    """One rank's trajectories end to end, in their order; ``sequence_ids`` number them within the whole step.

    newest: the learner's version, from which ``lag_T`` counts; None: without it. routing: of experts that are
    replayed; None: without them. share_prompts: see ``pack_sequences``.

    Raises ValueError for a trajectory whose arrays are not aligned with its tokens, or that predicts nothing.
    """
    for sequence_id, t in zip(sequence_ids, trajectories, strict=True):
        if not len(t.token_ids) == len(t.response_mask) == len(t.rollout_logprobs):
            raise ValueError(
                f"sequence {sequence_id} (prompt {t.prompt_id}, sibling {t.sibling_id}) has {len(t.token_ids)} tokens, "
                f"{len(t.response_mask)} mask entries and {len(t.rollout_logprobs)} log-probs; one of each per token is needed"
            )
    return pack_sequences(
        token_ids=[t.token_ids for t in trajectories],
        response_masks=[t.response_mask for t in trajectories],
        rollout_logprobs=[t.rollout_logprobs for t in trajectories],
        sequence_ids=sequence_ids,
        lags=None if newest is None else [_lags(t, newest) for t in trajectories],
        experts=None if routing is None else [routing.experts_of(t) for t in trajectories],
        is_replayed=None if routing is None else [routing.is_replayed(t) for t in trajectories],
        share_prompts=share_prompts,
        **_kept(trajectories),
    )


def pack_prompted(
    token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sequence_ids: Sequence[int]
) -> PackedBatch:
    """Sequences end to end that no server has scored: all tokens after the prompt are the response's."""
    responses = [[range(p, len(ids))] for p, ids in zip(prompt_lengths, token_ids, strict=True)]
    return pack_responses(token_ids, responses, sequence_ids)


def pack_responses(
    token_ids: Sequence[Sequence[int]], responses: Sequence[Sequence[range]], sequence_ids: Sequence[int]
) -> PackedBatch:
    """Sequences end to end that no server has scored. responses: places of each sequence's response tokens."""
    masks = [np.zeros(len(ids), dtype=MASK) for ids in token_ids]
    for mask, places in zip(masks, responses, strict=True):
        for turn in places:
            mask[turn.start : turn.stop] = True
    return pack_sequences(
        token_ids=token_ids,
        response_masks=masks,
        rollout_logprobs=[[0.0] * len(ids) for ids in token_ids],
        sequence_ids=sequence_ids,
    )


def _kept(trajectories: Sequence[Trajectory]) -> dict[str, list[np.ndarray]]:
    """The kept sets, if any sequence has some. A sequence without a response has none."""
    if all(t.num_kept is None for t in trajectories):
        return {}
    num_kept = [
        np.zeros(len(t.token_ids), dtype=COUNTS) if t.num_kept is None else t.num_kept for t in trajectories
    ]
    kept_ids = [np.zeros(0, dtype=TOKEN_IDS) if t.kept_ids is None else t.kept_ids for t in trajectories]
    return {"num_kept": num_kept, "kept_ids": kept_ids}


def _lags(trajectory: Trajectory, newest: int) -> np.ndarray:
    return np.where(trajectory.response_mask, newest - trajectory.token_versions, 0).astype(np.int16)


def _check_inputs(
    lengths_S: Sequence[int],
    minibatches: Sequence[Sequence[int]],
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int,
) -> None:
    for name, value in {"dp_size": dp_size, "microbatch_multiple": microbatch_multiple}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for sequences in map(len, minibatches):
        if not sequences:
            raise ValueError("a minibatch has no sequences; use fewer minibatches")
        if sequences % dp_size:
            fewer, more = sequences - sequences % dp_size, sequences - sequences % dp_size + dp_size
            raise ValueError(
                f"a minibatch of {sequences} sequences does not divide by {dp_size} data-parallel ranks; "
                f"use {f'{fewer} or ' if fewer else ''}{more} sequences, or other minibatches or ranks"
            )
        if (sequences // dp_size) % microbatch_multiple:
            raise ValueError(
                f"a rank's {sequences // dp_size} sequences of a minibatch do not divide by the {microbatch_multiple} stages "
                f"of an interleaved pipeline; use a multiple of {dp_size * microbatch_multiple} sequences per minibatch, or layout.vpp=1"
            )
    if min(lengths_S) < 1:
        shortest = min(lengths_S)
        raise ValueError(
            f"sequence {list(lengths_S).index(shortest)} has packed length {shortest}: it predicts nothing; drop it"
        )
    longest = max(lengths_S)
    if longest > token_budget:
        raise ValueError(
            f"sequence {list(lengths_S).index(longest)} takes {longest} tokens, more than token_budget={token_budget}; "
            f"raise the budget to at least {longest}, or use shorter sequences"
        )


def _split_minibatch(
    part: Sequence[int],
    lengths_S: Sequence[int],
    prompts: Prompts | None,
    dp_size: int,
    token_budget: int,
    microbatch_multiple: int,
) -> tuple[tuple[Bin, ...], ...]:
    """Micro-batches of one minibatch, by rank."""
    if prompts is None:
        prompts = Prompts(ids_S=range(len(lengths_S)), lengths_S=[0] * len(lengths_S))
    # Large units share most prompts, small units split most evenly. The best split gives the fullest rank the
    # least load. Single sequences, tried last, always fit.
    best, least = None, 0.0
    size = max(Counter(prompts.ids_S[s] for s in part).values())
    while best is None or (size and best[0] > EVEN_ENOUGH * least):
        units = prompts.units(part, size)
        loads = [prompts.load(unit, lengths_S) for unit in units]
        least = least or sum(loads) / dp_size
        split = _split_units(units, loads, dp_size, token_budget, microbatch_multiple)
        if split is not None and (best is None or split[0] < best[0]):
            best = split
        size //= 2
    return best[1]


_Split = tuple[int, tuple[tuple[Bin, ...], ...]]
"""(load of the fullest rank, [rank][micro-batch] -> sequences)"""


def _split_units(
    units: Sequence[Bin], loads: Sequence[int], dp_size: int, token_budget: int, microbatch_multiple: int
) -> _Split | None:
    """Micro-batches of whole units. None if a unit is longer than the budget, or if there are too few units
    for the ranks."""
    if max(loads) > token_budget:
        return None
    longest_first = sorted(range(len(units)), key=lambda u: (-loads[u], u))
    # The least number of micro-batches, by the tokens and by the units that fit into one. The most is one per
    # unit, for which the emptiest-first packing succeeds.
    fewest = max(-(-sum(loads) // token_budget), -(-len(units) // (token_budget // min(loads))))
    num_each = -(-fewest // (dp_size * microbatch_multiple)) * microbatch_multiple
    while num_each * dp_size <= len(units):
        for first_fit in (False, True):
            bins = _fill_bins(longest_first, loads, num_each * dp_size, token_budget, first_fit=first_fit)
            if bins is not None:
                hands = _deal_to_ranks(bins, loads, dp_size)
                most = max(sum(_load(b, loads) for b in hand) for hand in hands)
                return most, tuple(tuple(_sequences(b, units) for b in hand) for hand in hands)
        num_each += microbatch_multiple
    return None


def _sequences(chosen: Bin, units: Sequence[Bin]) -> Bin:
    return tuple(sorted(s for unit in chosen for s in units[unit]))


def _fill_bins(
    order: Sequence[int], lengths_S: Sequence[int], num_bins: int, token_budget: int, *, first_fit: bool
) -> list[Bin] | None:
    """Put sequences, longest first, into the emptiest bin, or with ``first_fit`` into the first with room; None if one
    does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = np.zeros(num_bins, dtype=np.int64)
    for s in order:
        has_room = loads <= token_budget - lengths_S[s]
        if not has_room.any():
            return None
        chosen = int(has_room.argmax() if first_fit else loads.argmin())
        bins[chosen].append(s)
        loads[chosen] += lengths_S[s]
    # Each empty bin gets the shortest of the fullest with two or more: there are no more bins than sequences.
    by_load = sorted(range(num_bins), key=loads.tolist().__getitem__, reverse=True)
    for empty in (b for b in bins if not b):
        empty.append(next(bins[b] for b in by_load if len(bins[b]) > 1).pop())
    return [tuple(sorted(b)) for b in bins]


def _deal_to_ranks(
    bins: Sequence[Bin], lengths_S: Sequence[int], dp_size: int
) -> tuple[tuple[Bin, ...], ...]:
    """Deal micro-batches to ranks in rounds, largest first, each round's largest to the rank with least so far.

    A round leaves ranks no further apart than they were, or than its micro-batches are. Ranks therefore never
    differ by more than micro-batches do.
    """
    ordered = sorted(bins, key=lambda b: (-_load(b, lengths_S), b))
    hands: list[list[Bin]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for start in range(0, len(ordered), dp_size):
        ranks = sorted(range(dp_size), key=lambda r: (loads[r], r))
        for rank, dealt in zip(ranks, ordered[start : start + dp_size], strict=True):
            hands[rank].append(dealt)
            loads[rank] += _load(dealt, lengths_S)
    return tuple(tuple(hand) for hand in hands)


def _load(sequences: Bin, lengths_S: Sequence[int]) -> int:
    return sum(lengths_S[s] for s in sequences)
