"""What every benchmark shares: arguments, hardware, spread, the JSON file."""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    made.add_argument(
        "--quick", action="store_true", help="few repeats: shows that it works, not a figure to quote"
    )
    return made


def announce(**about) -> dict:
    """Print what figures depend on: the machine, its load, the commit, and ``about``. Returns it, for the result.

    Called before anything is measured: the load is then that of other work."""
    made = {"hardware": hardware(), **about}
    print(json.dumps(made, indent=2, default=str), flush=True)
    return made


def hardware() -> dict:
    import torch

    names = [
        row.split(":", 1)[1].strip()
        for row in Path("/proc/cpuinfo").read_text().splitlines()
        if row.startswith("model name")
    ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit()}
    load = round(os.getloadavg()[0], 1)  # of the last minute
    return {
        "cpu": names[0] if names else "?",
        "cores": os.cpu_count(),
        "load": load,
        "gpus": gpus,
        **versions,
    }


def commit() -> str:
    """Of the checkout, with a + where files differ from it; ? outside of one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        return "?"
    is_clean = (
        subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode == 0
    )
    return found.stdout.strip() + ("" if is_clean else "+")


def spread(seconds: Sequence[float]) -> dict:
    """Minimum, median and maximum."""
    return {
        "min": min(seconds),
        "median": statistics.median(seconds),
        "max": max(seconds),
        "repeats": len(seconds),
    }


def line(name: str, seconds: Sequence[float]) -> str:
    s = spread(seconds)
    return f"{name:<34} median {s['median']:.3f} s   min {s['min']:.3f}   max {s['max']:.3f}   ({s['repeats']} repeats)"


def cell(values: Sequence[float], form: str = "{:.3f}") -> str:
    """Median (min - max), as a table has it."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} - {high})"


def write(result: dict, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2, default=str) + "\n")
