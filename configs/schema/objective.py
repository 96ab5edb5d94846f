"""The loss: objective, advantages, aggregation, KL and entropy. The functions in ``trainer/`` have the
formulas."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import (
    Coefficient,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Schema,
    UnitFraction,
)
from configs.schema.model import ModelConfig
from configs.schema.own_function import OwnFunction

ClipLow = Annotated[float, Field(ge=0, lt=1)]


class ClippedObjective(Schema):
    """PPO's clipped surrogate with separate bounds and dual clip."""

    type: Literal["clipped"] = "clipped"
    clip_low: ClipLow = 0.2
    """The ratio current / old counts as at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio current / old counts as at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """c of dual clip: for A < 0 the per-token loss is at most -c A. None turns it off."""


class GspoObjective(Schema):
    """GSPO: the clipped surrogate of the sequence's ratio, with a gradient to every token (arXiv 2507.18071)."""

    type: Literal["gspo"]
    clip_low: ClipLow = 3e-4
    """The sequence's ratio counts as at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The sequence's ratio counts as at most 1 + clip_high."""


class GmpoObjective(Schema):
    """GMPO: the geometric mean of a sequence's clipped ratios (arXiv 2507.20673)."""

    type: Literal["gmpo"]
    clip_low: NonNegativeFloat = 0.4
    """The log-ratio counts as at least -clip_low, so ratios lie within [exp(-clip_low), exp(clip_high)]."""
    clip_high: NonNegativeFloat = 0.4
    """The log-ratio counts as at most clip_high."""


class CispoObjective(Schema):
    """CISPO: a policy gradient whose weight is the clipped ratio, without gradient (arXiv 2506.13585)."""

    type: Literal["cispo"]
    clip_low: UnitFraction = 1.0
    """The weight is at least 1 - clip_low; 1 leaves small ratios as they are, as in the paper's experiments."""
    clip_high: NonNegativeFloat = 0.2
    """The weight is at most 1 + clip_high."""


class SapoObjective(Schema):
    """SAPO: a soft gate instead of the clip (arXiv 2511.20347)."""

    type: Literal["sapo"]
    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for tokens with A > 0; a larger value fades faster."""
    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for tokens with A <= 0; a larger value fades faster."""


class DppoObjective(Schema):
    """DPPO with binary total variation: a token is masked by the change of its probability, not by its ratio
    (arXiv 2602.04879). The paper's trust region is around the rollout: ``correction: ppo_is_bypass``."""

    type: Literal["dppo"]
    max_decrease: UnitFraction = 0.2
    """Largest decrease of the probability of tokens with A < 0."""
    max_increase: UnitFraction = 0.2
    """Largest increase of the probability of tokens with A > 0."""
    ratio_max: PositiveFloat = 20.0
    """Upper bound of the gradient's weight, which is the ratio without gradient."""


class PolicyGradientObjective(Schema):
    """-A log pi: no ratio, no trust region."""

    type: Literal["policy_gradient"]


class FunctionObjective(OwnFunction):
    """The user's function f(current_logprobs_T, old_logprobs_T, advantages_T, **settings) -> loss_T."""

    type: Literal["function"]


ObjectiveConfig = Annotated[
    ClippedObjective
    | GspoObjective
    | GmpoObjective
    | CispoObjective
    | SapoObjective
    | DppoObjective
    | PolicyGradientObjective
    | FunctionObjective,
    Field(discriminator="type"),
]


class CreditedAdvantage(Schema):
    credit: Literal["episode", "turn"] = "episode"
    """For environments whose turns earn rewards (step rewards, ``context.reward_turn``, an agent's
    ``turn_rewards``). episode: their sum is the reward of the whole episode. turn: a turn is credited with the
    rewards of this turn and of later ones. grpo then compares the rewards of all turns of a group (process
    supervision, arXiv 2402.03300); gae and reinforce_pp put each reward on the last token of its turn."""


class GrpoAdvantage(CreditedAdvantage):
    """Reward minus the mean of its group, optionally divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    normalize_by_std: bool = True
    """Divide by the standard deviation of the group; false is Dr. GRPO's choice."""


class GdpoAdvantage(Schema):
    """Each part of a weighted reward less its group's mean and divided by the group's standard deviation. Their sum, each
    times its part's weight, gets mean 0 and deviation 1 over the samples of the step (arXiv 2601.05242). ``grpo``
    divides the sum alone, so that two responses with the same sum by different parts have the same advantage. Dynamic
    sampling still compares sums. For single turns: the rewards of an environment may have other parts."""

    type: Literal["gdpo"]


class RlooAdvantage(Schema):
    """Reward minus the mean of the other siblings."""

    type: Literal["rloo"]


class OpoAdvantage(Schema):
    """Reward minus its group's length-weighted mean reward (arXiv 2505.23585)."""

    type: Literal["opo"]


class ReinforcePlusPlusAdvantage(CreditedAdvantage):
    """Discounted returns of each token, whitened over the whole step (arXiv 2501.03262)."""

    type: Literal["reinforce_pp"]
    gamma: UnitFraction = 1.0
    """Discount per token."""


class ReinforcePlusPlusBaselineAdvantage(Schema):
    """Reward minus the mean of its group, whitened over the tokens of the whole step."""

    type: Literal["reinforce_pp_baseline"]


class GaeAdvantage(CreditedAdvantage):
    """Generalised advantage estimation from the values of a critic (``critic:``), optionally whitened over the
    step."""

    type: Literal["gae"]
    gamma: UnitFraction = 1.0
    """Discount per token."""
    lam: UnitFraction = 1.0
    """Lambda of GAE: 1 is the return less the value, 0 the one-step error."""
    whiten: bool = True
    """Shift and scale to mean 0 and deviation 1 over the tokens of the step."""


