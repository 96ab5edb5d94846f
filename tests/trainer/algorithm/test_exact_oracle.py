"""Correction and objectives where every sequence can be enumerated: expected losses and gradients as exact
sums.

Legend: S sequences (all there are), T packed tokens, F prefixes, V vocabulary. mu is the rollout's policy, pi
the learner's. References are plain loops over prefixes or sequences, straight from the formulas; the other
side is the trainer's own functions.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from configs.presets import PRESETS
from configs.schema.correction import CorrectionConfig, ImportanceWeight, NoWeight, RatioRule
from configs.schema.objective import (
    AggregationConfig,
    ClippedObjective,
    EntropyConfig,
    KLConfig,
    PolicyGradientObjective,
)
from tests.reference.enumerated_policy import (
    Enumeration,
    corrected_loss,
    enumerate_responses,
    moments_of_kept_mean,
    moments_of_mean,
)
from trainer.algorithm.correction import correct, level_ratio
from trainer.algorithm.policy_loss import policy_loss
from trainer.algorithm.segments import sum_per_sequence, valid_tokens
from trainer.batch.step_batch import StepBatch
from trainer.ranks.totals import alone

POLICY_GRADIENT = PolicyGradientObjective(type="policy_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A space of sequences, two policies and a reward."""

    space: Enumeration
    learner_FV: Tensor
    rollout_FV: Tensor
    rewards_S: Tensor

    def expected(self, config: CorrectionConfig, **changed) -> tuple[Tensor, Tensor]:
        """Loss and its gradient to the current policy's table, in expectation over the rollout's samples; old
        = current = the learner's."""
        tables = {"current": self.learner_FV, "old": self.learner_FV} | changed
        current_FV = tables["current"].clone().requires_grad_()
        loss, correction = corrected_loss(
            self.space,
            config,
            current_T=self.space.logprobs_T(current_FV),
            old_T=self.space.logprobs_T(tables["old"]),
            rollout_T=self.space.logprobs_T(self.rollout_FV),
            advantages_S=self.rewards_S,
            weights_S=self.space.probs_S(self.rollout_FV),
            objective=tables.get("objective"),
        )
        assert not correction.weights_T.requires_grad
        (gradient_FV,) = torch.autograd.grad(loss, current_FV)
        return loss.detach(), gradient_FV

    def true_gradient(self) -> Tensor:
        """d / d pi of E_pi[R]."""
        logits_FV = self.learner_FV.clone().requires_grad_()
        (gradient_FV,) = torch.autograd.grad(self.space.probs_S(logits_FV) @ self.rewards_S, logits_FV)
        return gradient_FV


def world(vocab: int, length: int, *, end: int | None, seed: int, mismatch: float = 0.7) -> World:
    space = enumerate_responses(vocab, length, end=end)
    generator = torch.Generator().manual_seed(seed)
    learner_FV = space.random_table(generator)
    rollout_FV = learner_FV + mismatch * space.random_table(generator)
    rewards_S = torch.randn(len(space.responses), generator=generator, dtype=torch.float64) + 0.3
    return World(space=space, learner_FV=learner_FV, rollout_FV=rollout_FV, rewards_S=rewards_S)


