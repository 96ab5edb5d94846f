"""Translates ROLL's correction blocks: the ``infer_*`` options of its first releases, and the later
``train_infer_correction``.

rho = pi_train / pi_rollout, as in the schema; ROLL's bounds act on it. Defaults of the ``infer_*`` options
come from ROLL's documentation, defaults of the newer block from its code. The newer block has these levels:

    token, sequence       as ours: rho_t, or the product over the response
    geometric, segment    the geometric mean over the response, or over its segment: ``geometric``, ``segment_geometric``

Its ``diff_*`` bound p_train - p_rollout of a token, its sum (sequence) or its mean over the response
(geometric) or segment. Two small differences remain. ROLL does not bound log-ratios to +-20. If it filters
in the loss (``denominator: all``) and averages by sequence, it divides a sequence's sum by its kept tokens.
"""

from collections.abc import Mapping
from typing import Any, Literal

from configs.other_systems.block import ForeignBlock, is_off, shown
from configs.reading.yaml_values import show
from configs.schema.correction import (
    CorrectionConfig,
    DifferenceRule,
    ImportanceWeight,
    Level,
    NoWeight,
    RatioRule,
    RejectionRule,
)

ROLL_KEYS = (
    "infer_correction", "infer_is_mode", "infer_is_threshold_min", "infer_is_threshold_max",
    "enable_token_reject", "infer_token_mask_threshold_min", "infer_token_mask_threshold_max",
    "enable_catastrophic_reject", "infer_catastrophic_threshold", "enable_seq_reject",
    "infer_seq_mask_threshold_min", "infer_seq_mask_threshold_max",
)  # fmt: skip
NEW_BLOCK, RECOMPUTE = "train_infer_correction", "enable_old_logprobs_recompute"
NEW_ROLL_KEYS = (NEW_BLOCK, RECOMPUTE)
_WEIGHT_KEYS = ("enabled", "weight_type", "upper_bound", "detach")
_RATIO_KEYS = ("ratio_enabled", "ratio_low", "ratio_high")
_DIFFERENCE_KEYS = ("diff_enabled", "diff_low", "diff_high")
_LEVELS: dict[str, Level] = {
    "token": "token",
    "segment": "segment_geometric",
    "geometric": "geometric",
    "sequence": "sequence",
}
_REDUCTIONS: dict[str, Literal["token", "sum", "mean", "segment_mean"]] = {
    "token": "token",
    "segment": "segment_mean",
    "geometric": "mean",
    "sequence": "sum",
}


def from_roll(block: Mapping[str, Any]) -> tuple[CorrectionConfig, list[str]]:
    """(the correction that ROLL's options ask for, a note on the meaning of each option).

    block: ``infer_*`` options, or ``train_infer_correction`` and, beside it,
    ``enable_old_logprobs_recompute``. Raises ConfigError with every key that cannot be honoured;
    ``Problem.field`` is the key, dotted.
    """
    read = ForeignBlock(block, "ROLL block", (*ROLL_KEYS, *NEW_ROLL_KEYS))
    if NEW_BLOCK in block:
        for key in block.keys() & set(ROLL_KEYS):
            error = f"is from ROLL's first releases, {NEW_BLOCK} from later ones"
            read.refuse(key, error, "keep one of the two")
        return _from_new(read)
    read.unused((RECOMPUTE,), f"it goes with {NEW_BLOCK}")
    return _from_options(read)


def _from_options(read: ForeignBlock) -> tuple[CorrectionConfig, list[str]]:
    on = read.flag("infer_correction")
    weight = _roll_weight(read)
    reject = _roll_rules(read)
    veto = _roll_veto(read)
    read.raise_problems()
    if not on:
        is_set = "infer_correction" in read.block
        setting = ": false" if is_set else " is left out, and false by default"
        note = (
            f"infer_correction{setting} -> nothing is corrected, only measured; the other keys have no effect"
        )
        return CorrectionConfig(weight=NoWeight()), [note]
    read.say(("infer_correction",), "mode: decoupled", first=True)
    return CorrectionConfig(weight=weight, reject=tuple(reject), veto=veto), read.notes


# -------------------------------------------------------------------------------------------------------
# train_infer_correction


def _from_new(read: ForeignBlock) -> tuple[CorrectionConfig, list[str]]:
    recompute = read.flag(RECOMPUTE)
    inner = read.inside(NEW_BLOCK, ("is_weight", "filters"))
    weight = _new_weight(inner.inside("is_weight", _WEIGHT_KEYS))
    filters = inner.all_inside("filters", ("enabled", "agg_type", *_RATIO_KEYS, *_DIFFERENCE_KEYS))
    reject = [rule for block in filters for rule in _new_rules(block)]
    read.raise_problems()
    denominator = "all" if reject and not recompute else "kept"
    if reject:
        before, after = "before it counts tokens", "in the loss, after it has counted tokens"
        is_set = RECOMPUTE in read.block
        setting = f": {show(recompute)}" if is_set else " is left out, and false by default"
        filters_at = before if recompute else after
        read.notes.append(
            f"{RECOMPUTE}{setting} -> denominator: {denominator}; ROLL then filters {filters_at}"
        )
    else:
        read.unused((RECOMPUTE,), "the learner says when old log-probs are recomputed (learner.old_logprobs)")
    return CorrectionConfig(weight=weight, reject=tuple(reject), denominator=denominator), read.notes