class FunctionAdvantage(OwnFunction):
    """The user's function f(rewards_S, group_ids_S, **settings) -> advantages_S, for all samples of a
    step."""

    type: Literal["function"]


AdvantageConfig = Annotated[
    GrpoAdvantage
    | GdpoAdvantage
    | RlooAdvantage
    | OpoAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | GaeAdvantage
    | FunctionAdvantage,
    Field(discriminator="type"),
]


class AggregationConfig(Schema):
    """How the losses of tokens become the loss of a minibatch (an optimizer step)."""

    type: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_over_constant",
        "turn_mean",
    ] = "token_mean"
    """token_mean: the mean over all tokens. sequence_mean_*: the mean over responses of each response's mean or
    sum. turn_mean: the mean over turns of each turn's mean, so that a short turn counts as much as a long one; for
    environments of several turns."""
    constant: PositiveInt | None = None
    """The divisor of ``sequence_mean_token_sum_over_constant`` (Dr. GRPO), usually max_new_tokens."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if (self.type == "sequence_mean_token_sum_over_constant") != (self.constant is not None):
            yield Contradiction(
                ("constant", "type"),
                "`constant` goes with `type: sequence_mean_token_sum_over_constant`, and only with it",
            )


Estimator = Literal[
    "k1", "k2", "k3", "abs", "k1_straight_through", "k3_straight_through", "abs_straight_through"
]
"""``x_straight_through`` has the value of x and the gradient of k2."""


class FixedController(Schema):
    """The coefficient stays as it is."""

    type: Literal["fixed"] = "fixed"


class AdaptiveController(Schema):
    """The coefficient follows the measured KL (Ziegler et al. 2019, arXiv 1909.08593). It does not change in
    ``critic.warmup_steps``, which do not train the policy."""

    type: Literal["adaptive"]
    target: PositiveFloat
    """Mean KL per response token, in nats."""
    horizon: PositiveInt = 10_000
    """Number of sampled responses over which the coefficient adapts; larger is slower."""


class KLConfig(Schema):
    """KL to the reference, a frozen model."""

    coefficient: Coefficient = 0.0
    """Factor of the KL; 0 loads no reference. An adaptive controller starts from it."""
    place: Literal["loss", "reward"] = "loss"
    """loss: coefficient times KL(current || ref) is added to the loss. reward: coefficient times the estimate
    of KL(old || ref) is subtracted from each token's reward, before advantages."""
    estimator: Estimator = Field(default_factory=lambda data: "k1" if data.get("place") == "reward" else "k3")
    """If it is left out: k3 in the loss, and k1 in the reward. The reward uses only the estimator's value,
    and k1 is unbiased."""
    unbiased: bool = False
    """Multiply the KL of a token in the loss by pi_current / pi_old, with gradient, and by the correction's
    weight. In bypass mode the weight is left out, since the ratio is current / rollout. Value and gradient
    then estimate KL(current || ref) for samples of the rollout, up to the weight's bound (arXiv
    2512.02556)."""
    controller: Annotated[FixedController | AdaptiveController, Field(discriminator="type")] = (
        FixedController()
    )
    """Controls the coefficient in the reward."""
    model: ModelConfig | None = None
    """The reference: a teacher with the policy's tokenizer, for on-policy distillation. It has the learner's
    layout. None: the model at the start of the run."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.model is not None and self.coefficient == 0:
            yield Contradiction(
                ("model", "coefficient"),
                "kl.model is the reference of a KL, but kl.coefficient=0 computes none",
                "set kl.coefficient, or remove kl.model",
            )
        if self.place == "reward" and self.coefficient == 0:
            yield Contradiction(
                ("place", "coefficient"),
                "`place: reward` with coefficient 0 has no effect",
                "set kl.coefficient, or remove it",
            )
        if self.place == "loss" and self.controller.type != "fixed":
            yield Contradiction(
                ("place", "controller.type"),
                "an adaptive controller goes with `place: reward`",
                "set kl.place=reward, or kl.controller.type=fixed",
            )
        if self.unbiased and not (self.in_loss and self.estimator in ("k1", "k3")):
            yield Contradiction(
                ("unbiased", "place", "coefficient", "estimator"),
                "kl.unbiased needs a KL in the loss by k1 or k3; for other estimators the multiplied gradient estimates no KL",
                "set kl.estimator=k3 and kl.place=loss, or remove kl.unbiased",
            )
        if self.place == "reward" and self.estimator.endswith("_straight_through"):
            yield Contradiction(
                ("estimator",),
                f"kl.estimator={self.estimator} differs from its plain form only in the gradient, and a reward has no gradient",
            )

    @property
    def in_loss(self) -> bool:
        return self.place == "loss" and self.coefficient > 0

    @property
    def in_reward(self) -> bool:
        return self.place == "reward" and self.coefficient > 0


class EntropyConfig(Schema):
    """A bonus for entropy."""

    coefficient: Coefficient = 0.0
    """Factor of the entropy; the product is subtracted from the loss."""


PER_SEQUENCE_OBJECTIVES = ("gspo", "gmpo")
WITHIN_GROUPS = ("grpo", "gdpo", "rloo", "opo", "reinforce_pp_baseline")
"""Advantages that compare a response with its siblings."""
ZERO_FOR_EQUAL_REWARDS = ("grpo", "rloo", "opo")
"""Those of them whose advantages are zero in a group of equal rewards. Not reinforce_pp_baseline, which whitening moves from
zero, nor gdpo, since rewards with the same sum may have different parts."""
MEAN_OF_SEQUENCES = (*PER_SEQUENCE_OBJECTIVES, "sapo")
"""Objectives whose papers average over the tokens of a sequence, then over sequences."""
