"""The page of ``tandem plan --report``: memory by part and rank, the time of a step, and mismatch against time of all pairs
that fit. It needs neither network nor scripts (``trainer/report/``)."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from configs.schema.layout import layout_text
from launch.commands.plan import Found
from parallel.planning.architecture import architecture_of
from parallel.planning.measured import by_rule
from parallel.planning.memory import (
    BESIDE_SERVERS,
    GIB,
    OF_AN_UPDATE,
    USABLE_SHARE,
    LearnerMemory,
    learner_memory,
    size_text,
)
from parallel.planning.other_models import work_of_run
from parallel.planning.planner import Cluster, Plan
from parallel.planning.reasons import reasons
from parallel.planning.time import StepTime, assumptions, seconds_text
from trainer.report.drawing import COLORS, LEGEND, new_figure
from trainer.report.page import render, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
WAITS = "waits"
MOST_STAGES = 8
"""Stages that are drawn; of more the first, the last and some between."""
ROWS = 20
"""Pairs in the table."""
WIDTH = 9.5
"""Inches of a picture."""
LEARNER_PARTS = (
    "parameters", "gradients", "optimizer", "reference", "critic", *OF_AN_UPDATE, "optimizer_step", "transfer",
)  # fmt: skip
TIME_COLORS = {
    "prefill": "#56b4e9", "decode": "#0072b2", "requests": "#004a75",
    "score": "#e69f00", "update": "#d55e00", "optimizer": "#8c3d00", "rest": "#b9770e",
    "transfer": "#009e73", WAITS: "#eeeeee",
}  # fmt: skip
MEMORY_COLORS = dict(
    zip(LEARNER_PARTS, (*COLORS, "#8c6d31", "#b0b0b0", "#f0e442", "#4d4d4d"), strict=True)
) | {
    "weights": "#08306b",
    "cache": "#9ecae1",
    "reserved": "#dddddd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of a lane of the timeline."""

    name: str
    start: float
    seconds: float


def write_page(path: Path, config_path: Path, found: Found) -> None:
    """Write the page of these plans, all with an estimate of time."""
    config, cluster, timing, plans = found.config, found.cluster, found.timing, found.plans
    best = plans[0]
    assert timing is not None and best.time is not None
    architecture = architecture_of(config.model.path)
    work = work_of_run(config, "cuda", architecture)
    stages = [learner_memory(architecture, best.learner, work, s) for s in range(best.learner.pp)]
    figures = [
        shown(
            "Memory",
            "Bytes of each rank at its fullest moment, of the first pair. Cache takes what a server has left.",
            [draw_memory(stages, best, cluster)],
        ),
        shown(
            "A step",
            "Who works when, and who waits for whom, of the first pair. The bars of stages are the update's own work; the rest of "
            "the update's time a stage waits for others.",
            [draw_timeline(best.time)],
        ),
        shown(
            "Responses under way",
            "At the server with the longest response. Where the line falls, a server reads its weights for fewer and fewer responses.",
            [draw_running(best.time)],
        ),
        shown(
            "Mismatch against time",
            f"All {len(plans)} pairs that fit. The star is the first pair: seconds that agree to two digits count as equal. "
            "Pale: servers with room for few responses.",
            [draw_choices(plans)],
        ),
    ]
    facts = [
        ("learner", layout_text(best.learner)),
        ("servers", f"tp={best.rollout_tp} x {best.replicas}"),
        ("a step", f"{seconds_text(best.time.total)} s"),
        *((name, f"{seconds_text(seconds)} s") for name, seconds in best.time.shares().items()),
    ]
    rows, size = table_of(plans[:ROWS]), size_text(cluster.gpu_bytes)
    text = render(
        "plan.html",
        title=f"A plan for {cluster.num_gpus} GPUs",
        subtitle=f"{config_path}, {timing.machine.hardware.name}, {size} a GPU. Seconds are estimated.",
        facts=facts,
        figures=figures,
        compared=[(f"The first {len(rows) - 1} pairs", "By mismatch, then by time.", rows)],
        assumptions=assumptions(config, timing.lengths, timing.machine),
    )
    path.write_text(text, encoding="utf-8")


def table_of(plans: Sequence[Plan]) -> list[list[str]]:
    """The titles, and a row for each pair."""
    rows = [["learner", "servers", "s a step", "sampling", "training", "transfer", "why it stands here"]]
    for pair, reason in zip(plans, reasons([*plans]), strict=True):
        assert pair.time is not None
        shares = map(seconds_text, pair.time.shares().values())
        servers = f"tp={pair.rollout_tp} x {pair.replicas}"
        rows.append([layout_text(pair.learner), servers, seconds_text(pair.time.total), *shares, reason])
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# memory


def draw_memory(stages: Sequence[LearnerMemory], pair: Plan, cluster: Cluster) -> "Figure":
    server = pair.rollout_memory
    rows: list[tuple[str, Mapping[str, int]]] = [
        (f"learner, stage {memory.stage}", memory.at_peak()) for memory in _some(stages)
    ]
    cache = server.kv_cache + server.states
    rows.append(("a server's rank", {"weights": server.weights, "cache": cache, "reserved": server.reserved}))
    if pair.both_free is not None:
        learner = pair.learner_memory.at_peak(BESIDE_SERVERS)
        rows.append(("both, between turns", learner | {"weights": server.weights}))
    figure, axes = _figure(len(rows))
    for place, (_, items) in enumerate(rows):
        left = 0.0
        for name, size in items.items():
            axes.barh(place, size / GIB, left=left, color=MEMORY_COLORS[name], height=0.7)
            left += size / GIB
    _legend(axes, MEMORY_COLORS, {name for _, items in rows for name in items})
    limit = cluster.gpu_bytes / GIB
    axes.axvline(limit, color="#222222", linewidth=1.2)
    axes.axvline(USABLE_SHARE * limit, color="#222222", linewidth=1.2, linestyle=":")
    axes.set_xlim(0, 1.04 * limit)
    axes.set_xlabel(f"GiB of {limit:.0f}; dotted: what a learner's rank may take")
    _rows(axes, [name for name, _ in rows])
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# time


