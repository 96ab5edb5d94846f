"""The disagreement of two engines on the same tokens, sampled by one and scored by the other, with standard
errors.

Axes: R responses, N their tokens end to end, Q prompts. Δp, d, rho, k1 and k3 are those of
``trainer/metric_names.py``, in float64, with the learner as train; a response has a max and a mean Δp. d is
bounded to +-20 in rho and in k3, not in k1 nor in the greatest |d|.

Standard errors are plain ones, not bootstrapped: s / sqrt(n) over the n averaged responses (or prompts). Means
over tokens have the linearised error of a ratio, with responses as clusters, since the tokens of a response are
not independent. Comparisons on the same responses are paired. The standard error of a single response is None.

Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), the
section on the rollout-training mismatch: max and mean per response, parallel layouts, one long response
against several short ones of as many tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from configs.schema.layout import LayoutConfig
from rollout.records import Completion
from trainer.algorithm.kl import bounded
from trainer.algorithm.mismatch import HIGH_GAP, NEAR_ONE, bounds_of
from trainer.algorithm.segments import max_per_sequence, sum_per_sequence
from trainer.file_system import write_whole

LENGTH_EDGES = tuple(2**power for power in range(2, 15))
"""Upper edges, in tokens, of the buckets of length and position (from 1); the last bucket is open."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """R sampled responses with their prompts."""

    tokens_L: Tensor
    """int64: prompt, response, prompt, response, ..."""
    prompt_lengths_R: Tensor
    response_lengths_R: Tensor
    """int64, each at least 1."""
    prompts_R: Tensor
    """int64, ascending: the number of its prompt."""
    logprobs_N: Tensor
    """float32, from the server while it sampled."""
    experts_TLK: Tensor | None = None
    """uint8 or int16: the server's experts for each sequence's tokens except the last. None: not requested, or the server
    computed a prompt again."""

    @property
    def num_responses(self) -> int:
        return self.response_lengths_R.numel()

    @property
    def num_tokens(self) -> int:
        return self.logprobs_N.numel()

    def sequences(self) -> list[list[int]]:
        """Tokens of each prompt with its response."""
        lengths = (self.prompt_lengths_R + self.response_lengths_R).tolist()
        return [part.tolist() for part in self.tokens_L.split(lengths)]


def join_groups(prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]) -> Sampled:
    """The completions of each prompt. Raises ValueError as ``join_samples`` does."""
    completions = [(number, one) for number, group in enumerate(groups) for one in group]
    samples = [(number, one.token_ids.tolist(), one.rollout_logprobs.tolist()) for number, one in completions]
    return join_samples(prompts, samples, [one.experts for _, one in completions])


def join_samples(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[tuple[int, Sequence[int], Sequence[float]]],
    experts: Sequence[np.ndarray | None] = (),
) -> Sampled:
    """``samples``: (number of its prompt, token ids, log-probs) of each response, in order of the prompts. ``experts``:
    those of each response's input tokens.

    Raises ValueError for a response without tokens, or without a log-prob for each.
    """
    broken = next((prompt for prompt, ids, logprobs in samples if not ids or len(ids) != len(logprobs)), None)
    if broken is not None:
        raise ValueError(f"a response to prompt {broken} has no tokens, or not one log-prob for each")
    tokens = [t for prompt, ids, _ in samples for t in (*prompts[prompt], *ids)]
    return Sampled(
        tokens_L=torch.tensor(tokens, dtype=torch.int64),
        prompt_lengths_R=torch.tensor([len(prompts[prompt]) for prompt, _, _ in samples]),
        response_lengths_R=torch.tensor([len(ids) for _, ids, _ in samples]),
        prompts_R=torch.tensor([prompt for prompt, _, _ in samples]),
        logprobs_N=torch.tensor([x for _, _, logprobs in samples for x in logprobs], dtype=torch.float32),
        experts_TLK=_join_experts(experts),
    )


def _join_experts(experts: Sequence[np.ndarray | None]) -> Tensor | None:
    known = [rows for rows in experts if rows is not None]
    return torch.from_numpy(np.concatenate(known)) if known and len(known) == len(experts) else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_whole(path, save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as tensors: {error}") from error


def write_samples(path: Path, sampled: Sampled) -> None:
    tensors = {f.name: getattr(sampled, f.name) for f in fields(Sampled)}
    write_tensors(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def read_samples(path: Path) -> Sampled:
    return Sampled(**read_tensors(path))


# ----------------------------------------------------------------------------------------------------------------
# estimates


def mean_and_error(values_R: Tensor) -> tuple[float, float | None]:
    """Mean and s / sqrt(R), s with R - 1."""
    count = values_R.numel()
    return values_R.mean().item(), (values_R.std().item() / count**0.5 if count > 1 else None)


def ratio_and_error(sums_R: Tensor, counts_R: Tensor) -> tuple[float, float | None]:
    """m = sum of sums / sum of counts, and sqrt(R / (R - 1) sum_r (sums_r - m counts_r)^2) / sum of counts
    (W. Cochran, 1977, 6.3)."""
    number, total = sums_R.numel(), counts_R.sum().item()
    ratio = sums_R.sum().item() / total
    if number < 2:
        return ratio, None
    spread = (sums_R - ratio * counts_R).square().sum().item()
    return ratio, (number / (number - 1) * spread) ** 0.5 / total


def _estimate(name: str, estimate: tuple[float, float | None]) -> Row:
    return {name: estimate[0], f"{name}_se": estimate[1]}


def probability_gaps(rollout_N: Tensor, learner_N: Tensor) -> Tensor:
    """Δp of each token, float64. Near 1 expm1 keeps the digits that exp loses."""
    return (torch.expm1(rollout_N.double()) - torch.expm1(learner_N.double())).abs()


def response_gaps(gap_N: Tensor, lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """(max, mean) of Δp of each response, [R]."""
    bounds = bounds_of(lengths_R)
    return max_per_sequence(gap_N, bounds), sum_per_sequence(gap_N, bounds) / lengths_R


# ---------------------------------------------------------------------------------------------------------------
# one pair


def pair_statistics(
    rollout_N: Tensor, learner_N: Tensor, lengths_R: Tensor, *, threshold: float = HIGH_GAP
) -> Row:
    """One pair of engines on R responses. Names with ``_se`` are standard errors.

    responses, tokens                       counts
    max_mean, max_max                       of the responses' max Δp; mean_mean of their mean Δp
    over_half, over_threshold (and _count)  share of responses with max Δp above 0.5, above ``threshold``
    k1, k3                                  means over tokens, estimates of KL(rollout || learner) in nats; k1 may be negative
    outside (and _count)                    share of tokens with rho outside [0.9, 1.1]
    logprob_gap_max                         greatest |d|, nats
    by_length, by_position                  rows, see below
    response_max, response_mean, response_length    of each response, six digits
    """
    gap_N = probability_gaps(rollout_N, learner_N)
    max_R, mean_R = response_gaps(gap_N, lengths_R)
    log_ratio_N = learner_N.double() - rollout_N.double()
    excess_N = torch.expm1(bounded(log_ratio_N))
    outside_N = (excess_N < NEAR_ONE[0] - 1) | (excess_N > NEAR_ONE[1] - 1)
    bounds = bounds_of(lengths_R)
    k1_R, k3_R, outside_R = (
        sum_per_sequence(x_N.double(), bounds)
        for x_N in (-log_ratio_N, excess_N - bounded(log_ratio_N), outside_N)
    )
    return {
        "responses": lengths_R.numel(),
        "tokens": gap_N.numel(),
        **_estimate("max_mean", mean_and_error(max_R)),
        "max_max": max_R.max().item(),
        **_estimate("mean_mean", mean_and_error(mean_R)),
        **_share("over_half", max_R > HIGH_GAP),
        "threshold": threshold,
        **_share("over_threshold", max_R > threshold),
        **_estimate("k1", ratio_and_error(k1_R, lengths_R)),
        **_estimate("k3", ratio_and_error(k3_R, lengths_R)),
        **_estimate("outside", ratio_and_error(outside_R, lengths_R)),
        "outside_count": int(outside_N.sum()),
        "logprob_gap_max": log_ratio_N.abs().max().item(),
        "by_length": by_length(max_R, mean_R, lengths_R),
        "by_position": by_position(gap_N, lengths_R),
        "response_max": _short(max_R),
        "response_mean": _short(mean_R),
        "response_length": lengths_R.tolist(),
    }


def _share(name: str, hits_R: Tensor) -> Row:
    """With the binomial standard error sqrt(p (1 - p) / R)."""
    share = hits_R.double().mean().item()
    return {
        name: share,
        f"{name}_se": (share * (1 - share) / hits_R.numel()) ** 0.5,
        f"{name}_count": int(hits_R.sum()),
    }


def _short(values: Tensor) -> list[float]:
    return [float(f"{x:.6g}") for x in values.tolist()]


def _buckets(values: Tensor) -> list[tuple[int, int | None, Tensor]]:
    """(above, up to and with (None: open), mask) of each bucket that is not empty."""
    which = torch.bucketize(values, torch.tensor(LENGTH_EDGES))
    edges = [0, *LENGTH_EDGES, None]
    return [(edges[b], edges[b + 1], which == b) for b in which.unique().tolist()]


def by_length(max_R: Tensor, mean_R: Tensor, lengths_R: Tensor) -> list[Row]:
    """Per bucket of response length (above < length <= up_to): counts, and means over its responses of their
    max and their mean Δp."""
    return [
        {
            "above": above,
            "up_to": up_to,
            "responses": int(mask_R.sum()),
            "tokens": int(lengths_R[mask_R].sum()),
            **_estimate("max_mean", mean_and_error(max_R[mask_R])),
            **_estimate("mean_mean", mean_and_error(mean_R[mask_R])),
        }
        for above, up_to, mask_R in _buckets(lengths_R)
    ]


def by_position(gap_N: Tensor, lengths_R: Tensor) -> list[Row]:
    """Per bucket of position in the response (from 1): count, mean (with its error) and greatest Δp of its
    tokens."""
    response_N = torch.arange(lengths_R.numel()).repeat_interleave(lengths_R)
    position_N = torch.arange(gap_N.numel()) - bounds_of(lengths_R)[:-1].repeat_interleave(lengths_R) + 1
    rows = []
    for above, up_to, mask_N in _buckets(position_N):
        _, response, counts = response_N[mask_N].unique_consecutive(return_inverse=True, return_counts=True)
        sums = gap_N.new_zeros(counts.numel()).index_add(0, response, gap_N[mask_N])
        row: Row = {"above": above, "up_to": up_to, "tokens": int(mask_N.sum())}
        row |= _estimate("mean", ratio_and_error(sums, counts))
        rows.append(row | {"max": gap_N[mask_N].max().item()})
    return rows


def equal_tokens(
    long: Sampled, long_gap_N: Tensor, short: Sampled, short_gap_N: Tensor, *, first: int
) -> Row:
    """One long response to each prompt against several short ones to the same prompt, end to end.

    A maximum grows with the count of tokens, and one side often has more. Both are therefore cut, prompt by
    prompt, to the ``tokens`` of the smaller side. Means over the Q prompts, with standard errors:
    long_max            max Δp of the long response, cut                long_mean, short_mean   mean Δp of the same tokens
    short_together_max  over the short responses to the prompt, cut     tokens                  per prompt and side, cut
    long_over_short     long_max - short_together_max, prompt by prompt long_tokens, short_tokens   per prompt, whole
    long_first_max      of the first ``first`` tokens of the long one
    short_max           of a whole short response (mean over a prompt's)

    Raises ValueError unless the two have the same prompts, with one long response to each.
    """
    prompts, counts_Q = short.prompts_R.unique_consecutive(return_counts=True)
    if not torch.equal(prompts, long.prompts_R):
        raise ValueError(
            "long and short responses are not of the same prompts, with one long response to each"
        )
    bounds_Q = bounds_of(counts_Q)
    long_tokens_Q = long.response_lengths_R
    short_tokens_Q = sum_per_sequence(short.response_lengths_R.double(), bounds_Q).long()
    tokens_Q = torch.minimum(long_tokens_Q, short_tokens_Q)
    long_max_Q, long_mean_Q = response_gaps(_first_of_each(long_gap_N, long_tokens_Q, tokens_Q), tokens_Q)
    together_Q, short_mean_Q = response_gaps(_first_of_each(short_gap_N, short_tokens_Q, tokens_Q), tokens_Q)
    at_first_Q = long_tokens_Q.clamp(max=first)
    first_max_Q, _ = response_gaps(_first_of_each(long_gap_N, long_tokens_Q, at_first_Q), at_first_Q)
    short_max_R, _ = response_gaps(short_gap_N, short.response_lengths_R)
    columns = {
        "long_max": long_max_Q,
        "long_first_max": first_max_Q,
        "short_max": sum_per_sequence(short_max_R, bounds_Q) / counts_Q,
        "short_together_max": together_Q,
        "long_over_short": long_max_Q - together_Q,
        "long_mean": long_mean_Q,
        "short_mean": short_mean_Q,
    }
    row: Row = {
        "prompts": prompts.numel(),
        "short_per_prompt": counts_Q.double().mean().item(),
        "first": first,
        "tokens": tokens_Q.double().mean().item(),
        "long_tokens": long_tokens_Q.double().mean().item(),
        "short_tokens": short_tokens_Q.double().mean().item(),
    }
    for name, values_Q in columns.items():
        row |= _estimate(name, mean_and_error(values_Q))
    return row


def _first_of_each(values_N: Tensor, lengths_Q: Tensor, kept_Q: Tensor) -> Tensor:
    """The first ``kept_Q`` values of each of the sequences of ``lengths_Q``, end to end."""
    position_N = torch.arange(values_N.numel()) - bounds_of(lengths_Q)[:-1].repeat_interleave(lengths_Q)
    return values_N[position_N < kept_Q.repeat_interleave(lengths_Q)]


# ------------------------------------------------------------------------------------------------------------
# two learners


def compare(reference_N: Tensor, first_N: Tensor, second_N: Tensor, lengths_R: Tensor) -> Row:
    """Two engines' distances from a third (``reference_N``) on the same tokens, and from each other.

    max_change, mean_change    second's less first's, of the responses' max and mean Δp to the reference: means of paired differences
    moved_mean                 mean over responses of the mean |p_second - p_first|; moved_max the greatest of any token
    moved_response_max         mean over responses of the max |p_second - p_first|
    bitwise                    whether first and second are the same numbers
    """
    (first_max_R, first_mean_R), (second_max_R, second_mean_R) = (
        response_gaps(probability_gaps(reference_N, x_N), lengths_R) for x_N in (first_N, second_N)
    )
    moved_N = probability_gaps(first_N, second_N)
    moved_max_R, moved_mean_R = response_gaps(moved_N, lengths_R)
    return {
        **_estimate("max_change", mean_and_error(second_max_R - first_max_R)),
        **_estimate("mean_change", mean_and_error(second_mean_R - first_mean_R)),
        **_estimate("moved_mean", mean_and_error(moved_mean_R)),
        **_estimate("moved_response_max", mean_and_error(moved_max_R)),
        "moved_max": moved_N.max().item(),
        "bitwise": torch.equal(first_N, second_N),
    }


def verdict(change: float, error: float | None) -> str:
    """``lower``, ``higher`` or ``undecided``: whether a paired difference is beyond two of its standard
    errors."""
    if error is None or abs(change) <= 2 * error:
        return "undecided"
    return "lower" if change < 0 else "higher"


def one_step_apart(first: LayoutConfig, second: LayoutConfig, rollout_tp: int) -> str | None:
    """The one thing in which the learner layout ``second`` differs from ``first``; None for none or several.

    ``tp``: first has the rollout's TP, second another. ``sp``, ``pp``, ``cp``: second has it, first has not. dp
    does not count.
    """
    names = LayoutConfig.model_fields.keys() - {"dp"}
    changed = {name for name in names if getattr(first, name) != getattr(second, name)}
    if changed == {"tp"} and first.tp == rollout_tp:
        return "tp"
    if changed == {"sp"} and second.sp:
        return "sp"
    if changed in ({"pp"}, {"pp", "vpp"}) and first.pp == 1:
        return "pp"
    if changed == {"cp"} and first.cp == 1:
        return "cp"
    return None


def compare_layouts(
    rollout_tp: int, sampled: Sampled, scores: Mapping[str, Tensor], layouts: Mapping[str, LayoutConfig]
) -> list[Row]:
    """``compare`` for every two learner layouts (by name) that are one step apart, on the samples of one
    rollout layout."""
    rows = []
    for first, first_N in scores.items():
        for second, second_N in scores.items():
            about = one_step_apart(layouts[first], layouts[second], rollout_tp)
            if about is not None:
                result = compare(sampled.logprobs_N, first_N, second_N, sampled.response_lengths_R)
                rows.append({"about": about, "first": first, "second": second, **result})
    return rows


def share_of_gap(rollout_N: Tensor, own_N: Tensor, replayed_N: Tensor, lengths_R: Tensor) -> Row:
    """The part of the mean Δp that comes from the choice of experts: 1 - replayed / own. ``own``, ``replayed``: means over
    responses of a response's mean Δp."""
    own, replayed = (
        response_gaps(probability_gaps(rollout_N, x_N), lengths_R)[1].mean().item()
        for x_N in (own_N, replayed_N)
    )
    return {"own": own, "replayed": replayed, "share": 1 - replayed / own if own else 0.0}


def rank_causes(rows: Sequence[Row]) -> list[Row]:
    """Switches by the distance that they move the sampled tokens' probabilities (``moved_mean``), greatest first."""
    return sorted(rows, key=lambda row: -row["moved_mean"])
