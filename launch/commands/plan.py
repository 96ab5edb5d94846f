"""``tandem plan``: pairs of layouts as a table, and the best as YAML. With a description of the GPUs also the seconds of a
step, and a page with pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from configs.loader import load_config
from configs.reading.hardware import hardware_names, read_hardware
from configs.schema import RunConfig
from configs.schema.hardware import HardwareConfig
from configs.schema.layout import ONE_PROCESS, as_overrides, layout_text
from launch.checks.arguments import BadInput, as_bad_input, check_new_page
from launch.tables import print_table
from parallel.planning import memory
from parallel.planning.architecture import (
    Architecture,
    dequantised_architecture,
    read_architecture,
    read_hf_config,
)
from parallel.planning.decoding import SPREAD, Lengths
from parallel.planning.machine import Machine
from parallel.planning.measured import NO_TABLE, Measured, read_measured
from parallel.planning.other_models import critic_architecture, reference_architecture
from parallel.planning.planner import Cluster, Plan, Timing, plan
from parallel.planning.reasons import reasons
from parallel.planning.server_memory import RolloutMemory, both_bytes
from parallel.planning.time import PROMPT_TOKENS, StepTime, assumptions, seconds_text

WIDTH = 170
"""Width of the table where the output is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command. None: left out."""

    num_gpus: int
    gpus_per_node: int = 8
    gpu_memory: float | None = None
    """GiB."""
    measured: Path | None = None
    count: int = 10
    """Pairs to print."""
    gpu: str | None = None
    """A description of hardware, by its name or as a file."""
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    response_spread: float | None = None
    report: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The pairs that fit, and what they were found for."""

    config: RunConfig
    cluster: Cluster
    measured: Measured
    timing: Timing | None
    plans: Sequence[Plan]
    """The best first."""


def print_plans(config_path: Path, overrides: list[str], options: PlanOptions) -> None:
    """The best pairs with their reasons, then the best as YAML. Raises BadInput where nothing fits."""
    # The config's own layout is replaced: it may not even fit, such as a dp that does not divide the minibatches.
    config = load_config(config_path, [*overrides, *as_overrides(ONE_PROCESS)])
    if not isinstance(config, RunConfig):
        raise BadInput(f"{config_path}: kind: {config.kind} has no rollout to plan for; use kind: train")
    hardware = _hardware(options)
    cluster = _cluster(config, options, hardware)
    with as_bad_input():
        if options.report is not None:
            check_new_page("--report", options.report)
        table = read_measured(options.measured) if options.measured is not None else NO_TABLE
    with as_bad_input(f"{config_path}: "):
        hf_config = read_hf_config(config.model.path)
        is_quantised = hf_config.get("quantization_config") is not None
        architecture = (dequantised_architecture if is_quantised else read_architecture)(hf_config)
        critic, reference = critic_architecture(config, architecture), reference_architecture(config)
        timing = timing_of(config, architecture, options, hardware)
        plans = plan(
            architecture, config, cluster, critic=critic, reference=reference, measured=table, timing=timing
        )
    if is_quantised:
        print(
            "# planned for the model in bfloat16; before a run write it by `tandem dequantise FOLDER OUT`\n"
        )
    found = Found(config=config, cluster=cluster, measured=table, timing=timing, plans=plans)
    _print_table(plans, options.count)
    _print_best(found)
    if options.report is not None and timing is not None:
        from launch.commands.plan_page import write_page  # matplotlib takes a second to import

        options.report.parent.mkdir(parents=True, exist_ok=True)
        write_page(options.report, config_path, found)
        print(f"# pictures: {options.report}")


def _print_best(found: Found) -> None:
    """Where the figures of the table come from, and the first pair as YAML."""
    config, table, timing, best = found.config, found.measured, found.timing, found.plans[0]
    if table.values:
        least = "the least measured value of all pairs that the rule ranks equal or worse"
        print(f"\n# a pair that was not measured is expected to have {least}")
        if table.step:
            rounding = f"the same multiple of {table.step:.2g}, two standard errors"
            print(f"# measured values that round to {rounding}, count as equal")
    if timing is None:
        print("\n# add --gpu h100 (or the kind that you have) to rank by seconds; the order may change")
    else:
        print("\n# seconds are estimated, from:")
        print("\n".join(f"#   {line}" for line in assumptions(config, timing.lengths, timing.machine)))
        assert best.time is not None
        parts = (f"{name} {seconds_text(seconds)}" for name, seconds in best.time.parts().items() if seconds)
        print(f"# a step of the first, in seconds: {', '.join(parts)}")
    held = memory.describe(best.learner_memory)
    print(f"\n# the first of {len(found.plans)}; its fullest learner rank holds {held}")
    print(f"# each server rank: {server_text(best.rollout_memory)}")
    if placement_line := _placement_text(best, config, found.cluster):
        print(f"# {placement_line}")
    print(to_yaml(best, config, found.cluster), end="")


def _placement_text(best: Plan, config: RunConfig, cluster: Cluster) -> str | None:
    """What both sides hold on GPUs that they share, or how to plan for sharing; None if the run cannot share GPUs."""
    if config.launch.takes_turns:
        both = memory.size_text(both_bytes(best.learner_memory, best.rollout_memory))
        size = memory.size_text(cluster.gpu_bytes)
        turns = "learner and servers take turns on the same GPUs (launch.placement=colocated)"
        return f"{turns}; between turns both hold {both} of {size}"
    if config.launch.placement != "auto" or config.launch.nodes is not None or config.rollout.max_staleness:
        return None
    return "learner and servers have separate GPUs; launch.placement=colocated plans turns on the same GPUs"


