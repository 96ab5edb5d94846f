"""Correction blocks of other systems, read as ours: verl's ``rollout_correction`` and ROLL's ``infer_*`` options.

Nothing is dropped in silence: a key is honoured, a note says that it has no effect there either, or it is an error with its fix.
rho = pi_train / pi_rollout, as in the schema.

verl changed the meaning of its bounds. Up to December 2025, ``rollout_rs: token | sequence | geometric`` keeps what has
lower <= rho <= upper at that level. Since then, ``token_k1``, ``seq_sum_k1`` and ``seq_mean_k1`` bound the sum or mean of -log rho by the
logarithms of the same numbers, which keeps lower <= 1 / rho <= upper, that is 1 / upper <= rho <= 1 / lower. Both are read, each with its
own meaning. Defaults are those of verl's YAML (``rollout_is: null``), which a pasted block meets, and not of its Python class.
One difference is left: the newer rules bound each token's log-ratio to +-20 before summing, ours the sum.

ROLL's bounds act on rho. Defaults are those its documentation states.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from configs.errors import NOT_SET, ConfigError, Problem, did_you_mean
from configs.schema.correction import (
    CorrectionConfig,
    DivergenceRule,
    ImportanceWeight,
    NoWeight,
    RatioRule,
    RejectionRule,
)
from configs.yaml_values import show

VERL_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_mode",
    "loss_type",
    "use_policy_gradient",
)
ROLL_KEYS = (
    "infer_correction",
    "infer_is_mode",
    "infer_is_threshold_min",
    "infer_is_threshold_max",
    "enable_token_reject",
    "infer_token_mask_threshold_min",
    "infer_token_mask_threshold_max",
    "enable_catastrophic_reject",
    "infer_catastrophic_threshold",
    "enable_seq_reject",
    "infer_seq_mask_threshold_min",
    "infer_seq_mask_threshold_max",
)

_OLD_RULES = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
_RATIO_RULES = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_DIVERGENCES = {
    f"{prefix}_{kind}": (kind, reduce)
    for prefix, reduce in (("token", "token"), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max"))
    for kind in ("k2", "k3")
}
_NEW_RULES = [*_RATIO_RULES, *_DIVERGENCES]
_NO_THRESHOLD = "rollout_rs needs a threshold; verl has no default for it"
_TWO_BOUNDS = 'write both as text, lower first: "0.5_2.0"'


def from_verl(block: Mapping[str, Any]) -> tuple[CorrectionConfig, list[str]]:
    """The correction that verl's ``rollout_correction:`` block asks for, and notes on how each of its keys was understood.

    block: keys of the version of November 2025 or of those since, also mixed. ``rollout_rs`` and ``rollout_rs_threshold`` may be text with
    commas, as in verl, or lists.
    Raises ConfigError with every key that cannot be honoured; ``Problem.field`` is the key.
    """
    read = _Block(block, "verl block", VERL_KEYS)
    bypass = read.flag("bypass_mode")
    gradient = _verl_gradient(read, bypass)
    weighs = not bypass or gradient
    weight = _verl_weight(read, weighs)
    if weight.level != "none" and weight.normalise and bypass:
        error = "in bypass mode a weight is known only in the forward pass of its own micro-batch, so its mean over the step is not"
        read.refuse("rollout_is_batch_normalize", error, "set it to false, or bypass_mode to false")
    reject = _verl_rules(read)
    veto = read.veto("rollout_token_veto_threshold", None)
    if veto is not None:
        read.say(("rollout_token_veto_threshold",), f"veto: {show(veto)}")
    if not weighs and (veto is not None or _OLD_RULES.keys() & map(str, read.listed("rollout_rs"))):
        read.notes.append(
            "rejection: verl of November 2025 leaves it out in bypass mode with PPO's loss; Tandem rejects, as later versions of verl do"
        )
    mode = "bypass" if bypass else "decoupled"
    read.say(("bypass_mode",), f"mode: {mode}", first=True)
    read.raise_problems()
    loss = "policy_gradient" if gradient else "objective"
    return CorrectionConfig(mode=mode, loss=loss, weight=weight, reject=tuple(reject), veto=veto), read.notes


def from_roll(block: Mapping[str, Any]) -> tuple[CorrectionConfig, list[str]]:
    """The correction that ROLL's ``infer_*`` options ask for, and notes on how each of them was understood.

    Raises ConfigError with every key that cannot be honoured; ``Problem.field`` is the key.
    """
    read = _Block(block, "ROLL block", ROLL_KEYS)
    on = read.flag("infer_correction")
    weight = _roll_weight(read)
    reject = _roll_rules(read)
    veto = _roll_veto(read)
    read.raise_problems()
    if not on:
        said = "infer_correction: false" if "infer_correction" in block else "infer_correction is left out, and false by default"
        return CorrectionConfig(weight=NoWeight()), [f"{said} -> nothing is corrected, metrics only; the other keys rest"]
    read.say(("infer_correction",), "mode: decoupled", first=True)
    return CorrectionConfig(weight=weight, reject=tuple(reject), veto=veto), read.notes


def fix_for_foreign_key(key: str) -> str | None:
    """Where a key of another system goes that was found among ours; None for any other key."""
    if key in ("rollout_correction", *VERL_KEYS):
        return "keys of verl's rollout_correction block go under `correction: {verl: {...}}`"
    return "infer_* options of ROLL go under `correction: {roll: {...}}`" if key in ROLL_KEYS else None


# ---------------------------------------------------------------------------------------------------------------------- verl


def _verl_gradient(read: "_Block", bypass: bool) -> bool:
    """Whether the loss is a policy gradient."""
    old, new = read.flag("use_policy_gradient", None), read.choice("loss_type", ("ppo_clip", "reinforce"), None)
    if old is not None and new is not None and old != (new == "reinforce"):
        read.refuse("use_policy_gradient", f"contradicts loss_type: {new}", "keep one of the two")
        return False
    gradient = new == "reinforce" or bool(old)
    keys = ("loss_type", "use_policy_gradient")
    if gradient and not bypass:
        fix = "set bypass_mode: true; or remove it, and set the run's `objective.type: policy_gradient` for one in decoupled mode"
        read.refuse(keys[0] if new else keys[1], "verl takes this loss in bypass mode alone", fix)
    elif bypass:
        read.say(keys, f"loss: {'policy_gradient' if gradient else 'objective'}")
    else:
        read.unused(keys, "bypass_mode is false, so the loss is the run's objective")
    return gradient


def _verl_weight(read: "_Block", weighs: bool) -> NoWeight | ImportanceWeight:
    level = read.choice("rollout_is", ("token", "sequence"), None)
    keys = ("rollout_is_threshold", "rollout_is_batch_normalize")
    text = read.get("rollout_is_threshold", 2.0)
    bounds = None if text is None else read.bounds("rollout_is_threshold", text)
    normalise = read.flag("rollout_is_batch_normalize")
    if not weighs:
        read.unused(("rollout_is", *keys), "in bypass mode with PPO's loss the ratio is current / rollout already, so nothing else weighs")
        return NoWeight()
    if level is None:
        if "rollout_is" not in read.block:
            read.notes.append("rollout_is is left out -> weight: {level: none}, the default of verl's YAML")
        else:
            read.say(("rollout_is",), "weight: {level: none}")
        read.unused(keys, "rollout_is is null")
        return NoWeight()
    if bounds is None:
        read.say(("rollout_is", "rollout_is_threshold"), "weight: {level: none}, since verl weighs nothing without a threshold")
        read.unused(("rollout_is_batch_normalize",), "there are no weights")
        return NoWeight()
    lower, upper = bounds
    if lower is None:
        weight = ImportanceWeight(level=level, upper=upper, normalise=normalise)
    else:
        weight = ImportanceWeight(level=level, bound="mask", lower=lower, upper=upper, normalise=normalise)
    read.say(("rollout_is", *keys), f"weight: {_shown(weight)}")
    return weight


def _verl_rules(read: "_Block") -> list[RejectionRule]:
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
        read.refuse("rollout_rs_threshold_lower", f"goes with the older rules ({', '.join(_OLD_RULES)}) alone", _TWO_BOUNDS)
    texts = read.listed("rollout_rs_threshold")
    if len(texts) not in (1, len(names)):
        error = f"{len(texts)} thresholds, but the number of rules is {len(names)}" if texts else _NO_THRESHOLD
        read.refuse("rollout_rs_threshold", error, f"give one for all rules or one for each; for two bounds of one rule, {_TWO_BOUNDS}")
        return []
    pairs = zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True)
    return [rule for name, text in pairs if (rule := _verl_new_rule(read, name, text)) is not None]


def _verl_old_rule(read: "_Block", level: str) -> list[RejectionRule]:
    """``rollout_rs: token | sequence | geometric``: lower <= rho <= upper."""
    text = read.get("rollout_rs_threshold")
    if text is None or isinstance(text, str):
        error = _NO_THRESHOLD if text is None else f"must be a number for rollout_rs: {level}"
        read.refuse("rollout_rs_threshold", error, "write the upper bound, without quotes; the lower one is rollout_rs_threshold_lower")
        return []
    upper, lower = read.number("rollout_rs_threshold", None), read.number("rollout_rs_threshold_lower", None, zero=True)
    if upper is None:
        return []
    lower = 1 / upper if lower is None else lower
    if not read.ordered("rollout_rs_threshold", lower, upper):
        return []
    rule = RatioRule(level=level, lower=lower, upper=upper)
    read.say(("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower"), f"reject: {_shown(rule)}")
    return [rule]


def _verl_new_rule(read: "_Block", name: str, text: Any) -> RejectionRule | None:
    key = "rollout_rs_threshold"
    bounds = read.bounds(key, text)
    if bounds is None:
        return None
    lower, upper = bounds
    said = f"rollout_rs: {name}, {key}: {show(text)}"
    if name in _DIVERGENCES:
        if lower is not None:
            read.refuse(key, f"{name} has an upper bound alone", f"write one number for it: {upper}")
            return None
        kind, reduce = _DIVERGENCES[name]
        rule = DivergenceRule(rule=kind, reduce=reduce, upper=upper)
        read.notes.append(f"{said} -> reject: {_shown(rule)}")
        return rule
    lower = 1 / upper if lower is None else lower
    if not read.ordered(key, lower, upper):
        return None
    rule = RatioRule(level=_RATIO_RULES[name], lower=1 / upper, upper=1 / lower)
    inverted = f"verl bounds 1 / rho there, {show(lower)} <= 1 / rho <= {show(upper)}; the same set, with bounds on rho"
    read.notes.append(f"{said} -> reject: {_shown(rule)} ({inverted})")
    return rule


# ---------------------------------------------------------------------------------------------------------------------- ROLL


def _roll_weight(read: "_Block") -> NoWeight | ImportanceWeight:
    level = None if _is_off(read.get("infer_is_mode", "token")) else read.choice("infer_is_mode", ("token", "sequence", "none"), "token")
    keys = ("infer_is_threshold_min", "infer_is_threshold_max")
    lower, upper = read.number(keys[0], 0.0, zero=True), read.number(keys[1], 2.0)
    if level is None:
        read.say(("infer_is_mode",), "weight: {level: none}")
        read.unused(keys, "infer_is_mode is none")
        return NoWeight()
    if lower is None or upper is None or not read.ordered(keys[0], lower, upper):
        return NoWeight()
    bounds = {"bound": "clip", "lower": lower} if lower else {"bound": "truncate"}
    weight = ImportanceWeight(level=level, upper=upper, **bounds)
    if "infer_is_mode" not in read.block:
        read.notes.append("infer_is_mode is left out -> token, the default that ROLL's documentation states; its code has had none")
    read.say(("infer_is_mode", *keys), f"weight: {_shown(weight)}")
    return weight


def _roll_rules(read: "_Block") -> list[RejectionRule]:
    per_token = "token" if read.flag("enable_token_reject") else None
    of_sequence = read.get("enable_seq_reject")
    of_sequence = None if _is_off(of_sequence) else read.choice("enable_seq_reject", ("sequence", "geometric", "none"), None)
    found = [
        _roll_rule(read, "enable_token_reject", per_token, "infer_token_mask_threshold", 0.0, 2.0),
        _roll_rule(read, "enable_seq_reject", of_sequence, "infer_seq_mask_threshold", 0.1, 10.0),
    ]
    return [rule for rule in found if rule is not None]


def _roll_veto(read: "_Block") -> float | None:
    switch, key = "enable_catastrophic_reject", "infer_catastrophic_threshold"
    on, threshold = read.flag(switch), read.veto(key, 1e-4)
    if not on:
        read.unused((key,), f"{switch} is off")
        return None
    read.say((switch, key), f"veto: {show(threshold)}")
    return threshold


def _roll_rule(read: "_Block", switch: str, level: str | None, key: str, lower: float, upper: float) -> RatioRule | None:
    """The rule at ``level``, None where it is off; ``lower`` and ``upper`` are ROLL's defaults."""
    keys = (f"{key}_min", f"{key}_max")
    given_lower, given_upper = read.number(keys[0], lower, zero=True), read.number(keys[1], upper)
    if level is None:
        read.unused(keys, f"{switch} is off")
        return None
    if given_lower is None or given_upper is None or not read.ordered(keys[0], given_lower, given_upper):
        return None
    rule = RatioRule(level=level, lower=given_lower, upper=given_upper)
    read.say((switch, *keys), f"reject: {_shown(rule)}")
    return rule


