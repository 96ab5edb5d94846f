"""Wrong input at the entrances of the mathematics: shapes, dtypes, values that are no log-probs. Errors name
the field and its sequence.

Legend: S sequences, T packed tokens.
"""

import logging

import pytest
import torch

from configs.schema.correction import CorrectionConfig, FunctionWeight
from configs.schema.objective import ClippedObjective, EntropyConfig, GrpoAdvantage, KLConfig
from parallel.packing import PackedBatch, pack_sequences
from tests.support.packed_batches import random_batch
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct, correct_current
from trainer.algorithm.inputs import MAX_LOGPROB
from trainer.algorithm.kl_reward import kl_to_reference
from trainer.algorithm.mismatch import mismatch_metrics, weight_metrics
from trainer.algorithm.policy_loss import policy_loss
from trainer.algorithm.value_loss import value_loss

PER_TOKEN = [name for name in PackedBatch.__slots__ if name.endswith("_T")]
WHOLE_FIELDS = {
    "lag_T": torch.zeros(5, dtype=torch.int16),
    "experts_TLK": torch.zeros(5, 2, 2, dtype=torch.uint8),
    "is_replayed_T": torch.zeros(5, dtype=torch.bool),
    "num_kept_T": torch.zeros(5, dtype=torch.int32),
    "kept_ids_M": torch.zeros(0, dtype=torch.int32),
}
FLOAT_FIELDS = [
    name
    for name in PER_TOKEN
    if name not in ("tokens_T", "targets_T", "positions_T", "response_mask_T", *WHOLE_FIELDS)
]
WEIGHTED = CorrectionConfig()
TERMS = {
    "objective": ClippedObjective(),
    "kl": KLConfig(coefficient=0.1),
    "entropy": EntropyConfig(),
    "correction": WEIGHTED,
    "aggregation": "token_mean",
}
BYPASS = CorrectionConfig(mode="bypass")
OWN_WEIGHT = FunctionWeight(
    level="function", function="tests.support.own_functions:truncate", settings={"upper": 2.0}
)


def batch_of(**fields) -> PackedBatch:
    """Sequences 100 and 101 of two and three response tokens, with every field set."""
    batch = random_batch([2, 3], seed=0, mask_T=torch.ones(5, dtype=torch.bool))
    ones = dict.fromkeys(
        ("importance_weights_T", "aggregation_T", "values_T", "returns_T", "value_aggregation_T"),
        torch.full((5,), 0.2),
    )
    return batch.with_fields(**ones | WHOLE_FIELDS | fields)


def loss_of(batch: PackedBatch, current_T: torch.Tensor | None = None, **terms) -> torch.Tensor:
    current_T = torch.full((5,), -3.0) if current_T is None else current_T
    return policy_loss(batch, current_T, torch.zeros(5), **TERMS | terms)[0]


# -----------------------------------------------------------------------------------------------------------
# shapes and dtypes


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("shape", [(4,), (6,), (1,), (5, 1), (1, 5), ()])
def test_a_batch_has_one_value_per_token(name, shape):
    if name == "tokens_T":
        return  # its length is the batch's
    wrong = torch.zeros(shape, dtype=getattr(batch_of(), name).dtype)
    with pytest.raises(ValueError) as raised:
        batch_of(**{name: wrong})
    assert str(raised.value) == f"{name} has shape {shape}, the batch 5 tokens; pass one value per token"


