"""What benchmarks share: arguments, hardware, sides that take turns, servers, spread, tables, the JSON file."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from rollout.run_key import RunKey
    from rollout.servers.command import ServerSpec
    from rollout.servers.fleet import ServerFleet


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    made.add_argument(
        "--quick", action="store_true", help="few repeats: shows that it works, not a figure to quote"
    )
    return made


def announce(**about) -> dict:
    """Print what figures depend on: the machine, its load, the commit, and ``about``. Returns it, for the result.

    Call it before measuring: the load is then that of other work."""
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
    """The checkout's commit, with a + if files differ from it; ? outside of a checkout."""
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


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each side in each round. The order alternates, so a drift of the machine affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            began = time.process_time()
            sides[name]()
            seconds[name].append(time.process_time() - began)
    return seconds


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [one / other for one, other in zip(of, to, strict=True)]


def in_own_process(file: str, *arguments: str, env: Mapping[str, str] = os.environ) -> Any:
    """Run the benchmark ``file`` in a separate process, whose memory is then that of one measurement. Returns its last
    line, from JSON."""
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def servers_on_cpu(config: "RunConfig", logs: Path) -> "ServerSpec":
    """The settings of the SGLang servers of a config, on CPU. Their key is made beside their logs."""
    from rollout.run_key import run_key
    from rollout.servers.command import ServerSpec

    logs.mkdir(parents=True, exist_ok=True)
    return ServerSpec(config=config, cuda=False, key=run_key(logs / "key.yaml"))


@contextmanager
def serving(config: "RunConfig", logs: Path) -> Iterator[tuple["ServerFleet", "RunKey"]]:
    """Inside, the SGLang servers of a config answer, on CPU, to requests that prove the key."""
    from rollout.servers.fleet import ServerFleet

    spec = servers_on_cpu(config, logs)
    fleet = ServerFleet(spec, logs)
    try:
        fleet.start()
        fleet.wait_healthy(900)
        yield fleet, spec.key
    finally:
        fleet.stop()


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
    """Median (min - max), for a table."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} - {high})"


def table_row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(titles: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return f"{table_row(titles)}\n{'|---' * len(titles)}|"


@contextmanager
def figure(path: Path, *, dpi: int, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Axes to draw on, one or an array of them. The figure is written at the end. options: of ``pyplot.subplots``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(rows, columns, **options)
    yield axes
    made.tight_layout()
    made.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(made)


def write(result: dict, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2, default=str) + "\n")
