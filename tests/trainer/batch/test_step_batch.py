"""The step as it runs: share_out -> step_batch -> scores, advantages, correction, loss weights ->
minibatches -> loss.

Neither the number of data-parallel ranks, nor the token budget, nor the order of sequences in a packing may
change loss and gradient. Ranks are real gloo processes: only they show whether normalisers are counted over
all of them.
Legend: S sequences, T packed tokens, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.presets import PRESETS
from configs.schema.correction import CorrectionConfig, FunctionWeight, ImportanceWeight
from configs.schema.objective import (
    AdvantageConfig,
    AggregationConfig,
    CispoObjective,
    ClippedObjective,
    DppoObjective,
    EntropyConfig,
    FunctionAdvantage,
    FunctionObjective,
    GdpoAdvantage,
    GmpoObjective,
    GrpoAdvantage,
    GspoObjective,
    KLConfig,
    ObjectiveConfig,
    OpoAdvantage,
    PolicyGradientObjective,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RlooAdvantage,
    SapoObjective,
)
from configs.schema.rollout import ResampleGroups
from parallel.packing import PackedBatch
from rollout.records import FinishReason, Group, Status, Trajectory
from rollout.sampling.messages import BeforeSelection
from rollout.sampling.sampler import _has_signal
from tests.reference import advantages as slow
from tests.reference.advantages import Sample
from tests.support.megatron_workers import forked_context
from tests.support.packed_batches import random_batch
from tests.support.records import trajectory
from trainer.algorithm.advantages import Advantages, compute_advantages
from trainer.algorithm.aggregation import Mode, kept_factor
from trainer.algorithm.correction import correct
from trainer.algorithm.policy_loss import PolicyLoss, policy_loss
from trainer.algorithm.segments import spread
from trainer.batch.farthest_token import Measure, _farthest_here, farthest_token
from trainer.batch.plan import Routing
from trainer.batch.sharing_out import Share, share_out
from trainer.batch.step_batch import StepBatch, step_batch
from trainer.ranks.metrics import merge_over_ranks, values
from trainer.ranks.totals import alone, total_over
from trainer.step_metrics import sample_metrics, step_rewards

VOCAB = 7
CONSTANT = 5
MOST_RANKS = 3
MODES = Mode.__args__
OBJECTIVE = ClippedObjective(clip_low=0.2, clip_high=0.28)
KL = KLConfig(coefficient=0.3, estimator="k3")
ENTROPY = EntropyConfig(coefficient=0.05)
UPPER = 1.5
TRUNCATED_TOKENS, GRPO = CorrectionConfig(weight=ImportanceWeight(upper=UPPER)), GrpoAdvantage()
OBJECTIVES = (
    OBJECTIVE, GspoObjective(type="gspo"), GmpoObjective(type="gmpo"), CispoObjective(type="cispo"), SapoObjective(type="sapo"),
    DppoObjective(type="dppo"), PolicyGradientObjective(type="policy_gradient"),
)  # fmt: skip
ADVANTAGES = (
    GRPO, RlooAdvantage(type="rloo"), OpoAdvantage(type="opo"), ReinforcePlusPlusAdvantage(type="reinforce_pp", gamma=0.9),
    ReinforcePlusPlusBaselineAdvantage(type="reinforce_pp_baseline"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a step is trained with."""

    mode: str = "token_mean"
    correction: CorrectionConfig = TRUNCATED_TOKENS
    objective: ObjectiveConfig = OBJECTIVE
    advantage: AdvantageConfig = GRPO
    scores_old: bool = True
    """False: with one minibatch, whose current policy is old, the loss finds old itself."""
    masks_truncated: bool = False

    def loss(self, microbatch: PackedBatch, current_T: Tensor, entropy_T: Tensor) -> PolicyLoss:
        objective = (
            PolicyGradientObjective(type="policy_gradient")
            if self.correction.loss == "policy_gradient"
            else self.objective
        )
        return policy_loss(
            microbatch,
            current_T,
            entropy_T,
            objective=objective,
            kl=KL,
            entropy=ENTROPY,
            correction=self.correction,
            aggregation=self.mode,
        )


def aggregation(mode: str) -> AggregationConfig:
    return AggregationConfig(
        type=mode, constant=CONSTANT if mode == "sequence_mean_token_sum_over_constant" else None
    )


