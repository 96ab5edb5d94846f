"""The loss of micro-batches: golden losses and gradients, a hand calculation, and invariance to how the batch
is split.

Legend: S sequences, T packed tokens, D parameters of the small model.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import (
    ClippedObjective,
    DppoObjective,
    EntropyConfig,
    KLConfig,
    ObjectiveConfig,
    PolicyGradientObjective,
)
from tests.reference import correction as slow_correction
from tests.reference import objectives as slow
from tests.reference.objectives import Token
from tests.support.golden_cases import load
from tests.support.packed_batches import count_valid, random_batch
from trainer.algorithm.aggregation import Mode, aggregation_weights
from trainer.algorithm.policy_loss import policy_loss
from trainer.batch.plan import plan_batches
from trainer.ranks.metrics import merge_metrics, values

MODES = Mode.__args__
NAMES = ("clipped", "gspo", "gmpo", "cispo", "sapo", "dppo", "policy_gradient")
NO_KL, NO_ENTROPY = KLConfig(), EntropyConfig()
KNOWN: dict = {"correction": CorrectionConfig(), "aggregation": "token_mean"}
"""Of batches whose weights are known: neither is looked at."""


def objective_of(name, **parameters):
    return TypeAdapter(ObjectiveConfig).validate_python({"type": name, **parameters})


def with_weights(batch, mode, weights_T=1.0, keep_T=None):
    """Importance weights and, over kept tokens, aggregation weights."""
    keep_T = batch.response_mask_T if keep_T is None else keep_T & batch.response_mask_T
    constant = 11 if mode == "sequence_mean_token_sum_over_constant" else None
    counts = count_valid(keep_T, batch.cu_seqlens)
    aggregation_T = aggregation_weights(keep_T, batch.cu_seqlens, mode=mode, constant=constant, counts=counts)
    return batch.with_fields(
        aggregation_T=aggregation_T, importance_weights_T=weights_T * batch.response_mask_T
    )


GOLDEN_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_over_constant",
}
# Their papers average by sequence and then token, and so do the answers, whatever aggregation was asked for.
FIXED_MODE = dict.fromkeys(("gspo", "gmpo", "sapo"), "sequence_mean_token_mean")


def golden_objective(params):
    """The answers' dual_clip_c is the bound of DPPO's weight, and is ignored by what has neither."""
    low, high, name = params["clip_low"], params["clip_high"], params["loss"]
    if name == "ppo_dual_clip":
        return ClippedObjective(clip_low=low, clip_high=high, dual_clip=params["dual_clip_c"])
    if name == "dppo_tv":
        return DppoObjective(
            type="dppo", max_decrease=low, max_increase=high, ratio_max=params["dual_clip_c"]
        )
    return objective_of(name, **({} if name == "sapo" else {"clip_low": low, "clip_high": high}))


def golden_loss_and_gradient(case, mode, old_T, weights_T, objective):
    constant = case.width if mode == "sequence_mean_token_sum_over_constant" else None
    counts = count_valid(case.mask_T, case.cu_seqlens)
    aggregation_T = aggregation_weights(
        case.mask_T, case.cu_seqlens, mode=mode, constant=constant, counts=counts
    )
    # Reciprocals of whole numbers, rounded to float32; the answers are float64, and some losses are small
    # differences.
    aggregation_T = torch.where(case.mask_T, 1 / (1 / aggregation_T.double()).round(), 0.0)
    batch = random_batch(torch.diff(case.cu_seqlens).tolist(), seed=0).with_fields(
        response_mask_T=case.mask_T, old_logprobs_T=old_T, advantages_T=case.input_T("advantages"),
        aggregation_T=aggregation_T, importance_weights_T=weights_T, ref_logprobs_T=None,
    )  # fmt: skip
    current_T = case.input_T("logp").requires_grad_()
    loss, metrics, _ = policy_loss(
        batch,
        current_T,
        torch.zeros_like(current_T),
        objective=objective,
        kl=NO_KL,
        entropy=NO_ENTROPY,
        **KNOWN,
    )
    (gradient,) = torch.autograd.grad(loss, current_T)
    return loss, gradient, metrics


def assert_golden(case, loss, gradient):
    expected = case.output_T("grad_logp")
    assert loss.item() == pytest.approx(case.arrays["out_loss"].item(), rel=1e-6, abs=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    assert torch.equal(gradient[~case.mask_T], torch.zeros_like(gradient[~case.mask_T]))


@pytest.mark.parametrize("case", load("policy_loss"), ids=lambda c: c.name)
def test_golden_loss_and_gradient(case):
    name = case.params["loss"]
    weights_T = case.input_T("weights") if "weights" in case.arrays else torch.ones_like(case.input_T("logp"))
    mode = FIXED_MODE.get(name, GOLDEN_MODES[case.params["aggregation"]])
    loss, gradient, metrics = golden_loss_and_gradient(
        case, mode, case.input_T("old_logp"), weights_T, golden_objective(case.params)
    )
    assert_golden(case, loss, gradient)
    assert metrics["policy/ppo_kl"].value == pytest.approx(case.scalars["ppo_kl"], rel=1e-6)
    # Of gmpo, the answers count what is outside the bounds on either side; ours what is clipped. sapo clips
    # nothing.
    if name not in ("gmpo", "sapo"):
        assert metrics["policy/clip_fraction"].value == pytest.approx(case.scalars["pg_clipfrac"], rel=1e-6)
    if name == "ppo_dual_clip":
        assert metrics["policy/dual_clip_fraction"].value == pytest.approx(
            case.scalars["pg_clipfrac_lower"], rel=1e-6
        )


@pytest.mark.parametrize("case", load("policy_gradient"), ids=lambda c: c.name)
def test_golden_policy_gradient_with_weights_of_current_over_rollout(case):
    rows = [
        ((current - rollout).nan_to_num(0.0).tolist(), mask.tolist())
        for current, rollout, mask in zip(
            *(
                x.split(case.cu_seqlens.diff().tolist())
                for x in (case.input_T("logp"), case.input_T("rollout_logp"), case.mask_T)
            ),
            strict=True,
        )
    ]
    weights = slow_correction.weights(
        rows,
        level=case.params["is_level"],
        bound="truncate",
        lower=None,
        upper=case.params["is_upper"],
        normalise=False,
    )
    weights_T = torch.tensor([w for row in weights for w in row], dtype=torch.float64)
    mode, objective = (
        GOLDEN_MODES[case.params["aggregation"]],
        PolicyGradientObjective(type="policy_gradient"),
    )
    loss, gradient, _ = golden_loss_and_gradient(
        case, mode, case.input_T("rollout_logp"), weights_T, objective
    )
    assert_golden(case, loss, gradient)


def test_all_three_terms_by_hand():
    batch = random_batch([2, 1], seed=0, mask_T=torch.tensor([True, False, True])).with_fields(
        old_logprobs_T=torch.tensor([0.5, 0.5, 0.5]).log(),
        ref_logprobs_T=torch.tensor([0.25, 0.5, 0.5]).log(),
        advantages_T=torch.tensor([1.0, 1.0, -2.0]),
        aggregation_T=torch.tensor([0.5, 0.0, 0.5]),
        importance_weights_T=torch.tensor([2.0, 0.0, 0.5]),
    )
    current_T, entropy_T = torch.tensor([0.55, 0.1, 0.45]).log(), torch.tensor([0.6, 9.0, 0.2])
    terms = {"objective": ClippedObjective(), "entropy": EntropyConfig(coefficient=0.01), **KNOWN}
    loss, metrics, _ = policy_loss(
        batch, current_T, entropy_T, kl=KLConfig(coefficient=0.1, estimator="k1"), **terms
    )
    policy, kl, entropy = -1.1 * 1.0 + 1.8 * 0.25, 0.1 * 0.5 * math.log(2.2 * 0.9), -0.01 * 0.5 * 0.8
    expected = {
        "loss/policy": policy, "loss/kl": kl, "loss/entropy": entropy, "loss/total": policy + kl + entropy,
        "policy/entropy": 0.4, "policy/ppo_kl": -math.log(1.1 * 0.9) / 2, "policy/clip_fraction": 0.0, "policy/dual_clip_fraction": 0.0,
        "policy/ratio_mean": 1.0, "policy/ratio_min": 0.9, "policy/ratio_max": 1.1, "policy/ref_kl": math.log(2.2 * 0.9) / 2,
    }  # fmt: skip
    assert values(metrics) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert loss.item() == values(metrics)["loss/total"]

    loss, metrics, _ = policy_loss(
        batch, current_T, entropy_T, kl=KLConfig(coefficient=0.1, place="reward"), **terms
    )
    without = {"loss/kl": 0.0, "loss/total": policy + entropy}
    assert values(metrics) == pytest.approx(expected | without, rel=1e-5, abs=1e-7)
    assert loss.item() == values(metrics)["loss/total"]
    terms |= {"kl": KLConfig(coefficient=0.1, place="reward"), "entropy": NO_ENTROPY}
    _, metrics, _ = policy_loss(batch, current_T, entropy_T, **terms)
    without |= {"loss/entropy": 0.0, "loss/total": policy}
    assert values(metrics) == pytest.approx(expected | without, rel=1e-5, abs=1e-7)


def terms_of(name="clipped"):
    parameters = {"clip_low": 0.2, "clip_high": 0.28} if name in ("clipped", "function") else {}
    if name == "function":
        parameters = {"function": "tests.support.own_functions:gspo", "settings": parameters}
    return {
        "objective": objective_of(name, **parameters),
        "kl": KLConfig(coefficient=0.3, estimator="k3"),
        "entropy": EntropyConfig(coefficient=0.05),
        **KNOWN,
    }


FIELDS = ("old_logprobs_T", "ref_logprobs_T", "advantages_T", "importance_weights_T", "aggregation_T")


def loss_and_gradients(batch, current_T, entropy_T, name, **terms):
    current_T, entropy_T = current_T.clone().requires_grad_(), entropy_T.clone().requires_grad_()
    loss, metrics, _ = policy_loss(batch, current_T, entropy_T, **(terms_of(name) | terms))
    return (
        loss.detach(),
        *torch.autograd.grad(loss, (current_T, entropy_T), materialize_grads=True, allow_unused=True),
        metrics,
    )


advantages = st.floats(-3, 3).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
logprobs = st.floats(-12, 0)
tokens = st.builds(Token, logprobs, logprobs, advantages, st.floats(0.1, 3), st.booleans())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    rejected=st.booleans(),
)
def test_matches_the_loop_over_sequences(name, rows, mode, rejected):
    """What does not count is off the mask, or rejected by the correction: the loss is the same."""
    mode = "sequence_mean_token_mean" if name == "gmpo" else mode
    flat = [token for row in rows for token in row]
    current_T, old_T, advantages_T, weights_T, counts_T = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*flat, strict=True)
    )
    counts_T = counts_T.bool()
    batch = random_batch(
        [len(row) for row in rows], seed=0, mask_T=torch.ones_like(counts_T) if rejected else counts_T
    )
    batch = batch.with_fields(old_logprobs_T=old_T, advantages_T=advantages_T)
    batch = with_weights(batch, mode, weights_T, keep_T=counts_T)
    loss, gradient, _, _ = loss_and_gradients(
        batch, current_T, torch.zeros_like(current_T), name, kl=NO_KL, entropy=NO_ENTROPY
    )
    parameters = terms_of(name)["objective"].model_dump(exclude={"type"})
    expected, slopes = slow.policy_term(rows, name, mode=mode, constant=11, **parameters)
    slopes = torch.tensor([slope for row in slopes for slope in row], dtype=torch.float64)
    scale = slopes.abs().max().item()
    # Aggregation weights are float32.
    torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-6 * scale)
    parts = sum(abs(slow.policy_term([row], name, mode=mode, constant=11, **parameters)[0]) for row in rows)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6 * parts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("unbiased", [False, True])
def test_off_mask_garbage_changes_neither_loss_nor_gradient(name, garbage, unbiased):
    kl = KLConfig(coefficient=0.3, estimator="k3", unbiased=unbiased)
    batch = with_weights(random_batch([6, 9, 4], seed=3), "token_mean")
    off_T = ~batch.response_mask_T
    generator = torch.Generator().manual_seed(1)
    current_T, entropy_T = -torch.rand(19, generator=generator), torch.rand(19, generator=generator)
    dirty = batch.with_fields(
        **{field: getattr(batch, field).masked_fill(off_T, garbage) for field in FIELDS}
    )
    *clean, clean_metrics = loss_and_gradients(batch, current_T, entropy_T, name, kl=kl)
    *found, metrics = loss_and_gradients(
        dirty, current_T.masked_fill(off_T, garbage), entropy_T.masked_fill(off_T, garbage), name, kl=kl
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))
    assert metrics == clean_metrics


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[3, 2], []])
def test_nothing_valid_gives_exact_zeros_that_are_still_connected(name, lengths):
    total = sum(lengths)
    batch = with_weights(
        random_batch(lengths, seed=0, mask_T=torch.zeros(total, dtype=torch.bool)), "token_mean"
    )
    current_T, entropy_T = (
        torch.full((total,), torch.nan, requires_grad=True),
        torch.full((total,), torch.nan, requires_grad=True),
    )
    loss, metrics, _ = policy_loss(batch, current_T, entropy_T, **terms_of(name))
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, (current_T, entropy_T)):
        assert torch.equal(gradient, torch.zeros(total))
    assert metrics["policy/ppo_kl"].value is None and metrics["loss/total"].value == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_everything_rejected_gives_exact_zeros_that_are_still_connected(name):
    batch = random_batch([4, 3], seed=1, mask_T=torch.ones(7, dtype=torch.bool))
    batch = with_weights(batch, "sequence_mean_token_mean", keep_T=torch.zeros(7, dtype=torch.bool))
    loss, *gradients, metrics = loss_and_gradients(batch, batch.old_logprobs_T + 0.5, torch.rand(7), name)
    assert loss.item() == 0.0
    assert all(torch.equal(gradient, torch.zeros(7)) for gradient in gradients)
    assert metrics["policy/ppo_kl"].value == pytest.approx(-0.5)
    assert {m.value for key, m in metrics.items() if "ratio" in key or "clip" in key} <= {None}


@pytest.mark.parametrize("name", [*NAMES, "function"])
def test_rejected_tokens_leave_every_term(name):
    """Whatever they hold, and whether or not they are on the mask; metrics of the policy itself still count
    them. A function of the user's own gets the mask without them, and its metrics are of the rest."""
    keep_T = torch.tensor([True, False, True, True, False, True, True])
    batch = random_batch([4, 3], seed=2, mask_T=torch.ones(7, dtype=torch.bool))
    rejected = with_weights(batch, "sequence_mean_token_mean", keep_T=keep_T)
    off_mask = with_weights(batch.with_fields(response_mask_T=keep_T), "sequence_mean_token_mean")
    current_T, entropy_T = batch.old_logprobs_T + torch.linspace(-0.5, 0.6, 7), torch.linspace(0, 1, 7)
    expected = loss_and_gradients(off_mask, current_T, entropy_T, name)
    found = loss_and_gradients(rejected, current_T, entropy_T, name)
    moved = loss_and_gradients(rejected, torch.where(keep_T, current_T, current_T - 3.0), entropy_T, name)
    for others in (found, moved):
        assert all(torch.equal(a, b) for a, b in zip(expected[:3], others[:3], strict=True))
    assert found[3]["policy/entropy"].value == pytest.approx(0.5)
    for key in ("ratio_mean", "ratio_min", "ratio_max", "clip_fraction"):
        assert (
            found[3].get(f"policy/{key}") == expected[3].get(f"policy/{key}") == moved[3].get(f"policy/{key}")
        )
    if name == "function":
        assert found[3]["own/objective/is_kept"].value == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [1, 2])
