"""Compares the memory that a run's processes need with the memory of their devices: for ``--dry-run``, and
before every start.

The figures come from ``parallel/planning/memory.py``, for micro-batches filled up to the token budget. A run
that cannot fit is refused. A need above ``USABLE_SHARE`` of a GPU is only called tight, since the size of the
items that are not listed there is unknown.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from pydantic import ValidationError

from configs.errors import counted
from configs.loader import Finding
from configs.schema import AnyConfig, RunConfig
from launch.checks.devices import Device
from launch.processes.placement import learner_ranks_per_node
from launch.tables import aligned, indented
from parallel.planning import memory
from parallel.planning.architecture import Architecture, architecture_of
from parallel.planning.layout import layout_problems
from parallel.planning.other_models import work_of_run
from parallel.planning.server_memory import RolloutMemory, both_bytes, rollout_memory, static_share
from rollout.sampling.prompt_room import response_limit

CPU_CACHE_TOKENS = 65536
"""Cache of a server on CPU without ``rollout.max_total_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory of one run: of the fullest learner rank, and of any server rank. None: the command starts no
    such process."""

    learner: memory.LearnerMemory | None
    learner_total: int
    """Bytes of all learner ranks together."""
    server: RolloutMemory | None
    num_server_ranks: int
    cpu_cache: int
    """Bytes of a server rank's cache on CPU. (On a GPU the cache gets the rest of the device.)"""

    @property
    def server_rank_bytes(self) -> int:
        """Bytes of a server rank on CPU; 0 without servers."""
        return self.server.weights + self.server.states + self.cpu_cache if self.server else 0

    @property
    def on_one_machine(self) -> int:
        """Bytes of all processes, where they share the memory of one machine without GPUs."""
        return self.learner_total + self.num_server_ranks * self.server_rank_bytes


def need_of(config: AnyConfig, device: Device, runs: Sequence[str]) -> Need:
    """``runs``: the roles that the command starts. Raises ValueError for an unusable model or static share."""
    architecture = architecture_of(config.model.path)
    has_learner = "learn" in runs or "sft-rank" in runs
    stages = _stages(config, device, architecture) if has_learner else []
    layout, server, num_server_ranks, cpu_cache = config.layout, None, 0, 0
    if "serve" in runs and isinstance(config, RunConfig):
        rollout = config.rollout
        server = rollout_memory(
            architecture,
            rollout.tp,
            rollout.dtype,
            device.bytes or 0,
            static_share=static_share(config),
            quantization=rollout.quantization,
            max_tokens=rollout.max_total_tokens,
        )
        num_server_ranks = rollout.replicas * rollout.tp
        cpu_cache = server.kv_bytes_per_token * (rollout.max_total_tokens or CPU_CACHE_TOKENS)
        if device.kind == "cpu":
            server = replace(server, states=server.state_bytes_per_response * rollout.max_concurrency)
    copies = layout.tp * layout.cp * layout.dp_size if stages else 0
    return Need(
        learner=max(stages, key=lambda stage: stage.total, default=None),
        learner_total=sum(stage.total for stage in stages) * copies,
        server=server,
        num_server_ranks=num_server_ranks,
        cpu_cache=cpu_cache,
    )


def _stages(config: AnyConfig, device: Device, architecture: Architecture) -> list[memory.LearnerMemory]:
    work, layout = work_of_run(config, device.kind, architecture), config.layout
    return [memory.learner_memory(architecture, layout, work, stage) for stage in range(layout.pp)]


def memory_problems(config: AnyConfig, device: Device, runs: Sequence[str]) -> Iterator[Finding]:
    """The processes that cannot fit; none if the device's size is unknown. The layouts must fit the models."""
    if device.bytes is None:
        return
    need = need_of(config, device, runs)
    if device.kind == "cpu":
        if need.on_one_machine > device.bytes:
            yield _machine_finding(config, device, need, runs)
        return
    if need.learner is not None and need.learner.total > device.bytes:
        error = f"{_learner_need_text(config, need.learner)}, more than the {device.text}"
        yield "layout", f"{error}; {_learner_fix(config, device)}"
    if need.server is not None and isinstance(config, RunConfig):
        yield from _server_findings(config, device, need.server)
        # Both models are in memory while weights are sent or a checkpoint is written; otherwise one side has the GPU to itself.
        learner, size = need.learner if config.launch.takes_turns else None, memory.size_text
        if learner is not None and both_bytes(learner, need.server) > device.bytes:
            held = f"a learner rank holds {size(learner.beside_servers)}"
            both = f"{held}, beside {size(need.server.weights)} of weights of a server rank"
            when = "while weights are sent or a checkpoint is written"
            error = f"launch.placement=colocated: {when} {both}, more than the {device.text}"
            yield "launch.placement", f"{error}; set launch.placement=separate, or split both models further"


