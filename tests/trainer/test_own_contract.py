"""The trial of a user's objective, advantage and weight: what keeps to its contract passes, and each way to break it is
one error that says where, what and how to fix it."""

import pytest

from configs.schema.own_function import OwnFunction
from trainer.algorithm.own_parts import ADVANTAGE, OBJECTIVE, WEIGHT
from trainer.own_contract import check_contract

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def tried(part, name: str, **settings) -> None:
    check_contract(part, OwnFunction(function=f"tests.support.own_functions:{name}", settings=settings))


@pytest.mark.parametrize(
    ("part", "name", "settings"),
    [
        (OBJECTIVE, "clipped", {**CLIP, "dual_clip": 3.0}),
        (OBJECTIVE, "clipped", {**CLIP, "dual_clip": None}),
        (OBJECTIVE, "gspo", CLIP),
        (ADVANTAGE, "grpo", {"normalize_by_std": True}),
        (ADVANTAGE, "opo", {}),
        (WEIGHT, "truncate", {"upper": 2.0}),
        (WEIGHT, "mask", {"lower": 0.5, "upper": 2.0}),  # a weight may be 0
        (WEIGHT, "segments", {}),
    ],
)
def test_what_equals_a_built_in_keeps_to_the_contract(part, name, settings):
    tried(part, name, **settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whitens", "loss_T of the same place is .* with each sequence alone, but a token's loss must not depend on what else"),
        ("sums_over_the_batch_in_its_gradient", "the gradient of loss_T of the same place is .* must not depend on what else"),
        ("detaches", "loss_T has no gradient to current_logprobs_T, .*; compute it from current_logprobs_T without"),
        ("sums", r"loss_T must be a tensor like current_logprobs_T, float32 \[20\], not float32 \[\]; return one value for each"),
        ("changes", r"it changed advantages_T in place, .*; work on a new tensor"),
        ("overflows", r"where log\(pi_current / pi_old\) is 100, loss_T must be finite, but is -inf at place 1; bound log-ratios"),
        ("divides_by_a_count", "on sequences without response tokens, loss_T must be finite, but is nan .*; .* divide by no count"),
        ("learns", r"loss_T has a gradient to something other than current_logprobs_T, of shape \[\], .*; detach it"),
        ("draws", "two calls with the same input gave different losses, .*; leave out random numbers"),
        ("widens", r"not float64 \[20\]; make tensors by current_logprobs_T.new_tensor\(...\), or end with"),
        ("returns_a_number", r"loss_T must be a tensor like current_logprobs_T, float32 \[20\], not float 1.0; return one value"),
        ("names_a_metric_badly", "'a/b' cannot name a metric; use letters"),
        ("numbers_a_metric", "1 cannot name a metric; use letters"),
        ("lists_its_metrics", "the second value must be a dict of tensors to record, not <class 'list'>"),
        ("returns_three", r"loss_T must be a tensor like current_logprobs_T, float32 \[20\], not <class 'tuple'>"),
        ("sums_a_metric", r"metric sum must be a tensor like current_logprobs_T, float32 \[20\], not float32 \[\]"),
        ("leaves", r"on a made batch, it raised SystemExit: 3 \(own_functions.py:\d+ in leaves\); correct it"),
        ("ignores", "the gradient of loss_T to current_logprobs_T is 0 on every token"),
        ("clipped", r"raised TypeError: .*missing 3 required keyword-only arguments"),
        ("gspo", r"must take \(current_logprobs_T, old_logprobs_T, advantages_T\) and its settings \(none\), .*: missing a required"),
        ("truncate", "must take .*: too many positional arguments"),
    ],
)  # fmt: skip
def test_a_broken_objective_is_refused(name, message):
    where = rf"objective function 'tests.support.own_functions:{name}' \(own_functions.py:\d+ in {name}\): "
    with pytest.raises(ValueError, match=rf"^{where}.*{message}"):
        tried(OBJECTIVE, name)


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        (ADVANTAGE, "by_place", "advantages_S of the same place is .* but samples come in any order; go by group_ids_S"),
        (ADVANTAGE, "by_number", "other numbers for the same groups; group_ids_S only say which samples belong together"),
        (ADVANTAGE, "by_count", r"it raised RuntimeError: bincount .*; group ids are any whole numbers; number them from 0 by "),
        (ADVANTAGE, "by_std", "on made groups, advantages_S must be finite, but is nan .*; groups may have one member, or equal"),
        (ADVANTAGE, "with_gradient", "advantages_S has a gradient, and must have none; end with .detach"),
        (WEIGHT, "negative", r"weights_N must be finite and at least 0, but is -0.\d+ where log rho is -0.\d+; bound log_ratio_N"),
        (WEIGHT, "unbounded", "weights_N must be finite and at least 0, but is inf where log rho is 100; bound log_ratio_N"),
        (WEIGHT, "normalised", "weights_N of the same place is .* but a weight must not depend on what else is in its batch"),
    ],
)  # fmt: skip
def test_a_broken_advantage_or_weight_is_refused(part, name, message):
    with pytest.raises(ValueError, match=rf"^{part.name} function .*{message}"):
        tried(part, name)


def test_settings_cannot_replace_what_is_given():
    with pytest.raises(ValueError, match="settings hold mask_T, which Tandem itself passes; rename it"):
        tried(OBJECTIVE, "gspo", **CLIP, mask_T=1)
