"""``tandem list``: the runs of a folder, newest first, with their state as in ``tandem status``."""

import time
from pathlib import Path

import yaml

from configs.reading.files import text_of
from launch.checks.arguments import BadInput
from launch.commands.status import brief_state
from launch.processes.run_folder import RunFolder, may_be_run
from launch.tables import aligned
from trainer.file_system import read_file
from trainer.metric_names import known, value_of
from trainer.tracking.console import duration
from trainer.tracking.metrics_file import rows_from_the_end

ACCURACY, REWARD = known("eval/accuracy"), known("reward/before_selection")
TITLES = ("run", "state", "step", "held out", "reward", "last written")


def run_table(runs_dir: Path, *, now: float | None = None) -> str:
    """A line per run folder. ``now``: seconds since the epoch; None: this moment. Raises BadInput for a folder
    without runs."""
    if not runs_dir.is_dir():
        raise BadInput(f"RUNS: {runs_dir} is not a folder; name that of launch.runs_dir, usually runs")
    now = time.time() if now is None else now
    folders = [RunFolder(path) for path in runs_dir.iterdir() if not path.is_symlink() and may_be_run(path)]
    if not folders:
        raise BadInput(f"RUNS: {runs_dir} holds no runs; `tandem train CONFIG` makes one in launch.runs_dir")
    newest_first = sorted(map(_written_and_row, folders), reverse=True)
    rows = [(*row, f"{duration(max(now - written, 0))} ago") for written, row in newest_first]
    return "\n".join(aligned([TITLES, *rows]))


def _written_and_row(folder: RunFolder) -> tuple[float, tuple[str, str, str, str, str]]:
    """The time of the newest file, and ``_row``. An unreadable run, such as another user's, does not hide the others."""
    try:
        files = (folder.config, folder.metrics, folder.summary)
        return max(file.stat().st_mtime for file in files if file.exists()), _row(folder)
    except OSError as error:
        row = (folder.path.name, f"not readable ({error.strerror})", "-", "-", "-")
        return folder.path.stat().st_mtime, row


def _row(folder: RunFolder) -> tuple[str, str, str, str, str]:
    """Name, state, step, held-out accuracy and reward; a dash for an unknown value."""
    try:
        config = yaml.safe_load(text_of(folder.config))
        kind, steps = config.get("kind", "train"), config.get("steps")
    except (OSError, ValueError, AttributeError, yaml.YAMLError, RecursionError):
        return folder.path.name, "config.yaml is not readable", "-", "-", "-"
    if kind != "train":
        return folder.path.name, f"({kind})", "-", "-", "-"
    summary = read_file(folder.summary, {}, []) or {}
    request = read_file(folder.request, {}, [])
    if request is not None or "accuracy" in summary:
        what = f"({(request or {}).get('study', 'evaluation')})"
        accuracy = summary.get("accuracy")
        held_out = f"{accuracy:.1%}" if isinstance(accuracy, float) else "-"
        return folder.path.name, what if summary else f"{brief_state(folder)} {what}", "-", held_out, "-"
    accuracy, last = _last_metrics(folder.metrics)
    reward = value_of(last, REWARD)
    step = f"{last.get('step', 0)}/{steps}"
    held_out = "-" if accuracy is None else f"{accuracy:.1%}"
    return folder.path.name, brief_state(folder), step, held_out, "-" if reward is None else f"{reward:.3f}"


def _last_metrics(file: Path) -> tuple[float | None, dict]:
    """The newest held-out accuracy, and the newest complete line."""
    accuracy, last = None, {}
    for row in rows_from_the_end(file, with_metric=ACCURACY) if file.exists() else ():
        last = last or row
        accuracy = row.get(ACCURACY)
        if accuracy is not None:
            break
    return accuracy, last
