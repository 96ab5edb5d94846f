"""Packed attention against a loop over sequences, tokens and heads' plain softmax, with gradients."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from parallel.megatron import attention, platform
from parallel.megatron.attention import Scoring, packed_attention, plan_packing, rotary_tables, rotate
from parallel.planning.architecture import ROTATED_IN_FLOAT32

CPU = torch.device("cpu")


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def naive_attention(query, key, value, lengths, window=None, sinks=None):
    """Per sequence and head: softmax over the past, or over the last ``window`` tokens of it, written out. sinks: of each
    head the score of a further key without a value."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    out, start = torch.zeros_like(query), 0
    rows = []
    for length in lengths:
        s = slice(start, start + length)
        mask = torch.ones(length, length).tril() == 0
        if window is not None:
            mask |= torch.ones(length, length).tril(-window) == 1
        per_head = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = (query[s, head] @ key[s, group].t() / dim**0.5).masked_fill(mask, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(length, 1)), -1)
            per_head.append(torch.softmax(scores, -1)[:, :length] @ value[s, group])
        rows.append(torch.stack(per_head, 1))
        start += length
    return torch.cat(rows) if rows else out


lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_strategy)
def test_plan_groups_equal_lengths_and_is_a_permutation(lengths):
    plan = plan_packing(bounds(lengths), CPU)
    values = torch.arange(sum(lengths))
    assert torch.equal(plan.to_batch_order(plan.to_model_order(values)), values)
    assert [b.length for b in plan.buckets] == sorted(set(lengths))
    assert plan.buckets[0].start == 0 and plan.buckets[-1].stop == sum(lengths)
    starts = torch.cat([torch.arange(n) for n in lengths])  # position within its sequence survives
    reordered = plan.to_model_order(starts)
    assert torch.equal(reordered, torch.cat([torch.arange(n) for n in sorted(lengths)]))


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_strategy, multiple=st.integers(1, 8), keep_order=st.booleans())
def test_dummies_make_the_tokens_divide_and_nobody_reads_them(lengths, multiple, keep_order):
    plan = plan_packing(bounds(lengths), CPU, keep_order=keep_order, multiple=multiple)
    total = sum(lengths)
    dummies = -total % multiple
    values = torch.arange(100, 100 + total)
    model_T = plan.to_model_order(values)
    assert model_T.numel() == total + dummies == plan.cu_seqlens[-1] == plan.buckets[-1].stop
    assert model_T[total:].tolist() == [100] * dummies
    everywhere = torch.ones(total + dummies, dtype=torch.bool)
    assert plan.without_dummies(everywhere).tolist() == [True] * total + [False] * dummies
    is_odd = plan.without_dummies(model_T % 2 == 1)
    assert torch.equal(plan.to_batch_order(is_odd), values % 2 == 1) and is_odd.sum() == (values % 2).sum()
    assert torch.diff(plan.cu_seqlens).tolist()[len(lengths) :] == [1] * dummies
    assert [b for bucket in plan.buckets for b in [bucket.length] * bucket.count] == torch.diff(
        plan.cu_seqlens
    ).tolist()
    hidden = torch.randn(total + dummies, requires_grad=True)
    plan.to_batch_order(hidden).sum().backward()
    assert hidden.grad.tolist() == [1.0] * total + [0.0] * dummies
    assert torch.equal(plan.to_batch_order(model_T), values)
    assert not keep_order or torch.equal(model_T[:total], values)


windows = st.sampled_from([None, 1, 2, 3, 5, 9])


