"""Pairs of a learner's and a rollout's layout on a number of GPUs: which fit, and in which order to try them.
Pure arithmetic.

GPUs are divided between learner and servers (the two do not share a GPU); every one is used. Pairs whose
servers have so little room for a cache that each generates fewer than ``FEW`` responses at a time come after
all others: they would hardly use their GPUs, which no mismatch is worth. Otherwise a pair is ranked by

1. the expected greatest mismatch of a response, |p_rollout - p_learner|, from the table of what was measured,
   where there is one; pairs of which it expects the same, and all pairs where there is no table, by rule. The
   matrices' sums are split alike where both sides have the same tensor-parallel size; the further the sizes
   are apart, the more responses disagree somewhere; and sequence parallelism of the learner adds a difference
   that no server has. Data, pipeline and expert parallelism compute the same sums. Of a pair that is not in
   the table the least is expected that was measured of any pair that the rule puts no better (``Measured``).
2. memory left free, on the side that has less, in tenths of a GPU; more than ``AMPLE`` counts as that much,
   since it buys nothing. Less than none: where a cache does not hold all responses that its server samples at
   once, in tenths of those.
3. bytes that a learner rank sends per step (``Traffic``).

vpp is always 1 here: interleaving takes memory and traffic for a shorter bubble, of which this ranking knows
nothing.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from configs.schema.layout import LayoutConfig, layout_text, parse_layout
from configs.schema.run import RunConfig
from parallel.planning.layout import Architecture, fitting_layouts, read_architecture, rollout_sizes
from parallel.planning.memory import (
    BYTES,
    GIB,
    USABLE_SHARE,
    LearnerMemory,
    RolloutMemory,
    Work,
    rollout_memory,
    size_text,
    stage_layers,
    stage_parameters,
    work_of,
    worst_stage,
)

AMPLE = 0.3
"""Of a GPU, free on either side: room for longer responses than planned. What is more decides nothing."""
FEW = 16
"""Responses at full length in a server's cache, of which so many are generated at a time: each step of
decoding reads all weights once, be it for one response or for dozens, so that with fewer a GPU waits for its
memory nearly all the time. A choice, not a measurement: the recipes have more wherever there is a choice
(``tests/configs/test_recipes.py`` has their own, lower bound)."""

Pair = tuple[int, bool, int]
"""(learner's tp, its sp, the rollout's tp): what of two layouts decides their mismatch."""


def by_rule(pair: Pair) -> tuple[float, bool]:
    """Of two pairs the rule expects less mismatch of the one where this is less: (ratio of the two tp,
    whether there is sp)."""
    low, high = sorted((pair[0], pair[2]))
    return high / low, pair[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A table of mismatch: of each pair the mean over responses of the greatest. Empty: no table."""

    values: Mapping[Pair, float]
    step: float = 0.0
    """Two of the greatest standard error. Values are rounded to multiples of it, and what rounds to the same
    counts as equal: an order by "within two standard errors" itself would go in circles."""

    def expected(self, pair: Pair) -> float:
        """What is expected of a pair, rounded: its own value; where it has none, the least of those that the
        rule puts no better, infinite where there are none. So a pair without a value never stands behind a
        pair that has one and that the rule puts after it.
        """
        known = (
            [self.values[pair]]
            if pair in self.values
            else [x for other, x in self.values.items() if by_rule(other) >= by_rule(pair)]
        )
        return min((round(x / self.step) * self.step if self.step else x for x in known), default=math.inf)


NO_TABLE = Measured(values={})


