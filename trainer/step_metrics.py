"""The metrics of a whole step, from every part of it. ``metric_names.py`` has their meanings."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.packing import PackedBatch
from rollout.records import FinishReason, Group, Status, Trajectory, different_rewards
from rollout.sampling.messages import EvaluationResult, SamplingStats
from trainer.algorithm.mismatch import SampledGap, negative_fraction, reward_metrics
from trainer.algorithm.segments import count_per_sequence, sum_per_sequence
from trainer.algorithm.value_loss import explained_variance
from trainer.batch.step_batch import StepBatch
from trainer.learner import Update
from trainer.ranks.metrics import Metric, merge_metrics, merge_over_ranks, values
from trainer.ranks.totals import Total
from trainer.sampling import Sampled
from trainer.weight_sync import SyncResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    recorded: dict[str, float]
    """Plain numbers by name; complete only on rank 0."""
    sampled_gap: SampledGap | None
    """On every rank: ``WeightSync.check_samples`` may end the run because of it. None if no token was
    compared."""


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

    measured: metrics of this rank's share. sync: None if it failed.
    """
    of_shares = merge_over_ranks(merge_metrics([*measured, what_came_along(batch.packed)]), group)
    merged = merge_metrics([of_shares, *(u.metrics for u in updates)])
    numbers = values(merged) | first_and_sign(updates, mode)
    if "advantage/std" in merged:
        # Without a value if all responses are masked. The alarm must hear of it too.
        numbers.setdefault("advantage/std", 0.0)
    explained = explained_variance(numbers)
    numbers |= {} if explained is None else {"critic/explained_variance": explained}
    if sync is not None:
        numbers |= {"sync/version": sync.version, "sync/bytes": sync.bytes, "sync/servers": sync.servers}
        numbers |= {} if sync.max_logprob_gap is None else {"sync/max_logprob_gap": sync.max_logprob_gap}
    numbers |= {f"time/{part}": value for part, value in seconds.items()}
    if sampled.groups is not None and sampled.stats is not None:
        numbers |= sample_metrics(sampled.groups) | sampling_metrics(sampled.stats)
        numbers["throughput/tokens_per_s"] = numbers["response/tokens"] / seconds["step"]
    if evaluation is not None:
        numbers |= evaluation_metrics(evaluation)
    return StepMetrics(recorded=numbers, sampled_gap=SampledGap.of(merged))


def step_rewards(batch: StepBatch, learner_T: Tensor | None, total: Total) -> dict[str, Metric]:
    """The mean reward of the samples, and its estimate under the learner's policy (``learner_logprobs``).
    Empty in a critic's warm-up, in which the policy may not have scored the batch.

    An episode that forked counts once, with the log-ratio of all its sequences, on the rank that has the first."""
    if learner_T is None:
        return {}
    packed = batch.packed
    log_ratio_T = torch.where(packed.response_mask_T, learner_T - packed.rollout_logprobs_T, 0.0)
    rewards_S = batch.rewards_S[packed.sequence_ids_S]
    log_ratio_S = sum_per_sequence(log_ratio_T.to(torch.float64), packed.cu_seqlens)
    tokens_S = count_per_sequence(packed.response_mask_T, packed.cu_seqlens)
    if batch.episode_ids_S is not None:
        log_ratio_E, tokens_E = batch.per_episode(log_ratio_S, total), batch.per_episode(tokens_S, total)
        episode_S = batch.episodes_of()
        is_first_S = torch.isin(packed.sequence_ids_S, batch.first_sequences())
        log_ratio_S, tokens_S = log_ratio_E[episode_S], torch.where(is_first_S, tokens_E[episode_S], 0.0)
    return reward_metrics(rewards_S, log_ratio_S, tokens_S > 0)


def what_came_along(packed: PackedBatch) -> dict[str, Metric]:
    """Shares of response tokens whose experts are replayed, and numbers of ids that the sampler kept, if
    there are any."""
    metrics, mask_T = dict[str, Metric](), packed.response_mask_T
    if packed.is_replayed_T is not None:
        metrics["mismatch/replayed_fraction"] = Metric.mean(packed.is_replayed_T, mask_T)
    if packed.num_kept_T is not None:
        metrics["mismatch/kept_ids"] = Metric.mean(packed.num_kept_T, mask_T)
    return metrics


