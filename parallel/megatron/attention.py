"""Packed causal attention with rotary positions, without Transformer Engine, and the plan of a micro-batch.

Legend: N sequences of one bucket, L their common length, A query heads, K key/value heads, D head dimension,
F = D / 2 rotary frequencies, or fewer where a part of each head is rotated.

Sequences of equal length form a bucket and run as one batched causal SDPA. The model sees its tokens in the
order of the buckets (``PackedPlan.order_T``). Within a layer a bucket is therefore a slice: no layer gathers or
scatters, and 256 sequences of 15 tokens cost a handful of calls.

Sequence parallelism splits the model's tokens over ranks. The plan then ends with dummy sequences of one token
each, so that the number of tokens divides. They are copies of the batch's first token, their results are
unused, and their gradient is exactly zero.

Where a token sees a window of W tokens, itself included, queries go in blocks of ``WINDOW_BLOCK``, each against the keys that
one of it sees. A sequence of at most W tokens is computed as without a window.

The score pass and the train pass of one micro-batch agree bitwise: both see the same plan, hence tensors of the
same shapes and strides, the same kernels and the same order of sums. Recording gradients changes nothing here:
rotation is a function of its own with one forward, and SDPA has no dropout. A *different* split into
micro-batches changes shapes and with them rounding (about 1e-6 relative in float32).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from numerics.aligned import rotated
from parallel.planning.architecture import SINK_SIZE, WINDOW_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``count`` sequences of ``length`` tokens each, from place ``start`` of the reordered tokens on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    def sequences(self, values_T: Tensor) -> Tensor:
        """[N, L, ...] of the bucket, from all of the reordered tokens."""
        return values_T[self.start : self.stop].unflatten(0, (self.count, self.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The R tokens of the batch whose targets get a log-prob."""

    tokens_R: Tensor
    """int64, of the batch."""
    places_R: Tensor
    """int64, among this rank's tokens in the model's order: where the hidden state is that predicts the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlan:
    """Everything that follows from a micro-batch's lengths, computed once on the CPU before the first layer."""

    order_T: Tensor | None
    """int64: place i of the model's order holds token order_T[i] of the batch; dummies hold its first. None:
    already in order."""
    inverse_T: Tensor | None
    """int64: token t of the batch is at place inverse_T[t] of the model's order."""
    buckets: tuple[Bucket, ...]
    cu_seqlens: Tensor
    """int32 [S + 1], the boundaries in the model's order, on the CPU."""
    first: int
    """Place of the model's first token, as ``inverse_T`` counts."""

    def without_dummies(self, mask_T: Tensor) -> Tensor:
        """``mask_T``, in the model's order, and False on dummies."""
        if self.order_T is None or self.inverse_T is None:
            return mask_T
        places_T = self.inverse_T - self.first
        is_token_T = torch.zeros_like(mask_T)
        is_token_T[places_T[(places_T >= 0) & (places_T < len(mask_T))]] = True
        return mask_T & is_token_T

    def to_model_order(self, values_T: Tensor) -> Tensor:
        return values_T if self.order_T is None else values_T[self.order_T]

    def to_batch_order(self, values_T: Tensor) -> Tensor:
        return values_T if self.inverse_T is None else values_T[self.inverse_T]

    def predictions(self, mask_T: Tensor) -> Predictions:
        """Of the batch's tokens of ``mask_T``. Without any it is the first token, since kernels and collectives want one."""
        tokens_R = mask_T.nonzero().flatten() if mask_T.any() else mask_T.new_zeros(1, dtype=torch.int64)
        places_R = tokens_R if self.inverse_T is None else self.inverse_T[tokens_R]
        return Predictions(tokens_R=tokens_R, places_R=places_R)

    def scattered(self, values_R: Tensor, predictions: Predictions, mask_T: Tensor) -> Tensor:
        """[T] of the batch: the values of the predictions, and 0 elsewhere."""
        values_T = values_R.new_zeros(len(mask_T))
        return values_T.index_copy(0, predictions.tokens_R, values_R)


