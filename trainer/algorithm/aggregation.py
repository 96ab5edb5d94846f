"""Averages of per-token losses: every mode is a weight per token, from counts of the whole minibatch.

The counts are global. The plain sum ``(loss_T * aggregation_T).sum()``, added up over micro-batches and ranks,
is therefore the mode's mean over the minibatch under every split.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.segments import count_per_sequence, spread
from trainer.ranks.totals import Total, alone

Mode = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_over_constant",
]
Averaging = Mode | Literal["turn_mean"]
"""The config's mode."""


def units(mode: Averaging, response_mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Mode, Tensor]:
    """(mode, boundaries) by which the functions below average.

    ``turn_mean`` is ``sequence_mean_token_mean`` over turns instead of sequences: the mean over turns of each
    turn's mean. A turn is a run of response tokens, even if some of them are rejected. Its part of the batch
    begins with the run, or with its sequence, and ends where the next part begins.
    """
    if mode != "turn_mean":
        return mode, cu_seqlens
    begins_T = response_mask_T.clone()
    begins_T[1:] &= ~response_mask_T[:-1]
    starts = cu_seqlens.to(device=begins_T.device, dtype=torch.int64)
    begins_T[starts[:-1]] = True  # two turns of neighbouring sequences may touch
    bounds = torch.cat([begins_T.nonzero().flatten(), starts[-1:]])
    return "sequence_mean_token_mean", bounds.to(cu_seqlens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Counts of one minibatch over all ranks. Counts of parts add up to those of the whole."""

    tokens: int
    """Valid (response) tokens."""
    sequences: int
    """Sequences with at least one valid token."""

    @classmethod
    def of(cls, tokens_S: Tensor) -> "GlobalCounts":
        """Counts from each sequence's number of valid tokens."""
        return cls(tokens=int(tokens_S.sum()), sequences=int(torch.count_nonzero(tokens_S)))

    def summed(self, total: Total) -> "GlobalCounts":
        """The counts over all ranks. float64 holds integers up to 2^53 exactly."""
        tokens, sequences = total(torch.tensor([self.tokens, self.sequences], dtype=torch.float64)).tolist()
        return GlobalCounts(tokens=int(tokens), sequences=int(sequences))


def aggregation_weights(
    response_mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: Mode,
    constant: int | None,
    counts: GlobalCounts,
    tokens_S: Tensor | None = None,
) -> Tensor:
    """The weight of each token, float32 [T], on the mask's device; zero off the mask.

    With N = counts.tokens, M = counts.sequences, and n the valid tokens of the token's own sequence:
        token_mean                             1 / N
        sequence_mean_token_mean               1 / (M n)
        sequence_mean_token_sum                1 / M
        sequence_mean_token_sum_over_constant  1 / (M constant)   (Dr. GRPO, arXiv 2503.20783)
    An episode that forked counts as one sequence: ``tokens_S`` [S] then has the valid tokens of each
    sequence's episode, over all ranks, and counts.sequences is the number of episodes. None: each sequence's
    own tokens. Without any valid token all weights are zero. Differs from common code: a sequence without
    valid tokens does not count in M. Weights are rounded once, from float64, so they are bitwise the same
    under every split.

    Raises ValueError for an unknown mode, a constant that is missing or below 1, and an N or M below the count
    of this part.
    """
    in_part, in_all = torch.count_nonzero(response_mask_T).item(), counts.tokens
    if mode == "token_mean":
        weights = response_mask_T.new_ones((), dtype=torch.float64) / max(counts.tokens, 1)
    else:
        if tokens_S is None:
            tokens_S = count_per_sequence(response_mask_T, cu_seqlens)
            in_part, in_all = torch.count_nonzero(tokens_S).item(), counts.sequences
        weights = _sequence_weights(tokens_S, mode=mode, constant=constant, counts=counts)
    if in_part > in_all:
        raise ValueError(
            f"{counts} is not global: {mode} finds {in_part} in this part only; sum GlobalCounts over all ranks and parts"
        )
    weights = weights.to(torch.float32)
    return torch.where(response_mask_T, spread(weights, cu_seqlens) if weights.dim() else weights, 0.0)


def _sequence_weights(tokens_S: Tensor, *, mode: Mode, constant: int | None, counts: GlobalCounts) -> Tensor:
    """Weight of one valid token, float64 [S]. A count of 0, which no valid token sees, becomes a divisor of 1."""
    ones_S = torch.ones_like(tokens_S, dtype=torch.float64)
    sequences = max(counts.sequences, 1)
    match mode:
        case "sequence_mean_token_mean":
            return ones_S / (sequences * tokens_S.clamp(min=1))
        case "sequence_mean_token_sum":
            return ones_S / sequences
        case "sequence_mean_token_sum_over_constant":
            if constant is None or constant < 1:
                raise ValueError(
                    f"mode {mode} needs a constant of at least 1, got {constant}; set aggregation.constant"
                )
            return ones_S / (sequences * constant)
    raise ValueError(f"unknown aggregation mode {mode!r}; choose one of {', '.join(Mode.__args__)}")


class Counted(NamedTuple):
    """Number of tokens or of sequences of a micro-batch, as the aggregation counts."""

    all: int
    kept: int


def over_kept(
    aggregation_T: Tensor, keep_T: Tensor, response_mask_T: Tensor, cu_seqlens: Tensor, *, mode: Averaging
) -> tuple[Tensor, Counted]:
    """``aggregation_weights`` of the kept tokens, for rejection that only the forward pass decides.

    ``aggregation_T`` has the weights of all response tokens. Returns the weights [T] without ``kept_factor``,
    which is one number for the whole minibatch, and the counts for that factor. An episode's sequences may
    lie on several ranks, so in bypass mode each sequence is rescaled, and counted, by itself.
    """
    mode, cu_seqlens = units(mode, response_mask_T, cu_seqlens)
    all_S, kept_S = count_per_sequence(response_mask_T, cu_seqlens), count_per_sequence(keep_T, cu_seqlens)
    weights_T = aggregation_T * keep_T
    if mode == "token_mean":
        return weights_T, Counted(int(all_S.sum()), int(kept_S.sum()))
    if mode == "sequence_mean_token_mean":
        weights_T = weights_T * spread(all_S / kept_S.clamp(min=1), cu_seqlens)
    return weights_T, Counted(int(torch.count_nonzero(all_S)), int(torch.count_nonzero(kept_S)))


def kept_factor(parts: Iterable[Counted | None], total: Total = alone) -> float:
    """all / kept, which rescales a minibatch's mean over all tokens (or sequences) to its mean over kept ones.

    ``parts`` are the counts of this rank's micro-batches; None for a micro-batch whose weights were known.
    Every rank of ``total`` must call. The factor is 1 if nothing was kept: the loss is then zero.
    """
    counts = [counted for counted in parts if counted is not None]
    sums = torch.tensor([sum(c.all for c in counts), sum(c.kept for c in counts)], dtype=torch.float64)
    num_all, num_kept = total(sums).tolist()
    return num_all / num_kept if num_kept else 1.0