def first_and_sign(updates: Sequence[Update], mode: str) -> dict[str, float]:
    """Share of the policy's updates with a negative k1 of KL(old || current). In decoupled mode also the ratio's
    extremes on the first minibatch, where current is old and every ratio 1."""
    policy = [values(update.metrics) for update in updates]
    names = {"policy/ratio_max", "policy/ratio_min"} & policy[0].keys() if mode == "decoupled" else ()
    first = {name.replace("/", "/first_"): policy[0][name] for name in names}
    estimates = [metrics["policy/ppo_kl"] for metrics in policy if "policy/ppo_kl" in metrics]
    return first | values({"policy/ppo_kl_negative_fraction": negative_fraction(estimates)})


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and responses of the groups that the step trains on. A part of the reward is averaged over the samples that
    have it."""
    sequences = [t for g in groups for t in g.trajectories]
    samples = [t for t in sequences if t.branch == 0]
    rewards = [t.reward for t in samples if t.reward is not None]
    rewards_of_groups = [different_rewards(g.trajectories) for g in groups]
    lengths = Counter[tuple[int, int]]()  # without episodes that failed before their first turn
    for t in filter(attrgetter("turns"), sequences):
        lengths[t.group_id, t.sibling_id] += int(t.response_mask.sum())
    parts: dict[str, list[float]] = defaultdict(list)
    for name, value in (part for t in samples for part in t.reward_parts.items()):
        parts[name].append(value)
    numbers = {f"reward/part/{name}": fmean(scores) for name, scores in parts.items()} | {
        "response/tokens": lengths.total(),
        "groups/no_signal_fraction": fmean(len(scores) < 2 for scores in rewards_of_groups),
    }
    if lengths:
        truncated = sum(t.finish_reason == FinishReason.LENGTH for t in samples)
        numbers |= {
            "response/length_mean": fmean(lengths.values()),
            "response/length_max": max(lengths.values()),
            "response/truncated_fraction": truncated / len(lengths),
        }
    if rewards:
        std = torch.tensor(rewards, dtype=torch.float64).std(correction=0).item()
        numbers |= {"reward/mean": fmean(rewards), "reward/std": std}
    return numbers | turn_metrics(sequences)


def turn_metrics(sequences: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, and how the samples ended. ``Learner.receive`` has checked every turn against the sampled
    tokens."""
    samples = [t for t in sequences if t.branch == 0]
    by_sample = Counter[tuple[int, int]]()
    for t in sequences:
        by_sample[t.group_id, t.sibling_id] += len(t.turns)
    turns = by_sample.values()
    observed = [
        int((~t.response_mask[t.turns[0].start : t.turns[-1].end]).sum()) if t.turns else 0 for t in sequences
    ]
    ended = {
        f"episode/{status}_fraction": fmean(t.status == status for t in samples)
        for status in (Status.TOKEN_LIMIT, Status.TURN_LIMIT, Status.TIME_LIMIT, Status.FAILED)
    }
    siblings, scored = (
        Counter(t.group_id for t in samples if not is_scored or t.reward is not None)
        for is_scored in (False, True)
    )
    lone = sum(scored[group] == 1 < count for group, count in siblings.items())
    continued = [turn for t in sequences for turn in t.turns[1:]]
    if continued:
        cached = sum(turn.cached_tokens for turn in continued) / sum(turn.start for turn in continued)
        ended["episode/cached_fraction"] = cached
    return ended | {
        "episode/sequences_mean": len(sequences) / len(samples),
        "episode/turns_mean": fmean(turns),
        "episode/turns_max": max(turns),
        "episode/turns_checked": sum(turns),
        "episode/retracted_turns": sum(turn.num_retractions > 0 for t in sequences for turn in t.turns),
        "episode/observed_tokens": sum(observed),
        "episode/not_scored_fraction": fmean(t.reward is None for t in samples),
        "episode/lone_fraction": lone / len(samples),
    }


def sampling_metrics(stats: SamplingStats) -> dict[str, float]:
    before = stats.before_selection
    selected = {} if before is None else {
        "reward/before_selection": before.reward_mean,
        "groups/no_signal_before_selection": before.no_signal_fraction,
        "response/tokens_before_selection": before.tokens,
    }  # fmt: skip
    return selected | {
        "reward/failed": stats.failed_rewards,
        "reward/failed_fraction": stats.failed_rewards / max(stats.scored, 1),
        "sampling/requests": stats.requests,
        "sampling/retries": stats.retries,
        "sampling/reward_retries": stats.reward_retries,
        "sampling/resampled_groups": stats.resampled_groups,
        "sampling/filled_groups": stats.filled_groups,
        "sampling/seconds": stats.seconds,
        "sampling/idle_s": stats.idle_s,
        "sampling/running_groups": stats.running_groups,
        "sampling/ready_groups": stats.ready_groups,
        "sampling/left_out_prompts": stats.left_out_prompts,
    }


def evaluation_metrics(result: EvaluationResult, prefix: str = "eval") -> dict[str, float]:
    numbers = {
        f"{prefix}/accuracy": result.accuracy,
        f"{prefix}/reward_mean": result.reward_mean,
        f"{prefix}/count": result.count,
        f"{prefix}/length_mean": result.length_mean,
        f"{prefix}/truncated_fraction": result.truncated_fraction,
        f"{prefix}/failed_fraction": result.failed / result.count,
    }
    numbers |= {f"{prefix}/pass_at/{k}": share for k, share in result.pass_at.items()}
    if result.accuracy_error is not None:
        numbers[f"{prefix}/accuracy_error"] = result.accuracy_error
    if result.greedy is not None:
        numbers |= evaluation_metrics(result.greedy, f"{prefix}/greedy")
    for kind, results in (("set", result.sets), ("source", result.sources)):
        for name, one in results.items():
            numbers |= evaluation_metrics(one, f"{prefix}/{kind}/{name}")
    return numbers
