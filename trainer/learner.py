"""The learner of one rank: log-probs of every policy, and one optimizer step. All ranks call it together (SPMD)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import RunConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.objective import WITHIN_GROUPS, KLConfig
from parallel.engine import MegatronEngine, ValueEngine
from parallel.engine_base import Training, UpdateResult
from parallel.megatron.lora import Lora
from parallel.packing import PackedBatch
from parallel.planning.layout import check_other_vocabulary
from rollout.records import Completion, Group
from rollout.sglang_plugin.tandem_routed_experts import wire_type
from tracing import span
from trainer.algorithm.aggregation import Counted, kept_factor
from trainer.algorithm.correction import scored_old
from trainer.algorithm.kl_reward import KLInReward
from trainer.algorithm.mismatch import routing_metrics
from trainer.algorithm.own_parts import load_own_parts
from trainer.algorithm.policy_loss import policy_loss
from trainer.batch.plan import Routing, pack_prompted
from trainer.batch.sharing_out import Share, share_out
from trainer.batch.step_batch import StepBatch, step_batch
from trainer.critic import Critic
from trainer.ranks.metrics import (
    Metric,
    Reduction,
    merge_metrics,
    merge_over_ranks,
    per_minibatch,
    scale_losses,
)
from trainer.ranks.scattering import scatter
from trainer.ranks.totals import on_all_ranks, total_over


class Scored(NamedTuple):
    """Output of a micro-batch's loss, beside its gradient."""

    metrics: dict[str, Metric]
    counted: Counted | None
    logprobs_T: Tensor
    """The policy's, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of the policy's and the critic's optimizer step on one minibatch. Metrics are the same on every
    rank."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    """The policy's log-probs before its step, [T] per micro-batch of this rank, on the CPU; empty if only the critic
    was trained."""


class Learner:
    """Holds ``current`` (which is ``old`` before the first update of a step) and, if the config asks for them,
    a frozen ``ref`` and a critic. With adapters ``ref`` is ``current`` without them, unless it is another model."""

    def __init__(self, config: RunConfig):
        self._config = config
        load_own_parts(config)
        settings = config.learner
        engine_of = partial(
            MegatronEngine,
            layout=config.layout,
            logprob_chunk_tokens=settings.logprob_chunk_tokens,
            seed=config.seed,
            timeout_s=config.launch.collective_timeout_s,
        )
        policy_steps = (config.steps - config.critic_warmup_steps) * settings.minibatches
        lora = settings.lora and Lora(config=settings.lora, served_dtype=getattr(torch, config.rollout.dtype))
        self.engine = engine_of(
            config.model,
            training=Training(
                optimizer=settings.optimizer,
                total_steps=policy_steps,
                recompute=settings.recompute,
                freeze_router=settings.freeze_router,
            ),
            pieces=config.numerics_pieces,
            lora=lora,
        )
        self._reference = None  # also if the reference is the policy without its adapters
        if config.has_reference_weights:
            teacher = config.kl.model  # no server computes it, so its numerics need not be aligned
            self._reference = engine_of(
                teacher or config.model, training=None, pieces=None if teacher else config.numerics_pieces
            )
            check_other_vocabulary("kl.model", self._reference.architecture, self.engine.architecture)
        self.critic = None if config.critic is None else Critic(config)
        self.kl_in_reward = KLInReward(config.kl)
        self.groups = self.engine.groups
        self.total = total_over(self.groups.dp_group)
        """Sums over data-parallel ranks."""
        self.version = 0
        """The version of the weights; each published update adds 1."""

    @classmethod
    def of_policy_alone(cls, config: RunConfig) -> "Learner":
        """A learner without ``ref`` and critic. It scores with ``current``, or sends it to servers."""
        return cls(config.model_copy(update={"kl": KLConfig(), "critic": None}))

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def offload(self) -> None:
        """Move all models to host memory, on all ranks together. ``restore`` must be the next call."""
        for engine in self._engines:
            engine.offload()
        dist.barrier()

    def restore(self) -> None:
        for engine in self._engines:
            engine.restore()

    @property
    def _engines(self) -> list[MegatronEngine | ValueEngine]:
        engines = (self.engine, self._reference, self.critic and self.critic.engine)
        return [engine for engine in engines if engine is not None]

    def receive(self, groups: Sequence[Group] | None) -> StepBatch:
        """This rank's balanced share of the groups, with the scalars of the whole step. Rank 0 passes the groups,
        the others None. Each rank packs its own share, and checks it against the sampled tokens.

        Raises:
            TurnsDiffer: on all ranks, if a turn differs from the sampled one.
        """
        shares = None if groups is None else self._shares_of(groups)
        # Tensor-, context- and pipeline-parallel siblings need the same share.
        share = scatter(shares, self.groups.dp_rank_of)
        newest = self.version if self._config.rollout.max_staleness else None
        share_prompts = self._shares_prompts
        return on_all_ranks(
            lambda: step_batch(share, newest=newest, routing=self._routing(), share_prompts=share_prompts)
        )

    def _shares_of(self, groups: Sequence[Group]) -> list[Share]:
        config = self._config
        return share_out(
            groups,
            num_minibatches=config.learner.minibatches,
            dp_size=self.groups.dp_size,
            token_budget=config.learner.token_budget,
            microbatch_multiple=config.layout.microbatch_multiple,
            needs_siblings=config.advantage.type in WITHIN_GROUPS,
            credits_turns=config.credits_turns,
            part_weights=config.compared_parts,
            shares_prompts=self._shares_prompts,
            parts_no_signal=config.packs_no_signal_apart,
            masks_truncated=config.learner.truncated_responses == "mask",
        )

    @property
    def _shares_prompts(self) -> bool:
        """All models get the same micro-batches: one that computes samples whole would have far more than the budget."""
        settings = self._config.learner
        all_share = all(engine.shares_prompts for engine in self._engines)
        return settings.share_prompts and settings.routing == "own" and all_share

    def _routing(self) -> Routing | None:
        """Shape and dtype of the experts that come with the samples; None if the learner does not replay
        them."""
        experts = self.engine.architecture.experts
        if self._config.learner.routing != "rollout" or experts is None:
            return None
        return Routing(
            layers=sum(experts.is_sparse),
            experts_per_token=experts.experts_per_token,
            dtype=wire_type(experts.num_experts),
        )

    def score(self, batch: StepBatch, *, before_update: bool) -> StepBatch:
        """Add ``old``, ``ref`` and values of the sampled tokens, without gradient, using the same micro-batches
        as the update.

        ``old`` stays unset if the policy's update comes next (``before_update``) and computes it in its own forward pass
        (``RunConfig.scores_old``). If episodes forked, it is always computed: an average over an episode
        needs to know which tokens are rejected, and the episode's sequences may lie on several ranks.

        With ``learner.routing: old`` the pass of ``old`` chooses the experts; ``ref`` and the update replay them.
        """
        batch = batch.with_old_of(self._config.correction)
        is_needed = self._config.scores_old or batch.episode_ids_S is not None or not before_update
        if batch.packed.old_logprobs_T is None and is_needed:
            with span("score old"):
                batch = batch.with_fields(**self._score_old(batch))
        if self._config.kl.coefficient > 0:
            with span("score ref"):
                batch = batch.with_fields(ref_logprobs_T=self._ref_logprobs(batch))
        if self.critic is not None:
            with span("score values"):
                batch = batch.with_fields(values_T=batch.scattered(self.critic.score(batch.microbatches())))
        return batch

    def _score_old(self, batch: StepBatch) -> dict[str, Tensor]:
        """The fields of a batch that come from the pass of ``old``."""
        experts = self.engine.architecture.experts
        if self._config.learner.routing != "old" or experts is None:
            return {"old_logprobs_T": self.logprobs(batch)}
        scored = self.engine.logprobs_and_experts(
            batch.microbatches(),
            temperature=self._config.rollout.temperature,
            dtype=getattr(torch, wire_type(experts.num_experts)),
        )
        return {
            "old_logprobs_T": batch.scattered([logprobs_T for logprobs_T, _ in scored]),
            "experts_TLK": batch.scattered([experts_TLK for _, experts_TLK in scored]),
            "is_replayed_T": torch.ones(batch.packed.num_tokens, dtype=torch.bool),
        }

    def _ref_logprobs(self, batch: StepBatch) -> Tensor:
        if self._reference is not None:
            if self._config.kl.model is not None:  # the policy's experts are not this model's
                batch = replace(batch, packed=replace(batch.packed, experts_TLK=None, is_replayed_T=None))
            return self._logprobs_by(self._reference, batch)
        with self.engine.without_adapters():
            return self.logprobs(batch)

    def logprobs(self, batch: StepBatch) -> Tensor:
        """Log-probs of the learner's current policy. [T], float32"""
        return self._logprobs_by(self.engine, batch)

    def _logprobs_by(self, engine: MegatronEngine, batch: StepBatch) -> Tensor:
        scored = engine.logprobs(batch.microbatches(), temperature=self._config.rollout.temperature)
        return batch.scattered(scored)

    def update(self, minibatch: Sequence[PackedBatch], *, policy: bool) -> Update:
        """Forward, loss, backward, clip, step: first the critic's, then the policy's if ``policy`` (not in the
        critic's warm-up).

        Raises NonFiniteError before any weight of that model has changed.
        """
        critic_metrics: dict[str, Metric] = {}
        if self.critic is not None:
            with span("update critic"):
                metrics, result = self.critic.update(minibatch)
            critic_metrics = per_minibatch(metrics) | _optimizer_metrics("critic", result)
        with span("update policy"):
            update = self._update_policy(minibatch) if policy else Update()
        return replace(update, metrics=update.metrics | critic_metrics)

    def _update_policy(self, minibatch: Sequence[PackedBatch]) -> Update:
        config = self._config
        loss_fn = partial(
            policy_loss,
            objective=config.policy_objective,
            correction=config.correction,
            aggregation=config.aggregation.type,
            kl=config.kl,
            entropy=config.entropy,
        )

        def keep_logprobs(batch: PackedBatch, current_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Scored]:
            loss, metrics, counted = loss_fn(batch, current_T, entropy_T)
            return loss, Scored(metrics, counted, current_T.detach().cpu())

        def scale_of(outputs: list[Scored]) -> float:
            return kept_factor((scored.counted for scored in outputs), self.total)

        # If the forward pass decides the rejection, it also decides the normaliser of the mean over kept
        # tokens.
        counts_kept = minibatch[0].importance_weights_T is None and config.correction.rejects_from_mean
        forward_only = self.have_no_gradient(minibatch)
        result = self.engine.update(
            minibatch,
            keep_logprobs,
            temperature=config.rollout.temperature,
            grad_scale=scale_of if counts_kept else None,
            forward_only=forward_only,
        )
        skipped = skipped_metrics(minibatch, forward_only) if self._config.skips_zero_gradients else {}
        merged = merge_metrics([skipped, *(scored.metrics for scored in result.outputs)])
        metrics = merge_over_ranks(merged, self.groups.dp_group)
        if counts_kept:
            metrics = scale_losses(metrics, scale_of(result.outputs))
        metrics = per_minibatch(metrics) | self._routing_metrics(result) | _optimizer_metrics("optim", result)
        return Update(metrics=metrics, logprobs=[scored.logprobs_T for scored in result.outputs])

    def have_no_gradient(self, minibatch: Sequence[PackedBatch]) -> list[bool]:
        """For each micro-batch, whether the policy's gradient is known to be zero: all its advantages are
        zero on every data-parallel rank. At least one micro-batch is not skipped, since the optimizer steps
        in any case."""
        if not self._config.skips_zero_gradients or len(minibatch) == 1:
            return [False] * len(minibatch)
        signals = [int((batch.response_mask_T & (batch.advantages_T != 0)).sum()) for batch in minibatch]
        signals_M = torch.tensor(signals, dtype=torch.float64)
        forward_only = (self.total(signals_M) == 0).tolist()
        return [False, *forward_only[1:]] if all(forward_only) else forward_only

    def _routing_metrics(self, result: UpdateResult) -> dict[str, Metric]:
        """Over all data-parallel ranks."""
        found, experts = result.differing_experts, self.engine.architecture.experts
        if found is None or experts is None:
            return {}
        metrics = routing_metrics(found.by_layer, found.tokens, experts.is_sparse)
        return merge_over_ranks(metrics, self.groups.dp_group)

    def logprobs_of(
        self, prompt: Sequence[int], completions: Sequence[Completion], *, temperature: float
    ) -> list[list[float]]:
        """The learner's log-probs of each completion's tokens. Every rank passes the same arguments."""
        token_ids = [[*prompt, *c.token_ids] for c in completions]
        batch = pack_prompted(token_ids, [len(prompt)] * len(token_ids), range(len(token_ids)))
        (logprobs_T,) = self.engine.logprobs([batch], temperature=temperature)
        per_sequence = torch.split(logprobs_T.cpu(), batch.lengths)
        return [row[-len(c.token_ids) :].tolist() for row, c in zip(per_sequence, completions, strict=True)]

    def save_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, adapters merged."""
        self.engine.save_hf(folder)

    def save_adapter(self, folder: Path) -> None:
        """Write the policy's adapters, if it has any, as a folder of ``peft``."""
        if self._config.learner.lora is not None:
            self.engine.save_adapter(folder)


