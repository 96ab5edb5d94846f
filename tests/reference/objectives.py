"""Policy objectives, KL and the whole policy loss by plain loops over sequences and tokens, straight from the
formulas; Python floats.

An objective returns (loss, d loss / d log pi_current) of each token, except ``gmpo``, which has one loss per
sequence.
"""

import math
from typing import NamedTuple

BOUND = 20.0


class Token(NamedTuple):
    current: float
    old: float
    advantage: float
    weight: float = 1.0
    counts: bool = True
    """On the mask and not rejected."""


def bounded_ratio(token: Token) -> tuple[float, float]:
    """(r, d r / d log pi_current)."""
    log_ratio = token.current - token.old
    ratio = math.exp(min(max(log_ratio, -BOUND), BOUND))
    return ratio, ratio if abs(log_ratio) <= BOUND else 0.0


def surrogate(ratio: float, slope: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    plain, held = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    return (held, 0.0) if held > plain else (plain, -slope * advantage)


def clipped(
    sequence: list[Token], *, clip_low: float, clip_high: float, dual_clip: float | None
) -> list[tuple[float, float]]:
    found = []
    for token in sequence:
        loss, slope = surrogate(*bounded_ratio(token), token.advantage, clip_low, clip_high)
        if dual_clip is not None and token.advantage < 0 and loss > -dual_clip * token.advantage:
            loss, slope = -dual_clip * token.advantage, 0.0
        found.append((loss, slope))
    return found


def gspo(sequence: list[Token], *, clip_low: float, clip_high: float) -> list[tuple[float, float]]:
    counted = [token for token in sequence if token.counts]
    log_s = math.fsum(token.current - token.old for token in counted) / max(len(counted), 1)
    s = math.exp(min(log_s, 10.0))
    return [
        surrogate(s, s if log_s <= 10.0 else 0.0, token.advantage, clip_low, clip_high) for token in sequence
    ]


def gmpo(sequence: list[Token], *, clip_low: float, clip_high: float) -> tuple[float, list[float]]:
    """(loss of the sequence, its gradient per token), correction weights included."""
    counted = [token for token in sequence if token.counts]
    if not counted:
        return 0.0, [0.0] * len(sequence)
    product, weight, slopes = 1.0, 1.0, []
    for token in sequence:
        log_ratio = min(max(token.current - token.old, -BOUND), BOUND)
        sign = (token.advantage > 0) - (token.advantage < 0)
        least = min(sign * log_ratio, sign * min(max(log_ratio, -clip_low), clip_high))
        inside = least == sign * log_ratio and abs(token.current - token.old) <= BOUND
        slopes.append(float(sign * sign * inside * token.counts))
        if token.counts:
            product *= math.exp(sign * least) ** (1 / len(counted))
            weight *= token.weight ** (1 / len(counted))
    advantage = math.fsum(token.advantage for token in counted) / len(counted)
    loss = -advantage * product * weight
    return loss, [loss * slope / len(counted) for slope in slopes]


def cispo(sequence: list[Token], *, clip_low: float, clip_high: float) -> list[tuple[float, float]]:
    weights = [min(max(bounded_ratio(token)[0], 1 - clip_low), 1 + clip_high) for token in sequence]
    return [(-w * t.advantage * t.current, -w * t.advantage) for w, t in zip(weights, sequence, strict=True)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def sapo(
    sequence: list[Token], *, temperature_positive: float, temperature_negative: float
) -> list[tuple[float, float]]:
    found = []
    for token in sequence:
        ratio, slope = bounded_ratio(token)
        tau = temperature_positive if token.advantage > 0 else temperature_negative
        gate = sigmoid(tau * (ratio - 1))
        found.append((-4 / tau * gate * token.advantage, -4 * gate * (1 - gate) * slope * token.advantage))
    return found


def dppo(
    sequence: list[Token], *, max_decrease: float, max_increase: float, ratio_max: float
) -> list[tuple[float, float]]:
    found = []
    for token in sequence:
        moved = math.exp(token.current) - math.exp(token.old)
        within = moved <= max_increase if token.advantage > 0 else moved >= -max_decrease
        slope = -min(bounded_ratio(token)[0], ratio_max) * token.advantage * within
        found.append((slope * token.current, slope))
    return found


def policy_gradient(sequence: list[Token]) -> list[tuple[float, float]]:
    return [(-token.advantage * token.current, -token.advantage) for token in sequence]


OBJECTIVES = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "policy_gradient": policy_gradient,
}


def policy_term(
    sequences: list[list[Token]], objective: str, *, mode: str, constant: int | None = None, **parameters
) -> tuple[float, list[list[float]]]:
    """(loss, gradient per token), averaged over the tokens that count."""
    counts = [sum(token.counts for token in sequence) for sequence in sequences]
    num_tokens, num_sequences = max(sum(counts), 1), max(sum(n > 0 for n in counts), 1)
    losses, gradients = [], []
    for sequence, n in zip(sequences, counts, strict=True):
        if objective == "gmpo":
            assert mode == "sequence_mean_token_mean"
            loss, slopes = gmpo(sequence, **parameters)
            losses.append(loss / num_sequences)
            gradients.append([slope / num_sequences for slope in slopes])
            continue
        share = {
            "token_mean": 1 / num_tokens,
            "sequence_mean_token_mean": 1 / (num_sequences * max(n, 1)),
            "sequence_mean_token_sum": 1 / num_sequences,
            "sequence_mean_token_sum_over_constant": 1 / (num_sequences * (constant or 1)),
        }[mode]
        row = []
        for token, (loss, slope) in zip(sequence, OBJECTIVES[objective](sequence, **parameters), strict=True):
            losses.append(loss * token.weight * share if token.counts else 0.0)
            row.append(slope * token.weight * share if token.counts else 0.0)
        gradients.append(row)
    return math.fsum(losses), gradients


def kl(current: float, ref: float, estimator: str) -> tuple[float, float]:
    """(estimate, its derivative in log pi_current) of one token."""
    if estimator.endswith("_straight_through"):
        return kl(current, ref, estimator.removesuffix("_straight_through"))[0], current - ref
    d = current - ref
    if estimator == "k1":
        return d, 1.0
    if estimator == "k2":
        return d * d / 2, d
    if estimator == "abs":
        return abs(d), float((d > 0) - (d < 0))
    inverse = math.exp(min(max(-d, -BOUND), BOUND))
    value = inverse + min(max(d, -BOUND), BOUND) - 1
    return (value, 1 - inverse) if value <= 10 else (10.0, 0.0)