def _new_weight(read: ForeignBlock) -> NoWeight | ImportanceWeight:
    on, level = read.flag("enabled"), read.choice("weight_type", tuple(_LEVELS), "token")
    upper = None if read.get("upper_bound", 1.2) is None else read.number("upper_bound", 1.2)
    if read.flag("detach", True) is False and on:
        read.refuse("detach", "weights carry no gradient here", "set it to true, or leave it out")
    if not on or level is None:
        read.say(("enabled",), "weight: {level: none}")
        read.unused(_WEIGHT_KEYS[1:], "is_weight.enabled is false")
        return NoWeight()
    bound = "none" if upper is None else "truncate"
    weight = ImportanceWeight(level=_LEVELS[level], bound=bound, upper=upper)
    read.say(_WEIGHT_KEYS, f"weight: {shown(weight)}")
    return weight


def _new_rules(read: ForeignBlock) -> list[RejectionRule]:
    on, level = read.flag("enabled"), read.choice("agg_type", tuple(_LEVELS), "token")
    by_ratio, by_difference = read.flag("ratio_enabled", True), read.flag("diff_enabled")
    low, high = read.number("ratio_low", 0.8, zero=True), read.number("ratio_high", 1.2)
    least, greatest = read.any_number("diff_low", -0.2), read.any_number("diff_high", 0.2)
    if not on or level is None:
        read.unused(tuple(read.block), "the filter's `enabled` is false")
        return []
    rules: list[RejectionRule] = []
    if not by_ratio:
        read.unused(_RATIO_KEYS[1:], "ratio_enabled is false")
    elif low is not None and high is not None and read.ordered("ratio_low", low, high):
        rules.append(RatioRule(level=_LEVELS[level], lower=low, upper=high))
    if not by_difference:
        read.unused(_DIFFERENCE_KEYS[1:], "diff_enabled is false")
    elif least < 0 < greatest:
        rules.append(
            DifferenceRule(rule="difference", reduce=_REDUCTIONS[level], lower=least, upper=greatest)
        )
    else:
        error = f"[{show(least)}, {show(greatest)}] would reject what the two policies agree on (p_train = p_rollout)"
        read.refuse("diff_low", error, "give a lower bound below 0 and an upper one above 0")
    read.say(
        tuple(read.block), f"reject: {', '.join(map(shown, rules)) or 'nothing, both of its parts are off'}"
    )
    return rules


# ---------------------------------------------------------------------------------------------------------------
# infer_* options


def _roll_weight(read: ForeignBlock) -> NoWeight | ImportanceWeight:
    level: Level | Literal["none"] | None = None
    if not is_off(read.get("infer_is_mode", "token")):
        level = read.choice("infer_is_mode", ("token", "sequence", "none"), "token")
    keys = ("infer_is_threshold_min", "infer_is_threshold_max")
    lower, upper = read.number(keys[0], 0.0, zero=True), read.number(keys[1], 2.0)
    if level is None or level == "none":
        read.say(("infer_is_mode",), "weight: {level: none}")
        read.unused(keys, "infer_is_mode is none")
        return NoWeight()
    if lower is None or upper is None or not read.ordered(keys[0], lower, upper):
        return NoWeight()
    bound = "clip" if lower else "truncate"
    weight = ImportanceWeight(level=level, bound=bound, upper=upper, lower=lower or None)
    if "infer_is_mode" not in read.block:
        read.notes.append(
            "infer_is_mode is left out -> token, the default that ROLL's documentation states; its code has had none"
        )
    read.say(("infer_is_mode", *keys), f"weight: {shown(weight)}")
    return weight


def _roll_rules(read: ForeignBlock) -> list[RejectionRule]:
    per_token = "token" if read.flag("enable_token_reject") else None
    per_sequence = None
    if not is_off(read.get("enable_seq_reject")):
        per_sequence = read.choice("enable_seq_reject", ("sequence", "geometric", "none"), None)
    rules = [
        _roll_rule(read, "enable_token_reject", per_token, "infer_token_mask_threshold", 0.0, 2.0),
        _roll_rule(read, "enable_seq_reject", per_sequence, "infer_seq_mask_threshold", 0.1, 10.0),
    ]
    return [rule for rule in rules if rule is not None]


def _roll_veto(read: ForeignBlock) -> float | None:
    switch, key = "enable_catastrophic_reject", "infer_catastrophic_threshold"
    on, threshold = read.flag(switch), read.veto(key, 1e-4)
    if not on:
        read.unused((key,), f"{switch} is off")
        return None
    read.say((switch, key), f"veto: {show(threshold)}")
    return threshold


def _roll_rule(
    read: ForeignBlock,
    switch: str,
    level: Level | Literal["none"] | None,
    key: str,
    lower: float,
    upper: float,
) -> RatioRule | None:
    """The rule at ``level``; None if it is off. ``lower`` and ``upper`` are ROLL's defaults."""
    keys = (f"{key}_min", f"{key}_max")
    given_lower, given_upper = read.number(keys[0], lower, zero=True), read.number(keys[1], upper)
    if level is None or level == "none":
        read.unused(keys, f"{switch} is off")
        return None
    if given_lower is None or given_upper is None or not read.ordered(keys[0], given_lower, given_upper):
        return None
    rule = RatioRule(level=level, lower=given_lower, upper=given_upper)
    read.say((switch, *keys), f"reject: {shown(rule)}")
    return rule