def learner_logprobs(
    batch: StepBatch, updates: Sequence[Update], correction: CorrectionConfig
) -> Tensor | None:
    """``scored_old``, else each minibatch's ``current``; None if the policy scored nothing. [T] of this
    rank."""
    old_T = scored_old(batch.packed, correction)
    if old_T is not None:
        return old_T
    current = [logprobs_T for update in updates for logprobs_T in update.logprobs]
    return batch.scattered(current) if current else None


def skipped_metrics(minibatch: Sequence[PackedBatch], forward_only: Sequence[bool]) -> dict[str, Metric]:
    """The share of this rank's response tokens whose micro-batches get no backward pass."""
    tokens = [int(batch.response_mask_T.sum()) for batch in minibatch]
    skipped = sum(count for count, skips in zip(tokens, forward_only, strict=True) if skips)
    return {"policy/skipped_fraction": Metric.quotient(skipped, sum(tokens))}


def _optimizer_metrics(part: str, step: UpdateResult) -> dict[str, Metric]:
    """Gradient norm and learning rate of an update, without a value if it was skipped, and whether it was."""
    done = 0 if step.skipped else 1
    metrics = {
        f"{part}/grad_norm": Metric(reduction=Reduction.MAX, parts=(step.grad_norm,) * done),
        f"{part}/lr": Metric.quotient(step.lr, done),
    }
    return metrics | ({} if step.skipped is None else {f"{part}/skipped": Metric.sum(1 - done)})
