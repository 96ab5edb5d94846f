"""``tandem train``, ``resume``, ``sft`` and ``evaluate``: check everything, make the run folder, start roles,
wait, report.
"""

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.loader import parse_config, resolved_yaml
from configs.schema import RunConfig, SftConfig
from configs.schema.layout import LayoutConfig
from launch.checks import config as checks
from launch.checks.config import EVALUATION, TRAINING, WARM_START, BadInput
from launch.commands.dry_run import print_dry_run
from launch.processes import run_folder, stopping
from launch.processes.heartbeat import Watch
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import RoleFailed, Supervisor
from launch.roles.start import existing_run, folder_of, role, start_sampling, wait_ready
from parallel.checkpoints.files import step_of

WITHOUT_NODES = "set launch.nodes=null"


def train(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> RunFolder | None:
    parsed = parse_config(config_path, overrides)
    if dry_run:
        print_dry_run(
            checks.load(parsed, RunConfig, runs=TRAINING, gpu_memory=gpu_memory), TRAINING, gpu_memory
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
            wait_ready(supervisor, folder, config)
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
        wait_ready(supervisor, folder, config)
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
