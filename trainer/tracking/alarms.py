"""Alarms: metrics of a step outside their level, with meaning, usual cause and advice.

An alarm has the name of its level in ``AlarmsConfig``. trainer/README.md gives the advice at more length.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from configs.schema.alarms import AlarmsConfig
from trainer.metric_names import known


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    name: str
    """The field of ``AlarmsConfig`` with its level; None there turns the alarm off."""
    value: float
    badness: float
    """Larger is worse: of two alarms of one name the one with the larger value counts."""
    message: str
    """One paragraph: the problem, its usual cause, and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    name: str
    metrics: tuple[str, ...]
    """A star stands for any text, as in the table of metrics."""
    healthy: Callable[[float, float], bool]
    """(value, level); never true for NaN, so NaN is an alarm too."""
    wrong: str
    cause: str
    advice: str
    badness: Callable[[float], float] = abs
    """The distance of a value from the healthy one."""

    def __post_init__(self) -> None:
        for metric in self.metrics:
            known(metric)


def _from_one(value: float) -> float:
    return abs(value - 1)


_RULES = (
    _Rule(
        name="kept_min",
        metrics=("mismatch/kept_fraction",),
        healthy=operator.gt,
        badness=_from_one,
        wrong="the correction leaves nothing to learn from, and this step's policy gradient is zero",
        cause="a rejection rule that is too narrow for this gap (a geometric bound of 1.001 wants engines that agree to 0.1 % a token), or "
        "a gap that no rule can fix: other weights, tokens or temperature on one side",
        advice="look at mismatch/rejected/* for the rule; widen its bounds, or use weights instead (decoupled_token_is); if "
        "mismatch/abs_prob_mean is high as well, find the gap's cause first",
    ),
    _Rule(
        name="advantage_std_min",
        metrics=("advantage/std",),
        healthy=operator.gt,
        badness=operator.neg,
        wrong="all advantages of the step are equal, so it teaches the policy nothing",
        cause="all samples have the same reward: the problems are too hard or too easy, the reward expects another form of answer, "
        "responses are cut at rollout.max_new_tokens before they answer, or the policy has collapsed and writes the same text everywhere; "
        "or all responses were cut off and are masked (learner.truncated_responses)",
        advice="read the responses (`tandem samples RUN`), then look at response/truncated_fraction, policy/entropy and "
        "optim/grad_norm of the steps before; after a collapse go back to an earlier checkpoint with a lower learning rate",
    ),
    _Rule(
        name="first_ratio_tolerance",
        metrics=("policy/first_ratio_max", "policy/first_ratio_min"),
        healthy=lambda ratio, tolerance: abs(ratio - 1) <= tolerance,
        badness=_from_one,
        wrong="current differs from old on the first minibatch, before any weight has changed",
        cause="the recompute and the update do not run the same computation: other micro-batches, dropout, nondeterministic or other "
        "kernels, or MoE routing that is not replayed",
        advice="score with the same micro-batches as the update, with dropout off and deterministic kernels; or drop the recompute "
        "(ppo_is_bypass), which compares current with rollout alone",
    ),
    _Rule(
        name="weight_mean_min",
        metrics=("mismatch/weight_mean", "mismatch/weight_normaliser"),
        healthy=operator.ge,
        badness=_from_one,
        wrong="importance weights are far below 1 on average, but should average 1: the loss shrinks and depends on few tokens",
        cause="the learner finds the sampled tokens much less likely than the rollout did: old samples, a quantised rollout, a mask of the "
        "sampler (top_p, top_k) or a temperature that the learner lacks; or sequence weights of long responses, cut from above only",
        advice="check temperature and sampling mask, lower the staleness, raise the rollout's precision; with sequence weights try "
        "decoupled_token_is, or reject the outliers (decoupled_geo_rs_token_is)",
    ),
    _Rule(
        name="weight_mean_max",
        metrics=("mismatch/weight_mean", "mismatch/weight_normaliser"),
        healthy=operator.le,
        badness=_from_one,
        wrong="importance weights are far above 1 on average: a few tokens or responses outweigh the rest",
        cause="tokens that only the rollout finds unlikely, multiplied over long responses, with a loose bound or none",
        advice="bound weights from above (decoupled_token_is with upper 2), drop what is over the bound (decoupled_token_icepop, "
        "drop_outliers), or use decoupled_geo_rs instead of sequence weights",
    ),
    _Rule(
        name="ess_min",
        metrics=("mismatch/ess",),
        healthy=operator.ge,
        badness=_from_one,
        wrong="before the bound, few samples carry most of the weight: the gradient is noisier than the batch size suggests",
        cause="heavy-tailed ratios: stale or quantised rollouts, or sequence weights of long responses",
        advice="a lower level of weights (decoupled_token_is for decoupled_seq_is), rejection of the outliers (decoupled_geo_rs, "
        "decoupled_k3_rs_token_is), and a smaller gap: less staleness, higher precision, equal layouts",
    ),
    _Rule(
        name="kl_max",
        metrics=("mismatch/k1", "mismatch/k3"),
        healthy=lambda estimate, level: abs(estimate) <= level,
        wrong="the two engines are different policies: KL(rollout || train) per token is far above numerical noise",
        cause="samples that are many versions old, weights that arrived incomplete, another temperature or sampling mask, or a rollout "
        "in int8 or fp8",
        advice="without staleness both sides have the same weights, so precision, layout, temperature or sampling mask cause "
        "mismatch/logprob_gap_max (and sync/max_logprob_gap of the probe, if it is recorded); with stale samples lower the "
        "staleness first; meanwhile use decoupled_seq_is_rs or decoupled_k3_rs_token_is",
    ),
    _Rule(
        name="chi2_token_max",
        metrics=("mismatch/chi2_token",),
        healthy=operator.le,
        wrong="the second moment of the token ratios is high: unbounded weights would more than double the gradient's variance",
        cause="single tokens with very high ratios, most often ones that the rollout sampled against the odds",
        advice="bound the token weights (decoupled_token_is, decoupled_token_icepop) and veto responses with ratios near zero; avoid "
        "vanilla_is and sequence weights until it falls",
    ),
    _Rule(
        name="response_abs_prob_over_max",
        metrics=("mismatch/response_abs_prob_over",),
        healthy=operator.le,
        wrong="too many responses contain a token on which the two engines contradict each other",
        cause="different parallel layouts of learner and server (context or sequence parallelism most of all), long responses, in which "
        "the gap builds up, MoE routing, or a low-precision head",
        advice="give both sides the same tensor parallelism, compute logits in float32, compare mismatch/by_length and by_position; reject "
        "such responses (decoupled_k3_rs, or decoupled_geo_rs with its veto)",
    ),
    _Rule(
        name="rejected_max",
        metrics=("mismatch/rejected/total/tokens", "mismatch/rejected/total/sequences"),
        healthy=operator.le,
        wrong="most sampled tokens or responses are rejected, and the rest are a biased selection",
        cause="bounds that are too narrow for this gap, or a gap that has grown",
        advice="mismatch/rejected/* names the rule; widen it, or weigh instead of rejecting (decoupled_token_is); sequence "
        "rules reject more the longer responses get, geometric ones do not",
    ),
    _Rule(
        name="reward_failed_max",
        metrics=(
            "reward/failed_fraction",
            "eval/failed_fraction",
            "eval/greedy/failed_fraction",
            "eval/set/*/failed_fraction",
            "eval/source/*/failed_fraction",
        ),
        healthy=operator.le,
        wrong="rewards could not be computed. In training these samples are left out, so the rest is a biased selection; in an evaluation "
        "they count as wrong answers, so its accuracy is too low, and it is not taken as the best",
        cause="reward code that raises, runs out of time or returns no finite number for some responses, or an overloaded reward model",
        advice="read the first failures in the sample role's log (`tandem logs RUN --role sample`), which name the prompt and the line of "
        "code; raise reward.timeout_s if it is too short",
    ),
    _Rule(
        name="accuracy_fall_max",
        metrics=("eval/accuracy_fall",),
        healthy=operator.le,
        wrong="the held-out accuracy has fallen many standard errors below the best evaluation before it: the run unlearns",
        cause="a learning rate that is too high, a gap that is not corrected, or a reward that the policy satisfies in another way than "
        "the held-out problems ask for",
        advice="read its answers (`tandem samples RUN --evaluation`); compare reward/mean, policy/entropy and response/length_mean of "
        "the steps since the best evaluation; resume from a checkpoint before the fall with a lower optimizer.lr "
        "(`checkpoint.keep_best=eval/accuracy` keeps the best one)",
    ),
)


