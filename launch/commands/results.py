"""``tandem export``, ``tandem report`` and ``tandem compare``: the results of runs, to pass on."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from configs.loader import load_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input, check_new_folder, check_new_page
from launch.processes.locks import locked
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import run_to_end
from launch.roles.start import existing_run, refuse_warm_start, role
from launch.tables import print_table
from parallel.checkpoints.files import best_step, missing, remove_leftovers, step_folder
from parallel.planning.architecture import architecture_of
from parallel.weights.hf_headers import weight_problems
from rollout.guarded_process import own_name, remove_abandoned_in
from rollout.terminal_text import tandem_command
from trainer.file_system import read_required

if TYPE_CHECKING:
    from trainer.report.page import Comparison


def export(run: Path, out: Path, *, adapter: bool = False, best: bool = False) -> None:
    """Write the newest weights of a run: its finished model, or a newer checkpoint if the run was resumed and stopped.
    adapter: only its adapters, in peft's format. best: the weights of the step with the best evaluation."""
    folder = existing_run(run)
    with as_bad_input():
        check_new_folder("OUT", out)
    if adapter:
        config = load_config(folder.config)
        if not isinstance(config, RunConfig) or config.learner.lora is None:
            error = f"--adapter: {folder.path} trained every weight and has no adapters (learner.lora)"
            raise BadInput(f"{error}; leave --adapter out to export its model")
    step = _best_step(folder) if best else None
    with _lock_where_possible(folder) or contextlib.nullcontext():
        exported = _export(folder, out, adapter=adapter, step=step)
    what = "the adapters" if adapter else "the model"
    of_step = "" if exported is None else f" of step {exported}"
    print(f"exported {what}{of_step} to {out}", flush=True)


def _lock_where_possible(folder: RunFolder) -> TextIO | None:
    """Lock against a second export of the run, which would take this one's files. None in a folder without write permission
    or locks. Raises BadInput if another process has the lock."""
    try:
        folder.export_lock.parent.mkdir(parents=True, exist_ok=True)
        return locked(folder.export_lock)
    except BlockingIOError:
        busy = f"RUN: {folder.path} is being exported by another process"
        raise BadInput(f"{busy}; wait for it, or stop it first") from None
    except (OSError, ValueError):
        return None


def _best_step(folder: RunFolder) -> int:
    try:
        step = best_step(folder.checkpoints)
    except ValueError as error:
        raise BadInput(f"--best: {error}; leave --best out") from error
    if step is None:
        raise BadInput(f"--best: {_no_best(folder)}; leave --best out")
    if wrong := missing(step_folder(folder.checkpoints, step)):
        raise BadInput(f"--best: the checkpoint of step {step} is not complete ({wrong}); leave --best out")
    return step


def _no_best(folder: RunFolder) -> str:
    """That the run has no best checkpoint, and why."""
    config = load_config(folder.config) if folder.config.is_file() else None
    reason = "its config names no checkpoint.keep_best, such as eval/accuracy"
    if isinstance(config, RunConfig) and config.checkpoint.keep_best is not None:
        most = config.alarms.reward_failed_max
        where = (
            "" if most is None else f" where at most {most} of the rewards failed (alarms.reward_failed_max)"
        )
        reason = (
            f"checkpoint.keep_best={config.checkpoint.keep_best} has found no evaluation after a step{where}"
        )
    return f"{folder.path} has no best checkpoint, since {reason}"


def _export(folder: RunFolder, out: Path, *, adapter: bool, step: int | None) -> int | None:
    """Returns the step that was exported. step: None for the newest."""
    finished, exported = folder.hf, folder.export
    if adapter:
        finished, exported = folder.adapter, folder.exported_adapter
    remove_abandoned_in(out.parent)  # of exports that were killed, each as large as the model
    partial = out.with_name(own_name("tandem-export-"))
    try:
        is_final = step is None and folder.has_final_model()
        if is_final and not finished.is_dir():
            fix = f"leave --adapter out, or move {folder.hf} away to export those of the newest checkpoint"
            raise BadInput(f"RUN: {finished} is missing, so its adapters cannot be copied; {fix}")
        if is_final and not adapter:
            _require_whole(finished)
        exported_step = folder.steps_of_model([]) if is_final else _export_checkpoint(folder, step)
        with _one_error_for(out, partial, finished if is_final else None):
            partial.parent.mkdir(parents=True, exist_ok=True)
            if is_final:
                shutil.copytree(finished, partial)
            else:
                shutil.move(exported, partial)  # copied only where OUT is on another disk
            partial.rename(out)
        return exported_step
    finally:
        for left in (partial, folder.export, folder.exported_adapter):
            shutil.rmtree(left, ignore_errors=True)
        folder.export_request.unlink(missing_ok=True)


