"""The batch script of a run, or of an array of runs, for Slurm, and its submission.

    one run      RUN/train.sbatch, log RUN/logs/slurm-JOB.log
    an array     its own folder with train.sbatch and a link to the run folder of each element. The link has the element's
                 number as its name: through it Slurm finds the log, and the script the run.

Everything is checked before anything is written: every element's config, and the script by ``bash -n`` and,
before a submission, by ``sbatch --test-only``.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from launch.grid import combinations
from launch.processes.placement import check_gpus_of_job, gpus_of_node, num_nodes
from launch.roles.start import PACKAGE_ROOT
from launch.slurm.job import ASKED_OF_SLURM

TEMPLATE = Path(__file__).parent / "train.sbatch"
SIGNAL_SLACK_S = 60
"""Slurm may send the signal this much earlier than requested."""
SBATCH_TIMEOUT_S = 60
_OPTIONS_BY_SOURCE = {
    "launch.nodes": ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu"),
    "launch.nodes.gpus_per_node or launch.slurm.gpus": (
        "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket",
    ),
    "launch.slurm.cpus_per_node": ("cpus-per-task",),
    "launch.slurm.memory_per_node": ("mem",),
    "launch.slurm.time": ("time",),
    "launch.slurm.partition": ("partition",),
    "launch.slurm.account": ("account",),
    "launch.slurm.qos": ("qos",),
    "launch.slurm.notice_s": ("signal",),
    "launch.slurm.max_restarts": ("requeue", "no-requeue"),
    "name": ("job-name",),
    "the option --array": ("array",),
    "the run folder": ("output", "error", "open-mode"),
}  # fmt: skip
DECIDED = {option: source for source, options in _OPTIONS_BY_SOURCE.items() for option in options}
"""Options of sbatch that are decided elsewhere: option -> field, or other source."""
ASK_FOR_CORES = frozenset({"--exclusive", "--cpus-per-gpu"})
ONE_REQUEST = "a job array makes the same request to Slurm for every run; submit such runs one by one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The places of a script and of its runs and logs: ``run`` is text of the script, ``log`` a file pattern of
    Slurm."""

    script: Path
    run: str
    log: str


def place_of_run(run: Path) -> Place:
    return Place(script=run / "train.sbatch", run=shlex.quote(str(run)), log=f"{run}/logs/slurm-%j.log")


def place_of_array(folder: Path) -> Place:
    run = f'{shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"'
    return Place(script=folder / "train.sbatch", run=run, log=f"{folder}/%a/logs/slurm-%A_%a.log")


