"""Does every supported family go the whole way: loaded, exported, served, verified to the bit, trained?

For each family of ``parallel/planning/families.py`` it makes a tiny model with random weights, and runs

    tandem verify-sync   the learner loads other weights, exports and sends them; the export is compared with them, and the
                         server, to the bit, with one that was started from the export
    tandem train         two steps, on Countdown

    python benchmarks/served_families.py --folder /tmp/families [FAMILY ...]

Results that the folder has already are not made again. The table has all families that were run.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce  # noqa: E402
from parallel.planning.families import SUPPORTED  # noqa: E402
from parallel.weights.hf_headers import read_headers  # noqa: E402
from trainer.tracking.metrics_file import read_metrics  # noqa: E402

RECIPE = ROOT / "configs" / "recipes" / "countdown_tiny.yaml"
TIMEOUT_S = 1800
STEPS = 2
RESULTS = {"verify-sync": "result.json", "train": "metrics.jsonl"}
"""What each command leaves in its run folder."""
FEW = (
    "layout.dp=1", f"steps={STEPS}", "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_total_tokens=4096",
    "evaluation.every=0", "evaluation.at_ends=false", "checkpoint.every=0", "entropy.coefficient=0.05",
)  # fmt: skip
"""A random model gets no reward: the entropy alone has a gradient."""
SPREAD = 0.1
"""Standard deviation of the random weights: the answers depend on the prompt."""


def tandem(log: Path, *arguments: str) -> str:
    """The last line of a command that failed; "" if it did not."""
    command = [sys.executable, "-m", "launch", *arguments]
    with log.open("w") as out:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT_S} s"
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return "" if code == 0 else f"exit code {code}: {lines[-1] if lines else 'no output'}"


def row_of(family: str, folder: Path, *, commands: Sequence[str]) -> dict:
    from rollout.tiny_model import make_tiny_countdown_model

    began, model = time.monotonic(), folder / "model"
    if not model.exists():
        make_tiny_countdown_model(model, seed=0, family=family, initializer_range=SPREAD)
    headers = read_headers(model)
    row = {"family": family, "tensors": len(headers)}
    row["parameters"] = sum(math.prod(header.shape) for header in headers.values())
    for command in commands:
        file = RESULTS[command]
        runs = folder / command
        if not list(runs.glob(f"*/{file}")):
            arguments = [str(RECIPE), f"model.path={model}", *FEW, f"launch.runs_dir={runs}"]
            row[command] = tandem(folder / f"{command}.log", command, *arguments)
        for found in list(runs.glob(f"*/{file}"))[:1]:
            row |= findings(found) if command == "verify-sync" else steps(found)
    return row | {"seconds": round(time.monotonic() - began)}


def findings(file: Path) -> dict:
    (finding,) = json.loads(file.read_text())["findings"]
    served = [part for parts in finding["served"].values() for part in parts]
    return {"export": finding["export"], "served": served}


def steps(file: Path) -> dict:
    rows = [row for row in read_metrics(file) if "optim/grad_norm" in row]
    gaps = [row["mismatch/logprob_gap_max"] for row in rows]
    return {"gradients": [row["optim/grad_norm"] for row in rows], "gap": max(gaps, default=None)}


def line(row: dict) -> list[str]:
    def of_parts(name: str) -> str:
        if name not in row:
            return f"failed ({row['verify-sync']})" if "verify-sync" in row else "not run"
        return f"{len(row[name])} differ" if row[name] else "to the bit"

    gradients, gap = row.get("gradients", []), row.get("gap")
    trained = f"{len(gradients)} steps" if not row.get("train") else f"failed ({row['train']})"
    return [
        f"`{row['family']}`", f"{row['parameters'] / 1e6:.2f} M, {row['tensors']} tensors", of_parts("export"), of_parts("served"),
        trained, ", ".join(f"{norm:.3f}" for norm in gradients), "" if gap is None else f"{gap:.1e}",
    ]  # fmt: skip


HEAD = [
    "family", "tiny model", "loaded and exported", "served and verified", "trained", "gradient norms", "greatest log-prob gap, nats",
]  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *map(line, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where models, runs and rows are kept")
    parser.add_argument("--only", choices=RESULTS, help="one command alone")
    given = parser.parse_args()
    if unknown := set(given.families) - SUPPORTED.keys():
        parser.error(f"not supported: {', '.join(sorted(unknown))}; supported are {', '.join(SUPPORTED)}")
    folder = given.folder.resolve()
    announce(recipe=RECIPE.name, overrides=FEW, spread=SPREAD)
    for family in given.families or SUPPORTED:
        file = folder / family / "row.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            row = row_of(family, file.parent, commands=[given.only] if given.only else [*RESULTS])
            file.write_text(json.dumps(row, indent=2))
            print(line(row), flush=True)
    files = [folder / family / "row.json" for family in SUPPORTED]
    print(table([json.loads(file.read_text()) for file in files if file.exists()]))


if __name__ == "__main__":
    main()
