"""Sums and maxima by sequence against plain loops, both ways that they are computed."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.segments import (
    count_per_sequence,
    max_per_sequence,
    spread,
    sum_per_sequence,
    valid_tokens,
)

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def packed(lengths, seed: int, dtype=torch.float64):
    x_T = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )
    return x_T, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), x_T.split(lengths)


@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    by_torch=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_sums_and_maxima_are_those_of_plain_loops(lengths, seed, by_torch, dtype):
    x_T, cu_seqlens, parts = packed(lengths, seed, dtype)
    x_T.requires_grad_(by_torch)
    sums_S, maxima_S = sum_per_sequence(x_T, cu_seqlens), max_per_sequence(x_T, cu_seqlens)
    assert sums_S.requires_grad == by_torch and sums_S.dtype == maxima_S.dtype == dtype
    assert sums_S.tolist() == pytest.approx(
        [math.fsum(part.tolist()) for part in parts], abs=1e-5 if dtype == torch.float32 else 1e-12
    )
    assert maxima_S.tolist() == [max(part.tolist(), default=-math.inf) for part in parts]
    if by_torch:
        (sums_S * torch.arange(len(lengths))).sum().backward()
        assert x_T.grad.tolist() == [float(i) for i, length in enumerate(lengths) for _ in range(length)]
        (of_maxima_T,) = torch.autograd.grad(maxima_S[maxima_S.isfinite()].sum(), x_T)
        greatest = [number == part.argmax() for part in parts for number in range(len(part))]
        assert of_maxima_T.tolist() == [float(is_greatest) for is_greatest in greatest]


@given(lengths=LENGTHS, seed=st.integers(0, 99), by_torch=st.booleans(), data=st.data())
def test_a_nan_stays_in_its_sequence(lengths, seed, by_torch, data):
    x_T, cu_seqlens, _ = packed(lengths, seed)
    hit = data.draw(st.integers(0, sum(lengths) - 1)) if sum(lengths) else -1
    if hit >= 0:
        x_T[hit] = torch.nan
    x_T.requires_grad_(by_torch)
    wanted = [start <= hit < end for start, end in itertools.pairwise(cu_seqlens.tolist())]
    assert sum_per_sequence(x_T, cu_seqlens).isnan().tolist() == wanted
    assert max_per_sequence(x_T, cu_seqlens).isnan().tolist() == wanted


@given(
    lengths=LENGTHS,
    others=LENGTHS,
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_sequence_has_the_same_sum_in_any_company(lengths, others, seed, dtype):
    """To the bit, wherever it comes to stand in memory."""
    lengths = [100 * length + 7 for length in lengths]
    x_T, cu_seqlens, _ = packed(lengths, seed, dtype)
    moved_T = torch.cat([torch.ones(sum(others), dtype=dtype), x_T])
    moved = torch.tensor([0, *others, *lengths]).cumsum(0)
    assert sum_per_sequence(moved_T, moved)[len(others) :].equal(sum_per_sequence(x_T, cu_seqlens))


@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_valid_tokens_are_where_the_mask_is_true(lengths, seed):
    x_T, cu_seqlens, parts = packed(lengths, seed)
    mask_T = x_T > 0
    valid = valid_tokens(mask_T, cu_seqlens)
    assert valid.pick(x_T).tolist() == [x for x in x_T.tolist() if x > 0]
    counts = [int((part > 0).sum()) for part in parts]
    assert valid.bounds_S.diff().tolist() == counts == count_per_sequence(mask_T, cu_seqlens).tolist()
    assert torch.equal(valid.put_back(valid.pick(x_T)), torch.where(mask_T, x_T, 0.0))
    assert spread(torch.arange(len(lengths)), cu_seqlens).tolist() == [
        i for i, length in enumerate(lengths) for _ in range(length)
    ]


def test_what_numpy_has_no_type_for_is_summed_by_torch():
    assert sum_per_sequence(
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16), torch.tensor([0, 1, 3])
    ).tolist() == [1.0, 6.0]
