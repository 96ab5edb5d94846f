"""The report of a selftest: a table for the console, selftest.txt for a bug report, selftest.json for scripts.

Users send reports to others, so every text is cleared of user and host names, the home folder, keys and tokens.
"""

import contextlib
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from getpass import getuser
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil

from configs.schema.base import looks_secret, without_credentials
from launch.checks.devices import ask_gpus
from launch.processes.run_folder import KEY, write_json
from launch.selftest.check import Outcome, Result
from launch.tables import aligned, print_table
from trainer.file_system import write_whole
from trainer.tracking.provenance import installed_versions, provenance

TEXT, JSON = "selftest.txt", "selftest.json"
PACKAGES = (
    "tandem-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "flash-attn",
    "flashinfer-python", "sgl-kernel", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "safetensors", "numpy", "mlflow",
)  # fmt: skip
MARKS = {Result.PASS: "green", Result.FAIL: "bold red", Result.NOT_HERE: "dim", Result.NOT_RUN: "yellow"}
WORDS = {Result.PASS: "passed", Result.FAIL: "failed", Result.NOT_RUN: "not run", Result.NOT_HERE: "not here"}
TITLES = ("check", "result", "   s", "found")


def environment() -> dict[str, Any]:
    """Versions and hardware. No names of user or host, no paths, no variables."""
    tags, memory = provenance(), psutil.virtual_memory()
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "commit": tags.get("mlflow.source.git.commit", "unknown"),
        "uncommitted_changes": tags.get("tandem.uncommitted_changes", "unknown"),
        "packages": installed_versions(PACKAGES),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
        "memory_gib": round(memory.total / 2**30, 1),
        "available_memory_gib": round(memory.available / 2**30, 1),
        "gpus": ask_gpus(),
        "in_slurm_job": "SLURM_JOB_ID" in os.environ,
    }


def scrubber(folder: Path) -> Callable[[str], str]:
    """A function that removes private parts from a text. folder: that of the selftest; its keys are removed too."""
    keys = [word for file in folder.rglob(KEY) for word in re.findall(r"[\w+/=-]{16,}", file.read_text())]
    secrets = [value for name, value in os.environ.items() if looks_secret(name, value)]
    exact = dict.fromkeys([*keys, *secrets], "SECRET") | {str(folder): "FOLDER"}
    home = os.path.expanduser("~")
    exact |= {home: "HOME"} if home not in ("/", "~") else {}
    # A user named `a` must not remove this letter from every word.
    words = {socket.gethostname(): "HOST"}
    with contextlib.suppress(OSError, KeyError):  # a container's user without a name
        words[getuser()] = "USER"
    words = {word: name for word, name in words.items() if word and word not in ("root", "localhost")}

    def scrub(text: str) -> str:
        for secret, name in sorted(exact.items(), key=lambda item: -len(item[0])):
            text = text.replace(secret, name)
        for word, name in words.items():
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", name, text)
        return without_credentials(text)

    return scrub


def verdict(outcomes: Sequence[Outcome], planned: int, seconds: float) -> str:
    counts = {result: sum(one.result is result for one in outcomes) for result in Result}
    shown = [result for result in WORDS if counts[result] or result is Result.PASS]
    told = [f"{counts[result]} {WORDS[result]}" for result in shown]
    if missing := planned - len(outcomes):
        told.append(f"{missing} not reached (interrupted)")
    return f"{', '.join(told)}, in {seconds:.0f} s"


def print_outcomes(outcomes: Sequence[Outcome], *, width: int) -> None:
    """Print the table on the console. width: the width if the output is not a terminal."""
    from rich.text import Text

    rows = [
        (one.check.name, Text(str(one.result), MARKS[one.result]), f"{one.seconds:4.0f}", one.text)
        for one in outcomes
    ]
    print_table(TITLES, rows, width=width)


def failures(outcomes: Sequence[Outcome]) -> str:
    """The failed checks, what they should prove and what to try; "" if none failed."""
    failed = [one for one in outcomes if one.result is Result.FAIL]
    return "\n".join(
        f"FAIL {one.check.name}: {one.text}\n  it should prove: {one.check.proves}\n  try: {one.fix}"
        for one in failed
    )


def write(folder: Path, outcomes: Sequence[Outcome], *, planned: int, seconds: float, torch: Mapping) -> Path:
    """Write both files. Returns the text's path. Raises OSError."""
    scrub = scrubber(folder)
    about = environment() | {"torch": dict(torch)}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    content = {
        "format": 1,
        "date": date,
        "seconds": round(seconds, 1),
        "verdict": verdict(outcomes, planned, seconds),
        "environment": about,
        "checks": [*map(_content, outcomes)],
    }
    write_json(folder / JSON, json.loads(scrub(json.dumps(content))))
    rows = [(one.check.name, str(one.result), f"{one.seconds:.0f} s", one.text) for one in outcomes]
    parts = [f"tandem selftest, {date}: {content['verdict']}", *aligned(rows), "", "environment"]
    parts += [f"  {name}: {_shown(value)}" for name, value in about.items()]
    for one in outcomes:
        if one.result is Result.FAIL:
            parts += ["", f"FAIL {one.check.name}: {one.text}", f"  try: {one.fix}"]
            parts.append(indent(one.details, "  | "))
    write_whole(folder / TEXT, scrub("\n".join([*parts, ""])).encode())
    return folder / TEXT


def _content(one: Outcome) -> dict[str, Any]:
    return {
        "name": one.check.name,
        "proves": one.check.proves,
        "result": one.result,
        "seconds": round(one.seconds, 1),
        "text": one.text,
        "figures": dict(one.figures),
        "fix": one.fix,
        "details": one.details,
    }


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items()) or "not known"
    if isinstance(value, list):
        return "; ".join(map(_shown, value)) or "none"
    return str(value)
