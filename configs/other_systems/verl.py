"""Translates verl's ``rollout_correction`` block (``roll.py``: ROLL's).

rho = pi_train / pi_rollout, as in the schema.

verl changed the meaning of its bounds. Up to December 2025, ``rollout_rs: token | sequence | geometric``
keeps what has lower <= rho <= upper at that level. Since then, ``token_k1``, ``seq_sum_k1`` and
``seq_mean_k1`` bound the sum or mean of -log rho by the logarithms of the same numbers, which keeps lower <=
1 / rho <= upper, that is 1 / upper <= rho <= 1 / lower. Both are read, each with its own meaning. The
defaults are those of verl's YAML (``rollout_is: null``), from which a block is pasted, not those of its Python
class. One difference remains: verl's newer rules bound each token's log-ratio to +-20, ours bound the sum.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from configs.errors import did_you_mean
from configs.other_systems.block import TWO_BOUNDS, ForeignBlock, shown
from configs.reading.yaml_values import show
from configs.schema.correction import (
    CorrectionConfig,
    DivergenceRule,
    ImportanceWeight,
    Level,
    NoWeight,
    RatioRule,
    RejectionRule,
)

VERL_KEYS = (
    "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold",
    "rollout_rs_threshold_lower", "rollout_token_veto_threshold", "bypass_mode", "loss_type",
    "use_policy_gradient",
)  # fmt: skip

_OLD_RULES: dict[str, Level] = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
_RATIO_RULES: dict[str, Level] = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_DIVERGENCES: dict[str, tuple[Any, Any]] = {
    f"{prefix}_{kind}": (kind, reduce)
    for prefix, reduce in (("token", "token"), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max"))
    for kind in ("k2", "k3")
}
_NEW_RULES = [*_RATIO_RULES, *_DIVERGENCES]
REJECTED_TOKENS = "rejected tokens"
_NO_THRESHOLD = "rollout_rs needs a threshold; verl has no default for it"

_TOKEN, _SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
_GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP, _GRADIENT = ({"bypass_mode": True, "loss_type": loss} for loss in ("ppo_clip", "reinforce"))

VERL_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "decoupled_geo_rs_token_tis": _TOKEN | _GEOMETRIC,
    "decoupled_geo_rs_seq_tis": _SEQUENCE | _GEOMETRIC,
    "decoupled_k3_rs_token_tis": _TOKEN | _K3,
    "decoupled_k3_rs_seq_tis": _SEQUENCE | _K3,
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": _CLIP | _GEOMETRIC,
    "bypass_ppo_clip_k3_rs": _CLIP | _K3,
    "bypass_pg_is": _GRADIENT | _SEQUENCE,
    "bypass_pg_geo_rs": _GRADIENT | _GEOMETRIC,
    "bypass_pg_geo_rs_token_tis": _GRADIENT | _TOKEN | _GEOMETRIC,
    "bypass_pg_geo_rs_seq_tis": _GRADIENT | _SEQUENCE | _GEOMETRIC,
})  # fmt: skip
"""verl's presets since December 2025 under names that Tandem's presets do not have, as verl's blocks.

