"""The critic of one rank: values of states, and one optimizer step on them. All ranks call it together (SPMD)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from configs.schema.critic import CriticConfig
from configs.schema.layout import LayoutConfig
from configs.schema.model import ModelConfig
from parallel.engine import ValueEngine
from parallel.packing import PackedBatch
from parallel.planning.architecture import read_architecture, read_hf_config
from parallel.planning.layout import check_critic_vocabulary
from trainer.algorithm.value_loss import value_loss
from trainer.ranks.metrics import Metric, merge_metrics, merge_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """Result of one optimizer step of the critic; the same on every rank."""

    metrics: dict[str, Metric]
    """``critic/*``; see ``value_loss``."""
    grad_norm: float
    lr: float
    skipped: bool | None
    """See ``UpdateResult``."""


class Critic:
    """A value model beside the policy, in the policy's layout. ``engine`` saves and loads its checkpoints.

    Raises ValueError where the critic's vocabulary lacks tokens of the policy's.
    """

    def __init__(
        self,
        config: CriticConfig,
        *,
        policy: ModelConfig,
        layout: LayoutConfig,
        total_optimizer_steps: int,
        recompute: str,
        seed: int,
        timeout_s: float,
    ):
        model = config.model or policy
        check_critic_vocabulary(*(read_architecture(read_hf_config(of.path)) for of in (model, policy)))
        self._value_clip = config.value_clip
        self.engine = ValueEngine(
            model,
            layout,
            config.optimizer,
            total_optimizer_steps=total_optimizer_steps,
            recompute=recompute,
            seed=seed,
            timeout_s=timeout_s,
        )

    def score(self, microbatches: Sequence[PackedBatch]) -> list[Tensor]:
        """values_T of each micro-batch, float32, without gradient."""
        return self.engine.values(microbatches)

    def update(self, minibatch: Sequence[PackedBatch]) -> CriticUpdate:
        """Forward, loss, backward, clip, step. Raises NonFiniteError before any weight has changed."""
        result = self.engine.update(
            minibatch, lambda batch, values_T: value_loss(batch, values_T, value_clip=self._value_clip)
        )
        metrics = merge_over_ranks(merge_metrics(result.outputs), self.engine.groups.dp_group)
        return CriticUpdate(metrics=metrics, grad_norm=result.grad_norm, lr=result.lr, skipped=result.skipped)
