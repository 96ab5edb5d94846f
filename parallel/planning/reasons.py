"""The reason for the rank of each pair of layouts, as text."""

import math

from parallel.planning.measured import by_rule
from parallel.planning.memory import size_text
from parallel.planning.planner import Plan
from parallel.planning.time import StepTime, seconds_text


def reasons(plans: list[Plan]) -> list[str]:
    """The reason for each plan's rank: the merits of the first, for the others the advantage of the one before."""
    return [_merits_text(p) if i == 0 else _difference_text(plans[i - 1], p) for i, p in enumerate(plans)]


def _merits_text(plan: Plan) -> str:
    free = _free_text(plan) if plan.free >= 0 else _cache_text(plan)
    time = "" if plan.time is None else f"; {seconds_text(plan.time.total)} s a step"
    return f"{_mismatch_text(plan)}{time}; {free}; {_traffic_text(plan)}"


def _free_text(plan: Plan) -> str:
    """Of the fuller side, by its name."""
    side, free = min(plan.free_by_side.items(), key=lambda item: item[1])
    return f"{free:.0%} free {side}"


def _traffic_text(plan: Plan) -> str:
    return f"collectives of {size_text(plan.traffic.total)}"


def _cache_text(plan: Plan) -> str:
    """The size of a cache that is too small for all samples in flight."""
    return f"a cache holds {plan.held} responses at full length, {math.floor(100 * (1 + plan.rollout_free))}% of the samples in flight"


def _mismatch_text(plan: Plan) -> str:
    ratio, has_sp = by_rule(plan.pair)
    same = f"same TP {plan.rollout_tp} on both sides" if ratio == 1 else f"TP sizes {ratio:g} times apart"
    text = f"{same}, {'with' if has_sp else 'no'} SP"
    return text if plan.measured is None else f"measured mismatch {plan.measured:.3g} ({text})"


def _difference_text(better: Plan, worse: Plan) -> str:
    if better.has_few != worse.has_few:
        return f"servers hardly used: {_cache_text(worse)}"
    if better.mismatch_key != worse.mismatch_key:
        return f"more mismatch expected{_source_text(better, worse)}: {_mismatch_text(worse)}"
    if better.time is not None and worse.time is not None and better.shown_seconds != worse.shown_seconds:
        return f"slower: {_slower_text(better.time, worse.time)}"
    if better.uneven != worse.uneven:
        return f"GPUs divided less evenly: {worse.learner.world_size} for the learner, {worse.rollout_gpus} for servers"
    if better.free_tenths != worse.free_tenths and worse.free < 0:
        return f"less room: {_cache_text(worse)}"
    if better.free_tenths != worse.free_tenths:
        return f"less memory free: {_free_text(worse)}"
    if better.traffic.total == worse.traffic.total:
        return "equal in all of this; ordered by name"
    return f"more communication: {_traffic_text(worse)}"


def _slower_text(better: StepTime, worse: StepTime) -> str:
    """The seconds, and the part of the step that takes most of the difference."""
    parts, before = worse.shares(), better.shares()
    name = max(parts, key=lambda part: parts[part] - before[part])
    now, then = seconds_text(parts[name]), seconds_text(before[name])
    return f"{seconds_text(worse.total)} s a step" + (f", {name} {now} for {then}" if now != then else "")


def _source_text(better: Plan, worse: Plan) -> str:
    """Whether table or rule puts one plan before the other."""
    if better.expected == worse.expected:
        if better.measured is not None and worse.measured is not None:
            return " by rule, measured the same within the errors"
        return "" if worse.expected == math.inf else " by rule"
    return "" if worse.measured is not None else " by rule (this is not in the measured table)"
