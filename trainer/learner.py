"""The learner of one rank: which policy computes which log-probs, and one optimizer step. All ranks run it in step (SPMD)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import RunConfig
from parallel.megatron_engine import MegatronEngine
from parallel.packing import PackedBatch, pack_sequences
from rollout.records import Completion, Group
from trainer.metrics import Metric, merge_metrics, merge_over_ranks
from trainer.policy_loss import policy_loss
from trainer.step_batch import StepBatch, split_groups, step_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step did; the same on every rank."""

    metrics: dict[str, Metric]
    grad_norm: float
    lr: float


class Learner:
    """Holds ``current`` (trained, and ``old`` before the first update of a step) and, where KL is asked for, frozen ``ref``."""

    def __init__(self, config: RunConfig):
        self._config = config
        settings = config.learner
        self.engine = MegatronEngine(
            config.model,
            config.layout,
            settings.optimizer,
            total_optimizer_steps=config.steps * settings.minibatches,
            logprob_chunk_tokens=settings.logprob_chunk_tokens,
            recompute=settings.recompute,
            seed=config.seed,
            timeout_s=config.launch.collective_timeout_s,
        )
        self._reference = None
        if config.kl.coefficient > 0:
            self._reference = MegatronEngine(
                config.model,
                config.layout,
                None,
                total_optimizer_steps=1,
                logprob_chunk_tokens=settings.logprob_chunk_tokens,
                recompute="none",
                seed=config.seed,
                timeout_s=config.launch.collective_timeout_s,
            )
        self.groups = self.engine.groups
        self.version = 0
        """Of the weights: +1 with each published update."""

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def receive(self, groups: Sequence[Group] | None) -> StepBatch:
        """Rank 0 has the groups, the others pass None; each gets its balanced share and the scalars of the whole step."""
        shares = [None] * self.groups.world_size
        if groups is not None:
            by_dp_rank = split_groups(
                groups,
                num_minibatches=self._config.learner.minibatches,
                dp_size=self.groups.dp_size,
                token_budget=self._config.learner.token_budget,
            )
            shares = [by_dp_rank[dp_rank] for dp_rank in self._dp_rank_of_each_rank()]
        mine: list = [None]
        dist.scatter_object_list(mine, shares if self.is_first_rank else None, src=0)
        return step_batch(mine[0])

    def _dp_rank_of_each_rank(self) -> list[int]:
        # Megatron's order is tp innermost, then dp; tensor-parallel siblings need the same share.
        return [rank // self.groups.tp_size for rank in range(self.groups.world_size)]

    def score(self, batch: StepBatch) -> StepBatch:
        """``old`` (and ``ref``) log-probs of the sampled tokens, without gradient, by the very micro-batches of the update."""
        microbatches = batch.microbatches()
        temperature = self._config.rollout.temperature
        old = [logprobs_T for logprobs_T, _ in self.engine.logprobs(microbatches, temperature=temperature)]
        ref = None
        if self._reference is not None:
            ref = [logprobs_T for logprobs_T, _ in self._reference.logprobs(microbatches, temperature=temperature)]
        return batch.with_scores(old_logprobs_T=old, ref_logprobs_T=ref)

    def update(self, minibatch: Sequence[PackedBatch]) -> Update:
        """Forward, loss, backward, clip, step. Raises NonFiniteError before any weight has changed."""
        config = self._config

        def loss_fn(microbatch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor):
            return policy_loss(
                microbatch, logprobs_T, entropy_T, objective=config.objective, kl=config.kl, entropy=config.entropy
            )

        result = self.engine.update(minibatch, loss_fn, temperature=config.rollout.temperature)
        metrics = merge_over_ranks(merge_metrics(result.outputs), self.groups.dp_group)
        return Update(metrics=metrics, grad_norm=result.grad_norm, lr=result.lr)

    def logprobs_of(self, prompt: Sequence[int], completions: Sequence[Completion], *, temperature: float) -> list[list[float]]:
        """The learner's own log-probs of each completion's tokens; every rank calls it with the same arguments."""
        token_ids = [[*prompt, *c.token_ids] for c in completions]
        masks = [[False] * len(prompt) + [True] * len(c.token_ids) for c in completions]
        batch = pack_sequences(
            token_ids=token_ids,
            response_masks=masks,
            rollout_logprobs=[[0.0] * len(ids) for ids in token_ids],
            sequence_ids=range(len(token_ids)),
        )
        logprobs_T, _ = self.engine.logprobs([batch], temperature=temperature)[0]
        per_sequence = torch.split(logprobs_T.cpu(), batch.lengths)
        return [row[-len(c.token_ids) :].tolist() for row, c in zip(per_sequence, completions, strict=True)]

    def save_hf(self, folder: Path) -> None:
        self.engine.save_hf(folder)
