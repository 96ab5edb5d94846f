"""What the processes of a run need of their devices' memory, against what there is: for ``--dry-run``, and
before every start.

Figures are those of ``parallel/planning/memory.py``, for micro-batches filled up to the token budget. What
cannot fit is refused; what takes more than ``USABLE_SHARE`` of a GPU is only called tight, since what is not
itemised there is not known.
"""

import csv
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.loader import Finding
from configs.schema import RunConfig, SftConfig
from launch.processes.placement import gpus_of_node
from parallel.planning import memory
from parallel.planning.layout import Architecture, read_architecture, read_hf_config
from parallel.planning.planner import static_share

CPU_CACHE_TOKENS = 65536
"""Of a server on CPU, where ``rollout.max_total_tokens`` does not say."""
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)
NVIDIA_SMI_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a rank runs on."""

    kind: memory.Device
    bytes: int | None
    """Of one GPU; without GPUs, of the whole machine, which all processes share. None: not known here."""
    name: str
    host: str = "this machine"
    """Of a run without ``launch.nodes``."""

    @property
    def text(self) -> str:
        return self.name if self.bytes is None else f"{memory.size_text(self.bytes)} of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of one run: the fullest learner rank, and any server rank. None: the command starts no such process."""

    learner: memory.LearnerMemory | None
    learner_total: int
    """Of all ranks together."""
    server: memory.RolloutMemory | None
    num_server_ranks: int
    cpu_cache: int
    """Of a server rank's cache on CPU, where nothing gives it a device's rest."""

    @property
    def on_one_machine(self) -> int:
        """Of all processes, where they share the memory of one machine without GPUs."""
        of_rank = self.server.weights + self.cpu_cache if self.server else 0
        return self.learner_total + self.num_server_ranks * of_rank


def device_of(config: RunConfig | SftConfig, gpu_memory: float | None, *, in_job: bool = False) -> Device:
    """
    gpu_memory: GiB of each GPU of the machines that the run is planned for; None: it is to run here, on
    ``launch.nodes``, or in a job. in_job: on the nodes of a Slurm job: ``launch.nodes``, or without them one.
    """
    host = "the job's node" if in_job else "this machine"
    if gpu_memory is not None:
        return Device(kind="cuda", bytes=int(gpu_memory * memory.GIB), name="a GPU (--gpu-memory)", host=host)
    if isinstance(config, RunConfig) and (in_job or config.launch.nodes is not None):
        if gpus_of_node(config):
            name = "a GPU of the nodes, whose size is not known here (give --gpu-memory GIB)"
            return Device(kind="cuda", bytes=None, name=name, host=host)
        return Device(kind="cpu", bytes=None, name="the nodes", host=host)
    if gpus_here():
        return Device(kind="cuda", bytes=_smallest_gpu(), name="a GPU here")
    return Device(kind="cpu", bytes=psutil.virtual_memory().total, name="this machine")


def gpus_here() -> int:
    """GPUs that this process may use; 0 means that everything runs on CPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # without the seconds that importing torch takes
    from rollout.servers.fleet import visible_gpus

    return visible_gpus()


def ask_gpus() -> list[dict[str, str]]:
    """What the driver's own tool tells of each GPU: name, memory and used (MiB), driver; nothing where it
    does not answer."""
    names = ("name", "memory", "used", "driver")
    try:
        answer = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(names, (cell.strip() for cell in row), strict=True))
        for row in csv.reader(answer.stdout.splitlines())
    ]


def _smallest_gpu() -> int | None:
    """Bytes; None where they are not told."""
    try:
        return min(int(gpu["memory"]) for gpu in ask_gpus()) * 2**20
    except ValueError:
        return None


def need_of(config: RunConfig | SftConfig, device: Device, runs: Sequence[str]) -> Need:
    """``runs``: the roles that the command starts. Raises ValueError for a model or a static share that
    cannot be used."""
    architecture = read_architecture(read_hf_config(config.model.path))
    has_learner = "learn" in runs or "sft-rank" in runs
    stages = _stages(config, device, architecture) if has_learner else []
    layout, server, num_server_ranks, cpu_cache = config.layout, None, 0, 0
    if "serve" in runs and isinstance(config, RunConfig):
        rollout = config.rollout
        server = memory.rollout_memory(
            architecture,
            rollout.tp,
            rollout.dtype,
            device.bytes or 0,
            static_share=static_share(config),
            quantization=rollout.quantization,
        )
        num_server_ranks = rollout.replicas * rollout.tp
        cpu_cache = server.kv_bytes_per_token * (rollout.max_total_tokens or CPU_CACHE_TOKENS)
    copies = layout.tp * layout.cp * layout.dp_size if stages else 0
    return Need(
        learner=max(stages, key=lambda stage: stage.total, default=None),
        learner_total=sum(stage.total for stage in stages) * copies,
        server=server,
        num_server_ranks=num_server_ranks,
        cpu_cache=cpu_cache,
    )


def _stages(
    config: RunConfig | SftConfig, device: Device, architecture: Architecture
) -> list[memory.LearnerMemory]:
    work = memory.work_of(config, device.kind, _critic_architecture(config, architecture))
    return [
        memory.learner_memory(architecture, config.layout, work, stage) for stage in range(config.layout.pp)
    ]


def _critic_architecture(config: RunConfig | SftConfig, policy: Architecture) -> Architecture | None:
    if not isinstance(config, RunConfig) or config.critic is None:
        return None
    return (
        policy if config.critic.model is None else read_architecture(read_hf_config(config.critic.model.path))
    )


def memory_problems(config: RunConfig | SftConfig, device: Device, runs: Sequence[str]) -> Iterator[Finding]:
    """What cannot fit; nothing where the device's size is not known. The layouts must fit the models."""
    if device.bytes is None:
        return
    need = need_of(config, device, runs)
    if device.kind == "cpu":
        yield from _of_machine(config, device, device.bytes, need, runs)
        return
    if need.learner is not None and need.learner.total > device.bytes:
        yield (
            "layout",
            f"{_learner_said(config, need.learner)}, more than the {device.text}; {_learner_fix(config, device)}",
        )
    if need.server is not None and isinstance(config, RunConfig):
        yield from _of_server(config, device, need.server)
        if need.learner is not None and config.launch.placement == "colocated":
            yield from _of_shared_gpu(device, device.bytes, need.learner, need.server)