def test_a_broken_current_logprob_makes_the_loss_nan(name, value, place):
    """Even of a rejected token (place 2): what produced it is broken."""
    batch = random_batch([4], seed=0, mask_T=torch.ones(4, dtype=torch.bool))
    batch = with_weights(batch, "token_mean", keep_T=torch.tensor([True, True, False, True]))
    current_T = torch.full((4,), -1.0)
    current_T[place] = value
    loss, *_ = loss_and_gradients(batch, current_T, torch.zeros(4), name, kl=NO_KL, entropy=NO_ENTROPY)
    assert loss.isnan()


@pytest.mark.parametrize("estimator", ["k1", "k3", "abs_straight_through"])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite(name, estimator):
    batch = random_batch([4, 4], seed=0, mask_T=torch.ones(8, dtype=torch.bool)).with_fields(
        old_logprobs_T=torch.tensor([-1e4, 0, -1e4, 0, -1e4, -1e4, -1e4, -1e4]),
        advantages_T=torch.tensor([1.0, 1, -1, -1, -1, -1, -1, -1]),
    )
    current_T = torch.tensor([0, -1e4, 0, -1e4, 0, 0, 0, 0])
    batch = with_weights(batch, "sequence_mean_token_mean")
    kl = KLConfig(coefficient=0.3, estimator=estimator)
    loss, gradient, _, metrics = loss_and_gradients(batch, current_T, torch.zeros(8), name, kl=kl)
    assert loss.isfinite() and gradient.isfinite().all()
    assert all(math.isfinite(value) for value in values(metrics).values())


