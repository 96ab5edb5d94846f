"""What the studies share: a grid of ``tandem train`` runs of the quickstart's model, cell by cell, and its table.

The cells run as in ``tandem sweep`` (launch/processes/sweeping.py): a stopped study continues with the same command.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, figure, table_head, table_row  # noqa: E402
from configs.loader import load_config  # noqa: E402
from launch.processes import sweeping  # noqa: E402
from launch.processes.sweeping import Sweep  # noqa: E402
from trainer.tracking.metrics_file import read_metrics  # noqa: E402

RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"
LAST_STEPS = 10
"""Steps at the end whose mean is shown."""
Rows = Sequence[dict]
"""The lines of a run's metrics.jsonl."""
Column = Callable[[Rows], float | None]


@dataclass(frozen=True)
class Cell:
    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The runs are in ``folder/runs``, with one MLflow store; ``settings`` are of all of them."""

    folder: Path
    model: Path
    settings: tuple[str, ...]

    @property
    def _sweep(self) -> Sweep:
        return Sweep(self.folder / "runs" / "sweep")

    def rows(self, name: str) -> Rows | None:
        """The record of a finished cell."""
        folder = self._sweep.run_folder(name)
        if folder is None or not folder.has_final_model():
            return None
        return read_metrics(folder.metrics)

    def run_folder(self, name: str) -> Path:
        """The folder of a cell's newest run."""
        folder = self._sweep.run_folder(name)
        assert folder is not None, f"{name} was not begun"
        return folder.path

    def run_missing(self, cells: Sequence[Cell], jobs: int) -> None:
        """Run the cells that are not finished, ``jobs`` at a time, with progress and time left."""
        self._sweep.folder.mkdir(parents=True, exist_ok=True)
        ended = self._sweep.run(
            self._as_of_a_sweep(cells), jobs=jobs, keep_going=False, devices=[None] * jobs
        )
        if ended:
            raise RuntimeError(ended[0].text)

    def check_settings(self, cells: Sequence[Cell]) -> None:
        """Raises ValueError for a cell that ran with other settings, which its name does not show."""
        for cell in self._as_of_a_sweep(cells):
            if self.rows(cell.name) is not None and (changed := self._sweep.changed(cell)):
                raise ValueError(f"{cell.name} was run with other settings: {'; '.join(changed)}")

    def _as_of_a_sweep(self, cells: Sequence[Cell]) -> list[sweeping.Cell]:
        own = [f"model.path={self.model}", f"launch.runs_dir={self.folder / 'runs'}"]
        return [
            sweeping.Cell(
                name=cell.name,
                config=load_config(RECIPE, [*own, f"name={cell.name}", *self.settings, *cell.settings]),
            )
            for cell in cells
        ]


def last(metric: str) -> Column:
    """The mean of a metric over the last steps; None if they lack it."""

    def mean(rows: Rows) -> float | None:
        values = [row[metric] for row in rows if row["step"] > 0 and row.get(metric) is not None][
            -LAST_STEPS:
        ]
        return statistics.fmean(values) if values else None

    return mean


def over_run(metric: str, statistic: Callable[[Sequence[float]], float]) -> Column:
    """A statistic of all steps of a run; None if they lack the metric."""

    def value(rows: Rows) -> float | None:
        values = [row[metric] for row in rows if row["step"] > 0 and row.get(metric) is not None]
        return statistic(values) if values else None

    return value


def served_accuracy(grid: Grid, name: str) -> float:
    """The last held-out accuracy of a finished cell, with the weights of its servers."""
    return [row["eval/accuracy"] for row in grid.rows(name) or () if row.get("eval/accuracy") is not None][-1]


