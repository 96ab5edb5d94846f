"""Correction and loss together against the definitions in 50 digits (``tests/reference/exact_loss.py``):
values and gradients, with tokens that dual clip holds, and with bounds of weights and rejection that are not
each other's reciprocals.

Legend: S sequences, T packed tokens.
"""

import random
from decimal import Decimal
from functools import partial

import pytest
import torch

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import ClippedObjective, EntropyConfig, KLConfig, PolicyGradientObjective
from parallel.packing import PackedBatch
from tests.reference import exact_loss
from tests.reference.exact_loss import Token
from tests.support.packed_batches import count_valid, random_batch
from trainer.algorithm.aggregation import aggregation_weights, kept_factor
from trainer.algorithm.correction import correct, correct_current
from trainer.algorithm.policy_loss import policy_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.7}
LEVELS = ("token", "sequence", "geometric", "segment", "segment_geometric")
BOUNDS = {
    "truncate": {"bound": "truncate", "lower": None, "upper": 1.6},
    "clip": {"bound": "clip", "lower": 0.8, "upper": 1.6},
    "mask": {"bound": "mask", "lower": 0.5, "upper": 1.9},
}
RULES = {
    "ratio": [
        {"kind": "ratio", "level": level, "lower": 0.45, "upper": 3.1} for level in ("token", "geometric")
    ],
    "difference": [
        {"kind": "difference", "level": "token", "lower": -0.03, "upper": 0.06},
        {"kind": "difference", "level": "segment_geometric", "lower": -0.009, "upper": 0.02},
    ],
    "none": [],
}
REDUCTIONS = {"token": "token", "sequence": "sum", "geometric": "mean", "segment_geometric": "segment_mean"}
"""What the levels are called of a rule on differences."""


def drawn(seed: int) -> list[list[Token]]:
    """Sequences with gaps, whose current policy has moved so far that dual clip acts. The numbers are
    float64's, exactly."""
    source = random.Random(seed)
    step = []
    for length in (9, 7, 12, 1, 6):
        advantage, row = source.choice((-1, 1)) * source.uniform(0.3, 2.0), []
        for place in range(length):
            rollout = -2.5 - source.expovariate(1.0)
            old = rollout + source.gauss(0.0, 0.6)
            numbers = (rollout, old, old + source.gauss(0.2, 0.6), advantage + source.uniform(-0.1, 0.1))
            row.append(Token(*map(Decimal, numbers), valid=place == 0 or source.random() < 0.8))
        step.append(row)
    return step


def packed(step: list[list[Token]]) -> tuple[PackedBatch, torch.Tensor]:
    """The batch and the current log-probs."""
    flat = [token for row in step for token in row]
    rollout_T, old_T, current_T, advantages_T = (
        torch.tensor([float(getattr(token, name)) for token in flat], dtype=torch.float64)
        for name in Token._fields[:4]
    )
    mask_T = torch.tensor([token.valid for token in flat])
    batch = random_batch([len(row) for row in step], seed=0, dtype=torch.float64, mask_T=mask_T)
    fields = {
        "rollout_logprobs_T": rollout_T,
        "old_logprobs_T": old_T,
        "advantages_T": advantages_T,
        "ref_logprobs_T": None,
    }
    return batch.with_fields(**fields), current_T


def config_of(weighs: dict | None, rules: list[dict], denominator: str, **mode: str) -> CorrectionConfig:
    ratio = [
        {"rule": "ratio", **{key: r[key] for key in ("level", "lower", "upper")}}
        for r in rules
        if r["kind"] == "ratio"
    ]
    difference = [
        {"rule": "difference", "reduce": REDUCTIONS[r["level"]], "lower": r["lower"], "upper": r["upper"]}
        for r in rules
        if r["kind"] == "difference"
    ]
    weight = {"level": "none"} if weighs is None else weighs
    return CorrectionConfig.model_validate(
        {"weight": weight, "reject": [*ratio, *difference], "denominator": denominator, **mode}
    )


def exactly(block: dict | None) -> dict | None:
    return (
        None
        if block is None
        else {key: Decimal(value) if isinstance(value, float) else value for key, value in block.items()}
    )


def ours(step: list[list[Token]], config: CorrectionConfig, mode: str) -> tuple[float, torch.Tensor, dict]:
    """Loss, gradient [T] and metrics: correction before the update, or inside the loss."""
    batch, current_T = packed(step)
    before = correct(batch, config)
    counted_T = before.keep_T if config.denominator == "kept" else batch.response_mask_T
    aggregation_T = aggregation_weights(
        counted_T, batch.cu_seqlens, mode=mode, constant=None, counts=count_valid(counted_T, batch.cu_seqlens)
    )
    batch = batch.with_fields(
        importance_weights_T=before.weights_T, aggregation_T=aggregation_T * before.keep_T
    )
    objective = (
        PolicyGradientObjective(type="policy_gradient")
        if config.loss == "policy_gradient"
        else ClippedObjective(**CLIPS)
    )
    terms = {
        "objective": objective,
        "kl": KLConfig(),
        "entropy": EntropyConfig(),
        "correction": config,
        "aggregation": mode,
    }
    current_T.requires_grad_()
    loss, metrics, counted = policy_loss(batch, current_T, torch.zeros_like(current_T), **terms)
    (gradient,) = torch.autograd.grad(loss, current_T)
    factor = kept_factor([counted])
    return loss.item() * factor, gradient * factor, metrics


