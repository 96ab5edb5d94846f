"""What the commands do: check everything, make the run folder, start roles, wait, report."""

import atexit
import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.loader import ConfigError, load_config, parse_config, resolved_yaml
from configs.schema import RunConfig, SftConfig
from configs.schema.layout import LayoutConfig
from launch.checks import config as checks
from launch.checks.config import EVALUATION, TRAINING, WARM_START, BadInput, LoadWith
from launch.commands.dry_run import print_dry_run
from launch.processes import run_folder, stopping
from launch.processes.heartbeat import Watch
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Role, RoleFailed, Supervisor
from launch.roles import table as roles
from parallel.checkpoints.files import remove_leftovers, step_of

if TYPE_CHECKING:
    from launch.studies.mismatch_plan import Request

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
HERE = "launch.nodes=null"
"""An override, for studies of layouts, which run on this machine whatever nodes the config trains on."""
WITHOUT_NODES = f"set {HERE}"


def train(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> RunFolder | None:
    parsed = parse_config(config_path, overrides)
    if dry_run:
        print_dry_run(
            checks.load(parsed, RunConfig, runs=TRAINING, gpu_memory=gpu_memory),
            TRAINING,
            gpu_memory,
        )
        return None
    _refuse_other_machines(gpu_memory)
    instead = "use `tandem slurm`, `tandem prepare`, or remove it"
    config = checks.load(parsed, RunConfig, runs=TRAINING, instead_of_nodes=instead)
    folder = folder_of(config)
    print(f"run folder: {folder.path}", flush=True)
    ending = stopping.ending(folder)
    try:
        with (
            Supervisor(grace_s=config.launch.stop_grace_s, ending=ending) as supervisor,
            stopping.StopSignals(folder) as signals,
            causes_told(folder, config, supervisor),
        ):
            start_sampling(supervisor, folder, config)
            supervisor.start(role("learn", folder, config, ranks=config.layout.world_size, show_stdout=True))
            _wait_ready(supervisor, folder, config)
            outcome = stopping.wait_for_learner(supervisor, signals, timeout_s=config.launch.stop_timeout_s)
    except RoleFailed as failure:
        raise RoleFailed(f"{failure}\n{_what_is_left(folder, config)}") from failure
    if isinstance(outcome, stopping.Stopped):
        raise stopping.RunStopped(_how_to_go_on(folder, outcome))
    print_result(folder, config)
    return folder


@contextlib.contextmanager
def causes_told(folder: RunFolder, config: RunConfig, supervisor: Supervisor) -> Iterator[None]:
    """Inside, processes that are stopped are found and ended, and a failure that follows from that says so."""
    with Watch(folder, timeout_s=config.launch.heartbeat_timeout_s, started=supervisor.processes) as watch:
        try:
            yield
        except RoleFailed as failure:
            causes = watch.ended()
            if not causes:
                raise
            raise RoleFailed("\n".join([*causes, str(failure)])) from failure


def _what_is_left(folder: RunFolder, config: RunConfig) -> str:
    """Of a run that failed: what was saved, and the command that goes on from it."""
    newest = folder.newest_checkpoint()
    if newest is None:
        every = "" if config.checkpoint.every else " (checkpoint.every is 0)"
        return f"Nothing was saved{every}. When the cause is mended, start again with `tandem train {folder.config}`"
    return f"Saved: step {step_of(newest)}, in {newest}. When the cause is mended, go on with `tandem resume {folder.path}`"


def resume(
    run: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> RunFolder | None:
    """``train`` with the run's own config, ``overrides`` over it."""
    folder = existing_run(run)
    return train(folder.config, [f"resume={folder.path}", *overrides], dry_run=dry_run, gpu_memory=gpu_memory)


def _how_to_go_on(folder: RunFolder, outcome: stopping.Stopped) -> str:
    if outcome.step == 0:
        return f"stopped before the first step was complete, on request; start again with `tandem train {folder.config}`"
    return f"stopped after step {outcome.step} on request; go on with `tandem resume {folder.path}`"


def sft(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> Path | None:
    config = checks.load(
        parse_config(config_path, overrides),
        SftConfig,
        runs=WARM_START,
        gpu_memory=gpu_memory,
        instead_of_nodes=WITHOUT_NODES,
    )
    if dry_run:
        print_dry_run(config, WARM_START, gpu_memory)
        return None
    _refuse_other_machines(gpu_memory)
    folder = run_folder.create(config.launch.runs_dir, config.name, resolved_yaml(config))
    with Supervisor(grace_s=config.launch.stop_grace_s) as supervisor:
        supervisor.start(role("sft-rank", folder, config, ranks=config.layout.world_size, show_stdout=True))
        supervisor.wait_until_done("sft-rank")
    print(f"warm-started model: {config.output}", flush=True)
    return config.output


def evaluate(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> float | None:
    config = checks.load(
        parse_config(config_path, overrides),
        RunConfig,
        runs=EVALUATION,
        gpu_memory=gpu_memory,
        instead_of_nodes=WITHOUT_NODES,
    )
    if dry_run:
        print_dry_run(config, EVALUATION, gpu_memory)
        return None
    _refuse_other_machines(gpu_memory)
    from rollout.sampling.messages import SamplingError
    from rollout.sampling.remote import RemoteSampler

    config = config.model_copy(update={"layout": LayoutConfig(dp=1)})  # no learner takes part
    folder = run_folder.create(config.launch.runs_dir, f"{config.name}-eval", resolved_yaml(config))
    run_folder.write_json(folder.path / "request.json", {"first_gpu": 0})
    with (
        Supervisor(grace_s=config.launch.stop_grace_s) as supervisor,
        causes_told(folder, config, supervisor),
    ):
        start_sampling(supervisor, folder, config)
        _wait_ready(supervisor, folder, config)
        address, timeout_s = folder.read_address("sample")["address"], config.launch.collective_timeout_s
        with RemoteSampler(address, timeout_s=timeout_s, key=folder.run_key()) as remote:
            try:
                result = remote.evaluate(meanwhile=lambda: supervisor.check(may_end=()))
            except SamplingError as error:  # the role's own account of what went wrong
                raise RoleFailed(str(error)) from error
    if result is None:
        raise RoleFailed(
            f"{config_path}: the task has no held-out problems to evaluate on; raise task.heldout_fraction"
        )
    run_folder.write_json(
        folder.summary, {"accuracy": result.accuracy, "count": result.count, "model": str(config.model.path)}
    )
    print(f"accuracy {result.accuracy:.4f} on {result.count} held-out samples; {folder.summary}", flush=True)
    return result.accuracy


def _refuse_other_machines(gpu_memory: float | None) -> None:
    if gpu_memory is not None:
        raise BadInput(
            f"--gpu-memory {gpu_memory:g} is of GPUs of other machines than this one; use it with --dry-run, or leave it out"
        )


def export(run: Path, out: Path) -> None:
    """The newest weights of a run: its finished model, or a checkpoint where that is newer (a resumed run
    that was stopped)."""
    folder = existing_run(run)
    checks.check_new_folder("OUT", out)
    with _exporting_alone(folder):
        _export(folder, out)
    print(f"exported to {out}", flush=True)


@contextlib.contextmanager
def _exporting_alone(folder: RunFolder) -> Iterator[None]:
    """Two exports of one run would take each other's files."""
    try:
        (folder.path / "roles").mkdir(exist_ok=True)
        lock = run_folder.locked(folder.path / "roles" / "export-lock")
    except BlockingIOError:
        raise BadInput(
            f"RUN: {folder.path} is being exported by another process; wait for it, or stop it first"
        ) from None
    except (
        OSError,
        ValueError,
    ):  # a run of somebody else, on a disk that cannot be written to or without locks: as well as it goes
        lock = contextlib.nullcontext()
    with lock:
        yield


def _export(folder: RunFolder, out: Path) -> None:
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if not folder.has_final_model():
            _export_checkpoint(folder)
        with _one_error_for(out):
            partial.parent.mkdir(parents=True, exist_ok=True)
            if folder.has_final_model():
                shutil.copytree(folder.hf, partial)
            else:
                shutil.move(folder.export, partial)  # copied only where OUT is on another disk
            partial.rename(out)
    finally:
        for left in (partial, folder.export):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _one_error_for(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Of several files that could not be copied, each has its own words.
        said = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise BadInput(
            f"OUT: {out} cannot be written: {said}; the partial copy was removed. Free space there, or name a folder on another disk"
        ) from error


def _export_checkpoint(folder: RunFolder) -> None:
    """Into the run's own ``export/``."""
    if folder.newest_checkpoint() is None:
        why = folder.why_no_checkpoint()
        raise BadInput(
            f"RUN: {folder.path} has neither a finished model nor a complete checkpoint{why}; set checkpoint.every to get them"
        )
    config = load_config(folder.config, [])
    remove_leftovers(folder.path, folder.export.name)  # of an export that was killed
    folder.forget("export-rank")
    with Supervisor(grace_s=config.launch.stop_grace_s) as supervisor:
        supervisor.start(role("export-rank", folder, config, show_stdout=True))
        supervisor.wait_until_done("export-rank")


def report(run: Path) -> None:
    from trainer.report.page import write_report

    folder = existing_run(run)
    try:
        page = write_report(folder.path)
    except ValueError as error:
        raise BadInput(f"RUN: {error}") from error
    print(f"report: {page}", flush=True)


def replay(run: Path, step: int, names: list[str], *, gradients: bool, plot: bool) -> None:
    folder = existing_run(run)

    from launch.studies import replay as replays
    from trainer.batch.files import recorded_steps

    steps = recorded_steps(folder.batches)
    if step not in steps:
        which = (
            f"recorded are {steps}"
            if steps
            else "none is recorded; train with record_batches=all or record_batches.every=N"
        )
        raise BadInput(f"--step {step}: {run} has no recorded batch of this step; {which}")
    config: RunConfig = load_config(folder.config, [])
    try:
        corrections = replays.corrections_named(names)
        if gradients:
            replays.starting_weights(folder, step)
            replays.write_request(folder, step, names)
            folder.forget("replay-rank")
            print(
                f"replaying {len(corrections) + 1} corrections, each with a forward and a backward pass …",
                flush=True,
            )
            with Supervisor(grace_s=config.launch.stop_grace_s) as supervisor:
                supervisor.start(role("replay-rank", folder, config))
                supervisor.wait_until_done("replay-rank")
        else:
            replays.write_results(folder, config, step, corrections, with_gradients=False)
    except ValueError as error:
        raise BadInput(f"RUN {run}: {error}") from error
    result = replays.read_result(folder, step)
    print(
        f"step {step} of {run}; ESS of ratios and of bounded weights; gradient of the {result['gradient_of']}, cosine to `disabled`"
    )
    print(replays.table(result), flush=True)
    if plot:
        path = folder.figures / f"replay_step_{step:06d}.png"
        replays.plot(result, path)
        print(f"figure: {path}", flush=True)


def verify_sync(config_path: Path, overrides: list[str], learners: list[str], rollouts: list[str]) -> bool:
    """See ``launch/studies/verify_sync.py``; whether everything agreed."""
    from launch.studies import verify_sync as verification

    try:
        load = _loading_with_options(config_path, overrides)
        configs, tps = verification.make_plan(learners, rollouts, load, gpus=checks.gpus_here())
    except ValueError as error:
        raise BadInput(str(error)) from error
    return verification.run(configs, tps, role)


def _loading_with_options(config_path: Path, overrides: list[str]) -> LoadWith:
    """The config on this machine, as an option of a study says otherwise; its files are read here, once."""
    parsed = parse_config(config_path, [*overrides, HERE])

    def load(option: str, more: Sequence[str]) -> RunConfig:
        return checks.load(parsed.with_overrides(more, where=option), RunConfig)

    return load


def mismatch(config_path: Path, overrides: list[str], request: "Request") -> Path:
    """See ``launch/studies/mismatch.py``; returns the folder with the results."""
    from launch.studies import mismatch as study
    from launch.studies.mismatch_plan import make_plan

    load_checked = _loading_with_options(config_path, overrides)

    def load(option: str, more: Sequence[str]) -> RunConfig:
        try:
            config = load_checked(option, more)
            checks.check_served_as_saved(config, "mismatch")
            return config
        except (ConfigError, BadInput) as error:
            raise ValueError(str(error)) from error

    try:
        plan = make_plan(request, load, gpus=checks.gpus_here())
    except ValueError as error:
        raise BadInput(str(error)) from error
    return study.run(plan, role)


def quiet_end() -> None:
    """Keep a process's last words free of what libraries say of themselves while the interpreter is taken
    apart, such as nanobind's list of 514 leaked functions: they look like an error at the end of a healthy
    log. Tracebacks are printed before this."""

    def silence() -> None:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    atexit.register(silence)  # registered first, it runs last


def run_role(name: str, run: Path, node: int | None = None) -> None:
    quiet_end()
    try:
        roles.run_role(name, existing_run(run), node)
    except ValueError as error:  # before the role began
        raise BadInput(str(error)) from error


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


def _wait_ready(supervisor: Supervisor, folder: RunFolder, config: RunConfig) -> None:
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


def print_result(folder: RunFolder, config: RunConfig) -> None:
    """What the run has reached, where it lies, and what one may do with it next; paths and commands hold in
    any folder."""
    from trainer.tracking.mlflow_thread import tracking_uri, without_password

    summary = json.loads(folder.summary.read_text())
    print()
    if summary["accuracy_after"] is not None:
        before = summary["accuracy_before"]
        text = f"{before:.1%} before, " if before is not None else ""
        print(f"held-out accuracy: {text}{summary['accuracy_after']:.1%} after {summary['steps']} steps")
    uri = without_password(tracking_uri(config, folder.path))
    page, model = folder.path / "report.html", folder.hf
    print(f"report:      {page} (open it in a browser)")
    print(f"model:       {model} (Hugging Face format)")
    print(f"MLflow:      {_command('mlflow')} ui --backend-store-uri {shlex.quote(uri)}")
    print(f"all runs:    {_command('tandem')} list {shlex.quote(str(folder.path.parent))}")
    if folder.newest_checkpoint() is not None:
        print(
            f"go on:       {_command('tandem')} resume {shlex.quote(str(folder.path))} steps={2 * summary['steps']}"
        )
    print(
        f"your own:    {_command('tandem')} init FOLDER writes a config, a reward and example data to begin with",
        flush=True,
    )


def _command(name: str) -> str:
    """As it can be typed here: by its name where that is on the path, else in full, where it lies beside this
    interpreter."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else str(beside)
