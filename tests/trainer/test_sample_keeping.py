"""The samples that a step leaves in the run folder, over real gloo ranks: what was sampled, and what the learner says of
it, whichever rank has the sequence."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from configs.schema import RunConfig
from configs.schema.correction import CorrectionConfig
from rollout.records import Group
from rollout.sampling.messages import EvaluationResult
from tests.trainer.batch.test_step_batch import (
    LENGTHS,
    MOST_RANKS,
    OLD,
    REWARDS,
    Ranks,
    current_policy,
    forked,
    make_groups,
    scores,
    truncated,
)
from tests.trainer.batch.test_unscored import unscored
from trainer import sample_keeping
from trainer.batch.sharing_out import Share, share_out
from trainer.batch.step_batch import step_batch
from trainer.learner import Update, learner_logprobs
from trainer.sample_keeping import SampleKeeper, gathered_on_first_rank
from trainer.tracking.samples import (
    EVALUATION,
    forget_samples_after,
    read_samples,
    sample_file,
    sampled_steps,
)

VERSION = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@dataclass
class ToldOf:
    """In the place of the tracker."""

    warnings: list[str] = field(default_factory=list)
    artifacts: list[tuple[str, str]] = field(default_factory=list)

    def warn_once(self, about: str, text: str) -> None:
        self.warnings.append(text)

    def artifact(self, path: Path, folder: str) -> None:
        self.artifacts.append((path.name, folder))


def config_of(**fields) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "task": {"type": "countdown"},
            "steps": 12,
            "rollout": {"group_size": len(LENGTHS[0]), "prompts_per_step": len(LENGTHS)},
            **fields,
        }
    )


def keep_on_rank(
    share: Share, folder: Path, groups: list[Group], how: str, group: dist.ProcessGroup
) -> ToldOf | None:
    """Call by call what ``trainer/loop.py`` does. how: where the learner's log-probs come from."""
    batch = step_batch(share)
    updates = [
        Update(
            logprobs=[scores(current_policy(index).detach(), m.tokens_T, m.targets_T)[0] for m in minibatch]
        )
        for index, minibatch in enumerate(batch.minibatches())
    ]
    if how == "old":
        old = [scores(OLD, m.tokens_T, m.targets_T)[0] for m in batch.microbatches()]
        batch = batch.with_fields(old_logprobs_T=batch.scattered(old))
    elif how == "bypass":
        batch = batch.with_fields(old_logprobs_T=batch.packed.rollout_logprobs_T)
    mode = "bypass" if how in ("bypass", "nothing") else "decoupled"
    learner = SimpleNamespace(groups=SimpleNamespace(dp_group=group), version=VERSION)
    told = ToldOf() if dist.get_rank() == 0 else None
    keeper = SampleKeeper(folder, config_of(), told)
    learner_T = learner_logprobs(batch, [] if how == "nothing" else updates, CorrectionConfig(mode=mode))
    keeper.keep(3, groups if told else None, batch, learner_T, learner)
    return told


@pytest.mark.parametrize("num_ranks", [1, 2, MOST_RANKS])
@pytest.mark.parametrize("how", ["old", "current", "bypass", "nothing", "forks"])
def test_a_step_leaves_its_first_groups_with_the_learners_log_probs(ranks, tmp_path, num_ranks, how):
    groups = make_groups(LENGTHS, REWARDS, seed=5)
    if how == "forks":  # groups of different sizes, filled up behind the last
        groups[1] = forked(groups[1], [place == 1 for place in range(len(groups[1].trajectories))])
        groups[0] = replace(groups[0], trajectories=groups[0].trajectories[:-1])
        how = "old"
    shares = share_out(groups, num_minibatches=2, dp_size=num_ranks, token_budget=20)
    assert len({frozenset(share.sequence_ids) for share in shares}) == num_ranks
    ranks.call(keep_on_rank, shares, tmp_path, groups, how)
    assert sampled_steps(tmp_path) == [3] and len(list(tmp_path.iterdir())) == 1
    found = read_samples(sample_file(tmp_path, 3))
    wanted = [t for group in groups[:2] for t in group.trajectories]
    assert [(s.group, s.sibling, s.branch) for s in found] == [
        (t.group_id, t.sibling_id, t.branch) for t in wanted
    ]
    # Each minibatch has half of the groups; the kept ones are in the first, before any update.
    policy_VV = OLD if how == "old" else current_policy(0).detach()
    log_VV = policy_VV.log_softmax(-1)
    for sample, t in zip(found, wanted, strict=True):
        assert (sample.step, sample.version, sample.token_ids) == (3, VERSION, t.token_ids.tolist())
        places = np.flatnonzero(t.response_mask)
        assert sample.rollout_logprobs == pytest.approx(t.rollout_logprobs[places].tolist(), abs=6e-7)
        if how == "nothing":
            assert sample.learner_logprobs is None
            continue
        before, token = torch.from_numpy(t.token_ids[places - 1]), torch.from_numpy(t.token_ids[places])
        own = log_VV[before.long(), token.long()]
        assert sample.learner_logprobs == pytest.approx(own.tolist(), abs=6e-7)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_sample_without_a_score_or_masked_has_nothing_by_the_learner(tmp_path, is_masked):
    """The engine gives 0 off the mask, and such a sample is off it."""
    groups = make_groups(LENGTHS, REWARDS, seed=5)
    groups = truncated(groups, {(0, 1)}) if is_masked else [unscored(groups[0], {1}), *groups[1:]]
    (share,) = share_out(
        groups, num_minibatches=1, dp_size=1, token_budget=100, needs_siblings=True, masks_truncated=True
    )
    batch = step_batch(share)
    packed = batch.packed
    batch = batch.with_fields(
        old_logprobs_T=torch.where(packed.response_mask_T, packed.rollout_logprobs_T, 0.0)
    )
    learner = SimpleNamespace(groups=SimpleNamespace(dp_group=None), version=VERSION)
    SampleKeeper(tmp_path, config_of(), ToldOf()).keep(3, groups, batch, batch.packed.old_logprobs_T, learner)
    first, left_out, *_ = read_samples(sample_file(tmp_path, 3))
    assert left_out.reward == (REWARDS[0][1] if is_masked else None)
    assert left_out.learner_logprobs is None and left_out.rollout_logprobs
    assert first.learner_logprobs == pytest.approx(first.rollout_logprobs, abs=6e-7)


