"""Advantages: golden cases, slow loops, hand calculations, identities, and what must not matter: order,
ranks, what is off the mask."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.schema.objective import (
    AdvantageConfig,
    FunctionAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RlooAdvantage,
)
from configs.schema.run import RunConfig
from parallel.packing import PackedBatch
from tests.reference import advantages as slow
from tests.reference.advantages import Sample
from tests.support.golden_cases import load
from tests.support.packed_batches import random_batch
from trainer.algorithm.advantages import (
    Advantages,
    RewardParts,
    compute_advantages,
    discounted_returns,
    gae,
    gdpo,
    grpo,
    opo,
    rloo,
    whiten,
)
from trainer.algorithm.kl_reward import kl_to_reference, token_rewards
from trainer.ranks.metrics import merge_metrics, values
from trainer.ranks.totals import Total, alone

BY_SEQUENCE = [
    GrpoAdvantage(),
    GrpoAdvantage(normalize_by_std=False),
    RlooAdvantage(type="rloo"),
    OpoAdvantage(type="opo"),
]
BY_TOKEN = [
    ReinforcePlusPlusAdvantage(type="reinforce_pp", gamma=0.9),
    ReinforcePlusPlusBaselineAdvantage(type="reinforce_pp_baseline"),
    GaeAdvantage(type="gae", gamma=0.97, lam=0.9),
    GaeAdvantage(type="gae", gamma=1.0, lam=0.5, whiten=False),
]
ESTIMATORS = BY_SEQUENCE + BY_TOKEN
GDPO = GdpoAdvantage(type="gdpo")


def own(name: str, **chosen) -> FunctionAdvantage:
    return FunctionAdvantage(type="function", function=f"tests.support.own_functions:{name}", settings=chosen)


def batch_of(rows: list[list[bool]], ids: list[int], values_T: torch.Tensor | None = None) -> PackedBatch:
    mask_T = torch.tensor([m for row in rows for m in row], dtype=torch.bool)
    batch = random_batch([len(row) for row in rows], seed=0, mask_T=mask_T)
    return replace(batch, sequence_ids_S=torch.tensor(ids, dtype=torch.int64), values_T=values_T)


# --- an independent implementation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", load("advantage"), ids=lambda c: c.name)
def test_golden(case):
    parameters = dict(case.params)
    config = TypeAdapter(AdvantageConfig).validate_python({"type": parameters.pop("estimator")} | parameters)
    mask_T, cu_seqlens = case.mask_T, case.cu_seqlens
    rows = [row.tolist() for row in mask_T.split(cu_seqlens.diff().tolist())]
    batch = batch_of(
        rows, list(range(len(rows))), case.input_T("values") if "values" in case.arrays else None
    )
    rewards_S = torch.from_numpy(case.arrays["token_rewards"].sum(1))
    found = compute_advantages(batch, rewards_S, torch.from_numpy(case.arrays["group"]), config)

    expected_T = torch.where(mask_T, case.output_T("advantages"), 0.0)
    torch.testing.assert_close(found.advantages_T, expected_T, rtol=1e-6, atol=1e-9)
    returns_T = found.returns_T
    if config.type == "reinforce_pp":
        rewards_T = token_rewards(rewards_S, torch.zeros_like(expected_T), mask_T, cu_seqlens)
        torch.testing.assert_close(
            rewards_T[mask_T], case.input_T("token_rewards")[mask_T], rtol=1e-12, atol=0
        )
        returns_T = discounted_returns(rewards_T, mask_T, cu_seqlens, gamma=config.gamma)
    if returns_T is not None:
        torch.testing.assert_close(returns_T[mask_T], case.output_T("returns")[mask_T], rtol=1e-6, atol=1e-9)


def test_golden_has_every_estimator():
    assert {c.params["estimator"] for c in load("advantage")} == {config.type for config in ESTIMATORS}


# --- slow loops, order and ranks
# -----------------------------------------------------------------------------------------------

numbers = st.floats(-3, 3, allow_subnormal=False).map(lambda x: round(x, 3))


@st.composite
def samples(draw) -> list[Sample]:
    found = []
    for _ in range(draw(st.integers(1, 9))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=11))
        row = st.lists(numbers, min_size=len(mask), max_size=len(mask))
        found.append(
            Sample(
                group=draw(st.integers(-1, 2)),
                score=draw(numbers),
                mask=mask,
                penalties=draw(row),
                values=draw(row),
                parts=[draw(st.sampled_from([0.0, 1.0, 0.3])), draw(numbers)],
            )
        )
    return found


def compute(
    step: list[Sample], config, ids: list[int] | None = None, total: Total = alone, dtype=torch.float64
) -> Advantages:
    """The advantages of the sequences ``ids`` of a step, in that order; off the mask all is NaN."""
    ids = list(range(len(step))) if ids is None else ids
    mine = [step[i] for i in ids]
    mask_T = torch.tensor([m for s in mine for m in s.mask], dtype=torch.bool)
    values_T = torch.tensor([v for s in mine for v in s.values], dtype=dtype)
    penalty_T = torch.tensor([p for s in mine for p in s.penalties], dtype=dtype)
    parts = RewardParts(
        values_SR=torch.tensor([s.parts for s in step], dtype=dtype), weights_R=torch.tensor(slow.WEIGHTS)
    )
    return compute_advantages(
        batch_of([s.mask for s in mine], ids, torch.where(mask_T, values_T, torch.nan)),
        torch.tensor([s.score for s in step], dtype=dtype), torch.tensor([s.group for s in step]), config,
        reward_parts=parts, penalty_T=torch.where(mask_T, penalty_T, torch.nan), total=total,
    )  # fmt: skip


def by_sequence(found: torch.Tensor, step: list[Sample], ids: list[int]) -> dict[int, torch.Tensor]:
    return dict(zip(ids, found.split([len(step[i].mask) for i in ids]), strict=True))


def on_ranks(step: list[Sample], config, shares: list[list[int]]) -> list[Advantages]:
    """Each share on a thread of its own, which meet in ``total`` as ranks do."""
    barrier, parts = threading.Barrier(len(shares), timeout=30), [torch.empty(0)] * len(shares)

    def on_rank(rank: int) -> Advantages:
        def total(x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.float64
            parts[rank] = x
            barrier.wait()
            summed = torch.stack(parts).sum(0)
            barrier.wait()
            return summed

        try:
            return compute(step, config, shares[rank], total)
        except Exception:
            barrier.abort()  # or the others would wait for a rank that has gone
            raise

    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(on_rank, range(len(shares))))


@pytest.mark.parametrize("config", [*ESTIMATORS, GDPO], ids=lambda c: str(c))
@settings(max_examples=40, deadline=None)
@given(step=samples(), seed=st.randoms(use_true_random=False))
def test_slow_loops_in_any_order_on_any_split(config, step, seed):
    expected = slow.advantages(step, config)
    # atol: where all numbers are equal but for rounding, the small epsilons divide that rounding by as little
    # as 1e-6.
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    ids = list(range(len(step)))
    seed.shuffle(ids)
    found = compute(step, config, ids)
    for i, advantages_T in by_sequence(found.advantages_T, step, ids).items():
        torch.testing.assert_close(advantages_T, torch.tensor(expected[i], dtype=torch.float64), **tolerance)

    cut = seed.randint(0, len(ids))
    shares = [ids[:cut], ids[cut:]]
    ranks = on_ranks(step, config, shares)
    for share, part in zip(shares, ranks, strict=True):
        for i, advantages_T in by_sequence(part.advantages_T, step, share).items():
            torch.testing.assert_close(
                advantages_T, torch.tensor(expected[i], dtype=torch.float64), **tolerance
            )
    assert values(merge_metrics(r.metrics for r in ranks)) == pytest.approx(
        values(found.metrics), rel=1e-9, abs=1e-7
    )


@settings(max_examples=60, deadline=None)
@given(samples(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_recurrences_match_their_sums(step, gamma, lam):
    mask_T = torch.tensor([m for s in step for m in s.mask])
    cu_seqlens = torch.tensor([0, *(len(s.mask) for s in step)]).cumsum(0).to(torch.int32)
    penalty_T = torch.tensor([p for s in step for p in s.penalties], dtype=torch.float64)
    values_T = torch.tensor([v for s in step for v in s.values], dtype=torch.float64)
    rewards_T = token_rewards(
        torch.tensor([s.score for s in step], dtype=torch.float64), penalty_T, mask_T, cu_seqlens
    )
    assert rewards_T.tolist() == pytest.approx([r for s in step for r in slow.token_rewards(s)])
    returns_T = discounted_returns(rewards_T, mask_T, cu_seqlens, gamma=gamma)
    assert returns_T.tolist() == pytest.approx(
        [x for s in step for x in slow.discounted_returns(s, gamma)], rel=1e-12, abs=1e-12
    )
    advantages_T = gae(rewards_T, values_T, mask_T, cu_seqlens, gamma=gamma, lam=lam)
    assert advantages_T.tolist() == pytest.approx(
        [x for s in step for x in slow.gae(s, gamma, lam)], rel=1e-12, abs=1e-12
    )


def test_recurrences_over_long_sequences_match_a_loop():
    lengths = [3000, 1, 4097, 2]
    batch = random_batch(lengths, seed=1, dtype=torch.float64)
    mask_T, rewards_T, values_T = batch.response_mask_T, batch.advantages_T, batch.old_logprobs_T
    expected_T, later, value = torch.zeros_like(rewards_T), 0.0, 0.0
    ends = set(batch.cu_seqlens.tolist())
    for t in reversed(range(batch.num_tokens)):
        if t + 1 in ends:
            later, value = 0.0, 0.0
        if mask_T[t]:
            later = float(rewards_T[t] + 0.99 * value - values_T[t]) + 0.99 * 0.95 * later
            value, expected_T[t] = float(values_T[t]), later
    found_T = gae(rewards_T, values_T, mask_T, batch.cu_seqlens, gamma=0.99, lam=0.95)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-10, atol=1e-12)


# --- by hand
# -------------------------------------------------------------------------------------------------------------------


def test_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.7]), torch.tensor([4, 4, 4, 4, 9])
    assert grpo(rewards, groups, normalize_by_std=False).tolist() == pytest.approx(
        [0.75, -0.25, -0.25, -0.25, 0.7]
    )
    assert grpo(rewards, groups, normalize_by_std=True).tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5, 0.7], rel=1e-5
    )
    assert rloo(rewards, groups).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3, 0.7])
    # The right answer takes 6 of the group's 10 tokens: baseline 0.6.
    assert opo(rewards, groups, torch.tensor([6, 2, 1, 1, 5])).tolist() == pytest.approx(
        [0.4, -0.6, -0.6, -0.6, 0.7]
    )
    # A group's only response token is the whole baseline.
    assert opo(torch.tensor([1.0, 0.5]), torch.zeros(2), torch.tensor([1, 0])).tolist() == [0.0, -0.5]


def test_gdpo_by_hand():
    """Right and in form 2, right 1 + 1/2, in form 1/2, neither 0. Two groups with the same sums by GRPO, and not by GDPO."""
    parts_SR = torch.tensor(
        [[1, 1], [1, 0], [0, 1], [0, 0], [1, 1], [0, 0], [0, 0], [0, 0]], dtype=torch.float64
    )
    weights_R, groups_S = torch.tensor([1.5, 0.5]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    # Of two in four the deviation is 3 ** -0.5, so a part gives +-0.75 ** 0.5; of one in four it is 0.5: 1.5 and -0.5.
    sums = [2 * 0.75**0.5, 0.75**0.5, -(0.75**0.5), -2 * 0.75**0.5, 3.0, -1.0, -1.0, -1.0]
    deviation = (sum(x * x for x in sums) / 7) ** 0.5
    found_S = gdpo(parts_SR, weights_R, groups_S)
    assert found_S.tolist() == pytest.approx([x / deviation for x in sums], rel=1e-5)
    left_out_S = gdpo(parts_SR, weights_R, torch.tensor([0, 0, 0, 0, -5, -6, -7, -8]))
    deviation = (sum(x * x for x in sums[:4]) / 3) ** 0.5
    assert left_out_S.tolist() == pytest.approx([*(x / deviation for x in sums[:4]), 0, 0, 0, 0], rel=1e-5)


def test_gdpo_of_one_part_is_grpo_that_was_whitened_over_the_samples():
    rewards_S, groups_S = torch.randn(12, dtype=torch.float64), torch.arange(12) % 3
    found_S = gdpo(rewards_S[:, None], torch.tensor([7.0]), groups_S)
    expected_S = whiten(
        grpo(rewards_S, groups_S, normalize_by_std=True), torch.ones(12, dtype=torch.bool), alone
    )
    torch.testing.assert_close(found_S, expected_S)


def test_recurrences_by_hand():
    """A prompt token, two response tokens, a tool token, a response token; then a sequence of one response
    token."""
    mask_T, cu_seqlens = (
        torch.tensor([False, True, True, False, True, True]),
        torch.tensor([0, 5, 6], dtype=torch.int32),
    )
    nan = torch.nan
    rewards_T = token_rewards(
        torch.tensor([4.0, 1.0]), torch.tensor([nan, 1.0, 0.0, nan, 2.0, 0.5]), mask_T, cu_seqlens
    )
    assert rewards_T.tolist() == [0.0, -1.0, 0.0, 0.0, 2.0, 0.5]
    assert discounted_returns(rewards_T, mask_T, cu_seqlens, gamma=0.5).tolist() == [
        0.0,
        -0.5,
        1.0,
        0.0,
        2.0,
        0.5,
    ]
    values_T = torch.tensor([nan, 1.0, 2.0, nan, 3.0, 0.25])
    # TD errors: -1 + 2/2 - 1 = -1;  0 + 3/2 - 2 = -1/2;  2 - 3 = -1;  1/2 - 1/4 = 1/4. gamma lam = 1/4.
    expected = [0.0, -1 - (0.5 + 0.25) / 4, -0.5 - 0.25, 0.0, -1.0, 0.25]
    assert gae(rewards_T, values_T, mask_T, cu_seqlens, gamma=0.5, lam=0.5).tolist() == expected


def test_whiten_by_hand():
    x_T, mask_T = (
        torch.tensor([1.0, torch.nan, 3.0, 5.0], dtype=torch.float64),
        torch.tensor([True, False, True, True]),
    )
    assert whiten(x_T, mask_T, alone).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0], rel=1e-8)
    two_T = torch.tensor([True, False, True, False])  # mean 2, variance 2
    assert whiten(x_T, two_T, alone).tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5, 0.0], rel=1e-8)
    assert whiten(x_T, torch.tensor([False, False, True, False]), alone).tolist() == [0.0] * 4
    assert whiten(x_T, torch.zeros(4, dtype=torch.bool), alone).tolist() == [0.0] * 4


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_whitened_tokens_have_mean_zero_and_variance_one(offset):
    x_T = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + offset
    found_T = whiten(x_T, torch.ones(500, dtype=torch.bool), alone)
    assert abs(found_T.mean().item()) < 1e-9
    assert found_T.var().item() == pytest.approx(1.0, rel=1e-6)
    rounded_T = whiten(x_T.float(), torch.ones(500, dtype=torch.bool), alone)
    assert torch.equal(
        rounded_T, whiten(x_T.float().double(), torch.ones(500, dtype=torch.bool), alone).float()
    )


def test_metrics_are_of_valid_tokens():
    step = [Sample(group=0, score=score, mask=mask, penalties=[0.0] * 3, values=[0.0] * 3, parts=[0.0] * 2)
            for score, mask in ((3.0, [False, True, True]), (1.0, [True, False, False]))]  # fmt: skip
    found = values(compute(step, GrpoAdvantage(normalize_by_std=False)).metrics)
    names = {
        "advantage/mean": 1 / 3,
        "advantage/std": (8 / 9) ** 0.5,
        "advantage/min": -1.0,
        "advantage/max": 1.0,
    }
    assert found == pytest.approx(names)


# --- identities
# ----------------------------------------------------------------------------------------------------------------

rewards_and_groups = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(-3, 3)), min_size=1, max_size=24
)


@settings(max_examples=100, deadline=None)
@given(rewards_and_groups, st.booleans(), st.lists(st.integers(0, 50), min_size=24, max_size=24))
def test_groups_may_stand_in_any_order(drawn, normalize_by_std, lengths):
    rewards, groups = zip(*drawn, strict=True)
    lengths = lengths[: len(rewards)]
    assume(all(sum(n for n, g in zip(lengths, groups, strict=True) if g == group) for group in groups))
    rewards_S, groups_S = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    found = grpo(rewards_S, groups_S, normalize_by_std=normalize_by_std)
    assert found.tolist() == pytest.approx(slow.grpo(rewards, groups, normalize_by_std), rel=1e-9, abs=1e-12)
    assert rloo(rewards_S, groups_S).tolist() == pytest.approx(
        slow.rloo(rewards, groups), rel=1e-9, abs=1e-12
    )
    found = opo(rewards_S, groups_S, torch.tensor(lengths))
    assert found.tolist() == pytest.approx(slow.opo(rewards, groups, lengths), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "config",
    [*BY_SEQUENCE, ReinforcePlusPlusBaselineAdvantage(type="reinforce_pp_baseline")],
    ids=lambda c: str(c),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e-8, 1e6])
def test_equal_rewards_are_exactly_zero(reward, dtype, config):
    batch = batch_of([[True] * n for n in range(1, 8)], list(range(7)))
    found = compute_advantages(
        batch, torch.full((7,), reward, dtype=dtype), torch.zeros(7, dtype=torch.int64), config
    )
    assert found.advantages_T.dtype == dtype
    assert found.advantages_T.tolist() == [0.0] * batch.num_tokens


@pytest.mark.parametrize("kl", [{}, {"coefficient": 0.1, "place": "reward"}])
@pytest.mark.parametrize("config", ESTIMATORS[:6], ids=lambda config: config.type)
def test_groups_of_equal_rewards_are_packed_apart_where_they_learn_nothing(config, kl):
    """A group of equal rewards beside another one; a KL in the reward differs from sample to sample."""
    run = {"model": {"path": "m"}, "task": {"type": "countdown"}, "advantage": config.model_dump(), "kl": kl}
    batch = batch_of([[True] * n for n in (2, 3, 4, 5)], list(range(4)))
    penalty_T = torch.rand(batch.num_tokens, dtype=torch.float64) if kl else None
    rewards_S, group_ids_S = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    found = compute_advantages(batch, rewards_S, group_ids_S, config, penalty_T=penalty_T).advantages_T
    assert RunConfig.model_validate(run).packs_no_signal_apart == (not found[:5].any())


def test_a_group_of_equal_rewards_with_different_parts_learns_by_gdpo():
    run = {"model": {"path": "m"}, "task": {"type": "countdown"}, "advantage": {"type": "gdpo"}}
    parts = {"a": {"type": "countdown"}, "b": {"type": "overlong", "buffer_tokens": 4}}
    config = RunConfig.model_validate(run | {"reward": {"type": "weighted", "parts": parts}})
    assert config.compared_parts == {"a": 1.0, "b": 1.0} and not config.packs_no_signal_apart
    step = [Sample(group=g, score=0.0, mask=[True], penalties=[0.0], values=[0.0], parts=row)
            for g, row in enumerate([[1.0, 0.0]] * 2)] + [
            Sample(group=g, score=0.0, mask=[True], penalties=[0.0], values=[0.0], parts=row)
            for g, row in enumerate([[0.0, 2.0], [1.0, 0.0]])]  # fmt: skip
    first, second, third, fourth = compute(step, GDPO).advantages_T.tolist()
    assert first != 0 != third and second == fourth == 0.0


@settings(max_examples=60, deadline=None)
@given(rewards_and_groups, st.floats(-100, 100))
def test_a_constant_on_every_reward_changes_nothing_in_groups(drawn, shift):
    rewards_S = torch.tensor([r for r, _ in drawn], dtype=torch.float64)
    group_ids_S = torch.tensor([g for _, g in drawn])
    siblings_S = (group_ids_S[:, None] == group_ids_S).sum(1) > 1
    for estimator in (lambda r: grpo(r, group_ids_S, normalize_by_std=False), lambda r: grpo(r, group_ids_S, normalize_by_std=True),
                      lambda r: rloo(r, group_ids_S), lambda r: opo(r, group_ids_S, torch.arange(1, len(drawn) + 1))):  # fmt: skip
        plain_S, shifted_S = estimator(rewards_S), estimator(rewards_S + shift)
        torch.testing.assert_close(shifted_S[siblings_S], plain_S[siblings_S], rtol=1e-6, atol=1e-6)


def test_rewards_of_float32_are_compared_in_float64():
    """Rounded once, at the end."""
    batch, generator = batch_of([[True]] * 50, list(range(50))), torch.Generator().manual_seed(0)
    rewards_S, group_ids_S = torch.rand(50, generator=generator), torch.arange(50) % 3
    exact_S = grpo(rewards_S.double(), group_ids_S, normalize_by_std=True)
    found_T = compute_advantages(batch, rewards_S, group_ids_S, GrpoAdvantage()).advantages_T
    assert torch.equal(found_T, exact_S.float())


@pytest.mark.parametrize("beyond", [-1, 2])
def test_a_sequence_without_a_reward_is_named(beyond):
    with pytest.raises(ValueError, match=f"sequence {beyond} of the batch has no reward: 2 rewards"):
        compute_advantages(
            batch_of([[True]] * 2, [0, beyond]),
            torch.ones(2),
            torch.zeros(2, dtype=torch.int64),
            GrpoAdvantage(),
        )
    with pytest.raises(ValueError, match="must both be"):
        compute_advantages(
            batch_of([[True]], [0]), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), GrpoAdvantage()
        )


def test_a_group_without_response_tokens_has_finite_advantages():
    assert opo(torch.tensor([1.0, 3.0]), torch.zeros(2), torch.tensor([0, 0])).isfinite().all()


def test_a_group_of_one_keeps_its_raw_reward():
    rewards, ids = torch.tensor([0.3, -2.0]), torch.tensor([1, 0])
    assert torch.equal(grpo(rewards, ids, normalize_by_std=True), rewards)
    assert torch.equal(rloo(rewards, ids), rewards)
    assert torch.equal(opo(rewards, ids, torch.tensor([5, 0])), rewards)


@settings(max_examples=40, deadline=None)
@given(samples(), st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_between_its_two_ends(step, gamma):
    """lam = 1: discounted return less value. lam = 0: the TD error. In both, advantages + values = returns_T,
    whitened or not."""
    mask_T = torch.tensor([m for s in step for m in s.mask])
    values_T = torch.tensor([v for s in step for v in s.values], dtype=torch.float64) * mask_T
    returns_T = torch.tensor(
        [x for s in step for x in slow.discounted_returns(s, gamma)], dtype=torch.float64
    )
    to_go = compute(step, GaeAdvantage(type="gae", gamma=gamma, lam=1.0, whiten=False))
    torch.testing.assert_close(to_go.advantages_T, returns_T - values_T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(to_go.returns_T, returns_T, rtol=1e-9, atol=1e-12)
    errors = []
    for s in step:
        places, rewards = [p for p, m in enumerate(s.mask) if m], slow.token_rewards(s)
        after = dict(zip(places, [s.values[p] for p in places[1:]] + [0.0], strict=True)) if places else {}
        errors += [rewards[p] + gamma * after[p] - s.values[p] if m else 0.0 for p, m in enumerate(s.mask)]
    one_step = compute(step, GaeAdvantage(type="gae", gamma=gamma, lam=0.0, whiten=False))
    assert one_step.advantages_T.tolist() == pytest.approx(errors, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(
        compute(step, GaeAdvantage(type="gae", gamma=gamma, lam=0.0)).returns_T,
        one_step.returns_T,
        rtol=0,
        atol=0,
    )


def test_a_sequence_has_the_same_bits_wherever_it_is_packed():
    batch = random_batch([7, 300, 41, 12], seed=3)
    alone_T = batch.select([1])
    whole, part = (
        gae(b.advantages_T, b.old_logprobs_T, b.response_mask_T, b.cu_seqlens, gamma=0.99, lam=0.95)
        for b in (batch, alone_T)
    )
    assert torch.equal(whole[7:307], part)


@pytest.mark.parametrize("config", [*ESTIMATORS, own("with_gradient")], ids=lambda c: str(c))
def test_advantages_carry_no_gradient(config):
    batch = batch_of([[True, True], [True, True, True]], [0, 1], torch.randn(5, requires_grad=True))
    rewards_S, penalty_T = torch.tensor([1.0, 0.0]), torch.randn(5, requires_grad=True)
    found = compute_advantages(
        batch, rewards_S, torch.zeros(2, dtype=torch.int64), config, penalty_T=penalty_T
    )
    assert not found.advantages_T.requires_grad and found.advantages_T.dtype == torch.float32
    assert found.returns_T is None or not found.returns_T.requires_grad
    assert found.returns_T is None or found.returns_T.dtype == torch.float32
    assert (found.returns_T is not None) == isinstance(config, GaeAdvantage)


# --- KL in the reward
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [GrpoAdvantage(normalize_by_std=False), own("grpo", normalize_by_std=False)],
    ids=lambda c: c.type,
)
def test_a_penalty_counts_with_the_sum_of_a_sequence(config):
    """The rewards become 1 - 0.75 and 0 - 0.25; penalties off the mask are not taken."""
    batch = batch_of([[False, True, True], [True, False]], [1, 0])
    penalty_T = torch.tensor([9.0, 0.5, 0.25, 0.25, torch.nan])
    found = compute_advantages(
        batch, torch.tensor([0.0, 1.0]), torch.tensor([5, 5]), config, penalty_T=penalty_T
    )
    assert found.advantages_T.tolist() == [0.0, 0.25, 0.25, -0.25, 0.0]


def test_kl_to_reference_is_the_estimators_value_on_response_tokens():
    batch = random_batch([5, 3], seed=2, dtype=torch.float64)
    mask_T = batch.response_mask_T
    old_T = torch.where(mask_T, batch.old_logprobs_T, torch.nan).requires_grad_()
    kl_T = kl_to_reference(batch.with_fields(old_logprobs_T=old_T), "k1")
    assert not kl_T.requires_grad
    torch.testing.assert_close(
        kl_T, torch.where(mask_T, batch.old_logprobs_T - batch.ref_logprobs_T, 0.0), rtol=0, atol=0
    )
    assert (kl_to_reference(batch, "k3")[mask_T] > 0).all()
    for missing in ("old_logprobs_T", "ref_logprobs_T"):
        with pytest.raises(ValueError, match="needs old_logprobs_T and ref_logprobs_T"):
            kl_to_reference(batch.with_fields(**{missing: None}), "k1")


# --- errors
# --------------------------------------------------------------------------------------------------------------------


def test_errors_and_the_empty_batch():
    batch, zeros, gae_config = (
        batch_of([[True, False], [True, True]], [1, 0]),
        torch.zeros(2, dtype=torch.int64),
        GaeAdvantage(type="gae"),
    )
    with pytest.raises(ValueError, match=r"sequence 1 is nan"):
        compute_advantages(batch, torch.tensor([0.0, torch.nan]), zeros, GrpoAdvantage())
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        compute_advantages(batch, torch.zeros(2), torch.zeros(3, dtype=torch.int64), GrpoAdvantage())
    with pytest.raises(ValueError, match="critic"):
        compute_advantages(batch, torch.zeros(2), zeros, gae_config)
    with pytest.raises(ValueError, match=r"values_T has shape \(3,\), the batch 4 tokens"):
        compute_advantages(batch.with_fields(values_T=torch.zeros(3)), torch.zeros(2), zeros, gae_config)
    # The third place is the first token of the second row, which is sequence 0 of the step.
    with pytest.raises(ValueError, match=r"values_T is inf on a response token of sequence 0"):
        compute_advantages(
            batch.with_fields(values_T=torch.tensor([0.0, torch.nan, torch.inf, 0.0])),
            torch.zeros(2),
            zeros,
            gae_config,
        )
    with pytest.raises(ValueError, match=r"penalty_T is nan on a response token of sequence 1"):
        compute_advantages(
            batch, torch.zeros(2), zeros, GrpoAdvantage(), penalty_T=torch.tensor([torch.nan, 0.0, 0.0, 0.0])
        )
    with pytest.raises(ValueError, match=r"penalty_T has shape \(1,\), the batch 4 tokens"):
        compute_advantages(batch, torch.zeros(2), zeros, GrpoAdvantage(), penalty_T=torch.zeros(1))
    for config in ESTIMATORS:
        empty = batch_of([], [], torch.zeros(0))
        found = compute_advantages(empty, torch.zeros(0), torch.zeros(0, dtype=torch.int64), config)
        assert found.advantages_T.numel() == 0
        assert values(found.metrics) == {}