class NothingFits(ValueError):
    """No pair of layouts fits; the message says what comes closest and what would make it fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    num_gpus: int
    gpu_bytes: int
    gpus_per_node: int = 8

    def rollout_sizes(self) -> list[int]:
        """GPUs that the servers may take: any number within one node, whole nodes of several."""
        step = 1 if self.num_gpus <= self.gpus_per_node else self.gpus_per_node
        return list(range(step, self.num_gpus, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank of the learner's busiest stage sends in one step.

    With N = prompts_per_step group_size max_new_tokens / dp tokens on each rank (responses at full length,
    prompts left out), f forward passes of each (the update's; those of ``old`` and ``ref`` where the run has
    them), r = 1 where layers are computed again, k experts per token, and rings, where all-reduce sends 2 (n
    - 1) / n of its bytes, reduce-scatter, all-gather and all-to-all (n - 1) / n:

    - tensor: two all-reduces of b H N per dense layer (one per layer with experts) and pass, forward f + r
      times, backward once. Sequence parallelism sends as much in two halves, and in backward gathers the
      input of each once more: half as much again.
    - pipeline: b H N / (t under sequence parallelism) per boundary, forward f times, backward once.
    - data: per optimizer step, gradients 4 P reduce-scattered and weights b P gathered (distributed
      optimizer; else 4 P all-reduced), P the rank's parameters, over its dp copies; experts over tp dp / ep.
    - expert: tokens there and back, 2 k b H N / (t under sequence parallelism), per layer with experts and
      pass, f + r + 1 times.
    - transfer: the stage's whole weights to the servers, once, from its sending rank.

    A critic's own traffic is left out: its layout is the policy's, so that it adds to each layout about in
    proportion.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int
    transfer: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A pair of layouts that fits, with what it is ranked by."""

    learner: LayoutConfig
    rollout_tp: int
    replicas: int
    learner_memory: LearnerMemory
    rollout_memory: RolloutMemory
    measured: float | None
    """Of this pair itself."""
    expected: float
    """``Measured.expected``; infinite where there is no table."""
    learner_free: float
    """Share of a GPU, beside what the fullest learner rank holds."""
    rollout_free: float
    """Share of a GPU, in a server's cache beside the samples in flight at full length. Below 0: the share of
    those that it has no room for, which wait for others to end."""
    in_flight: int
    """Samples that a server is asked for at once."""
    held: int
    """Responses at full length that its cache has room for."""
    traffic: Traffic

    @property
    def has_few(self) -> bool:
        return self.held < min(self.in_flight, FEW)

    @property
    def free(self) -> float:
        return min(self.learner_free, self.rollout_free)

    @property
    def pair(self) -> Pair:
        return (self.learner.tp, self.learner.sp, self.rollout_tp)

    @property
    def mismatch_key(self) -> tuple:
        """What the table expects, then the rule."""
        return (self.expected, *by_rule(self.pair))

    @property
    def free_tenths(self) -> int:
        return math.floor(10 * min(self.free, AMPLE) + 1e-9)

    @property
    def rank_key(self) -> tuple:
        """Total: two different pairs never have the same one."""
        return (
            self.has_few,
            self.mismatch_key,
            -self.free_tenths,
            self.traffic.total,
            layout_text(self.learner),
            self.rollout_tp,
        )


def plan(
    hf_config: Mapping[str, Any],
    config: RunConfig,
    cluster: Cluster,
    *,
    critic: Mapping[str, Any] | None = None,
    measured: Measured = NO_TABLE,
) -> list[Plan]:
    """All pairs that fit, best first. ``hf_config`` and ``critic`` are the models' config.json; the config's
    own layout does not matter.

    Tensor-parallel groups stay within a node. A pair fits where the fullest learner rank takes at most
    ``USABLE_SHARE`` of a GPU, a server has room for its weights and for one sequence as long as a micro-batch
    may be, and minibatches divide by dp. Raises ValueError for a model that is not supported; NothingFits
    where nothing does.
    """
    architecture = read_architecture(hf_config)
    work = _work(config, architecture, critic)
    found = list(_plans(architecture, config, cluster, work, measured))
    if not found:
        raise NothingFits(_what_would_fit(architecture, config, cluster, work))
    return sorted(found, key=lambda each: each.rank_key)


def _work(config: RunConfig, architecture: Architecture, critic: Mapping[str, Any] | None) -> Work:
    of_critic = (
        None if config.critic is None else read_architecture(critic) if critic is not None else architecture
    )
    return work_of(config, "cuda", of_critic)