def plan_packing(
    cu_seqlens: Tensor, device: torch.device, *, keep_order: bool = False, multiple: int = 1
) -> PackedPlan:
    """The plan for ``cu_seqlens`` (int [S + 1], on the CPU), with index tensors on ``device``.

    Sequences are sorted by length, stably; with ``keep_order`` they keep their order and neighbours of equal
    length form the buckets. Dummy sequences of one token follow until the model's tokens are a multiple of
    ``multiple``. Raises ValueError for an empty sequence or cu_seqlens that do not start at 0.
    """
    lengths_S = torch.diff(cu_seqlens.to(torch.int64))
    if cu_seqlens.numel() < 2 or int(cu_seqlens[0]) != 0 or int(lengths_S.min()) < 1:
        raise ValueError(
            f"cu_seqlens must rise from 0 with every sequence at least one token long, got {cu_seqlens.tolist()[:10]}"
        )
    sorted_S, rows_S = lengths_S, torch.arange(lengths_S.numel())
    if not keep_order:
        sorted_S, rows_S = torch.sort(lengths_S, stable=True)
    values, counts = torch.unique_consecutive(sorted_S, return_counts=True)
    buckets, start = [], 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        buckets.append(Bucket(start=start, count=count, length=length))
        start = buckets[-1].stop
    bounds = F.pad(sorted_S.cumsum(0), (1, 0))
    num_dummies = -start % multiple
    if num_dummies:
        buckets.append(Bucket(start=start, count=num_dummies, length=1))
    elif torch.equal(rows_S, torch.arange(rows_S.numel())):
        int_bounds = bounds.to(torch.int32)
        return PackedPlan(
            order_T=None, inverse_T=None, buckets=tuple(buckets), cu_seqlens=int_bounds, first=0
        )
    first_S = cu_seqlens[:-1].to(torch.int64)[rows_S]
    order_T = torch.repeat_interleave(first_S - bounds[:-1], sorted_S) + torch.arange(start)
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(start)
    return PackedPlan(
        order_T=F.pad(order_T, (0, num_dummies)).to(device),
        inverse_T=inverse_T.to(device),
        buckets=tuple(buckets),
        cu_seqlens=torch.cat((bounds, torch.arange(start + 1, start + num_dummies + 1))).to(torch.int32),
        first=0,
    )


