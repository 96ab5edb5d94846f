"""Other corrections of a recorded batch: their weights, kept tokens, loss and gradient.

The batch is taken before its first update, when current is the policy that scored it, and as one minibatch even
if the run had several. Every term of the loss counts except the entropy bonus, which no correction changes.
``_P`` stands for parameters here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.schema import RunConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.objective import EntropyConfig
from parallel.packing import PackedBatch
from trainer.algorithm.aggregation import Counted, kept_factor
from trainer.algorithm.correction import correct
from trainer.algorithm.policy_loss import policy_loss
from trainer.batch.plan import plan_batches
from trainer.batch.step_batch import StepBatch
from trainer.ranks.metrics import Metric, merge_metrics, scale_losses, values
from trainer.ranks.totals import alone
from trainer.recording import RecordedBatch

if TYPE_CHECKING:
    from parallel.engine import MegatronEngine

DOT_CHUNK = 1 << 24
LossOutput = tuple[dict[str, Metric], Counted | None]
"""Metrics and counts of a micro-batch, as ``PolicyLoss`` has them."""

Loss = Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, LossOutput]]
"""(micro-batch, current log-probs, entropy) -> (loss, its output)."""

Gradient = Callable[[Sequence[PackedBatch], Sequence[Tensor], Loss], tuple[Tensor, list[LossOutput]]]
"""(micro-batches, recorded log-probs of current, loss) -> (gradient of the summed losses as one vector, output of
each micro-batch's loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One correction on one batch."""

    name: str
    loss: float
    gradient: Tensor = field(repr=False)
    metrics: dict[str, float] = field(repr=False)

    @property
    def gradient_norm(self) -> float:
        return math.sqrt(_dot(self.gradient, self.gradient))

    def cosine(self, other: "Replayed") -> float | None:
        """Cosine of the angle between the two gradients; None if one of them is zero."""
        norms = self.gradient_norm * other.gradient_norm
        return _dot(self.gradient, other.gradient) / norms if norms > 0 else None


def replay(
    recorded: RecordedBatch, config: RunConfig, name: str, correction: CorrectionConfig, gradient: Gradient
) -> Replayed:
    """Apply the correction to the batch, with the objective, aggregation and KL of the run's ``config``."""
    config = config.model_copy(update={"correction": correction})
    batch = as_one_minibatch(recorded, config)
    current = [microbatch.old_logprobs_T for microbatch in batch.microbatches()]
    batch = batch.with_old_of(correction)
    before = correct(batch.packed, correction)
    batch = batch.with_loss_weights(before, config.aggregation, correction.denominator, alone)
    loss_of = partial(
        policy_loss,
        objective=config.policy_objective,
        correction=correction,
        aggregation=config.aggregation.type,
        kl=config.kl,
        entropy=EntropyConfig(),
    )

    def loss(microbatch: PackedBatch, current_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, LossOutput]:
        value, metrics, counted = loss_of(microbatch, current_T, entropy_T)
        return value, (metrics, counted)

    flat, outputs = gradient(batch.microbatches(), current, loss)
    factor = kept_factor(counted for _, counted in outputs)
    loss_metrics = scale_losses(merge_metrics([metrics for metrics, _ in outputs]), factor)
    metrics = values(merge_metrics([before.metrics, loss_metrics]))
    return Replayed(name=name, loss=metrics["loss/total"], gradient=flat * factor, metrics=metrics)


def _dot(a: Tensor, b: Tensor) -> float:
    """The dot product in float64, without a float64 copy of either vector."""
    return sum(
        (x.double() @ y.double()).item() for x, y in zip(a.split(DOT_CHUNK), b.split(DOT_CHUNK), strict=True)
    )


def as_one_minibatch(recorded: RecordedBatch, config: RunConfig) -> StepBatch:
    plan = plan_batches(
        recorded.packed.lengths,
        minibatches=[range(len(recorded.packed.lengths))],
        dp_size=1,
        token_budget=config.learner.token_budget,
    )
    packed = recorded.packed.select(plan.sequence_ids(0))
    return StepBatch(
        packed=packed,
        rows=plan.rows(0),
        rewards_S=recorded.rewards_S,
        group_ids_S=recorded.group_ids_S,
        episode_ids_S=recorded.episode_ids_S,
    )


def of_logprobs(
    microbatches: Sequence[PackedBatch], current: Sequence[Tensor], loss: Loss
) -> tuple[Tensor, list[LossOutput]]:
    """d loss / d log-prob of every token [T], without an engine."""
    gradients, outputs = [], []
    for microbatch, current_T in zip(microbatches, current, strict=True):
        current_T = current_T.clone().requires_grad_()
        value, output = loss(microbatch, current_T, torch.zeros_like(current_T))
        value.backward()
        gradients.append(current_T.grad)
        outputs.append(output)
    return torch.cat(gradients), outputs


def of_parameters(engine: "MegatronEngine", *, temperature: float) -> Gradient:
    """d loss / d parameters [P] of a model in this process alone, by its own forward and backward passes."""
    return lambda microbatches, current, loss: engine.gradient(microbatches, loss, temperature=temperature)