def lanes(time: StepTime) -> dict[str, list[Block]]:
    """What servers and each stage of the learner do in a step, one after another. Every lane ends with the transfer."""
    sampling, training, both = time.sampling, time.training, time.total - time.transfer
    last: list[tuple[str, float]] = [("transfer", time.transfer)]
    of_servers = [("prefill", sampling.prefill), ("decode", sampling.decode), ("requests", sampling.requests)]
    found = {"servers": _blocks([*of_servers, (WAITS, time.server_waits), *last])}
    together = training.compute + training.collectives + training.bubble
    for stage, own in _some([*enumerate(training.stages)]):
        of_stage = [(WAITS, both - training.total), ("score", training.score), ("update", own)]
        of_stage += [(WAITS, together - own), ("optimizer", training.optimizer), ("rest", training.rest)]
        found[f"learner, stage {stage}"] = _blocks([*of_stage, *last])
    return found


def _blocks(parts: Sequence[tuple[str, float]]) -> list[Block]:
    blocks, start = [], 0.0
    for name, seconds in parts:
        if seconds > 0:
            blocks.append(Block(name=name, start=start, seconds=seconds))
        start += seconds
    return blocks


def draw_timeline(time: StepTime) -> "Figure":
    by_lane = lanes(time)
    figure, axes = _figure(len(by_lane))
    for place, blocks in enumerate(by_lane.values()):
        for block in blocks:
            style = {"color": TIME_COLORS[block.name], "linewidth": 0.4, "height": 0.7, "edgecolor": "white"}
            if block.name == WAITS:
                style |= {"edgecolor": "#bbbbbb", "hatch": "///"}
            axes.barh(place, block.seconds, left=block.start, **style)
    _legend(axes, TIME_COLORS, {block.name for blocks in by_lane.values() for block in blocks})
    axes.set_xlim(0, time.total)
    axes.set_xlabel("seconds")
    _rows(axes, [*by_lane])
    return figure


def draw_running(time: StepTime) -> "Figure":
    decoded = time.sampling.decoded
    figure, axes = _figure(3)
    starts = [start for start, _ in decoded.profile] + [decoded.seconds]
    running = [count for _, count in decoded.profile]
    axes.stairs(running, starts, fill=True, color="#9ecae1", edgecolor=COLORS[0])
    axes.axhline(decoded.mean_running, color=COLORS[1], linestyle="--", linewidth=1.2)
    steps = "" if not time.staleness else f" of {1 + time.staleness} steps that are sampled together"
    axes.set_xlabel(f"seconds of decoding{steps}; dashed: the mean")
    axes.set_ylabel("responses")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(decoded.seconds, 1e-9))
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# choices


def draw_choices(plans: Sequence[Plan]) -> "Figure":
    """Every pair at its seconds and its expected mismatch: the table's, or without one the kind of pair by the rule."""
    has_table = any(math.isfinite(pair.expected) for pair in plans)
    kinds = sorted({by_rule(pair.pair) for pair in plans})
    figure, axes = _figure(max(4, len(kinds)))
    for few, color in ((True, "#cccccc"), (False, COLORS[0])):
        chosen = [pair for pair in plans[1:] if pair.has_few == few]
        heights = [pair.expected if has_table else kinds.index(by_rule(pair.pair)) for pair in chosen]
        axes.scatter(_seconds(chosen), heights, s=22, color=color, alpha=0.7, linewidths=0)
    first = plans[0]
    height = first.expected if has_table else kinds.index(by_rule(first.pair))
    axes.scatter(_seconds([first]), [height], s=170, marker="*", color=COLORS[1], zorder=3)
    seconds = _seconds(plans)
    if max(seconds) > 5 * min(seconds):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter("{x:,g}")
    axes.set_xlabel("seconds of a step")
    if has_table:
        axes.set_ylabel("mismatch, measured or expected")
    else:
        names = [("same TP" if ratio == 1 else f"TP {ratio:g} x apart", sp) for ratio, sp in kinds]
        _rows(axes, [f"{name}{', SP' if sp else ''}" for name, sp in names])
        axes.grid(True, axis="both", color="#e4e4e4", linewidth=0.8)
    return figure


def _seconds(plans: Sequence[Plan]) -> list[float]:
    return [pair.time.total for pair in plans if pair.time is not None]


# ---------------------------------------------------------------------------------------------------------------------
# axes


def _some(values: Sequence[T]) -> list[T]:
    """At most ``MOST_STAGES`` of them, evenly, the first and the last among these."""
    if len(values) <= MOST_STAGES:
        return [*values]
    places = {round(i * (len(values) - 1) / (MOST_STAGES - 1)) for i in range(MOST_STAGES)}
    return [values[place] for place in sorted(places)]


def _figure(rows: int) -> "tuple[Figure, Axes]":
    from matplotlib.ticker import AutoLocator

    figure, (axes,) = new_figure(1, "", size=(WIDTH, 1.3 + 0.36 * rows))
    axes.xaxis.set_major_locator(AutoLocator())  # not whole steps
    return figure, axes


def _rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")


def _legend(axes: "Axes", colors: Mapping[str, str], drawn: Set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in colors.items() if name in drawn]
    place = {"bbox_to_anchor": (-0.02, 1.0), "ncols": len(handles)}
    axes.legend(handles=handles, handlelength=1.2, columnspacing=1.0, **place, **LEGEND)
