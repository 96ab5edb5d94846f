"""Aggregation weights: each mode's mean against a loop over sequences, additivity under any split, and the
empty batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.packed_batches import count_valid
from trainer.algorithm.aggregation import (
    Counted,
    GlobalCounts,
    Mode,
    aggregation_weights,
    kept_factor,
    over_kept,
    units,
)
from trainer.ranks.totals import alone

MODES = Mode.__args__
CONSTANT = 7


def constant_of(mode):
    return CONSTANT if mode == "sequence_mean_token_sum_over_constant" else None


def slow_mean(losses, masks, mode):
    """Rows of losses and masks, one per sequence -> the mode's mean, from its definition."""
    rows = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_sequence = {
        "sequence_mean_token_mean": lambda row: sum(row) / len(row),
        "sequence_mean_token_sum": sum,
        "sequence_mean_token_sum_over_constant": lambda row: sum(row) / CONSTANT,
    }[mode]
    return sum(per_sequence(row) for row in rows) / len(rows)


masks_strategy = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=8)


def pack(masks):
    return torch.tensor([m for row in masks for m in row]), torch.tensor(
        [0] + [len(row) for row in masks]
    ).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=80, deadline=None)
@given(masks=masks_strategy, seed=st.integers(0, 99), cut=st.integers(0, 8))
def test_parts_add_up_to_the_mean_of_the_whole(mode, masks, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(len(row), generator=generator, dtype=torch.float64).tolist() for row in masks]
    parts = [part for part in (masks[:cut], masks[cut:]) if part]
    found = [count_valid(*pack(part)) for part in parts]
    counts = GlobalCounts(tokens=sum(c.tokens for c in found), sequences=sum(c.sequences for c in found))
    assert counts == count_valid(*pack(masks))
    weights = [
        aggregation_weights(*pack(part), mode=mode, constant=constant_of(mode), counts=counts)
        for part in parts
    ]
    whole = aggregation_weights(*pack(masks), mode=mode, constant=constant_of(mode), counts=counts)
    assert torch.equal(torch.cat(weights), whole), "a split changed a weight"
    total = (
        (whole.double() * torch.tensor([x for row in losses for x in row], dtype=torch.float64)).sum().item()
    )
    assert total == pytest.approx(slow_mean(losses, masks, mode), rel=1e-6, abs=1e-6)

    # Rejection that comes later leaves the mean over what is kept.
    mask_T, cu_seqlens = pack(masks)
    keep_T = mask_T & (torch.rand(len(mask_T), generator=generator) < 0.6)
    counts = count_valid(keep_T, cu_seqlens)
    kept = aggregation_weights(keep_T, cu_seqlens, mode=mode, constant=constant_of(mode), counts=counts)
    later, counted = over_kept(whole, keep_T, mask_T, cu_seqlens, mode=mode)
    torch.testing.assert_close(later * kept_factor([counted]), kept)


@settings(max_examples=80, deadline=None)
@given(masks=masks_strategy, rejected=st.sets(st.integers(0, 80)), seed=st.integers(0, 99))
def test_turn_mean_is_the_mean_over_turns_of_each_turns_mean(masks, rejected, seed):
    """Against a loop over runs of response tokens; a rejected token leaves its turn, and does not split it."""
    mask_T, cu_seqlens = pack(masks)
    keep_T = mask_T & torch.tensor([place not in rejected for place in range(len(mask_T))])
    losses = torch.randn(len(mask_T), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turns, place = [], 0
    for row in masks:
        run = []
        for flag in [*row, False]:
            if flag:
                run.append(place)
            elif run:
                turns.append([p for p in run if keep_T[p]])
                run = []
            place += 1
        place -= 1  # the flag that closes a row has no place
    means = [sum(losses[p].item() for p in turn) / len(turn) for turn in turns if turn]
    expected = sum(means) / len(means) if means else 0.0

    mode, bounds = units("turn_mean", mask_T, cu_seqlens)
    counts = count_valid(keep_T, bounds)
    weights = aggregation_weights(keep_T, bounds, mode=mode, constant=None, counts=counts)
    assert counts.sequences == len(means)
    assert (weights.double() * losses).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    all_turns = aggregation_weights(
        mask_T, bounds, mode=mode, constant=None, counts=count_valid(mask_T, bounds)
    )
    later, counted = over_kept(all_turns, keep_T, mask_T, cu_seqlens, mode="turn_mean")
    torch.testing.assert_close(later * kept_factor([counted]), weights)


def test_by_hand():
    mask_T, cu_seqlens = pack([[False, True, True], [False, False], [True]])
    counts = count_valid(mask_T, cu_seqlens)
    assert counts == GlobalCounts(tokens=3, sequences=2)
    many = GlobalCounts(tokens=2**24 + 1, sequences=2**24 + 3)  # the first numbers that float32 does not hold
    assert many.summed(alone) == many
    expected = {
        "token_mean": [0, 1 / 3, 1 / 3, 0, 0, 1 / 3],
        "sequence_mean_token_mean": [0, 1 / 4, 1 / 4, 0, 0, 1 / 2],
        "sequence_mean_token_sum": [0, 1 / 2, 1 / 2, 0, 0, 1 / 2],
        "sequence_mean_token_sum_over_constant": [0, 1 / 14, 1 / 14, 0, 0, 1 / 14],
    }
    for mode, weights in expected.items():
        found = aggregation_weights(mask_T, cu_seqlens, mode=mode, constant=constant_of(mode), counts=counts)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(weights))
    for constant, divisor in ((1, 2), (3, 6)):
        found = aggregation_weights(mask_T, cu_seqlens, mode=MODES[3], constant=constant, counts=counts)
        torch.testing.assert_close(found, mask_T / divisor)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_valid_weighs_nothing(mode):
    mask_T, cu_seqlens = pack([[False, False], [False]])
    counts = count_valid(mask_T, cu_seqlens)
    assert counts == GlobalCounts(tokens=0, sequences=0)
    assert (
        aggregation_weights(mask_T, cu_seqlens, mode=mode, constant=constant_of(mode), counts=counts).tolist()
        == [0.0] * 3
    )
    assert kept_factor([Counted(all=3, kept=0), None]) == kept_factor([None]) == 1.0
    no_tokens = torch.zeros(0, dtype=torch.bool), torch.zeros(1, dtype=torch.int32)
    assert count_valid(*no_tokens) == counts
    assert aggregation_weights(*no_tokens, mode=mode, constant=constant_of(mode), counts=counts).numel() == 0


def test_errors():
    mask_T, cu_seqlens = pack([[True, True]])
    with pytest.raises(ValueError, match="not global"):
        aggregation_weights(
            mask_T, cu_seqlens, mode="token_mean", constant=None, counts=GlobalCounts(tokens=1, sequences=1)
        )
    with pytest.raises(ValueError, match="sequence_mean_token_sum finds 2 in this part only"):
        aggregation_weights(
            *pack([[True], [True]]),
            mode="sequence_mean_token_sum",
            constant=None,
            counts=GlobalCounts(tokens=2, sequences=1),
        )
    for constant in (None, 0):
        with pytest.raises(ValueError, match=f"constant of at least 1, got {constant}"):
            aggregation_weights(
                mask_T,
                cu_seqlens,
                mode="sequence_mean_token_sum_over_constant",
                constant=constant,
                counts=GlobalCounts(tokens=2, sequences=1),
            )
    with pytest.raises(ValueError, match="token_mean"):
        aggregation_weights(
            mask_T, cu_seqlens, mode="mean", constant=None, counts=GlobalCounts(tokens=2, sequences=1)
        )