@pytest.mark.parametrize("name", NAMES)
def test_only_current_and_entropy_get_a_gradient(name):
    batch = with_weights(random_batch([5, 3], seed=4), "token_mean")
    fields = {field: getattr(batch, field).clone().requires_grad_() for field in FIELDS}
    current_T, entropy_T = (batch.old_logprobs_T + 0.1).requires_grad_(), torch.rand(8).requires_grad_()
    loss, *_ = policy_loss(batch.with_fields(**fields), current_T, entropy_T, **terms_of(name))
    *gradients, of_current, of_entropy = torch.autograd.grad(
        loss, (*fields.values(), current_T, entropy_T), allow_unused=True
    )
    assert gradients == [None] * len(FIELDS)
    assert of_current.any() and of_entropy.any()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gmpo"])
def test_importance_weights_scale_their_token_alone(name):
    """In the policy's term; KL and entropy have none."""
    batch = with_weights(random_batch([6, 5], seed=6), "token_mean")
    weights_T = torch.rand(11, generator=torch.Generator().manual_seed(0)) * 2
    current_T, entropy_T = batch.old_logprobs_T + 0.05, torch.rand(11)
    bare = {"kl": NO_KL, "entropy": NO_ENTROPY}
    _, plain, _, _ = loss_and_gradients(batch, current_T, entropy_T, name, **bare)
    weighted = with_weights(batch, "token_mean", weights_T)
    _, found, _, _ = loss_and_gradients(weighted, current_T, entropy_T, name, **bare)
    torch.testing.assert_close(found, plain * weights_T, rtol=1e-6, atol=1e-9)
    _, whole, entropy_gradient, _ = loss_and_gradients(weighted, current_T, entropy_T, name)
    _, whole_plain, entropy_plain, _ = loss_and_gradients(batch, current_T, entropy_T, name)
    torch.testing.assert_close(whole - found, whole_plain - plain, rtol=1e-4, atol=1e-8)
    assert torch.equal(entropy_gradient, entropy_plain)


