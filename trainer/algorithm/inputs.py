"""Checks of the numbers that enter the mathematics, one per token. Errors name field, value and sequence.

``PackedBatch`` checks shapes and dtypes; this module checks values, of response tokens only. Off the mask any
value is legal, even NaN.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.packing import PackedBatch

MAX_LOGPROB = 0.01
"""A log-prob is at most 0. Rounding by engines stays far below this bound; probabilities, logits and negated
log-probs exceed it."""

FIXES = {
    "rollout_logprobs_T": "the server returned it: check the served weights and dtype",
    "old_logprobs_T": "the learner's forward pass produced it: check its weights and dtype",
    "ref_logprobs_T": "the reference's forward pass produced it: check its weights and dtype",
    "advantages_T": "look for rewards, values or penalties that are not finite",
    "values_T": "the critic's forward pass produced it: check its weights and dtype",
    "returns_T": "look for rewards or values that are not finite",
}


def may_be_broken(x: Tensor, *, logprobs: bool = False) -> bool:
    """Whether some value is not finite or, for log-probs, above 0. One pass and no copy."""
    if x.numel() == 0:
        return False
    least, greatest = torch.stack(torch.aminmax(x.detach())).tolist()  # NaN if one of them is
    return not (
        math.isfinite(least) and math.isfinite(greatest) and (not logprobs or greatest <= MAX_LOGPROB)
    )


def broken_tokens(batch: PackedBatch, values_T: Tensor, *, logprobs: bool) -> Tensor:
    """bool [T]: response tokens whose value is not finite or, for log-probs, above 0."""
    values_T = values_T.detach()
    right_T = values_T.isfinite() & (values_T <= MAX_LOGPROB) if logprobs else values_T.isfinite()
    return batch.response_mask_T.to(values_T.device) & ~right_T


def require_fields(batch: PackedBatch, names: Sequence[str], fix: str) -> None:
    """Raises ValueError with the fields of these names that are not set."""
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the micro-batch lacks {', '.join(missing)}: {fix} first")


def require_numbers(batch: PackedBatch, name: str, values_T: Tensor | None = None) -> None:
    """Raises ValueError for a response token whose value is not finite or, in a field of log-probs, above 0.

    values_T: by default the batch's field of that name; a field that is not set passes.
    """
    values_T = getattr(batch, name) if values_T is None else values_T
    if values_T is None:
        return
    logprobs = "logprobs" in name
    broken_T = broken_tokens(batch, values_T, logprobs=logprobs)
    if not broken_T.any():
        return
    broken = broken_T.nonzero().flatten().cpu()
    ids, value = sequences_of(batch, broken), values_T[broken[0]].item()
    wrong = f"{value}, above 0, which no log-prob is," if math.isfinite(value) else f"{value}"
    fix = FIXES.get(name, "look at what computed it")
    if math.isfinite(value):
        fix = f"pass log-probs, not probabilities or logits; {fix}"
    raise ValueError(
        f"{name} is {wrong} on a response token of sequence {ids[0]} ({broken.numel()} such tokens, sequences {ids[:10]}); {fix}"
    )


def sequences_of(batch: PackedBatch, places: Tensor) -> list[int]:
    """Ids of the sequences that hold these places of [T], in order."""
    rows = torch.searchsorted(batch.cu_seqlens.to(places.dtype), places, right=True) - 1
    return batch.sequence_ids_S[rows.unique()].tolist()