@pytest.mark.parametrize("name", FLOAT_FIELDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_a_batch_refuses_what_was_rounded_already(name, dtype):
    with pytest.raises(
        ValueError, match=rf"{name} is {str(dtype)[6:]}, not float32 or float64; compute it in float32"
    ):
        batch_of(**{name: getattr(batch_of(), name).to(dtype)})
    assert getattr(batch_of(**{name: getattr(batch_of(), name).double()}), name).dtype == torch.float64


@pytest.mark.parametrize(("name", "wanted"), [
    ("response_mask_T", torch.bool), ("is_replayed_T", torch.bool), ("tokens_T", torch.int64), ("targets_T", torch.int64),
    ("positions_T", torch.int64), ("lag_T", torch.int16), ("num_kept_T", torch.int32),
])  # fmt: skip
def test_flags_and_whole_numbers_have_one_type(name, wanted):
    for dtype in {torch.float32, torch.int64, torch.int32, torch.int16, torch.bool} - {wanted}:
        with pytest.raises(ValueError, match=rf"{name} is \w+, not (\w+); convert it to \1$"):
            batch_of(**{name: torch.zeros(5, dtype=dtype)})


@pytest.mark.parametrize(("bounds", "told"), [
    ([0, 2, 4], "cu_seqlens goes from 0 to 4, the batch has 5 tokens"),
    ([1, 2, 5], "cu_seqlens goes from 1 to 5"),
    ([0, 6, 5], "it must rise from 0 to the number of tokens"),
    ([0, 5], r"cu_seqlens has shape \(2,\), sequence_ids_S \(2,\); S sequences have S \+ 1 boundaries"),
    ([0, 1, 2, 5], r"cu_seqlens has shape \(4,\)"),
    ([[0, 2, 5]], r"cu_seqlens has shape \(1, 3\)"),
])  # fmt: skip
def test_boundaries_fit_the_tokens(bounds, told):
    with pytest.raises(ValueError, match=told):
        batch_of(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize(("ids", "lengths"), [(3, 2), (2, 3)])
def test_prompts_are_of_each_sequence(ids, lengths):
    told = rf"prompt_ids_S has shape \({ids},\), prompt_lengths_S \({lengths},\); pass one value for each of the 2 sequences"
    with pytest.raises(ValueError, match=told):
        batch_of(prompt_ids_S=torch.zeros(ids).long(), prompt_lengths_S=torch.ones(lengths).long())
    with pytest.raises(ValueError, match="prompt_ids_S and prompt_lengths_S say together what is shared"):
        batch_of(prompt_ids_S=torch.zeros(2).long())


@pytest.mark.parametrize("extra", [-1, 1])
def test_rows_of_another_length_are_not_packed(extra):
    """Too long in one sequence and too short in the next, the whole would fit."""
    rows = {
        "token_ids": [[1, 2, 3], [4, 5, 6]],
        "response_masks": [[False, True, True]] * 2,
        "sequence_ids": [7, 8],
    }
    logprobs = [[0.0] + [-1.0] * (2 + extra), [0.0] + [-1.0] * (2 - extra)]
    told = rf"sequence 7 has 3 token ids, 3 values of response_mask and {3 + extra} rollout_logprobs"
    with pytest.raises(ValueError, match=told):
        pack_sequences(**rows, rollout_logprobs=logprobs)


@pytest.mark.parametrize("length", [4, 6])
def test_current_logprobs_have_the_length_of_the_batch(length):
    for entrance in (
        loss_of,
        lambda batch, x_T: correct_current(batch, x_T, BYPASS),
        lambda b, x_T: value_loss(b, x_T, value_clip=None),
    ):
        with pytest.raises(
            ValueError, match=rf"values?\w*_T|current_logprobs_T has shape \({length},\), the batch 5 tokens"
        ):
            entrance(batch_of(), torch.full((length,), -1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_current_logprobs_of_half_precision_are_refused(dtype):
    """In float16, exp of a log-ratio of 20 is infinite, and 0 times infinity is NaN: in the gradient of
    rejected tokens too."""
    half_T = torch.full((5,), -3.0, dtype=dtype)
    for entrance in (loss_of, lambda batch, x_T: correct_current(batch, x_T, BYPASS)):
        with pytest.raises(
            ValueError, match=rf"current_logprobs_T is {str(dtype)[6:]}, not float32 or float64"
        ):
            entrance(batch_of(), half_T)
    with pytest.raises(ValueError, match=r"entropy_T is b?float16"):
        policy_loss(batch_of(), half_T.float(), half_T, **TERMS)
    with pytest.raises(ValueError, match=r"values_T is b?float16"):
        value_loss(batch_of(), half_T, value_clip=None)


@pytest.mark.parametrize("length", [1, 4, 6])
def test_metrics_of_the_gap_take_one_number_per_valid_token(length):
    bounds_S, whole_N, wrong_N = torch.tensor([0, 2, 5]), torch.full((5,), -1.0), torch.full((length,), -1.0)
    for metrics, name in ((mismatch_metrics, "rollout_logprobs_N"), (weight_metrics, "weights_N")):
        with pytest.raises(
            ValueError, match=rf"{name} has shape \({length},\), the responses 5 valid tokens"
        ):
            metrics(whole_N, wrong_N, bounds_S)


# --------------------------------------------------------------------------------------------------------------------
# values


@pytest.mark.parametrize("name", ["rollout_logprobs_T", "old_logprobs_T", "ref_logprobs_T"])
@pytest.mark.parametrize("config", [WEIGHTED, BYPASS])
def test_what_is_above_0_is_no_logprob(name, config):
    """Probabilities in the place of log-probs: every ratio looks healthy."""
    probabilities_T = torch.tensor([-1.0, -1.0, 0.5, -1.0, 0.9])
    with pytest.raises(ValueError) as raised:
        correct(batch_of(**{name: probabilities_T}), config)
    told = f"{name} is 0.5, above 0, which no log-prob is, on a response token of sequence 101 (2 such tokens, sequences [101]); "
    assert str(raised.value).startswith(told + "pass log-probs, not probabilities or logits; ")
    off_T = torch.tensor([True, True, False, True, False])
    correct(batch_of(**{name: probabilities_T}, response_mask_T=off_T), config)  # off the mask anything goes
    correct(batch_of(**{name: torch.full((5,), MAX_LOGPROB / 2)}), config)  # rounding


@pytest.mark.parametrize(("name", "value"), [
    ("advantages_T", torch.nan), ("advantages_T", torch.inf), ("old_logprobs_T", -torch.inf), ("old_logprobs_T", 0.5),
    ("ref_logprobs_T", torch.nan), ("ref_logprobs_T", -torch.inf), ("ref_logprobs_T", 0.5),
    ("importance_weights_T", torch.nan), ("aggregation_T", torch.inf),
])  # fmt: skip
def test_the_loss_names_the_field_and_the_sequence(name, value):
    broken_T = getattr(batch_of(), name).clone()
    broken_T[3] = value
    with pytest.raises(
        ValueError, match=rf"{name} is {value}.* on a response token of sequence 101 \(1 such"
    ) as raised:
        loss_of(batch_of(**{name: broken_T}))
    assert ("pass log-probs, not probabilities" in str(raised.value)) == (value == 0.5)
    off_T = torch.tensor([True, True, True, False, True])
    assert loss_of(batch_of(**{name: broken_T}, response_mask_T=off_T)).isfinite()


def test_the_loss_in_bypass_mode_names_a_broken_rollout():
    broken_T = torch.tensor([-1.0, 0.5, -1.0, -1.0, -1.0])
    with pytest.raises(ValueError, match=r"rollout_logprobs_T is 0.5, above 0.* sequence 100"):
        loss_of(batch_of(rollout_logprobs_T=broken_T, importance_weights_T=None), correction=BYPASS)


@pytest.mark.parametrize(("value", "said"), [(0.5, "is 0.5, above 0"), (torch.nan, "is nan, not finite")])
@pytest.mark.parametrize("weight", [WEIGHTED.weight, OWN_WEIGHT])
def test_broken_current_logprobs_make_the_loss_nan_and_are_named(value, said, weight, caplog):
    """They are no fault of a weight that is a function of the user's own: other ranks wait for this one's loss."""
    current_T = torch.tensor([-1.0, -1.0, -1.0, -1.0, value])
    batch = batch_of(old_logprobs_T=None, importance_weights_T=None)
    with caplog.at_level(logging.ERROR):
        assert loss_of(batch_of(), current_T).isnan()
        assert loss_of(batch, current_T, correction=CorrectionConfig(weight=weight)).isnan()
    assert f"current_logprobs_T {said}" in caplog.text and "[101]" in caplog.text


@pytest.mark.parametrize("name", ["values_T", "returns_T", "value_aggregation_T"])
def test_the_critics_loss_names_the_field_and_the_sequence(name):
    broken_T = torch.full((5,), 0.2)
    broken_T[1] = torch.nan
    with pytest.raises(ValueError, match=rf"{name} is nan on a response token of sequence 100"):
        value_loss(batch_of(**{name: broken_T}), torch.zeros(5), value_clip=0.2)


@pytest.mark.parametrize("name", ["old_logprobs_T", "ref_logprobs_T"])
def test_kl_in_the_reward_names_the_field(name):
    """k3 is bounded, which would hide an infinity."""
    broken_T = getattr(batch_of(), name).clone()
    broken_T[0] = -torch.inf
    with pytest.raises(ValueError, match=rf"{name} is -inf on a response token of sequence 100"):
        kl_to_reference(batch_of(**{name: broken_T}), "k3")


def test_rewards_of_whole_numbers_would_round_advantages():
    batch = batch_of().with_fields()
    groups_S = torch.zeros(102, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rewards are int64; pass float32"):
        compute_advantages(batch, torch.arange(102), groups_S, GrpoAdvantage())
    with pytest.raises(ValueError, match="sequence 101 of the batch has no reward: 101 rewards"):
        compute_advantages(batch, torch.zeros(101), groups_S[:101], GrpoAdvantage())