def elements(arrays: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of every element: all combinations of ``key=v1,v2,...``. The last key's values change fastest.

    Raises ValueError for an option of another form.
    """
    for text in arrays:
        key = text.partition("=")[0]
        if key == "resume" or key.startswith("launch."):
            raise ValueError(f"--array {text}: {ONE_REQUEST}")
    return combinations(arrays, "--array ")


def other_request(config: RunConfig, first: RunConfig) -> str:
    """The requests to Slurm of an array's element that differ from the first element's, whose script all share; "" if none
    do. The job has one name."""
    own, its = (
        [*directives(each.model_copy(update={"name": first.name}), log=""), *each.launch.slurm.setup]
        for each in (config, first)
    )
    if own == its:
        return ""
    more, less = ([line for line in a if line not in b] for a, b in ((own, its), (its, own)))
    return f"`{', '.join(more) or 'nothing'}`, where the first run asks for `{', '.join(less) or 'nothing'}`"


def check(config: RunConfig) -> list[str]:
    """Reasons why a config that passed ``load_checked`` cannot be a Slurm job, each in a sentence with the fix."""
    slurm, problems = config.launch.slurm, check_gpus_of_job(config)
    for option in slurm.options:
        name = option.removeprefix("--").split("=")[0]
        if name in DECIDED:
            error = f"launch.slurm.options: --{name} is set by {DECIDED[name]}"
            problems.append(f"{error}; set that, and remove it here")
    limit = seconds(slurm.time)
    if slurm.notice_s + SIGNAL_SLACK_S >= limit:
        problems.append(
            f"launch.slurm.notice_s={slurm.notice_s} and the {SIGNAL_SLACK_S} s by which Slurm may be early leave nothing of "
            f"launch.slurm.time={slurm.time} ({limit} s); use a longer time, or a shorter notice"
        )
    return problems


def seconds(time: str) -> int:
    """Seconds of ``hours:minutes:seconds`` or ``days-hours[:minutes[:seconds]]``, as Slurm reads them."""
    days, _, rest = time.rpartition("-")
    hours, minutes, last = [*map(int, rest.split(":")), 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + last


def note_on_cores(config: RunConfig) -> str | None:
    """A warning if no option requests the cores of a node: its one task starts all processes of the run there."""
    slurm = config.launch.slurm
    if slurm.cpus_per_node is not None or {o.partition("=")[0] for o in slurm.options} & ASK_FOR_CORES:
        return None
    text = "launch.slurm.cpus_per_node is not set: Slurm's default is one core for all processes of a node"
    return f"{text}, unless the partition has another; set it to the cores of a node, or add --exclusive to launch.slurm.options"


def directives(config: RunConfig, *, log: str, count: int | None = None) -> list[str]:
    """The ``#SBATCH`` lines of one run, or of an array of ``count`` runs."""
    slurm, gpus = config.launch.slurm, gpus_of_node(config)
    gres = ["gpu", *([slurm.gpu_type] if slurm.gpu_type else []), str(gpus)]
    asked = {
        "job-name": config.name,
        "nodes": num_nodes(config),
        "ntasks-per-node": 1,
        "gres": ":".join(gres) if gpus else None,
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
    """The whole batch script. Raises ValueError if Slurm would misread characters of the folder's path."""
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
    """Check the script by the shell and, before a submission, by Slurm. Raises ValueError with their errors."""
    shell = (["bash", "-n"], "the shell", "fix launch.slurm.setup")
    sbatch = ["sbatch", "--test-only", *_requests(text)]
    slurm = (sbatch, "sbatch", "ask for what the cluster has (launch.nodes, launch.slurm)")
    for command, program, fix in (shell, slurm) if by_slurm else (shell,):
        done = _run_command(command, text)
        if done.returncode:
            raise ValueError(f"{program} refuses the batch script: {' '.join(done.stderr.split())}; {fix}")


def submit(script: Path) -> tuple[str, str | None]:
    """Submit the script. Returns the number of the new job and, if Slurm has chosen among several, its cluster. Raises
    ValueError with the error of ``sbatch``."""
    done = _run_command(["sbatch", "--parsable", *_requests(script.read_text()), str(script)])
    if done.returncode:
        error = f"sbatch refuses {script}: {' '.join(done.stderr.split())}"
        raise ValueError(f"{error}; the script is kept and can be submitted later")
    job, _, cluster = done.stdout.strip().partition(";")
    return job, cluster or None


def _requests(text: str) -> list[str]:
    """The script's requests as options of sbatch: only options override the environment's requests (SBATCH_ACCOUNT,
    SBATCH_SIGNAL, ...), which override a script's."""
    head, _, _ = text.partition("\n\n")
    return re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE)


def _run_command(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess:
    """The command without requests of the environment that an outer job has made."""
    asked = {f"{prefix}_{name}" for prefix in ("SLURM", "SBATCH") for name in ASKED_OF_SLURM}
    env = {name: value for name, value in os.environ.items() if name not in asked}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, input=text, env=env
        )
    except subprocess.TimeoutExpired:
        error = f"`{command[0]}` has not answered for {SBATCH_TIMEOUT_S} s"
        look = "see whether Slurm's controller is up (`scontrol ping`), and whether it accepted a job (`squeue --me`)"
        raise ValueError(f"{error}; {look}") from None
