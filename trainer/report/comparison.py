"""Several runs side by side, for ``tandem compare``: a line per run in each panel, a table of results, and a table of the
settings that differ."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from configs.schema import RunConfig
from trainer.metric_names import WITHOUT_SELECTION, known
from trainer.report.drawing import ALONE, FEW_RUNS, draw_legend, draw_lines, new_figure
from trainer.report.pictures import ROUNDING, Lines
from trainer.report.series import Recorded, Series
from trainer.tracking.held_out import ACCURACY, FAILED, best_evaluation
from trainer.tracking.tracker import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "The same metric of every run, a line per run. The runs differ in the settings of the table."
OF_A_FOLDER = ("name", "launch.runs_dir", "resume")
"""Settings of a run's folder, in which any two runs differ."""
PANELS = tuple(
    Lines(
        title=title, metrics={known(metric): title}, sparse=metric.startswith("eval/"), log=log, noise=noise
    )
    for title, metric, log, noise in (
        ("Reward, as sampled", "reward/before_selection", False, 0.0),
        ("Reward, importance-weighted", "reward/importance_weighted", False, 0.0),
        ("Held-out accuracy", "eval/accuracy", False, 0.0),
        ("Entropy of the policy", "policy/entropy", False, 0.0),
        ("Response length, mean", "response/length_mean", False, 0.0),
        ("KL(old || current), k1", "policy/ppo_kl", False, ROUNDING),
        ("KL of the two engines, k3", "mismatch/k3", True, ROUNDING),
        ("Greatest Δp of a token", "mismatch/abs_prob_max", True, ROUNDING),
        ("Effective sample size", "mismatch/ess", False, 0.0),
        ("Gradient norm", "optim/grad_norm", False, 0.0),
        ("Seconds of a step", "time/step", False, 0.0),
    )
)
LAST_STEPS = 10
"""Steps at the end of a run whose mean is in the table of results."""
SECONDS = known("time/step")
MEANS = (
    ("reward", known("reward/before_selection"), ".3f"),
    ("k3", known("mismatch/k3"), ".1e"),
    ("ESS", known("mismatch/ess"), ".3f"),
)
GREATEST = known("mismatch/abs_prob_max")
RESULTS_TITLE = "Results of the compared runs"
RESULTS_ABOUT = (
    f"Reward (before dynamic sampling selects groups), k3 and ESS: means of the last {LAST_STEPS} steps. "
    "Seconds of a step: their median. |Δp| max: the greatest gap of a token's "
    "probability between the two engines, in the whole run."
)
SETTINGS_TITLE = "Settings in which the compared runs differ"
SETTINGS_ABOUT = "Every other setting is the same in all runs. A dash: the run has no such field."
Table = list[list[str]]
"""Rows of cells, the titles of the columns first."""


def draw(runs: Mapping[str, Recorded], config: RunConfig) -> "Iterator[Figure]":
    """Each panel of which something can be drawn. ``runs`` are by label.

    With more than ``FEW_RUNS`` runs the panels share one legend, which comes first among the panels.
    """
    drawn = [(panel, lines) for panel in PANELS if (lines := _lines_of(panel, runs))]
    labels = [*runs]
    if drawn and len(runs) > FEW_RUNS:
        figure, (axes,) = new_figure(1, "", size=ALONE)
        axes.remove()
        draw_legend(figure, labels)
        yield figure
    for panel, lines in drawn:
        figure, (axes,) = new_figure(1, "", size=ALONE)
        draw_lines(axes, panel, lines, config, runs=labels)
        yield figure


def _lines_of(panel: Lines, runs: Mapping[str, Recorded]) -> list[tuple[str, Series]]:
    """(label of the run, its series) of the panel's metric; empty if no run has more than rounding."""
    (metric,) = panel.metrics
    lines = [(label, series) for label, recorded in runs.items() if len(series := _series(recorded, metric))]
    is_rounding = all(abs(value) < panel.noise for _, series in lines for value in series.values)
    return [] if is_rounding else lines


def _series(recorded: Recorded, metric: str) -> Series:
    return recorded.get(metric) or recorded.get(WITHOUT_SELECTION.get(metric, metric))


def labels_of(configs: Sequence[tuple[str, RunConfig]]) -> list[str]:
    """A label for each (folder's name, config): the name of its config where these differ, else its folder's. Folders
    of one name in several places get numbers."""
    names, folders = [config.name for _, config in configs], [folder for folder, _ in configs]
    if len(set(names)) == len(names):
        return names
    if len(set(folders)) == len(folders):
        return folders
    return [f"{number} {folder}" for number, folder in enumerate(folders, start=1)]


def results_table(runs: Mapping[str, tuple[Recorded, RunConfig]]) -> Table:
    """A row per run: steps, held-out accuracy, pace, reward, and the gap between the engines; "-" for what was not
    recorded."""
    titles = ["run", "steps", "held out, last", "held out, best", "s a step", *(title for title, *_ in MEANS)]
    return [
        [*titles, "|Δp| max"],
        *([label, *_results_of(recorded, config)] for label, (recorded, config) in runs.items()),
    ]


def _results_of(recorded: Recorded, config: RunConfig) -> list[str]:
    accuracy, seconds, greatest = map(recorded.get, (ACCURACY, SECONDS, GREATEST))
    measured, failed = [*accuracy.by_step.items()], recorded.get(FAILED).by_step
    rows = [{"step": step, ACCURACY: value, FAILED: failed.get(step)} for step, value in measured]
    best = best_evaluation(rows, config.alarms.reward_failed_max)
    means = [(_series(recorded, metric).values[-LAST_STEPS:], form) for _, metric, form in MEANS]
    return [
        f"{max(recorded.steps, default=0)} of {config.steps}",
        *(
            "-" if pair is None else f"{pair[1]:.1%} at {pair[0]}"
            for pair in ((measured or [None])[-1], best)
        ),
        f"{median(seconds.values):.1f}" if seconds else "-",
        *(f"{fmean(values):{form}}" if values else "-" for values, form in means),
        f"{max(greatest.values):.1e}" if greatest else "-",
    ]


def settings_table(labels: Sequence[str], configs: Sequence[RunConfig]) -> Table:
    """The settings in which the runs differ. A row per field, or per run if there are more runs than fields. Empty if the
    runs differ in no setting."""
    if not (differing := differing_settings(configs)):
        return []
    fields = [["field", *labels], *([field, *values] for field, values in differing)]
    if len(labels) < len(fields):
        return fields
    fields[0][0] = "run"
    return [list(row) for row in zip(*fields, strict=True)]


def differing_settings(configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """(field, its value in each run, "-" if a run has no such field) of the fields in which the runs differ."""
    settings = [flatten(config.model_dump(mode="json")) for config in configs]
    fields = dict.fromkeys(field for values in settings for field in values if field not in OF_A_FOLDER)
    rows = [(field, [values.get(field, "-") for values in settings]) for field in fields]
    return [(field, values) for field, values in rows if len(set(values)) > 1]
