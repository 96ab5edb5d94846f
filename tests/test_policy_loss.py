"""The loss of micro-batches: golden losses and gradients, a hand calculation, and invariance to how the batch is split.

Legend: S sequences, T packed tokens, D parameters of the small model.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.objective import ClippedObjective, EntropyConfig, KLConfig
from tests.golden_cases import load
from tests.packed_batches import random_batch
from trainer.aggregation import Mode, aggregation_weights, count_valid
from trainer.batching import plan_batches
from trainer.metrics import merge_metrics, values
from trainer.policy_loss import policy_loss

MODES = Mode.__args__
NO_KL, NO_ENTROPY = KLConfig(), EntropyConfig()


def with_weights(batch, mode, weights_T=1.0):
    counts = count_valid(batch.response_mask_T, batch.cu_seqlens)
    constant = 11 if mode == "sequence_mean_token_sum_over_constant" else None
    aggregation_T = aggregation_weights(batch.response_mask_T, batch.cu_seqlens, mode=mode, constant=constant, counts=counts)
    return batch.with_fields(aggregation_T=aggregation_T, loss_weights_T=aggregation_T * weights_T)


GOLDEN_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_over_constant",
}


@pytest.mark.parametrize("case", load("policy_loss"), ids=lambda c: c.name)
def test_golden_loss_and_gradient(case):
    params, mode = case.params, GOLDEN_MODES[case.params["aggregation"]]
    constant = case.width if mode == "sequence_mean_token_sum_over_constant" else None
    counts = count_valid(case.mask_T, case.cu_seqlens)
    aggregation_T = aggregation_weights(case.mask_T, case.cu_seqlens, mode=mode, constant=constant, counts=counts)
    weights_T = case.input_T("weights") if "weights" in case.arrays else torch.ones_like(case.input_T("logp"))
    batch = random_batch(torch.diff(case.cu_seqlens).tolist(), seed=0).with_fields(
        response_mask_T=case.mask_T, old_logprobs_T=case.input_T("old_logp"), advantages_T=case.input_T("advantages"),
        aggregation_T=aggregation_T, loss_weights_T=aggregation_T * weights_T, ref_logprobs_T=None,
    )  # fmt: skip
    current_T = case.input_T("logp").requires_grad_()
    objective = ClippedObjective(clip_low=params["clip_low"], clip_high=params["clip_high"], dual_clip=params["dual_clip_c"])
    loss, metrics = policy_loss(batch, current_T, torch.zeros_like(current_T), objective=objective, kl=NO_KL, entropy=NO_ENTROPY)
    (gradient,) = torch.autograd.grad(loss, current_T)
    expected = case.output_T("grad_logp")
    assert loss.item() == pytest.approx(case.arrays["out_loss"].item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    assert torch.equal(gradient[~case.mask_T], torch.zeros_like(gradient[~case.mask_T]))
    found = {name: metrics[f"policy/{name}"].value for name in ("clip_fraction", "dual_clip_fraction", "ppo_kl")}
    scalars = (case.scalars["pg_clipfrac"], case.scalars["pg_clipfrac_lower"], case.scalars["ppo_kl"])
    assert tuple(found.values()) == pytest.approx(scalars, rel=1e-6)


def test_all_three_terms_by_hand():
    batch = random_batch([2, 1], seed=0, mask_T=torch.tensor([True, False, True])).with_fields(
        old_logprobs_T=torch.tensor([0.5, 0.5, 0.5]).log(),
        ref_logprobs_T=torch.tensor([0.25, 0.5, 0.5]).log(),
        advantages_T=torch.tensor([1.0, 1.0, -2.0]),
        aggregation_T=torch.tensor([0.5, 0.0, 0.5]),
        loss_weights_T=torch.tensor([1.0, 0.0, 0.25]),  # weights 2 and 0.5
    )
    current_T = torch.tensor([0.55, 0.1, 0.5]).log()
    loss, metrics = policy_loss(
        batch, current_T, torch.tensor([0.6, 9.0, 0.2]),
        objective=ClippedObjective(), kl=KLConfig(coefficient=0.1, estimator="k1"), entropy=EntropyConfig(coefficient=0.01),
    )  # fmt: skip
    policy, kl, entropy = -1.1 * 1.0 + 2.0 * 0.25, 0.1 * 0.5 * math.log(2.2), -0.01 * 0.5 * 0.8
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({
        "loss/policy": policy, "loss/kl": kl, "loss/entropy": entropy, "loss/total": policy + kl + entropy,
        "policy/entropy": 0.4, "policy/ppo_kl": -math.log(1.1) / 2, "policy/clip_fraction": 0.0, "policy/dual_clip_fraction": 0.0,
        "policy/ratio_max": 1.1, "policy/ref_kl": math.log(2.2) / 2,
    }, rel=1e-5, abs=1e-7)  # fmt: skip
    assert loss.item() == found["loss/total"]


TERMS = {
    "objective": ClippedObjective(clip_low=0.2, clip_high=0.28),
    "kl": KLConfig(coefficient=0.3, estimator="k3"),
    "entropy": EntropyConfig(coefficient=0.05),
}
FIELDS = ("old_logprobs_T", "ref_logprobs_T", "advantages_T", "loss_weights_T", "aggregation_T")


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_off_mask_garbage_changes_neither_loss_nor_gradient(garbage):
    batch = with_weights(random_batch([6, 9, 4], seed=3), "token_mean")
    off_T = ~batch.response_mask_T
    generator = torch.Generator().manual_seed(1)
    current_T, entropy_T = -torch.rand(19, generator=generator), torch.rand(19, generator=generator)
    dirty = batch.with_fields(**{name: getattr(batch, name).masked_fill(off_T, garbage) for name in FIELDS})

    def run(batch, current_T, entropy_T):
        current_T, entropy_T = current_T.clone().requires_grad_(), entropy_T.clone().requires_grad_()
        loss, metrics = policy_loss(batch, current_T, entropy_T, **TERMS)
        return loss.detach(), *torch.autograd.grad(loss, (current_T, entropy_T)), metrics

    *clean, clean_metrics = run(batch, current_T, entropy_T)
    *found, metrics = run(dirty, current_T.masked_fill(off_T, garbage), entropy_T.masked_fill(off_T, garbage))
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))
    assert metrics == clean_metrics


@pytest.mark.parametrize("lengths", [[3, 2], []])
def test_nothing_valid_gives_exact_zeros_that_are_still_connected(lengths):
    total = sum(lengths)
    batch = with_weights(random_batch(lengths, seed=0, mask_T=torch.zeros(total, dtype=torch.bool)), "token_mean")
    current_T, entropy_T = torch.full((total,), torch.nan, requires_grad=True), torch.full((total,), torch.nan, requires_grad=True)
    loss, metrics = policy_loss(batch, current_T, entropy_T, **TERMS)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, (current_T, entropy_T)):
        assert torch.equal(gradient, torch.zeros(total))
    assert metrics["policy/ppo_kl"].value is None and metrics["loss/total"].value == 0.0


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_broken_current_logprob_makes_the_loss_nan(value):
    batch = with_weights(random_batch([4], seed=0, mask_T=torch.ones(4, dtype=torch.bool)), "token_mean")
    loss, _ = policy_loss(
        batch, torch.tensor([-1.0, value, -1.0, -1.0]), torch.zeros(4), objective=ClippedObjective(), kl=NO_KL, entropy=NO_ENTROPY
    )
    assert loss.isnan()


def test_first_update_has_zero_ppo_kl_and_no_clipping():
    batch = with_weights(random_batch([50, 70], seed=5), "token_mean")
    _, metrics = policy_loss(batch, batch.old_logprobs_T.clone(), torch.zeros(120), **TERMS)
    assert (metrics["policy/ppo_kl"].value, metrics["policy/clip_fraction"].value, metrics["policy/ratio_max"].value) == (0.0, 0.0, 1.0)


def test_errors_name_what_is_missing():
    batch = with_weights(random_batch([3], seed=0), "token_mean")
    current_T = torch.zeros(3)
    with pytest.raises(ValueError, match="lacks advantages_T, loss_weights_T"):
        policy_loss(batch.with_fields(advantages_T=None, loss_weights_T=None), current_T, current_T, **TERMS)
    with pytest.raises(ValueError, match="lacks ref_logprobs_T"):
        policy_loss(batch.with_fields(ref_logprobs_T=None), current_T, current_T, **TERMS)
    with pytest.raises(ValueError, match=r"entropy_T has shape \(2,\)"):
        policy_loss(batch, current_T, torch.zeros(2), **TERMS)


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
        self.base = dict(zip(batch.sequence_ids_S.tolist(), batch.old_logprobs_T.split(batch.lengths), strict=True))

    def __call__(self, batch):
        if not batch.num_sequences:
            return self.parameters_D[:0], self.parameters_D[:0]
        ids = batch.sequence_ids_S.tolist()
        features = torch.cat([self.features[i] for i in ids])
        # A sum per token, not a matmul: its rounding must not depend on how many tokens come along.
        logits_T = (features * self.parameters_D).sum(-1)
        return torch.cat([self.base[i] for i in ids]) + logits_T, logits_T.square()


def loss_and_gradient(model, batch, microbatches):
    """As ranks and micro-batches do it: each its own loss and backward, all added up."""
    total, gradient, metrics = 0.0, torch.zeros_like(model.parameters_D), []
    for rows in microbatches:
        loss, found = policy_loss(batch.select(rows), *model(batch.select(rows)), **TERMS)
        total, metrics = total + loss.detach(), [*metrics, found]
        gradient = gradient + torch.autograd.grad(loss, model.parameters_D, allow_unused=True, materialize_grads=True)[0]
    return total, gradient, merge_metrics(metrics)


def magnitudes(model, batch):
    """Sums over sequences of |loss| and of |gradient|: what float32 rounding is relative to, where parts cancel."""
    parts = [loss_and_gradient(model, batch, [[row]]) for row in range(batch.num_sequences)]
    return sum(loss.abs().item() for loss, _, _ in parts), sum(gradient.abs() for _, gradient, _ in parts)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES), lengths=st.lists(st.integers(1, 12), min_size=4, max_size=16), seed=st.integers(0, 9999),
    dp_size=st.integers(1, 4), slack=st.integers(0, 60), data=st.data(),
)  # fmt: skip
def test_loss_and_gradient_do_not_depend_on_ranks_budget_or_order(mode, lengths, seed, dp_size, slack, data):
    lengths = lengths[: len(lengths) // dp_size * dp_size]
    batch = random_batch(lengths, seed=seed)
    weights_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) * 2
    batch = with_weights(batch, mode, weights_T)
    model = SmallModel(batch, seed)
    expected_loss, expected_gradient, expected_metrics = loss_and_gradient(model, batch, [range(len(lengths))])

    plan = plan_batches(lengths, num_minibatches=1, sequences_per_group=1, dp_size=dp_size, token_budget=max(lengths) + slack)
    microbatches = [data.draw(st.permutations(m)) for rank in plan.microbatches[0] for m in rank]
    loss, gradient, metrics = loss_and_gradient(model, batch, microbatches)

    loss_scale, gradient_scale_D = magnitudes(model, batch)
    assert abs(loss - expected_loss).item() <= 1e-6 * loss_scale
    assert ((gradient - expected_gradient).abs() <= 1e-6 * gradient_scale_D).all()
    assert values(metrics) == pytest.approx(values(expected_metrics), rel=1e-6, abs=1e-6)


def test_per_token_gradients_are_bitwise_the_same_under_any_split():
    batch = with_weights(random_batch([7, 3, 5, 9, 2], seed=8), "sequence_mean_token_mean")
    current_T = (batch.old_logprobs_T + 0.2).requires_grad_()
    entropy_T = torch.rand(26, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(policy_loss(batch, current_T, entropy_T, **TERMS)[0], current_T)
    current_by_row, entropy_by_row, gradient = current_T.split(batch.lengths), entropy_T.split(batch.lengths), torch.zeros(26)
    for rows in ([3, 0], [4], [1, 2]):
        loss, _ = policy_loss(
            batch.select(rows), torch.cat([current_by_row[r] for r in rows]), torch.cat([entropy_by_row[r] for r in rows]), **TERMS
        )
        gradient += torch.autograd.grad(loss, current_T, retain_graph=True)[0]
    assert torch.equal(gradient, expected)