def logits_VV(seed: int) -> Tensor:
    """A bigram policy: row v holds the logits of what follows token v."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


ROLLOUT, OLD, REF = (logits_VV(0) + 0.3 * logits_VV(seed) for seed in (1, 2, 3))


def current_policy(minibatch: int) -> Tensor:
    """The policy before this optimizer step; it moves, as it does in training."""
    return (OLD + 0.1 * minibatch * logits_VV(4)).requires_grad_()


def scores(policy_VV: Tensor, tokens_T: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [T], each token's bitwise the same whatever else is in the batch."""
    log_VV = policy_VV.log_softmax(-1)
    return log_VV[tokens_T, targets_T], -(log_VV.exp() * log_VV).sum(-1)[tokens_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Per minibatch, of one rank or of all: what ranks contribute adds up."""

    losses: list[float]
    gradients: list[Tensor]

    @staticmethod
    def total(ranks: "list[StepResult]") -> "StepResult":
        return StepResult(
            losses=[math.fsum(parts) for parts in zip(*(r.losses for r in ranks), strict=True)],
            gradients=[
                torch.stack(parts).double().sum(0)
                for parts in zip(*(r.gradients for r in ranks), strict=True)
            ],
        )


def run_step(share: Share, setup: Setup, group: dist.ProcessGroup | None) -> StepResult:
    """One rank's updates of a step, on the bigram policy."""
    return updated(weighted(share, setup, group), setup, group)


def updated(batch: StepBatch, setup: Setup, group: dist.ProcessGroup | None) -> StepResult:
    losses, gradients = [], []
    for index, minibatch in enumerate(batch.minibatches()):
        policy_VV, loss, outputs = current_policy(index), 0.0, []
        for microbatch in minibatch:
            part = setup.loss(microbatch, *scores(policy_VV, microbatch.tokens_T, microbatch.targets_T))
            part.loss.backward()
            loss += part.loss.item()
            outputs.append(part.counted)
        factor = kept_factor(outputs, total_over(group))
        losses.append(loss * factor)
        gradients.append(policy_VV.grad * factor)
    return StepResult(losses=losses, gradients=gradients)


def weighted(share: Share, setup: Setup, group: dist.ProcessGroup | None) -> StepBatch:
    """One rank's batch, ready for its updates: call by call what ``trainer/loop.py`` does."""
    batch, total = step_batch(share), total_over(group)
    old_T, ref_T = (
        batch.scattered([scores(p, m.tokens_T, m.targets_T)[0] for m in batch.microbatches()])
        for p in (OLD, REF)
    )
    if setup.correction.mode == "bypass":
        old_T = batch.packed.rollout_logprobs_T
    batch = batch.with_fields(ref_logprobs_T=ref_T)
    if setup.scores_old or setup.correction.mode == "bypass":
        batch = batch.with_fields(old_logprobs_T=old_T)
    batch = batch.with_advantages(
        compute_advantages(
            batch.packed,
            batch.rewards_S,
            batch.group_ids_S,
            setup.advantage,
            episode_ids_S=batch.episode_ids_S,
            total=total,
        )
    )
    correction = correct(batch.packed, setup.correction, total)
    return batch.with_loss_weights(correction, aggregation(setup.mode), setup.correction.denominator, total)


Samples = set[tuple[int, int]]
"""(group, sibling) of some samples."""


def reference_losses(
    groups: list[Group], mode: str, num_minibatches: int, masked: Samples = frozenset()
) -> list[float]:
    """The loss of each minibatch from its definition, token by token in Python floats."""
    size = len(groups) // num_minibatches
    return [
        _reference_loss(groups[start : start + size], mode, current_policy(index).detach(), masked)
        for index, start in enumerate(range(0, len(groups), size))
    ]


def _reference_loss(groups: list[Group], mode: str, current_VV: Tensor, masked: Samples) -> float:
    log = {
        name: p.double().log_softmax(-1) for name, p in (("old", OLD), ("ref", REF), ("current", current_VV))
    }
    of_episode = defaultdict(list)
    for group in groups:
        of_sibling = {t.sibling_id: t.reward for t in group.trajectories}
        rewards = torch.tensor([*of_sibling.values()], dtype=torch.float64)
        spread = rewards.std() if len(rewards) > 1 else torch.tensor(0.0)
        for t in group.trajectories:
            advantage = (
                float((t.reward - rewards.mean()) / (spread + 1e-6)) if len(rewards) > 1 else float(t.reward)
            )
            losses = of_episode[t.group_id, t.sibling_id]
            for place in range(1, len(t.token_ids)):
                if t.response_mask[place] and (t.group_id, t.sibling_id) not in masked:
                    before, token = t.token_ids[place - 1], t.token_ids[place]
                    old, ref, now = (float(log[name][before, token]) for name in ("old", "ref", "current"))
                    weight = min(math.exp(old - t.rollout_logprobs[place]), UPPER)
                    ratio = math.exp(now - old)
                    surrogate = max(-advantage * ratio, -advantage * min(max(ratio, 1 - 0.2), 1 + 0.28))
                    if advantage < 0:
                        surrogate = min(surrogate, -3.0 * advantage)
                    k3 = math.exp(ref - now) - (ref - now) - 1
                    entropy = -float((log["current"][before].exp() * log["current"][before]).sum())
                    losses.append(surrogate * weight + 0.3 * k3 - 0.05 * entropy)
    sequences = [losses for losses in of_episode.values() if losses]
    if not sequences:
        return 0.0
    match mode:
        case "token_mean":
            return math.fsum(x for losses in sequences for x in losses) / sum(
                len(losses) for losses in sequences
            )
        case "sequence_mean_token_mean":
            return math.fsum(math.fsum(losses) / len(losses) for losses in sequences) / len(sequences)
        case "sequence_mean_token_sum":
            return math.fsum(math.fsum(losses) for losses in sequences) / len(sequences)
    return math.fsum(math.fsum(losses) for losses in sequences) / len(sequences) / CONSTANT


def make_groups(
    lengths: list[list[int]], rewards: list[list[float]], *, seed: int, vocab: int = VOCAB
) -> list[Group]:
    """Random siblings of these lengths in tokens. A quarter of the places are no response: prompts, tool
    tokens, whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    log_rollout = ROLLOUT.log_softmax(-1)
    groups = []
    for group_id, (sibling_lengths, sibling_rewards) in enumerate(zip(lengths, rewards, strict=True)):
        trajectories = []
        for sibling_id, (length, reward) in enumerate(zip(sibling_lengths, sibling_rewards, strict=True)):
            ids = torch.randint(0, vocab, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) < 0.75
            mask[0] = False
            # What a server would report; for a vocabulary that the bigram policy does not have, anything
            # near.
            table = (
                log_rollout[ids[:-1], ids[1:]]
                if vocab == VOCAB
                else torch.full((length - 1,), -math.log(vocab))
            )
            logprobs = [
                0.0,
                *(table + 0.3 * torch.randn(length - 1, generator=generator)).clamp(max=0.0).tolist(),
            ]
            trajectories.append(
                trajectory(
                    group_id=group_id, sibling_id=sibling_id, prompt_id=str(group_id), token_ids=ids.tolist(),
                    response_mask=mask.tolist(), rollout_logprobs=logprobs, token_versions=[0] * length,
                    finish_reason=FinishReason.STOP, reward=reward, reward_parts={},
                )
            )  # fmt: skip
        groups.append(Group(group_id=group_id, prompt_id=str(group_id), trajectories=trajectories))
    return groups


def forked(group: Group, joined: list[bool]) -> Group:
    """The group in which a trajectory that is joined is a further sequence of the sibling before it."""
    trajectories = group.trajectories[:1]
    for t, is_joined in zip(group.trajectories[1:], joined[1:], strict=True):
        before = trajectories[-1]
        same = {"sibling_id": before.sibling_id, "branch": before.branch + 1, "reward": before.reward}
        trajectories.append(replace(t, **same) if is_joined else t)
    return replace(group, trajectories=trajectories)


def truncated(groups: list[Group], samples: Samples) -> list[Group]:
    """The first sequences of these samples are cut off."""
    return [
        replace(group, trajectories=[
            cut_off(t) if (t.group_id, t.sibling_id) in samples and not t.branch else t for t in group.trajectories
        ])
        for group in groups
    ]  # fmt: skip


def cut_off(t: Trajectory) -> Trajectory:
    """In its last turn or, if it has none, by the limit of the episode."""
    if not t.turns:
        return replace(t, status=Status.TOKEN_LIMIT)
    return replace(t, turns=[*t.turns[:-1], replace(t.turns[-1], finish_reason=FinishReason.LENGTH)])


def samples_of(groups: list[Group]) -> list[tuple[int, int]]:
    return sorted({(t.group_id, t.sibling_id) for group in groups for t in group.trajectories})


def shuffled(share: Share, seed: int) -> Share:
    """The same share with its sequences packed in another order, and each micro-batch's in another again."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(share.trajectories), generator=generator).tolist()
    new_row = {old: new for new, old in enumerate(order)}

    def mixed(rows: list[int]) -> list[int]:
        return [new_row[rows[i]] for i in torch.randperm(len(rows), generator=generator).tolist()]

    return replace(
        share,
        trajectories=[share.trajectories[i] for i in order],
        sequence_ids=[share.sequence_ids[i] for i in order],
        rows=[[mixed(rows) for rows in minibatch] for minibatch in share.rows],
    )


class Ranks:
    """Gloo processes that run the shares they are sent; the first ``len(shares)`` of them take part in a
    step."""

    def __init__(self, folder: Path):
        context = forked_context()
        self._ends, self._processes = [], []
        for rank in range(MOST_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve_rank, args=(rank, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, shares: list[Share], setup: Setup) -> StepResult:
        return StepResult.total(self.call(run_step, shares, setup))

    def call(self, work: Callable[..., Any], shares: list[Share], *arguments: Any) -> list[Any]:
        """``work(share, *arguments, group)`` of each rank. ``work`` is a function of a module."""
        ends = self._ends[: len(shares)]
        for end, share in zip(ends, shares, strict=True):
            end.send((work, share, arguments, len(shares)))
        results = []
        for rank, end in enumerate(ends):
            assert end.poll(180.0), f"rank {rank} did not answer within 180 s"
            results.append(end.recv())
        return results

    def close(self) -> None:
        for process in self._processes:  # idle, and nothing of theirs is to be kept
            process.kill()
            process.join(20.0)


def _serve_rank(rank: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, MOST_RANKS), rank=rank, world_size=MOST_RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, MOST_RANKS + 1)}
    while True:
        work, share, arguments, num_ranks = end.recv()
        end.send(work(share, *arguments, groups[num_ranks]))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@st.composite
