"""Attention of SGLang's CPU servers, many sequences in one call.

SGLang's ``torch_native`` backend calls torch once for each sequence and layer, which takes most of a small model's
time. Here sequences of similar length form a bucket. They are padded and attended to together. The places of their
keys and the mask are computed once for a forward pass and serve all its layers.

Encoders, cross-attention, speculative decoding and very long prefills go to SGLang's own code.

T tokens of the forward pass; of a bucket, after padding: B sequences, Q queries each, K keys each; H heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

MAX_RATIO = 2.0
"""Longest to shortest sequence of a bucket, in keys."""
SHORT = 64
"""Sequences of up to this many keys share a bucket, whatever their ratio."""
MAX_KEYS = 1 << 17
"""B * K: bounds the keys and values that are gathered."""
MAX_PAIRS = 1 << 24
"""B * Q * K: bounds the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sequences that are attended to together."""

    size: tuple[int, int, int]
    """B, Q, K."""
    slots: Tensor
    """int64 [B * K], the places of the keys in the cache. Padding repeats a sequence's last key, because an unused slot
    may hold NaN."""
    mask: Tensor
    """bool [B, 1, Q, K], True where a query sees a key. Every padded query sees what the sequence's last one
    sees."""
    rows: Tensor | None
    """int64 [B * Q], the places of the queries in the forward pass. None: all of it, in order, without padding."""
    kept: Tensor | None
    """int64, the queries of B * Q that are not padding. None: all."""
    last_seen: Tensor
    """int64 [B, Q], the last key that a query sees."""
    window_masks: dict[int, Tensor] = field(default_factory=dict)
    """``mask_of`` by window."""

    def mask_of(self, window: int | None) -> Tensor:
        """``mask``, and False also on keys more than ``window`` before the last one that a query sees (SGLang's
        ``sliding_window_size``, which does not count the query itself)."""
        if window is None:
            return self.mask
        if window not in self.window_masks:
            key_K = torch.arange(self.size[2])
            is_near = key_K >= self.last_seen[:, :, None] - window
            self.window_masks[window] = self.mask & is_near[:, None]
        return self.window_masks[window]


def make_buckets(
    req_to_token: Tensor, requests: Tensor, kv_lens: Sequence[int], q_lens: Sequence[int]
) -> list[Bucket] | None:
    """The buckets of a forward pass; None if a sequence is too long for a mask.

    Args:
        req_to_token: int [requests, positions], the cache slot of each token of each request.
        requests: int [sequences], rows of ``req_to_token``.
        kv_lens: keys of each sequence, its cached prefix included. q_lens: its new tokens, whose queries stand at
            the end of its keys. The forward pass has the new tokens of all sequences one after another.
    """
    starts = [0, *accumulate(q_lens)]
    buckets = []
    for members in group_by_length(kv_lens, q_lens):
        if len(members) == 1 and kv_lens[members[0]] * q_lens[members[0]] > MAX_PAIRS:
            return None
        whole = len(members) == len(kv_lens)
        kv_B1, q_B1, start_B1 = (
            torch.tensor([values[i] for i in members])[:, None] for values in (kv_lens, q_lens, starts)
        )
        key_K = torch.arange(int(kv_B1.max()))
        query_Q = torch.arange(int(q_B1.max()))
        chosen = requests if whole else requests[torch.tensor(members)]
        slots_BK = req_to_token[chosen[:, None], torch.minimum(key_K, kv_B1 - 1)].long()
        query_BQ = torch.minimum(query_Q, q_B1 - 1)
        last_seen_BQ = kv_B1 - q_B1 + query_BQ
        real_BQ = query_Q < q_B1
        padded = not bool(real_BQ.all())
        buckets.append(
            Bucket(
                size=(len(members), len(query_Q), len(key_K)),
                slots=slots_BK.view(-1),
                mask=(key_K <= last_seen_BQ[:, :, None])[:, None],
                rows=(start_B1 + query_BQ).view(-1) if padded or not whole else None,
                kept=real_BQ.view(-1).nonzero()[:, 0] if padded else None,
                last_seen=last_seen_BQ,
            )
        )
    return buckets


def group_by_length(kv_lens: Sequence[int], q_lens: Sequence[int]) -> list[list[int]]:
    """Indices of sequences, by bucket; within a bucket in the order of the forward pass."""
    groups: list[list[int]] = []
    shortest = most_queries = 0
    for i in sorted(range(len(kv_lens)), key=kv_lens.__getitem__):
        keys, queries = kv_lens[i], max(most_queries, q_lens[i])
        size = len(groups[-1]) + 1 if groups else 1
        fits = (
            keys <= max(SHORT, MAX_RATIO * shortest)
            and size * keys <= MAX_KEYS
            and size * keys * queries <= MAX_PAIRS
        )
        if groups and fits:
            groups[-1].append(i)
            most_queries = queries
        else:
            groups.append([i])
            shortest, most_queries = keys, q_lens[i]
    return [sorted(group) for group in groups]


def attend(
    bucket: Bucket,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float | None,
    softmax_of: Callable[..., Tensor] = scaled_dot_product_attention,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the bucket's rows of ``output``.

    Args:
        query: [T, H, D]. output: [T, H, D of the values]. k_cache, v_cache: [slots, key-value heads, D].
        softmax_of: attention of [B, key-value heads, ...], with torch's arguments.
        window: see ``Bucket.mask_of``.
        sinks: [H], one score per head that belongs to no key and takes its part of the softmax.
    """
    num_sequences, num_queries, num_keys = bucket.size
    heads, kv_heads = query.shape[1], k_cache.shape[1]
    group = heads // kv_heads
    keys, values = (
        cache.index_select(0, bucket.slots)
        .view(num_sequences, num_keys, kv_heads, -1)
        .transpose(1, 2)
        .to(query.dtype)
        for cache in (k_cache, v_cache)
    )
    rows = query if bucket.rows is None else query.index_select(0, bucket.rows)
    # The heads that share a key-value head count as further queries of it: [B, kv_heads, group * Q, D].
    queries = rows.view(num_sequences, num_queries, kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = bucket.mask_of(window)
    mask = mask if num_queries == 1 else mask.repeat(1, 1, group, 1)
    if sinks is not None:
        if scale is None:
            scale = float(queries.shape[-1] ** -0.5)
        queries, keys, values, mask = with_sink(queries, keys, values, mask, sinks, scale, num_queries)
    attended = softmax_of(queries, keys, values, attn_mask=mask, scale=scale)
    if sinks is not None:
        attended = attended[..., : v_cache.shape[-1]]
    result = (
        attended.unflatten(2, (group, num_queries))
        .permute(0, 3, 1, 2, 4)
        .reshape(num_sequences * num_queries, heads, -1)
    )
    if bucket.rows is None:
        output.copy_(result)
    elif bucket.kept is None:
        output.index_copy_(0, bucket.rows, result)
    else:
        output.index_copy_(0, bucket.rows[bucket.kept], result[bucket.kept])


def with_sink(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor, scale: float, num_queries: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """queries [B, kv_heads, group * Q, D], keys, values and mask with one more key. Its value is zero, and its score with a
    query is the sink of the query's head. For this queries and keys get one more number: 1 in this key, 0 in the other keys,
    and sink / scale in a query."""
    by_head = sinks.to(queries.dtype) / scale
    of_query = by_head.view(1, keys.shape[1], -1, 1).repeat_interleave(num_queries, 2)
    queries = torch.cat((queries, of_query.expand(len(queries), -1, -1, -1)), -1)
    sink = torch.zeros_like(keys[:, :, :1])
    keys = torch.cat((pad(keys, (0, 1)), pad(sink, (0, 1), value=1.0)), 2)
    return queries, keys, pad(values, (0, 1, 0, 1)), pad(mask, (0, 1), value=True)


_Backend: Any = object  # for type checkers: SGLang's class


class Batched(_Backend):
    """Mixed into SGLang's ``torch_native`` backend: ``attend`` instead of its loops."""

    softmax_of: Callable[..., Tensor] | None = None
    """See ``make_backend``."""
    _buckets: list[Bucket] | None = None
    _sinks: Tensor | None = None

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self._buckets = buckets_of(self.req_to_token_pool.req_to_token, forward_batch)

    def forward_decode(self, *arguments, sinks: Tensor | None = None, **options):
        self._sinks = sinks
        return super().forward_decode(*arguments, **options)

    def forward_extend(self, *arguments, sinks: Tensor | None = None, **options):
        self._sinks = sinks
        return super().forward_extend(*arguments, **options)

    def _run_sdpa_forward_decode(self, *arguments, **options):
        return self._attended(super()._run_sdpa_forward_decode, True, *arguments, **options)

    def _run_sdpa_forward_extend(self, *arguments, **options):
        is_causal = bool(options.get("causal"))
        return self._attended(super()._run_sdpa_forward_extend, is_causal, *arguments, **options)

    def _attended(self, sglangs, is_causal, query, output, k_cache, v_cache, *rest, **options):
        """sglangs: SGLang's own code, for attention that ``attend`` does not compute."""
        window, scale = options.get("sliding_window_size"), options.get("scaling")
        has_more = window is not None or self._sinks is not None
        is_other = options.get("is_cross_attn") or (has_more and self.softmax_of is not None)
        if self._buckets is None or is_other or not is_causal:
            self._require_sglangs()
            return sglangs(query, output, k_cache, v_cache, *rest, **options)
        softmax_of = self.softmax_of or scaled_dot_product_attention
        for bucket in self._buckets:
            attend(bucket, query, output, k_cache, v_cache, scale, softmax_of, window, self._sinks)
        return output

    def _require_sglangs(self) -> None:
        """Raises ValueError if SGLang's own code would compute something else."""
        if self.softmax_of is not None:
            what = "model.numerics=aligned: this attention is not plain causal attention, or"
        elif self._sinks is not None:
            what = "a model with attention sinks:"
        else:
            return
        raise ValueError(
            f"{what} a prefill has more than {MAX_PAIRS} pairs of query and key in one sequence; lower "
            "rollout.server_args.chunked_prefill_size"
        )


def buckets_of(req_to_token: Tensor, forward_batch) -> list[Bucket] | None:
    """``make_buckets`` of SGLang's batch; None if SGLang's own code must compute its attention."""
    mode, kv_lens = forward_batch.forward_mode, forward_batch.seq_lens_cpu
    plain = forward_batch.encoder_lens is None and forward_batch.spec_info is None
    if not plain or kv_lens is None or not len(kv_lens):
        return None
    if mode.is_decode():
        q_lens = [1] * len(kv_lens)
    elif mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
        q_lens = list(forward_batch.extend_seq_lens_cpu)
    else:
        return None
    return make_buckets(req_to_token, forward_batch.req_pool_indices, kv_lens.tolist(), q_lens)


def make_backend(runner, softmax_of: Callable[..., Tensor] | None = None):
    """SGLang's ``torch_native`` backend for a model runner, with ``Batched``. With ``softmax_of`` it raises a
    ValueError if it would have to leave an attention to SGLang's own code."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(Batched, TorchNativeAttnBackend):
        pass

    backend = BatchedAttention(runner)
    backend.softmax_of = softmax_of
    return backend
