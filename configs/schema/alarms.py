"""Thresholds at which a step's metrics raise an alarm."""

from collections.abc import Iterator

from configs.errors import Contradiction
from configs.schema.base import NonNegativeFloat, PositiveFloat, Schema, UnitFraction


class AlarmsConfig(Schema):
    """Each alarm is named after its threshold; None turns it off. trainer/README.md explains them."""

    kept_min: UnitFraction | None = 0.0
    """Share of response tokens that the correction keeps: alarm at or below it."""
    advantage_std_min: NonNegativeFloat | None = 1e-6
    """Standard deviation of the advantages of a step: alarm at or below it. At 0 all are equal, and nothing is learned."""
    first_ratio_tolerance: NonNegativeFloat | None = 1e-3
    """Largest distance of a ratio current / old from 1 on the first minibatch, where both are the same
    weights. Decoupled only."""
    weight_mean_min: PositiveFloat | None = 0.5
    """Least mean importance weight, after the bound and before normalisation."""
    weight_mean_max: PositiveFloat | None = 2.0
    """Largest mean importance weight."""
    ess_min: UnitFraction | None = 0.3
    """Least effective share of the samples, computed from the weights before the bound."""
    kl_max: PositiveFloat | None = 0.1
    """Largest |k1| and k3 of KL(rollout || train), in nats per token."""
    chi2_token_max: PositiveFloat | None = 1.0
    """Largest mean squared ratio of a token, less 1."""
    response_abs_prob_over_max: UnitFraction | None = 0.02
    """Largest share of responses with a token whose two probabilities differ by more than 0.5. The study that
    names this quantity (F. Yao et al., 2025) counts 1 or 2 of 512 responses if the layouts are aligned, and
    tens if they differ."""
    rejected_max: UnitFraction | None = 0.5
    """Largest share of the response tokens, and of the responses, that all rules together reject."""

    reward_failed_max: UnitFraction | None = 0.05
    """Largest share of samples, in a step or in an evaluation, whose reward raised, ran out of time or
    returned no number. In training such a sample is left out; in an evaluation it counts as wrong. If all
    samples fail, the run ends. An evaluation with a larger share cannot be the best one
    (``checkpoint.keep_best``)."""

    accuracy_fall_max: PositiveFloat | None = 4.0
    """Largest fall of the held-out accuracy below the best evaluation before it, in standard errors of the difference.
    If the problems differ in difficulty, a run whose policy does not change hardly ever falls so far by chance. With problems that are
    all equally hard, at most one in ten such runs does within a hundred evaluations."""

    def _contradictions(self) -> Iterator[Contradiction]:
        low, high = self.weight_mean_min, self.weight_mean_max
        if low is not None and high is not None and low >= high:
            yield Contradiction(
                ("weight_mean_min", "weight_mean_max"),
                f"alarms.weight_mean_min={low} is not below alarms.weight_mean_max={high}",
                "a healthy mean is near 1",
            )