def _machine_finding(config: AnyConfig, device: Device, need: Need, runs: Sequence[str]) -> Finding:
    parts, size = [], memory.size_text
    if need.learner:
        parts.append(f"{counted(config.layout.world_size, 'learner rank')} {size(need.learner_total)}")
    if need.server:
        parts.append(f"{counted(need.num_server_ranks, 'server rank')} {size(need.server_rank_bytes)} each")
    field = _most_saving_field(config, device, need, runs)
    error = f"the processes need {size(need.on_one_machine)} ({', '.join(parts)}), more than the {device.text}, which has no GPU"
    smaller = "model" if field == "model.path" else field
    return field, f"{error}; use a smaller {smaller}, or plan for GPUs with --dry-run --gpu-memory GIB"


def _most_saving_field(config: AnyConfig, device: Device, need: Need, runs: Sequence[str]) -> str:
    """The field whose reduction saves the most memory; ``model.path`` if none saves half of it."""
    saved = {"model.path": need.on_one_machine // 2}
    if need.learner is not None:
        dp = config.layout.dp_size
        saved["layout.dp"] = need.learner_total * (dp - 1) // dp
        field, least = "token_budget", {"token_budget": 1}
        if isinstance(config, RunConfig):
            field, least = "learner.token_budget", {"learner": config.learner.model_copy(update=least)}
        least_need = need_of(config.model_copy(update=least), device, runs)
        saved[field] = need.learner_total - least_need.learner_total
    if need.server is not None and isinstance(config, RunConfig):
        replicas = config.rollout.replicas
        all_servers = need.num_server_ranks * need.server_rank_bytes
        saved["rollout.replicas"] = all_servers * (replicas - 1) // replicas
        saved["rollout.max_total_tokens"] = need.num_server_ranks * need.cpu_cache
    return max(saved, key=lambda field: saved[field])


def _learner_need_text(config: AnyConfig, learner: memory.LearnerMemory) -> str:
    budget = "learner.token_budget" if isinstance(config, RunConfig) else "token_budget"
    size = config.learner.token_budget if isinstance(config, RunConfig) else config.token_budget
    layout = config.layout
    context = f"layout.cp={layout.cp}, " if layout.cp > 1 else ""
    sizes = f"layout.tp={layout.tp}, {context}layout.pp={layout.pp}, layout.dp={layout.dp}, {budget}={size}"
    return f"with {sizes} the fullest learner rank needs {memory.describe(learner)}"


def _learner_fix(config: AnyConfig, device: Device) -> str:
    architecture = architecture_of(config.model.path)
    layout = "a layout that splits the model further (`tandem plan` lists those that fit)"
    for changes in _smaller(config) if isinstance(config, RunConfig) else ():
        content = config.model_dump()
        for field, value in changes.items():
            *blocks, name = field.split(".")
            inner = content
            for block in blocks:
                inner = inner[block]
            inner[name] = value
        with contextlib.suppress(ValidationError):  # another field forbids it
            changed = RunConfig.model_validate(content)
            most = max(stage.total for stage in _stages(changed, device, architecture))
            if not _is_tight(most, device) and not layout_problems(architecture, changed.layout):
                text = " and ".join(f"{field}={str(value).lower()}" for field, value in changes.items())
                return f"use {text} or {layout}"
    return f"use {layout}"


def _smaller(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes that need no more GPUs, {field: value}, the best first: first those that keep every probability, the smallest
    of these before the others."""
    learner, layout, budget = config.learner, config.layout, 2 * config.rollout.max_new_tokens
    lower = {"learner.token_budget": budget} if budget < learner.token_budget else {}
    again = {"learner.recompute": "full"} if learner.recompute == "none" else {}
    yield from filter(None, (again, lower, again | lower))
    if not learner.optimizer.offload:
        away = {"learner.optimizer.offload": True}
        yield from (away, away | again, away | again | lower)
    for factor in (2, 4, 8):
        if layout.dp_size % factor == 0:
            yield {"layout.cp": factor * layout.cp, "layout.dp": layout.dp_size // factor}
    if layout.tp > 1 and not layout.sp:
        yield {"layout.sp": True}
        if again:
            yield {"layout.sp": True} | again


def _server_findings(config: RunConfig, device: Device, server: RolloutMemory) -> Iterator[Finding]:
    """A server must hold one response of full length, with one token of a prompt."""
    rollout, size = config.rollout, memory.size_text
    limits = response_limit(config, "training"), response_limit(config, "held-out")
    field, longest = max(limits, key=itemgetter(1))
    if server.tokens > longest or server.unused:
        return  # too small a limit of the cache is refused by ``prompt_room``
    left = f"leaves {size(server.reserved)} to SGLang's activations"
    room = f"the {device.text} have room for {server.tokens} tokens, and {field}={longest} do not fit"
    error = f"with rollout.tp={rollout.tp} a server rank holds {size(server.weights)} of weights and {left}, so that {room}"
    yield "rollout.tp", f"{error}; use a larger rollout.tp, or shorter responses"


def memory_lines(config: AnyConfig, device: Device, runs: Sequence[str]) -> list[str]:
    """The itemised memory of the fullest rank of each side, beside that of its device."""
    need, lines = need_of(config, device, runs), []
    if need.learner is not None:
        total, pp = need.learner.total, config.layout.pp
        stage = f"the fullest learner rank (pipeline stage {need.learner.stage} of {pp})"
        rank = stage if pp > 1 else "a learner rank"
        lines.append(f"memory of {rank}: {memory.size_text(total)}{_device_note(total, device)}")
        lines += _itemised(sorted(need.learner.items().items(), key=lambda item: -item[1]))
        if _is_tight(total, device):
            lines.append(f"  tight: {_learner_fix(config, device)}")
        items = need.learner.items()
        moments = [" + ".join(filter(items.get, names)) for names in memory.MOMENTS]
        if len(apart := [*filter(None, moments)]) > 1:
            lines.append(f"  never in memory at the same time, so the largest counts: {', '.join(apart)}")
        if on_host := need.learner.on_host:
            ranks = learner_ranks_per_node(config)
            node = f", {memory.size_text(ranks * on_host)} on a node of {ranks} ranks" if ranks > 1 else ""
            lines.append(f"  of the machine's memory (optimizer.offload): {memory.size_text(on_host)}{node}")
    if need.server is not None:
        lines += _server_lines(need, need.server, device)
    if device.kind == "cpu" and device.bytes is not None:
        size = memory.size_text(need.on_one_machine)
        lines.append(f"memory of all processes, without the programs themselves: {size} of the {device.text}")
    return lines


def _device_note(size: int, device: Device) -> str:
    """The device's size beside that of one rank; empty without GPUs, where all ranks share the machine."""
    if device.kind == "cpu":
        return ""
    if device.bytes is None:
        return f" of {device.name}"
    tight = ", tight" if _is_tight(size, device) else ""
    return f" of the {device.text}: {size / device.bytes:.0%}{tight}"


def _is_tight(size: int, device: Device) -> bool:
    return device.kind == "cuda" and device.bytes is not None and size > memory.USABLE_SHARE * device.bytes


def _server_lines(need: Need, server: RolloutMemory, device: Device) -> list[str]:
    items = [("weights", server.weights)]
    if device.kind == "cpu":
        items.append((f"cache for {need.cpu_cache // server.kv_bytes_per_token:,} tokens", need.cpu_cache))
        title = f": {memory.size_text(need.server_rank_bytes)}"
    elif device.bytes is None:
        title = f", beside its cache, of {device.name}"
    else:
        items.append((f"cache for {server.tokens:,} tokens", server.kv_cache))
        items.append(("left to SGLang's activations", server.reserved))
        if server.unused:
            items.append(("unused, by rollout.max_total_tokens", server.unused))
        title = f": all of the {device.text}"
    if server.states and server.responses is not None:
        items.insert(2, (f"states of {server.responses:,} responses at once", server.states))
    each = memory.size_text(server.kv_bytes_per_token)
    return [
        f"memory of a server rank{title}",
        *_itemised(items),
        f"  each token of a response takes {each} of the cache",
    ]


def _itemised(items: Sequence[tuple[str, int]]) -> list[str]:
    rows = [(name, f"{memory.size_text(size):>10}") for name, size in items]
    return [*indented(aligned(rows))]
