"""The batch script of a run, or of an array of runs, for Slurm; and its submission.

    one run      RUN/train.sbatch, log RUN/logs/slurm-JOB.log
    an array     a folder of its own with train.sbatch and a link to the run folder of each element, named by its number, by which
                 Slurm finds the element's log and the script its run

All is checked before anything is written: every element's config, the script by ``bash -n`` and, to submit
it, by ``sbatch --test-only``.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from launch.processes.placement import check_gpus_of_job, gpus_of_node, num_nodes
from launch.roles.start import PACKAGE_ROOT

TEMPLATE = Path(__file__).parent / "train.sbatch"
SIGNAL_SLACK_S = 60
"""Slurm may send the signal before the time limit this much earlier than asked."""
SBATCH_TIMEOUT_S = 60
DECIDED = {
    "nodes": "launch.nodes",
    "ntasks": "launch.nodes",
    "ntasks-per-node": "launch.nodes",
    "gres": "launch.nodes.gpus_per_node or launch.slurm.gpus",
    "gpus": "launch.nodes.gpus_per_node or launch.slurm.gpus",
    "gpus-per-node": "launch.nodes.gpus_per_node or launch.slurm.gpus",
    "cpus-per-task": "launch.slurm.cpus_per_node",
    "mem": "launch.slurm.memory_per_node",
    "time": "launch.slurm.time",
    "partition": "launch.slurm.partition",
    "account": "launch.slurm.account",
    "qos": "launch.slurm.qos",
    "signal": "launch.slurm.notice_s",
    "job-name": "name",
    "array": "the option --array",
    "output": "the run folder",
    "error": "the run folder",
    "open-mode": "the run folder",
    "requeue": "launch.slurm.max_restarts",
    "no-requeue": "launch.slurm.max_restarts",
}
"""Options of sbatch that the config's own fields or the design decide, and by what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a script's runs and logs are, as text of the script (``run``) and as Slurm's file pattern
    (``log``)."""

    script: Path
    run: str
    log: str


def place_of_run(run: Path) -> Place:
    return Place(script=run / "train.sbatch", run=shlex.quote(str(run)), log=f"{run}/logs/slurm-%j.log")


def place_of_array(folder: Path) -> Place:
    run = f'{shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"'
    return Place(script=folder / "train.sbatch", run=run, log=f"{folder}/%a/logs/slurm-%A_%a.log")


def elements(arrays: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of every element: all combinations of ``key=v1,v2,...``, the last key's values changing
    fastest.

    Raises ValueError for what is not such a list.
    """
    choices, keys = [], set()
    for text in arrays:
        key, _, values = text.partition("=")
        parts = [value.strip() for value in values.split(",")]
        if not key or not all(parts):
            raise ValueError(
                f"--array {text}: not a list of values; write key=v1,v2, such as --array seed=0,1,2"
            )
        if set(values) & set("[]{}\"'"):
            raise ValueError(
                f"--array {text}: values with brackets or quotes cannot be listed; submit such runs one by one"
            )
        if key in keys or len(set(parts)) < len(parts):
            raise ValueError(
                f"--array {text}: {'the key' if key in keys else 'a value'} is given twice; give each once"
            )
        if key == "resume" or key.startswith("launch."):
            raise ValueError(
                f"--array {text}: one job array asks for the same of Slurm for every run; submit such runs one by one"
            )
        keys.add(key)
        choices.append([f"{key}={value}" for value in parts])
    return list(itertools.product(*choices))


def element_name(name: str, overrides: Sequence[str]) -> str:
    """What the run folder of an array's element is called; without characters that a file name or Slurm may
    not have."""
    return "-".join([name, *(re.sub(r"[^A-Za-z0-9._=+-]", "_", text)[-60:] for text in overrides)])


