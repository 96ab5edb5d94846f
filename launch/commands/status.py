"""``tandem status``: the state of a run, read from its folder.

It talks to no role and takes no lock, so it never disturbs the run. It works on any machine that sees the folder.
"""

import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from configs.errors import counted
from configs.schema.alarms import AlarmsConfig
from configs.schema.base import Schema
from configs.schema.launch import EvaluationConfig
from launch.processes.going_on import next_command
from launch.processes.heartbeat import read_beats
from launch.processes.run_folder import RunFolder, error_text
from launch.processes.started_by import read_commands
from launch.slurm.job import ask_squeue
from launch.tables import aligned
from parallel.checkpoints.files import MANIFEST, step_of
from rollout.terminal_text import on_one_visible_line, tandem_command, visible
from trainer.file_system import read_file
from trainer.metric_names import known, value_of
from trainer.tracking.console import duration
from trainer.tracking.held_out import ACCURACY, best_evaluation
from trainer.tracking.ledger import read_ledger, summary
from trainer.tracking.metrics_file import read_metrics

Content = TypeVar("Content")
Block = TypeVar("Block", bound=Schema)

PACE_STEPS = 20
SMOOTHED_STEPS = 10
LAST_ACCURACIES = 3
"""Most of the last held-out accuracies that are shown."""
SQUEUE_TIMEOUT_S = 10.0
BEATS = 8
"""Most roles and ranks whose activity is shown."""
ERROR_LINES = 3
"""Most lines of an error that are shown."""
CONFIG = {"name": str, "steps": int}
"""Fields of config.yaml."""
JOB = {"job_id": (str, int), "restart": int}
"""Fields of job.json."""
OWN_RESULT = {"model": str}
"""Fields of the summary.json that a warm start, an evaluation or a study writes at its end. A training run's has no model."""
SILENT = "Slurm does not say"
QUEUED = ("PENDING", "REQUEUED", "CONFIGURING", "SUSPENDED")
RESULTS = (
    ("reward", known("reward/before_selection"), ".3f"),
    ("|Δp| max", known("mismatch/abs_prob_max"), ".1e"),
    ("ESS", known("mismatch/ess"), ".3f"),
)
"""(title, metric, format); Δp is p_rollout - p_old."""
SECONDS = known("time/step")
EVALUATION_SECONDS = known("time/evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run's state as text, and further lines (title, text)."""

    state: str
    lines: list[tuple[str, str]]

    def __str__(self) -> str:
        return "\n".join(aligned([("state", self.state), *self.lines]))


def status(folder: RunFolder, *, now: float | None = None, rows: Sequence[dict] | None = None) -> Status:
    """The state of a run, read from its folder.

    now: seconds since the epoch; None: this moment. rows: of metrics.jsonl, if the caller has read them.
    """
    now = time.time() if now is None else now
    damaged: list[str] = []
    config = read_file(folder.config, CONFIG, damaged, parse=yaml.safe_load)
    job = read_file(folder.job, JOB, damaged)
    in_slurm = _slurm_state(job) if job is not None else ""
    state = _state(folder, config, in_slurm, damaged)
    running = state.startswith("running")
    lines = [("run", f"{config['name'] if config else '(name unknown)'} in {folder.path}")]
    lines += _command_lines(_read(read_commands, folder.commands, damaged) or [])
    if job is not None:
        start = f", start {job['restart'] + 1}" if job["restart"] else ""
        lines.append(("job", f"{job['job_id']} {in_slurm}{start}"))
    if folder.request.exists() or (config or {}).get("kind") == "sft":
        lines += _result_lines(folder)
    else:
        file = folder.metrics
        if rows is None:
            rows = _read(read_metrics, file, damaged) or []
        ago = now - file.stat().st_mtime if running and rows else None
        lines += _progress_lines(rows, ago, config or {})
        if (groups := _read(lambda path: summary(read_ledger(path)), folder.ledger, damaged)) is not None:
            lines.append(("data", groups))
        lines.append(("checkpoint", _checkpoint_text(folder, now)))
        lines += _model_line(folder)
    lines += _role_lines(folder, damaged, now) if running else []
    logs = ", ".join(file.stem for file in folder.log_files())
    one = tandem_command("logs", folder.path, "--role", "NAME")
    lines.append(("logs", f"{logs} (`{one}`)" if logs else "none yet"))
    return Status(state=state, lines=[*lines, *(("damaged", text) for text in damaged)])


def _read(read: Callable[[Path], Content], file: Path, damaged: list[str]) -> Content | None:
    """The result of ``read`` for a file. None if the file is missing or cannot be read; ``damaged`` then gets the reason."""
    try:
        return read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        damaged.append(f"{file} cannot be read ({error.strerror})")
        return None


def brief_state(folder: RunFolder) -> str:
    """The state of a run in a word or two, without its reasons."""
    config, job = read_file(folder.config, CONFIG, [], parse=yaml.safe_load), read_file(folder.job, JOB, [])
    state = _state(folder, config, _slurm_state(job) if job is not None else "", [])
    return re.split(r"[,:;(]", state, maxsplit=1)[0].strip()


def _state(folder: RunFolder, config: dict | None, in_slurm: str, damaged: list[str]) -> str:
    """The state by the most certain source: the lock of the folder, then Slurm, then the files that the run
    left when it ended. A finished run that was resumed for more steps keeps its old results until it is finished again."""
    if folder.holders() or in_slurm.startswith("RUNNING"):
        request = read_file(folder.stop_request, {"reason": str}, damaged)
        return f"running, asked to stop: {request['reason']}" if request else "running"
    if in_slurm.startswith(QUEUED):
        return f"waiting in the queue ({in_slurm})"
    done = folder.steps_of_model(damaged)
    is_trained = done is not None and folder.has_final_model() and (config is None or done >= config["steps"])
    if is_trained or read_file(folder.summary, OWN_RESULT, []):
        return "finished"
    if stopped := read_file(folder.stop_outcome, {"step": int, "reason": str}, damaged):
        again = f"it continues with `{next_command(folder)}`"
        return f"stopped after step {stopped['step']}: {stopped['reason']}; {again}"
    if errors := sorted(folder.roles.glob("*.error"), key=lambda file: file.stat().st_mtime):
        lines = visible(error_text(errors[0])).strip().splitlines()
        more = [f"({len(lines) - ERROR_LINES} more lines in {errors[0]})"] if len(lines) > ERROR_LINES else []
        return f"failed, by the {errors[0].stem} role: " + "\n    ".join(lines[:ERROR_LINES] + more)
    return _end_without_trace(folder, in_slurm)


def _end_without_trace(folder: RunFolder, in_slurm: str) -> str:
    """The state of a run that no process holds, and that has left neither a result nor an error."""
    if in_slurm.startswith(SILENT):
        return "unknown: Slurm does not say whether the job runs"
    if in_slurm.startswith("COMPLETING"):  # to be requeued, perhaps
        return f"ending ({in_slurm})"
    if not folder.roles.is_dir() and not (in_slurm and folder.log_files()):
        return "not started"
    ended = "not running: interrupted, killed, or started on another machine"
    unless = "unless it runs there, "
    if in_slurm:
        logs = tandem_command("logs", folder.path, "--role", "slurm")
        ended, unless = f"not running: {in_slurm}; `{logs}` says why", ""
    if folder.newest_checkpoint() is None:
        return ended
    return f"{ended}; {unless}it continues with `{next_command(folder)}`"


def _command_lines(commands: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The command that started the run, and the last one that resumed it."""
    texts = [on_one_visible_line(f"{each['command']} ({each['time']})") for each in commands]
    lines = [("started by", text) for text in texts[:1]]
    if len(texts) > 1:
        earlier = f", and {counted(len(texts) - 2, 'time')} before" if len(texts) > 2 else ""
        lines.append(("resumed by", f"{texts[-1]}{earlier}"))
    return lines


def _result_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """The results of a warm start, an evaluation or a study."""
    result = read_file(folder.summary, OWN_RESULT, []) or {}
    study = (read_file(folder.request, {}, []) or {}).get("study")
    accuracy = f"{result['accuracy']:.1%}" if isinstance(result.get("accuracy"), float) else None
    if accuracy and result.get("failed"):
        accuracy += f" ({result['failed']} of {result.get('count')} rewards failed, and count as wrong)"
    lines = [("study", study), ("model", result.get("model")), ("held out", accuracy)]
    return [(title, str(text)) for title, text in [*lines, ("result", result.get("result"))] if text]


def _block_of(config: Mapping[str, Any], name: str, kind: type[Block]) -> Block:
    try:
        return kind.model_validate(config.get(name, {}))
    except ValidationError:  # of a file that was edited
        return kind()


def _progress_lines(rows: Sequence[dict], ago: float | None, config: Mapping) -> list[tuple[str, str]]:
    """Step, pace and results.

    ago: seconds since the last step of an active run; adds the time left. config: of the run; empty if unknown.
    """
    steps = config.get("steps")
    evaluation = _block_of(config, "evaluation", EvaluationConfig)
    max_failed = _block_of(config, "alarms", AlarmsConfig).reward_failed_max
    trained = [row for row in rows if row["step"] > 0]
    if not trained:
        return [("step", "none yet" if steps is None else f"none of {steps} yet")]
    step = trained[-1]["step"]
    pace = statistics.median(row.get(SECONDS) or 0.0 for row in trained[-PACE_STEPS:])
    share = "" if steps is None else f" of {steps} ({step / max(steps, 1):.0%})"
    text = f"{step}{share}, {pace:.1f} s a step"
    if ago is not None and steps is not None and step < steps:
        evaluations_s = [row.get(EVALUATION_SECONDS) or 0.0 for row in rows if row.get(ACCURACY) is not None]
        left = (steps - step) * _full_pace(trained, pace)
        left += evaluation.number_after(step, steps) * (evaluations_s or [0.0])[-1]
        text += f", about {duration(left)} left; the last one {duration(max(ago, 0))} ago"
    best = best_evaluation(rows, max_failed)
    heldout = {row["step"]: row[ACCURACY] for row in rows if row.get(ACCURACY) is not None}
    lines = [("step", text)]
    for title, metric, show in RESULTS:
        values = [value for row in trained if (value := value_of(row, metric)) is not None]
        lines.append((title, _means_text(values, show)))
    lines.append(("held out", _accuracies_text(heldout, best)))
    return [(title, text) for title, text in lines if text]


def _accuracies_text(accuracies: Mapping[int, float], best: tuple[int, float] | None) -> str:
    """The last accuracies by step, the newest first since a narrow terminal cuts the end; then ``best`` (step, accuracy)
    and the first, if they are not among them."""
    last = sorted(accuracies, reverse=True)[:LAST_ACCURACIES]
    groups = [("", last), ("best ", [best[0]] if best else []), ("first ", [min(accuracies)] if last else [])]
    shown, texts = set[int](), list[str]()
    for title, steps in groups:
        new = [f"{accuracies[step]:.1%} at step {step}" for step in steps if step not in shown]
        texts += [title + ", ".join(new)] if new else []
        shown |= {*steps}
    return "; ".join(texts)


def _full_pace(trained: Sequence[dict], pace: float) -> float:
    """Seconds from one step to the next, including checkpoints but not evaluations; ``pace`` if fewer than two steps are
    known."""
    first, *others = trained[-PACE_STEPS - 1 :]
    last = others[-1] if others else first
    if last["step"] == first["step"] or None in (first.get("elapsed_s"), last.get("elapsed_s")):
        return pace
    evaluations_s = sum(row.get(EVALUATION_SECONDS) or 0.0 for row in others)
    return (last["elapsed_s"] - first["elapsed_s"] - evaluations_s) / (last["step"] - first["step"])


def _means_text(values: Sequence[float], form: str) -> str:
    last, before = values[-SMOOTHED_STEPS:], values[-2 * SMOOTHED_STEPS : -SMOOTHED_STEPS]
    if not last:
        return ""
    text = f"{statistics.mean(last):{form}} (mean of the last {counted(len(last), 'step')}"
    return text + (f"; {statistics.mean(before):{form}} before)" if before else ")")


def _checkpoint_text(folder: RunFolder, now: float) -> str:
    newest = folder.newest_checkpoint()
    if newest is None:
        return f"none{folder.damage_of_newest()}"
    try:
        age = max(now - (newest / MANIFEST).stat().st_mtime, 0)
    except FileNotFoundError:  # the run has removed it meanwhile, since it has a newer one
        return _checkpoint_text(folder, now)
    return f"step {step_of(newest)}, written {duration(age)} ago{folder.damage_of_newest()}"


def _model_line(folder: RunFolder) -> list[tuple[str, str]]:
    """The line for a run that continued after its model was written, and has no newer model yet."""
    newest = folder.newest_checkpoint()
    older = [path.name for path in (folder.hf, *folder.path.glob(f"{folder.hf.name}-*")) if path.is_dir()]
    if newest is None or not older or folder.has_final_model():
        return []
    write = f"`{tandem_command('export', folder.path, 'OUT')}` writes that of step {step_of(newest)}"
    return [("model", f"{', '.join(sorted(older))}: of earlier steps; {write}")]


def _slurm_state(job: dict) -> str:
    """The state of a job by Slurm, with its nodes, why it waits or has failed, and the time left if it runs. "" if there is
    no Slurm, or it has forgotten the job. Begins with SILENT if Slurm does not answer."""
    if shutil.which("squeue") is None:
        return ""
    job_id, cluster = str(job["job_id"]), job.get("cluster")
    try:
        answer = ask_squeue(job_id, "%T|%N|%r|%L", cluster=cluster, timeout_s=SQUEUE_TIMEOUT_S)
    except RuntimeError as error:
        return f"{SILENT} ({error})"
    state, nodes, reason, left = [*answer.strip().partition("\n")[0].split("|"), "", "", ""][:4]
    place = f"{state} on {nodes}" if nodes else state
    why = [reason] if reason not in ("", "None") else []
    return ", ".join([place, *why, *([f"{left} left"] if state == "RUNNING" and left else [])])


def _role_lines(folder: RunFolder, damaged: list[str], now: float) -> list[tuple[str, str]]:
    lines = []
    for file in sorted(folder.roles.glob("s[ae]*.json")):  # sample, serve, serve-0, ...; not stop
        address = read_file(file, {}, damaged) or {}
        where = address.get("address") or ", ".join(address.get("urls", []))
        if where:
            lines.append((file.stem, f"listens at {where}"))
    return lines + _activity_lines(folder, now)


def _activity_lines(folder: RunFolder, now: float) -> list[tuple[str, str]]:
    """The activity of each role. If there are many ranks, only those with the longest activities are listed."""
    beats = sorted(read_beats(folder), key=lambda pair: (pair[0].who.startswith("learner"), -pair[0].lasts_s))
    lines = []
    for beat, written in beats[:BEATS]:
        last_sign = f"last sign of life {duration(max(now - written, 0))} ago (pid {beat.pid} on {beat.host})"
        lines.append(("doing", f"{beat.who}: {beat.text()}; {last_sign}"))
    if len(beats) > BEATS:
        lines.append(("doing", f"… and {len(beats) - BEATS} learner ranks more, each not as long"))
    return lines
