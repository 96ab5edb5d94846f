"""How a command or a job starts roles: the run folder, a role's process and environment, and the wait until
the servers and the sampler are ready.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from configs.loader import resolved_yaml
from configs.schema import RunConfig, SftConfig
from launch.checks.config import BadInput
from launch.processes import run_folder
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Role, Supervisor
from launch.roles import table as roles

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def run_role(name: str, run: Path, node: int | None = None) -> None:
    quiet_end()
    try:
        roles.run_role(name, existing_run(run), node)
    except ValueError as error:  # before the role began
        raise BadInput(str(error)) from error


def quiet_end() -> None:
    """Keep a process's last words free of what libraries say of themselves while the interpreter is taken
    apart, such as nanobind's list of 514 leaked functions: they look like an error at the end of a healthy
    log. Tracebacks are printed before this."""

    def silence() -> None:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    atexit.register(silence)  # registered first, it runs last


def existing_run(run: Path) -> RunFolder:
    if not (run / "config.yaml").is_file():
        raise BadInput(
            f"RUN: {run} is not a run folder (it has no config.yaml); runs/latest is the newest run"
        )
    return RunFolder(run.resolve())


def folder_of(config: RunConfig) -> RunFolder:
    if config.resume is None:
        folder = run_folder.create(config.launch.runs_dir, config.name, resolved_yaml(config))
    else:
        folder = existing_run(config.resume)
    try:
        folder.claim()
    except BlockingIOError:
        raise BadInput(
            f"resume: {config.resume} is being run by another process; wait for it, or stop it first"
        ) from None
    except ValueError as error:
        raise BadInput(f"launch.runs_dir: {error}") from error
    if config.resume is not None:
        # Without `resume`: whoever starts from this file later means a run of its own.
        run_folder.change_config(folder, resolved_yaml(config.model_copy(update={"resume": None})))
    run_folder.point_latest(folder)
    return folder


def role(
    name: str, folder: RunFolder, config: RunConfig | SftConfig, *, ranks: int = 1, show_stdout: bool = False
) -> Role:
    command = roles.command(name, folder, ranks=ranks)
    log, error = folder.logs / f"{name}.log", folder.error(name)
    return Role(
        name=name, command=command, log=log, error=error, env=environment(config), show_stdout=show_stdout
    )


def environment(config: RunConfig | SftConfig) -> dict[str, str]:
    """Of every role, beside what it inherits."""
    threads = str(config.launch.threads_per_process)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        # -m would put the working directory, where another `trainer` may lie, before our packages.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def start_sampling(supervisor: Supervisor, folder: RunFolder, config: RunConfig) -> None:
    supervisor.start(role("serve", folder, config))
    supervisor.start(role("sample", folder, config))


def wait_ready(supervisor: Supervisor, folder: RunFolder, config: RunConfig) -> None:
    count = config.rollout.replicas
    what = f"{count} SGLang server{'s' if count > 1 else ''}"
    started = time.monotonic()
    supervisor.wait_for(
        lambda: (
            run_folder.read_servers(folder, serve_roles(config)) is not None
            and folder.read_address("sample") is not None
        ),
        what=f"{what} and the sampler to be ready",
        timeout_s=config.launch.start_timeout_s,
        while_waiting=_progress(
            f"starting {what} and the sampler (what they say: tandem logs {folder.path})"
        ),
    )
    print(f"{what} and the sampler ready after {time.monotonic() - started:.0f} s", flush=True)


def _progress(text: str) -> Callable[[float], None]:
    """On a terminal a counting line; elsewhere a line at the start, and later ones ever more rarely."""
    interactive, due = sys.stdout.isatty(), 0.0

    def tell(waited: float) -> None:
        nonlocal due
        if waited < due:
            return
        if interactive:
            print(f"{text} … {waited:.0f} s", end="\r", flush=True)
        else:
            print(f"{text} …" if due == 0 else f"… still starting after {waited:.0f} s", flush=True)
        due = int(waited) + 1.0 if interactive else max(60.0, 2 * due)

    return tell