def check_alarms(metrics: Mapping[str, float], config: AlarmsConfig) -> list[Alarm]:
    """The alarms of a step, the most serious kind first; at most one for each level.

    metrics: plain numbers by name. A missing metric raises no alarm, NaN does.
    """
    alarms = []
    for rule in _RULES:
        level = getattr(config, rule.name)
        if level is None:
            continue
        names = (name for metric in rule.metrics for name in _recorded(metric, metrics))
        unhealthy = (name for name in names if not rule.healthy(metrics[name], level))
        if name := next(unhealthy, None):
            message = (
                f"{name} is {metrics[name]:.4g} (alarms.{rule.name}: {level:g}): {rule.wrong}. "
                f"Usual cause: {rule.cause}. Try: {rule.advice}.{_share_of_staleness(name, metrics)}"
            )
            value = metrics[name]
            badness = math.inf if math.isnan(value) else rule.badness(value)
            alarms.append(Alarm(name=rule.name, value=value, badness=badness, message=message))
    return alarms


def judged(metrics: Mapping[str, float]) -> set[str]:
    """The names of the alarms that these metrics can raise or end. Those of an evaluation are not in every step."""
    return {rule.name for rule in _RULES if any(_recorded(metric, metrics) for metric in rule.metrics)}


def _recorded(metric: str, metrics: Mapping[str, float]) -> list[str]:
    if "*" in metric:
        return [name for name in metrics if fnmatchcase(name, metric)]
    return [metric] if metric in metrics else []


def _share_of_staleness(metric: str, metrics: Mapping[str, float]) -> str:
    """How much of an alarm of the gap is due to the tokens' age. Empty in a run without lags: there the engines cause the
    whole gap."""
    lag = metrics.get(known("staleness/mean"))
    if not lag or not metric.startswith("mismatch/"):
        return ""
    fresh = metrics.get(known("staleness/by_lag/le_0/k3"))
    if fresh is None:
        engines = "no token is fresh, so the engines' own gap is not known"
    else:
        both = metrics.get(known("mismatch/k3"), 0.0)
        engines = (
            f"k3 of the fresh ones, {fresh:.2g}, is the engines' own gap; mismatch/k3, {both:.2g}, has both"
        )
    return f" Here tokens lag by {lag:.2g} versions on average: {engines}."
