"""Context parallelism: the tokens of every sequence are split over C ranks, which gather its keys and values.

Legend: C context-parallel ranks, N sequences of one bucket, n tokens of a chunk, A query heads, K key/value
heads, D head dimension.

A sequence of L tokens is cut at i L // (2 C) into 2 C chunks, of any length. Rank r takes the chunks r and
2 C - 1 - r: under a causal mask a late chunk costs more than an early one, and each such pair costs the same
("zigzag"). Nothing is padded within a sequence. A rank with fewer tokens than another is filled with copies of
the batch's first token, whose results are unused and whose gradient is exactly zero.

Every layer but attention sees only this rank's tokens, with the rotary positions that they have in their
sequences. Attention gathers keys and values of all tokens in one message and computes its own chunks' queries
against keys [0, end of the chunk), as in Llama 3 (arXiv 2407.21783, 3.3.2). In backward their gradients are
summed and scattered.

Log-probs, values and entropies are gathered at the end (``to_batch_order``). Every rank therefore computes the
same loss of all tokens, and its backward pass keeps the gradient of its own. The gradient of a parameter is the
sum over context-parallel ranks, which Megatron adds together with the data-parallel ranks.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from parallel.megatron.attention import PackedPlan, Predictions, Scoring, lower_right_causal_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens first:stop of each of the N sequences of a bucket, from place ``start`` of the gathered tokens on."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBucket:
    """N sequences of equal length, each cut alike."""

    count: int
    """N."""
    chunks: tuple[Chunk, ...]
    """All chunks with tokens, in the order of the sequence."""
    own: tuple[Chunk, ...]
    """Those of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan(PackedPlan):
    """The plan of one context-parallel rank. ``order_T`` has this rank's tokens; ``inverse_T`` the places among
    the gathered tokens, which lie rank after rank."""

    group: dist.ProcessGroup | None
    """The context-parallel ranks; None only in tests of the arithmetic."""
    first: int
    """Place of this rank's first token among the gathered tokens."""
    split_buckets: tuple[SplitBucket, ...]
    """One for each of ``buckets``, and then this rank's filling, if it has any."""

    def to_batch_order(self, values_T: Tensor) -> Tensor:
        # All ranks compute the same loss: backward keeps this rank's part of the gradient and sums nothing.
        gathered_T = gather_from_sequence_parallel_region(
            values_T, tensor_parallel_output_grad=False, group=self.group
        )
        return gathered_T[self.inverse_T]

    def predictions(self, mask_T: Tensor) -> Predictions:
        """Of this rank's tokens. Without any it is its first one, whose target is off the mask."""
        assert self.order_T is not None  # a rank's part is never the batch in its order
        own_mask_T = self.without_dummies(self.to_model_order(mask_T))
        places_R = (
            own_mask_T.nonzero().flatten() if own_mask_T.any() else mask_T.new_zeros(1, dtype=torch.int64)
        )
        return Predictions(tokens_R=self.order_T[places_R], places_R=places_R)

    def scattered(self, values_R: Tensor, predictions: Predictions, mask_T: Tensor) -> Tensor:
        """Those of all ranks."""
        assert self.order_T is not None
        own_T = values_R.new_zeros(len(self.order_T))
        return self.to_batch_order(own_T.index_copy(0, predictions.places_R, values_R))


