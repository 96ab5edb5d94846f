"""Starts roles for a command or a job: the run folder, a role's process and environment, and the wait for the
servers and the sampler.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from configs.errors import counted
from configs.loader import load_config, resolved_yaml
from configs.schema import AnyConfig, RunConfig, SftConfig, kind_of
from configs.schema.base import without_credentials
from launch.checks.arguments import BadInput
from launch.processes import run_folder
from launch.processes.heartbeat import living_roles
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import POLL_S, Role, Supervisor
from launch.roles.command_line import role_command
from launch.slurm.job import why_not_free
from launch.tables import print_over
from rollout.terminal_text import tandem_command

Config = TypeVar("Config", RunConfig, SftConfig)
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LAST_START_S = 60.0
"""Seconds to wait for roles that have lost their supervisor. torchrun gives its ranks 30 s to end."""


def run_role(name: str, run: Path, node: int | None = None) -> None:
    from launch.roles import table

    quiet_end()
    try:
        table.run_role(name, existing_run(run), node)
    except ValueError as error:  # before the role began
        raise BadInput(str(error)) from error


def quiet_end() -> None:
    """Silence libraries during the interpreter's shutdown: nanobind's list of 514 leaked functions looks like an
    error at the end of a healthy log. Tracebacks are printed earlier."""

    def silence() -> None:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    atexit.register(silence)  # registered first, so it runs last


def existing_run(run: Path) -> RunFolder:
    if not (run / "config.yaml").is_file():
        why_not = "is not a run folder (it has no config.yaml)"
        raise BadInput(f"RUN: {run} {why_not}; `tandem list` names those of runs/")
    return RunFolder(run.resolve())


def config_of(folder: RunFolder, kind: type[Config]) -> Config:
    """The config of a run. Raises ValueError for a run of another kind."""
    config = load_config(folder.config)
    if not isinstance(config, kind):
        error = f"RUN: {folder.path} is a run of kind {config.kind}"
        raise ValueError(f"{error}; this command takes runs of kind {kind_of(kind)}")
    return config


def refuse_warm_start(folder: RunFolder) -> None:
    """For commands that use a run's trained model. Raises BadInput for a warm start, which writes its model elsewhere."""
    config = load_config(folder.config)
    if isinstance(config, SftConfig):
        raise BadInput(
            f"RUN: {folder.path} is a warm start, whose model is the Hugging Face folder {config.output}; for its accuracy, use "
            f"`{tandem_command('eval', 'CONFIG', f'model.path={config.output}')}` with the config of a training run"
        )


def new_run(config: AnyConfig, name: str, *, needs_lock: bool = False) -> RunFolder:
    """A new folder, which this process runs until it ends. Raises ConfigError or BadInput.

    needs_lock: whether a second process might continue the run; a file system without locks is then refused."""
    folder = run_folder.create(config.launch.runs_dir, name, resolved_yaml(config))
    try:
        return _claimed(folder)
    except BadInput as error:
        if needs_lock:
            raise
        print(f"{error}; this process continues without a lock", flush=True)
        return folder


def new_study(config: RunConfig, study: str) -> RunFolder:
    """The same for a study of several layouts; ``study`` is its command. It ends with ``finish_study``."""
    folder = new_run(config, f"{config.name}-{study}")
    run_folder.write_json(folder.request, {"study": study})
    return folder


def finish_study(folder: RunFolder, config: RunConfig, result: str) -> None:
    """result: the name of the file with what was found."""
    found = {"model": str(config.model.path), "result": str(folder.path.resolve() / result)}
    run_folder.write_json(folder.summary, found, flush=True)
    folder.release()


def _claimed(folder: RunFolder) -> RunFolder:
    try:
        folder.claim(partial(_wait_for_last_start, folder))
    except BlockingIOError:
        error = f"resume: {folder.path} is being run by another process"
        raise BadInput(f"{error}; wait for it, or stop it first") from None
    except ValueError as error:
        raise BadInput(f"launch.runs_dir: {error}") from error
    return folder


