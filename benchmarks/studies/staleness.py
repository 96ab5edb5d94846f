"""Does staleness hurt learning, and which correction mends it?

A grid of ``tandem train`` runs of the quickstart's model: ``rollout.max_staleness`` k x correction x seed. The sample
role is as far ahead as k allows, and every update waits for what is under way (``rollout.drain_s``): from step
k + 1 on every token of a run has a lag of exactly k, however fast the machine is. The learning rate is higher than
the quickstart's, so that a few updates change the policy visibly.

    python benchmarks/studies/staleness.py --model runs/quickstart-*/warm --folder staleness [--jobs 2]

A finished cell is not run again: the command goes on where it was stopped. At k = 0 every correction is the same
to rounding, so it is run with one of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trainer.tracking.tracker import duration  # noqa: E402

STALENESS = (0, 1, 2, 4)
CORRECTIONS = ("disabled", "decoupled_token_is", "decoupled_geo_rs_token_is", "decoupled_seq_is")
LAST_STEPS = 10
"""Steps at the end whose mean is shown."""
BOUND_S = 900.0


@dataclass(frozen=True)
class Cell:
    k: int
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"k{self.k}-{self.correction}-{self.seed}"


@dataclass(frozen=True)
class Study:
    folder: Path
    model: Path
    lr: float
    steps: int
    seeds: Sequence[int]

    def cells(self) -> Iterator[Cell]:
        for seed in self.seeds:
            for k in STALENESS:
                for correction in CORRECTIONS if k else CORRECTIONS[:1]:
                    yield Cell(k, correction, seed)

    def rows(self, cell: Cell) -> list[dict] | None:
        """The recorded steps of a finished cell."""
        file = self.folder / cell.name / "rows.json"
        return json.loads(file.read_text()) if file.exists() else None

    def run(self, cell: Cell) -> None:
        folder = self.folder / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        settings = [
            f"model.path={self.model}", f"seed={cell.seed}", f"steps={self.steps}", f"name={cell.name}",
            f"learner.optimizer.lr={self.lr}", f"correction={cell.correction}", "layout.dp=1",
            "rollout.prompts_per_step=16", f"rollout.max_staleness={cell.k}",
            f"evaluation.every={self.steps}", "checkpoint.every=0",
        ]  # fmt: skip
        settings += ["rollout.drain_s=300"] if cell.k else []
        command = [
            sys.executable,
            "-m",
            "launch",
            "train",
            str(ROOT / "configs/recipes/countdown_tiny.yaml"),
            *settings,
        ]
        with (folder / "log.txt").open("w") as log:
            done = subprocess.run(
                command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log, stderr=log, timeout=BOUND_S, check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{cell.name}: {(folder / 'log.txt').read_text()[-1500:]}")
        lines = (folder / "runs/latest/metrics.jsonl").read_text().splitlines()
        (folder / "rows.json").write_text(json.dumps([json.loads(line) for line in lines]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, required=True, help="the quickstart's warm model")
    options.add_argument("--folder", type=Path, required=True, help="where cells and results go")
    options.add_argument("--lr", type=float, default=4e-4)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    given = options.parse_args()
    study = Study(given.folder.resolve(), given.model.resolve(), given.lr, given.steps, given.seeds)
    missing = [cell for cell in study.cells() if study.rows(cell) is None]
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        for done, cell in enumerate(pool.map(lambda cell: (study.run(cell), cell)[1], missing), start=1):
            left = (time.monotonic() - began) / done * (len(missing) - done)
            print(f"{done} of {len(missing)}: {cell.name}; about {duration(left)} left", flush=True)
    print(table(study))
    draw(study, study.folder / "staleness.png")


def _last(rows: Sequence[dict], metric: str) -> float | None:
    values = [row[metric] for row in rows if row["step"] > 0 and row.get(metric) is not None][-LAST_STEPS:]
    return statistics.fmean(values) if values else None


def _accuracy(rows: Sequence[dict]) -> float:
    return [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None][-1]


COLUMNS = {
    "held-out accuracy": _accuracy,
    "reward": lambda rows: _last(rows, "reward/mean"),
    "entropy": lambda rows: _last(rows, "policy/entropy"),
    "gradient": lambda rows: _last(rows, "optim/grad_norm"),
    "k3": lambda rows: _last(rows, "mismatch/k3"),
    "max |dp|": lambda rows: _last(rows, "mismatch/abs_prob_max"),
    "ESS": lambda rows: _last(rows, "mismatch/ess"),
    "kept": lambda rows: _last(rows, "mismatch/kept_fraction"),
    "lag": lambda rows: _last(rows, "staleness/mean") or 0.0,
}


def table(study: Study) -> str:
    """Means over the seeds; of the accuracy also the least and the greatest."""
    lines = [f"| k | correction | seeds | {' | '.join(COLUMNS)} |", "|---|---|---|" + "---|" * len(COLUMNS)]
    for k in STALENESS:
        for correction in CORRECTIONS if k else CORRECTIONS[:1]:
            runs = [rows for seed in study.seeds if (rows := study.rows(Cell(k, correction, seed)))]
            if not runs:
                continue
            shown = []
            for name, measure in COLUMNS.items():
                values = [value for rows in runs if (value := measure(rows)) is not None]
                text = f"{statistics.fmean(values):.3g}" if values else "-"
                if name == "held-out accuracy":
                    text = f"{statistics.fmean(values):.1%} ({min(values):.1%} - {max(values):.1%})"
                shown.append(text)
            lines.append(f"| {k} | {correction if k else 'any'} | {len(runs)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw(study: Study, path: Path) -> None:
    """The mean reward over the steps: a panel per correction, a line per k, faint lines per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CORRECTIONS), figsize=(4 * len(CORRECTIONS), 3.4), sharey=True)
    for panel, correction in zip(panels, CORRECTIONS, strict=True):
        for color, k in zip(("#222222", "#1f77b4", "#2ca02c", "#d62728"), STALENESS, strict=True):
            cells = [Cell(k, correction if k else CORRECTIONS[0], seed) for seed in study.seeds]
            curves = [
                _smoothed([row["reward/mean"] for row in rows if row["step"] > 0])
                for cell in cells
                if (rows := study.rows(cell))
            ]
            for curve in curves:
                panel.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.2, linewidth=0.8)
            if curves:
                mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
                panel.plot(range(1, len(mean) + 1), mean, color=color, label=f"k = {k}")
        panel.set(title=correction, xlabel="step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward (last 5 steps)")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _smoothed(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