def _require_whole(model: Path) -> None:
    """Refuse a finished model of which files were removed, or are cut off. Their numbers are not read."""
    try:
        problems = weight_problems(model, architecture_of(model))
    except ValueError as error:
        problems = [str(error)]
    if problems:
        first, _, _ = problems[0].partition("; ")  # behind it is what to do with a model from elsewhere
        raise BadInput(f"RUN: {first}; move {model} away to export the newest checkpoint")


@contextlib.contextmanager
def _one_error_for(out: Path, partial: Path, copied: Path | None) -> Iterator[None]:
    """partial: becomes OUT once it is whole. copied: the finished model, which the learner of a resumed run renames."""
    try:
        yield
    except OSError as error:
        if copied is not None and not copied.exists():
            renamed = f"RUN: {copied} was renamed during the copy, since its run continues; the partial copy was removed"
            raise BadInput(f"{renamed}. The same command exports the newest weights") from error
        # shutil.Error lists an error for each file that could not be copied.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else str(error)
        if copied is not None and str(copied) in reason and str(partial) not in reason:
            raise BadInput(f"RUN: {copied} cannot be read: {reason}; the partial copy was removed") from error
        raise BadInput(
            f"OUT: {out} cannot be written: {reason}; the partial copy was removed. Free space there, or name a folder on another disk"
        ) from error


def _export_checkpoint(folder: RunFolder, step: int | None) -> int | None:
    """Into the run's own ``export/``, and adapters into ``export-adapter/``. Returns the step."""
    if folder.newest_checkpoint() is None:
        refuse_warm_start(folder)
        reason = folder.damage_of_newest()
        error = f"RUN: {folder.path} has neither a finished model nor a complete checkpoint{reason}"
        raise BadInput(f"{error}; set checkpoint.every to get them")
    config = load_config(folder.config)
    for exported in (folder.export, folder.exported_adapter):
        remove_leftovers(folder.path, exported.name)  # of an export that was killed
    write_json(folder.export_request, {"step": step})
    folder.forget("export-rank")
    exporting = role("export-rank", folder, config, show_stdout=True)
    run_to_end(exporting, grace_s=config.launch.stop_grace_s)
    return read_required(folder.export_request)["step"]


def report(run: Path) -> None:
    """Write the report of a run."""
    from trainer.report.page import write_report

    folder = existing_run(run)
    with as_bad_input("RUN: "):
        page = write_report(folder.path)
    print(f"report: {page}", flush=True)


def compare(runs: Sequence[Path], out: Path) -> None:
    """Write one page with the runs' curves over each other, and print its tables. A run that is named twice, such as by a
    link, counts once."""
    from trainer.report.page import write_comparison

    with as_bad_input():
        check_new_page("--out", out)
    folders = dict.fromkeys(run.resolve() for run in runs)
    if len(folders) < 2:
        raise BadInput(
            f"RUN: {runs[0]} is the only run, so there is nothing to compare; name two runs, or use `{tandem_command('report', runs[0])}`"
        )
    with as_bad_input("RUN: "):
        out.parent.mkdir(parents=True, exist_ok=True)
        compared = write_comparison([*folders], out)
    print_comparison(compared, out)


def print_comparison(compared: "Comparison", page: Path) -> None:
    for line in compared.left_out:
        print(line)
    for titles, *rows in filter(None, (compared.results, compared.settings)):
        print_table(titles, rows)
    print(f"comparison: {page}", flush=True)