def test_a_zero_weight_takes_its_sequence_out_of_gmpo():
    batch = random_batch([3, 2], seed=6, mask_T=torch.ones(5, dtype=torch.bool))
    batch = with_weights(batch, "sequence_mean_token_mean", torch.tensor([1.0, 0.0, 1.0, 2.0, 0.5]))
    bare = {"kl": NO_KL, "entropy": NO_ENTROPY}
    _, gradient, _, _ = loss_and_gradients(
        batch, batch.old_logprobs_T.clone(), torch.zeros(5), "gmpo", **bare
    )
    mean = batch.advantages_T[3:].mean().item()
    assert gradient.tolist() == pytest.approx([0.0] * 3 + [-mean / 4] * 2)


def test_first_update_has_zero_ppo_kl_and_no_clipping():
    batch = with_weights(random_batch([50, 70], seed=5), "token_mean")
    _, metrics, _ = policy_loss(batch, batch.old_logprobs_T.clone(), torch.zeros(120), **terms_of())
    found = {
        key: metrics[f"policy/{key}"].value
        for key in ("ppo_kl", "clip_fraction", "ratio_min", "ratio_mean", "ratio_max")
    }
    assert found == {
        "ppo_kl": 0.0,
        "clip_fraction": 0.0,
        "ratio_min": 1.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
    }


