"""The correction between the log-probs of two engines and the loss: importance weights, rejection, veto.

rho = pi_train / pi_rollout of a token. train is old in ``decoupled`` mode, current in ``bypass`` mode.
Presets: ``configs/presets.py``.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import NonNegativeFloat, PositiveFloat, Schema
from configs.schema.own_function import OwnFunction

Level = Literal["token", "sequence", "geometric", "segment", "segment_geometric"]
"""The unit of a ratio: a token, the product over its sequence's valid tokens, that product's n-th root, the
product over its segment (a stretch of consecutive valid tokens, such as one turn), or that product's n-th
root."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to +-20 before exp. Ratios stay in [2e-9, 5e8], so their squares fit float32."""
DEFAULT_UPPER = 2.0
TWO_SIDED = ("clip", "mask")


class NoWeight(Schema):
    """Every token counts alike, whatever its ratio."""

    level: Literal["none"] = "none"
    """none: no importance weights."""


class ImportanceWeight(Schema):
    """The weight of every token, from the ratio at ``level``; never with gradient."""

    level: Level = "token"
    """The unit of the ratio: a token, its whole response (product, or its n-th root), or its stretch of valid
    tokens."""
    bound: Literal["truncate", "clip", "mask", "none"] = "truncate"
    """truncate: min(rho, upper). clip: into [lower, upper]. mask: 0 outside [lower, upper], the token still
    counts (IcePop). none: rho."""
    upper: PositiveFloat | None = Field(
        default_factory=lambda data: None if data.get("bound") == "none" else DEFAULT_UPPER
    )
    """2 if it is left out (and ``bound`` is not none)."""
    lower: NonNegativeFloat | None = Field(
        default_factory=lambda data: _reciprocal(data) if data.get("bound") in TWO_SIDED else None
    )
    """For clip and mask; 1 / upper if it is left out."""
    normalise: bool = False
    """Divide the bounded weights by their mean over the step: over tokens at token level, else over sequences
    (segments)."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.bound == "none" and (self.upper, self.lower) != (None, None):
            yield Contradiction(
                ("bound", "upper", "lower"),
                "`bound: none` leaves ratios as they are: remove `upper` and `lower`, or choose another bound",
            )
        if (self.bound != "none" and self.upper is None) or (self.bound in TWO_SIDED and self.lower is None):
            yield Contradiction(
                ("bound",),
                f"`bound: {self.bound}` needs its bounds",
                "give numbers instead of null, or set `bound: none`",
            )
        if self.bound == "truncate" and self.lower is not None:
            yield Contradiction(
                ("bound", "lower"),
                "`bound: truncate` has no lower bound: set `lower: null`, or use `bound: clip` or `bound: mask`",
            )
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            yield Contradiction(("lower", "upper"), f"lower={self.lower} is above upper={self.upper}")


class FunctionWeight(OwnFunction):
    """The user's function f(log_ratio_N, **settings) -> weights_N, with log rho of the response tokens."""

    level: Literal["function"]
    """function: a function computes the weights from the ratios of tokens."""


WeightConfig = Annotated[NoWeight | ImportanceWeight | FunctionWeight, Field(discriminator="level")]


class RatioRule(Schema):
    """Keeps tokens with lower <= rho <= upper at ``level``; bounds act on rho itself, before any weight bound."""

    rule: Literal["ratio"] = "ratio"
    """ratio: by rho itself."""
    level: Level = "token"
    """The unit of the ratio; see the level of a weight."""
    upper: PositiveFloat
    """Largest ratio that is kept."""
    lower: NonNegativeFloat = Field(default_factory=lambda data: _reciprocal(data))
    """1 / upper if it is left out; 0 for no lower bound."""

    def _contradictions(self) -> Iterator[Contradiction]:
        greatest = math.exp(LOG_RATIO_BOUND)
        if self.upper > greatest or 0 < self.lower < 1 / greatest:
            yield Contradiction(
                ("lower", "upper"),
                f"[{self.lower}, {self.upper}] is beyond the ratios that a rule sees, which are bounded to "
                f"[{1 / greatest:.2g}, {greatest:.2g}], so that one side would reject nothing",
                "use bounds within, or lower=0 for none below",
            )
        if self.lower > self.upper:
            yield Contradiction(
                ("lower", "upper"),
                f"lower={self.lower} (1 / upper if it is left out) is above upper={self.upper}",
                "give both, lower first",
            )