WORLDS = [
    pytest.param(world(3, 4, end=None, seed=0), id="3_tokens_length_4"),
    pytest.param(world(4, 3, end=None, seed=1), id="4_tokens_length_3"),
    pytest.param(world(3, 4, end=2, seed=2), id="3_tokens_up_to_4_with_end"),
    pytest.param(world(4, 3, end=0, seed=3), id="4_tokens_up_to_3_with_end"),
]
WEIGHTED = {
    "decoupled_clipped": lambda weight: CorrectionConfig(weight=weight),
    "bypass_policy_gradient": lambda weight: CorrectionConfig(
        mode="bypass", loss="policy_gradient", weight=weight
    ),
}
UNBOUNDED_SEQUENCE = ImportanceWeight(level="sequence", bound="none")
UNBOUNDED_TOKEN = ImportanceWeight(level="token", bound="none")


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def walk(here: World, visits_FV: Tensor, continues_FV: Tensor) -> Tensor:
    """sum over prefixes f of P_visits(f) sum over tokens a of pi(a|f) Q_continues(f, a) (onehot(a) -
    pi(.|f)), by plain recursion.

    Token-level weights change the law of one token to pi and leave mu's of what came before and what follows;
    with pi for all three it is the policy gradient theorem.
    """
    pi, visits, continues = (x_FV.softmax(-1).tolist() for x_FV in (here.learner_FV, visits_FV, continues_FV))
    rows = {prefix: row for row, prefix in enumerate(here.space.prefixes)}
    rewards = dict(zip(here.space.responses, here.rewards_S.tolist(), strict=True))
    gradient = [[0.0] * here.space.vocab for _ in rows]

    def value(response: tuple[int, ...]) -> float:
        if response in rewards:
            return rewards[response]
        return sum(continues[rows[response]][a] * value((*response, a)) for a in range(here.space.vocab))

    def visit(prefix: tuple[int, ...], probability: float) -> None:
        row = rows[prefix]
        for a in range(here.space.vocab):
            share = probability * pi[row][a] * value((*prefix, a))
            for v in range(here.space.vocab):
                gradient[row][v] += share * ((v == a) - pi[row][v])
            if (*prefix, a) in rows:
                visit((*prefix, a), probability * visits[row][a])

    visit((), 1.0)
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("here", WORLDS)
def test_enumeration_is_complete_and_its_gradients_are_autograds(here):
    space, (probs_S, mu_S) = here.space, (here.space.probs_S(x) for x in (here.learner_FV, here.rollout_FV))
    assert len(set(space.responses)) == len(space.responses)
    assert probs_S.sum().item() == pytest.approx(1, abs=1e-12) and mu_S.sum().item() == pytest.approx(
        1, abs=1e-12
    )
    assert relative(walk(here, here.learner_FV, here.learner_FV), here.true_gradient()) < 1e-10
    slopes_T = torch.randn(
        space.batch.num_tokens, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    logits_FV = here.learner_FV.clone().requires_grad_()
    logprobs_T = torch.where(space.batch.response_mask_T, space.logprobs_T(logits_FV), 0.0)
    terms_S = sum_per_sequence(slopes_T * logprobs_T, space.batch.cu_seqlens)
    each = [torch.autograd.grad(term, logits_FV, retain_graph=True)[0] for term in terms_S]
    torch.testing.assert_close(
        space.gradient_FV(slopes_T, here.learner_FV), torch.stack(each).sum(0), rtol=1e-10, atol=1e-12
    )
    squares = torch.stack([g.square().sum() for g in each])
    torch.testing.assert_close(
        space.squared_norms_S(slopes_T, here.learner_FV), squares, rtol=1e-10, atol=1e-12
    )


# Importance weights.


@pytest.mark.parametrize("form", WEIGHTED)
@pytest.mark.parametrize("here", WORLDS)
def test_unbounded_sequence_weights_give_the_on_policy_gradient(here, form):
    _, gradient = here.expected(WEIGHTED[form](UNBOUNDED_SEQUENCE))
    assert relative(-gradient, here.true_gradient()) < 1e-10
    _, uncorrected = here.expected(WEIGHTED[form](NoWeight()))
    assert relative(-uncorrected, here.true_gradient()) > 0.1, (
        "the policies differ enough for the weights to matter"
    )


@pytest.mark.parametrize("here", WORLDS)
def test_without_stop_gradient_another_objective_is_climbed(here):
    """d [w log pi] = w (1 + log pi(y)) d log pi(y): the ratio's own gradient adds a term that the policy
    gradient does not have."""
    space, mu_S = here.space, here.space.probs_S(here.rollout_FV)
    logits_FV = here.learner_FV.clone().requires_grad_()
    valid = valid_tokens(space.batch.response_mask_T, space.batch.cu_seqlens)
    current_N, rollout_N = (valid.pick(space.logprobs_T(x)) for x in (logits_FV, here.rollout_FV))
    live_N = level_ratio(current_N - rollout_N, valid, "sequence")
    terms_S = sum_per_sequence(live_N * current_N, valid.bounds_S) * here.rewards_S
    (found,) = torch.autograd.grad(mu_S @ terms_S, logits_FV)

    probs_S = space.probs_S(here.learner_FV)
    slopes_S = probs_S * here.rewards_S * (1 + probs_S.log())
    expected = space.gradient_FV(space.to_tokens(slopes_S), here.learner_FV)
    assert relative(found, expected) < 1e-10
    assert relative(found, here.true_gradient()) > 0.5


@pytest.mark.parametrize("form", WEIGHTED)
@pytest.mark.parametrize("here", WORLDS)
def test_token_weights_are_biased_by_what_the_enumeration_says(here, form):
    """They leave the rollout's law on what comes before a token and on what follows it."""
    _, gradient = here.expected(WEIGHTED[form](UNBOUNDED_TOKEN))
    assert relative(-gradient, walk(here, here.rollout_FV, here.rollout_FV)) < 1e-10
    assert relative(-gradient, here.true_gradient()) > 0.05


def test_token_weights_are_exact_where_a_response_is_one_token():
    here = world(4, 1, end=None, seed=4)
    _, gradient = here.expected(WEIGHTED["decoupled_clipped"](UNBOUNDED_TOKEN))
    assert relative(-gradient, here.true_gradient()) < 1e-10


@pytest.mark.parametrize("form", WEIGHTED)
@pytest.mark.parametrize("here", WORLDS)
def test_bias_of_truncation_falls_as_the_bound_grows_and_ends(here, form):
    true = here.true_gradient()
    probs_S, mu_S = here.space.probs_S(here.learner_FV), here.space.probs_S(here.rollout_FV)
    largest = (probs_S / mu_S).max().item()
    shares = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9)
    biases = []
    for share in shares:
        _, gradient = here.expected(WEIGHTED[form](ImportanceWeight(level="sequence", upper=share * largest)))
        biases.append(relative(-gradient, true))
        # What truncation leaves out, straight from the formula: the excess of pi over C mu.
        excess_S = (probs_S - share * largest * mu_S).clamp(min=0) * here.rewards_S
        missing = here.space.gradient_FV(here.space.to_tokens(excess_S), here.learner_FV)
        assert relative(true + gradient, missing) < 1e-10
    assert all(more < less for less, more in itertools.pairwise(biases)), biases
    assert biases[-1] > 1e-4
    _, gradient = here.expected(WEIGHTED[form](ImportanceWeight(level="sequence", upper=1.001 * largest)))
    assert relative(-gradient, true) < 1e-10