def test_an_objective_that_writes_to_old_leaves_current_alone_where_they_are_equal():
    batch = with_weights(random_batch([5, 7], seed=5), "token_mean").with_fields(old_logprobs_T=None)
    own = {"objective": objective_of("function", function="tests.support.own_functions:writes_to_old")}
    found, wanted = (
        loss_and_gradients(batch, batch.rollout_logprobs_T, torch.zeros(12), "policy_gradient", **terms)
        for terms in (own, {})
    )
    assert all(map(torch.equal, found[:3], wanted[:3]))


def test_errors_name_what_is_missing():
    batch = with_weights(random_batch([3], seed=0), "token_mean")
    current_T = torch.zeros(3)
    with pytest.raises(ValueError, match="lacks advantages_T, importance_weights_T"):
        policy_loss(
            batch.with_fields(advantages_T=None, importance_weights_T=None),
            current_T,
            current_T,
            **terms_of(),
        )
    with pytest.raises(ValueError, match="lacks ref_logprobs_T"):
        policy_loss(batch.with_fields(ref_logprobs_T=None), current_T, current_T, **terms_of())
    with pytest.raises(ValueError, match=r"entropy_T has shape \(2,\)"):
        policy_loss(batch, current_T, torch.zeros(2), **terms_of())


class SmallModel:
    """Log-probs and entropies that depend on the sequence and place alone, through D shared parameters."""

    def __init__(self, batch, seed, num_parameters=6):
        generator = torch.Generator().manual_seed(seed)
        self.parameters_D = (0.3 * torch.randn(num_parameters, generator=generator)).requires_grad_()
        self.features = dict(
            zip(
                batch.sequence_ids_S.tolist(),
                torch.randn(batch.num_tokens, num_parameters, generator=generator).split(batch.lengths),
                strict=True,
            )
        )
        self.base = dict(
            zip(batch.sequence_ids_S.tolist(), batch.old_logprobs_T.split(batch.lengths), strict=True)
        )

    def __call__(self, batch):
        if not batch.lengths:
            return self.parameters_D[:0], self.parameters_D[:0]
        ids = batch.sequence_ids_S.tolist()
        features = torch.cat([self.features[i] for i in ids])
        # A sum per token, not a matmul: its rounding must not depend on how many tokens come along.
        # Bounded: what is returned must stay a log-prob.
        logits_T = 1.5 * torch.tanh((features * self.parameters_D).sum(-1))
        return torch.cat([self.base[i] for i in ids]) + logits_T, logits_T.square()