def _plans(
    architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work, measured: Measured
) -> Iterator[Plan]:
    longest = _longest(architecture, config)
    servers = [pair for pair in _servers(architecture, config, cluster) if pair[1].tokens >= longest]
    for num_rollout in cluster.rollout_sizes():
        dividing = [(tp, num_rollout // tp, memory_of) for tp, memory_of in servers if num_rollout % tp == 0]
        for layout, memory in _learners(architecture, config, cluster, work, num_rollout) if dividing else ():
            if memory.total > USABLE_SHARE * cluster.gpu_bytes:
                continue
            for tp, replicas, memory_of in dividing:
                in_flight = -(-_samples_at_once(config) // replicas)
                yield Plan(
                    learner=layout,
                    rollout_tp=tp,
                    replicas=replicas,
                    learner_memory=memory,
                    rollout_memory=memory_of,
                    measured=measured.values.get((layout.tp, layout.sp, tp)),
                    expected=measured.expected((layout.tp, layout.sp, tp)),
                    learner_free=1 - memory.total / cluster.gpu_bytes,
                    rollout_free=_rollout_free(
                        memory_of, in_flight * config.rollout.max_new_tokens, cluster.gpu_bytes
                    ),
                    in_flight=in_flight,
                    held=memory_of.tokens // config.rollout.max_new_tokens,
                    traffic=traffic(architecture, config, layout),
                )


def _servers(
    architecture: Architecture, config: RunConfig, cluster: Cluster
) -> list[tuple[int, RolloutMemory]]:
    share = static_share(config)
    sizes = [tp for tp in rollout_sizes(architecture) if _within_node(tp, cluster)]
    of_config = {"static_share": share, "quantization": config.rollout.quantization}
    return [
        (tp, rollout_memory(architecture, tp, config.rollout.dtype, cluster.gpu_bytes, **of_config))
        for tp in sizes
    ]


def static_share(config: RunConfig) -> float | None:
    """What the config tells the servers to take of a GPU, if anything."""
    found = {
        name: value
        for name, value in config.rollout.server_args.items()
        if name.replace("_", "-") == "mem-fraction-static"
    }
    for name, value in found.items():
        try:
            share = float(value)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 < share < 1:
            raise ValueError(
                f"rollout.server_args.{name}={value!r} is no share of a GPU; give a number between 0 and 1, or leave it out"
            )
        return share
    return None


def _learners(
    architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work, num_rollout: int
) -> Iterator[tuple[LayoutConfig, LearnerMemory]]:
    """Layouts that the learner can run on the GPUs beside the servers, and what they need."""
    sequences = config.rollout.prompts_per_step * config.rollout.group_size // config.learner.minibatches
    for layout in fitting_layouts(architecture, cluster.num_gpus - num_rollout):
        if _within_node(layout.tp, cluster) and sequences % layout.dp_size == 0:
            yield layout, worst_stage(architecture, layout, work)


def _within_node(tp: int, cluster: Cluster) -> bool:
    return cluster.gpus_per_node % tp == 0


def _longest(architecture: Architecture, config: RunConfig) -> int:
    """Tokens of the longest sequence that the learner takes."""
    return min(config.learner.token_budget, architecture.max_positions)


def _samples_at_once(config: RunConfig) -> int:
    return min(config.rollout.prompts_per_step * config.rollout.group_size, config.rollout.max_concurrency)


def _rollout_free(memory: RolloutMemory, tokens: int, gpu_bytes: int) -> float:
    """``Plan.rollout_free``, of ``tokens`` in flight."""
    used = tokens * memory.kv_bytes_per_token
    return (memory.kv_cache - used) / gpu_bytes if used <= memory.kv_cache else memory.kv_cache / used - 1


def traffic(architecture: Architecture, config: RunConfig, layout: LayoutConfig) -> Traffic:
    """See ``Traffic``, which has the formulas."""
    a, t, b = architecture, layout.tp, BYTES[config.model.dtype]
    tokens = (
        config.rollout.prompts_per_step
        * config.rollout.group_size
        * config.rollout.max_new_tokens
        // layout.dp_size
    )
    hidden = b * a.hidden_size * tokens
    of_rank = hidden // t if layout.sp else hidden
    forwards = 1 + config.scores_old + (config.kl.coefficient > 0)
    again = config.learner.recompute == "full"
    layers = stage_layers(a, layout, 0)
    sparse = sum(a.experts.is_sparse[layer] for layer in layers) if a.experts else 0
    shared, expert = (
        max(sizes) for sizes in zip(*(stage_parameters(a, layout, s) for s in range(layout.pp)), strict=True)
    )
    backward = 1.5 if layout.sp else 1.0
    distributed = config.learner.optimizer.distributed
    update = config.learner.minibatches * (4 + b if distributed else 8)
    copies, expert_copies = layout.dp_size, t * layout.dp_size // layout.ep
    chosen = a.experts.experts_per_token if a.experts else 0
    return Traffic(
        tensor=int((2 * len(layers) - sparse) * 2 * hidden * (t - 1) / t * (forwards + again + backward)),
        pipeline=of_rank * (forwards + 1) if layout.pp > 1 else 0,
        data=int(update * (shared * (copies - 1) / copies + expert * (expert_copies - 1) / expert_copies)),
        expert=int(sparse * 2 * chosen * of_rank * (layout.ep - 1) / layout.ep * (forwards + again + 1)),
        transfer=BYTES[config.rollout.dtype] * (shared * t + expert * layout.ep),
    )


def bytes_to_send(architecture: Architecture, dtype: str, layout: LayoutConfig) -> list[int]:
    """What the sender of each pipeline stage broadcasts to the servers: every tensor of the stage's layers,
    whole and without padding; of a tied model the last stage's copy of the embedding is not sent."""
    whole = LayoutConfig(pp=layout.pp, vpp=layout.vpp)
    numbers = [sum(stage_parameters(architecture, whole, stage)) for stage in range(layout.pp)]
    if architecture.tied and layout.pp > 1:
        numbers[-1] -= architecture.vocab_size * architecture.hidden_size
    return [BYTES[dtype] * count for count in numbers]


def _what_would_fit(architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work) -> str:
    """What the learner and the servers need at least on these GPUs, and the first of several changes after
    which something fits."""
    usable = size_text(int(USABLE_SHARE * cluster.gpu_bytes))
    learners = [
        pair for n in cluster.rollout_sizes() for pair in _learners(architecture, config, cluster, work, n)
    ]
    lines = [f"nothing fits on {cluster.num_gpus} GPUs of {size_text(cluster.gpu_bytes)}"]
    if learners:
        layout, memory = min(learners, key=lambda pair: pair[1].total)
        lines.append(
            f"the smallest learner ({layout_text(layout)}) needs {size_text(memory.total)} per GPU, of which {usable} are usable"
        )
    else:
        lines.append(
            "the learner has no layout on fewer GPUs whose data-parallel size divides the sequences of a minibatch"
        )
    if servers := _servers(architecture, config, cluster):
        tp, memory_of = max(servers, key=lambda pair: pair[1].tokens)
        lines.append(
            f"a server of rollout.tp={tp} has {size_text(memory_of.weights)} of weights per GPU and room for {memory_of.tokens} tokens of "
            f"the {_longest(architecture, config)} that a sequence may have"
        )
    fixes = []
    for changes in _changes(config, cluster):
        fixes += [text for text, changed, on in changes if _would_fit(architecture, changed, on, work)][:1]
    lines.append(f"use {' or '.join(fixes) or 'a smaller model'}")
    return "; ".join(lines)


def _changes(config: RunConfig, cluster: Cluster) -> list[list[tuple[str, RunConfig, Cluster]]]:
    """Of each kind of change, the ones to try, least first: (in words, config, cluster)."""
    learner, budget = config.learner, 2 * config.rollout.max_new_tokens
    of_config = []
    if learner.recompute == "none":
        of_config.append(("learner.recompute=full", learner.model_copy(update={"recompute": "full"})))
    if budget < learner.token_budget:
        of_config.append(
            (f"learner.token_budget={budget}", learner.model_copy(update={"token_budget": budget}))
        )
    more = [
        (f"{factor * cluster.num_gpus} GPUs", config, replace(cluster, num_gpus=factor * cluster.num_gpus))
        for factor in (2, 4, 8)
    ]
    larger = [size * GIB for size in (24, 40, 48, 80, 141, 192, 288) if size * GIB > cluster.gpu_bytes]
    return [
        *([(text, config.model_copy(update={"learner": changed}), cluster)] for text, changed in of_config),
        more,
        [(f"GPUs of {size_text(size)}", config, replace(cluster, gpu_bytes=size)) for size in larger],
    ]


def _would_fit(architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work) -> bool:
    changed = work_of(config, work.device, work.critic)
    return next(_plans(architecture, config, cluster, changed, NO_TABLE), None) is not None


def read_measured(path: Path) -> Measured:
    """The table that ``tandem mismatch`` writes: ``pairs``, each with ``learner`` and ``rollout`` (such as
    ``tp=2,sp`` and ``tp=1``) and ``max_mean``, the mean over responses of the greatest mismatch, and
    ``max_mean_se``, its standard error (or null, or left out). Of pairs that differ in nothing but pp, ep or
    dp the greatest counts.

    Raises ValueError naming the file and what is wrong with it.
    """
    found: dict[Pair, float] = {}
    errors = [0.0]
    try:
        pairs = json.loads(Path(path).read_text(encoding="utf-8"))["pairs"]
        for pair in pairs:
            learner, rollout = parse_layout(pair["learner"]), _parts(pair["rollout"])
            key, value, error = (
                (learner.tp, learner.sp, int(rollout.get("tp", 1))),
                float(pair["max_mean"]),
                pair.get("max_mean_se"),
            )
            errors.append(0.0 if error is None else float(error))
            if not (0 <= value < math.inf and 0 <= errors[-1] < math.inf):
                raise ValueError(f"max_mean={value} or max_mean_se={error} is no size of a mismatch")
            found[key] = max(value, found.get(key, 0.0))
    except OSError as error:
        raise ValueError(f"--measured {path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--measured {path} is no table of `tandem mismatch` (pairs of learner, rollout, max_mean): {error!r}"
        ) from error
    return Measured(values=found, step=2 * max(errors))


def _parts(text: str) -> dict[str, str]:
    """``tp=2,sp`` -> {tp: 2, sp: ""}."""
    return {part.partition("=")[0].strip(): part.partition("=")[2] for part in text.split(",")}


def reasons(plans: list[Plan]) -> list[str]:
    """In words why each plan stands where it does: what it has, for the first; what the one before has over
    it, for the others."""
    return [_merits(each) if i == 0 else _difference(plans[i - 1], each) for i, each in enumerate(plans)]


def _merits(plan: Plan) -> str:
    free = f"{plan.free:.0%} of a GPU free on the fuller side" if plan.free >= 0 else _cache_text(plan)
    return f"{_mismatch_text(plan)}; {free}; {size_text(plan.traffic.total)} sent per rank and step"


def _cache_text(plan: Plan) -> str:
    """Of a cache that is too small for all samples in flight."""
    return f"a cache holds {plan.held} responses at full length, {math.floor(100 * (1 + plan.rollout_free))}% of the samples in flight"


def _mismatch_text(plan: Plan) -> str:
    ratio, has_sp = by_rule(plan.pair)
    same = f"same TP {plan.rollout_tp} on both sides" if ratio == 1 else f"TP sizes {ratio:g} times apart"
    text = f"{same}, {'with' if has_sp else 'no'} SP"
    return text if plan.measured is None else f"measured mismatch {plan.measured:.3g} ({text})"


def _difference(better: Plan, worse: Plan) -> str:
    if better.has_few != worse.has_few:
        return f"servers hardly used: {_cache_text(worse)}"
    if better.mismatch_key != worse.mismatch_key:
        return f"more mismatch expected{_by_what(better, worse)}: {_mismatch_text(worse)}"
    if better.free_tenths != worse.free_tenths and worse.free < 0:
        return f"less room: {_cache_text(worse)}"
    if better.free_tenths != worse.free_tenths:
        side = "learner" if worse.learner_free < worse.rollout_free else "rollout"
        return f"less memory free: {worse.free:.0%} of a GPU ({side})"
    if better.traffic.total == worse.traffic.total:
        return "equal in all of this; ordered by name"
    return f"more sent: {size_text(worse.traffic.total)} per rank and step"


def _by_what(better: Plan, worse: Plan) -> str:
    """What of table and rule puts one before the other."""
    if better.expected == worse.expected:
        both = better.measured is not None and worse.measured is not None
        return (
            " by rule, measured the same within the errors"
            if both
            else ""
            if worse.expected == math.inf
            else " by rule"
        )
    return "" if worse.measured is not None else " by rule (this is not in the measured table)"