def steps(draw, may_fork=True):
    """(groups, minibatches, data-parallel ranks, token budget) that can be planned."""
    minibatches, groups_each, siblings = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    shape = {"min_size": minibatches * groups_each, "max_size": minibatches * groups_each}

    def table(values):
        return draw(st.lists(st.lists(values, min_size=siblings, max_size=siblings), **shape))

    lengths = table(st.integers(2, 14))
    groups = make_groups(lengths, table(st.sampled_from([0.0, 0.1, 1.0])), seed=draw(st.integers(0, 9999)))
    if may_fork and draw(st.booleans()):
        groups = [forked(group, joined) for group, joined in zip(groups, table(st.booleans()), strict=True)]
        num_ranks = draw(st.integers(1, MOST_RANKS))
    else:
        num_ranks = draw(
            st.sampled_from([n for n in range(1, MOST_RANKS + 1) if groups_each * siblings % n == 0])
        )
    return groups, minibatches, num_ranks, max(max(row) for row in lengths) - 1 + draw(st.integers(0, 60))


def whole_step(groups: list[Group], num_minibatches: int, setup: Setup) -> StepResult:
    """One rank, one micro-batch per minibatch."""
    return StepResult.total([run_step(whole_share(groups, num_minibatches, setup), setup, None)])


def whole_share(groups: list[Group], num_minibatches: int, setup: Setup) -> Share:
    division = partial(
        share_out,
        num_minibatches=num_minibatches,
        dp_size=1,
        token_budget=10**6,
        masks_truncated=setup.masks_truncated,
    )
    (share,) = division(groups)
    return share


def magnitudes(groups: list[Group], num_minibatches: int, setup: Setup) -> list[tuple[float, float]]:
    """Per minibatch, sums over sequences of each term's |loss| and of the gradient's norm: what rounding is
    relative to."""
    found = []
    batch = weighted(whole_share(groups, num_minibatches, setup), setup, None)
    for index, minibatch in enumerate(batch.minibatches()):
        loss_size, gradient_size, outputs = 0.0, 0.0, []
        for row in range(len(minibatch[0].lengths)):
            one, policy_VV = minibatch[0].select([row]), current_policy(index)
            loss, metrics, counted = setup.loss(one, *scores(policy_VV, one.tokens_T, one.targets_T))
            loss.backward()
            outputs.append(counted)
            loss_size += sum(abs(metrics[f"loss/{term}"].value) for term in ("policy", "kl", "entropy"))
            gradient_size += policy_VV.grad.norm().item()
        factor = kept_factor(outputs)
        found.append((loss_size * factor, gradient_size * factor))
    return found


def assert_same(found: StepResult, wanted: StepResult, sizes: list[tuple[float, float]]) -> None:
    assert len(found.losses) == len(wanted.losses) == len(sizes)
    for index, (loss_size, gradient_size) in enumerate(sizes):
        assert abs(found.losses[index] - wanted.losses[index]) <= 1e-6 * loss_size
        assert (found.gradients[index] - wanted.gradients[index]).norm() <= 1e-6 * gradient_size


@settings(max_examples=60, deadline=None)
@given(step=steps(), mode=st.sampled_from(MODES), seed=st.integers(0, 99))
def test_loss_and_gradient_do_not_depend_on_ranks_budget_or_order(ranks, step, mode, seed):
    groups, minibatches, num_ranks, token_budget = step
    setup = Setup(mode=mode)
    wanted = whole_step(groups, minibatches, setup)
    shares = share_out(groups, num_minibatches=minibatches, dp_size=num_ranks, token_budget=token_budget)
    found = ranks.run([shuffled(share, seed + rank) for rank, share in enumerate(shares)], setup)
    assert_same(found, wanted, magnitudes(groups, minibatches, setup))


@settings(max_examples=30)
@given(step=steps(), seed=st.integers(0, 99))
def test_what_micro_batches_give_goes_back_to_the_tokens_that_they_took(step, seed):
    """Numbers per token, and rows of two."""
    groups, minibatches, num_ranks, token_budget = step
    division = partial(share_out, num_minibatches=minibatches, dp_size=num_ranks, token_budget=token_budget)
    for share in division(groups):
        batch = step_batch(shuffled(share, seed))
        parts = batch.microbatches()
        assert torch.equal(batch.scattered([part.targets_T for part in parts]), batch.packed.targets_T)
        rows = [torch.stack((part.tokens_T, part.positions_T), 1) for part in parts]
        wanted = torch.stack((batch.packed.tokens_T, batch.packed.positions_T), 1)
        assert torch.equal(batch.scattered(rows), wanted)


def test_numbers_of_the_whole_step_are_one_list_for_all_ranks():
    """512 ranks of 16,384 sequences would be eight million of each."""
    groups = make_groups([[4] * 8], [[1.0] * 8], seed=0)
    first, *others = share_out(groups, num_minibatches=1, dp_size=8, token_budget=20)
    for name in ("lengths", "rewards", "group_ids", "episode_ids", "group_sizes"):
        assert all(getattr(share, name) is getattr(first, name) for share in others), name


def denominators(correction: CorrectionConfig) -> st.SearchStrategy[CorrectionConfig]:
    return st.sampled_from(("kept", "all")).map(
        lambda which: correction.model_copy(update={"denominator": which})
    )