def loss_and_gradient(model, batch, microbatches, terms):
    """As ranks and micro-batches do it: each its own loss and backward, all added up."""
    total, gradient, metrics = 0.0, torch.zeros_like(model.parameters_D), []
    for rows in microbatches:
        loss, found, _ = policy_loss(batch.select(rows), *model(batch.select(rows)), **terms)
        total, metrics = total + loss.detach(), [*metrics, found]
        gradient = (
            gradient
            + torch.autograd.grad(loss, model.parameters_D, allow_unused=True, materialize_grads=True)[0]
        )
    return total, gradient, merge_metrics(metrics)


def magnitudes(model, batch, terms):
    """Sums over sequences of |loss| and of |gradient|: what float32 rounding is relative to, where parts
    cancel."""
    parts = [loss_and_gradient(model, batch, [[row]], terms) for row in range(len(batch.lengths))]
    return sum(loss.abs().item() for loss, _, _ in parts), sum(gradient.abs() for _, gradient, _ in parts)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(
    mode=st.sampled_from(MODES), lengths=st.lists(st.integers(1, 12), min_size=4, max_size=16), seed=st.integers(0, 9999),
    dp_size=st.integers(1, 4), slack=st.integers(0, 60), data=st.data(),
)  # fmt: skip
def test_loss_and_gradient_do_not_depend_on_ranks_budget_or_order(
    name, mode, lengths, seed, dp_size, slack, data
):
    lengths = lengths[: len(lengths) // dp_size * dp_size]
    batch = random_batch(lengths, seed=seed)
    weights_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) * 2
    keep_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed + 1)) < 0.9
    batch = with_weights(batch, mode, weights_T, keep_T)
    model, terms = SmallModel(batch, seed), terms_of(name)
    expected_loss, expected_gradient, expected_metrics = loss_and_gradient(
        model, batch, [range(len(lengths))], terms
    )

    plan = plan_batches(
        lengths, minibatches=[range(len(lengths))], dp_size=dp_size, token_budget=max(lengths) + slack
    )
    microbatches = [data.draw(st.permutations(m)) for rank in plan.microbatches[0] for m in rank]
    loss, gradient, metrics = loss_and_gradient(model, batch, microbatches, terms)

    loss_scale, gradient_scale_D = magnitudes(model, batch, terms)
    assert abs(loss - expected_loss).item() <= 1e-6 * loss_scale
    # Of the largest entry: in a small one the tokens of a sequence cancel, and their rounding with them does
    # not.
    assert ((gradient - expected_gradient).abs() <= 1e-6 * gradient_scale_D.max()).all()
    assert values(metrics) == pytest.approx(
        values(expected_metrics), rel=1e-6, abs=1e-6 * max(1.0, loss_scale)
    )


@pytest.mark.parametrize("name", NAMES)
def test_per_token_gradients_are_bitwise_the_same_under_any_split(name):
    batch = with_weights(random_batch([7, 3, 5, 9, 2], seed=8), "sequence_mean_token_mean")
    current_T = (batch.old_logprobs_T + 0.2).requires_grad_()
    entropy_T = torch.rand(26, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(
        policy_loss(batch, current_T, entropy_T, **terms_of(name))[0], current_T
    )
    current_by_row, entropy_by_row, gradient = (
        current_T.split(batch.lengths),
        entropy_T.split(batch.lengths),
        torch.zeros(26),
    )
    for rows in ([3, 0], [4], [1, 2]):
        loss, *_ = policy_loss(
            batch.select(rows),
            torch.cat([current_by_row[r] for r in rows]),
            torch.cat([entropy_by_row[r] for r in rows]),
            **terms_of(name),
        )
        gradient += torch.autograd.grad(loss, current_T, retain_graph=True)[0]
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), mode=st.sampled_from(MODES))
def test_without_an_advantage_loss_and_gradient_are_exact_zeros(name, seed, mode):
    """What ``learner.skip_zero_gradients`` rests on, for every objective but the user's own."""
    batch = with_weights(random_batch([5, 1, 7, 3], seed=seed), mode)
    batch = batch.with_fields(advantages_T=torch.zeros(batch.num_tokens))
    current_T = (batch.old_logprobs_T + 0.3 * torch.randn(batch.num_tokens)).clamp(max=0.0).requires_grad_()
    loss, _, _ = policy_loss(
        batch,
        current_T,
        torch.zeros_like(current_T),
        objective=objective_of(name),
        kl=NO_KL,
        entropy=NO_ENTROPY,
        **KNOWN,
    )
    (gradient_T,) = torch.autograd.grad(loss, current_T)
    assert loss.item() == 0.0 and torch.count_nonzero(gradient_T) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reject", [False, True])
