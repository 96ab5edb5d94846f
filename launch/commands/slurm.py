"""``tandem slurm``: the run folder or folders, the batch script, and where asked its submission."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from configs.loader import parse_config, resolved_yaml
from configs.schema import RunConfig
from launch.checks import config as checks
from launch.checks.config import BadInput
from launch.commands.dry_run import print_dry_run
from launch.processes import run_folder
from launch.processes.placement import gpus_of_node
from launch.processes.run_folder import RunFolder
from launch.roles import start
from launch.slurm import job as jobs
from launch.slurm import script
from launch.slurm.script import Place


def slurm(
    config_path: Path,
    overrides: list[str],
    *,
    arrays: list[str],
    submit: bool,
    dry_run: bool,
    gpu_memory: float | None,
) -> None:
    """Everything is checked before anything is written: the config of every run, and the script.

    gpu_memory: GiB of each of the job's GPUs; None: not known here, so that their memory is not checked.
    Raises BadInput and ConfigError.
    """
    try:
        _slurm(config_path, overrides, arrays, submit=submit, dry_run=dry_run, gpu_memory=gpu_memory)
    except ValueError as error:
        raise BadInput(f"{config_path}: {error}") from error


def _slurm(
    config_path: Path,
    overrides: list[str],
    arrays: list[str],
    *,
    submit: bool,
    dry_run: bool,
    gpu_memory: float | None,
) -> None:
    elements = script.elements(arrays)
    if submit:
        script.require_sbatch()
    parsed = parse_config(config_path, overrides)
    given = parsed.validated()
    on_gpus = isinstance(given, RunConfig) and given.launch.nodes is None and given.launch.slurm.gpus != 0
    if on_gpus and given.layout.dp == "auto":
        raise ValueError(
            "layout.dp=auto takes the GPUs of this machine, not those of the job's node; set layout.dp, or launch.nodes"
        )
    where = {"runs": checks.TRAINING, "gpu_memory": gpu_memory, "in_job": True}
    loaded = [checks.load(parsed.with_overrides(element), RunConfig, **where) for element in elements]
    configs = cast("list[RunConfig]", loaded)
    if gpu_memory is not None and not gpus_of_node(configs[0]):
        raise ValueError(
            f"--gpu-memory {gpu_memory:g}: the job asks for no GPUs ({script.DECIDED['gpus']}); leave it out"
        )
    for element, config in zip(elements, configs, strict=True):
        _check(element, config)
    draft = script.script_text(
        configs[0], _draft_place(configs[0], arrays), submitted_from=Path.cwd(), count=_count(configs, arrays)
    )
    script.check_script(draft, by_slurm=submit)
    if dry_run:
        shown = ("", "the batch script:", *(f"  {line}" for line in draft.splitlines()))
        print_dry_run(configs[0], checks.TRAINING, gpu_memory, in_job=True, further=shown)
        return
    if arrays:
        place, folders = _array(elements, configs)
    else:
        place, folders = _single(configs[0])
    text = script.script_text(configs[0], place, submitted_from=Path.cwd(), count=_count(configs, arrays))
    place.script.write_text(text)
    for folder in folders:
        folder.logs.mkdir(exist_ok=True)  # Slurm does not
        print(f"run folder: {folder.path}")
    print(f"script:     {place.script}", flush=True)
    if submit:
        _submit(place, folders, array=bool(arrays))
    else:
        print(f"submit it:  sbatch {place.script}", flush=True)


def _check(element: Sequence[str], config: RunConfig) -> None:
    problems = script.check(config)
    if element and config.resume is not None:
        problems.append("resume: an array begins new runs; go on with each by itself")
    if config.resume is not None and (job := jobs.running_elsewhere(RunFolder(config.resume))) is not None:
        problems.append(
            f"resume: {config.resume} is of job {job}, which runs or waits; wait for it, or end it with `scancel {job}`"
        )
    if problems:
        where = f"{' '.join(element)}: " if element else ""
        raise ValueError("\n  ".join(where + problem for problem in problems))


def _count(configs: Sequence[RunConfig], arrays: Sequence[str]) -> int | None:
    return len(configs) if arrays else None


def _draft_place(config: RunConfig, arrays: Sequence[str]) -> Place:
    """Where the script will be, but for the time in its folder's name."""
    runs = config.launch.runs_dir.resolve()
    if arrays:
        return script.place_of_array(runs / f"{config.name}-array-DATE-TIME")
    return script.place_of_run((config.resume or runs / f"{config.name}-DATE-TIME").resolve())


def _single(config: RunConfig) -> tuple[Place, list[RunFolder]]:
    folder = RunFolder(start.folder_of(config).release().resolve())
    return script.place_of_run(folder.path), [folder]


def _array(elements: Sequence[Sequence[str]], configs: Sequence[RunConfig]) -> tuple[Place, list[RunFolder]]:
    runs_dir, folders = configs[0].launch.runs_dir, []
    array = run_folder.new_path(runs_dir, f"{configs[0].name}-array").resolve()
    for number, (element, config) in enumerate(zip(elements, configs, strict=True)):
        folder = run_folder.create(runs_dir, script.element_name(config.name, element), resolved_yaml(config))
        folders.append(RunFolder(folder.path.resolve()))
        (array / str(number)).symlink_to(os.path.relpath(folders[-1].path, array))
    run_folder.point_latest(folders[-1])
    return script.place_of_array(array), folders


def _submit(place: Place, folders: Sequence[RunFolder], *, array: bool) -> None:
    for folder in folders:
        folder.job.unlink(missing_ok=True)  # of an earlier job
    job = script.submit(place.script)
    for number, folder in enumerate(folders):
        with (
            contextlib.suppress(FileExistsError),
            folder.job.open("x") as file,
        ):  # unless the job has begun already
            json.dump({"job_id": f"{job}_{number}" if array else job, "nodes": [], "restart": 0}, file)
    print(f"job:        {job}")
    print(
        f"watch it:   squeue --jobs={job}; tandem status {folders[0].path}; tandem logs {folders[0].path} --follow"
    )
    print(
        f"stop it:    scancel {job}; or, to be requeued after a checkpoint: scancel --batch --signal=USR1 {job}",
        flush=True,
    )
