"""GRPO advantages: golden cases, hand calculations, and what must not matter."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.objective import GrpoAdvantage
from tests.golden_cases import load
from trainer.advantages import compute_advantages, grpo


@pytest.mark.parametrize("case", load("advantage"), ids=lambda c: c.name)
def test_golden(case):
    rewards_S = torch.from_numpy(case.arrays["token_rewards"].sum(1))
    config = GrpoAdvantage(normalize_by_std=case.params["normalize_by_std"])
    advantages_S = compute_advantages(rewards_S, torch.from_numpy(case.arrays["group"]), config)
    expected = torch.from_numpy(case.arrays["out_advantages"])
    mask = torch.from_numpy(case.arrays["mask"])
    torch.testing.assert_close(advantages_S[:, None] * mask, expected, rtol=1e-6, atol=1e-9)


def slow_grpo(rewards, groups, normalize_by_std):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(siblings) == 1:
            out.append(reward)
        elif len(set(siblings)) == 1:
            out.append(0.0)
        else:
            centred = reward - statistics.fmean(siblings)
            out.append(centred / (statistics.stdev(siblings) + 1e-6) if normalize_by_std else centred)
    return out


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(-3, 3)), min_size=1, max_size=24), st.booleans())
def test_matches_a_loop_whatever_the_order_of_groups(samples, normalize_by_std):
    rewards, groups = zip(*samples, strict=True)
    found = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), normalize_by_std=normalize_by_std)
    assert found.tolist() == pytest.approx(slow_grpo(rewards, groups, normalize_by_std), rel=1e-9, abs=1e-12)


def test_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.7]), torch.tensor([4, 4, 4, 4, 9])
    assert grpo(rewards, groups, normalize_by_std=False).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.7])
    assert grpo(rewards, groups, normalize_by_std=True).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.7], rel=1e-5)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e-8, 1e6])
def test_equal_rewards_are_exactly_zero(reward, normalize_by_std):
    advantages = grpo(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64), normalize_by_std=normalize_by_std)
    assert advantages.tolist() == [0.0] * 7


def test_a_group_of_one_keeps_its_raw_reward():
    rewards = torch.tensor([0.3, -2.0])
    assert torch.equal(grpo(rewards, torch.tensor([1, 0]), normalize_by_std=True), rewards)


def test_errors_and_the_empty_batch():
    config = GrpoAdvantage()
    with pytest.raises(ValueError, match=r"sequence 1 is nan"):
        compute_advantages(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]), config)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        compute_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64), config)
    assert compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), config).numel() == 0
