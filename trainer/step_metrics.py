"""The metrics of a whole step, from every part of it. ``metric_names.py`` has their meanings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from rollout.records import FinishReason, Group
from rollout.sampling.messages import EvaluationResult, SamplingStats
from trainer.algorithm.mismatch import SampledGap, negative_fraction, reward_metrics
from trainer.algorithm.segments import count_per_sequence, sum_per_sequence
from trainer.algorithm.value_loss import explained_variance
from trainer.batch.step_batch import StepBatch
from trainer.learner import Update
from trainer.ranks.metrics import Metric, merge_metrics, merge_over_ranks, values
from trainer.sampling import Sampled
from trainer.weight_sync import SyncResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    recorded: dict[str, float]
    """By name; complete on rank 0 alone."""
    sampled_gap: SampledGap | None
    """On every rank: ``WeightSync.check_samples`` may end the run by it. None where no token was compared."""


def step_metrics(
    *,
    sampled: Sampled,
    batch: StepBatch,
    measured: Sequence[Mapping[str, Metric]],
    updates: Sequence[Update],
    sync: SyncResult | None,
    evaluation: EvaluationResult | None,
    seconds: Mapping[str, float],
    mode: Literal["decoupled", "bypass"],
    group: dist.ProcessGroup | None,
) -> StepMetrics:
    """The metrics of a whole step; every rank of ``group`` takes part.

    measured: of this rank's share, before the update. sync: None where it failed.
    """
    before = merge_over_ranks(merge_metrics([*measured, reward_metrics_of(batch, updates, mode)]), group)
    merged = merge_metrics([before, *(u.metrics for u in updates)])
    numbers = values(merged) | first_and_sign(updates, mode)
    explained = explained_variance(numbers)
    numbers |= {} if explained is None else {"critic/explained_variance": explained}
    if sync is not None:
        numbers |= {"sync/version": sync.version, "sync/bytes": sync.bytes}
        numbers |= {} if sync.max_logprob_gap is None else {"sync/max_logprob_gap": sync.max_logprob_gap}
    numbers |= {f"time/{part}": value for part, value in seconds.items()}
    if sampled.groups is not None and sampled.stats is not None:
        numbers |= sample_metrics(sampled.groups) | sampling_metrics(sampled.stats)
        numbers["throughput/tokens_per_s"] = numbers["response/tokens"] / seconds["step"]
    if evaluation is not None:
        numbers |= evaluation_metrics(evaluation)
    return StepMetrics(recorded=numbers, sampled_gap=SampledGap.of(merged))


def reward_metrics_of(batch: StepBatch, updates: Sequence[Update], mode: str) -> dict[str, Metric]:
    """The mean reward as sampled, and as the learner's policy would have it: ``old``, or in bypass mode each
    minibatch's ``current``.

    Nothing of the kind in a critic's warm-up, where the policy may not have seen the batch at all.
    """
    packed, train_T = batch.packed, batch.packed.old_logprobs_T if mode == "decoupled" else None
    if train_T is None:
        seen = [logprobs_T for update in updates for logprobs_T in update.logprobs]
        if not seen:
            return {}
        train_T = batch.scattered(seen)
    log_ratio_T = torch.where(packed.response_mask_T, train_T - packed.rollout_logprobs_T, 0.0)
    return reward_metrics(
        batch.rewards_S[packed.sequence_ids_S],
        sum_per_sequence(log_ratio_T.to(torch.float64), packed.cu_seqlens),
        count_per_sequence(packed.response_mask_T, packed.cu_seqlens) > 0,
    )


def first_and_sign(updates: Sequence[Update], mode: str) -> dict[str, float]:
    """Of the policy's updates: how often k1 of KL(old || current) was negative and, in decoupled mode, the
    ratio's extremes on the first minibatch, where current is old and every ratio 1."""
    policy = [values(u.metrics) for u in updates if "policy/ppo_kl" in u.metrics]
    if not policy:
        return {}
    names = ("ratio_max", "ratio_min") if mode == "decoupled" else ()
    first = {
        f"policy/first_{name}": policy[0][f"policy/{name}"] for name in names if f"policy/{name}" in policy[0]
    }
    estimates = [found["policy/ppo_kl"] for found in policy if "policy/ppo_kl" in found]
    return first | values({"policy/ppo_kl_negative_fraction": negative_fraction(estimates)})


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and responses, as sampled. A part of the reward is averaged over the samples that have it: one
    whose reward failed has not (``reward/failed`` counts them)."""
    samples = [t for g in groups for t in g.trajectories]
    rewards = [t.reward for t in samples]
    lengths = [sum(t.response_mask) for t in samples]
    mean = sum(rewards) / len(rewards)
    no_signal = sum(len({t.reward for t in g.trajectories}) == 1 for g in groups)
    names = dict.fromkeys(name for t in samples for name in t.reward_parts)
    parts = {name: [t.reward_parts[name] for t in samples if name in t.reward_parts] for name in names}
    return {f"reward/part/{name}": sum(found) / len(found) for name, found in parts.items()} | {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "response/tokens": sum(lengths),
        "response/truncated_fraction": sum(t.finish_reason == FinishReason.LENGTH for t in samples)
        / len(samples),
        "groups/no_signal_fraction": no_signal / len(groups),
    }


def sampling_metrics(stats: SamplingStats) -> dict[str, float]:
    return {
        "reward/failed": stats.failed_rewards,
        "reward/failed_fraction": stats.failed_rewards / max(stats.scored, 1),
        "sampling/requests": stats.requests,
        "sampling/retries": stats.retries,
        "sampling/reward_retries": stats.reward_retries,
        "sampling/resampled_groups": stats.resampled_groups,
        "sampling/filled_groups": stats.filled_groups,
        "sampling/seconds": stats.seconds,
    }


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    return {
        "eval/accuracy": result.accuracy,
        "eval/reward_mean": result.reward_mean,
        "eval/count": result.count,
        "eval/length_mean": result.length_mean,
        "eval/truncated_fraction": result.truncated_fraction,
    } | ({} if result.accuracy_error is None else {"eval/accuracy_error": result.accuracy_error})
