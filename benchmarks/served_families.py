"""Does every supported family go the whole way: loaded, exported, served, verified to the bit, trained?

Of each family of ``parallel/planning/families.py`` a tiny model with random weights; then

    tandem verify-sync   the learner loads other weights, exports and sends them; the export is compared with them, and the
                         server, to the bit, with one that was started from the export
    tandem train         two steps, on Countdown

    python benchmarks/served_families.py --folder /tmp/families [FAMILY ...]

A family that the folder has a row of is not run again: the table is of all rows.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallel.planning.families import SUPPORTED  # noqa: E402
from parallel.planning.layout import read_architecture, read_hf_config  # noqa: E402
from parallel.weights.hf_headers import read_headers  # noqa: E402
from trainer.tracking.tracker import read_metrics  # noqa: E402

RECIPE = ROOT / "configs" / "recipes" / "countdown_tiny.yaml"
TIMEOUT_S = 600
STEPS = 2
FEW = (
    "layout.dp=1", f"steps={STEPS}", "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_total_tokens=4096",
    "evaluation.every=0", "evaluation.at_ends=false", "checkpoint.every=0",
)  # fmt: skip
SPREAD = 0.1
"""Standard deviation of the random weights: the answers depend on the prompt."""


def tandem(log: Path, *arguments: str) -> str:
    """The last line of what failed; "" where nothing did."""
    command = [sys.executable, "-m", "launch", *arguments]
    with log.open("w") as out:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT_S} s"
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return "" if code == 0 else f"exit code {code}: {lines[-1] if lines else 'no output'}"


def newest(runs: Path) -> Path:
    folders = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()]
    return max(folders, key=lambda path: path.stat().st_mtime)


def row_of(family: str, folder: Path) -> dict:
    from rollout.tiny_model import make_tiny_countdown_model

    began, model = time.monotonic(), folder / "model"
    make_tiny_countdown_model(model, seed=0, family=family, initializer_range=SPREAD)
    headers = read_headers(model)
    parameters = sum(_numbers(header.shape) for header in headers.values())
    row = {"family": family, "parameters": parameters, "tensors": len(headers)}
    read_architecture(read_hf_config(model))
    common = [str(RECIPE), f"model.path={model}", *FEW]
    row["verify"] = tandem(
        folder / "verify.log", "verify-sync", *common, f"launch.runs_dir={folder / 'verify'}"
    )
    result = newest(folder / "verify") / "result.json" if (folder / "verify").is_dir() else None
    if result is not None and result.exists():
        (finding,) = json.loads(result.read_text())["findings"]
        row |= {
            "export": finding["export"],
            "served": [part for parts in finding["served"].values() for part in parts],
        }
    row["train"] = tandem(folder / "train.log", "train", *common, f"launch.runs_dir={folder / 'train'}")
    metrics = newest(folder / "train") / "metrics.jsonl" if (folder / "train").is_dir() else None
    if metrics is not None and metrics.exists():
        steps = [step for step in read_metrics(metrics) if "optim/grad_norm" in step]
        row["steps"] = len(steps)
        row["gradients"] = [step["optim/grad_norm"] for step in steps]
        row["gap"] = max((step["mismatch/logprob_gap_max"] for step in steps), default=None)
    row["seconds"] = round(time.monotonic() - began)
    return row


def _numbers(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def line(row: dict) -> list[str]:
    def of_parts(name: str) -> str:
        if name not in row:
            return f"failed ({row['verify']})"
        return f"{len(row[name])} differ" if row[name] else "to the bit"

    trained = f"{row.get('steps', 0)} steps" if not row["train"] else f"failed ({row['train']})"
    gap = row.get("gap")
    gradients = ", ".join(f"{norm:.2f}" for norm in row.get("gradients", ()))
    return [
        f"`{row['family']}`", f"{row['parameters'] / 1e6:.2f} M, {row['tensors']} tensors", of_parts("export"), of_parts("served"),
        trained, gradients, "" if gap is None else f"{gap:.1e}", str(row["seconds"]),
    ]  # fmt: skip


HEAD = [
    "family", "tiny model", "loaded and exported", "served and verified", "trained", "gradient norms", "greatest log-prob gap, nats",
    "s",
]  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *map(line, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where models, runs and rows are kept")
    given = parser.parse_args()
    if unknown := set(given.families) - SUPPORTED.keys():
        parser.error(f"not supported: {', '.join(sorted(unknown))}; supported are {', '.join(SUPPORTED)}")
    folder = given.folder.resolve()
    for family in given.families or SUPPORTED:
        file = folder / family / "row.json"
        if not file.exists():
            file.parent.mkdir(parents=True)
            row = row_of(family, file.parent)
            file.write_text(json.dumps(row, indent=2))
            print(line(row), flush=True)
    files = [folder / family / "row.json" for family in SUPPORTED]
    print(table([json.loads(file.read_text()) for file in files if file.exists()]))


if __name__ == "__main__":
    main()