# ------------------------------------------------------------------------------------------------------------ reading a block


class _Block:
    """A block that is read key by key: what is wrong with it is gathered, and what was understood."""

    def __init__(self, block: Mapping[str, Any], name: str, known: Sequence[str]):
        self.block, self.notes = block, []
        self._name, self._problems = name, []
        for key in block:
            if key not in known:
                self.refuse(key, "unknown key", did_you_mean(str(key), known, "keys of this block"))

    def refuse(self, key: str, error: str, fix: str) -> None:
        value = show(self.block[key]) if key in self.block else NOT_SET
        self._problems.append(Problem(where=self._name, field=key, value=value, error=error, fix=fix))

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self._problems)

    # ---- notes

    def say(self, keys: Sequence[str], ours: str, *, first: bool = False) -> None:
        """Notes what the keys that are set mean; nothing where none of them is."""
        given = [f"{key}: {show(self.block[key])}" for key in keys if key in self.block]
        if given:
            self.notes.insert(0 if first else len(self.notes), f"{', '.join(given)} -> {ours}")

    def unused(self, keys: Sequence[str], why: str) -> None:
        """Notes that keys have no effect, where they are set to something."""
        given = [f"{key}: {show(self.block[key])}" for key in keys if not _is_off(self.block.get(key))]
        if given:
            self.notes.append(f"{', '.join(given)} -> no effect: {why}")

    # ---- values; a wrong one is noted as a problem and read as if there were none

    def get(self, key: str, default: Any = None) -> Any:
        return self.block.get(key, default)

    def flag(self, key: str, default: bool | None = False) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(key, "must be true or false", "write true or false, without quotes")
        return default

    def choice(self, key: str, choices: Sequence[str], default: str | None) -> str | None:
        value = self.get(key, default)
        if value is None or value in choices:
            return value
        self.refuse(key, "not one of the choices", did_you_mean(str(value), choices, "choices"))
        return default

    def number(self, key: str, default: float | None, *, zero: bool = False) -> float | None:
        """A positive number, or 0 where ``zero``."""
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if _is_number(value) and (value > 0 or (zero and value == 0)):
            return float(value)
        self.refuse(key, "must be a number", f"use a number {'of at least' if zero else 'above'} 0, without quotes")
        return None

    def veto(self, key: str, default: float | None) -> float | None:
        value = self.number(key, default)
        if value is not None and value >= 1:
            self.refuse(key, "would reject what the two policies agree on (rho = 1)", "use a value below 1; usual are 1e-4 to 1e-6")
        return value

    def listed(self, key: str) -> list[Any]:
        """The parts of a text with commas, or of a list."""
        value = self.get(key)
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        return [part for part in parts if part not in (None, "")]

    def bounds(self, key: str, text: Any) -> tuple[float | None, float] | None:
        """(lower, upper) of verl's ``"0.5_2.0"``; (None, upper) of a number, which may be written as text."""
        parts = text.split("_") if isinstance(text, str) else [text]
        try:
            bounds = [float(part) for part in parts if not isinstance(part, bool)]
        except (TypeError, ValueError):
            bounds = []
        if len(bounds) not in (1, 2) or not all(isfinite(bound) and bound > 0 for bound in bounds):
            error = f"{show(text)} is neither a number above 0 nor two of them"
            self.refuse(key, error, f"write a number or, for two bounds, {_TWO_BOUNDS}")
            return None
        if len(bounds) == 2 and not self.ordered(key, *bounds):
            return None
        return (None, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])

    def ordered(self, key: str, lower: float, upper: float) -> bool:
        if lower <= upper:
            return True
        self.refuse(key, f"the lower bound {show(lower)} is above the upper bound {show(upper)}", "correct them; nothing could pass")
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", "none", "None")


def _shown(part: ImportanceWeight | RejectionRule) -> str:
    return show({key: value for key, value in part.model_dump().items() if not _is_off(value)})