def assert_exact(step, found, weighs, rules, train, objective, **mean) -> tuple[list, list]:
    weights, kept = exact_loss.weights_and_kept(
        step, train, exactly(weighs), [exactly(rule) for rule in rules]
    )
    wanted, slopes = exact_loss.loss_and_gradient(step, weights, kept, objective, **mean)
    loss, gradient, _ = found
    slopes_T = torch.tensor([float(slope) for row in slopes for slope in row], dtype=torch.float64)
    # Aggregation weights are float32.
    torch.testing.assert_close(gradient, slopes_T, rtol=1e-6, atol=1e-7 * slopes_T.abs().max().item())
    assert loss == pytest.approx(float(wanted), rel=1e-6, abs=1e-7)
    return weights, kept


PPO = partial(exact_loss.ppo, **{key: Decimal(value) for key, value in CLIPS.items()})


def num_dual_clipped(step: list[list[Token]], kept: list[list[bool]]) -> int:
    tokens = [
        token for row, flags in zip(step, kept, strict=True) for token, k in zip(row, flags, strict=True) if k
    ]
    return sum(t.advantage < 0 and (t.current - t.old).exp() > Decimal(CLIPS["dual_clip"]) for t in tokens)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("level", LEVELS)
def test_clipped_loss_after_correction(level, bound, rules):
    weighs = {"level": level, **BOUNDS[bound]}
    for seed, (mode, denominator) in enumerate(
        [("token_mean", "kept"), ("token_mean", "all"), ("sequence_mean_token_mean", "kept")]
    ):
        step = drawn(seed)
        found = ours(step, config_of(weighs, RULES[rules], denominator), mode)
        _, kept = assert_exact(
            step, found, weighs, RULES[rules], "old", PPO, mode=mode, denominator=denominator
        )
        held = num_dual_clipped(step, kept)
        assert held, "a case without a dual-clipped token shows nothing of it"
        assert found[2]["policy/dual_clip_fraction"].value == pytest.approx(held / sum(map(sum, kept)))


@pytest.mark.parametrize("rules", RULES)
def test_clipped_loss_in_bypass_mode(rules):
    """Its ratio is current / rollout, and so is that of the rules."""
    held = 0
    for seed, denominator in enumerate(("kept", "all", "kept", "all")):
        step = [[token._replace(old=token.rollout) for token in row] for row in drawn(seed)]
        found = ours(step, config_of(None, RULES[rules], denominator, mode="bypass"), "token_mean")
        _, kept = assert_exact(
            step, found, None, RULES[rules], "current", PPO, mode="token_mean", denominator=denominator
        )
        held += num_dual_clipped(step, kept)
    assert held


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("level", LEVELS)
def test_policy_gradient_with_weights_of_current_over_rollout(level, bound, rules):
    weighs = {"level": level, **BOUNDS[bound]}
    config = config_of(weighs, RULES[rules], "kept", mode="bypass", loss="policy_gradient")
    for seed, mode in enumerate(("token_mean", "sequence_mean_token_mean")):
        step = drawn(seed)
        found = ours(step, config, mode)
        assert_exact(
            step, found, weighs, RULES[rules], "current", exact_loss.reinforce, mode=mode, denominator="kept"
        )


@pytest.mark.parametrize("inside", [False, True])
def test_the_cases_meet_both_bounds_of_weights_and_rules(inside):
    """Else they would not tell a bound from its reciprocal, nor rho from 1 / rho."""
    rules, seen = RULES["ratio"][:1] + RULES["difference"][:1], set()
    mirrored = [{**RULES["ratio"][0], "lower": 1 / 3.1, "upper": 1 / 0.45}]
    for seed in range(3):
        batch, current_T = packed(drawn(seed))
        corrections = [
            config_of({"level": "token", **BOUNDS["clip"]}, those, "kept")
            for those in (rules, rules[:1], mirrored)
        ]
        found, plain, other = (
            correct_current(batch, current_T, c) if inside else correct(batch, c) for c in corrections
        )
        assert not torch.equal(plain.keep_T, other.keep_T)
        weights_N = found.weights_T[batch.response_mask_T]
        seen |= {bound for bound in (0.8, 1.6) if (weights_N == bound).any()}
        seen |= {
            name
            for name, metric in found.metrics.items()
            if name.endswith(("_upper", "_lower")) and metric.value
        }
    sides = {
        f"mismatch/rejected/{name}_token/{side}"
        for name in ("ratio", "difference")
        for side in ("above_upper", "below_lower")
    }
    assert seen == {0.8, 1.6} | sides
