"""The critic of one rank: values of states, and one optimizer step on them. All ranks call it together (SPMD)."""

from collections.abc import Sequence

from torch import Tensor

from configs.schema import RunConfig
from parallel.engine import ValueEngine
from parallel.engine_base import Training, UpdateResult
from parallel.packing import PackedBatch
from parallel.planning.architecture import architecture_of
from parallel.planning.layout import check_other_vocabulary
from trainer.algorithm.value_loss import value_loss
from trainer.ranks.metrics import Metric, merge_metrics, merge_over_ranks


class Critic:
    """A value model besides the policy, in the policy's layout. ``engine`` saves and loads its checkpoints.

    Raises ValueError if the critic's vocabulary lacks tokens of the policy's.
    """

    def __init__(self, config: RunConfig):
        assert config.critic is not None
        model = config.critic.model or config.model
        check_other_vocabulary("critic.model", *(architecture_of(of.path) for of in (model, config.model)))
        self._value_clip = config.critic.value_clip
        self.engine = ValueEngine(
            model,
            config.layout,
            Training(
                optimizer=config.critic.optimizer,
                total_steps=config.steps * config.learner.minibatches,
                recompute=config.learner.recompute,
            ),
            seed=config.seed,
            timeout_s=config.launch.collective_timeout_s,
        )

    def score(self, microbatches: Sequence[PackedBatch]) -> list[Tensor]:
        """values_T of each micro-batch, float32, without gradient."""
        return self.engine.values(microbatches)

    def update(self, minibatch: Sequence[PackedBatch]) -> tuple[dict[str, Metric], UpdateResult]:
        """Forward, loss, backward, clip, step. Returns the metrics of ``value_loss``, the same on every rank, and the
        step. Raises NonFiniteError before any weight has changed."""
        result = self.engine.update(
            minibatch, lambda batch, values_T: value_loss(batch, values_T, value_clip=self._value_clip)
        )
        return merge_over_ranks(merge_metrics(result.outputs), self.engine.groups.dp_group), result
