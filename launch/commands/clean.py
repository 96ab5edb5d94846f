"""``tandem clean``: lists files that the runs of a folder no longer need, with size and reason; ``--apply`` removes them.

Never listed: anything of a run that is or may be active, here or elsewhere; a folder whose config.yaml is not that of a
training run of this version; links and their targets; the newest complete checkpoint and ``hf/`` of any run.
The command holds a run's locks while it removes files of it, so neither a run nor an export can begin.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from configs.errors import counted
from configs.loader import ConfigError, load_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.commands.status import status
from launch.processes.heartbeat import read_beats
from launch.processes.locks import holders_of, locked
from launch.processes.run_folder import RunFolder, may_be_run
from launch.processes.sweeping import Sweep
from launch.slurm.job import is_finished, recorded_job, running_elsewhere
from launch.tables import aligned
from parallel.checkpoints.files import best_step, is_torn, is_valid, step_folders, valid_checkpoints
from parallel.planning.memory import size_text
from rollout.terminal_text import tandem_command

RECENT_S = 600.0
"""A run that recorded no end and wrote within this time may still be active on another host."""
PARTIAL_CHECKPOINT = re.compile(r"\.step_\d{6,}\.partial")
SET_ASIDE = re.compile(r"step_\d{6,}\.damaged\d*")
KILLED_EXPORT = re.compile(r"\.(hf|adapter|export|export-adapter)\.(?!old\.).+")
KILLED_WRITE = re.compile(r"\.[A-Za-z].*\.\d+")
SLURM_LOG = re.compile(r"slurm-.+\.log")
QUICKSTART = re.compile(r"quickstart-\d{8}-\d{6}")


@dataclass(frozen=True, slots=True)
class Item:
    """A file or folder that may be removed."""

    path: Path
    reason: str

    @property
    def bytes(self) -> int:
        if not self.path.is_dir():
            return self.path.lstat().st_size
        files = (os.path.join(parent, name) for parent, _, names in os.walk(self.path) for name in names)
        return sum(os.lstat(file).st_size for file in files)


@dataclass(frozen=True, slots=True)
class LeftAlone:
    path: Path
    reason: str


def clean(runs_dir: Path, *, apply: bool, models: bool) -> int:
    """List what may be removed, or remove it. Returns the exit code: 1 if something could not be removed."""
    if not runs_dir.is_dir():
        raise BadInput(f"RUNS: {runs_dir} is not a folder; name the folder of launch.runs_dir, usually runs")
    folders = [runs_dir] if (runs_dir / "config.yaml").is_file() else _inside(runs_dir)
    runs = [RunFolder(path) for path in folders if may_be_run(path)]
    if not runs:
        raise BadInput(f"RUNS: {runs_dir} holds no runs; name the folder of launch.runs_dir")
    cleaning = Cleaning(apply=apply)
    for run in runs:
        found = _items(run)
        if not any(isinstance(one, Item) for one in found):
            cleaning.take(found)
            continue
        with _held(run, apply=apply) as why_not:
            # Look again, now that no other process can change them.
            cleaning.take([why_not] if why_not else _items(run))
    for sweep in filter(_is_idle_sweep, folders):
        with _locked([sweep / "lock"], apply=apply) as why_not:
            cleaning.take([] if why_not else _sweep_items(sweep))
    cleaning.take(_quickstart_models(folders, runs) if models else [])
    rows, total = cleaning.rows, sum(size for _, size, _ in cleaning.rows)
    shown = [(path, size_text(size), reason) for path, size, reason in rows]
    print("".join(f"{line}\n" for line in aligned(shown)), end="")
    for left in cleaning.alone:
        print(f"left alone: {left.path}: {left.reason}")
    if not rows:
        print(f"nothing to remove in {runs_dir} ({counted(len(runs), 'run')})")
    elif apply:
        print(f"removed {len(rows)} of the above, {size_text(total)} freed")
    else:
        remove = tandem_command("clean", runs_dir, *(["--models"] if models else []), "--apply")
        print(f"{len(rows)} can be removed, {size_text(total)}; `{remove}` removes them")
    return int(cleaning.has_failed)


@dataclass(kw_only=True)
class Cleaning:
    """What was found, and removed with ``apply``."""

    apply: bool
    rows: list[tuple[str, int, str]] = field(default_factory=list)
    """(path, bytes, reason)"""
    alone: list[LeftAlone] = field(default_factory=list)
    has_failed: bool = False
    """Whether something could not be read or removed."""

    def take(self, found: Iterable[Item | LeftAlone]) -> None:
        for one in found:
            if isinstance(one, LeftAlone):
                self.alone.append(one)
                continue
            try:
                size = one.bytes
                if self.apply:
                    shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink()
                self.rows.append((str(one.path), size, one.reason))
            except OSError as error:
                print(f"tandem: {one.path} was not removed: {error.strerror}", file=sys.stderr)
                self.has_failed = True


def _inside(folder: Path) -> list[Path]:
    """The folders and files in a folder, without links. Empty if the folder is itself a link, or cannot be read."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    try:
        return sorted(path for path in folder.iterdir() if not path.is_symlink())
    except PermissionError as error:
        print(f"tandem: {folder} cannot be read: {error.strerror}", file=sys.stderr)
        return []


