"""The batched attention of CPU servers against one sequence at a time. A real server with it: test_sglang.py."""

import sys
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.servers.command import PLUGIN

sys.path.append(str(PLUGIN))  # as SGLang finds it
import tandem_batched_attention as batched

SLOTS, HEAD_DIM, SCALE = 4096, 16, 0.3
lengths = st.lists(
    st.integers(1, 200).flatmap(lambda keys: st.tuples(st.just(keys), st.integers(1, keys))),
    min_size=1,
    max_size=12,
)


def make_cache(kv_lens: list[int], kv_heads: int, dtype: torch.dtype):
    """A cache in which only the slots of the sequences were written, in no order; NaN elsewhere."""
    requests = torch.randperm(2 * len(kv_lens))[: len(kv_lens)]
    table = torch.zeros(2 * len(kv_lens), max(kv_lens) + 3, dtype=torch.int32)
    written = torch.randperm(SLOTS)[: sum(kv_lens)]
    for request, slots in zip(requests.tolist(), written.split(kv_lens), strict=True):
        table[request, : len(slots)] = slots.int()
    caches = torch.full((2, SLOTS, kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
    caches[:, written] = torch.randn(2, len(written), kv_heads, HEAD_DIM, dtype=dtype)
    return table, requests, *caches


def one_at_a_time(query, table, requests, k_cache, v_cache, kv_lens, q_lens, window=None, sinks=None):
    group = query.shape[1] // k_cache.shape[1]
    outputs = []
    for request, keys, queries in zip(requests.tolist(), kv_lens, query.split(q_lens), strict=True):
        slots = table[request, :keys].long()
        k, v = (cache[slots].repeat_interleave(group, 1).transpose(0, 1) for cache in (k_cache, v_cache))
        last = torch.arange(keys - len(queries), keys)[:, None]
        sees = torch.arange(keys) <= last
        if window is not None:  # as in SGLang, which does not count the query itself
            sees &= torch.arange(keys) >= last - window
        scores = (queries.transpose(0, 1) @ k.transpose(1, 2) * SCALE).masked_fill(~sees, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(queries), 1)), -1)
        attended = scores.softmax(-1)[..., :keys] @ v
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


def compare(
    kv_lens: list[int],
    q_lens: list[int],
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None = None,
    has_sinks: bool = False,
):
    table, requests, k_cache, v_cache = make_cache(kv_lens, kv_heads, dtype)
    query = torch.randn(sum(q_lens), heads, HEAD_DIM, dtype=dtype)
    output = torch.full_like(query, torch.nan)
    sinks = torch.randn(heads, dtype=dtype) if has_sinks else None
    buckets = batched.make_buckets(table, requests, kv_lens, q_lens)
    for bucket in buckets:
        batched.attend(bucket, query, output, k_cache, v_cache, SCALE, window=window, sinks=sinks)
    expected = one_at_a_time(query, table, requests, k_cache, v_cache, kv_lens, q_lens, window, sinks)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@given(
    lengths,
    st.booleans(),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([None, 0, 7, 100]),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_it_is_the_attention_of_each_sequence(pairs, decodes, heads, window, has_sinks, seed):
    torch.manual_seed(seed)
    kv_lens = [keys for keys, _ in pairs]
    q_lens = [1 if decodes else queries for _, queries in pairs]
    compare(kv_lens, q_lens, *heads, torch.float32, 1e-5, window, has_sinks)


def test_it_is_so_in_bfloat16():
    torch.manual_seed(0)
    compare([5, 9, 150, 7], [5, 1, 20, 7], 4, 2, torch.bfloat16, 2e-2)


@given(lengths)
def test_every_sequence_is_in_one_bucket_of_bounded_size(pairs):
    kv_lens, q_lens = map(list, zip(*pairs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "MAX_KEYS", 600)
        patch.setattr(batched, "MAX_PAIRS", 4000)
        groups = batched.group_by_length(kv_lens, q_lens)
    assert sorted(i for group in groups for i in group) == list(range(len(kv_lens)))
    for group in groups:
        keys, queries = max(kv_lens[i] for i in group), max(q_lens[i] for i in group)
        assert group == sorted(group)
        assert len(group) == 1 or (len(group) * keys <= 600 and len(group) * keys * queries <= 4000)
        assert keys <= max(batched.SHORT, batched.MAX_RATIO * min(kv_lens[i] for i in group))


def test_a_prefill_too_long_for_a_mask_is_left_to_sglang(monkeypatch):
    monkeypatch.setattr(batched, "MAX_PAIRS", 99)
    table, requests, *_ = make_cache([3, 10], 1, torch.float32)
    assert batched.make_buckets(table, requests, [3, 10], [1, 10]) is None
    assert batched.make_buckets(table, requests, [3, 10], [1, 9]) is not None


def test_a_decode_of_like_lengths_is_one_call_without_gathering():
    table, requests, *_ = make_cache([20, 31, 17], 1, torch.float32)
    (bucket,) = batched.make_buckets(table, requests, [20, 31, 17], [1, 1, 1])
    assert (bucket.size, bucket.rows, bucket.kept) == ((3, 1, 31), None, None)
    assert list(accumulate(bucket.mask.sum((1, 2, 3)).tolist())) == [20, 51, 68]
