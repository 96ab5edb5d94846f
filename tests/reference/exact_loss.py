"""The loss of a step by its definitions, from log-probs to one number, in 50 digits. No derivative is written
down: gradients are difference quotients of that number, so that neither autograd nor a formula of ours has a
part in them.

A sequence is a list of ``Token``. Advantages, rollout and old are constants; weights and rejection are
constants of the loss too.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal, getcontext
from typing import NamedTuple

getcontext().prec = 50
STEP = Decimal("1e-15")
"""Of the difference quotient, whose error is of the order of its square."""


class Token(NamedTuple):
    rollout: Decimal
    old: Decimal
    current: Decimal
    advantage: Decimal
    valid: bool


Sequence_ = Sequence[Token]
Numbers = list[list[Decimal]]


def stretches(tokens: Sequence_, level: str) -> list[list[int]]:
    """The places whose log-ratios are put together."""
    valid = [i for i, token in enumerate(tokens) if token.valid]
    if level == "token":
        return [[i] for i in valid]
    if not level.startswith("segment"):
        return [valid] if valid else []
    starts = [i for i in valid if i == 0 or not tokens[i - 1].valid]
    return [
        [i for i in valid if start <= i and all(tokens[j].valid for j in range(start, i))] for start in starts
    ]


def put_together(tokens: Sequence_, x: Sequence[Decimal], level: str) -> list[Decimal]:
    """Sums, or means where the level is geometric, of each token's stretch; 0 off the mask."""
    out = [Decimal(0)] * len(tokens)
    for places in stretches(tokens, level):
        total = sum(x[i] for i in places)
        for i in places:
            out[i] = total / len(places) if level.endswith("geometric") else total
    return out


def weight(rho: Decimal, *, bound: str, lower: Decimal | None, upper: Decimal | None) -> Decimal:
    if bound == "mask":
        return rho if lower <= rho <= upper else Decimal(0)
    if bound in ("truncate", "clip") and rho > upper:
        return upper
    return lower if bound == "clip" and rho < lower else rho


def weights_and_kept(
    step: Sequence[Sequence_], train: str, weighs: dict | None, rules: Sequence[dict]
) -> tuple[Numbers, list[list[bool]]]:
    """Of each token, against the policy ``train`` ("old" or "current").

    weighs: level, bound, lower, upper; None for weights of one. rules: kind ("ratio" or "difference"), level,
    lower, upper.
    """
    all_weights, all_kept = [], []
    for tokens in step:
        log_rho = [getattr(token, train) - token.rollout for token in tokens]
        change = [getattr(token, train).exp() - token.rollout.exp() for token in tokens]
        row = [Decimal(1)] * len(tokens)
        if weighs is not None:
            bounds = {key: weighs[key] for key in ("bound", "lower", "upper")}
            row = [weight(x.exp(), **bounds) for x in put_together(tokens, log_rho, weighs["level"])]
        kept = [token.valid for token in tokens]
        for rule in rules:
            x = put_together(tokens, log_rho if rule["kind"] == "ratio" else change, rule["level"])
            values = [value.exp() for value in x] if rule["kind"] == "ratio" else x
            kept = [
                k and rule["lower"] <= value <= rule["upper"] for k, value in zip(kept, values, strict=True)
            ]
        all_weights.append(row)
        all_kept.append(kept)
    return all_weights, all_kept


def ppo(
    token: Token, current: Decimal, *, clip_low: Decimal, clip_high: Decimal, dual_clip: Decimal
) -> Decimal:
    ratio = (current - token.old).exp()
    held = min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = max(-ratio * token.advantage, -held * token.advantage)
    return min(loss, -dual_clip * token.advantage) if token.advantage < 0 else loss


def reinforce(token: Token, current: Decimal) -> Decimal:
    return -token.advantage * current


def share(
    step: Sequence[Sequence_], kept: list[list[bool]], row: int, *, mode: str, denominator: str
) -> Decimal:
    """What a kept token of a sequence counts in the mean."""
    counted = kept if denominator == "kept" else [[token.valid for token in tokens] for tokens in step]
    counts = [sum(flags) for flags in counted]
    if mode == "token_mean":
        return 1 / Decimal(sum(counts))
    return 1 / (Decimal(sum(count > 0 for count in counts)) * counts[row])


def loss_and_gradient(
    step: Sequence[Sequence_],
    weights: Numbers,
    kept: list[list[bool]],
    objective: Callable[[Token, Decimal], Decimal],
    **mean: str,
) -> tuple[Decimal, Numbers]:
    """The mean of objective times weight over kept tokens, and its derivative by each token's current
    log-prob."""
    loss, gradient = Decimal(0), []
    for row, tokens in enumerate(step):
        slopes = [Decimal(0)] * len(tokens)
        for i, token in enumerate(tokens):
            if kept[row][i]:
                factor = weights[row][i] * share(step, kept, row, **mean)
                loss += objective(token, token.current) * factor
                ahead, behind = objective(token, token.current + STEP), objective(token, token.current - STEP)
                slopes[i] = (ahead - behind) / (2 * STEP) * factor
        gradient.append(slopes)
    return loss, gradient