# PPO against the rollout policy.


def ppo_by_hand(
    here: World, current_FV: Tensor, *, clip: float, dual_clip: float
) -> tuple[float, Tensor, Counter]:
    """E_mu of the sum over tokens of PPO's clipped loss with old := mu, and its gradient: loops over
    sequences and tokens."""
    current, rollout = (x.softmax(-1).tolist() for x in (current_FV, here.rollout_FV))
    rows = {prefix: row for row, prefix in enumerate(here.space.prefixes)}
    loss, gradient, branches = 0.0, torch.zeros_like(current_FV), Counter()
    for response, advantage in zip(here.space.responses, here.rewards_S.tolist(), strict=True):
        places = [(rows[response[:i]], token) for i, token in enumerate(response)]
        probability = math.prod(rollout[row][token] for row, token in places)
        for row, token in places:
            ratio = current[row][token] / rollout[row][token]
            held = min(max(ratio, 1 - clip), 1 + clip)
            value, slope, branch = -ratio * advantage, -ratio * advantage, "open"
            if -held * advantage > value:
                value, slope, branch = -held * advantage, 0.0, "clipped"
            if advantage < 0 and value > -dual_clip * advantage:
                value, slope, branch = -dual_clip * advantage, 0.0, "dual_clipped"
            loss += probability * value
            branches[branch] += 1
            for v in range(here.space.vocab):
                gradient[row, v] += probability * slope * ((v == token) - current[row][v])
    return loss, gradient, branches