# The presets' bounds are for two engines of the same weights; the policies here differ more, so that wider
# ones are drawn as well.
WIDE = CorrectionConfig.model_validate({
    "mode": "bypass", "loss": "policy_gradient", "weight": {"level": "segment", "upper": 1.5}, "veto": 0.1,
    "reject": [{"rule": "ratio", "level": "geometric", "upper": 1.2}, {"rule": "k3", "reduce": "token", "upper": 0.05}],
})  # fmt: skip
NORMALISED = [
    CorrectionConfig(weight=ImportanceWeight(level=level, normalise=True), veto=0.2)
    for level in ("token", "sequence", "segment")
]
setups = st.builds(
    lambda mode, correction, objective, advantage: Setup(mode=mode, correction=correction, objective=objective, advantage=advantage),
    st.sampled_from(MODES), st.sampled_from([*PRESETS.values(), WIDE, *NORMALISED]).flatmap(denominators),
    st.sampled_from(OBJECTIVES), st.sampled_from(ADVANTAGES),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(step=steps(), setup=setups, seed=st.integers(0, 99))
def test_every_correction_objective_and_advantage_is_the_same_under_any_layout(ranks, step, setup, seed):
    groups, minibatches, num_ranks, token_budget = step
    wanted = whole_step(groups, minibatches, setup)
    shares = share_out(groups, num_minibatches=minibatches, dp_size=num_ranks, token_budget=token_budget)
    found = ranks.run([shuffled(share, seed + rank) for rank, share in enumerate(shares)], setup)
    assert_same(found, wanted, magnitudes(groups, minibatches, setup))


HERE = "tests.support.own_functions"
OWN = FunctionObjective(
    type="function",
    function=f"{HERE}:clipped",
    settings={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
)
OWN_BY_SEQUENCE = FunctionObjective(
    type="function", function=f"{HERE}:gspo", settings={"clip_low": 3e-4, "clip_high": 4e-4}
)
OWN_GRPO = FunctionAdvantage(type="function", function=f"{HERE}:grpo", settings={"normalize_by_std": True})
OWN_OPO = FunctionAdvantage(type="function", function=f"{HERE}:opo")
OWN_WEIGHT = FunctionWeight(level="function", function=f"{HERE}:truncate", settings={"upper": UPPER})


@settings(max_examples=30, deadline=None)
@given(
    step=steps(),
    mode=st.sampled_from(MODES),
    scores_old=st.booleans(),
    pairs=st.sampled_from(
        (
            ((OBJECTIVE, GRPO), (OWN, OWN_GRPO)),
            ((GspoObjective(type="gspo"), OpoAdvantage(type="opo")), (OWN_BY_SEQUENCE, OWN_OPO)),
        )
    ),
)
def test_functions_of_the_users_own_are_bitwise_the_built_in_ones(ranks, step, mode, scores_old, pairs):
    groups, minibatches, num_ranks, token_budget = step
    num_ranks = num_ranks if num_ranks < MOST_RANKS else 1
    shares = share_out(groups, num_minibatches=minibatches, dp_size=num_ranks, token_budget=token_budget)
    results = []
    for (objective, advantage), weight in zip(
        pairs, (ImportanceWeight(upper=UPPER), OWN_WEIGHT), strict=True
    ):
        correction = CorrectionConfig(weight=weight)
        made = Setup(
            mode=mode, correction=correction, objective=objective, advantage=advantage, scores_old=scores_old
        )
        results.append(ranks.run(shares, made))
    built_in, own = results
    assert own.losses == built_in.losses
    assert all(torch.equal(a, b) for a, b in zip(own.gradients, built_in.gradients, strict=True))


@settings(max_examples=40, deadline=None)
@given(step=steps(), mode=st.sampled_from(MODES), data=st.data())
def test_the_loss_of_each_minibatch_is_its_definition(step, mode, data):
    """Also if truncated responses are masked: their rewards count, and their tokens do not."""
    groups, minibatches, _, _ = step
    cut = data.draw(st.sets(st.sampled_from(samples_of(groups))))
    setup = Setup(mode=mode, masks_truncated=data.draw(st.booleans()))
    groups, masked = truncated(groups, cut), cut if setup.masks_truncated else set()
    found = whole_step(groups, minibatches, setup).losses
    sizes = [loss_size for loss_size, _ in magnitudes(groups, minibatches, setup)]
    expected = reference_losses(groups, mode, minibatches, masked)
    for loss, wanted, size in zip(found, expected, sizes, strict=True):
        assert loss == pytest.approx(wanted, abs=3e-6 * size)


@settings(max_examples=30, deadline=None)
@given(step=steps(), setup=setups, data=st.data())
def test_with_its_advantages_a_step_learns_as_if_masked_responses_were_not_there(ranks, step, setup, data):
    """On any ranks, the loss and gradient of a step from which the truncated samples were removed."""
    groups, minibatches, num_ranks, token_budget = step
    samples = samples_of(groups)
    of_first = [sample for sample in samples if sample[0] % (len(groups) // minibatches) == 0]
    # At least the first sample of each minibatch stays: one without any cannot be planned.
    staying = {min(s for s in of_first if s[0] == group) for group, _ in of_first}
    cut = data.draw(st.sets(st.sampled_from(samples))) - staying
    groups, masking = truncated(groups, cut), replace(setup, masks_truncated=True)
    division = partial(
        share_out,
        num_minibatches=minibatches,
        dp_size=num_ranks,
        token_budget=token_budget,
        masks_truncated=True,
    )
    found = ranks.run(division(groups), masking)

    advantages = {}
    share = whole_share(groups, minibatches, masking)
    packed = weighted(share, masking, None).packed
    for t, row_T in zip(share.trajectories, packed.advantages_T.split(packed.lengths), strict=True):
        advantages[t.group_id, t.sibling_id, t.branch] = row_T
    removed = [
        replace(g, trajectories=[t for t in g.trajectories if (t.group_id, t.sibling_id) not in cut])
        for g in groups
    ]
    share = whole_share(removed, minibatches, setup)
    rows = [advantages[t.group_id, t.sibling_id, t.branch] for t in share.trajectories]
    batch = weighted(share, setup, None).with_fields(advantages_T=torch.cat(rows))
    assert_same(found, updated(batch, setup, None), magnitudes(groups, minibatches, masking))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_masked_responses_alone_has_no_loss_and_no_gradient(ranks, objective):
    setup = Setup(objective=objective, masks_truncated=True)
    groups = truncated(make_groups(LENGTHS, REWARDS, seed=3), {(g, s) for g in range(4) for s in range(3)})
    division = partial(share_out, num_minibatches=2, dp_size=2, token_budget=20, masks_truncated=True)
    found = ranks.run(division(groups), setup)
    assert found.losses == [0.0, 0.0] and not any(gradient.any() for gradient in found.gradients)


def test_all_sequences_of_a_truncated_sample_are_masked_and_packed_apart():
    """Sample 0 forked and its first sequence was cut off; of sample 2 only the fork was; a limit ended the last episode."""
    groups = make_groups([[5, 6, 4], [5, 4, 6, 8]], [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]], seed=2)
    groups = [forked(group, [False, True, False, False][: len(group.trajectories)]) for group in groups]
    one, other = (list(group.trajectories) for group in groups)
    one[0], other[1], other[3] = (
        cut_off(one[0]), cut_off(other[1]), replace(other[3], status=Status.TOKEN_LIMIT),
    )  # fmt: skip
    assert one[0].finish_reason == other[1].finish_reason == FinishReason.LENGTH
    groups = [replace(g, trajectories=of) for g, of in zip(groups, (one, other), strict=True)]
    division = partial(
        share_out, num_minibatches=1, dp_size=1, token_budget=100, masks_truncated=True, parts_no_signal=True
    )
    (share,) = division(groups)
    assert share.masked == {0, 1, 6}
    assert [[share.sequence_ids[row] for row in rows] for rows in share.rows[0]] == [
        [2, 3, 4, 5],
        [0, 1, 6],
    ]
    sampled = [int(t.response_mask.sum()) for t in [*one, *other]]
    assert all(sampled)
    masked = [0 if number in share.masked else count for number, count in enumerate(sampled)]
    (unmasked,) = division(groups, masks_truncated=False)
    for made, expected in ((share, masked), (unmasked, sampled)):
        packed = step_batch(made).packed
        counts = [int(mask_T.sum()) for mask_T in packed.response_mask_T.split(packed.lengths)]
        assert dict(zip(made.sequence_ids, counts, strict=True)) == dict(enumerate(expected))
    batch = step_batch(share).with_fields(values_T=torch.zeros(packed.num_tokens))
    correction, mask_T = correct(batch.packed, CorrectionConfig()), batch.packed.response_mask_T
    found = batch.with_loss_weights(correction, AggregationConfig(), "all", alone).packed
    torch.testing.assert_close(found.value_aggregation_T, mask_T / mask_T.sum())


@settings(max_examples=60, deadline=None)
@given(step=steps(may_fork=False), setup=setups, seed=st.integers(0, 99))  # see Learner.score
def test_old_from_the_updates_own_pass_is_old_from_a_pass_before_it(ranks, step, setup, seed):
    groups, _, num_ranks, token_budget = step
    if setup.correction.weight.level != "none" and setup.correction.weight.normalise:
        # Needs the pass before, as RunConfig.scores_old says.
        setup = replace(setup, correction=TRUNCATED_TOKENS)
    (whole,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=10**6)
    wanted = StepResult.total([run_step(whole, setup, None)])
    shares = share_out(groups, num_minibatches=1, dp_size=num_ranks, token_budget=token_budget)
    found = ranks.run(
        [shuffled(share, seed + rank) for rank, share in enumerate(shares)], replace(setup, scores_old=False)
    )
    assert_same(found, wanted, magnitudes(groups, 1, setup))


LENGTHS = [[9, 5, 14], [12, 3, 20], [7, 16, 2], [11, 4, 8]]
REWARDS = [[1.0, 0.0, 0.1], [0.0, 1.0, 1.0], [0.1, 0.0, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_normalisers_are_counted_over_all_ranks(ranks, mode):
    """The shares hold different numbers of tokens, so counts of one rank alone would show, in every mode."""
    groups = make_groups(LENGTHS, REWARDS, seed=3)
    setup = Setup(mode=mode)
    wanted = whole_step(groups, 2, setup)
    for num_ranks in (2, 3):
        found = ranks.run(share_out(groups, num_minibatches=2, dp_size=num_ranks, token_budget=20), setup)
        assert_same(found, wanted, magnitudes(groups, 2, setup))


TRUNCATED = {"weight": {"level": "token", "upper": 1.5}}
REJECTING = {
    "reject": [
        {"rule": "ratio", "level": "geometric", "upper": 1.5},
        {"rule": "ratio", "level": "token", "upper": 3.0},
    ]
}
JOBS = (
    [{"aggregation": aggregation(mode), "correction": TRUNCATED} for mode in MODES]
    + [
        {
            "aggregation": aggregation("token_mean"),
            "correction": TRUNCATED,
            "learner": {"truncated_responses": "mask"},
        },
        {"aggregation": aggregation("token_mean"), "correction": TRUNCATED, "sharded": True},
        {
            "aggregation": aggregation("token_mean"),
            "correction": {"weight": {"level": "sequence", "normalise": True}} | REJECTING,
        },
        {
            "aggregation": aggregation("sequence_mean_token_mean"),
            "correction": {"mode": "bypass"} | REJECTING,
        },
        {
            "aggregation": aggregation("token_mean"),
            "correction": {"mode": "bypass", "loss": "policy_gradient"} | REJECTING,
            "sharded": True,
        },
    ]
    + [
        {
            "aggregation": aggregation("token_mean"),
            "correction": TRUNCATED | REJECTING,
            "learner": {"minibatches": 1, "old_logprobs": when},
        }
        for when in ("always", "when_needed")
    ]
)

FLAT_JOBS = [
    {
        "aggregation": aggregation("token_mean"),
        "flat": flat,
        "entropy": 0.0,
        "learner": {"minibatches": minibatches, "skip_zero_gradients": skips},
    }
    for minibatches, flat in ((1, (0,)), (2, (1, 2)))
    for skips in (False, True)
]
"""Of four groups two have no signal, or all of the second minibatch and half of the first. The last has none by itself."""


@pytest.mark.engines
def test_two_data_parallel_ranks_learn_what_one_does(tmp_path):
    """The real learner: what is received, scored, weighted and updated over two ranks gives one rank's
    gradients and weights. Where truncated responses are masked, the second minibatch has nothing left."""
    # Here, since the processes of ``Ranks`` import this file, and Megatron would double their start.
    from tests.support.megatron_workers import (
        make_hf_model,
        relative_difference,
        run_ranks,
        work_learner_steps,
    )

    folder = make_hf_model(tmp_path / "m", "qwen3")
    cut = {(0, 1), *((group, sibling) for group in (2, 3) for sibling in range(3))}
    groups = truncated(make_groups(LENGTHS, REWARDS, seed=3, vocab=43), cut)
    arguments = (folder, groups, JOBS + FLAT_JOBS)
    # With as many threads as the two.
    (one,) = run_ranks(work_learner_steps, 1, tmp_path / "rank", 1, *arguments)
    two = run_ranks(work_learner_steps, 2, tmp_path / "ranks", 2, *arguments)
    for index, job in enumerate(JOBS + FLAT_JOBS):
        wanted = one[index]
        assert relative_difference(wanted["weights"], wanted["before"]) > 1e-3, "nothing was learned"
        for found in (rank[index] for rank in two):
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6), job
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5), job
            assert found["kept"] == pytest.approx(wanted["kept"], rel=1e-12), job
            # Adam divides by the gradient's own size, so a rounding error of a tiny gradient weighs more in
            # weights than in gradients.
            assert relative_difference(found["weights"], wanted["weights"]) < 5e-6, job
            for gradient, whole in zip(found["gradients"], wanted["gradients"], strict=True):
                # Sums of float32 in another order: 2.5e-6 was seen. Ranks also share other prompts.
                assert _are_zero(gradient, whole) or relative_difference(gradient, whole) < 5e-6, job
    _assert_nothing_is_lost_by_skipping([rank[len(JOBS) :] for rank in (one, *two)], relative_difference)
    one = one[: len(JOBS)]
    assert len({f"{job['norms'][0]:.5g}" for job in one}) == len(MODES) + 5, (
        "jobs do not differ, so a wrong one would not show"
    )
    masked = one[len(MODES)]
    assert masked["losses"][1] == masked["norms"][1] == 0 < masked["norms"][0]
    assert all(0.1 < job["kept"][0] < 1 for job in one[-5:]), (
        "rejection should take some of the tokens and leave some"
    )
    before, within = one[-2:]
    assert within["norms"] == pytest.approx(before["norms"], rel=1e-6), (
        "old from the update's own pass differs from old before it"
    )
    assert relative_difference(within["weights"], before["weights"]) < 1e-6


def _are_zero(*gradients) -> bool:
    return not any(tensor.any() for gradient in gradients for tensor in gradient.values())


def _assert_nothing_is_lost_by_skipping(of_ranks, relative_difference):
    """With backward passes for groups without signal and without: the same gradients, metrics and weights."""
    for one_minibatch, same, two_minibatches, the_same in of_ranks:
        for full, skipping in ((one_minibatch, same), (two_minibatches, the_same)):
            assert skipping["norms"] == pytest.approx(full["norms"], rel=1e-6)
            assert relative_difference(skipping["weights"], full["weights"]) < 1e-6
            for before, after in zip(full["gradients"], skipping["gradients"], strict=True):
                assert _are_zero(after, before) or relative_difference(after, before) < 2e-6
            for before, after in zip(full["values"], skipping["values"], strict=True):
                after = {name: value for name, value in after.items() if name != "policy/skipped_fraction"}
                assert after == pytest.approx(before, rel=1e-5, abs=1e-9)
            assert full["skipped"] == [None] * len(full["skipped"])
        assert 0.3 < same["skipped"][0] < 0.7
        first, second = the_same["skipped"]
        # The optimizer steps in any case, on one micro-batch at least.
        assert 0.2 < first < 0.8 and second < 1.0


def test_a_minibatch_that_forks_made_uneven_is_filled_up_by_hand():
    """Two groups of two episodes, the first of which forked; two minibatches on two ranks."""
    groups = make_groups([[5, 4, 6], [3, 4]], [[1.0, 1.0, 0.0], [0.0, 1.0]], seed=1)
    groups[0] = forked(groups[0], [False, True, False])
    first, second = share_out(groups, num_minibatches=2, dp_size=2, token_budget=20)
    assert first.lengths == [4, 3, 5, 2, 3, 1] and first.group_sizes == [3, 2]
    assert first.episode_ids == [0, 0, 1, 2, 3, 0] and first.rewards == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    of_ranks = zip(_ids_by_minibatch(first), _ids_by_minibatch(second), strict=True)
    assert [sorted(one + other) for one, other in of_ranks] == [[0, 1, 2, 5], [3, 4]]
    filling = next(t for share in (first, second) for t in share.trajectories if t.branch == -1)
    assert filling.token_ids.tolist() == groups[0].trajectories[0].token_ids[:2].tolist()
    assert not filling.response_mask.any() and filling.turns == []
    assert all(step_batch(share).num_episodes == 4 for share in (first, second))


def test_episodes_are_numbered_where_one_has_forked():
    """Else the learner would score ``old`` by a pass of its own at every step (``Learner.score``)."""
    (group,) = make_groups([[5, 4, 6]], [[1.0, 1.0, 0.0]], seed=1)
    division = partial(share_out, num_minibatches=1, dp_size=1, token_budget=20)
    for groups, num_episodes, has_forks in (
        ([group], 3, False),
        ([forked(group, [False, True, False])], 2, True),
    ):
        (share,) = division(groups)
        batch = step_batch(share)
        assert batch.num_episodes == num_episodes and (batch.episode_ids_S is not None) == has_forks


def test_a_critics_targets_are_those_of_the_advantages():
    (group,) = make_groups([[5, 4]], [[1.0, 0.0]], seed=1)
    (share,) = share_out([group], num_minibatches=1, dp_size=1, token_budget=20)
    batch = step_batch(share)
    advantages_T, returns_T = torch.rand(2, batch.packed.num_tokens)
    for returns in (returns_T, None):
        given = Advantages(advantages_T=advantages_T, returns_T=returns, metrics={})
        found = batch.with_advantages(given).packed
        assert found.advantages_T is advantages_T and found.returns_T is returns


def test_what_fills_up_a_minibatch_has_neither_experts_nor_kept_sets():
    """Its tokens are fewer than those of the sample that it is taken from."""
    (group,) = make_groups([[5, 4, 6]], [[1.0, 1.0, 0.0]], seed=1)
    routing = Routing(layers=1, experts_per_token=1, dtype="uint8")

    def with_more(t: Trajectory) -> Trajectory:
        count = len(t.token_ids)
        experts = {"experts": np.ones((count, 1, 1), np.uint8), "is_replayed": np.ones(count, dtype=bool)}
        kept = {"num_kept": t.response_mask.astype(np.int32), "kept_ids": t.token_ids[t.response_mask]}
        return replace(t, **experts, **kept)

    group = replace(group, trajectories=[with_more(t) for t in group.trajectories])
    for share in share_out([group], num_minibatches=1, dp_size=2, token_budget=20):
        packed, filling = (
            step_batch(share, routing=routing).packed,
            [t.branch == -1 for t in share.trajectories],
        )
        for row, is_filling in enumerate(filling):
            one = packed.select([row])
            assert one.is_replayed_T.any() != is_filling and one.num_kept_T.sum() == one.response_mask_T.sum()


def test_each_rank_has_a_multiple_of_micro_batches_also_behind_forks():
    """Six sequences, a seventh of a fork, and what fills these up; a micro-batch has room for more than all."""
    groups = make_groups([[9, 5, 14, 4], [12, 3, 20]], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0]], seed=3)
    groups[0] = forked(groups[0], [False, False, True, False])
    for multiple in (1, 2, 3):
        shares = share_out(
            groups, num_minibatches=1, dp_size=2, token_budget=100, microbatch_multiple=multiple
        )
        assert [len(microbatches) for share in shares for microbatches in share.rows] == [multiple, multiple]
        assert sum(len(share.trajectories) for share in shares) == {1: 8, 2: 8, 3: 12}[multiple]


def test_groups_of_one_prompt_share_micro_batches_where_the_model_computes_it_once():
    """Two prompts of six tokens with three answers of two each: whole, two of them are more than the budget."""
    groups = [
        Group(group_id=number, prompt_id=str(number), trajectories=[
            trajectory(
                group_id=number, sibling_id=sibling, prompt_id=str(number), token_ids=[*[number] * 6, 2, sibling],
                response_mask=[False] * 6 + [True] * 2, rollout_logprobs=[-1.0] * 8, token_versions=[0] * 8,
                reward=float(sibling), reward_parts={},
            )
            for sibling in range(3)
        ])
        for number in range(2)
    ]  # fmt: skip
    for shares_prompts, micro_batches in (
        (False, [[0], [1], [2], [3], [4], [5]]),
        (True, [[0, 1, 2], [3, 4, 5]]),
    ):
        (share,) = share_out(
            groups, num_minibatches=1, dp_size=1, token_budget=13, shares_prompts=shares_prompts
        )
        assert (
            sorted(sorted(share.sequence_ids[row] for row in rows) for rows in share.rows[0]) == micro_batches
        )


def test_rewards_of_turns_are_there_where_they_are_credited():
    """Without them an advantage is of whole episodes (``compute_advantages``)."""
    groups = make_groups([[5, 4]], [[1.0, 0.0]], seed=1)
    for credits_turns in (False, True):
        (share,) = share_out(
            groups, num_minibatches=1, dp_size=1, token_budget=20, credits_turns=credits_turns
        )
        assert (step_batch(share).turn_rewards is not None) == credits_turns


def test_parts_of_rewards_are_there_where_siblings_are_compared_by_them():
    """Of a forked episode once, of what fills up a minibatch as of its sample, and none of a sample without a score."""
    groups = make_groups([[5, 4, 6], [3, 7, 4]], [[1.0, 1.0, 0.0], [0.0, None, 1.0]], seed=1)
    groups[0] = forked(groups[0], [False, True, False])
    parts = iter([[1.0, 0.3], [1.0, 0.3], [0.0, 0.7], [1.0, 0.0], [0.0, 0.5], [0.0, 0.5]])
    groups = [
        replace(group, trajectories=[
            replace(t, reward_parts={} if t.reward is None else dict(zip("abc", [*next(parts), 9.0], strict=True)))
            for t in group.trajectories
        ])
        for group in groups
    ]  # fmt: skip
    weights = {"b": slow.WEIGHTS[0], "a": slow.WEIGHTS[1]}
    shares = share_out(groups, num_minibatches=1, dp_size=4, token_budget=20, part_weights=weights)
    rows = [[0.3, 1.0], [0.3, 1.0], [0.7, 0.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [0.3, 1.0], [0.3, 1.0]]
    for batch in map(step_batch, shares):
        assert batch.reward_parts.values_SR.tolist() == rows
        assert batch.reward_parts.weights_R.tolist() == slow.WEIGHTS

    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=100, part_weights=weights)
    batch = step_batch(share)
    episodes = [
        Sample(group=group, score=0.0, mask=[True], penalties=[], values=[], parts=row)
        for group, row in ((0, rows[0]), (0, rows[2]), (1, rows[3]), (1, rows[5]))
    ]
    of_samples = slow.gdpo(episodes, [s.group for s in episodes])
    found_T = compute_advantages(
        batch.packed, batch.rewards_S, batch.group_ids_S, GdpoAdvantage(type="gdpo"), episode_ids_S=batch.episode_ids_S,
        reward_parts=batch.reward_parts,
    ).advantages_T  # fmt: skip
    first, second, third, fourth = of_samples
    of_sequences_S = torch.tensor([first, first, second, third, 0.0, fourth])[batch.packed.sequence_ids_S]
    expected_T = spread(of_sequences_S, batch.packed.cu_seqlens) * batch.packed.response_mask_T
    torch.testing.assert_close(found_T, expected_T, rtol=1e-5, atol=1e-6)
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=100)
    assert step_batch(share).reward_parts is None


