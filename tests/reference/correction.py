"""Correction by plain loops over sequences, straight from the formulas; Python floats."""

import math

BOUND = 20.0


def runs(mask: list[bool]) -> list[list[int]]:
    """Places of each stretch of consecutive valid tokens."""
    found: list[list[int]] = []
    for place, valid in enumerate(mask):
        if valid and (place == 0 or not mask[place - 1]):
            found.append([])
        if valid:
            found[-1].append(place)
    return found


def level_log_ratios(log_ratios: list[float], mask: list[bool], level: str) -> list[float]:
    """Of each token of one sequence; 0 off the mask."""
    valid = [place for place, is_valid in enumerate(mask) if is_valid]
    out = [0.0] * len(mask)
    if level == "token":
        groups = [[place] for place in valid]
    elif level in ("segment", "segment_geometric"):
        groups = runs(mask)
    else:
        groups = [valid] if valid else []
    for group in groups:
        total = math.fsum(log_ratios[place] for place in group)
        for place in group:
            out[place] = total / len(group) if level in ("geometric", "segment_geometric") else total
    return out


def ratio(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -BOUND), BOUND))


def weight(rho: float, bound: str, lower: float | None, upper: float | None) -> float:
    if bound == "truncate":
        return min(rho, upper)
    if bound == "clip":
        return min(max(rho, lower), upper)
    if bound == "mask":
        return rho if lower <= rho <= upper else 0.0
    return rho


def weights(
    sequences: list[tuple[list[float], list[bool]]], *, level: str, bound: str, lower, upper, normalise: bool
) -> list[list[float]]:
    """Per sequence of (log-ratios, mask), the weight of each token; 0 off the mask."""
    if level == "none":
        return [[1.0 if valid else 0.0 for valid in mask] for _, mask in sequences]
    found = [
        [
            weight(ratio(x), bound, lower, upper) if valid else 0.0
            for x, valid in zip(level_log_ratios(lr, mask, level), mask, strict=True)
        ]
        for lr, mask in sequences
    ]
    if not normalise:
        return found
    parts: list[float] = []
    for row, (_, mask) in zip(found, sequences, strict=True):
        valid = [place for place, is_valid in enumerate(mask) if is_valid]
        if level == "token":
            parts += [row[place] for place in valid]
        elif level in ("segment", "segment_geometric"):
            parts += [row[run[0]] for run in runs(mask)]
        elif valid:
            parts.append(row[valid[0]])
    mean = math.fsum(parts) / len(parts) if parts and math.fsum(parts) > 0 else 1.0
    return [[x / mean for x in row] for row in found]


def keeps(log_ratios: list[float], mask: list[bool], rule: dict) -> list[bool]:
    """Which tokens of one sequence a rule keeps; False off the mask."""
    valid = [place for place, is_valid in enumerate(mask) if is_valid]
    if rule["rule"] == "ratio":
        at_level = level_log_ratios(log_ratios, mask, rule["level"])
        low = -math.inf if rule["lower"] == 0 else math.log(rule["lower"])
        passed = [low <= min(max(x, -BOUND), BOUND) <= math.log(rule["upper"]) for x in at_level]
    else:
        bounded = [min(max(x, -BOUND), BOUND) for x in log_ratios]
        d = [x * x / 2 if rule["rule"] == "k2" else math.expm1(x) - x for x in bounded]
        if rule["reduce"] == "token":
            passed = [x <= rule["upper"] for x in d]
        else:
            mine = [d[place] for place in valid] or [0.0]
            value = {"sum": math.fsum(mine), "mean": math.fsum(mine) / len(mine), "max": max(mine)}[
                rule["reduce"]
            ]
            passed = [value <= rule["upper"]] * len(mask)
    return [p and m for p, m in zip(passed, mask, strict=True)]


def keeps_by_difference(train: list[float], rollout: list[float], mask: list[bool], rule: dict) -> list[bool]:
    """Which tokens of one sequence a rule on p_train - p_rollout keeps; False off the mask."""
    valid = [place for place, is_valid in enumerate(mask) if is_valid]
    dp = [math.exp(t) - math.exp(r) for t, r in zip(train, rollout, strict=True)]
    groups = {"token": [[place] for place in valid], "segment_mean": runs(mask)}.get(rule["reduce"], [valid])
    kept = [False] * len(mask)
    for group in groups:
        total = math.fsum(dp[place] for place in group)
        value = total if rule["reduce"] in ("token", "sum") else total / max(len(group), 1)
        for place in group:
            kept[place] = rule["lower"] <= value <= rule["upper"]
    return kept


def survives_veto(log_ratios: list[float], mask: list[bool], threshold: float) -> list[bool]:
    dead = any(valid and x < math.log(threshold) for x, valid in zip(log_ratios, mask, strict=True))
    return [valid and not dead for valid in mask]