@pytest.mark.parametrize("here", WORLDS)
def test_bypass_clipped_is_ppo_against_the_rollout(here):
    objective = ClippedObjective(clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    current_FV = here.learner_FV + 0.3 * here.space.random_table(torch.Generator().manual_seed(5))
    loss, gradient, branches = ppo_by_hand(here, current_FV, clip=0.2, dual_clip=2.0)
    assert min(branches[b] for b in ("open", "clipped", "dual_clipped")) > 0, branches
    same = {"current": current_FV, "objective": objective}
    found = {
        "bypass": here.expected(CorrectionConfig(mode="bypass"), **same),
        "decoupled, old = mu": here.expected(
            CorrectionConfig(weight=NoWeight()), **same, old=here.rollout_FV
        ),
    }
    for name, (found_loss, found_gradient) in found.items():
        assert found_loss.item() == pytest.approx(loss, rel=1e-10), name
        assert relative(found_gradient, gradient) < 1e-10, name
    _, decoupled = here.expected(CorrectionConfig(weight=NoWeight()), **same)
    assert relative(decoupled, gradient) > 0.05, "old = learner is another loss"


# Rejection.


def dyadic_world() -> tuple[World, list[int]]:
    """The rollout picks each token with probability 1/2, 1/4, 1/4, so 64 samples hold every sequence exactly
    as often as expected."""
    here = world(3, 3, end=None, seed=6)
    rollout_FV = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().expand_as(here.learner_FV)
    rows = [row for row, response in enumerate(here.space.responses) for _ in range(2 ** response.count(0))]
    assert len(rows) == 64
    return replace(here, rollout_FV=rollout_FV), rows


def batch_gradient(here: World, rows: list[int], config: CorrectionConfig, aggregation: str) -> Tensor:
    """The gradient of one step with these samples, as the loop makes it: correct, loss weights from global
    counts, micro-batches."""
    table_FV = here.learner_FV.clone().requires_grad_()
    learner_T, rollout_T = (here.space.logprobs_T(x) for x in (here.learner_FV, here.rollout_FV))
    advantages_T = here.space.to_tokens(here.rewards_S)
    whole = here.space.batch.with_fields(
        rollout_logprobs_T=rollout_T, old_logprobs_T=learner_T, advantages_T=advantages_T
    )
    packed = whole.select(rows)
    chunks = [list(range(len(rows)))[part::3] for part in range(min(3, len(rows)))]
    step = StepBatch(
        packed=packed, rows=[chunks], rewards_S=here.rewards_S, group_ids_S=here.space.batch.sequence_ids_S
    )
    step = step.with_loss_weights(
        correct(packed, config), AggregationConfig(type=aggregation), config.denominator, alone
    )
    loss = torch.zeros((), dtype=torch.float64)
    for microbatch, chunk in zip(step.microbatches(), chunks, strict=True):
        current_T = here.space.logprobs_T(table_FV)[here.space.places([rows[i] for i in chunk])]
        part, *_ = policy_loss(
            microbatch,
            current_T,
            torch.zeros_like(current_T),
            objective=ClippedObjective(),
            kl=KLConfig(),
            entropy=EntropyConfig(),
            correction=config,
            aggregation=aggregation,
        )
        loss = loss + part
    (gradient_FV,) = torch.autograd.grad(loss, table_FV)
    return gradient_FV


@dataclass(slots=True, kw_only=True)
class Accepted:
    """Of one sample, in expectation over mu, with zeros for what is rejected."""

    gradient: Tensor
    """sum over accepted tokens of w A d log pi."""
    square: float = 0.0
    """|that|^2."""
    sequences: float = 0.0
    """Probability that any token is accepted."""
    tokens: float = 0.0
    """Number of accepted tokens."""


def accepted_by_hand(here: World, *, level: str, lower: float, upper: float, weighted: bool) -> Accepted:
    """By loops over sequences and tokens; w is the sequence's ratio where weighted, else 1."""
    pi, mu = (x.softmax(-1).tolist() for x in (here.learner_FV, here.rollout_FV))
    rows = {prefix: row for row, prefix in enumerate(here.space.prefixes)}
    found = Accepted(gradient=torch.zeros_like(here.learner_FV))
    for response, reward in zip(here.space.responses, here.rewards_S.tolist(), strict=True):
        places = [(rows[response[:i]], token) for i, token in enumerate(response)]
        ratios = [pi[row][token] / mu[row][token] for row, token in places]
        probability, product = math.prod(mu[row][token] for row, token in places), math.prod(ratios)
        judged = {
            "token": ratios,
            "sequence": [product] * len(ratios),
            "geometric": [product ** (1 / len(ratios))] * len(ratios),
        }[level]
        accepted = [place for place, ratio in zip(places, judged, strict=True) if lower <= ratio <= upper]
        gradient = torch.zeros_like(found.gradient)
        for row, token in accepted:
            for v in range(here.space.vocab):
                gradient[row, v] += (product if weighted else 1.0) * reward * ((v == token) - pi[row][v])
        found.gradient += probability * gradient
        found.square += probability * gradient.square().sum().item()
        found.sequences += probability * bool(accepted)
        found.tokens += probability * len(accepted)
    return found


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_sum", "token_mean"])
@pytest.mark.parametrize("weight", [NoWeight(), UNBOUNDED_SEQUENCE], ids=["unweighted", "sequence_weights"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_denominators_of_rejection(level, weight, aggregation):
    """kept: the expectation given acceptance. all: rejected samples count as zeros."""
    here, rows = dyadic_world()
    accepted = accepted_by_hand(here, level=level, lower=0.5, upper=1.6, weighted=weight != NoWeight())
    assert 0.1 < accepted.sequences <= 1 and accepted.tokens < 0.9 * 3
    rule = RatioRule(level=level, lower=0.5, upper=1.6)
    found = {
        denominator: batch_gradient(
            here, rows, CorrectionConfig(weight=weight, reject=(rule,), denominator=denominator), aggregation
        )
        for denominator in ("kept", "all")
    }
    share, whole = (
        (accepted.sequences, 1.0) if aggregation == "sequence_mean_token_sum" else (accepted.tokens, 3.0)
    )
    # Loss weights are float32: 1 / count is rounded once, and so are importance weights.
    assert relative(-found["kept"], accepted.gradient / share) < 1e-6
    assert relative(-found["all"], accepted.gradient / whole) < 1e-6
    assert relative(found["kept"], found["all"]) > 0.05


def test_rejecting_everything_gives_zeros():
    here, rows = dyadic_world()
    config = CorrectionConfig(weight=NoWeight(), reject=(RatioRule(level="token", lower=1e6, upper=2e6),))
    assert torch.equal(
        batch_gradient(here, rows, config, "sequence_mean_token_sum"), torch.zeros_like(here.learner_FV)
    )


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize(("level", "lower", "upper"), [("token", 0.98, 3.0), ("sequence", 0.58, 3.0)])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_moments_of_a_batch_are_those_of_every_batch_there_is(num_samples, level, lower, upper, denominator):
    """The closed forms that the benchmark uses against all batches of N sequences, each through the trainer's
    own functions."""
    here = world(2, 2, end=None, seed=8)
    config = CorrectionConfig(
        weight=NoWeight(), reject=(RatioRule(level=level, lower=lower, upper=upper),), denominator=denominator
    )
    mu_S = here.space.probs_S(here.rollout_FV).tolist()
    mean, square = torch.zeros_like(here.learner_FV), 0.0
    for rows in itertools.product(range(len(mu_S)), repeat=num_samples):
        probability = math.prod(mu_S[row] for row in rows)
        gradient = batch_gradient(here, list(rows), config, "sequence_mean_token_sum")
        mean += probability * gradient
        square += probability * gradient.square().sum().item()
    variance = square - mean.square().sum().item()

    one = accepted_by_hand(here, level=level, lower=lower, upper=upper, weighted=False)
    assert 0.1 < one.sequences < 0.95
    if denominator == "kept":
        expected, expected_variance = moments_of_kept_mean(
            one.gradient, one.square, one.sequences, num_samples
        )
    else:
        expected, expected_variance = moments_of_mean(one.gradient, one.square, num_samples)
    assert relative(-mean, expected) < 1e-6
    assert variance == pytest.approx(expected_variance, rel=1e-5)


# No mismatch.


@pytest.mark.parametrize("here", WORLDS)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_change_nothing_where_the_policies_are_equal(name, here):
    config = PRESETS[name]
    equal = replace(here, rollout_FV=here.learner_FV)
    objective = POLICY_GRADIENT if config.loss == "policy_gradient" else ClippedObjective()
    loss, gradient = equal.expected(config)
    plain_loss, plain_gradient = equal.expected(CorrectionConfig(weight=NoWeight()), objective=objective)
    assert torch.equal(loss, plain_loss) and torch.equal(gradient, plain_gradient)
    assert relative(-gradient, equal.true_gradient()) < 1e-10
