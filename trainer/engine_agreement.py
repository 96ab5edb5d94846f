"""How closely learner and servers must agree on a token's log-prob, depending on the precision of both.

In float32 on both sides only the order of rounding differs, and with aligned numerics nothing differs. A
larger gap means that the servers hold other weights, or compute another softmax. For other precisions no
bound separates rounding from wrong weights; their gap is measured (``mismatch/*``), and alarms watch it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from configs.schema.rollout import RolloutConfig
from trainer.algorithm.mismatch import SampledGap
from trainer.batch.farthest_token import Measure
from trainer.stage_sender import WeightSyncError

EXACT_TOLERANCE = 1e-4
"""Allowed difference of a float32 learner and a float32 server: nats on a probe token, probability on any
sampled token."""
UNLIKELY_TOLERANCE = 1e-3
"""Allowed difference in nats on any sampled token. Unlikely tokens show the rounding of their logits."""


class ForeignSamplesError(RuntimeError):
    """A step was trained on samples of other weights, or of another softmax. This is not an interruption,
    since the step's weights must not be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The greatest differences."""

    engines: str
    """A description of the engines that must keep to them."""
    probability: float
    """Of a sampled token; on a probe token the same number of nats."""
    nats: float
    """Of a sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAgreement:
    """The agreement that a probe and the samples must have."""

    allowed: Allowed | None
    """None: any difference."""
    samples_are_probes: bool
    """Whether a step's samples are scored by the weights that sampled them, and the servers check every byte
    that they receive. No probe is needed then."""

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        learner_dtype: torch.dtype,
        *,
        is_aligned: bool = False,
        compares_samples: bool = False,
    ) -> "EngineAgreement":
        """is_aligned: both engines give a token the same bits (``model.numerics``). compares_samples: see
        ``RunConfig.compares_samples``."""
        allowed = None
        if is_aligned:
            allowed = Allowed(engines="model.numerics=aligned", probability=0.0, nats=0.0)
        elif getattr(torch, rollout.dtype) == learner_dtype == torch.float32 and rollout.precision is None:
            allowed = Allowed(
                engines="float32 on both sides", probability=EXACT_TOLERANCE, nats=UNLIKELY_TOLERANCE
            )
        # Servers without the plugin check no bytes; there only the probe checks the weights.
        return cls(allowed=allowed, samples_are_probes=compares_samples and rollout.sglang_plugin)

    def check_probe(
        self, ours: Sequence[float], theirs: Sequence[float], *, version: int, temperature: float
    ) -> float:
        """The greatest difference of the probe's log-probs, in nats. Raises WeightSyncError if it is not
        finite, or greater than allowed."""
        # torch's maximum, unlike Python's, does not lose a NaN.
        differences = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
        gap = differences.abs().max().item()
        if not math.isfinite(gap):
            raise WeightSyncError(
                f"a probe log-prob is not finite after version {version}: server {theirs}, learner {ours}"
            )
        if self.allowed is not None and gap > self.allowed.probability:
            raise WeightSyncError(
                f"after version {version}, learner and server differ by {gap:.2e} nats on the probe prompt at temperature {temperature} "
                f"({self.allowed.engines} allows {self.allowed.probability:g}): the server does not serve these weights or this softmax"
            )
        return gap

    def check_samples(
        self, gap: SampledGap | None, farthest: Callable[[Measure], str], *, version: int
    ) -> None:
        """Raise ForeignSamplesError if a sampled token shows that the policy of the servers, at ``version``,
        was not the learner's. farthest: names that token; a collective of the ranks that share the step's
        samples."""
        allowed = self.allowed
        if gap is None or allowed is None or not self.samples_are_probes:
            return
        checks: tuple[tuple[Measure, float, float, str], ...] = (
            ("abs_prob_max", gap.probability, allowed.probability, ""),
            ("logprob_gap_max", gap.nats, allowed.nats, " nats"),
        )
        for name, value, tolerance, unit in checks:
            if not value <= tolerance:
                raise ForeignSamplesError(
                    f"learner and server differ by {value:.2e}{unit} on a token sampled with version {version} "
                    f"({name}; {allowed.engines} allows {tolerance:g}): the server did not serve these weights or this softmax. The "
                    f"farthest token is {farthest(name)}"
                )
