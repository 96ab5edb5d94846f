"""Pairs of a learner's and a rollout's layout on a number of GPUs: the pairs that fit, ranked, by arithmetic.

Every GPU belongs to the learner or to a server; with ``launch.placement: colocated`` every GPU belongs to both, in turns
(``trainer/turns.py``). Pairs whose servers have room for fewer than ``FEW`` responses
at a time come last: they would hardly use their GPUs, whatever the mismatch. All other pairs are ranked by

1. the expected greatest mismatch of a response, |p_rollout - p_learner|, from the table of measurements if
   there is one. Equal pairs, and all pairs without a table, are ranked by rule. With the same tensor-parallel
   size on both sides the matrices' sums are split alike; the further the sizes are apart, the more responses
   disagree somewhere; sequence parallelism of the learner adds a difference that no server has. Data, pipeline,
   expert and context parallelism compute the same sums. ``Measured`` has the rule for pairs missing from the table.
2. the estimated seconds of a step, to two significant digits (``time.py``), with a description of the hardware
   (``Timing``). Without one, the more even division of the GPUs between learner and servers: sampling and training take
   times of one size, and a side with few GPUs sets the time of a step.
3. free memory on the fuller side, in tenths of a GPU, up to ``AMPLE``: more than that buys nothing. If a cache
   does not hold all responses that its server samples at once, the missing share counts, in negative tenths.
4. bytes that a learner rank sends per step (``Traffic``).

Turns have three memory limits: the learner's while it trains, a server's while it samples, and that of both while weights
are sent, when the learner's lasting parts and transfer stand beside the weights of a server rank (``both_bytes``).

vpp is always 1: interleaving costs memory and traffic for a shorter bubble.
cp is tried in ``CONTEXT_SIZES``. It sends more than as many data-parallel ranks would, so it comes first where the
room that it makes counts, or where minibatches have too few sequences for dp.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.errors import counted
from configs.schema.layout import LayoutConfig, layout_text, parse_layout
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture, read_architecture
from parallel.planning.decoding import Lengths
from parallel.planning.layout import fitting_layouts, layout_problems, rollout_sizes
from parallel.planning.machine import Machine
from parallel.planning.memory import GIB, USABLE_SHARE, LearnerMemory, size_text, worst_stage
from parallel.planning.server_memory import RolloutMemory, rollout_memory
from parallel.planning.time import Estimator, StepTime, seconds_text, two_digits
from parallel.planning.traffic import Traffic, traffic
from parallel.planning.work import Work, work_of

AMPLE = 0.3
"""Share of a GPU that is free on either side, for longer responses than planned. More decides nothing."""
FEW = 16
"""Responses at full length in a server's cache. A step of decoding reads all weights once, for one response or
for dozens: with fewer responses a GPU waits for its memory nearly all the time. The number is a choice, not a
measurement; the recipes have more wherever they can (``tests/configs/test_recipes.py`` has their lower bound)."""

CONTEXT_SIZES = (1, 2, 4, 8, 16)
"""The sizes of cp to try. The number is a choice, which bounds the search."""

Pair = tuple[int, bool, int]
"""(learner's tp, learner's sp, rollout's tp), which decide the mismatch of two layouts."""


def by_rule(pair: Pair) -> tuple[float, bool]:
    """(ratio of the two tp, sp): the rule expects less mismatch of the pair with the lower value."""
    low, high = sorted((pair[0], pair[2]))
    return high / low, pair[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A table of each pair's mismatch: the mean over responses of the greatest one. Empty: no table."""

    values: Mapping[Pair, float]
    step: float = 0.0
    """Twice the greatest standard error. Values are rounded to multiples of it and then compared: an order by
    "within two standard errors" itself would go in circles."""

    def expected(self, pair: Pair) -> float:
        """The rounded mismatch that is expected of a pair: its own value or, if it has none, the lowest value
        of the pairs that the rule ranks the same or worse, or infinity.

        A pair without a value therefore never ranks behind a measured pair that the rule ranks worse.
        """
        if pair in self.values:
            values = [self.values[pair]]
        else:
            values = [value for other, value in self.values.items() if by_rule(other) >= by_rule(pair)]
        lowest = min(values, default=math.inf)
        return round(lowest / self.step) * self.step if self.step and values else lowest


NO_TABLE = Measured(values={})


class NothingFits(ValueError):
    """No pair of layouts fits; the message has the closest pair and the changes that would make it fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    num_gpus: int
    gpu_bytes: int
    gpus_per_node: int = 8

    def divisions(self, *, is_shared: bool) -> list[tuple[int, int]]:
        """(GPUs of the learner, GPUs of the servers). Turns take all GPUs of one machine, for either side."""
        if is_shared:
            return [(self.num_gpus, self.num_gpus)] if self.num_gpus <= self.gpus_per_node else []
        return [(self.num_gpus - size, size) for size in self.rollout_sizes()]

    def rollout_sizes(self) -> list[int]:
        """Numbers of GPUs that the servers may take: any within one node, whole nodes of several."""
        step = 1 if self.num_gpus <= self.gpus_per_node else self.gpus_per_node
        return list(range(step, self.num_gpus, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What decides the seconds of a step, beside model, config and layouts."""

    machine: Machine
    lengths: Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A pair of layouts that fits, with the values that rank it."""

    learner: LayoutConfig
    rollout_tp: int
    replicas: int
    learner_memory: LearnerMemory
    rollout_memory: RolloutMemory
    measured: float | None
    """The measured mismatch of this pair itself."""
    expected: float
    """``Measured.expected``; infinite without a table."""
    learner_free: float
    """Share of a GPU that the fullest learner rank leaves free."""
    rollout_free: float
    """Share of a GPU that samples in flight at full length leave free in a server's cache. Below 0: minus the
    share of the samples that the cache has no room for, and that wait for others to end."""
    in_flight: int
    """Samples that a server gets at once."""
    held: int
    """Responses at full length for which a server's cache has room."""
    traffic: Traffic
    both_free: float | None = None
    """Share of a GPU that both sides leave free while weights are sent, where they take turns on it. None: GPUs of their
    own."""
    time: StepTime | None = None
    """None without a description of the hardware."""

    @property
    def has_few(self) -> bool:
        return self.held < min(self.in_flight, FEW)

    @property
    def free_by_side(self) -> dict[str, float]:
        """``free`` of each side, under the words that say where (or, of turns, when)."""
        if self.both_free is None:
            return {"on the learner's GPUs": self.learner_free, "on the servers' GPUs": self.rollout_free}
        return {
            "while training": self.learner_free,
            "while sampling": self.rollout_free,
            "while weights are sent": self.both_free,
        }

    @property
    def free(self) -> float:
        return min(self.free_by_side.values())

    @property
    def uneven(self) -> int:
        """GPUs that one side has more than the other; 0 where seconds say what a division costs."""
        return 0 if self.time is not None else abs(self.learner.world_size - self.rollout_gpus)

    @property
    def rollout_gpus(self) -> int:
        return self.rollout_tp * self.replicas

    @property
    def pair(self) -> Pair:
        return (self.learner.tp, self.learner.sp, self.rollout_tp)

    @property
    def mismatch_key(self) -> tuple:
        """The table's expectation, then the rule's."""
        return (self.expected, *by_rule(self.pair))

    @property
    def free_tenths(self) -> int:
        return math.floor(10 * min(self.free, AMPLE) + 1e-9)

    @property
    def shown_seconds(self) -> float:
        """Of a step, as tables show them; 0 without an estimate."""
        return 0.0 if self.time is None else two_digits(self.time.total)

    @property
    def rank_key(self) -> tuple:
        """The order of the ranking, in which no two pairs are equal."""
        return (
            self.has_few,
            self.mismatch_key,
            self.shown_seconds,
            self.uneven,
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
    reference: Architecture | None = None,
    measured: Measured = NO_TABLE,
    timing: Timing | None = None,
) -> list[Plan]:
    """All pairs that fit, best first. ``hf_config`` and ``critic`` are the models' config.json; ``reference`` is of
    ``kl.model``. The config's own layout is ignored, its ``launch.placement`` is not: auto stands for separate GPUs.
    ``timing``: None for plans without seconds.

    Tensor-parallel groups stay within a node. A pair fits if the fullest learner rank takes at most
    ``USABLE_SHARE`` of a GPU, a server has room for its weights and for one sequence of a micro-batch's length,
    and minibatches divide by dp; where both take turns, ``both_bytes`` must fit on a GPU too. Raises ValueError for
    a model that is not supported, NothingFits if no pair fits.
    """
    architecture = read_architecture(hf_config)
    critic_architecture = None
    if config.critic is not None:
        critic_architecture = read_architecture(critic) if critic is not None else architecture
    work = work_of(config, "cuda", critic_architecture, reference)
    found = _fitting_plans(architecture, config, cluster, work, measured, timing)
    plans = sorted(found, key=lambda plan: plan.rank_key)
    if not plans:
        raise NothingFits(_nothing_fits_text(architecture, config, cluster, work))
    return plans


def _fitting_plans(
    architecture: Architecture,
    config: RunConfig,
    cluster: Cluster,
    work: Work,
    measured: Measured,
    timing: Timing | None,
) -> Iterator[Plan]:
    longest = _longest_sequence(architecture, config)
    estimator = None
    if timing is not None:
        others = {"critic": work.critic, "reference": work.reference}
        estimator = Estimator(architecture, config, timing.lengths, timing.machine, **others)
    servers = [pair for pair in _possible_servers(architecture, config, cluster) if pair[1].tokens >= longest]
    is_shared = takes_turns(config)
    for num_learner, num_rollout in cluster.divisions(is_shared=is_shared):
        fitting = [(tp, memory) for tp, memory in servers if num_rollout % tp == 0]
        for layout, memory in (
            _possible_learners(architecture, config, cluster, work, num_learner) if fitting else ()
        ):
            if memory.total > USABLE_SHARE * cluster.gpu_bytes:
                continue
            for tp, server_memory in fitting:
                both = both_bytes(memory, server_memory)
                if is_shared and both > cluster.gpu_bytes:
                    continue
                replicas = num_rollout // tp
                in_flight = -(-_samples_at_once(config) // replicas)
                tokens = in_flight * config.rollout.max_new_tokens
                yield Plan(
                    learner=layout,
                    rollout_tp=tp,
                    replicas=replicas,
                    learner_memory=memory,
                    rollout_memory=server_memory,
                    measured=measured.values.get((layout.tp, layout.sp, tp)),
                    expected=measured.expected((layout.tp, layout.sp, tp)),
                    learner_free=1 - memory.total / cluster.gpu_bytes,
                    rollout_free=_rollout_free(server_memory, tokens, cluster.gpu_bytes),
                    in_flight=in_flight,
                    held=server_memory.tokens // config.rollout.max_new_tokens,
                    traffic=traffic(architecture, config, layout),
                    both_free=1 - both / cluster.gpu_bytes if is_shared else None,
                    time=estimator and estimator.step(layout, tp=tp, replicas=replicas, memory=server_memory),
                )


def takes_turns(config: RunConfig) -> bool:
    """Whether learner and servers share GPUs. auto is decided where the run starts, by the GPUs that are there."""
    return config.launch.placement == "colocated"


def both_bytes(learner: LearnerMemory, server: RolloutMemory) -> int:
    """Bytes on a GPU that learner and servers share, while weights are sent: nothing is sampled and nothing is trained, so
    that neither cache nor activations are there (``trainer/turns.py``)."""
    return learner.lasting + learner.transfer + server.weights


def _possible_servers(
    architecture: Architecture, config: RunConfig, cluster: Cluster
) -> list[tuple[int, RolloutMemory]]:
    """The tensor-parallel sizes of servers that stay within a node and fill some division, and the memory of each."""
    memory = partial(
        rollout_memory,
        architecture,
        dtype=config.rollout.dtype,
        gpu_bytes=cluster.gpu_bytes,
        static_share=static_share(config),
        quantization=config.rollout.quantization,
        max_tokens=config.rollout.max_total_tokens,
    )
    taken = {num_rollout for _, num_rollout in cluster.divisions(is_shared=takes_turns(config))}
    sizes = [tp for tp in rollout_sizes(architecture) if any(size % tp == 0 for size in taken)]
    return [(tp, memory(tp)) for tp in sizes if _within_node(tp, cluster)]


def static_share(config: RunConfig) -> float | None:
    """The share of a GPU that the config gives to the servers, if it does."""
    for name, value in config.rollout.server_args.items():
        if name.replace("_", "-") != "mem-fraction-static":
            continue
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


def _possible_learners(
    architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work, num_gpus: int
) -> Iterator[tuple[LayoutConfig, LearnerMemory]]:
    """The learner's layouts on ``num_gpus`` of the cluster, and the memory of their fullest stages."""
    sequences = config.rollout.prompts_per_step * config.rollout.group_size // config.learner.minibatches
    for layout in fitting_layouts(architecture, num_gpus, context=CONTEXT_SIZES):
        others = [model for model in (work.critic, work.reference) if model is not None]
        fits_others = not any(layout_problems(model, layout) for model in others)
        if fits_others and _within_node(layout.tp, cluster) and sequences % layout.dp_size == 0:
            yield layout, worst_stage(architecture, layout, work)


def _within_node(tp: int, cluster: Cluster) -> bool:
    return cluster.gpus_per_node % tp == 0


def _longest_sequence(architecture: Architecture, config: RunConfig) -> int:
    """Tokens of the longest sequence that the limits of learner, model and servers allow."""
    limits = (config.learner.token_budget, architecture.max_positions, config.rollout.max_total_tokens)
    return min(limit for limit in limits if limit is not None)


def _samples_at_once(config: RunConfig) -> int:
    return min(config.rollout.prompts_per_step * config.rollout.group_size, config.rollout.max_concurrency)


def _rollout_free(memory: RolloutMemory, tokens: int, gpu_bytes: int) -> float:
    """``Plan.rollout_free`` for ``tokens`` in flight."""
    used = tokens * memory.kv_bytes_per_token
    return (memory.kv_cache - used) / gpu_bytes if used <= memory.kv_cache else memory.kv_cache / used - 1


def _nothing_fits_text(architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work) -> str:
    """The least needs of learner and servers on these GPUs, and of each kind of change the first that helps."""
    usable, is_shared = size_text(int(USABLE_SHARE * cluster.gpu_bytes)), takes_turns(config)
    learners = [
        pair
        for n, _ in cluster.divisions(is_shared=is_shared)
        for pair in _possible_learners(architecture, config, cluster, work, n)
    ]
    lines = [f"nothing fits on {counted(cluster.num_gpus, 'GPU')} of {size_text(cluster.gpu_bytes)}"]
    if learners:
        layout, memory = min(learners, key=lambda pair: pair[1].total)
        lines.append(
            f"the smallest learner ({layout_text(layout)}) needs {size_text(memory.total)} per GPU, of which {usable} are usable"
        )
    else:
        lines.append(
            f"the learner has no layout on {'these' if is_shared else 'fewer'} GPUs whose data-parallel size divides the sequences of "
            "a minibatch"
        )
    servers = _possible_servers(architecture, config, cluster)
    if servers:
        tp, memory = max(servers, key=lambda pair: pair[1].tokens)
        lines.append(
            f"a server of rollout.tp={tp} has {size_text(memory.weights)} of weights per GPU and room for {memory.tokens} tokens of "
            f"the {_longest_sequence(architecture, config)} that a sequence may have"
        )
    if is_shared and learners and servers:
        least = min(both_bytes(learner, server) for _, learner in learners for _, server in servers)
        lines.append(
            f"with launch.placement=colocated both hold at least {size_text(least)} of a GPU while weights are sent"
        )
    fixes = []
    for changes in _possible_changes(config, cluster):
        fixes += [text for text, changed, on in changes if _would_fit(architecture, changed, on, work)][:1]
    lines.append(f"use {' or '.join(fixes) or 'a smaller model'}")
    return "; ".join(lines)


def _possible_changes(config: RunConfig, cluster: Cluster) -> list[list[tuple[str, RunConfig, Cluster]]]:
    """Changes to try, the smallest first of each kind: (text, config, cluster)."""
    learner, budget = config.learner, 2 * config.rollout.max_new_tokens
    updates: dict[str, Any] = {}
    if learner.recompute == "none":
        updates["recompute"] = "full"
    if budget < learner.token_budget:
        updates["token_budget"] = budget
    learners = {f"learner.{k}={v}": learner.model_copy(update={k: v}) for k, v in updates.items()}
    more = [
        (f"{factor * cluster.num_gpus} GPUs", config, replace(cluster, num_gpus=factor * cluster.num_gpus))
        for factor in (2, 4, 8)
    ]
    larger = [size * GIB for size in (24, 40, 48, 80, 141, 192, 288) if size * GIB > cluster.gpu_bytes]
    return [
        *([(text, config.model_copy(update={"learner": new}), cluster)] for text, new in learners.items()),
        more,
        [(f"GPUs of {size_text(size)}", config, replace(cluster, gpu_bytes=size)) for size in larger],
    ]


def _would_fit(architecture: Architecture, config: RunConfig, cluster: Cluster, work: Work) -> bool:
    changed = work_of(config, work.device, work.critic, work.reference)
    return next(_fitting_plans(architecture, config, cluster, changed, NO_TABLE, None), None) is not None


def read_measured(path: Path) -> Measured:
    """The table that ``tandem mismatch`` writes.

    Each of its ``pairs`` has ``learner`` and ``rollout`` (such as ``tp=2,sp`` and ``tp=1``), ``max_mean``, the
    mean over responses of the greatest mismatch, and optionally ``max_mean_se``, its standard error. Pairs that
    differ in pp, ep or dp alone count as one, with their greatest value.

    Raises ValueError naming the file and the problem.
    """
    values: dict[Pair, float] = {}
    errors = [0.0]
    try:
        for row in json.loads(Path(path).read_text(encoding="utf-8"))["pairs"]:
            learner, rollout = parse_layout(row["learner"]), _layout_parts(row["rollout"])
            pair = (learner.tp, learner.sp, int(rollout.get("tp", 1)))
            value, error = float(row["max_mean"]), row.get("max_mean_se")
            errors.append(0.0 if error is None else float(error))
            if not (0 <= value < math.inf and 0 <= errors[-1] < math.inf):
                raise ValueError(f"max_mean={value} or max_mean_se={error} is no size of a mismatch")
            values[pair] = max(value, values.get(pair, 0.0))
    except OSError as error:
        raise ValueError(f"--measured {path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--measured {path} is no table of `tandem mismatch` (pairs of learner, rollout, max_mean): {error!r}"
        ) from error
    return Measured(values=values, step=2 * max(errors))


def _layout_parts(text: str) -> dict[str, str]:
    """``tp=2,sp`` -> {tp: 2, sp: ""}."""
    return {part.partition("=")[0].strip(): part.partition("=")[2] for part in text.split(",")}


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