def check(config: RunConfig) -> list[str]:
    """What keeps this config, which is sound (``checks.load``), from being a Slurm job, each in a sentence
    with the fix."""
    slurm, problems = config.launch.slurm, check_gpus_of_job(config)
    for option in slurm.options:
        name = option.removeprefix("--").split("=")[0]
        if name in DECIDED:
            problems.append(
                f"launch.slurm.options: --{name} is decided by {DECIDED[name]}; set that, and remove it here"
            )
    limit = seconds(slurm.time)
    if slurm.notice_s + SIGNAL_SLACK_S >= limit:
        problems.append(
            f"launch.slurm.notice_s={slurm.notice_s} and the {SIGNAL_SLACK_S} s by which Slurm may be early leave nothing of "
            f"launch.slurm.time={slurm.time} ({limit} s); use a longer time, or a shorter notice"
        )
    return problems


def seconds(time: str) -> int:
    """Of ``hours:minutes:seconds`` or ``days-hours[:minutes[:seconds]]``, as Slurm reads them."""
    days, _, rest = time.rpartition("-")
    hours, minutes, last = [*map(int, rest.split(":")), 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + last


def directives(config: RunConfig, *, log: str, count: int | None = None) -> list[str]:
    """The ``#SBATCH`` lines of one run, or of an array of ``count`` runs."""
    slurm, gpus = config.launch.slurm, gpus_of_node(config)
    asked = {
        "job-name": config.name,
        "nodes": num_nodes(config),
        "ntasks-per-node": 1,
        "gres": f"gpu:{gpus}" if gpus else None,
        "cpus-per-task": slurm.cpus_per_node,
        "mem": slurm.memory_per_node,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "signal": f"B:USR1@{slurm.notice_s}",
        "array": None if count is None else f"0-{count - 1}",
        "output": log,
        "open-mode": "append",
    }
    lines = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    return [f"#SBATCH {line}" for line in (*lines, "--requeue", *slurm.options)]


def script_text(config: RunConfig, place: Place, *, submitted_from: Path, count: int | None = None) -> str:
    """The whole batch script. Raises ValueError where the folder's path has characters that Slurm would read
    otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9._/+=@,:%-]+", place.log) or "%" in str(place.script):
        raise ValueError(
            f"launch.runs_dir: the path {str(place.script.parent)!r} has spaces or other characters that a line of a batch script cannot "
            "hold; use a folder whose path has letters, digits and ._/+=@,:- only"
        )
    values = {
        "DIRECTIVES": "\n".join(directives(config, log=place.log, count=count)),
        "SETUP": "\n".join(config.launch.slurm.setup),
        "SUBMITTED_FROM": shlex.quote(str(submitted_from)),
        "PACKAGES": shlex.quote(str(PACKAGE_ROOT)),
        "PYTHON": shlex.quote(sys.executable),
        "RUN": place.run,
    }
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], TEMPLATE.read_text())


def check_script(text: str, *, by_slurm: bool) -> None:
    """By the shell, and by Slurm where it is to be submitted (which reads no shell). Raises ValueError with
    what they say."""
    for command, of, fix in (
        (["bash", "-n"], "the shell", "mend launch.slurm.setup"),
        (["sbatch", "--test-only"], "sbatch", "ask for what the cluster has (launch.nodes, launch.slurm)"),
    )[: 2 if by_slurm else 1]:
        done = _run(command, text)
        if done.returncode:
            raise ValueError(f"{of} refuses the batch script: {' '.join(done.stderr.split())}; {fix}")


def require_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise ValueError(
            "--submit: there is no `sbatch` here; run it where Slurm is, or leave --submit out and take the script there"
        )


def submit(script: Path) -> str:
    """The number of the new job. Raises ValueError with what ``sbatch`` says where it refuses."""
    done = _run(["sbatch", "--parsable", str(script)])
    if done.returncode:
        raise ValueError(
            f"sbatch refuses {script}: {' '.join(done.stderr.split())}; the script is kept, to be submitted later"
        )
    return done.stdout.strip().split(";")[0]


def _run(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, input=text)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"`{command[0]}` has not answered for {SBATCH_TIMEOUT_S} s; see whether Slurm's controller is up (`scontrol ping`), and "
            "whether a job was accepted all the same (`squeue --me`)"
        ) from None
