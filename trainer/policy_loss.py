"""The loss of one micro-batch: objective, KL and entropy terms, each a plain sum over tokens of loss times weight.

Legend: T packed tokens. Log-probs and entropy are nats.
An objective is a pure function in ``objectives`` and a case of ``_surrogate`` here.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from configs.schema.objective import ClippedObjective, EntropyConfig, KLConfig, ObjectiveConfig
from parallel.packing import PackedBatch
from trainer.kl import ESTIMATORS
from trainer.metrics import Metric
from trainer.objectives import clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """What an objective makes of a micro-batch: per-token losses, and what it has to say of itself."""

    loss_T: Tensor
    metrics: dict[str, Metric]


def policy_loss(
    batch: PackedBatch,
    current_logprobs_T: Tensor,
    entropy_T: Tensor,
    *,
    objective: ObjectiveConfig,
    kl: KLConfig,
    entropy: EntropyConfig,
) -> tuple[Tensor, dict[str, Metric]]:
    """The scalar loss of a micro-batch, with gradient to ``current_logprobs_T`` [T] and ``entropy_T`` [T], and its metrics.

    loss = sum_t objective_t * loss_weights_t + kl.coefficient * sum_t KL_t * aggregation_t
                                              - entropy.coefficient * sum_t H_t * aggregation_t     over response tokens t.
    Weights hold the global normalisers, so losses and gradients of micro-batches and ranks simply add up. Off the response mask nothing
    matters, not even NaN; without response tokens loss and gradient are exact zeros, still connected to the graph. A non-finite
    current log-prob of a response token makes the loss NaN.

    Metrics: ``loss/total, loss/policy, loss/kl, loss/entropy`` are this minibatch's terms as they stand in the loss (SUM: they add up to
    the whole minibatch's); ``policy/*`` are means, or the maximum, over response tokens.

    Raises ValueError naming the fields of ``batch`` that are not set, or tensors that are not one value per token.
    """
    _require(batch, current_logprobs_T, entropy_T, with_ref=kl.coefficient > 0)
    mask_T = batch.response_mask_T
    # Replaced before any arithmetic: a NaN that is multiplied by a zero weight afterwards would still be NaN, in the gradient too.
    current_T, entropy_T, old_T, advantages_T, loss_weights_T, aggregation_T = (
        torch.where(mask_T, x_T, 0.0)
        for x_T in (
            current_logprobs_T, entropy_T, batch.old_logprobs_T, batch.advantages_T, batch.loss_weights_T, batch.aggregation_T
        )
    )  # fmt: skip
    # The bound on the log-ratio would hide an infinity; a NaN loss is refused before the optimizer's step.
    current_T = torch.where(current_T.isinf(), torch.nan, current_T)
    surrogate = _surrogate(objective, current_T, old_T, advantages_T, mask_T)
    terms = {"policy": (surrogate.loss_T * loss_weights_T).sum()}
    metrics = surrogate.metrics | {
        "policy/entropy": Metric.mean(entropy_T, mask_T),
        "policy/ppo_kl": Metric.mean(old_T - current_T, mask_T),
    }
    if batch.ref_logprobs_T is not None:
        kl_T = ESTIMATORS[kl.estimator](current_T, torch.where(mask_T, batch.ref_logprobs_T, 0.0))
        metrics["policy/ref_kl"] = Metric.mean(kl_T, mask_T)
        if kl.coefficient > 0:
            terms["kl"] = kl.coefficient * (kl_T * aggregation_T).sum()
    if entropy.coefficient > 0:
        terms["entropy"] = -entropy.coefficient * (entropy_T * aggregation_T).sum()
    loss = torch.stack(list(terms.values())).sum()
    values = dict.fromkeys(("policy", "kl", "entropy"), 0.0) | {name: term.item() for name, term in terms.items()}
    metrics |= {f"loss/{name}": Metric.sum(value) for name, value in (values | {"total": loss.item()}).items()}
    return loss, metrics


def _surrogate(objective: ObjectiveConfig, current_T: Tensor, old_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Surrogate:
    match objective:
        case ClippedObjective(clip_low=low, clip_high=high, dual_clip=dual):
            result = clipped(current_T, old_T, advantages_T, clip_low=low, clip_high=high, dual_clip=dual)
            metrics = {
                "policy/clip_fraction": Metric.mean(result.clipped_T, mask_T),
                "policy/dual_clip_fraction": Metric.mean(result.dual_clipped_T, mask_T),
                "policy/ratio_max": Metric.max(result.ratio_T, mask_T),
            }
            return Surrogate(loss_T=result.loss_T, metrics=metrics)
        case _:
            assert_never(objective)


def _require(batch: PackedBatch, current_logprobs_T: Tensor, entropy_T: Tensor, *, with_ref: bool) -> None:
    names = ["old_logprobs_T", "advantages_T", "loss_weights_T", "aggregation_T"] + ["ref_logprobs_T"] * with_ref
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the micro-batch lacks {', '.join(missing)}: score it and give it advantages and loss weights first")
    for name, tensor in (("current_logprobs_T", current_logprobs_T), ("entropy_T", entropy_T)):
        if tensor.shape != batch.response_mask_T.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the micro-batch {batch.num_tokens} tokens; pass one value per token")