# ----------------------------------------------------------------------------------------------------------
# runs that are left alone


@contextlib.contextmanager
def _held(run: RunFolder, *, apply: bool) -> Iterator[LeftAlone | None]:
    """With ``apply``, no process can run or export the folder while this is entered. Yields the reason to leave the folder
    alone, if there is one."""
    if (reason := _may_be_written(run)) is not None:
        yield LeftAlone(run.path, reason)
        return
    with _locked((run.lock, run.export_lock), apply=apply) as why_not:
        yield None if why_not is None else LeftAlone(run.path, why_not)


@contextlib.contextmanager
def _locked(locks: Sequence[Path], *, apply: bool) -> Iterator[str | None]:
    """With ``apply``, holds the locks while entered. Yields the reason if they cannot be taken."""
    with contextlib.ExitStack() as held:
        why_not = None
        try:
            for lock in locks if apply else ():
                lock.parent.mkdir(exist_ok=True)
                held.enter_context(locked(lock))
        except BlockingIOError:
            why_not = "it is being run, or exported"
        except (OSError, ValueError) as error:
            why_not = f"its lock cannot be taken ({error})"
        yield why_not


def _may_be_written(run: RunFolder) -> str | None:
    """Why a process may be writing the folder; None if none can be."""
    if run.holders():
        return "it is being run"
    try:
        if (job := running_elsewhere(run)) is not None:
            return f"job {job} runs it, or is queued to run it"
    except RuntimeError as error:
        return str(error)
    written = [time for _, time in read_beats(run)]
    files = [run.metrics, *(_inside(run.logs))]
    written += [file.stat().st_mtime for file in files if file.exists()]
    ago = time.time() - max(written, default=0.0)
    if ago < RECENT_S and not status(run).state.startswith(("finished", "stopped", "failed")):
        return f"it was written {max(ago, 0):.0f} s ago, and may be running on another host"
    return None


# ----------------------------------------------------------------------------------------------------------
# what may go


def _items(run: RunFolder) -> list[Item | LeftAlone]:
    try:
        config = load_config(run.config)
        if not isinstance(config, RunConfig) or run.request.exists():
            return []  # a warm start, an evaluation or a study leaves nothing of the kind
        return [*_checkpoints(run, config), *_leftovers(run)]
    except ConfigError:
        return [LeftAlone(run.path, "its config.yaml is not a config of this version, or cannot be read")]
    except OSError as error:
        return [LeftAlone(run.path, f"{error.filename} cannot be read: {error.strerror}")]


def _checkpoints(run: RunFolder, config: RunConfig) -> Iterator[Item | LeftAlone]:
    if run.checkpoints.is_symlink():
        return
    complete = valid_checkpoints(run.checkpoints)
    try:
        best = best_step(run.checkpoints)
    except ValueError:
        return  # which checkpoint the run keeps as its best is unknown
    kept = [*complete][-config.checkpoint.keep :] + [step for step in complete if step == best]
    goes = {step: folder for step, folder in complete.items() if step not in kept and not folder.is_symlink()}
    notes = list[str]()
    if goes and not is_finished(run, config, note=notes.append):
        goes = {}
    yield from (LeftAlone(run.path, text) for text in notes)
    why = f"finished, and newer checkpoints are kept (checkpoint.keep={config.checkpoint.keep})"
    yield from (Item(folder, why) for folder in goes.values())
    yield from _broken_checkpoints(run, has_result=bool(kept) or run.has_final_model())
    if kept:
        policies = step_folders(run.checkpoints).items()
        steps = {step for step, folder in policies if step not in goes and not is_torn(folder)}
        yield from _critic_checkpoints(run, policy_steps=steps)


