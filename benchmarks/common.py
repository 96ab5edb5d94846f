"""What every benchmark shares: arguments, hardware, spread, the JSON file."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    made.add_argument(
        "--quick", action="store_true", help="few repeats: shows that it works, not a figure to quote"
    )
    return made


def hardware() -> dict:
    import torch

    names = [
        row.split(":", 1)[1].strip()
        for row in Path("/proc/cpuinfo").read_text().splitlines()
        if row.startswith("model name")
    ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": names[0] if names else "?", "cores": os.cpu_count(), "gpus": gpus, **versions}


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
        file.write_text(json.dumps(result, indent=2) + "\n")