def table(
    grid: Grid,
    groups: Sequence[tuple[Sequence[str], Sequence[str]]],
    heads: Sequence[str],
    columns: dict[str, Column],
    accuracy: Callable[[Grid, str], float] = served_accuracy,
) -> str:
    """A Markdown table with a row for each group of cells that differ only in their seeds: means over the seeds. The
    accuracy also has its least and greatest value, other columns half the difference of these.

    groups: (first cells of the row, names of the runs).
    """
    names = [*heads, "seeds", "held-out accuracy", *(name.replace("|", "\\|") for name in columns)]
    lines = [table_head(names)]
    for first, cells in groups:
        runs = {cell: rows for cell in cells if (rows := grid.rows(cell)) is not None}
        if not runs:
            continue
        right = [accuracy(grid, cell) for cell in runs]
        shown = [f"{statistics.fmean(right):.1%} ({min(right):.1%} - {max(right):.1%})"]
        for column in columns.values():
            values = [value for rows in runs.values() if (value := column(rows)) is not None]
            shown.append(_mean_and_spread(values) if values else "-")
        lines.append(table_row([*first, len(runs), *shown]))
    return "\n".join(lines)


def _mean_and_spread(values: Sequence[float]) -> str:
    spread = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.3g}" + (f" ± {spread:.1g}" if len(values) > 1 else "")


@dataclass(frozen=True)
class Curve:
    label: str
    color: str
    cells: Sequence[str]


def draw(
    grid: Grid,
    panels: dict[str, Sequence[Curve]],
    metrics: dict[str, str],
    path: Path,
    *,
    size: tuple[float, float] = (3.2, 2.6),
) -> None:
    """A column of panels per key of ``panels``, and a row per metric, by the text of its axis. In a panel there is a
    line per curve, the mean over its cells, and a faint line per cell. size: of a panel, in inches."""
    from PIL import Image

    shape = {"rows": len(metrics), "columns": len(panels), "squeeze": False}
    inches = (size[0] * len(panels), size[1] * len(metrics))
    with figure(path, dpi=75, figsize=inches, sharex=True, sharey="row", **shape) as axes:
        for row, (axis, metric) in zip(axes, metrics.items(), strict=True):
            for panel, curves in zip(row, panels.values(), strict=True):
                for curve in curves:
                    _draw_curve(
                        panel, [rows for cell in curve.cells if (rows := grid.rows(cell))], metric, curve
                    )
                panel.grid(alpha=0.3)
            row[0].set_ylabel(axis)
        for panel, title in zip(axes[0], panels, strict=True):
            panel.set_title(title)
        for panel in axes[-1]:
            panel.set_xlabel("step")
        max(axes[0], key=lambda panel: len(panel.get_legend_handles_labels()[1])).legend()
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a quarter of the bytes


def _draw_curve(panel, runs: Sequence[Rows], metric: str, curve: Curve) -> None:
    lines = [_smoothed(rows, metric) for rows in runs]
    for line in lines:
        panel.plot(range(1, len(line) + 1), line, color=curve.color, alpha=0.2, linewidth=0.8)
    if lines:
        mean = [statistics.fmean(values) for values in zip(*lines, strict=True)]
        panel.plot(range(1, len(mean) + 1), mean, color=curve.color, label=curve.label)


def _smoothed(rows: Rows, metric: str) -> list[float]:
    """The mean over 5 steps; a step without the metric counts as the one before."""
    values: list[float] = []
    for row in rows:
        if row["step"] > 0:
            value = row.get(metric)
            values.append(value if value is not None else values[-1] if values else 0.0)
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def options(description: str, *, lr: float, steps: int) -> argparse.ArgumentParser:
    """The options of every study, with these defaults."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", type=Path, required=True, help="the quickstart's warm model")
    made.add_argument("--folder", type=Path, required=True, help="where cells and results go")
    made.add_argument("--lr", type=float, default=lr)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--jobs", type=int, default=1, help="runs at a time")
    return made


def grid_of(given: argparse.Namespace, *settings: str) -> Grid:
    """The grid of the parsed ``options``, announced; every run has one learner rank, and evaluates before and after."""
    common = (
        f"steps={given.steps}", f"learner.optimizer.lr={given.lr}", "layout.dp=1", "rollout.prompts_per_step=16",
        f"evaluation.every={given.steps}", "checkpoint.every=0",
    )  # fmt: skip
    announce(recipe=RECIPE.name, settings=[*common, *settings], seeds=given.seeds, jobs=given.jobs)
    return Grid(given.folder.resolve(), given.model.resolve(), (*common, *settings))
