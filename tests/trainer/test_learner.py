"""When the learner scores ``old`` by a pass of its own; the numbers of that pass are tested with the engines."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.packed_batches import random_batch
from trainer.batch.step_batch import StepBatch
from trainer.learner import Learner


@pytest.mark.parametrize(
    ("mode", "scores_old", "forks", "before_update", "old"),
    [
        ("decoupled", False, False, True, None),  # the update's forward pass gives it
        ("decoupled", True, False, True, "scored"),
        ("decoupled", False, True, True, "scored"),
        ("decoupled", False, False, False, "scored"),  # the critic warms up: there is no update of the policy
        ("bypass", True, True, False, "rollout"),
    ],
)
def test_old_has_a_pass_of_its_own_unless_the_update_gives_it(mode, scores_old, forks, before_update, old):
    packed = random_batch([4, 3], seed=1).with_fields(old_logprobs_T=None)
    rewards_S, group_ids_S = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    episode_ids_S = torch.zeros(2, dtype=torch.int64) if forks else None
    batch = StepBatch(
        packed=packed,
        rows=[[[0, 1]]],
        rewards_S=rewards_S,
        group_ids_S=group_ids_S,
        episode_ids_S=episode_ids_S,
    )
    config = SimpleNamespace(
        correction=SimpleNamespace(mode=mode), scores_old=scores_old, kl=SimpleNamespace(coefficient=0.0)
    )
    scored_T = torch.rand(packed.num_tokens)
    learner = SimpleNamespace(
        _config=config, critic=None, _score_old=lambda batch: {"old_logprobs_T": scored_T}
    )
    found = Learner.score(learner, batch, before_update=before_update).packed.old_logprobs_T
    assert found is {None: None, "scored": scored_T, "rollout": packed.rollout_logprobs_T}[old]
