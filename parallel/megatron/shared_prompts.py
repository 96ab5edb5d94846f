"""Samples of one prompt share it: the model computes a prompt once for all of them in a micro-batch.

Legend: S sequences, N branches of one call, P tokens of their prompts, L of the longest branch, A query heads, K
key/value heads, D head dimension.

Under a causal mask the hidden states of a prompt depend on nothing behind it, so all its samples have the same. The
model's order therefore has each prompt once. What follows it in a sequence is a *branch*: its queries see the prompt's
keys and values, and its own. G samples of a prompt of P tokens with R tokens behind it send P + G R tokens through the
layers in place of G (P + R).

Values and gradients are those of whole sequences, up to rounding: the gradient of a prompt's hidden states is the sum
over its samples either way. The trainer sees whole sequences: ``to_batch_order`` has a prompt's places once for each of
its samples. The last token of a prompt predicts the first token of every response, so log-probs are computed per token of
the batch (``PackedPlan.predictions``). Source: Z. Liu et al., "Prefix Grouper: Efficient GRPO Training through
Shared-Prefix Forward", arXiv 2506.05433. There a batch has one group and is padded; here it is packed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel.megatron.attention import (
    Bucket,
    PackedPlan,
    Scoring,
    lower_right_causal_attention,
    packed_attention,
    plan_packing,
)

MOST_FILLING = 512
"""Places of the filling in one call that need no further reason: a call costs more than they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """``count`` branches after prompts of one length, from place ``start`` of the reordered tokens on."""

    start: int
    stop: int
    count: int
    length: int
    """Of the longest. Within attention shorter ones are filled up at their ends."""
    grid: Tensor | None
    """int64 [count x length]: place of each cell's token, from ``start`` on. None: nothing is filled up."""
    cells: Tensor | None
    """int64 [stop - start]: the cell of each token. None with ``grid``."""
    prompts: Bucket
    """The bucket of their prompts."""
    prompt_N: Tensor
    """int64: place of each branch's prompt in that bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan(PackedPlan):
    """``buckets`` has the prompts, the sequences that share none, and dummies. The branches follow them."""

    branches: tuple[Branches, ...]


def plan_shared_prompts(
    cu_seqlens: Tensor,
    prompt_ids_S: Tensor,
    prompt_lengths_S: Tensor,
    device: torch.device,
    *,
    multiple: int = 1,
) -> PackedPlan:
    """``plan_packing`` with each prompt of several sequences once (see ``PackedBatch.prompt_ids_S``)."""
    every_S = np.arange(len(prompt_ids_S))
    lengths_S, prompt_S = cu_seqlens.diff().numpy().astype(np.int64), prompt_lengths_S.numpy()
    _, first_S, number_S, count_S = np.unique(
        prompt_ids_S.numpy(), return_index=True, return_inverse=True, return_counts=True
    )
    is_shared_S = (count_S[number_S] > 1) & (prompt_S > 0)
    if not is_shared_S.any():
        return plan_packing(cu_seqlens, device, multiple=multiple)
    owner_S = np.where(is_shared_S, first_S[number_S], every_S)  # the sequence whose prompt is computed
    branch_S = np.where(is_shared_S, lengths_S - prompt_S, 0)  # tokens after a shared prompt
    plain_S = lengths_S - branch_S  # tokens of the prompt, or of a sequence that shares none

    plain = _plain_buckets(plain_S, every_S[owner_S == every_S])
    start, buckets = plain.stop, list(plain.buckets)
    num_dummies = -int(start + branch_S.sum()) % multiple
    if num_dummies:
        buckets.append(Bucket(start=start, count=num_dummies, length=1))
        start = buckets[-1].stop

    branches: list[Branches] = []
    branch_start_S = np.zeros_like(lengths_S)
    branching = every_S[branch_S > 0]
    branching = branching[np.lexsort((branch_S[branching], prompt_S[branching]))]
    for run in _like_lengths(branch_S[branching], prompt_S[branching]):
        rows, owner_N = branching[run], owner_S[branching[run]]
        branch_start_S[rows] = start + branch_S[rows].cumsum() - branch_S[rows]
        prompts, prompt_N = plain.buckets[plain.bucket_S[owner_N[0]]], plain.row_S[owner_N]
        branches.append(_branches(start, branch_S[rows], prompts, torch.from_numpy(prompt_N), device))
        start = branches[-1].stop

    sequence_T = every_S.repeat(lengths_S)
    position_T = np.arange(len(sequence_T)) - cu_seqlens.numpy()[sequence_T]
    is_branch_T = position_T >= plain_S[sequence_T]
    first_T = np.where(
        is_branch_T, (branch_start_S - plain_S)[sequence_T], plain.start_S[owner_S][sequence_T]
    )
    place_T = first_T + position_T
    order = np.zeros(start, dtype=np.int64)  # dummies are the first token
    order[place_T[::-1]] = np.arange(len(place_T))[::-1]  # of equal tokens that of the first sample
    lengths = [*(b.length for b in buckets for _ in range(b.count)), *branch_S[branching].tolist()]
    return SharedPlan(
        order_T=torch.from_numpy(order).to(device),
        inverse_T=torch.from_numpy(place_T).to(device),
        buckets=tuple(buckets),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        first=0,
        branches=tuple(branches),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """Shared prompts and whole sequences, and the place of each; zeros for other sequences."""

    buckets: list[Bucket]
    start_S: np.ndarray
    bucket_S: np.ndarray
    row_S: np.ndarray

    @property
    def stop(self) -> int:
        return self.buckets[-1].stop


def _plain_buckets(length_S: np.ndarray, rows: np.ndarray) -> _Plain:
    """The sequences ``rows`` by their lengths, from place 0 on."""
    buckets: list[Bucket] = []
    start_S, bucket_S, row_S = (np.zeros_like(length_S) for _ in range(3))
    start = 0
    for length in np.unique(length_S[rows]).tolist():
        alike = rows[length_S[rows] == length]
        bucket_S[alike], row_S[alike] = len(buckets), np.arange(len(alike))
        start_S[alike] = start + length * row_S[alike]
        buckets.append(Bucket(start=start, count=len(alike), length=length))
        start = buckets[-1].stop
    return _Plain(buckets=buckets, start_S=start_S, bucket_S=bucket_S, row_S=row_S)


def _like_lengths(own_N: np.ndarray, prompt_N: np.ndarray) -> list[slice]:
    """The runs of branches of one call each, of branches that are sorted by their prompts' lengths and then by their own:
    behind prompts of one length, and filled up by ``MOST_FILLING`` places or by an eighth of their tokens at most."""
    runs, first, tokens = [], 0, 0
    for i, (own, prompt) in enumerate(zip(own_N.tolist(), prompt_N.tolist(), strict=True)):
        filling = own * (i - first) - tokens
        if i > first and (prompt != prompt_N[first] or filling > max(MOST_FILLING, tokens // 8)):
            runs.append(slice(first, i))
            first, tokens = i, 0
        tokens += own
    return [*runs, slice(first, len(own_N))] if len(own_N) else []


def _branches(
    start: int, own_N: np.ndarray, prompts: Bucket, prompt_N: Tensor, device: torch.device
) -> Branches:
    count, length, tokens = len(own_N), int(own_N.max()), int(own_N.sum())
    grid = cells = None
    if tokens < count * length:
        is_token = np.arange(length) < own_N[:, None]
        cells = torch.from_numpy(np.flatnonzero(is_token)).to(device)
        grid = torch.from_numpy(
            np.where(is_token, is_token.cumsum().reshape(is_token.shape) - 1, 0)
        ).flatten()
        grid = grid.to(device)
    return Branches(
        start=start,
        stop=start + tokens,
        count=count,
        length=length,
        grid=grid,
        cells=cells,
        prompts=prompts,
        prompt_N=prompt_N.to(device),
    )


def shared_attention(
    query_TAD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    plan: SharedPlan,
    scoring: Scoring,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``packed_attention`` with branches, [T, A, D] in the dtype of the query."""
    query, key, value = (x.to(dtype) for x in (query_TAD, key_TKD, value_TKD))
    plain_TAD = packed_attention(query, key, value, plan.buckets, scoring, dtype=dtype)
    parts = [_branch_attention(query, key, value, branches, scoring) for branches in plan.branches]
    return torch.cat([plain_TAD, *parts]).to(query_TAD.dtype)


def _branch_attention(
    query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, branches: Branches, scoring: Scoring
) -> Tensor:
    """Attention of the branches' tokens to their prompts and, causally, to themselves. A filling is behind every token of
    its branch, so that none sees it; its own results are dropped."""
    query_NLAD = _own_tokens(query_TAD, branches)
    key_NPKD, value_NPKD = (
        torch.cat(
            (branches.prompts.sequences(x).index_select(0, branches.prompt_N), _own_tokens(x, branches)), 1
        )
        for x in (key_TKD, value_TKD)
    )
    out_NALD = lower_right_causal_attention(
        query_NLAD.transpose(1, 2), key_NPKD.transpose(1, 2), value_NPKD.transpose(1, 2), scoring
    )
    out = out_NALD.transpose(1, 2).flatten(0, 1)
    return out if branches.cells is None else out[branches.cells]


def _own_tokens(values_T: Tensor, branches: Branches) -> Tensor:
    tokens = values_T[branches.start : branches.stop]
    cells = tokens if branches.grid is None else tokens[branches.grid]
    return cells.unflatten(0, (branches.count, branches.length))
