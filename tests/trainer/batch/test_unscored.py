"""Samples without a score: the batch is as if they were not there. Masked ones: only their rewards are there."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import (
    AggregationConfig,
    GrpoAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RlooAdvantage,
)
from rollout.records import Group
from tests.trainer.batch.test_step_batch import make_groups, truncated
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.batch.sharing_out import share_out
from trainer.batch.step_batch import step_batch
from trainer.ranks.totals import alone

ADVANTAGES = {
    "grpo": GrpoAdvantage(),
    "rloo": RlooAdvantage(type="rloo"),
    "opo": OpoAdvantage(type="opo"),
    "reinforce_pp": ReinforcePlusPlusAdvantage(type="reinforce_pp"),
    "reinforce_pp_baseline": ReinforcePlusPlusBaselineAdvantage(type="reinforce_pp_baseline"),
}


def without(group: Group, left_out: set[int]) -> Group:
    kept = [t for t in group.trajectories if t.sibling_id not in left_out]
    return replace(group, trajectories=kept)


def unscored(group: Group, left_out: set[int]) -> Group:
    trajectories = [replace(t, reward=None) if t.sibling_id in left_out else t for t in group.trajectories]
    return replace(group, trajectories=trajectories)


def loss_terms(groups, advantage, **options) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """Advantages and aggregation weights of the response tokens, by group and sibling."""
    (share,) = share_out(
        groups,
        num_minibatches=1,
        dp_size=1,
        token_budget=10_000,
        needs_siblings=advantage.type != "reinforce_pp",
        **options,
    )
    batch = step_batch(share)
    batch = batch.with_fields(old_logprobs_T=batch.packed.rollout_logprobs_T - 0.1)
    advantages = compute_advantages(batch.packed, batch.rewards_S, batch.group_ids_S, advantage)
    correction = correct(batch.packed, CorrectionConfig(), alone)
    batch = batch.with_advantages(advantages).with_loss_weights(
        correction, AggregationConfig(type="sequence_mean_token_mean"), "kept", alone
    )
    packed, bounds, terms = batch.packed, batch.packed.cu_seqlens.tolist(), {}
    for row, t in enumerate(share.trajectories):
        places = slice(bounds[row], bounds[row + 1])
        mask = packed.response_mask_T[places]
        if mask.any():
            columns = (packed.advantages_T[places][mask], packed.aggregation_T[places][mask])
            terms[t.group_id, t.sibling_id] = tuple(column.tolist() for column in columns)
    return terms


def drawn_groups(data, seed: int) -> list[Group]:
    rewards = [[data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(4)] for _ in range(3)]
    lengths = [[data.draw(st.integers(3, 12)) for _ in range(4)] for _ in range(3)]
    return make_groups(lengths, rewards, seed=seed)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_the_others_are_trained_on_as_if_it_were_not_there(name, data, seed):
    groups = drawn_groups(data, seed)
    left_out = data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=2))
    found = loss_terms([unscored(g, left_out) for g in groups], ADVANTAGES[name])
    expected = loss_terms([without(g, left_out) for g in groups], ADVANTAGES[name])
    assert found.keys() == expected.keys()
    for key, columns in expected.items():
        for ours, theirs in zip(found[key], columns, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


def test_a_sample_whose_siblings_are_all_unscored_has_nothing_to_be_compared_with():
    groups = make_groups([[5, 6], [7, 8]], [[1.0, 0.0], [1.0, 0.0]], seed=0)
    groups[0] = unscored(groups[0], {1})
    assert {key[0] for key in loss_terms(groups, ADVANTAGES["grpo"])} == {1}
    assert {key[0] for key in loss_terms(groups, ADVANTAGES["reinforce_pp"])} == {0, 1}
    of_one = make_groups([[6], [7, 8]], [[1.0], [1.0, 0.0]], seed=0)
    assert {key[0] for key in loss_terms(of_one, ADVANTAGES["grpo"])} == {0, 1}, "it keeps its raw reward"


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_the_reward_of_a_masked_sample_counts_in_its_groups_baseline(name, data, seed):
    """As if it were trained on; OPO's weight is the tokens that are in the loss, here none."""
    groups = drawn_groups(data, seed)
    masked = data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=2))
    cut = truncated(groups, {(group, sibling) for group in range(3) for sibling in masked})
    found = loss_terms(cut, ADVANTAGES[name], masks_truncated=True)
    alone = [without(g, masked) for g in groups] if name == "opo" else groups
    expected = {
        key: columns for key, columns in loss_terms(alone, ADVANTAGES[name]).items() if key[1] not in masked
    }
    assert found.keys() == expected.keys()
    for key, (advantages, _) in expected.items():
        torch.testing.assert_close(torch.tensor(found[key][0]), torch.tensor(advantages))