def test_lags_and_shared_prompts_are_packed_where_the_step_asks_for_them():
    groups = make_groups([[5, 4]], [[1.0, 0.0]], seed=1)
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=20)
    plain, packed = step_batch(share).packed, step_batch(share, newest=3, share_prompts=True).packed
    assert plain.lag_T is None is plain.prompt_ids_S and packed.prompt_ids_S is not None
    assert (packed.lag_T[packed.response_mask_T] == 3).all(), "sampled by version 0"


def test_groups_of_which_all_scored_samples_have_one_reward_are_packed_apart():
    groups = make_groups([[5, 5]] * 4, [[1.0, 1.0], [0.0, 1.0], [1.0, None], [None, None]], seed=1)
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=100, parts_no_signal=True)  # fmt: skip
    assert [[share.sequence_ids[row] for row in rows] for rows in share.rows[0]] == [
        [2, 3],
        [0, 1, 4, 5, 6, 7],
    ]


def test_rewards_that_differ_by_the_order_of_a_sum_are_no_signal():
    """Two numbers of float64, and one of float32, in which rewards reach the advantages."""
    rewards = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]
    assert rewards[0] != rewards[1]
    groups = make_groups([[5, 5]] * 2, [rewards, [0.0, 1.0]], seed=1)
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=100, parts_no_signal=True)
    assert [[share.sequence_ids[row] for row in rows] for rows in share.rows[0]] == [[2, 3], [0, 1]]
    batch = step_batch(share)
    found_T = compute_advantages(batch.packed, batch.rewards_S, batch.group_ids_S, GRPO).advantages_T
    has_signal = [bool(part.any()) for part in found_T.split(batch.packed.lengths)]
    assert dict(zip(share.sequence_ids, has_signal, strict=True)) == {0: False, 1: False, 2: True, 3: True}
    assert [_has_signal(group.trajectories, ResampleGroups()) for group in groups] == [False, True]
    assert sample_metrics(groups)["groups/no_signal_fraction"] == 0.5
    assert BeforeSelection.of(groups).no_signal_fraction == 0.5