def _hardware(options: PlanOptions) -> HardwareConfig | None:
    if options.gpu is not None:
        return read_hardware(options.gpu)
    for name in ("prompt_tokens", "response_tokens", "response_spread", "report"):
        if getattr(options, name) is not None:
            option, names = f"--{name.replace('_', '-')}", ", ".join(hardware_names())
            raise BadInput(f"{option} needs an estimate of seconds; add --gpu ({names}, or FILE.yaml)")
    return None


def _cluster(config: RunConfig, options: PlanOptions, hardware: HardwareConfig | None) -> Cluster:
    nodes, is_shared = options.gpus_per_node, config.launch.takes_turns
    if options.num_gpus == 1 and not is_shared:
        raise BadInput(
            "--gpus 1 is too few for GPUs of learner and servers each; give 2 or more, or add launch.placement=colocated, with which "
            "they take turns"
        )
    if options.num_gpus > nodes and options.num_gpus % nodes:
        error = f"--gpus {options.num_gpus} fills no whole nodes of --gpus-per-node {nodes}"
        raise BadInput(f"{error}; use a multiple of it")
    gib = options.gpu_memory if hardware is None or options.gpu_memory is not None else hardware.memory_gib
    if gib is None:
        kinds = f"{', '.join(hardware_names())}, or FILE.yaml"
        raise BadInput(f"the memory of a GPU is missing; add --gpu ({kinds}), or --gpu-memory GiB")
    return Cluster(num_gpus=options.num_gpus, gpu_bytes=int(gib * memory.GIB), gpus_per_node=nodes)


def timing_of(
    config: RunConfig, architecture: Architecture, options: PlanOptions, hardware: HardwareConfig | None
) -> Timing | None:
    """The values that decide the seconds of a step; None without a description of the hardware.

    Raises BadInput for lengths that the run cannot have, and for a precision that the hardware lacks.
    """
    if hardware is None:
        return None
    if config.rollout.quantization == "fp8" and hardware.peak_tflops.fp8 is None:
        raise BadInput(
            f"rollout.quantization=fp8, but --gpu {options.gpu} has no rate of FP8 products (peak_tflops.fp8); give one, or set none"
        )
    longest = config.rollout.max_new_tokens
    response = options.response_tokens or max(1, longest // 2)
    if response > longest:
        raise BadInput(
            f"--response-tokens {response} is above the limit rollout.max_new_tokens={longest}; lower the one, or raise the other"
        )
    room = min(config.learner.token_budget, architecture.max_positions) - longest
    prompt = options.prompt_tokens or max(1, min(PROMPT_TOKENS, room))
    if prompt > 1 and prompt > room:
        raise BadInput(
            f"--prompt-tokens {prompt}: with rollout.max_new_tokens={longest} a sample has more tokens than the {room + longest} that "
            "learner.token_budget and the model's positions allow; lower it"
        )
    spread = SPREAD if options.response_spread is None else options.response_spread
    lengths = Lengths(prompt=prompt, response=response, longest=longest, spread=spread)
    return Timing(machine=Machine(hardware=hardware, gpus_per_node=options.gpus_per_node), lengths=lengths)


def _print_table(plans: list[Plan], count: int) -> None:
    titles = ["", "learner", "rollout", "learner rank", "cache of a server", "collectives per rank and step"]
    if plans[0].time is not None:
        titles.append("s a step")
    rows = []
    for i, (pair, reason) in enumerate(zip(plans[:count], reasons(plans[:count]), strict=True), 1):
        rows.append([
            str(i),
            layout_text(pair.learner),
            f"tp={pair.rollout_tp} x {pair.replicas}",
            f"{memory.size_text(pair.learner_memory.total)}, {pair.learner_free:.0%} free",
            f"{pair.rollout_memory.tokens:,} tokens",
            memory.size_text(pair.traffic.total),
            *([] if pair.time is None else [_step_text(pair.time)]),
            reason,
        ])  # fmt: skip
    print_table([*titles, "why it stands here"], rows, width=WIDTH)


def _step_text(time: StepTime) -> str:
    """The seconds of a step and of its three parts."""
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in time.shares().items())
    return f"{seconds_text(time.total)}: {parts}"


def to_yaml(best: Plan, config: RunConfig, cluster: Cluster) -> str:
    """Blocks to paste into a config, or to put into a file that ``extends`` it."""
    kept = ("token_budget", "logprob_chunk_tokens", "recompute")
    blocks: dict[str, dict] = {
        "layout": best.learner.model_dump(),
        "rollout": {"tp": best.rollout_tp, "replicas": best.replicas},
        "learner": {name: getattr(config.learner, name) for name in kept},
    }
    if config.launch.takes_turns:  # both sides' layouts take all GPUs: separate ones would be twice as many
        blocks["launch"] = {"placement": "colocated"}
        if (count := cluster.num_gpus // cluster.gpus_per_node) > 1:
            nodes = {"learner": count, "rollout": count, "gpus_per_node": cluster.gpus_per_node}
            blocks["launch"]["nodes"] = nodes
    return yaml.safe_dump(blocks, sort_keys=False, default_flow_style=None)


def server_text(server: RolloutMemory) -> str:
    """The memory of a server rank as text."""
    size = memory.size_text
    cache = f"{size(server.kv_cache)} of cache for {server.tokens:,} tokens"
    if server.responses is not None:
        cache += f", {size(server.states)} of states of {server.responses:,} responses at once"
    unused = f", {size(server.unused)} unused by rollout.max_total_tokens" if server.unused else ""
    return f"{size(server.weights)} of weights, {cache}, {size(server.reserved)} left to SGLang's activations{unused}"
