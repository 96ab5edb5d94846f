"""Whether the correction suits the samples: engines that agree, and policies that are old or coarsely rounded."""

from collections.abc import Iterator

from configs.loader import Finding
from configs.schema import AnyConfig, RunConfig
from configs.schema.correction import ImportanceWeight

STALENESS_STUDY = "benchmarks/results/staleness.md"
PRECISION_STUDY = "benchmarks/results/quantised_rollout.md"
COARSE = ("int4", "int3", "int2")
"""Values of ``rollout.precision`` that make another policy."""
NARROW = 1.01
"""Upper bounds of a geometric ratio below this one are for engines that hold the same weights."""


def check_bounds(config: RunConfig) -> Iterator[Finding]:
    """If the two engines agree to the bit, every ratio is 1. Bounds that exclude 1 would reject correct tokens."""
    weight = config.correction.weight
    agreement = "the ratio 1 of two engines that agree; use bounds on both sides of 1, such as [0.5, 2]"
    if isinstance(weight, ImportanceWeight) and weight.upper is not None:
        lower, upper = weight.lower, weight.upper
        if lower is None and upper < 1:
            yield "correction.weight", f"correction.weight.upper={upper} lowers {agreement}"
        elif lower is not None and not lower <= 1 <= upper:
            field = f"correction.weight.{'lower' if lower > 1 else 'upper'}"
            yield field, f"correction.weight: [{lower}, {upper}] leaves out {agreement}"
    for number, rule in enumerate(config.correction.reject, start=1):
        if rule.rule == "ratio" and not rule.lower <= 1 <= rule.upper:
            bounds = f"[{rule.lower}, {rule.upper}] of rule {number}"
            yield "correction.reject", f"correction.reject: {bounds} leaves out {agreement}"


def gap_notes(config: AnyConfig) -> Iterator[str]:
    """Warnings if the samples are of another policy than the learner's (they are old, or from coarsely rounded weights or
    numbers), and the correction does not suit that, or does not suit the objective."""
    if not isinstance(config, RunConfig):
        return
    correction, rollout = config.correction, config.rollout
    lags, is_coarse = f"rollout.max_staleness={rollout.max_staleness}", rollout.precision in COARSE
    has_no_weight = correction.mode == "decoupled" and correction.weight.level == "none"
    if rollout.max_staleness and has_no_weight and not config.correction.rejects:
        text = f"{lags} without a correction trains on older tokens as if they were new"
        shown = "in 60 steps at lag 4 a model went from 15 to 12 % right, with decoupled_token_is to 24 %"
        yield f"{text}: {shown} ({STALENESS_STUDY}); set correction.weight, for example correction=decoupled_token_is"
    clips = correction.loss == "objective" and config.policy_objective.type != "policy_gradient"
    if is_coarse and correction.mode == "bypass" and clips:
        text = f"rollout.precision={rollout.precision} with correction.mode=bypass clips against the rounded policy"
        shown = "at int2 a model went from 15 to 13 % right in 40 steps, with decoupled_seq_is to 25 %"
        yield f"{text}: {shown} ({PRECISION_STUDY}); take decoupled mode, for example correction=decoupled_seq_is"
    # Against a coarsely rounded policy the paper's bound is no advice: the note before this one.
    if correction.mode == "decoupled" and config.policy_objective.type == "dppo" and not is_coarse:
        text = "objective.type=dppo with correction.mode=decoupled bounds the change from the learner's own log-probs"
        yield f"{text}, where its paper bounds it from the rollout's (arXiv 2602.04879); take correction=ppo_is_bypass"
    causes = [f"{lags} it rejects nearly all tokens of older weights (9 of 10 and more in {STALENESS_STUDY})"]
    causes = causes if rollout.max_staleness else []
    if is_coarse:
        rounded = f"rollout.precision={rollout.precision} it rejects nearly all tokens"
        causes.append(f"{rounded} (998 of 1,000 at int2 in {PRECISION_STUDY})")
    if rollout.quantization != "none":
        rounded = f"rollout.quantization={rollout.quantization} it rejects most responses"
        causes.append(f"{rounded} (17 of 20 at fp8 in {PRECISION_STUDY}, and the model unlearned)")
    for rule in correction.reject:
        if rule.rule == "ratio" and "geometric" in rule.level and rule.upper < NARROW:
            text = f"correction.reject: a {rule.level} ratio up to {rule.upper:g} is made for the gap between engines"
            fix = "raise its upper bound, or use only a weight, for example correction=decoupled_token_is"
            yield from (f"{text}; with {cause}; {fix}" for cause in causes)