def _broken_checkpoints(run: RunFolder, *, has_result: bool) -> Iterator[Item]:
    """has_result: whether the run has a complete checkpoint or its model. It then needs none of these."""
    for root in (run.checkpoints, run.critic_checkpoints):
        for path in _inside(root):
            if PARTIAL_CHECKPOINT.fullmatch(path.name):
                yield Item(path, "left by a save that was killed")
            elif SET_ASIDE.fullmatch(path.name) and has_result:
                yield Item(path, "damaged, and put aside")
    for folder in step_folders(run.checkpoints).values():
        if has_result and not folder.is_symlink() and is_torn(folder):
            yield Item(folder, "incomplete, and another one is complete")


def _critic_checkpoints(run: RunFolder, policy_steps: Set[int]) -> Iterator[Item]:
    """policy_steps: the steps whose policy checkpoint is kept, or cannot be read now."""
    if run.critic_checkpoints.is_symlink():
        return
    for step, folder in step_folders(run.critic_checkpoints).items():
        is_ours = not folder.is_symlink() and (is_valid(folder) or is_torn(folder))
        if step not in policy_steps and is_ours:
            yield Item(folder, "of the critic; the policy's checkpoint of this step is gone")


def _leftovers(run: RunFolder) -> Iterator[Item]:
    for path in _inside(run.path):
        if path in (run.export, run.exported_adapter) or KILLED_EXPORT.fullmatch(path.name):
            yield Item(path, "left by an export that was killed")
        elif path.name == "metrics.lost.jsonl":
            yield Item(path, "of an attempt without a checkpoint")
        else:
            yield from _killed_writes([path])
    yield from _killed_writes(_inside(run.batches))
    job, logs = recorded_job(run), [path for path in _inside(run.logs) if SLURM_LOG.fullmatch(path.name)]
    # If the last job has left no log, one of the others may be its log, or is the newest log.
    if f"slurm-{job}.log" in {path.name for path in logs}:
        for path in logs:
            if path.name != f"slurm-{job}.log":
                yield Item(path, f"the log of a job before the last one, {job}")


def _killed_writes(paths: Iterable[Path]) -> Iterator[Item]:
    for path in paths:
        if path.is_file() and KILLED_WRITE.fullmatch(path.name):
            yield Item(path, "left by a write that was killed")


def _has_done_all(run: RunFolder) -> bool:
    """Whether a training run is finished; False if its config cannot be read."""
    try:
        config = load_config(run.config)
    except (ConfigError, OSError):
        return False
    return isinstance(config, RunConfig) and is_finished(run, config)


def _is_idle_sweep(folder: Path) -> bool:
    """Whether the folder is of a sweep that no process runs."""
    lock = folder / "lock"
    return os.path.isfile(folder / "sweep.json") and lock.is_file() and not holders_of(lock)


def _sweep_items(folder: Path) -> Iterator[Item | LeftAlone]:
    sweep = Sweep(folder)
    try:
        names = [*sweep.runs()]
    except ValueError as error:
        yield LeftAlone(folder, str(error))
        return
    for name in names:
        run = sweep.run_folder(name)
        if run is not None and _has_done_all(run):
            for path in (folder / f"{name}.yaml", folder / f"{name}.log"):
                if path.is_file() and not path.is_symlink():
                    yield Item(path, "of a sweep's run that is finished; the run's folder has its own")
    yield from _killed_writes(_inside(folder))


def _quickstart_models(folders: Sequence[Path], runs: Sequence[RunFolder]) -> Iterator[Item | LeftAlone]:
    """The models between the parts of quickstarts, except those that a run may still need."""
    needed = dict[Path, Path]()
    for run in runs:
        with contextlib.suppress(ConfigError, OSError):
            config = load_config(run.config)
            has_adapters = isinstance(config, RunConfig) and config.learner.lora is not None
            if has_adapters or not _has_done_all(run):
                needed[config.model.path.resolve()] = run.path
    for folder in folders:
        if not QUICKSTART.fullmatch(folder.name):
            continue
        for model in _inside(folder):
            if model.name not in ("random", "warm") or not (model / "config.json").is_file():
                continue
            if (run := needed.get(model.resolve())) is not None:
                yield LeftAlone(model, f"{run} may still need it: it is not finished, or has adapters to it")
            else:
                yield Item(model, "a model of a quickstart")
