"""Advantages by turn: against plain loops over the rewards of a group, on any split over ranks, with forks."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.objective import GaeAdvantage, GrpoAdvantage, ReinforcePlusPlusAdvantage
from rollout.records import Group, Trajectory
from tests.support.records import trajectory
from trainer.algorithm.advantages import compute_advantages
from trainer.batch.sharing_out import share_out
from trainer.batch.step_batch import step_batch

TURN = {"credit": "turn"}
GRPO = GrpoAdvantage(**TURN)
ESTIMATORS = [
    GRPO,
    GrpoAdvantage(**TURN, normalize_by_std=False),
    ReinforcePlusPlusAdvantage(type="reinforce_pp", gamma=0.9, **TURN),
    GaeAdvantage(type="gae", gamma=0.97, lam=0.9, whiten=False, **TURN),
]
rewards = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0])


def sequence(sibling: int, mask: list[bool], earned: list[float | None], reward: float | None, branch=0):
    """Its turns are the runs of sampled tokens, the first token apart; they have earned ``earned``, as far as it goes."""
    length = len(mask) + 1
    made = trajectory(
        group_id=0, sibling_id=sibling, prompt_id="p", token_ids=[1] * length, response_mask=[False, *mask],
        rollout_logprobs=[0.0] * length, token_versions=[0] * length, reward=reward, reward_parts={}, branch=branch,
    )  # fmt: skip
    both = zip(made.turns, [*earned, *[None] * len(made.turns)], strict=False)
    return replace(made, turns=[replace(turn, reward=value) for turn, value in both])


@st.composite
def groups(draw) -> list[Group]:
    made = []
    for number in range(2):
        trajectories = []
        for sibling in range(draw(st.integers(1, 4))):
            reward = draw(rewards | st.none())
            for branch in range(draw(st.integers(1, 3))):
                mask = [*draw(st.lists(st.booleans(), max_size=9)), True]
                earned = draw(st.lists(rewards | st.none(), max_size=4))
                trajectories.append(sequence(sibling, mask, earned, reward, branch))
        trajectories = [replace(t, group_id=number) for t in trajectories]
        made.append(Group(group_id=number, prompt_id="p", trajectories=trajectories))
    return made


def values_of(t: Trajectory) -> torch.Tensor:
    """A critic's, the same for a sequence on any rank."""
    generator = torch.Generator().manual_seed(7 * t.sibling_id + t.branch)
    return torch.randn(len(t.token_ids) - 1, generator=generator)


def on_ranks(of: list[Group], config, *, num_ranks: int = 1, credits_turns: bool = True):
    """Advantages by (group, sibling, branch), of the sequences of all ranks."""
    shares = share_out(
        of, num_minibatches=1, dp_size=num_ranks, token_budget=10**6, credits_turns=credits_turns
    )
    found = {}
    for share in shares:
        batch = step_batch(share)
        values_T = torch.cat([values_of(t) for t in share.trajectories])
        advantages_T = compute_advantages(
            batch.packed.with_fields(values_T=values_T), batch.rewards_S, batch.group_ids_S, config,
            episode_ids_S=batch.episode_ids_S, turn_rewards=batch.turn_rewards,
        ).advantages_T  # fmt: skip
        rows = advantages_T.split([len(t.token_ids) - 1 for t in share.trajectories])
        for t, row in zip(share.trajectories, rows, strict=True):
            if t.branch >= 0:  # no filling up
                found[t.group_id, t.sibling_id, t.branch] = row
    return found


def earned_in(group: Group) -> dict[tuple[int, int, int], float]:
    """{(sibling, branch, turn): reward}, with what no turn has earned on the last turn of the first sequence."""
    of = {}
    for sibling in {t.sibling_id for t in group.trajectories if t.reward is not None}:
        own = [t for t in group.trajectories if t.sibling_id == sibling]
        given = {(sibling, t.branch, k): turn.reward for t in own for k, turn in enumerate(t.turns)}
        of |= {key: value for key, value in given.items() if value is not None}
        last = sibling, 0, len(own[0].turns) - 1
        rest = own[0].reward - math.fsum(value for value in given.values() if value is not None)
        of[last] = of.get(last, 0.0) + rest
    return of


def credited(t: Trajectory, values: dict[tuple[int, int, int], float]) -> list[float]:
    """What each token of a sequence gets: of its own turns from its own on, of other sequences all."""
    of_others = math.fsum(v for (s, b, _), v in values.items() if s == t.sibling_id and b != t.branch)
    out = [0.0] * (len(t.token_ids) - 1)
    for turn_number, turn in enumerate(t.turns):
        own = math.fsum(
            v for (s, b, k), v in values.items() if (s, b) == (t.sibling_id, t.branch) and k >= turn_number
        )
        out[turn.start - 1 : turn.end - 1] = [own + of_others] * (turn.end - turn.start)
    return out


