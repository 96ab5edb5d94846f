"""``tandem simulate``: what ranks of a run's learner need, found by running their code on simulated devices."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from configs.loader import load_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input, check_file_to_write
from launch.studies.simulate import SimulationFailed, ranks_of_stages, simulate_ranks
from launch.tables import aligned, indented, print_table
from parallel.planning.architecture import Architecture, read_architecture, read_hf_config
from parallel.planning.layout import validate_layout
from parallel.planning.memory import GIB, USABLE_SHARE, LearnerMemory, learner_memory, size_text
from parallel.planning.other_models import work_of_run
from parallel.planning.simulated import START, SimulatedRank

WIDTH = 120
TITLES = (
    "rank", "stage", "peak", "in", "planned", "peak / planned", "FLOPs of the update", "sent to servers", "seconds",
)  # fmt: skip


def print_simulation(
    path: Path,
    overrides: list[str],
    *,
    ranks: Sequence[int] | None,
    gpu_memory: float | None,
    json_path: Path | None,
) -> bool:
    """Simulate ranks of the config's learner and print what they need. Returns whether all fit into the GPUs, if their
    memory is given.

    ranks: None for the first rank of the first, a middle and the last pipeline stage.
    """
    with as_bad_input():
        if json_path is not None:
            check_file_to_write("--json", json_path)
    config, architecture = _checked(path, overrides)
    layout = config.layout
    chosen = ranks_of_stages(layout) if ranks is None else sorted(set(ranks))
    outside = [rank for rank in chosen if not 0 <= rank < layout.world_size]
    if outside:
        raise BadInput(f"--rank {outside[0]}: the layout has ranks 0 to {layout.world_size - 1}")
    number = f"{len(chosen)} of {layout.world_size} ranks"
    print(f"{number}, without weights and devices; a rank takes a minute or so", flush=True)
    simulated: list[SimulatedRank] = []
    try:
        for rank in simulate_ranks(config, chosen):
            simulated.append(rank)
            peak = f"{size_text(rank.peak)} at its peak"
            print(f"rank {rank.rank}: {peak}, after {rank.seconds:.0f} s", flush=True)
    except SimulationFailed as error:
        raise BadInput(f"{path}: the learner does not run: {error}") from error
    simulated.sort(key=lambda rank: rank.rank)
    print()
    print_table(TITLES, [_row(rank, planned(config, architecture, rank)) for rank in simulated], width=WIDTH)
    for rank in simulated:
        print("\n".join(["", *_details(rank)]))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(rank) for rank in simulated], indent=1))
    return _all_fit(path, simulated, gpu_memory)


def _checked(path: Path, overrides: list[str]) -> tuple[RunConfig, Architecture]:
    """The config, and the architecture of its model. Raises BadInput if the layout does not fit."""
    config = load_config(path, overrides)
    if not isinstance(config, RunConfig):
        raise BadInput(f"{path}: kind: {config.kind} has no step to simulate; this command takes kind: train")
    if config.layout.dp == "auto":
        raise BadInput(f"{path}: layout.dp=auto: a simulation has no processes to count; give a number")
    with as_bad_input(f"{path}: "):
        hf_config = read_hf_config(config.model.path)
        validate_layout(hf_config, config.layout, num_processes=config.layout.world_size)
        return config, read_architecture(hf_config)


def planned(config: RunConfig, architecture: Architecture, rank: SimulatedRank) -> LearnerMemory:
    """The memory model's estimate for the step that was simulated."""
    work, step = work_of_run(config, "cuda", architecture), rank.step
    work = replace(work, token_budget=step.tokens, num_microbatches=step.microbatches)
    return learner_memory(architecture, config.layout, work, rank.stage)


def _row(rank: SimulatedRank, plan: LearnerMemory) -> list[str]:
    return [
        str(rank.rank),
        str(rank.stage),
        size_text(rank.peak),
        rank.fullest,
        size_text(plan.total),
        f"{rank.peak / plan.total:.3f}",
        f"{rank.parts['update'].flops / 1e12:,.1f} T",
        f"{size_text(sum(rank.buckets))} in {len(rank.buckets)}",
        f"{rank.seconds:.0f}",
    ]


def _details(rank: SimulatedRank) -> Iterator[str]:
    step = rank.step
    yield (
        f"rank {rank.rank}: {rank.parameters:,} parameters; {step.microbatches} micro-batches of {step.samples} x {step.places:,} "
        f"tokens, of each {step.response:,} of a response"
    )
    items = rank.parts.items()
    parts = {name: part for name, part in items if part.flops or part.collectives or name == START}
    rows = [("part", "peak", "of it", "", "", "")]
    for name, part in parts.items():
        sizes = sorted(part.at_peak.items(), key=lambda item: -item[1])
        of_it = ", ".join(f"{what} {size_text(size)}" for what, size in sizes if size >= 2**20)
        flops, reads = f"{part.flops / 1e12:,.1f} TFLOP", f"{part.host_reads:,} reads by the host"
        rows.append((name, size_text(part.peak), of_it, flops, reads, ""))
    yield from indented(aligned(rows))
    collectives = [
        (name, c.operation, c.group, str(c.size), f"{c.calls:,}", size_text(c.bytes))
        for name, part in parts.items()
        for c in sorted(part.collectives, key=lambda c: -c.bytes)
    ]
    yield ""
    titles = ("part", "collective", "group", "ranks", "calls", "bytes")
    yield from indented(aligned([titles, *collectives]))


def _all_fit(path: Path, simulated: Sequence[SimulatedRank], gpu_memory: float | None) -> bool:
    if gpu_memory is None:
        return True
    fullest = max(simulated, key=lambda rank: rank.peak)
    usable = USABLE_SHARE * gpu_memory * GIB
    if fullest.peak <= usable:
        print(f"\nfits: {size_text(fullest.peak)} of the {size_text(int(usable))} usable on each GPU")
        return True
    takes = f"rank {fullest.rank} takes {size_text(fullest.peak)} in its {fullest.fullest}"
    more = f"more than the {size_text(int(usable))} that are usable of {gpu_memory:g} GiB"
    fix = "split the model further by layout.tp, layout.pp or layout.ep (`tandem plan` has layouts that fit)"
    print(f"\n{path}: {takes}, {more}; {fix}, or lower learner.token_budget")
    return False