Their geometric rules have no veto, and bound 1 / rho. verl's earlier presets, after which Tandem's are named
(``decoupled_geo_rs``), had a veto and bounded rho."""


def from_verl(block: Mapping[str, Any]) -> tuple[CorrectionConfig, list[str]]:
    """(the correction that verl's ``rollout_correction:`` block asks for, a note on the meaning of each key).

    block: keys of the version of November 2025 or of later ones, also mixed. ``rollout_rs`` and
    ``rollout_rs_threshold`` may be text with commas, as in verl, or lists.
    Raises ConfigError with every key that cannot be honoured; ``Problem.field`` is the key.
    """
    read = ForeignBlock(block, "verl block", VERL_KEYS)
    bypass = read.flag("bypass_mode")
    gradient = _verl_gradient(read, bypass)
    weighs = not bypass or gradient
    weight = _verl_weight(read, weighs)
    if weight.level != "none" and weight.normalise and bypass:
        error = "in bypass mode a weight is known only in the forward pass of its own micro-batch, and its mean over the step is unknown"
        read.refuse("rollout_is_batch_normalize", error, "set it to false, or bypass_mode to false")
    reject = _verl_rules(read)
    veto = read.veto("rollout_token_veto_threshold", None)
    if veto is not None:
        read.say(("rollout_token_veto_threshold",), f"veto: {show(veto)}")
    if not weighs and (veto is not None or _OLD_RULES.keys() & map(str, read.listed("rollout_rs"))):
        read.notes.append(
            "rejection: verl of November 2025 leaves it out in bypass mode with PPO's loss; Tandem rejects, as later versions of verl do"
        )
    if bypass and reject:
        read.notes.append(
            f"{REJECTED_TOKENS}: Tandem averages over the kept ones; verl may count all in bypass mode; for that set denominator: all"
        )
    mode = "bypass" if bypass else "decoupled"
    read.say(("bypass_mode",), f"mode: {mode}", first=True)
    read.raise_problems()
    loss = "policy_gradient" if gradient else "objective"
    return CorrectionConfig(mode=mode, loss=loss, weight=weight, reject=tuple(reject), veto=veto), read.notes


def _verl_gradient(read: ForeignBlock, bypass: bool) -> bool:
    """Whether the loss is a policy gradient."""
    old = read.flag("use_policy_gradient", None)
    new = read.choice("loss_type", ("ppo_clip", "reinforce"), None)
    if old is not None and new is not None and old != (new == "reinforce"):
        read.refuse("use_policy_gradient", f"contradicts loss_type: {new}", "keep one of the two")
        return False
    gradient = new == "reinforce" or bool(old)
    keys = ("loss_type", "use_policy_gradient")
    if gradient and not bypass:
        fix = "set bypass_mode: true; or remove it, and set the run's `objective.type: policy_gradient` for one in decoupled mode"
        read.refuse(keys[0] if new else keys[1], "verl takes this loss only in bypass mode", fix)
    elif bypass:
        read.say(keys, f"loss: {'policy_gradient' if gradient else 'objective'}")
    else:
        read.unused(keys, "bypass_mode is false, so the loss is the run's objective")
    return gradient


def _verl_weight(read: ForeignBlock, weighs: bool) -> NoWeight | ImportanceWeight:
    level: Level | None = read.choice("rollout_is", ("token", "sequence"), None)
    keys = ("rollout_is_threshold", "rollout_is_batch_normalize")
    text = read.get("rollout_is_threshold", 2.0)
    bounds = None if text is None else read.bounds("rollout_is_threshold", text)
    normalise = read.flag("rollout_is_batch_normalize")
    if not weighs:
        why = "in bypass mode with PPO's loss the ratio is current / rollout already, so there is no other weight"
        read.unused(("rollout_is", *keys), why)
        return NoWeight()
    if level is None:
        if "rollout_is" not in read.block:
            read.notes.append("rollout_is is left out -> weight: {level: none}, the default of verl's YAML")
        else:
            read.say(("rollout_is",), "weight: {level: none}")
        read.unused(keys, "rollout_is is null")
        return NoWeight()
    if bounds is None:
        meaning = "weight: {level: none}, since verl has no weights without a threshold"
        read.say(("rollout_is", "rollout_is_threshold"), meaning)
        read.unused(("rollout_is_batch_normalize",), "there are no weights")
        return NoWeight()
    lower, upper = bounds
    if lower is None:
        weight = ImportanceWeight(level=level, upper=upper, normalise=normalise)
    else:
        weight = ImportanceWeight(level=level, bound="mask", lower=lower, upper=upper, normalise=normalise)
    read.say(("rollout_is", *keys), f"weight: {shown(weight)}")
    return weight


def _verl_rules(read: ForeignBlock) -> list[RejectionRule]:
    names = list(dict.fromkeys(map(str, read.listed("rollout_rs"))))
    keys = ("rollout_rs_threshold", "rollout_rs_threshold_lower")
    if not names:
        read.unused(keys, "rollout_rs is null")
        return []
    if len(names) == 1 and names[0] in _OLD_RULES:
        return _verl_old_rule(read, _OLD_RULES[names[0]])
    unknown = [name for name in names if name not in _NEW_RULES]
    if unknown:
        known = [*_NEW_RULES, *_OLD_RULES] if len(names) == 1 else _NEW_RULES
        read.refuse("rollout_rs", f"{unknown[0]} is not a rule", did_you_mean(unknown[0], known, "rules"))
        return []
    if read.get("rollout_rs_threshold_lower") is not None:
        error = f"goes only with the older rules ({', '.join(_OLD_RULES)})"
        read.refuse("rollout_rs_threshold_lower", error, TWO_BOUNDS)
    texts = read.listed("rollout_rs_threshold")
    if len(texts) not in (1, len(names)):
        counts = f"{len(texts)} thresholds, but the number of rules is {len(names)}"
        fix = f"give one for all rules or one for each; for two bounds of one rule, {TWO_BOUNDS}"
        read.refuse("rollout_rs_threshold", counts if texts else _NO_THRESHOLD, fix)
        return []
    pairs = zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True)
    return [rule for name, text in pairs if (rule := _verl_new_rule(read, name, text)) is not None]


def _verl_old_rule(read: ForeignBlock, level: Level) -> list[RejectionRule]:
    """``rollout_rs: token | sequence | geometric``: lower <= rho <= upper."""
    text = read.get("rollout_rs_threshold")
    if text is None or isinstance(text, str):
        error = _NO_THRESHOLD if text is None else f"must be a number for rollout_rs: {level}"
        fix = "write the upper bound, without quotes; the lower one is rollout_rs_threshold_lower"
        read.refuse("rollout_rs_threshold", error, fix)
        return []
    upper = read.number("rollout_rs_threshold", None)
    lower = read.number("rollout_rs_threshold_lower", None, zero=True)
    if upper is None:
        return []
    lower = 1 / upper if lower is None else lower
    if not read.ordered("rollout_rs_threshold", lower, upper):
        return []
    rule = RatioRule(level=level, lower=lower, upper=upper)
    read.say(("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower"), f"reject: {shown(rule)}")
    return [rule]


def _verl_new_rule(read: ForeignBlock, name: str, text: Any) -> RejectionRule | None:
    key = "rollout_rs_threshold"
    bounds = read.bounds(key, text)
    if bounds is None:
        return None
    lower, upper = bounds
    setting = f"rollout_rs: {name}, {key}: {show(text)}"
    if name in _DIVERGENCES:
        if lower is not None:
            read.refuse(key, f"{name} has only an upper bound", f"write one number for it: {upper}")
            return None
        kind, reduce = _DIVERGENCES[name]
        rule = DivergenceRule(rule=kind, reduce=reduce, upper=upper)
        read.notes.append(f"{setting} -> reject: {shown(rule)}")
        return rule
    lower = 1 / upper if lower is None else lower
    if not read.ordered(key, lower, upper):
        return None
    rule = RatioRule(level=_RATIO_RULES[name], lower=1 / upper, upper=1 / lower)
    inverted = f"verl bounds 1 / rho there, {show(lower)} <= 1 / rho <= {show(upper)}; the same set, with bounds on rho"
    read.notes.append(f"{setting} -> reject: {shown(rule)} ({inverted})")
    return rule
