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

Turns have three memory limits: the learner's while it trains, a server's while it samples, and that of both between turns,
while weights are sent or a checkpoint is written. Then the learner's lasting parts and transfer, or its offloaded
optimizer's state, stand beside the weights of a server rank (``both_bytes``).

vpp is always 1: interleaving costs memory and traffic for a shorter bubble.
cp is tried in ``CONTEXT_SIZES``. It sends more than as many data-parallel ranks would, so it comes first where the
room that it makes counts, or where minibatches have too few sequences for dp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from configs.errors import counted
from configs.schema.layout import LayoutConfig, layout_text
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture
from parallel.planning.decoding import Lengths
from parallel.planning.layout import fitting_layouts, layout_problems, rollout_sizes
from parallel.planning.machine import Machine
from parallel.planning.measured import NO_TABLE, Measured, Pair, by_rule
from parallel.planning.memory import GIB, USABLE_SHARE, LearnerMemory, size_text, worst_stage
from parallel.planning.server_memory import RolloutMemory, both_bytes, rollout_memory, static_share
from parallel.planning.time import Estimator, StepTime, two_digits
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


class NothingFits(ValueError):
    """No pair of layouts fits; the message has the closest pair and the changes that would make it fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    num_gpus: int
    gpu_bytes: int
    gpus_per_node: int = 8

    def divisions(self, *, is_shared: bool) -> list[tuple[int, int]]:
        """(GPUs of the learner, GPUs of the servers). Turns take all GPUs, for either side."""
        # Servers take any number within one node, whole nodes of several.
        step = 1 if self.num_gpus <= self.gpus_per_node else self.gpus_per_node
        if is_shared:
            return [] if self.num_gpus % step else [(self.num_gpus, self.num_gpus)]
        return [(self.num_gpus - size, size) for size in range(step, self.num_gpus, step)]


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
    """Share of a GPU that both sides leave free while weights are sent or a checkpoint is written, where they take turns on it.
    None: GPUs of their own."""
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
            "between turns": self.both_free,
        }

    @property
    def free(self) -> float:
        return min(self.free_by_side.values())

    @property
    def uneven(self) -> int:
        """GPUs that one side has more than the other; 0 if seconds already count what a division costs."""
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
    architecture: Architecture,
    config: RunConfig,
    cluster: Cluster,
    *,
    critic: Architecture | None = None,
    reference: Architecture | None = None,
    measured: Measured = NO_TABLE,
    timing: Timing | None = None,
) -> list[Plan]:
    """All pairs that fit, best first. ``critic`` and ``reference`` are of the run's other models (``other_models.py``). The
    config's own layout is ignored, its ``launch.placement`` is not: auto stands for separate GPUs. ``timing``: None for
    plans without seconds.

    Tensor-parallel groups stay within a node. A pair fits if the fullest learner rank takes at most
    ``USABLE_SHARE`` of a GPU, a server has room for its weights and for one sequence of a micro-batch's length,
    and minibatches divide by dp; where both take turns, ``both_bytes`` must fit on a GPU too. Raises NothingFits
    if no pair fits, ValueError for an unusable static share.
    """
    search = _Search(
        architecture=architecture, config=config, cluster=cluster, critic=critic, reference=reference
    )
    plans = sorted(search.plans(measured, timing), key=lambda plan: plan.rank_key)
    if not plans:
        raise NothingFits(search.nothing_fits_text())
    return plans


_Fit = tuple[LayoutConfig, LearnerMemory, int, int, RolloutMemory]
"""A pair of layouts that fits: the learner's layout and memory, the servers' tp, replicas and memory."""


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The pairs of layouts of one model, config and cluster."""

    architecture: Architecture
    config: RunConfig
    cluster: Cluster
    critic: Architecture | None
    """None: the run has no critic."""
    reference: Architecture | None
    """Of ``kl.model``, if the config has it."""

    @cached_property
    def work(self) -> Work:
        return work_of(self.config, "cuda", self.critic, self.reference)

    @property
    def is_shared(self) -> bool:
        return self.config.launch.takes_turns

    @property
    def _divisions(self) -> list[tuple[int, int]]:
        return self.cluster.divisions(is_shared=self.is_shared)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the limits of learner, model and servers allow."""
        config = self.config
        limits = (
            config.learner.token_budget,
            self.architecture.max_positions,
            config.rollout.max_total_tokens,
        )
        return min(limit for limit in limits if limit is not None)

    def plans(self, measured: Measured, timing: Timing | None) -> Iterator[Plan]:
        """All pairs that fit, with the values that rank them, in no order."""
        estimator = None
        if timing is not None:
            others = {"critic": self.critic, "reference": self.reference}
            estimator = Estimator(self.architecture, self.config, timing.lengths, timing.machine, **others)
        return (self._plan(fit, measured, estimator) for fit in self._fitting())

    def nothing_fits_text(self) -> str:
        """The least needs of learner and servers on these GPUs, and of each kind of change the first that helps."""
        cluster = self.cluster
        usable = size_text(int(USABLE_SHARE * cluster.gpu_bytes))
        learners = [pair for n, _ in self._divisions for pair in self._learners(n)]
        lines = [f"nothing fits on {counted(cluster.num_gpus, 'GPU')} of {size_text(cluster.gpu_bytes)}"]
        if learners:
            layout, memory = min(learners, key=lambda pair: pair[1].total)
            lines.append(
                f"the smallest learner ({layout_text(layout)}) needs {size_text(memory.total)} per GPU, of which {usable} are usable"
            )
        else:
            lines.append(
                f"the learner has no layout on {'these' if self.is_shared else 'fewer'} GPUs whose data-parallel size divides the "
                "sequences of a minibatch"
            )
        servers = self._servers()
        if servers:
            tp, memory = max(servers, key=lambda pair: (pair[1].tokens, -pair[1].weights))
            lines.append(
                f"a server of rollout.tp={tp} has {size_text(memory.weights)} of weights per GPU and room for {memory.tokens} tokens of "
                f"the {self.longest_sequence} that a sequence may have"
            )
        if self.is_shared and learners and servers:
            least = min(both_bytes(learner, server) for _, learner in learners for _, server in servers)
            lines.append(
                f"with launch.placement=colocated both hold at least {size_text(least)} of a GPU between their turns"
            )
        fixes = []
        for changes in self._changes():
            fixes += [text for text, changed in changes if next(changed._fitting(), None) is not None][:1]
        lines.append(f"use {' or '.join(fixes) or 'a smaller model'}")
        return "; ".join(lines)

    def _fitting(self) -> Iterator[_Fit]:
        cluster, longest = self.cluster, self.longest_sequence
        servers = [(tp, memory) for tp, memory in self._servers() if memory.tokens >= longest]
        for num_learner, num_rollout in self._divisions:
            dividing = [(tp, memory) for tp, memory in servers if num_rollout % tp == 0]
            for layout, learner in self._learners(num_learner) if dividing else ():
                if learner.total > USABLE_SHARE * cluster.gpu_bytes:
                    continue
                for tp, server in dividing:
                    if not self.is_shared or both_bytes(learner, server) <= cluster.gpu_bytes:
                        yield layout, learner, tp, num_rollout // tp, server

    def _plan(self, fit: _Fit, measured: Measured, estimator: Estimator | None) -> Plan:
        layout, learner, tp, replicas, server = fit
        rollout, gpu_bytes = self.config.rollout, self.cluster.gpu_bytes
        at_once = min(rollout.prompts_per_step * rollout.group_size, rollout.max_concurrency)
        in_flight = -(-at_once // replicas)
        pair = (layout.tp, layout.sp, tp)
        used = in_flight * rollout.max_new_tokens * server.kv_bytes_per_token
        free = (server.kv_cache - used) / gpu_bytes
        return Plan(
            learner=layout,
            rollout_tp=tp,
            replicas=replicas,
            learner_memory=learner,
            rollout_memory=server,
            measured=measured.values.get(pair),
            expected=measured.expected(pair),
            learner_free=1 - learner.total / gpu_bytes,
            rollout_free=free if free >= 0 else server.kv_cache / used - 1,
            in_flight=in_flight,
            held=server.tokens // rollout.max_new_tokens,
            traffic=traffic(self.architecture, self.config, layout),
            both_free=1 - both_bytes(learner, server) / gpu_bytes if self.is_shared else None,
            time=estimator and estimator.step(layout, tp=tp, replicas=replicas, memory=server),
        )

    def _servers(self) -> list[tuple[int, RolloutMemory]]:
        """The tensor-parallel sizes of servers that stay within a node and fill some division, and the memory of each."""
        rollout = self.config.rollout
        memory = partial(
            rollout_memory,
            self.architecture,
            dtype=rollout.dtype,
            gpu_bytes=self.cluster.gpu_bytes,
            static_share=static_share(self.config),
            quantization=rollout.quantization,
            max_tokens=rollout.max_total_tokens,
        )
        taken = {num_rollout for _, num_rollout in self._divisions}
        sizes = [tp for tp in rollout_sizes(self.architecture) if any(size % tp == 0 for size in taken)]
        return [(tp, memory(tp)) for tp in sizes if self._within_node(tp)]

    def _learners(self, num_gpus: int) -> Iterator[tuple[LayoutConfig, LearnerMemory]]:
        """The learner's layouts on ``num_gpus`` of the cluster, and the memory of their fullest stages."""
        rollout = self.config.rollout
        sequences = rollout.prompts_per_step * rollout.group_size // self.config.learner.minibatches
        others = [model for model in (self.critic, self.reference) if model is not None]
        for layout in fitting_layouts(self.architecture, num_gpus, context=CONTEXT_SIZES):
            fits_others = not any(layout_problems(model, layout) for model in others)
            if fits_others and self._within_node(layout.tp) and sequences % layout.dp_size == 0:
                yield layout, worst_stage(self.architecture, layout, self.work)

    def _within_node(self, tp: int) -> bool:
        return self.cluster.gpus_per_node % tp == 0

    def _changes(self) -> "list[list[tuple[str, _Search]]]":
        """Changes to try, each in a separate search, the smallest of each kind first."""
        config, cluster, learner = self.config, self.cluster, self.config.learner
        updates: dict[str, Any] = {}
        if learner.recompute == "none":
            updates["recompute"] = "full"
        budget = 2 * config.rollout.max_new_tokens
        if budget < learner.token_budget:
            updates["token_budget"] = budget
        learners = {f"learner.{k}={v}": learner.model_copy(update={k: v}) for k, v in updates.items()}
        if not learner.optimizer.offload:
            optimizer = learner.optimizer.model_copy(update={"offload": True})
            learners["learner.optimizer.offload=true"] = learner.model_copy(update={"optimizer": optimizer})
        counts = [factor * cluster.num_gpus for factor in (2, 4, 8)]
        sizes = [size * GIB for size in (24, 40, 48, 80, 141, 192, 288) if size * GIB > cluster.gpu_bytes]
        return [
            *(
                [(text, replace(self, config=config.model_copy(update={"learner": new})))]
                for text, new in learners.items()
            ),
            [(f"{n} GPUs", replace(self, cluster=replace(cluster, num_gpus=n))) for n in counts],
            [
                (f"GPUs of {size_text(n)}", replace(self, cluster=replace(cluster, gpu_bytes=n)))
                for n in sizes
            ],
        ]