def _ids_by_minibatch(share: Share) -> list[list[int]]:
    return [[share.sequence_ids[row] for rows in minibatch for row in rows] for minibatch in share.rows]


def test_groups_that_do_not_divide_into_minibatches_are_refused():
    groups = make_groups([[5], [4]], [[1.0], [0.0]], seed=1)
    with pytest.raises(ValueError, match=r"2 groups do not divide into 3 .*learner.minibatches"):
        share_out(groups, num_minibatches=3, dp_size=1, token_budget=20)


@pytest.mark.parametrize("forks", [False, True])
def test_turns_are_averaged_each_by_itself_whatever_is_rejected_or_forked(forks):
    """A first sequence of two turns, whose long one loses its middle token, and a second of one turn."""
    mask_T = torch.tensor([False, True, True, True, False, True, True])
    packed = random_batch([6, 1], seed=1, mask_T=mask_T)
    packed = replace(packed, sequence_ids_S=torch.arange(2))
    batch = StepBatch(
        packed=packed, rows=[[[0, 1]]], rewards_S=torch.zeros(2), group_ids_S=torch.zeros(2, dtype=torch.int64),
        episode_ids_S=torch.zeros(2, dtype=torch.int64) if forks else None,
    )  # fmt: skip
    correction = correct(packed, CorrectionConfig())
    keep_T = mask_T & (torch.arange(7) != 2)
    found = batch.with_loss_weights(
        replace(correction, keep_T=keep_T), AggregationConfig(type="turn_mean"), "kept", alone
    ).packed.aggregation_T
    torch.testing.assert_close(found, torch.tensor([0, 1 / 6, 0, 1 / 6, 0, 1 / 3, 1 / 3]))