def split_context(
    plan: PackedPlan,
    device: torch.device,
    *,
    size: int,
    rank: int,
    group: dist.ProcessGroup | None,
    multiple: int,
) -> SplitPlan:
    """The part of ``plan``, which has no dummies, of one of ``size`` context-parallel ranks.

    All ranks get as many tokens: those of the fullest, rounded up to a multiple of ``multiple``. The work is
    that of a sort, whatever the number of sequences.
    """
    num_tokens = plan.buckets[-1].stop
    lengths_B, counts_B = (
        torch.tensor([getattr(bucket, name) for bucket in plan.buckets]) for name in ("length", "count")
    )
    bucket_T = torch.repeat_interleave(torch.arange(len(plan.buckets)), lengths_B * counts_B)
    position_T = torch.cat([torch.arange(b.length).repeat(b.count) for b in plan.buckets])
    chunk_T = chunk_of(position_T, lengths_B[bucket_T], size)
    rank_T = torch.minimum(chunk_T, 2 * size - 1 - chunk_T)
    # A rank's tokens lie bucket by bucket, of each its first chunk before its second; the sort keeps their order.
    key_T = (rank_T * len(plan.buckets) + bucket_T) * 2 + (chunk_T >= size)
    by_rank_T = torch.argsort(key_T, stable=True)
    counts_R = torch.bincount(rank_T, minlength=size)
    per_rank = -(-int(counts_R.max()) // multiple) * multiple
    first_R = counts_R.cumsum(0) - counts_R
    place_T = torch.empty(num_tokens, dtype=torch.int64)
    place_T[by_rank_T] = (
        torch.arange(num_tokens) + (torch.arange(size) * per_rank - first_R)[rank_T[by_rank_T]]
    )

    batch_T = torch.arange(num_tokens) if plan.order_T is None else plan.order_T.cpu()
    inverse_T = torch.empty(num_tokens, dtype=torch.int64)
    inverse_T[batch_T] = place_T
    first, count = int(first_R[rank]), int(counts_R[rank])
    own_T = batch_T[by_rank_T[first : first + count]]
    return SplitPlan(
        order_T=F.pad(own_T, (0, per_rank - count)).to(device),
        inverse_T=inverse_T.to(device),
        buckets=plan.buckets,
        cu_seqlens=plan.cu_seqlens,
        group=group,
        first=rank * per_rank,
        split_buckets=_split_buckets(plan, size, rank, per_rank),
    )


def chunk_of(position_T: Tensor, length_T: Tensor, size: int) -> Tensor:
    """The chunk, of 2 C, of each position of a sequence: the largest i with i L // (2 C) <= position."""
    return (2 * size * (position_T + 1) - 1) // length_T


def _split_buckets(plan: PackedPlan, size: int, rank: int, per_rank: int) -> tuple[SplitBucket, ...]:
    """Walk through the buckets as the sort of ``split_context`` does: a rank's early chunks before its late ones."""
    starts = [r * per_rank for r in range(size)]
    buckets = []
    for bucket in plan.buckets:
        cuts = [i * bucket.length // (2 * size) for i in range(2 * size + 1)]
        chunks = []
        for i, (first, stop) in enumerate(pairwise(cuts)):
            owner = min(i, 2 * size - 1 - i)
            chunks.append((owner, Chunk(start=starts[owner], first=first, stop=stop)))
            starts[owner] += bucket.count * (stop - first)
        filled = [(owner, chunk) for owner, chunk in chunks if chunk.first < chunk.stop]
        buckets.append(
            SplitBucket(
                count=bucket.count,
                chunks=tuple(chunk for _, chunk in filled),
                own=tuple(chunk for owner, chunk in filled if owner == rank),
            )
        )
    filling = (rank + 1) * per_rank - starts[rank]
    if filling:  # sequences of one token each
        chunk = Chunk(start=starts[rank], first=0, stop=1)
        buckets.append(SplitBucket(count=filling, chunks=(chunk,), own=(chunk,)))
    return tuple(buckets)


def split_attention(
    query_TAD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    plan: SplitPlan,
    scoring: Scoring,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``packed_attention`` of this rank's tokens, [T, A, D] in the dtype of the query. A collective of the
    context-parallel ranks.

    Every rank takes part in the backward pass's collective, also one without tokens: its filling sees itself.
    """
    query, key, value = (x.to(dtype) for x in (query_TAD, key_TKD, value_TKD))
    both_TKD = gather_from_sequence_parallel_region(
        torch.cat((key, value), -1), tensor_parallel_output_grad=True, group=plan.group
    )
    parts = []
    for bucket in plan.split_buckets:
        if not bucket.own:
            continue
        key_NKLD, value_NKLD = _whole_sequences(both_TKD, bucket).transpose(1, 2).chunk(2, -1)
        for chunk in bucket.own:
            query_NnAD = _tokens(query, bucket, chunk, chunk.start - plan.first)
            out_NAnD = lower_right_causal_attention(
                query_NnAD.transpose(1, 2),
                key_NKLD[:, :, : chunk.stop],
                value_NKLD[:, :, : chunk.stop],
                scoring,
            )
            parts.append(out_NAnD.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).to(query_TAD.dtype)


def _tokens(values_T: Tensor, bucket: SplitBucket, chunk: Chunk, start: int) -> Tensor:
    """The chunk's tokens, [N, n, ...], from place ``start`` on."""
    length = chunk.stop - chunk.first
    return values_T[start : start + bucket.count * length].unflatten(0, (bucket.count, length))


def _whole_sequences(gathered_T: Tensor, bucket: SplitBucket) -> Tensor:
    """The bucket's sequences, [N, L, ...]. Slices and one concatenation: their backward pass needs no scatter,
    and the chunks of a rank share the memory."""
    return torch.cat([_tokens(gathered_T, bucket, chunk, chunk.start) for chunk in bucket.chunks], 1)
