"""Advantages by plain loops over sequences, straight from the formulas; Python floats.

A step is a list of ``Sample``; every function that returns one list per sample gives 0 off the mask.
"""

import math
import statistics
from dataclasses import dataclass

from configs.schema.objective import AdvantageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    group: int
    score: float
    mask: list[bool]
    penalties: list[float]
    parts: list[float]
    values: list[float]


def grpo(rewards: list[float], groups: list[int], normalize_by_std: bool) -> list[float]:
    def one(reward: float, members: list[float]) -> float:
        centred = reward - statistics.fmean(members)
        return centred / (statistics.stdev(members) + 1e-6) if normalize_by_std else centred

    return _by_group(rewards, groups, one)


WEIGHTS = [0.5, 2.0]
"""Of the parts of a sample's reward."""


def gdpo(samples: list[Sample], groups: list[int]) -> list[float]:
    of_parts = [grpo([s.parts[k] for s in samples], groups, True) for k in range(len(WEIGHTS))]
    sums = [
        math.fsum(w * a for w, a in zip(WEIGHTS, row, strict=True)) for row in zip(*of_parts, strict=True)
    ]
    counted = [x for x, sample in zip(sums, samples, strict=True) if sample.group >= 0]
    mean = statistics.fmean(counted) if counted else 0.0
    variance = statistics.variance(counted) if len(counted) > 1 else 0.0
    return [
        (x - mean) / math.sqrt(variance + 1e-8) if g >= 0 else 0.0 for x, g in zip(sums, groups, strict=True)
    ]


def rloo(rewards: list[float], groups: list[int]) -> list[float]:
    out = []
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        siblings = [
            r
            for other, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if g == group and other != place
        ]
        out.append(reward - statistics.fmean(siblings) if siblings else reward)
    return out


def opo(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [(r, n) for r, n, g in zip(rewards, lengths, groups, strict=True) if g == group]
        weight = sum(n for _, n in members)
        if len(members) == 1:
            out.append(reward)
        else:
            out.append(reward - sum(n * r for r, n in members) / weight if weight else 0.0)
    return out


def token_rewards(sample: Sample) -> list[float]:
    places = _valid(sample)
    out = [0.0] * len(sample.mask)
    for place in places:
        out[place] = -sample.penalties[place]
    if places:
        out[places[-1]] += sample.score
    return out


def discounted_returns(sample: Sample, gamma: float) -> list[float]:
    """Each from its definition as a sum over what follows."""
    rewards, places = token_rewards(sample), _valid(sample)
    out = [0.0] * len(sample.mask)
    for n, place in enumerate(places):
        out[place] = math.fsum(gamma**k * rewards[later] for k, later in enumerate(places[n:]))
    return out


def gae(sample: Sample, gamma: float, lam: float) -> list[float]:
    rewards, places = token_rewards(sample), _valid(sample)
    values = [sample.values[place] for place in places] + [0.0]
    errors = [rewards[place] + gamma * values[n + 1] - values[n] for n, place in enumerate(places)]
    out = [0.0] * len(sample.mask)
    for n, place in enumerate(places):
        out[place] = math.fsum((gamma * lam) ** k * error for k, error in enumerate(errors[n:]))
    return out


def whiten(rows: list[list[float]], samples: list[Sample]) -> list[list[float]]:
    valid = [row[place] for row, sample in zip(rows, samples, strict=True) for place in _valid(sample)]
    mean = statistics.fmean(valid) if valid else 0.0
    variance = statistics.variance(valid) if len(valid) > 1 else 0.0
    return [
        [
            (x - mean) / math.sqrt(variance + 1e-8) if is_valid else 0.0
            for x, is_valid in zip(row, sample.mask, strict=True)
        ]
        for row, sample in zip(rows, samples, strict=True)
    ]


def advantages(samples: list[Sample], config: AdvantageConfig) -> list[list[float]]:
    groups = [s.group for s in samples]
    shaped = [s.score - math.fsum(s.penalties[place] for place in _valid(s)) for s in samples]

    def to_tokens(per_sample: list[float]) -> list[list[float]]:
        return [
            [a if is_valid else 0.0 for is_valid in s.mask] for a, s in zip(per_sample, samples, strict=True)
        ]

    if config.type == "grpo":
        return to_tokens(grpo(shaped, groups, config.normalize_by_std))
    if config.type == "gdpo":
        return to_tokens(gdpo(samples, groups))
    if config.type == "rloo":
        return to_tokens(rloo(shaped, groups))
    if config.type == "opo":
        return to_tokens(opo(shaped, groups, [len(_valid(s)) for s in samples]))
    if config.type == "reinforce_pp_baseline":
        return whiten(to_tokens(grpo(shaped, groups, False)), samples)
    if config.type == "reinforce_pp":
        return whiten([discounted_returns(s, config.gamma) for s in samples], samples)
    rows = [gae(s, config.gamma, config.lam) for s in samples]
    return whiten(rows, samples) if config.whiten else rows


def _valid(sample: Sample) -> list[int]:
    return [place for place, is_valid in enumerate(sample.mask) if is_valid]


def _by_group(rewards: list[float], groups: list[int], one) -> list[float]:
    """one(reward, rewards of its group); a group of one keeps its reward, equal rewards give zeros."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1:
            out.append(reward)
        else:
            out.append(0.0 if len(set(members)) == 1 else one(reward, members))
    return out