@pytest.mark.parametrize(("denominator", "share"), [("kept", 1 / 3), ("all", 1 / 4)])
def test_rejected_tokens_have_no_weight_and_count_where_the_denominator_is_all(denominator, share):
    mask_T, keep_T = (
        torch.tensor([False, True, True, True, True]),
        torch.tensor([False, True, False, True, True]),
    )
    packed = replace(random_batch([5], seed=1, mask_T=mask_T), sequence_ids_S=torch.arange(1))
    batch = StepBatch(packed=packed, rows=[[[0]]], rewards_S=torch.zeros(1), group_ids_S=torch.zeros(1))
    correction = replace(correct(packed, CorrectionConfig()), keep_T=keep_T)
    found = batch.with_loss_weights(correction, AggregationConfig(), denominator, alone).packed.aggregation_T
    torch.testing.assert_close(found, share * keep_T)


def test_what_a_critic_is_averaged_by_is_counted_only_where_there_is_one():
    """Each count is a collective of the whole step."""
    (share,) = share_out(
        make_groups([[5, 7], [4, 6]], [[0.0, 1.0]] * 2, seed=1), num_minibatches=2, dp_size=1, token_budget=20
    )
    counted = []

    def total(values: Tensor) -> Tensor:
        counted.append(values)
        return values

    batch = step_batch(share)
    for values_T, num_counts in ((None, 2), (torch.zeros(batch.packed.num_tokens), 4)):
        counted.clear()
        with_values = batch.with_fields(values_T=values_T)
        found = with_values.with_loss_weights(
            correct(batch.packed, CorrectionConfig()), AggregationConfig(), "kept", total
        ).packed
        assert (found.value_aggregation_T is None) == (values_T is None)
        assert len(counted) == num_counts
    mask_T = found.response_mask_T
    nothing = replace(correct(batch.packed, CorrectionConfig()), keep_T=torch.zeros_like(mask_T))
    rejected = with_values.with_loss_weights(nothing, AggregationConfig(), "kept", total).packed
    assert not rejected.aggregation_T.any()
    assert torch.equal(rejected.value_aggregation_T, found.value_aggregation_T) and mask_T.any()


def test_metrics_of_samples_by_hand():
    """The first sample forked, the second is not scored and had no turn, the third is plain."""
    (group,) = make_groups([[5, 7, 4, 6]], [[1.0, 1.0, 0.0, 0.25]], seed=2)
    group = forked(group, [False, True, False, False])
    first, fork, unscored, plain = group.trajectories
    unscored = replace(unscored, reward=None, turns=[], response_mask=np.zeros(4, dtype=bool))
    parts = {"reward_parts": {"a": 1.0}}
    plain = replace(
        plain, turns=[*plain.turns[:-1], replace(plain.turns[-1], finish_reason=FinishReason.LENGTH)]
    )
    found = sample_metrics(
        [replace(group, trajectories=[replace(first, **parts), replace(fork, **parts), unscored, plain])]
    )
    forked_length, plain_length = (
        sum(int(t.response_mask.sum()) for t in sequences) for sequences in ((first, fork), (plain,))
    )
    assert (found["reward/mean"], found["reward/std"]) == (0.625, 0.375)
    assert found["reward/part/a"] == 1.0 and found["groups/no_signal_fraction"] == 0.0
    assert found["response/length_mean"] == pytest.approx((forked_length + plain_length) / 2)
    assert found["response/tokens"] == forked_length + plain_length
    assert found["response/length_max"] == max(forked_length, plain_length)
    assert found["episode/not_scored_fraction"] == pytest.approx(1 / 3)
    assert found["response/truncated_fraction"] == pytest.approx(1 / 2)
    one_scored = sample_metrics([replace(group, trajectories=[first, unscored])])
    assert one_scored["groups/no_signal_fraction"] == 1.0
    assert (one_scored["episode/not_scored_fraction"], one_scored["episode/lone_fraction"]) == (0.5, 0.5)
    assert found["episode/lone_fraction"] == 0, "two siblings are scored"
    assert sample_metrics([replace(group, trajectories=[first])])["episode/lone_fraction"] == 0, (
        "none is left out"
    )
    nothing = sample_metrics([replace(group, trajectories=[unscored])])
    assert not {"reward/mean", "response/length_mean"} & nothing.keys() and nothing["response/tokens"] == 0
    assert nothing["groups/no_signal_fraction"] == 1.0


def test_rewards_under_the_learners_policy_count_an_episode_once(ranks):
    """On any number of ranks as by hand: w of an episode is the product over all its sequences."""
    groups = make_groups(LENGTHS, REWARDS, seed=4)
    groups = [forked(group, [False, number % 2 == 0, True]) for number, group in enumerate(groups)]
    rewards, log_ratios = {}, defaultdict(float)
    for group in groups:
        for t in group.trajectories:
            for place in np.flatnonzero(t.response_mask):
                before, token = t.token_ids[place - 1], t.token_ids[place]
                own = float(OLD.double().log_softmax(-1)[before, token])
                log_ratios[t.group_id, t.sibling_id] += own - t.rollout_logprobs[place]
            rewards[t.group_id, t.sibling_id] = t.reward
    weights = {key: math.exp(log_ratio) for key, log_ratio in log_ratios.items()}
    wanted = sum(weights[key] * rewards[key] for key in weights) / sum(weights.values())
    for num_ranks in (1, 2, 3):
        shares = share_out(groups, num_minibatches=2, dp_size=num_ranks, token_budget=20)
        for found in ranks.call(reward_metrics_on_rank, shares):
            assert found["reward/as_sampled"] == pytest.approx(
                sum(rewards[key] for key in weights) / len(weights)
            )
            assert found["reward/importance_weighted"] == pytest.approx(wanted, rel=1e-5)


