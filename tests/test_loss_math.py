"""The whole chain from log-probs to loss against the same on padded tensors, and counts per sequence against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loss_math import check_agreement
from trainer.segments import count_per_sequence


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