class DivergenceRule(Schema):
    """Keeps tokens with a divergence of at most ``upper``: k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho."""

    rule: Literal["k2", "k3"]
    """k2 = (log rho)^2 / 2, or k3 = rho - 1 - log rho."""
    reduce: Literal["token", "sum", "mean", "max"] = "mean"
    """Each token on its own, or its whole sequence by the sum, mean or maximum over valid tokens."""
    upper: PositiveFloat
    """Largest divergence that is kept."""


class DifferenceRule(Schema):
    """Keeps tokens with lower <= p_train - p_rollout <= upper: the difference of the sampled token's two
    probabilities, with its sign."""

    rule: Literal["difference"]
    reduce: Literal["token", "sum", "mean", "segment_mean"] = "token"
    """Each token on its own, its whole sequence by the sum or mean over valid tokens, or its segment by the
    mean."""
    upper: PositiveFloat
    """Largest difference that is kept."""
    lower: Annotated[float, Field(lt=0)] = Field(
        default_factory=lambda data: -data["upper"] if data.get("upper") else -1.0
    )
    """-upper if it is left out."""


RejectionRule = Annotated[RatioRule | DivergenceRule | DifferenceRule, Field(discriminator="rule")]


class CorrectionConfig(Schema):
    """Corrects the gap between the two engines' log-probs. A preset's name may replace the block."""

    mode: Literal["decoupled", "bypass"] = "decoupled"
    """decoupled: rollout, old and current are three policies; old is the learner's policy before the update.
    bypass: old := rollout, so the forward pass for old is not needed; ratios, rejection and weights compare
    current with rollout."""
    loss: Literal["objective", "policy_gradient"] = "objective"
    """objective: the run's ``objective`` (in bypass its ratio is current / rollout, so there is no separate
    weight). policy_gradient, only in bypass: -sg(w) log pi_current A replaces the objective, without
    clipping."""
    weight: WeightConfig = Field(
        default_factory=lambda data: NoWeight() if _no_weight_fits(data) else ImportanceWeight()
    )
    """``none`` is the only choice in bypass mode with the run's objective."""
    reject: tuple[RejectionRule, ...] = ()
    """A token is kept if it passes all rules."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """One valid token with rho below this (before any bound) rejects its whole sequence. Usual: 1e-4 to 1e-6.
    """
    off_policy_mask: PositiveFloat | None = None
    """Off-policy sequence masking (arXiv 2512.02556): tokens with A < 0 have no policy loss if the mean of
    log pi_rollout - log pi_current over their response is above this, in nats. The mean contains both the gap
    of the engines and the change of the policy, at every optimizer step. These tokens stay in the means,
    whatever ``denominator`` is."""
    denominator: Literal["kept", "all"] = "kept"
    """The tokens over which the loss is averaged. kept: those that no rule rejected. all: rejected tokens
    count as zeros."""

    @property
    def rejects(self) -> bool:
        """Whether a rule or the veto may take tokens or responses out of the loss."""
        return bool(self.reject) or self.veto is not None

    @property
    def rejects_from_mean(self) -> bool:
        """Whether the loss is a mean over fewer tokens than were sampled."""
        return self.rejects and self.denominator == "kept"

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.loss == "policy_gradient" and self.mode != "bypass":
            yield Contradiction(
                ("loss", "mode"),
                "`loss: policy_gradient` goes with `mode: bypass`",
                "in decoupled mode set objective.type=policy_gradient",
            )
        if self.mode == "bypass":
            if self.loss == "objective" and self.weight.level != "none":
                yield Contradiction(
                    ("mode", "weight.level", "loss"),
                    "in bypass mode the objective's own ratio is current / rollout, so "
                    f"weight.level={self.weight.level} would count the gap twice",
                    "set weight.level=none, or `loss: policy_gradient`, or `mode: decoupled`",
                )
            if isinstance(self.weight, ImportanceWeight) and self.weight.normalise:
                yield Contradiction(
                    ("mode",),
                    "`normalise` needs all weights of the step before the first update, but in bypass mode a weight is known only in "
                    "the forward pass of its own micro-batch",
                    "remove it, or use `mode: decoupled`",
                )


def _reciprocal(data: dict[str, Any]) -> float | None:
    """1 / upper, from the fields before; None if upper is not valid, which is reported separately."""
    upper = data.get("upper")
    return 1 / upper if upper else None


def _no_weight_fits(data: dict[str, Any]) -> bool:
    return data.get("mode") == "bypass" and data.get("loss") == "objective"