def _of_machine(
    config: RunConfig | SftConfig, device: Device, size: int, need: Need, runs: Sequence[str]
) -> Iterator[Finding]:
    if need.on_one_machine > size:
        parts = (
            [f"{_ranks(config.layout.world_size, 'learner')} {memory.size_text(need.learner_total)}"]
            if need.learner
            else []
        )
        if need.server:
            each = memory.size_text(need.server.weights + need.cpu_cache)
            parts.append(f"{_ranks(need.num_server_ranks, 'server')} {each} each")
        field = _largest_part(config, device, need, runs)
        yield (
            field,
            f"the processes need {memory.size_text(need.on_one_machine)} ({', '.join(parts)}), more than the {device.text}, which has no "
            f"GPU; use a smaller {'model' if field == 'model.path' else field}, or plan for GPUs with --dry-run --gpu-memory GIB",
        )


def _ranks(count: int, side: str) -> str:
    return f"{count} {side} rank{'s' if count > 1 else ''}"


def _largest_part(config: RunConfig | SftConfig, device: Device, need: Need, runs: Sequence[str]) -> str:
    """The field without which most would be saved; the model's, where that is less than half."""
    saved = {"model.path": need.on_one_machine // 2}
    if need.learner is not None:
        dp = config.layout.dp_size
        saved["layout.dp"] = need.learner_total * (dp - 1) // dp
        if isinstance(config, RunConfig):
            field, least = (
                "learner.token_budget",
                {"learner": config.learner.model_copy(update={"token_budget": 1})},
            )
        else:
            field, least = "token_budget", {"token_budget": 1}
        saved[field] = (
            need.learner_total - need_of(config.model_copy(update=least), device, runs).learner_total
        )
    if need.server is not None and isinstance(config, RunConfig):
        replicas = config.rollout.replicas
        of_servers = need.num_server_ranks * (need.server.weights + need.cpu_cache)
        saved["rollout.replicas"] = of_servers * (replicas - 1) // replicas
        saved["rollout.max_total_tokens"] = need.num_server_ranks * need.cpu_cache
    return max(saved, key=lambda field: saved[field])


def _learner_said(config: RunConfig | SftConfig, learner: memory.LearnerMemory) -> str:
    budget = "learner.token_budget" if isinstance(config, RunConfig) else "token_budget"
    size = config.learner.token_budget if isinstance(config, RunConfig) else config.token_budget
    layout = config.layout
    sizes = f"layout.tp={layout.tp}, layout.pp={layout.pp}, layout.dp={layout.dp}, {budget}={size}"
    return f"with {sizes} the fullest learner rank needs {memory.describe(learner)}"


def _learner_fix(config: RunConfig | SftConfig, device: Device) -> str:
    architecture = read_architecture(read_hf_config(config.model.path))
    fixes = [
        text
        for text, changed in _smaller(config)
        if not _is_tight(max(stage.total for stage in _stages(changed, device, architecture)), device)
    ]
    return f"use {' or '.join([*fixes[:1], 'a layout that splits the model further (`tandem plan` lists those that fit)'])}"


def _smaller(config: RunConfig | SftConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes that cost no GPU; those that change no probability first, of these the least."""
    if not isinstance(config, RunConfig):
        return
    learner, budget = config.learner, 2 * config.rollout.max_new_tokens
    lower = {"token_budget": budget} if budget < learner.token_budget else {}
    again = {"recompute": "full"} if learner.recompute == "none" else {}
    for change in (again, lower, again | lower):
        text = " and ".join(f"learner.{name}={value}" for name, value in change.items())
        if change:
            yield text, config.model_copy(update={"learner": learner.model_copy(update=change)})
    if config.layout.tp > 1 and not config.layout.sp:
        split = config.model_copy(update={"layout": config.layout.model_copy(update={"sp": True})})
        yield "layout.sp=true", split
        if again:
            text = "layout.sp=true and learner.recompute=full"
            yield text, split.model_copy(update={"learner": learner.model_copy(update=again)})


def _of_server(config: RunConfig, device: Device, server: memory.RolloutMemory) -> Iterator[Finding]:
    """A server that cannot hold a single response of full length, with one token of a prompt."""
    if server.tokens > config.rollout.max_new_tokens:
        return
    size = memory.size_text
    yield (
        "rollout.tp",
        f"with rollout.tp={config.rollout.tp} a server rank holds {size(server.weights)} of weights and leaves {size(server.reserved)} to "
        f"SGLang's activations, so that the {device.text} have room for {server.tokens} tokens, and rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens} do not fit; use a larger rollout.tp, or shorter responses",
    )


def _of_shared_gpu(
    device: Device, gpu: int, of_learner: memory.LearnerMemory, server: memory.RolloutMemory
) -> Iterator[Finding]:
    """While weights are sent, both models are there; otherwise the GPU is the learner's or the servers'
    alone."""
    learner, size = of_learner.lasting + of_learner.transfer, memory.size_text
    if learner + server.weights <= gpu:
        return
    yield (
        "launch.placement",
        f"launch.placement=colocated: while weights are sent a learner rank holds {size(learner)}, beside {size(server.weights)} of "
        f"weights of a server rank, more than the {device.text}; set launch.placement=separate, or split both models further",
    )


def memory_lines(config: RunConfig | SftConfig, device: Device, runs: Sequence[str]) -> list[str]:
    """What the fullest rank of either side holds, itemised, against its device."""
    need = need_of(config, device, runs)
    lines = []
    if need.learner is not None:
        stage = (
            f" (pipeline stage {need.learner.stage} of {config.layout.pp})" if config.layout.pp > 1 else ""
        )
        items = sorted(need.learner.items().items(), key=lambda item: -item[1])
        title = f"memory of {'the fullest' if stage else 'a'} learner rank{stage}: {memory.size_text(need.learner.total)}"
        lines += [title + _of_device(need.learner.total, device), *_itemised(items)]
        if _is_tight(need.learner.total, device):
            lines.append(f"  tight: {_learner_fix(config, device)}")
        if isinstance(config, RunConfig):
            lines.append(
                "  of the transfer, and of activations, logits and pipeline together, the larger counts: never both are there"
            )
    if need.server is not None:
        lines += _server_lines(need.server, need.cpu_cache, device)
    if device.kind == "cpu" and device.bytes is not None:
        size = memory.size_text(need.on_one_machine)
        lines.append(
            f"memory of all processes, the programs themselves left out: {size} of the {device.text}"
        )
    return lines


def _of_device(size: int, device: Device) -> str:
    """Without GPUs only all processes together have a device."""
    if device.kind == "cpu":
        return ""
    if device.bytes is None:
        return f" of {device.name}"
    tight = ", tight" if _is_tight(size, device) else ""
    return f" of the {device.text}: {size / device.bytes:.0%}{tight}"


def _is_tight(size: int, device: Device) -> bool:
    return device.kind == "cuda" and device.bytes is not None and size > memory.USABLE_SHARE * device.bytes


def _server_lines(server: memory.RolloutMemory, cpu_cache: int, device: Device) -> list[str]:
    items = [("weights", server.weights)]
    if device.kind == "cpu":
        items.append((f"cache for {cpu_cache // server.kv_bytes_per_token:,} tokens", cpu_cache))
        title = f": {memory.size_text(server.weights + cpu_cache)}"
    elif device.bytes is None:
        title = f", beside its cache, of {device.name}"
    else:
        items.append((f"cache for {server.tokens:,} tokens", server.kv_cache))
        items.append(("left to SGLang's activations", server.reserved))
        title = f": all of the {device.text}"
    each = memory.size_text(server.kv_bytes_per_token)
    return [
        f"memory of a server rank{title}",
        *_itemised(items),
        f"  each token of a response takes {each} of the cache",
    ]


def _itemised(items: Sequence[tuple[str, int]]) -> list[str]:
    width = max(len(name) for name, _ in items)
    return [f"  {name.ljust(width)}  {memory.size_text(size):>10}" for name, size in items]
