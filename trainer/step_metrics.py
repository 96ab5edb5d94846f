"""Everything that is tracked of a step, by name. Names are ``part/quantity``; the report and the console line read them."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from rollout.records import FinishReason, Group
from rollout.sampler import EvaluationResult, SamplingStats
from trainer.correction import Correction
from trainer.learner import Update
from trainer.metrics import merge_metrics, merge_over_ranks, values
from trainer.mismatch import mismatch_metrics
from trainer.sampling import Sampled
from trainer.step_batch import StepBatch
from trainer.weight_sync import SyncResult


def step_metrics(
    *,
    sampled: Sampled,
    batch: StepBatch,
    correction: Correction,
    updates: Sequence[Update],
    sync: SyncResult,
    evaluation: EvaluationResult | None,
    seconds: Mapping[str, float],
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Plain numbers of a whole step; every rank of ``group`` takes part, the result is complete on rank 0."""
    packed = batch.packed
    mismatch = mismatch_metrics(packed.old_logprobs_T, packed.rollout_logprobs_T, packed.response_mask_T)
    gap_and_weights = merge_over_ranks(merge_metrics([mismatch, correction.metrics]), group)
    found = values(gap_and_weights) | values(merge_metrics(u.metrics for u in updates))
    found |= {"optim/grad_norm": max(u.grad_norm for u in updates), "optim/lr": updates[-1].lr}
    found |= {"sync/version": sync.version, "sync/bytes": sync.bytes, "sync/max_logprob_gap": sync.max_logprob_gap}
    found |= {f"time/{part}": value for part, value in seconds.items()}
    if sampled.groups is not None:
        found |= sample_metrics(sampled.groups) | sampling_metrics(sampled.stats)
        found["throughput/tokens_per_s"] = found["response/tokens"] / seconds["step"]
    if evaluation is not None:
        found |= evaluation_metrics(evaluation)
    return found


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and responses, as sampled."""
    samples = [t for g in groups for t in g.trajectories]
    rewards = [t.reward for t in samples]
    lengths = [sum(t.response_mask) for t in samples]
    mean = sum(rewards) / len(rewards)
    no_signal = sum(len({t.reward for t in g.trajectories}) == 1 for g in groups)
    return {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "response/tokens": sum(lengths),
        "response/truncated_fraction": sum(t.finish_reason == FinishReason.LENGTH for t in samples) / len(samples),
        "groups/no_signal_fraction": no_signal / len(groups),
    }


def sampling_metrics(stats: SamplingStats) -> dict[str, float]:
    return {
        "reward/failed": stats.failed_rewards,
        "sampling/requests": stats.requests,
        "sampling/retries": stats.retries,
        "sampling/seconds": stats.seconds,
    }


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    return {"eval/accuracy": result.accuracy, "eval/count": result.count, "eval/length_mean": result.length_mean}
