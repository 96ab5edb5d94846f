"""``tandem sweep``: a run for every combination of values, on this machine, checked before the first one starts.

The runs themselves, and the sweep's memory: launch/processes/sweeping.py.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError, Problem, counted
from configs.loader import parse_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input
from launch.checks.config import TRAINING, load_checked
from launch.checks.device_memory import need_of
from launch.checks.devices import device_of, gpus_here
from launch.commands.results import print_comparison
from launch.grid import combinations, run_name
from launch.processes.locks import locked
from launch.processes.placement import ranks_of_machine
from launch.processes.stopping import RunStopped
from launch.processes.supervisor import Interrupted, RoleFailed
from launch.processes.sweeping import Cell, Sweep
from launch.tables import aligned
from parallel.planning.memory import size_text

OF_EVERY_RUN = ("name", "resume", "launch.runs_dir")
"""Settings that the sweep itself sets for each run, or that all runs share."""
INSTEAD_OF_NODES = "use `tandem slurm CONFIG --array KEY=V1,V2`, or set launch.nodes=null"


def sweep(config_path: Path, overrides: Sequence[str], *, jobs: int, keep_going: bool, dry_run: bool) -> None:
    """Raises BadInput and ConfigError before anything starts; RoleFailed if a run failed; RunStopped after Ctrl-C."""
    varied = [text for text in overrides if _is_list(text)]
    fixed = [text for text in overrides if text not in varied]
    _check_keys(varied, fixed)
    with as_bad_input():
        elements = combinations(varied)
    cells = _checked(config_path, fixed, elements)
    base = parse_config(config_path, fixed).validated()
    made = Sweep(base.launch.runs_dir.resolve() / f"{base.name}-sweep")
    devices, count = _devices(cells, jobs), f"{counted(len(cells), 'run')}, {jobs} at a time"
    with as_bad_input():
        _check_memory(made, cells)
        if dry_run:
            rows = [(cell.name, counted(cell.config.steps, "step"), made.state(cell)) for cell in cells]
            print(*aligned(rows), f"{count}; memory: {made.memory}", sep="\n")
            return
        made.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = locked(made.folder / "lock")
        except BlockingIOError:
            busy = f"{made.folder} is being run by another process"
            raise BadInput(f"{busy}; wait for it, or stop it first") from None
    with lock:
        print(f"sweep: {count}, in {made.folder.parent}; logs: {made.folder}", flush=True)
        try:
            ended = made.run(cells, jobs=jobs, keep_going=keep_going, devices=devices)
        except (Interrupted, KeyboardInterrupt):
            raise RunStopped(f"sweep stopped, {_so_far(made, cells)}") from None
        _compare(made, cells)
    if ended:
        text = "\n".join(each.text for each in ended)
        kind = RoleFailed if any(each.failed for each in ended) else RunStopped
        raise kind(f"{text}\n{_so_far(made, cells)}")


def _is_list(override: str) -> bool:
    """Whether an override has several values; a comma inside brackets or quotes belongs to one value."""
    value = override.partition("=")[2]
    return "," in re.sub(r"\[.*\]|\{.*\}|\"[^\"]*\"|'[^']*'", "", value)


def _check_keys(varied: Sequence[str], fixed: Sequence[str]) -> None:
    if not varied:
        fix = "give one, such as seed=0,1,2, or use `tandem train`"
        raise BadInput(f"KEY=V1,V2: no key has several values; {fix}")
    keys = {text.partition("=")[0] for text in varied}
    for key in (key for key in OF_EVERY_RUN if key in keys):
        raise BadInput(f"{key}: all runs of a sweep have one {key}; give it one value, or leave it out")
    for text in fixed:
        key = text.partition("=")[0]
        if key in keys:
            raise BadInput(f"{text}: {key} has several values as well; give it once")


def _checked(config_path: Path, fixed: Sequence[str], elements: Sequence[Sequence[str]]) -> list[Cell]:
    """The runs. Raises ConfigError with the problems of all of them, each once; notes are printed once, too."""
    parsed, cells = parse_config(config_path, fixed), list[Cell]()
    base = parsed.validated()
    # All runs would continue in one folder, each with the weights of the previous one.
    if isinstance(base, RunConfig) and base.resume is not None:
        raise BadInput("resume: the same command continues a sweep; leave resume out")
    problems, said = dict[Problem, None](), io.StringIO()
    for element in elements:
        name = run_name(base.name, element)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                named = parsed.with_overrides([*element, f"name={name}"])
                config = load_checked(named, RunConfig, runs=TRAINING, instead_of_nodes=INSTEAD_OF_NODES)
            cells.append(Cell(name=name, config=config))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    for line in dict.fromkeys(said.getvalue().splitlines()):
        print(line, file=sys.stderr)
    if problems:
        raise ConfigError([*problems])
    if len({cell.name for cell in cells}) < len(cells):
        raise BadInput("KEY=V1,V2: two values give the same run name; let them differ in letters and digits")
    if len({cell.config.model_dump_json(exclude={"name"}) for cell in cells}) < len(cells):
        raise BadInput("KEY=V1,V2: two of the runs have the same settings; give each value once")
    return cells


def _check_memory(made: Sweep, cells: Sequence[Cell]) -> None:
    """Runs of an earlier call must have the same settings. Raises BadInput with all that differ."""
    changes = [f"{cell.name}: {'; '.join(changed)}" for cell in cells if (changed := made.changed(cell))]
    if changes:
        listed = "\n  ".join(changes)
        raise BadInput(
            f"{made.memory}: runs of this sweep were begun with other settings:\n  {listed}\n"
            "give the sweep another name=, or remove that file to start every run from the beginning"
        )


def _devices(cells: Sequence[Cell], jobs: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each run at a time. Raises BadInput if the machine is too small for that many."""
    if jobs == 1:
        return [None]
    if ports := {cell.config.rollout.first_port for cell in cells} - {None}:
        raise BadInput(f"--jobs {jobs}: rollout.first_port={ports.pop()} allows one run at a time; use null")
    gpus, needed = gpus_here(), max(ranks_of_machine(cell.config) for cell in cells)
    if gpus:
        if jobs * needed > gpus:
            raise BadInput(f"--jobs {jobs}: a run takes {needed} GPUs, and {gpus} are visible; lower --jobs")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        return [",".join(visible[place * needed : (place + 1) * needed]) for place in range(jobs)]
    device = device_of(cells[0].config, None)
    bytes_of_run = max(need_of(cell.config, device, TRAINING).on_one_machine for cell in cells)
    if device.bytes is not None and jobs * bytes_of_run > device.bytes:
        each = size_text(bytes_of_run)
        raise BadInput(f"--jobs {jobs}: a run takes {each}, and this machine has {device.text}; lower --jobs")
    busy, cores = max(_busy_cores(cell.config) for cell in cells), len(os.sched_getaffinity(0))
    if jobs * busy > cores:
        text = f"a run keeps {busy} of this machine's {cores} cores busy: parallel runs slow each other down"
        print(f"# --jobs {jobs}: {text}", flush=True)
    return [None] * jobs


def _busy_cores(config: RunConfig) -> int:
    """Learner and servers take turns, unless groups are sampled ahead."""
    sides = (config.layout.world_size, config.rollout.replicas * config.rollout.tp)
    return (sum(sides) if config.rollout.max_staleness else max(sides)) * config.launch.threads_per_process


def _so_far(made: Sweep, cells: Sequence[Cell]) -> str:
    finished = sum(map(made.is_finished, cells))
    return f"{finished} of {counted(len(cells), 'run')} finished; the same command continues with the others"


def _compare(made: Sweep, cells: Sequence[Cell]) -> None:
    """The page and the tables of all runs that have recorded a step."""
    from trainer.report.page import write_comparison

    folders = [folder.path for cell in cells if (folder := made.run_folder(cell.name)) is not None]
    page = made.folder / "comparison.html"
    try:
        print_comparison(write_comparison(folders, page), page)
    except ValueError as error:
        print(f"no comparison: {error}", flush=True)
