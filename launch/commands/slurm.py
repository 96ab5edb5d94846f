"""``tandem slurm``: makes run folders and a batch script, and submits the script on request."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from configs.loader import parse_config, resolved_yaml
from configs.schema import RunConfig
from launch.checks.config import TRAINING, load_checked
from launch.commands.dry_run import print_dry_run
from launch.commands.train import finished_line
from launch.grid import run_name
from launch.processes import run_folder
from launch.processes.placement import gpus_of_node
from launch.processes.run_folder import RunFolder
from launch.roles.start import folder_of
from launch.slurm import script
from launch.slurm.job import cluster_here, record, why_not_free
from launch.slurm.script import Place
from launch.tables import indented
from rollout.terminal_text import tandem_command


def slurm(
    config_path: Path,
    overrides: list[str],
    *,
    arrays: list[str],
    submit: bool,
    dry_run: bool,
    gpu_memory: float | None,
) -> None:
    """Check the config of every run and the script, before anything is written.

    gpu_memory: GiB of each of the job's GPUs; None: unknown, so their memory is not checked.
    Raises ValueError and ConfigError.
    """
    elements = script.elements(arrays)
    if submit and shutil.which("sbatch") is None:
        fix = "run it on a host with Slurm, or leave --submit out and copy the script there"
        raise ValueError(f"--submit: there is no `sbatch` here; {fix}")
    configs = _checked(config_path, overrides, elements, gpu_memory)
    first = configs[0]
    if finished := finished_line(first, in_job=True):
        print(f"# {finished}" if dry_run else finished, flush=True)  # the output of a dry run is a config
        return
    if (note := script.note_on_cores(first)) is not None:
        print(f"# {note}", flush=True)
    count = len(configs) if arrays else None
    make_script = partial(script.script_text, first, submitted_from=Path.cwd(), count=count)
    draft = make_script(_draft_place(first, arrays))
    script.check_script(draft, by_slurm=submit)
    if dry_run:
        script_lines = ("", "the batch script:", *indented(draft.splitlines()))
        print_dry_run(first, TRAINING, gpu_memory, in_job=True, further=script_lines)
        return
    if arrays:
        place, folders = _make_array(elements, configs)
    else:
        folders = [RunFolder(folder_of(first).release().resolve())]
        place = script.place_of_run(folders[0].path)
    place.script.write_text(make_script(place))
    for folder in folders:
        folder.logs.mkdir(exist_ok=True)  # Slurm does not
        print(f"run folder: {folder.path}")
    print(f"script:     {place.script}", flush=True)
    if submit:
        _submit(place, folders, array=bool(arrays))
    else:
        print(f"submit it:  sbatch {place.script}", flush=True)


def _checked(
    config_path: Path, overrides: list[str], elements: Sequence[Sequence[str]], gpu_memory: float | None
) -> list[RunConfig]:
    """The config of every run, after all checks."""
    parsed = parse_config(config_path, overrides)
    base = parsed.validated()
    on_gpus = isinstance(base, RunConfig) and base.launch.nodes is None and base.launch.slurm.gpus != 0
    if on_gpus and base.layout.dp == "auto":
        error = "layout.dp=auto takes the GPUs of this machine, not those of the job's node"
        raise ValueError(f"{error}; set layout.dp, or launch.nodes")
    check = partial(load_checked, kind=RunConfig, runs=TRAINING, gpu_memory=gpu_memory, in_job=True)
    configs = [check(parsed.with_overrides(element)) for element in elements]
    if gpu_memory is not None and not gpus_of_node(configs[0]):
        error = f"--gpu-memory {gpu_memory:g}: the job asks for no GPUs ({script.DECIDED['gpus']})"
        raise ValueError(f"{error}; leave it out")
    for element, config in zip(elements, configs, strict=True):
        _check_element(element, config, configs[0])
    return configs


def _check_element(element: Sequence[str], config: RunConfig, first: RunConfig) -> None:
    problems = script.check(config)
    if other := script.other_request(config, first):
        problems.append(f"it would ask for {other}; {script.ONE_REQUEST}")
    if element and config.resume is not None:
        problems.append("resume: an array starts new runs; resume each run separately")
    if config.resume is not None and (why_not := why_not_free(RunFolder(config.resume))) is not None:
        problems.append(f"resume: {why_not}")
    if problems:
        where = f"{' '.join(element)}: " if element else ""
        raise ValueError("\n  ".join(where + problem for problem in problems))


def _draft_place(config: RunConfig, arrays: Sequence[str]) -> Place:
    """The place of the script, without the time in its folder's name."""
    runs = config.launch.runs_dir.resolve()
    if arrays:
        return script.place_of_array(runs / f"{config.name}-array-DATE-TIME")
    return script.place_of_run((config.resume or runs / f"{config.name}-DATE-TIME").resolve())


def _make_array(elements: Sequence, configs: Sequence[RunConfig]) -> tuple[Place, list[RunFolder]]:
    runs_dir, folders = configs[0].launch.runs_dir, []
    array = run_folder.new_path(runs_dir, f"{configs[0].name}-array").resolve()
    for number, (element, config) in enumerate(zip(elements, configs, strict=True)):
        folder = run_folder.create(runs_dir, run_name(config.name, element), resolved_yaml(config))
        folders.append(RunFolder(folder.path.resolve()))
        (array / str(number)).symlink_to(os.path.relpath(folders[-1].path, array))
    run_folder.point_latest(folders[-1])
    return script.place_of_array(array), folders


def _submit(place: Place, folders: Sequence[RunFolder], *, array: bool) -> None:
    for folder in folders:
        folder.job.unlink(missing_ok=True)  # of an earlier job
    here = cluster_here()
    job, cluster = script.submit(place.script)
    for number, folder in enumerate(folders):
        # The file exists already where the job has begun.
        with contextlib.suppress(FileExistsError), folder.job.open("x") as file:
            json.dump(record(f"{job}_{number}" if array else job, cluster or here), file)
    print(f"job:        {job}")
    run, requeue = folders[0].path, f"scancel --batch --signal=USR1 {job}"
    looks = f"{tandem_command('status', run)}; {tandem_command('logs', run, '--follow')}"
    print(f"watch it:   squeue --jobs={job}; {looks}")
    print(f"stop it:    scancel {job}; or, to be requeued after a checkpoint: {requeue}", flush=True)