def _wait_for_last_start(folder: RunFolder) -> None:
    """Wait until the roles of the last start have ended. Two learners would write the folder together. Raises BadInput."""
    began, told = time.monotonic(), False
    while roles := living_roles(folder):
        named = ", ".join(f"{beat.who} (pid {beat.pid})" for beat in roles)
        if time.monotonic() - began > LAST_START_S:
            error = f"resume: {folder.path} is still being run by {named}, whose supervisor was killed"
            raise BadInput(f"{error}; end them, then resume")
        if not told:
            why = "their supervisor was killed, and they may be finishing and saving a step"
            print(f"waiting for the end of {named}: {why}", flush=True)
        told = True
        time.sleep(POLL_S)


def folder_of(config: RunConfig) -> RunFolder:
    resume = config.resume
    if resume is None:
        folder = new_run(config, config.name, needs_lock=True)
    else:
        folder = existing_run(resume)
        if (why_not := why_not_free(folder)) is not None:
            raise BadInput(f"resume: {why_not}")
        _claimed(folder)
    try:
        if resume is not None:
            # Without `resume`: a later start from this file is a new run.
            _change_config(folder, config.model_copy(update={"resume": None}))
        run_folder.point_latest(folder)
    except BaseException:
        folder.release()  # the error may hold a reference to the folder, and thus its lock
        raise
    return folder


def _change_config(folder: RunFolder, config: RunConfig) -> None:
    """Replace the config of a resumed run. If a value changes, the old config is kept, and the change is printed."""
    from trainer.tracking.tracker import flatten

    before, after = (flatten(each.model_dump(mode="json")) for each in (load_config(folder.config), config))
    # A block that is null has no names of its own.
    values = {name: (before.get(name, "null"), after.get(name, "null")) for name in {**before, **after}}
    changed = [f"{name} {old} -> {new}" for name, (old, new) in values.items() if old != new]
    if changed:
        kept, changes = run_folder.keep_config(folder), without_credentials(", ".join(changed))
        print(f"changed: {changes}; {kept.name} has the config before", flush=True)
    run_folder.change_config(folder, resolved_yaml(config))


def role(
    name: str, folder: RunFolder, config: AnyConfig, *, ranks: int = 1, show_stdout: bool = False
) -> Role:
    command, env = role_command(name, folder, ranks=ranks), environment(config)
    log, error = folder.logs / f"{name}.log", folder.error(name)
    return Role(name=name, command=command, log=log, error=error, env=env, show_stdout=show_stdout)


def environment(config: AnyConfig) -> dict[str, str]:
    """Environment variables of every role, in addition to those that it inherits."""
    threads = str(config.launch.threads_per_process)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONOPTIMIZE": "",  # empty is unset: without docstrings, transformers cannot be imported
        # Megatron's imports warn, which must not fail them.
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "").replace("error", "default"),
        "HF_HUB_OFFLINE": "1",
        # -m would put the working directory before our packages, and it may hold another `trainer`.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def start_sampling(supervisor: Supervisor, folder: RunFolder, config: RunConfig) -> None:
    supervisor.start(role("serve", folder, config))
    supervisor.start(role("sample", folder, config))


def wait_ready(supervisor: Supervisor, folder: RunFolder, config: RunConfig) -> None:
    count = config.rollout.replicas
    roles = f"{counted(count, 'SGLang server')} and the sampler"
    started = time.monotonic()

    def are_ready() -> bool:
        servers = run_folder.read_servers(folder, serve_roles(config))
        return servers is not None and folder.read_address("sample") is not None

    logs = tandem_command("logs", folder.path)
    timeout_s, what = config.launch.start_timeout_s, f"{roles} to be ready"
    with progress_printer(f"starting {roles} (their output: {logs})", still="starting") as show:
        supervisor.wait_for(are_ready, what=what, timeout_s=timeout_s, while_waiting=show)
    print(f"{roles} ready after {time.monotonic() - started:.0f} s", flush=True)


@contextlib.contextmanager
def progress_printer(text: str, *, still: str) -> Iterator[Callable[[float], None]]:
    """Prints the text, and yields a function of the seconds waited. It shows "still starting after 60 s" if ``still`` is
    "starting": on a terminal as a counting line, elsewhere in lines that become rarer."""
    interactive = sys.stdout.isatty()
    due = 0.0 if interactive else 60.0

    def show(waited: float) -> None:
        nonlocal due
        if waited >= due:
            line = f"… still {still} after {waited:.0f} s"
            print_over(line) if interactive else print(line, flush=True)
            due = int(waited) + 1.0 if interactive else 2 * due

    print(f"{text} …", flush=True)
    try:
        yield show
    finally:
        if interactive:
            print_over("")
