"""``tandem train``, ``resume``, ``sft`` and ``eval``: check everything, make the run folder, start roles, wait,
report.
"""

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import counted
from configs.loader import ParsedConfig, parse_config
from configs.schema import RunConfig, SftConfig
from configs.schema.base import without_credentials
from configs.schema.layout import ONE_PROCESS
from configs.schema.task import CountdownTask
from launch.checks.arguments import BadInput
from launch.checks.config import EVALUATION, TRAINING, WARM_START, Config, load_checked
from launch.commands.dry_run import print_dry_run
from launch.processes import stopping
from launch.processes.going_on import way_on
from launch.processes.heartbeat import Watch
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import Interrupted, RoleFailed, Supervisor, run_to_end
from launch.roles.start import (
    existing_run,
    folder_of,
    new_run,
    refuse_warm_start,
    role,
    start_sampling,
    wait_ready,
)
from launch.slurm.job import is_finished
from parallel.checkpoints.files import best_step, missing, step_folder, step_of
from rollout.terminal_text import tandem_command

if TYPE_CHECKING:
    from rollout.sampling.messages import EvaluationResult

FEW_STEPS = 100
"""A run of at most this many steps is soon repeated, and needs no warning that nothing saves them."""


def train(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> RunFolder | None:
    parsed = parse_config(config_path, overrides)
    instead = None if dry_run else "use `tandem slurm`, `tandem prepare`, or remove it"
    config = _checked(
        parsed, RunConfig, TRAINING, dry_run=dry_run, gpu_memory=gpu_memory, instead_of_nodes=instead
    )
    if config is None:
        return None
    if config.resume is not None and (finished := finished_line(config)):
        print(finished, flush=True)
        return existing_run(config.resume)
    folder = folder_of(config)
    print(f"run folder: {folder.path}", flush=True)
    if (newest := folder.newest_checkpoint()) is not None:
        print(f"continues from step {step_of(newest)}, {newest}", flush=True)
    if config.steps > FEW_STEPS and not config.checkpoint.every and config.checkpoint.keep_best is None:
        lost = "checkpoint.every=0: Ctrl-C or a killed learner loses every step from here on"
        print(f"{lost}; `{tandem_command('stop', folder.path)}` and SIGTERM save them", flush=True)
    ending = stopping.ending(folder)
    try:
        with (
            Supervisor(grace_s=config.launch.stop_grace_s, ending=ending) as supervisor,
            stopping.StopSignals(folder, supervisor) as signals,
            adding_causes(folder, config, supervisor),
        ):
            start_sampling(supervisor, folder, config)
            supervisor.start(role("learn", folder, config, ranks=config.layout.world_size, show_stdout=True))
            wait_ready(supervisor, folder, config)
            limit_s, restarts = config.launch.stop_timeout_s, config.rollout.max_sampler_restarts
            outcome = stopping.wait_for_learner(
                supervisor, signals, timeout_s=limit_s, sampler_restarts=restarts
            )
    except RoleFailed as failure:
        further = after_end(folder, config, ". When the cause is fixed, ")
        raise RoleFailed(f"{failure}\n{further}") from failure
    except Interrupted:
        ended = "interrupted; every process of the run has ended"
        raise Interrupted(f"{ended}. {after_end(folder, config, '; ')}") from None
    if isinstance(outcome, stopping.Stopped):
        raise stopping.RunStopped(_after_stop(folder, outcome))
    print_result(folder, config)
    return folder


def finished_line(config: RunConfig, *, in_job: bool = False) -> str:
    """The line for a run that is resumed but has done all its steps; "" otherwise. This is not an error: a Slurm job, for
    example, restarts a run until it is finished.

    in_job: it was resumed in a Slurm job."""
    if config.resume is None:
        return ""
    folder = RunFolder(config.resume)
    if not is_finished(folder, config, note=print_message):
        return ""
    job = tandem_command("slurm", folder.config, f"resume={folder.path}", "steps=N", "--submit")
    more = job if in_job else tandem_command("resume", folder.path, "steps=N")
    return f"{folder.path} is finished, with steps={config.steps}; for more: `{more}`"


def print_message(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def adding_causes(folder: RunFolder, config: RunConfig, supervisor: Supervisor) -> Iterator[None]:
    """While entered, stopped processes (SIGSTOP) are found and killed, and a failure names them as its cause."""
    with Watch(folder, timeout_s=config.launch.heartbeat_timeout_s, started=supervisor.processes) as watch:
        try:
            yield
        except RoleFailed as failure:
            raise RoleFailed("\n".join([*watch.ended(), str(failure)])) from failure


def after_end(folder: RunFolder, config: RunConfig, then: str) -> str:
    """What a failed or interrupted run has saved, then the command that continues it or, after the last step, makes the
    report."""
    if not folder.config.is_file():
        return lost_folder(folder)
    if is_finished(folder, config):
        return without_report(folder)
    newest = folder.newest_checkpoint()
    every = "" if config.checkpoint.every else " (checkpoint.every is 0)"
    saved = f"Nothing was saved{every}" if newest is None else f"Saved: step {step_of(newest)}, in {newest}"
    return f"{saved}{then}{way_on(folder, here=True)}"


def lost_folder(folder: RunFolder) -> str:
    """The line for a run whose folder went away under it. What its roles wrote afterwards made a new folder of that name,
    which no command takes for a run."""
    lost = f"The run's folder was removed, renamed or unmounted while the run used it: {folder.path} has no config.yaml any more"
    continued = tandem_command("resume", "NEW_PATH")
    return f"{lost}. If the folder has another name now, `{continued}` continues it from there"


def without_report(folder: RunFolder) -> str:
    """The line for a run whose learner ended after it had written the model. `tandem resume` has nothing to continue then."""
    report = tandem_command("report", folder.path)
    return f"All steps are done, and the model is in {folder.hf}; `{report}` makes the report again"


def resume(
    run: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> RunFolder | None:
    """``train`` with the run's own config and ``overrides``."""
    folder = existing_run(run)
    # A file that cannot be read has no layers; ``train`` says why.
    layers = parse_config(folder.config).layers
    kind = layers[0].at(["kind"]) if layers else None
    if kind is not None and kind.plain() == "sft":
        warm = f"RUN: {run} is a warm start, which saves no checkpoint to continue from"
        raise BadInput(f"{warm}; {way_on(folder, 'sft')}")
    return train(folder.config, [f"resume={folder.path}", *overrides], dry_run=dry_run, gpu_memory=gpu_memory)


def _after_stop(folder: RunFolder, outcome: stopping.Stopped) -> str:
    when = f"after step {outcome.step}" if outcome.step else "before the first step was complete,"
    return f"stopped {when} on request; {way_on(folder, here=True)}"


def sft(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> Path | None:
    parsed = parse_config(config_path, overrides)
    config = _checked(parsed, SftConfig, WARM_START, dry_run=dry_run, gpu_memory=gpu_memory)
    if config is None:
        return None
    folder = new_run(config, config.name)
    ranks = role("sft-rank", folder, config, ranks=config.layout.world_size, show_stdout=True)
    run_to_end(ranks, grace_s=config.launch.stop_grace_s)
    write_json(folder.summary, {"model": str(config.output.resolve()), "steps": config.steps}, flush=True)
    print(f"warm-started model: {config.output}", flush=True)
    return config.output


def evaluate(
    config_path: Path, overrides: list[str], *, dry_run: bool = False, gpu_memory: float | None = None
) -> float | None:
    if (config_path / "config.yaml").is_file():
        config_path, overrides = _trained_model(existing_run(config_path), overrides)
    parsed = parse_config(config_path, overrides)
    config = _checked(parsed, RunConfig, EVALUATION, dry_run=dry_run, gpu_memory=gpu_memory)
    if config is None:
        return None
    from rollout.sampling.messages import SamplingError
    from rollout.sampling.remote import RemoteSampler
    from trainer.file_system import write_whole
    from trainer.tracking import samples

    # There is no learner that could send weights to a restarted server.
    rollout = config.rollout.model_copy(update={"max_server_restarts": 0})
    config = config.model_copy(update={"layout": ONE_PROCESS, "rollout": rollout})
    folder = new_run(config, f"{config.name}-eval")
    write_json(folder.request, {"first_gpu": 0})
    with (
        Supervisor(grace_s=config.launch.stop_grace_s) as supervisor,
        adding_causes(folder, config, supervisor),
    ):
        start_sampling(supervisor, folder, config)
        wait_ready(supervisor, folder, config)
        address, timeout_s = folder.read_address("sample")["address"], config.launch.collective_timeout_s
        with RemoteSampler(address, timeout_s=timeout_s, key=folder.run_key()) as remote:
            try:
                result = remote.evaluate(meanwhile=lambda: supervisor.check(may_end=()))
            except SamplingError as error:  # the role's own error message
                raise RoleFailed(str(error)) from error
    if result is None:
        error = f"{config_path}: the task has no held-out problems to evaluate on"
        raise RoleFailed(f"{error}; raise task.heldout_fraction")
    summary, text = _evaluation_summary(result, config.model.path)
    write_json(folder.summary, summary, flush=True)
    print(f"{text}; {folder.summary}", flush=True)
    if kept := samples.of_evaluation(result, step=0, version=0):
        write_whole(samples.sample_file(folder.samples, 0, samples.EVALUATION), samples.as_lines(kept))
        print(f"samples: `{tandem_command('samples', folder.path)}`", flush=True)
    return result.accuracy


def _trained_model(folder: RunFolder, overrides: list[str]) -> tuple[Path, list[str]]:
    """The config and the overrides that evaluate a run's own model. The run's config names the model that it began with."""
    if not folder.has_final_model():
        refuse_warm_start(folder)
        export = tandem_command("export", folder.path, "OUT")
        evaluate = tandem_command("eval", folder.config, "model.path=OUT")
        raise BadInput(
            f"RUN: {folder.path} has not written its trained model; `{export}` writes that of its newest checkpoint, and "
            f"`{evaluate}` measures it"
        )
    return folder.config, [f"model.path={json.dumps(str(folder.hf))}", "resume=null", *overrides]


def _evaluation_summary(result: "EvaluationResult", model: Path) -> tuple[dict[str, Any], str]:
    """(for the file of the summary, in words)."""
    summary: dict[str, Any] = {"accuracy": result.accuracy, "accuracy_error": result.accuracy_error}
    summary |= {"count": result.count, "failed": result.failed, "reward_mean": result.reward_mean}
    summary["model"] = str(model)
    text = f"accuracy {_accuracy_text(result, f' on {result.count} held-out samples')}"
    if result.reward_mean != result.accuracy:  # equal where all rewards are 0 or 1
        text += f", mean reward {result.reward_mean:.4f}"
    if result.pass_at:
        summary["pass_at"] = result.pass_at
        text += "".join(f", pass@{k} {share:.4f}" for k, share in result.pass_at.items())
    if result.greedy:
        summary |= {"greedy_accuracy": result.greedy.accuracy, "greedy_failed": result.greedy.failed}
        summary["greedy_accuracy_error"] = result.greedy.accuracy_error
        text += f", at temperature 0 {_accuracy_text(result.greedy)}"
    for kind, results in (("sets", result.sets), ("sources", result.sources)):
        if results:
            summary[kind] = {name: one.accuracy for name, one in results.items()}
            summary[f"{kind}_accuracy_error"] = {name: one.accuracy_error for name, one in results.items()}
            summary[f"{kind}_failed"] = {name: one.failed for name, one in results.items()}
            text += "".join(f", {name} {_accuracy_text(one)}" for name, one in results.items())
    if result.first_failure is not None:
        text += f"; a failed reward counts as wrong; the first: {result.first_failure}"
    return summary, text


def _accuracy_text(result: "EvaluationResult", of: str = "") -> str:
    """The accuracy with its standard error (a single problem has none) and the number of failed rewards."""
    error = f" ± {result.accuracy_error:.4f}" if result.accuracy_error is not None else ""
    failed = f" ({result.failed} of {result.count} rewards failed)" if result.failed else ""
    return f"{result.accuracy:.4f}{error}{of}{failed}"


def _checked(
    parsed: ParsedConfig,
    kind: type[Config],
    roles: Sequence[str],
    *,
    dry_run: bool,
    gpu_memory: float | None,
    instead_of_nodes: str | None = "set launch.nodes=null",
) -> Config | None:
    """The checked config of roles that all run on this machine. None after a dry run, which this function prints."""
    if gpu_memory is not None and not dry_run:
        error = f"--gpu-memory {gpu_memory:g} describes the GPUs of other machines"
        raise BadInput(f"{error}; use it with --dry-run, or leave it out")
    config = load_checked(parsed, kind, runs=roles, gpu_memory=gpu_memory, instead_of_nodes=instead_of_nodes)
    if not dry_run:
        return config
    if "learn" in roles and isinstance(config, RunConfig) and (finished := finished_line(config)):
        print(f"# {finished}", flush=True)  # the output of a dry run is a config
    else:
        print_dry_run(config, roles, gpu_memory)
    return None


def print_result(folder: RunFolder, config: RunConfig, *, in_job: bool = False) -> None:
    """Print the results of a run, their paths, and commands for next steps. Paths and commands are valid in any folder.

    in_job: a Slurm job has run it, and its next steps need another job."""
    from trainer.file_system import read_required
    from trainer.tracking.mlflow_thread import tracking_uri

    print()
    try:
        summary = read_required(folder.summary, {"steps": int})
    except ValueError as error:  # on a disk that was full: the model and its paths are there nevertheless
        print(error)
        summary = {"steps": config.steps}
    if summary.get("accuracy_after") is not None:
        before = summary["accuracy_before"]
        text = f"{before:.1%} before, " if before is not None else ""
        step = summary["accuracy_after_step"]
        done = "" if step == summary["steps"] else f"{step} of "
        text += f"{summary['accuracy_after']:.1%} after {done}{counted(summary['steps'], 'step')}"
        print(f"held-out accuracy: {text}")
        if (summary.get("accuracy_best") or 0.0) > summary["accuracy_after"]:
            best = summary["accuracy_best_step"]
            where = _checkpoint_of_best(folder, config, best)
            print(f"best:        {summary['accuracy_best']:.1%} after step {best}; {where}")
    uri, path = without_credentials(tracking_uri(config, folder.path)), folder.path
    tandem = partial(_typed_here, "tandem")
    anew = f"not written; {tandem('report', path)} writes it"
    print(f"report:      {f'{folder.report} (open it in a browser)' if folder.report.is_file() else anew}")
    print(f"model:       {folder.hf} (Hugging Face format)")
    print(f"MLflow:      {_typed_here('mlflow', 'ui', '--backend-store-uri', uri)}")
    print(f"all runs:    {tandem('list', path.parent)}")
    if folder.newest_checkpoint() is not None:
        more = f"steps={2 * summary['steps']}"
        job = tandem("slurm", folder.config, f"resume={path}", more, "--submit")
        print(f"continue:    {job if in_job else tandem('resume', path, more)}")
    if isinstance(config.task, CountdownTask):  # the quickstart's task
        init = tandem("init", "FOLDER")
        print(f"your own:    {init} writes a config, a reward and example data to start from")
    sys.stdout.flush()


def _checkpoint_of_best(folder: RunFolder, config: RunConfig, step: int) -> str:
    """Where the weights of the step with the best held-out accuracy are."""
    checkpoint = step_folder(folder.checkpoints, step)
    if missing(checkpoint) is not None:
        is_asked_for = config.checkpoint.keep_best == "eval/accuracy"
        hint = "" if is_asked_for else " (checkpoint.keep_best=eval/accuracy keeps it)"
        return f"no checkpoint of it was kept{hint}"
    try:
        is_named = best_step(folder.checkpoints) == step
    except ValueError:
        is_named = False
    if not is_named:  # kept by checkpoint.every; or the best by another metric is another step
        return f"its checkpoint is {checkpoint}"
    return f"{_typed_here('tandem', 'export', folder.path, 'OUT', '--best')} writes its model"


def _typed_here(name: str, *arguments: object) -> str:
    """A command as it can be typed here: by its name if that is on the path, else by its path beside this interpreter."""
    beside = Path(sys.executable).with_name(name)
    program = name if shutil.which(name) or not beside.exists() else beside
    return shlex.join(map(str, (program, *arguments)))