@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths_strategy,
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    window=windows,
    has_sinks=st.booleans(),
    seed=st.integers(0, 100),
)
def test_matches_the_naive_loop_with_gradients(lengths, heads, window, has_sinks, seed):
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    batch = [torch.randn(total, h, 8, generator=g) for h in (heads[0], heads[1], heads[1])]
    upstream = torch.randn(total, heads[0], 8, generator=g)
    batch += [torch.randn(heads[0], generator=g)] if has_sinks else []
    wanted_in = [x.double().requires_grad_() for x in batch]
    wanted = naive_attention(*wanted_in[:3], lengths, window, *wanted_in[3:])
    wanted.backward(upstream.double())
    plan = plan_packing(bounds(lengths), CPU)
    found_in = [x.clone().requires_grad_() for x in batch]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "WINDOW_BLOCK", 3)
        out = packed_attention(
            *(plan.to_model_order(x) for x in found_in[:3]),
            plan.buckets,
            Scoring(window=window, sinks_A=found_in[3] if has_sinks else None),
            dtype=torch.float32,
        )
    found = plan.to_batch_order(out)
    found.backward(upstream)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found_in, wanted_in, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_sequence_sees_nothing_of_its_neighbours():
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, 2, 8, generator=g) for _ in range(3))
    plan = plan_packing(bounds([4, 4, 4]), CPU)
    before = packed_attention(query, key, value, plan.buckets, Scoring(), dtype=torch.float32)
    key[4:8], value[4:8] = 50.0, 50.0
    after = packed_attention(query, key, value, plan.buckets, Scoring(), dtype=torch.float32)
    assert (
        torch.equal(before[:4], after[:4])
        and torch.equal(before[8:], after[8:])
        and not torch.equal(before[4:8], after[4:8])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_the_same_with_and_without_gradient(dtype):
    g = torch.Generator().manual_seed(0)
    lengths = [3, 17, 3, 40, 17]
    query, key, value = (torch.randn(80, h, 16, generator=g).to(dtype) for h in (4, 2, 2))
    plan = plan_packing(bounds(lengths), CPU)
    with torch.no_grad():
        scored = packed_attention(query, key, value, plan.buckets, Scoring(), dtype=torch.float32)
    trained = packed_attention(
        query.requires_grad_(), key, value, plan.buckets, Scoring(), dtype=torch.float32
    )
    assert scored.dtype == dtype and torch.equal(scored, trained.detach())


def test_rotation_matches_transformers_and_its_gradient_autograd():
    g = torch.Generator().manual_seed(0)
    heads = torch.randn(7, 3, 10, generator=g)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 50])
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 10, 2) / 10)
    cos, sin = rotary_tables(inv_freq, 1.3, positions, torch.float32)
    mine, theirs = heads.clone().requires_grad_(), heads.clone().requires_grad_()
    found = rotate(mine, cos, sin)
    full = [torch.cat([x, x], -1).squeeze(1) for x in (cos, sin)]
    wanted = apply_rotary_pos_emb(
        theirs.transpose(0, 1), theirs.transpose(0, 1), *[x.unsqueeze(0) for x in full]
    )[0][0].transpose(0, 1)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(7, 3, 10, generator=g)
    found.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_float32_tables_rotate_heads_of_two_bytes_with_one_rounding():
    """As SGLang's kernel on GPUs; tables and products of two bytes are as far from it as a rounding of the heads."""
    g = torch.Generator().manual_seed(0)
    heads, positions = torch.randn(50, 3, 64, generator=g).bfloat16(), torch.arange(50) + 8000
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, 64, 2) / 64)
    cos, sin = rotary_tables(inv_freq, 1.0, positions, torch.float32)
    leaf = heads.clone().requires_grad_()
    found = rotate(leaf, cos, sin)
    a, b = heads.float().chunk(2, -1)
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
    found.backward(exact.bfloat16())
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad, heads, rtol=2**-6, atol=1e-2)  # rotated there and back
    in_two_bytes = rotate(heads, *rotary_tables(inv_freq, 1.0, positions, torch.bfloat16))
    errors = [(x.float() - exact).norm() for x in (found, in_two_bytes)]
    assert errors[1] > 1.4 * errors[0]


def test_tables_have_the_servers_dtype(monkeypatch):
    """SGLang keeps float32 tables on GPUs, for heads of the sizes that its kernel takes."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = (Path(package) / "srt/layers/rotary_embedding/base.py").read_text()
    (sizes,) = re.findall(r"not \(_is_cuda\) or self\.head_size not in \[([\d, ]+)\]", source)
    assert tuple(map(int, sizes.split(","))) == ROTATED_IN_FLOAT32
    half, single = torch.bfloat16, torch.float32
    assert [platform.rotary_dtype(half, size) for size in (64, 96)] == [half, half]
    monkeypatch.setattr(platform, "is_gpu", lambda: True)
    assert [platform.rotary_dtype(half, size) for size in (64, 96)] == [single, half]


@pytest.mark.parametrize("bad", [[0], [0, 3, 3], [1, 4]])
def test_bad_bounds_are_refused(bad):
    with pytest.raises(ValueError, match="cu_seqlens"):
        plan_packing(torch.tensor(bad, dtype=torch.int32), CPU)


def test_grouped_queries_in_float32_get_a_copy_of_their_head_on_a_gpu(monkeypatch):
    """Where torch has no fast kernel for them. The numbers are those of no copies, and so are the gradients."""
    for dtype, heads in ((torch.float32, 4), (torch.bfloat16, 2)):
        query, key = (torch.empty(1, count, 3, 8, device="meta", dtype=dtype) for count in (4, 2))
        assert [x.shape[1] for x in attention._for_kernels(query, key, key)] == [heads, heads]
    plan = plan_packing(bounds([5, 3, 5]), CPU)
    batch = [torch.randn(13, count, 8, requires_grad=True) for count in (4, 2, 2)]
    upstream = torch.randn(13, 4, 8)
    results = []
    for copies in (False, True):
        monkeypatch.setattr(attention, "_wants_copies", lambda query, copies=copies: copies)
        out = packed_attention(*batch, plan.buckets, Scoring(), dtype=torch.float32)
        results.append((out, *torch.autograd.grad(out, batch, upstream)))
    for without, with_copies in zip(*results, strict=True):
        torch.testing.assert_close(with_copies, without)
