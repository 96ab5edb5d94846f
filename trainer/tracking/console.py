"""A run on the console: a line per step under a header, and further lines."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from rollout.terminal_text import visible
from trainer.file_system import LineFile
from trainer.metric_names import known, value_of

HEADER_EVERY = 20


def _seconds(value: float) -> str:
    return f"{value:.1f}s" if value < 1000 else f"{value:.0f}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k" if value < 1e7 else f"{value / 1e6:.0f}M"


@dataclass(frozen=True, slots=True)
class Column:
    """One cell of a step's line. ``shown``: whether the quantity can change with this config."""

    title: str
    width: int
    metric: str
    show: Callable[[float], str]
    shown: Callable[[RunConfig], bool] = lambda config: True

    def __post_init__(self) -> None:
        known(self.metric)


_COLUMNS = (
    Column("reward", 7, "reward/before_selection", "{:.3f}".format),
    Column("heldout", 8, "eval/accuracy", "{:.1%}".format),
    Column("length", 8, "response/length_mean", "{:.1f}".format),
    Column("loss", 10, "loss/total", "{:.2e}".format),
    Column("entropy", 8, "policy/entropy", "{:.3f}".format),
    Column("ref KL", 9, "policy/ref_kl", "{:.1e}".format, lambda config: config.kl.coefficient > 0),
    Column("grad", 8, "optim/grad_norm", "{:.3g}".format),
    Column("|Δp|max", 9, "mismatch/abs_prob_max", "{:.1e}".format),
    Column(
        "ESS", 7, "mismatch/ess", "{:.3f}".format, lambda config: config.correction.weight.level != "none"
    ),
    Column("lag", 6, "staleness/mean", "{:.2f}".format, lambda config: config.rollout.max_staleness > 0),
    Column("kept", 7, "mismatch/kept_fraction", "{:.3f}".format, lambda config: config.correction.rejects),
    Column("tok/s", 7, "throughput/tokens_per_s", _count),
    Column("sample", 8, "time/sampling", _seconds),
    Column(
        "logprob", 8, "time/logprobs", _seconds, lambda config: config.scores_old or config.kl.coefficient > 0
    ),
    Column("update", 8, "time/update", _seconds),
    Column("sync", 7, "time/sync", _seconds),
)
"""Δp is p_rollout - p_old. All other metrics are in metrics.jsonl and in the report."""


def columns_of(config: RunConfig) -> tuple[Column, ...]:
    return tuple(column for column in _COLUMNS if column.shown(config))


def header(num_steps: int, columns: Sequence[Column] = _COLUMNS) -> str:
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    return f"{_step_cell('step', num_steps)}{titles}{'left':>8}"


def row(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float | None],
    left_s: float | None,
    columns: Sequence[Column] = _COLUMNS,
) -> str:
    """One step as a line under ``header``; a metric that was not measured, or is not finite, is a dash."""
    values = [(value_of(metrics, column.metric), column) for column in columns]
    cells = (
        f" {'-' if value is None else column.show(value):>{column.width - 1}}" for value, column in values
    )
    left = "-" if left_s is None else duration(left_s)
    return f"{_step_cell(f'{step}/{num_steps}', num_steps)}{''.join(cells)}{left:>8}"


def _step_cell(text: str, num_steps: int) -> str:
    return f"{text:>{max(2 * len(str(num_steps)) + 1, 7)}}"


class Console:
    """Lines to stdout, styled only on a terminal, and plain to console.log."""

    def __init__(self, path: Path, config: RunConfig):
        self._file = LineFile(path)
        self._num_steps, self._columns = config.steps, columns_of(config)
        self._num_rows = 0

    def step(self, step: int, metrics: Mapping[str, float | None], left_s: float | None) -> None:
        if self._num_rows % HEADER_EVERY == 0:
            self.line(header(self._num_steps, self._columns), style="bold")
        self._num_rows += 1
        line = row(step, self._num_steps, metrics, left_s, self._columns)
        self.line(line, style="green" if metrics.get("eval/accuracy") is not None else None)

    def note(self, text: str) -> None:
        """Write a line only to console.log."""
        self._file.write(visible(text))

    def line(self, text: str, style: str | None = None) -> None:
        text = visible(text)  # a part of it may come from a model
        self.note(text)
        if not sys.stdout.isatty():
            with contextlib.suppress(OSError):  # a file on a full disk, or a pipe without a reader
                print(text, flush=True)
            return
        from rich import console  # only where there is a terminal

        console.Console(file=sys.stdout, highlight=False, markup=False).print(
            text, style=style, no_wrap=True, crop=False, overflow="ignore"
        )

    def close(self) -> None:
        self._file.close()
