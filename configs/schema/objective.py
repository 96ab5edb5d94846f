"""The loss: objective, advantages, aggregation, KL and entropy. Each union has room for its next member."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import NonNegativeFloat, PositiveInt, Schema


class ClippedObjective(Schema):
    """PPO's clipped surrogate with separate bounds and dual clip."""

    type: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """c of dual clip: for A < 0 the per-token loss is at most -c A. None turns it off."""


ObjectiveConfig = ClippedObjective
"""A single member until the next objective arrives; then a union discriminated by ``type``."""


class GrpoAdvantage(Schema):
    """Reward minus the mean of its group, divided by the group's standard deviation where asked."""

    type: Literal["grpo"] = "grpo"
    normalize_by_std: bool = True


AdvantageConfig = GrpoAdvantage
"""A single member until the next estimator arrives; then a union discriminated by ``type``."""


class AggregationConfig(Schema):
    type: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_over_constant"
    ] = "token_mean"
    constant: PositiveInt | None = None
    """The divisor of ``sequence_mean_token_sum_over_constant`` (Dr. GRPO), usually max_new_tokens."""

    @model_validator(mode="after")
    def _constant_where_used(self):
        if (self.type == "sequence_mean_token_sum_over_constant") != (self.constant is not None):
            raise ValueError("`constant` goes with `type: sequence_mean_token_sum_over_constant`, and only with it")
        return self


class KLConfig(Schema):
    """KL(current || ref) as a term of the loss; the reference is the model at the start of the run, frozen."""

    coefficient: NonNegativeFloat = 0.0
    """0 loads no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"


class EntropyConfig(Schema):
    coefficient: NonNegativeFloat = 0.0
    """Of the entropy bonus that is subtracted from the loss."""

