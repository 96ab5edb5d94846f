"""The split of sequences over context-parallel ranks as arithmetic, and the attention of a part of a sequence.
``tests/parallel/test_layout_parity.py`` has whole steps over several processes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.megatron import attention
from parallel.megatron.attention import Scoring, plan_packing
from parallel.megatron.context_parallel import lower_right_causal_attention, split_context
from tests.parallel.megatron.test_attention import CPU, bounds

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def plans_of(lengths, size, multiple=1):
    """The plan of each rank."""
    whole = plan_packing(bounds(lengths), CPU)
    return [
        split_context(whole, CPU, size=size, rank=rank, group=None, multiple=multiple) for rank in range(size)
    ]


def owners_by_definition(lengths, size):
    """The rank of each token of the batch, written out: cut at i L // (2 C), rank r has chunks r and 2 C - 1 - r."""
    owners = []
    for length in lengths:
        for position in range(length):
            chunk = max(i for i in range(2 * size) if i * length // (2 * size) <= position)
            owners.append(min(chunk, 2 * size - 1 - chunk))
    return owners


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, size=st.integers(2, 5), multiple=st.integers(1, 4))
def test_each_token_is_on_one_rank_and_comes_back(lengths, size, multiple):
    plans = plans_of(lengths, size, multiple)
    owners = owners_by_definition(lengths, size)
    values_T = torch.arange(100, 100 + sum(lengths))
    local = [plan.to_model_order(values_T) for plan in plans]
    (per_rank,) = {part_T.numel() for part_T in local}
    assert per_rank % multiple == 0 and per_rank < max(map(owners.count, range(size))) + multiple
    for rank, (plan, part_T) in enumerate(zip(plans, local, strict=True)):
        count = owners.count(rank)
        assert sorted(part_T[:count].tolist()) == [100 + t for t, owner in enumerate(owners) if owner == rank]
        assert part_T[count:].tolist() == [100] * (per_rank - count)
        assert plan.first == rank * per_rank
        assert torch.equal(torch.cat(local)[plan.inverse_T], values_T)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, size=st.integers(2, 5))
def test_chunks_are_where_the_tokens_are(lengths, size):
    """The chunks of a bucket, read from the gathered tokens and put side by side, are its sequences; a rank's
    own chunks are its tokens in their order."""
    plans = plans_of(lengths, size)
    owners = owners_by_definition(lengths, size)
    tokens_T = torch.arange(sum(lengths))
    gathered_T = torch.cat([plan.to_model_order(tokens_T) for plan in plans])
    whole_T = plan_packing(bounds(lengths), CPU).to_model_order(tokens_T)
    for rank, plan in enumerate(plans):
        places = []
        for i, bucket in enumerate(plan.split_buckets):
            for chunk in bucket.own:
                assert chunk.start == plan.first + sum(map(len, places))
                places.append(range(bucket.count * (chunk.stop - chunk.first)))
            if i < len(plan.buckets):
                rows = [
                    gathered_T[c.start : c.start + bucket.count * (c.stop - c.first)].view(bucket.count, -1)
                    for c in bucket.chunks
                ]
                wanted = plan.buckets[i]
                assert torch.equal(torch.cat(rows, 1).flatten(), whole_T[wanted.start : wanted.stop])
                assert bucket.chunks[0].first == 0 and bucket.chunks[-1].stop == wanted.length
        assert sum(map(len, places)) == plan.to_model_order(tokens_T).numel() >= owners.count(rank)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 5000), size=st.integers(2, 8))
def test_causal_work_is_even(length, size):
    """Pairs of query and key on the fullest rank are those of a C-th, but for chunks that differ by one token."""
    positions_T = torch.arange(length)
    work = [plan.to_model_order(positions_T + 1) for plan in plans_of([length], size)]
    filled = [sum(part_T.tolist()) for part_T in work]  # filling costs 1 each
    even = length * (length + 1) / 2 / size
    assert max(filled) <= even + 2 * length + 2


def test_a_split_by_hand():
    """Seven tokens over two ranks are cut at 0, 1, 3, 5, 7; two tokens, on rank 1 and rank 0, at 0, 0, 1, 1, 2."""
    first, second = plans_of([7, 2], 2)
    # Buckets by length: the two tokens of the second sequence, 7 and 8, come first.
    assert first.to_model_order(torch.arange(9)).tolist() == [8, 0, 5, 6, 0]
    assert second.to_model_order(torch.arange(9)).tolist() == [7, 1, 2, 3, 4]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize(("n", "length"), [(1, 1), (1, 9), (5, 5), (5, 9), (70, 300)])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_the_end_of_a_sequence_attends_like_the_whole(heads, n, length, window, monkeypatch):
    """Against the last rows of the causal attention of the whole sequence, with gradients of keys and values."""
    monkeypatch.setattr(attention, "WINDOW_BLOCK", 32)
    g = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, h, length, 8, generator=g, requires_grad=True) for h in (heads[0], heads[1], heads[1])
    ]
    mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
    wanted = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=heads[0] != heads[1])
    wanted = wanted[:, :, -n:]
    found = lower_right_causal_attention(whole[0][:, :, -n:], whole[1], whole[2], Scoring(window=window))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(found.shape, generator=g)
    gradients = [torch.autograd.grad(out, whole, upstream, retain_graph=True) for out in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_end_of_a_sequence_on_a_gpu_makes_no_mask(dtype):
    """4096 queries against 32768 keys: as many scores of four heads would take a GB and more, a mask 134 MB."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 64, generator=g).cuda().to(dtype).requires_grad_()
        for heads, tokens in ((4, 4096), (2, 32768), (2, 32768))
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = lower_right_causal_attention(query, key, value, Scoring())
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 300e6
    wanted = lower_right_causal_attention(*(x.detach().cpu().float() for x in (query, key, value)), Scoring())
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