def test_an_episode_whose_first_sequence_has_no_tokens_counts_by_those_of_its_fork():
    """Likelihood ratios 2 of the episode with reward 1, and 1 of the other, each from a single token."""
    mask_T = torch.tensor([False, False, True, False, False, True])
    packed = replace(random_batch([2, 2, 2], seed=1, mask_T=mask_T), sequence_ids_S=torch.arange(3))
    log_ratio_T = torch.tensor([5.0, 5.0, math.log(2), 5.0, 5.0, 0.0])
    batch = StepBatch(
        packed=packed.with_fields(old_logprobs_T=packed.rollout_logprobs_T + log_ratio_T), rows=[[[0, 1, 2]]],
        rewards_S=torch.tensor([1.0, 1.0, 0.0]), group_ids_S=torch.zeros(3, dtype=torch.int64),
        episode_ids_S=torch.tensor([0, 0, 1]),
    )  # fmt: skip
    found = values(step_rewards(batch, batch.packed.old_logprobs_T, alone))
    assert found["reward/as_sampled"] == 0.5
    assert found["reward/importance_weighted"] == pytest.approx(2 / 3, rel=1e-6)


def reward_metrics_on_rank(share: Share, group: dist.ProcessGroup) -> dict[str, float]:
    batch = step_batch(share)
    old = [scores(OLD, m.tokens_T, m.targets_T)[0] for m in batch.microbatches()]
    batch = batch.with_fields(old_logprobs_T=batch.scattered(old))
    own = step_rewards(batch, batch.packed.old_logprobs_T, total_over(group))
    return values(merge_over_ranks(own, group))


@pytest.mark.parametrize("measure", ["abs_prob_max", "logprob_gap_max"])
def test_the_farthest_token_is_found_on_any_rank_with_its_place_and_both_values(ranks, measure):
    """One sampled log-prob of a likely token is off, and more so one of an unlikely token; prompts hold anything."""
    groups = make_groups(LENGTHS, REWARDS, seed=4)
    groups = [replace(group, trajectories=[own_policy(t) for t in group.trajectories]) for group in groups]
    sampled = [
        (t.rollout_logprobs[place], t, place)
        for group in groups
        for t in group.trajectories
        for place in np.flatnonzero(t.response_mask)
    ]
    chosen = {"abs_prob_max": max, "logprob_gap_max": min}
    for choose, off in ((max, 0.25), (min, 4.0)):
        _, changed, place = choose(sampled, key=lambda token: token[0])
        changed.rollout_logprobs[place] -= off
    _, wanted, place = chosen[measure](sampled, key=lambda token: token[0])
    token = np.count_nonzero(wanted.response_mask[:place])
    siblings = groups[wanted.group_id].trajectories
    assert [t.sibling_id for t in siblings] == [*range(len(siblings))] and wanted in siblings
    if before := wanted.sibling_id:  # one without a score counts as a sibling
        siblings[before - 1] = replace(siblings[before - 1], reward=None)
    for num_ranks in (1, 2, 3):
        shares = share_out(groups, num_minibatches=2, dp_size=num_ranks, token_budget=20)
        for found in ranks.call(farthest_on_rank, shares, measure):
            assert (
                f"group {wanted.group_id}, sibling {wanted.sibling_id}, response token {token} (from 0)"
                in found
            )
            assert found.endswith(f"{wanted.rollout_logprobs[place]:.9g} by the server")


def test_the_farthest_token_is_of_the_newest_version_and_any_nan_is_farther():
    """By hand: a group of one sequence, and one of two episodes, the first of which forked. A token of a prompt differs most,
    and then one that an older version sampled; neither counts."""
    mask_T = torch.arange(9) > 0
    packed = random_batch([3, 2, 2, 2], seed=1, mask_T=mask_T)
    lag_T = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int16)
    batch = StepBatch(
        packed=replace(packed, sequence_ids_S=torch.arange(4), lag_T=lag_T), rows=[[[0, 1, 2, 3]]],
        rewards_S=torch.zeros(4), group_ids_S=torch.tensor([5, 7, 7, 7]), group_sizes=(1, 3),
        episode_ids_S=torch.tensor([0, 1, 1, 2]),
    )  # fmt: skip
    learner_T = packed.rollout_logprobs_T - torch.tensor([9.0, 2.0, 0.5, 0.4, 0.0, 0.0, 0.0, 0.0, 0.1])
    found = farthest_token(batch, learner_T, None, "logprob_gap_max")
    assert found.startswith("group 5, sibling 0, response token 1 (from 0)")
    learner_T[3] -= 0.2
    found = farthest_token(batch, learner_T, None, "logprob_gap_max")
    assert found.startswith("group 7, sibling 0, response token 0 (from 0)")
    learner_T[8] = torch.nan
    distance, found = _farthest_here(batch, learner_T, "logprob_gap_max")
    assert found.startswith("group 7, sibling 1, response token 1 (from 0): log-prob nan by the learner")
    assert distance == math.inf, "of several ranks the greatest is taken, and nothing is greater than NaN"
    none_here = batch.with_fields(lag_T=lag_T.clamp(min=1))
    assert _farthest_here(none_here, learner_T, "logprob_gap_max") < (0.0, ""), (
        "any token of another rank is farther"
    )
    near_one_T = torch.full((9,), -1e-9)
    likely = batch.with_fields(rollout_logprobs_T=near_one_T)
    farther_T = near_one_T.index_fill(0, torch.tensor([8]), -4e-9)  # both are probabilities of 1 in float32
    assert farthest_token(likely, farther_T, None, "abs_prob_max").startswith(
        "group 7, sibling 1, response token 1"
    )


def own_policy(trajectory: Trajectory) -> Trajectory:
    """As ``OLD`` would have sampled it, with any numbers on the prompt."""
    logprobs = OLD.double().log_softmax(-1).numpy()
    ids = np.asarray(trajectory.token_ids)
    values = np.full(len(ids), -1.0)
    values[1:] = logprobs[ids[:-1], ids[1:]]
    sampled = np.where(trajectory.response_mask, values, -50.0).astype(np.float32)
    return replace(trajectory, rollout_logprobs=sampled)


def farthest_on_rank(share: Share, measure: Measure, group: dist.ProcessGroup) -> str:
    batch = step_batch(share)
    old = [scores(OLD, m.tokens_T, m.targets_T)[0] for m in batch.microbatches()]
    return farthest_token(batch, batch.scattered(old), group, measure)


def test_parts_of_the_reward_are_means_over_the_samples_that_have_them():
    """The first sample's reward failed, and a reward may give a part now and then."""
    (group,) = make_groups([[5, 5, 5, 5]], [[0.0, 1.0, 1.0, 0.0]], seed=1)
    parts = ({}, {"valid": 1.0}, {"valid": 0.5, "bonus": 3.0}, {"valid": 0.0})
    group = replace(
        group,
        trajectories=[replace(t, reward_parts=p) for t, p in zip(group.trajectories, parts, strict=True)],
    )
    found = {
        name: value for name, value in sample_metrics([group]).items() if name.startswith("reward/part/")
    }
    assert found == {"reward/part/valid": 0.5, "reward/part/bonus": 3.0}