@settings(max_examples=150)
@given(groups(), st.booleans())
def test_grpo_compares_all_rewards_of_turns_of_a_group(of, normalize):
    found = on_ranks(of, GrpoAdvantage(**TURN, normalize_by_std=normalize))
    for group in of:
        earned = earned_in(group)
        mean = statistics.fmean(earned.values()) if earned else 0.0
        spread = statistics.stdev(earned.values()) + 1e-6 if normalize and len(earned) > 1 else 1.0
        values = earned if len(earned) == 1 else {k: (v - mean) / spread for k, v in earned.items()}
        if len(set(earned.values())) == 1 and len(earned) > 1:
            values = dict.fromkeys(earned, 0.0)
        for t in group.trajectories:
            row = found[t.group_id, t.sibling_id, t.branch].tolist()
            expected = credited(t, values) if t.reward is not None else [0.0] * len(row)
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=60)
@given(groups(), st.sampled_from(ESTIMATORS), st.integers(2, 3))
def test_ranks_do_not_matter(of, config, num_ranks):
    if isinstance(config, ReinforcePlusPlusAdvantage):
        return  # whitened over ranks, which test_advantages.py joins
    alone, split = on_ranks(of, config), on_ranks(of, config, num_ranks=num_ranks)
    assert alone.keys() == split.keys()
    assert all(torch.equal(alone[key], split[key]) for key in alone)


@settings(max_examples=60)
@given(groups(), st.sampled_from(ESTIMATORS))
def test_without_rewards_of_turns_the_credit_is_the_episodes(of, config):
    """To the bit: the outcome is then the only reward."""
    plain = [
        replace(g, trajectories=[replace(t, turns=[replace(n, reward=None) for n in t.turns]) for t in g.trajectories])
        for g in of
    ]  # fmt: skip
    by_turn = on_ranks(plain, config)
    by_episode = on_ranks(plain, config.model_copy(update={"credit": "episode"}), credits_turns=False)
    assert all(torch.equal(by_turn[key], by_episode[key]) for key in by_episode)


def test_a_turn_is_not_credited_with_what_was_earned_before_it():
    """Rewards of turns 1, 0 and 0, 1 on top of the means 1/2: the first turn gets both, the second its own."""
    mask = [True, True, False, True]
    group = Group(
        group_id=0,
        prompt_id="p",
        trajectories=[sequence(0, mask, [1.0, 0.0], 1.0), sequence(1, mask, [0.0], 1.0)],
    )
    found = on_ranks([group], GrpoAdvantage(**TURN, normalize_by_std=False))
    assert found[0, 0, 0].tolist() == [0.0, 0.0, 0.0, -0.5]
    assert found[0, 1, 0].tolist() == [0.0, 0.0, 0.0, 0.5]
    returns = on_ranks([group], ReinforcePlusPlusAdvantage(type="reinforce_pp", gamma=0.5, **TURN))
    first, second = returns[0, 0, 0], returns[0, 1, 0]
    raw = torch.tensor([0.5, 1.0, 0.0, 0.25, 0.5, 1.0], dtype=torch.float64)  # discounted by 0.5 per token
    white = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    both = torch.cat([first[[0, 1, 3]], second[[0, 1, 3]]])
    torch.testing.assert_close(both.double(), white, rtol=1e-6, atol=1e-6)
    gae = on_ranks([group], GaeAdvantage(type="gae", gamma=0.5, lam=1.0, whiten=False, **TURN))
    rows = [gae[0, n, 0] + values_of(t) for n, t in enumerate(group.trajectories)]
    torch.testing.assert_close(
        torch.cat([row[[0, 1, 3]] for row in rows]).double(), raw, rtol=1e-6, atol=1e-6
    )


def test_a_penalty_is_credited_to_the_tokens_up_to_it():
    """Turns that earn alike have no advantage of their own: what is left is the penalty from each token on."""
    group = Group(
        group_id=0,
        prompt_id="p",
        trajectories=[sequence(n, [True, False, True], [0.5, 0.5], 1.0) for n in (0, 1)],
    )
    (share,) = share_out([group], num_minibatches=1, dp_size=1, token_budget=10**6, credits_turns=True)
    batch = step_batch(share)
    penalty_T = torch.tensor([0.25, 9.0, 0.5, 1.0, 9.0, 0.0])
    found = compute_advantages(
        batch.packed, batch.rewards_S, batch.group_ids_S, GRPO, turn_rewards=batch.turn_rewards, penalty_T=penalty_T
    )  # fmt: skip
    assert found.advantages_T.tolist() == [-0.75, 0.0, -0.5, -1.0, 0.0, 0.0]