def rotary_tables(
    inv_freq_F: Tensor, attention_factor: float, positions_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, each [T, 1, F], times the attention factor (yarn).

    They are computed in float32 and rounded to ``dtype``: the model's on CPU, as in transformers and SGLang
    (``platform.rotary_dtype``).
    """
    angles_TF = positions_T.float().unsqueeze(1) * inv_freq_F.float().unsqueeze(0)
    cos_T1F, sin_T1F = (
        (table_TF * attention_factor).to(dtype).unsqueeze(1)
        for table_TF in (angles_TF.cos(), angles_TF.sin())
    )
    return cos_T1F, sin_T1F


def rotate(heads_TAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotary embedding (a, b) -> (a cos - b sin, b cos + a sin) of the halves a and b of the first 2 F numbers of D
    (RoFormer, GPT-NeoX layout). Products are in the dtype of the tables; heads keep theirs."""
    return _Rotate.apply(heads_TAD, cos_T1F, sin_T1F)


def paired_in_halves(heads_TAD: Tensor, size: int) -> Tensor:
    """Of the first ``size`` numbers of D, of which neighbours are a pair, the pairs in the two halves, as ``rotate`` takes
    them. The products of queries and keys do not depend on the order."""
    paired, rest = heads_TAD[..., :size], heads_TAD[..., size:]
    halves = paired.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((halves, rest), -1) if rest.shape[-1] else halves


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation by the opposite angle, times the attention factor in cos and
    sin."""

    @staticmethod
    def forward(ctx, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, backward=False)

    @staticmethod
    def backward(ctx, grad):
        return _rotated(grad, *ctx.saved_tensors, backward=True), None, None


def _rotated(heads_TAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, *, backward: bool) -> Tensor:
    if heads_TAD.is_cuda:
        from parallel.megatron import triton_kernels

        return triton_kernels.rotated(heads_TAD, cos_T1F, sin_T1F, backward=backward)
    sin_T1F = -sin_T1F if backward else sin_T1F
    return rotated(heads_TAD.to(cos_T1F.dtype), cos_T1F, sin_T1F).to(heads_TAD.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a token's query scores the keys of its sequence."""

    scale: float | None = None
    """None: the root of a head's size, as torch has it."""
    window: int | None = None
    """The tokens that a token sees, itself included; None: all before it."""
    sinks_A: Tensor | None = None
    """See ``_with_sink``."""


def packed_attention(
    query_TAD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    buckets: tuple[Bucket, ...],
    scoring: Scoring,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """softmax(q k^T scale + causal mask) v within each sequence: [T, A, D] in the dtype of the query.

    Tokens are in the order of ``buckets``; A is a multiple of K (grouped queries). The sums run in ``dtype``.
    """
    query, key, value = (x.to(dtype) for x in (query_TAD, key_TKD, value_TKD))
    parts = [_bucket_attention(query, key, value, bucket, scoring) for bucket in buckets]
    out_TAD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_TAD.to(query_TAD.dtype)


def _bucket_attention(
    query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, bucket: Bucket, scoring: Scoring
) -> Tensor:
    query_NALD, key_NKLD, value_NKLD = (
        bucket.sequences(x).transpose(1, 2) for x in (query_TAD, key_TKD, value_TKD)
    )
    window = scoring.window
    if scoring.sinks_A is not None or (window is not None and bucket.length > window):
        out_NALD = lower_right_causal_attention(query_NALD, key_NKLD, value_NKLD, scoring)
        return out_NALD.transpose(1, 2).flatten(0, 1)
    key_NKLD, value_NKLD = _for_kernels(query_NALD, key_NKLD, value_NKLD)
    out_NALD = F.scaled_dot_product_attention(
        query_NALD,
        key_NKLD,
        value_NKLD,
        is_causal=True,
        scale=scoring.scale,
        enable_gqa=query_NALD.shape[1] != key_NKLD.shape[1],
    )
    return out_NALD.transpose(1, 2).flatten(0, 1)


def _wants_copies(query: Tensor) -> bool:
    """In float32 torch has for grouped queries on CUDA only the kernel that holds L x L scores per head."""
    return query.device.type != "cpu" and query.dtype == torch.float32


def _for_kernels(
    query: Tensor, key: Tensor, value: Tensor, *, has_mask: bool = False
) -> tuple[Tensor, Tensor]:
    """key and value as the device's fast kernels take them: [N, K, L, D], or [N, A, L, D] with a copy for each query head. With
    a mask of numbers CUDA's fast kernels group no queries."""
    copies = query.shape[1] // key.shape[1]
    is_grouped = not _wants_copies(query) and not (has_mask and query.device.type != "cpu")
    if copies == 1 or is_grouped:
        return key, value
    return key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)


def lower_right_causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention of the last n of L tokens, [N, A, n, D], to all up to themselves, [N, K, L, D], or to those of a window.

    No mask of n L bytes is made. CUDA's kernels know this mask. The CPU's kernel takes a mask with any strides: with
    the queries in reverse, row i of the mask is one line of n + L - 1 numbers, from its place i on.
    """
    scale, window, sinks_A = scoring.scale, scoring.window, scoring.sinks_A
    if sinks_A is not None:
        size = query.shape[-1]
        own_scale = size**-0.5 if scale is None else scale  # that of torch would be of the longer heads
        extended = _with_sink(query, key, value, own_scale, sinks_A)
        return _lower_right(*extended, own_scale, window, has_sink=True)[..., :size]
    return _lower_right(query, key, value, scale, window, has_sink=False)


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks_A: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """With a first key whose value is zero, and whose score with a query is the sink of its head: a learned number that takes
    its part of the softmax. (gpt-oss; the attention sinks of arXiv 2309.17453.)

    Queries, keys and values have ``SINK_SIZE`` numbers more: of a query sink / scale, of the new key 1, of the others zero. The
    gradient of the sinks is that of queries, and no mask needs one.
    """
    of_query = (sinks_A.to(query.dtype) / scale).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = torch.cat((query, F.pad(of_query, (0, SINK_SIZE - 1))), -1)
    sink = key.new_zeros(*key.shape[:2], 1, key.shape[-1] + SINK_SIZE)
    sink[..., key.shape[-1]] = 1.0
    key = torch.cat((sink, F.pad(key, (0, SINK_SIZE))), 2)
    return query, key, F.pad(value, (0, SINK_SIZE, 1, 0))


def _lower_right(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, *, has_sink: bool
) -> Tensor:
    n, length = query.shape[2], key.shape[2]
    if window is not None and length - has_sink > window:
        return _window_attention(query, key, value, scale, window, has_sink)
    key, value = _for_kernels(query, key, value)
    is_grouped = query.shape[1] != key.shape[1]
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=causal_lower_right(n, length), scale=scale, enable_gqa=is_grouped
        )
    # Reversed query i is token L - 1 - i, which sees key j where i + j < L.
    line = query.new_zeros(n + length - 1)
    line[length:] = -torch.inf
    mask = line.as_strided((n, length), (1, 1))
    out = F.scaled_dot_product_attention(
        query.flip(2), key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )
    return out.flip(2)


def _window_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int, has_sink: bool
) -> Tensor:
    """``lower_right_causal_attention`` under a window, in blocks of queries."""
    n, length = query.shape[2], key.shape[2] - has_sink
    key, value = _for_kernels(query, key, value, has_mask=True)
    # Saved by autograd once for all whole blocks and layers.
    whole_mask = _window_mask(window, WINDOW_BLOCK, has_sink, query.dtype, query.device)
    is_grouped = query.shape[1] != key.shape[1]
    parts = []
    for start in range(0, n, WINDOW_BLOCK):
        rows = query[:, :, start : start + WINDOW_BLOCK]
        place, size = length - n + start, rows.shape[2]
        before = min(place, window - 1)  # keys before the block's first query that it sees
        seen = slice(has_sink + place - before, has_sink + place + size)
        mask = whole_mask[:size, has_sink + window - 1 - before : has_sink + window - 1 + size]
        keys, values = key[:, :, seen], value[:, :, seen]
        if has_sink:
            is_whole = mask.shape[1] == whole_mask.shape[1] - 1
            mask = whole_mask if is_whole else torch.cat((whole_mask[:size, :1], mask), 1)
            keys, values = (torch.cat((x[:, :, :1], x[:, :, seen]), 2) for x in (key, value))
        parts.append(
            F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@lru_cache(maxsize=8)
def _window_mask(window: int, rows: int, has_sink: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, window - 1 + rows]: 0 where a query sees a key, -inf elsewhere. Query i stands at key window - 1 + i. With a sink
    there is a column before, which all see."""
    with torch.inference_mode(False):
        is_seen = torch.ones(rows, window - 1 + rows, dtype=torch.bool, device=device)
        is_seen = is_seen.tril_(window - 1).triu_()
        is_seen = F.pad(is_seen, (int(has_sink), 0), value=True)
        return torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, -torch.inf)
