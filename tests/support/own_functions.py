"""Objectives, advantages and weights as a user might name them: built-in ones, and ones that break their contract."""

import time

import torch

from trainer.algorithm import advantages, objectives
from trainer.algorithm.correction import bounded_weights
from trainer.algorithm.kl import bounded


def clipped(current_logprobs_T, old_logprobs_T, advantages_T, **settings):
    result = objectives.clipped(current_logprobs_T, old_logprobs_T, advantages_T, **settings)
    return result.loss_T, {"ratio": result.ratio_T, "clipped": result.clipped_T}


def gspo(current_logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens, clip_low, clip_high):
    given = (current_logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens)
    return objectives.gspo(*given, clip_low=clip_low, clip_high=clip_high).loss_T, {"is_kept": mask_T}


def grpo(rewards_S, group_ids_S, normalize_by_std):
    found_S = advantages.grpo(rewards_S, group_ids_S, normalize_by_std=normalize_by_std)
    return found_S, {"is_positive": found_S > 0}


def opo(rewards_S, group_ids_S, lengths_S):
    return advantages.opo(rewards_S, group_ids_S, lengths_S)


def truncate(log_ratio_N, upper):
    weights_N = bounded_weights(bounded(log_ratio_N).exp(), "truncate", lower=None, upper=upper)
    return weights_N, {"above": weights_N == upper}


def mask(log_ratio_N, lower, upper):
    return bounded_weights(bounded(log_ratio_N).exp(), "mask", lower=lower, upper=upper)


def segments(log_ratio_N, bounds_S, segment_bounds):
    """The share of a token's response that its turn is, as a weight."""
    turn_N, response_N = (
        bounds.diff().repeat_interleave(bounds.diff()) for bounds in (segment_bounds, bounds_S)
    )
    return (turn_N / response_N).to(log_ratio_N)


# ------------------------------------------------------------------------------- broken objectives

LEARNED = torch.ones((), requires_grad=True)


def whitens(current, old, advantage):
    return -(advantage - advantage.mean()) * current


def sums_over_the_batch_in_its_gradient(current, old, advantage):
    return -advantage * current + 0.1 * (current.sum() - current.sum().detach())


def detaches(current, old, advantage):
    return -advantage * current.detach()


def sums(current, old, advantage):
    return (-advantage * current).sum()


def changes(current, old, advantage):
    advantage -= 1
    return -advantage * current


def writes_to_old(current, old, advantage):
    old.zero_()
    return -advantage * current


def overflows(current, old, advantage):
    return -advantage * (current - old).exp()


def divides_by_a_count(current, old, advantage, mask_T):
    return -advantage * current * mask_T.sum() / mask_T.sum()


def learns(current, old, advantage):
    return -advantage * current * LEARNED


def draws(current, old, advantage):
    return -advantage * current * torch.rand_like(current)


def widens(current, old, advantage):
    return (-advantage * current).double()


def returns_a_number(current, old, advantage):
    return 1.0


def names_a_metric_badly(current, old, advantage):
    return -advantage * current, {"a/b": current}


def numbers_a_metric(current, old, advantage):
    return -advantage * current, {1: current}


def lists_its_metrics(current, old, advantage):
    return -advantage * current, [current]


def returns_three(current, old, advantage):
    return -advantage * current, {}, current


def sums_a_metric(current, old, advantage):
    return -advantage * current, {"sum": current.sum()}


def leaves(current, old, advantage):
    raise SystemExit(3)


def ignores(current, old, advantage):
    return 0.0 * current


def hangs(current, old, advantage):
    time.sleep(600)


# ------------------------------------------------------------------- broken advantages and weights


def by_place(rewards_S, group_ids_S):
    return rewards_S - rewards_S[0]


def by_number(rewards_S, group_ids_S):
    return rewards_S * group_ids_S


def by_count(rewards_S, group_ids_S):
    return rewards_S / group_ids_S.bincount()[group_ids_S]


def by_std(rewards_S, group_ids_S):
    centred_S = advantages.grpo(rewards_S, group_ids_S, normalize_by_std=False)
    deviations_S = centred_S.clone()
    for group in group_ids_S.unique():
        is_here_S = group_ids_S == group
        deviations_S[is_here_S] = rewards_S[is_here_S].std(correction=0)
    return centred_S / deviations_S


def with_gradient(rewards_S, group_ids_S):
    return rewards_S * LEARNED


def learned(log_ratio_N):
    return bounded(log_ratio_N).exp() * LEARNED


def negative(log_ratio_N):
    return bounded(log_ratio_N)


def unbounded(log_ratio_N):
    return log_ratio_N.exp()


def normalised(log_ratio_N):
    weights_N = bounded(log_ratio_N).exp()
    return weights_N / weights_N.mean() if len(weights_N) else weights_N
