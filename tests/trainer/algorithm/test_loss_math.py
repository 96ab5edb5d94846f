"""The whole chain from log-probs to loss against the same on padded tensors; valid tokens and counts per
sequence against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loss_math import check_agreement
from trainer.algorithm.segments import count_per_sequence, valid_tokens


def test_packed_and_padded_agree_in_everything_they_return():
    check_agreement(512)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 600), st.just(256)), max_size=6), st.integers(0, 2**31))
def test_counts_are_those_of_a_loop(lengths, seed):
    mask_T = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) < 0.6
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    expected = [sum(part.tolist()) for part in mask_T.split(lengths)]
    found_S = count_per_sequence(mask_T, cu_seqlens)
    assert found_S.dtype == torch.int64 and found_S.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8), max_size=5))
def test_valid_tokens_are_those_of_a_loop(rows):
    mask, cu_seqlens = [on for row in rows for on in row], [0]
    bounds, run_bounds = [0], {0}
    for row in rows:
        cu_seqlens.append(cu_seqlens[-1] + len(row))
        bounds.append(bounds[-1] + sum(row))
    for place, on in enumerate(mask):
        if not on:
            run_bounds.add(sum(mask[:place]))
    x_T, mask_T = torch.arange(1.0, len(mask) + 1, requires_grad=True), torch.tensor(mask, dtype=torch.bool)
    valid = valid_tokens(mask_T, torch.tensor(cu_seqlens, dtype=torch.int32))
    assert valid.bounds_S.tolist() == bounds and valid.bounds_S.dtype == torch.int64
    assert valid.run_bounds().tolist() == sorted(run_bounds | set(bounds))
    picked_N = valid.pick(x_T)
    assert torch.equal(picked_N, x_T[mask_T]) and torch.equal(valid.put_back(picked_N), x_T * mask_T)
    assert torch.equal(valid.put_back(picked_N.detach() > 0), mask_T)
    (gradient_T,) = torch.autograd.grad(valid.put_back(2 * picked_N).sum(), x_T)
    assert torch.equal(gradient_T, 2.0 * mask_T)
