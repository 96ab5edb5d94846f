"""What stands between the log-prob recompute and the loss: importance weights from the gap of the two engines."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import PositiveFloat, Schema


class NoWeight(Schema):
    level: Literal["none"] = "none"


class TokenWeight(Schema):
    """w_t = min(rho_t, upper), rho_t = pi_old / pi_rollout of the token: truncated importance sampling."""

    level: Literal["token"] = "token"
    bound: Literal["truncate"] = "truncate"
    upper: PositiveFloat = 2.0


WeightConfig = Annotated[NoWeight | TokenWeight, Field(discriminator="level")]


class CorrectionConfig(Schema):
    mode: Literal["decoupled"] = "decoupled"
    """decoupled: rollout, old and current are three policies; old is recomputed by the learner before the update."""
    weight: WeightConfig = TokenWeight()