def test_kept_tokens_are_counted_only_where_a_rule_may_reject(mode, reject):
    """Without a rule the mean over kept tokens is that over all: no count is read from the device, and the loss has the same
    bits as with a rule that every token passes."""
    batch = with_weights(random_batch([5, 1, 7, 3], seed=0), mode).with_fields(
        importance_weights_T=None, old_logprobs_T=None
    )
    passes_all = [{"rule": "ratio", "level": "token", "lower": 1e-8, "upper": 1e8}] if reject else []
    correction = CorrectionConfig.model_validate({"reject": passes_all})
    terms = {"objective": ClippedObjective(), "kl": NO_KL, "entropy": NO_ENTROPY, "aggregation": mode}
    current_T = batch.rollout_logprobs_T.clone()
    found = policy_loss(batch, current_T, current_T, correction=correction, **terms)
    without = policy_loss(batch, current_T, current_T, correction=CorrectionConfig(), **terms)
    assert (found.counted is None) == (not reject) and without.counted is None
    assert torch.equal(found.loss, without.loss)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_tokens_that_the_loss_itself_rejects_leave_it_as_known_weights_of_zero_do(denominator):
    """Without ``kept_factor``: only the weights of rejected tokens are 0, whatever the denominator."""
    batch = with_weights(random_batch([4, 3], seed=2, mask_T=torch.ones(7, dtype=torch.bool)), "token_mean")
    drift_T = torch.tensor([0.0, 1.0, -0.3, 0.3, -1.0, 0.1, 0.0])
    keep_T, current_T = drift_T.abs() < math.log(2), batch.rollout_logprobs_T + drift_T
    known = batch.with_fields(old_logprobs_T=current_T, aggregation_T=batch.aggregation_T * keep_T)
    here = batch.with_fields(old_logprobs_T=None, importance_weights_T=None)
    rule = {"rule": "ratio", "level": "token", "lower": 0.5, "upper": 2.0}
    fields = {"weight": {"level": "none"}, "reject": [rule], "denominator": denominator}
    correction = CorrectionConfig.model_validate(fields)
    found, wanted = (
        loss_and_gradients(b, current_T, torch.ones(7), "clipped", correction=correction)
        for b in (here, known)
    )
    assert all(map(torch.equal, found[:3], wanted[:3]))


def test_off_policy_sequences_by_hand():
    """Drifts log rollout - log current, on the mask: 1/2 and 0 (mean 1/4), 1/8, 3/8 where A > 0, and 8 where A = 0."""
    mask_T = torch.tensor([True, True, False, True, True, True])
    batch = random_batch([3, 1, 1, 1], seed=0, mask_T=mask_T).with_fields(
        rollout_logprobs_T=torch.tensor([-1.0, -1.0, 9.0, -1.0, -1.0, -1.0]),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=torch.tensor([-1.0, -1.0, -1.0, -2.0, 3.0, 0.0]),
        importance_weights_T=torch.ones(6),
        aggregation_T=mask_T / 4,
    )
    current_T = torch.tensor([-1.5, -1.0, -9.0, -1.125, -1.375, -9.0], requires_grad=True)
    terms = {"objective": ClippedObjective(), "kl": NO_KL, "entropy": NO_ENTROPY, "aggregation": "token_mean"}
    for threshold, gradient, fraction in (
        (0.24, [0.0, 0.0, 0.0, 0.5, -0.75, 0.0], 0.4),
        (0.25, [0.25, 0.25, 0.0, 0.5, -0.75, 0.0], 0.0),
        (0.1, [0.0, 0.0, 0.0, 0.0, -0.75, 0.0], 0.6),
    ):
        correction = CorrectionConfig(off_policy_mask=threshold)
        loss, metrics, _ = policy_loss(batch, current_T, torch.zeros(6), correction=correction, **terms)
        (found,) = torch.autograd.grad(loss, current_T)
        torch.testing.assert_close(found, torch.tensor(gradient))
        assert metrics["policy/off_policy_fraction"].value == fraction
        assert loss.item() == pytest.approx(sum(gradient)), "each ratio is 1: a token's loss is its gradient"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999), threshold=st.floats(0.01, 0.5), mode=st.sampled_from(MODES), rejects=st.booleans()
)  # fmt: skip
def test_what_is_off_policy_and_went_wrong_leaves_the_policy_term_alone(name, seed, threshold, mode, rejects):
    """Gradients of all other tokens keep their bits, and so do the terms of KL and entropy."""
    batch = random_batch([6, 1, 4, 8], seed=seed)
    keep_T = torch.rand(19, generator=torch.Generator().manual_seed(seed)) < (0.8 if rejects else 1.1)
    of_sequence_S = torch.randn(4, generator=torch.Generator().manual_seed(seed + 1))
    batch = batch.with_fields(advantages_T=of_sequence_S.repeat_interleave(torch.tensor(batch.lengths)))
    batch = with_weights(batch, mode, keep_T=keep_T)
    current_T = (
        batch.rollout_logprobs_T
        - 0.2
        + 0.2 * torch.randn(19, generator=torch.Generator().manual_seed(seed + 2))
    )
    whole, masked = (
        loss_and_gradients(batch, current_T, torch.ones(19), name, correction=CorrectionConfig(off_policy_mask=bound))
        for bound in (1e9, threshold)
    )  # fmt: skip
    without = loss_and_gradients(batch, current_T, torch.ones(19), name)
    assert all(map(torch.equal, whole[:3], without[:3])), "a bound that nothing meets changes nothing"
    _, plain, _, _ = loss_and_gradients(
        batch.with_fields(advantages_T=torch.zeros(19)), current_T, torch.ones(19), name
    )
    counts_T = keep_T & batch.response_mask_T
    is_masked_T, start = torch.zeros(19, dtype=torch.bool), 0
    for length, advantage in zip(batch.lengths, of_sequence_S.tolist(), strict=True):
        places = [t for t in range(start, start + length) if counts_T[t]]
        drifts = [(batch.rollout_logprobs_T[t] - current_T[t]).item() for t in places]
        is_masked_T[places] = bool(places) and advantage < 0 and math.fsum(drifts) / len(drifts) > threshold
        start += length
    assert torch.equal(masked[1], torch.where(is_masked_T, plain, whole[1]))
    assert torch.equal(masked[2], whole[2])
    share = masked[3]["policy/off_policy_fraction"]
    assert share.value == pytest.approx(is_masked_T.sum().item() / max(counts_T.sum().item(), 1))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("mode", ["decoupled", "bypass", "bypass, with a weight"])
