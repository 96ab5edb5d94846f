"""Checks of the numbers that enter the mathematics, one value per token. Errors name the field, the value and
the sequence.

Legend: T packed tokens. Shapes and dtypes are checked where a ``PackedBatch`` is made; values here, where
they are used, on response tokens alone: whatever lies off the mask, even NaN, is legal.
"""

import math

import torch
from torch import Tensor

from parallel.packing import PackedBatch

MAX_LOGPROB = 0.01
"""A log-prob is at most 0. Engines round, and rounding stays far below this; probabilities, logits or negated
log-probs do not."""

FIXES = {
    "rollout_logprobs_T": "the server returned it: check the served weights and dtype",
    "old_logprobs_T": "the learner's forward pass produced it: check its weights and dtype",
    "ref_logprobs_T": "the reference's forward pass produced it: check its weights and dtype",
    "advantages_T": "look for rewards, values or penalties that are not finite",
    "values_T": "the critic's forward pass produced it: check its weights and dtype",
    "returns_T": "look for rewards or values that are not finite",
}
_LOOK = "look at what computed it"


def may_be_broken(x: Tensor, *, logprobs: bool = False) -> bool:
    """Whether a closer look is due: some value is not finite or, of log-probs, above 0. One pass and no copy."""
    if x.numel() == 0:
        return False
    least, greatest = torch.stack(torch.aminmax(x.detach())).tolist()  # NaN where one is among them
    return not (
        math.isfinite(least) and math.isfinite(greatest) and (not logprobs or greatest <= MAX_LOGPROB)
    )


def broken_tokens(batch: PackedBatch, values_T: Tensor, *, logprobs: bool) -> Tensor:
    """bool [T]: response tokens whose value is not finite or, of log-probs, above 0."""
    values_T = values_T.detach()
    right_T = values_T.isfinite() & (values_T <= MAX_LOGPROB) if logprobs else values_T.isfinite()
    return batch.response_mask_T.to(values_T.device) & ~right_T


def require_numbers(batch: PackedBatch, name: str, values_T: Tensor | None = None) -> None:
    """Raises ValueError for a response token whose value is not finite or, where the name is of log-probs,
    above 0.

    values_T: the batch's field of that name where it is left out; one that is not set is right.
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
    fix = FIXES.get(name, _LOOK)
    if math.isfinite(value):
        fix = f"pass log-probs, not probabilities or logits; {fix}"
    raise ValueError(
        f"{name} is {wrong} on a response token of sequence {ids[0]} ({broken.numel()} such tokens, sequences {ids[:10]}); {fix}"
    )


def sequences_of(batch: PackedBatch, places: Tensor) -> list[int]:
    """The ids of the sequences that hold these places of [T], in their order."""
    rows = torch.searchsorted(batch.cu_seqlens.to(places.dtype), places, right=True) - 1
    return batch.sequence_ids_S[rows.unique()].tolist()