def test_a_group_without_rank_0_sums_nothing(monkeypatch):
    """Nothing could be sent to rank 0 from there."""
    collectives = Mock(get_world_size=lambda group: 2, get_global_rank=lambda group, rank: 2)
    monkeypatch.setattr(sample_keeping, "dist", collectives)
    own = {0: torch.ones(2)}
    assert gathered_on_first_rank(own, torch.tensor([2, 3]), Mock()) is own and not collectives.reduce.called


def alone(folder: Path, config: RunConfig, step: int, told: ToldOf) -> None:
    """One rank, without process groups."""
    groups = make_groups(LENGTHS, REWARDS, seed=5)
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=100)
    batch = step_batch(share)
    batch = batch.with_fields(old_logprobs_T=batch.packed.rollout_logprobs_T)
    learner = SimpleNamespace(groups=SimpleNamespace(dp_group=None), version=VERSION)
    SampleKeeper(folder, config, told).keep(step, groups, batch, batch.packed.old_logprobs_T, learner)


def test_the_number_of_groups_is_the_configs_and_0_is_none(tmp_path):
    for number in (0, 1, 4, 9):
        folder, told = tmp_path / str(number), ToldOf()
        alone(folder, config_of(tracking={"sample_groups": number}), 3, told)
        kept = {s.group for s in read_samples(sample_file(folder, 3))} if folder.exists() else set()
        assert kept == set(range(min(number, len(LENGTHS)))) and folder.exists() == (number > 0)
        assert told == ToldOf()


def test_mlflow_gets_the_first_step_the_last_and_those_with_an_evaluation(tmp_path):
    told = ToldOf()
    for step in range(1, 13):
        alone(tmp_path, config_of(evaluation={"every": 5}), step, told)
    wanted = [f"step_{step:06d}.jsonl" for step in (1, 5, 10, 12)]
    assert told.artifacts == [(name, "samples") for name in wanted] and not told.warnings
    assert sampled_steps(tmp_path) == list(range(1, 13))


def test_an_evaluation_leaves_the_samples_that_came_with_its_result(tmp_path):
    groups, told = make_groups(LENGTHS, REWARDS, seed=5), ToldOf()
    keeper = SampleKeeper(tmp_path, config_of(tracking={"sample_groups": 0}), told)
    result = EvaluationResult(
        accuracy=0.5, reward_mean=0.25, count=2, length_mean=3.0, truncated_fraction=0.0, groups=groups,
        groups_from=[None, *["hard"] * (len(groups) - 1)],
    )  # fmt: skip
    for step in (0, 8, 12):
        keeper.keep_evaluation(step, result, version=step)
    for nothing in (None, replace(result, groups=[], groups_from=[])):
        keeper.keep_evaluation(16, nothing, version=16)
    assert sampled_steps(tmp_path, EVALUATION) == [0, 8, 12] and sampled_steps(tmp_path) == []
    assert told.artifacts[-1] == ("evaluation_000012.jsonl", "samples") and len(told.artifacts) == 3
    found = read_samples(sample_file(tmp_path, 8, EVALUATION))
    sent = [t for group in groups for t in group.trajectories]
    assert [(s.step, s.version, s.learner_logprobs) for s in found] == [(8, 8, None)] * len(sent)
    lines = map(json.loads, sample_file(tmp_path, 8, EVALUATION).read_text().splitlines())
    named = [line.get("heldout_set") for line in lines]
    assert named == [None if sample.group == found[0].group else "hard" for sample in found]
    assert {*named} == {None, "hard"}
    for sample, trajectory in zip(found, sent, strict=True):
        assert (sample.prompt_id, sample.reward) == (trajectory.prompt_id, trajectory.reward)
        assert sample.token_ids == trajectory.token_ids.tolist()
    forget_samples_after(tmp_path, 8)
    assert sampled_steps(tmp_path, EVALUATION) == [0, 8]
    SampleKeeper(tmp_path, config_of(), None).keep_evaluation(20, result, version=20)
    assert sampled_steps(tmp_path, EVALUATION) == [0, 8], "a rank without a tracker wrote"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_of_and_the_run_goes_on(tmp_path):
    told = ToldOf()
    (tmp_path / f".{sample_file(tmp_path, 1).name}.{os.getpid()}").symlink_to("/dev/full")
    alone(tmp_path, config_of(), 1, told)
    assert told.artifacts == [] and list(tmp_path.iterdir()) == []
    (text,) = told.warnings
    assert "step 1" in text and "No space left" in text and "tracking.sample_groups=0" in text