def test_an_unbiased_kl_has_value_and_gradient_of_the_kl_for_samples_of_the_rollout(estimator, mode):
    """One token of a vocabulary of six, all of them listed with the rollout's probabilities as weights of the mean. In decoupled
    mode rollout, old and current differ; in bypass mode old is the rollout, and a weight is current / rollout."""
    generator = torch.Generator().manual_seed(3)
    current_V, old_V, rollout_V, ref_V = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    rollout_V, ref_V, old_V = (x_V.log_softmax(0) for x_V in (rollout_V, ref_V, old_V))
    correction, weights_V = CorrectionConfig(), (old_V - rollout_V).exp()
    if mode != "decoupled":
        unbounded = {"level": "token", "bound": "none"} if "weight" in mode else {"level": "none"}
        fields = {"mode": "bypass", "loss": "policy_gradient", "weight": unbounded}
        old_V, weights_V, correction = rollout_V, None, CorrectionConfig.model_validate(fields)
    batch = random_batch([1] * 6, seed=0, dtype=torch.float64, mask_T=torch.ones(6, dtype=torch.bool)).with_fields(
        rollout_logprobs_T=rollout_V, old_logprobs_T=old_V, ref_logprobs_T=ref_V, advantages_T=torch.zeros(6, dtype=torch.float64),
        importance_weights_T=weights_V, aggregation_T=rollout_V.exp(),
    )  # fmt: skip

    def value_and_gradient(**kl):
        logits_V = current_V.clone().requires_grad_()
        terms = {
            "objective": PolicyGradientObjective(type="policy_gradient"),
            "entropy": NO_ENTROPY,
            "aggregation": "token_mean",
        }
        kl = KLConfig(coefficient=1.0, estimator=estimator, **kl)
        loss, *_ = policy_loss(
            batch, logits_V.log_softmax(0), torch.zeros(6), kl=kl, correction=correction, **terms
        )
        return loss.item(), torch.autograd.grad(loss, logits_V)[0]

    logits_V = current_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    (gradient,) = torch.autograd.grad(exact, logits_V)
    loss, found = value_and_gradient(unbiased=True)
    assert loss == pytest.approx(exact.item(), rel=1e-9)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)
    assert (value_and_gradient()[1] - gradient).abs().max() > 0.01, "a biased one is told apart"


def test_the_ratio_of_an_unbiased_kl_is_bounded():
    """log current - log old = 30, log current - log ref = 1."""
    batch = random_batch([1], seed=0, dtype=torch.float64, mask_T=torch.ones(1, dtype=torch.bool))
    fields = {"old": -31.0, "ref": -2.0}
    batch = with_weights(batch, "token_mean").with_fields(
        **{f"{name}_logprobs_T": torch.tensor([x], dtype=torch.float64) for name, x in fields.items()}
    )
    current_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = KLConfig(coefficient=0.5, estimator="k1", unbiased=True)
    terms = {"objective": ClippedObjective(), "entropy": NO_ENTROPY, **KNOWN}
    _, metrics, _ = policy_loss(batch, current_T, torch.zeros(1, dtype=torch.float64), kl=kl, **terms)
    assert metrics["loss/kl"].value == pytest.approx(0.5 * math.exp(20))
