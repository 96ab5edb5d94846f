"""Several runs in one picture: a line per run in each panel, and a table of the settings in which they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from configs.schema import RunConfig
from trainer.metric_names import known
from trainer.report.drawing import ALONE, Recorded, Series, draw_lines, new_figure
from trainer.report.pictures import ROUNDING, Lines
from trainer.tracking.tracker import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Compared runs"
ABOUT = "The same metric of every run, a line per run. They differ in the settings of the table."
OF_A_FOLDER = ("name", "launch.runs_dir", "resume")
"""Settings of a run's folder, in which any two runs differ."""
PANELS = tuple(
    Lines(
        title=title, metrics={known(metric): title}, sparse=metric.startswith("eval/"), log=log, noise=noise
    )
    for title, metric, log, noise in (
        ("Reward, as sampled", "reward/mean", False, 0.0),
        ("Reward, importance-weighted", "reward/importance_weighted", False, 0.0),
        ("Held-out accuracy", "eval/accuracy", False, 0.0),
        ("Entropy of the policy", "policy/entropy", False, 0.0),
        ("Response length, mean", "response/length_mean", False, 0.0),
        ("KL(old || current), k1", "policy/ppo_kl", False, ROUNDING),
        ("KL of the two engines, k3", "mismatch/k3", True, ROUNDING),
        ("Greatest Δp of a token", "mismatch/abs_prob_max", True, ROUNDING),
        ("Effective sample size", "mismatch/ess", False, 0.0),
        ("Gradient norm", "optim/grad_norm", False, 0.0),
    )
)


def draw(runs: Mapping[str, Recorded], config: RunConfig) -> "tuple[Figure | None, Iterator[Figure]]":
    """The whole picture, None where nothing can be drawn, and each of its panels alone. ``runs`` are by label."""
    drawn = [(panel, lines) for panel in PANELS if (lines := _lines_of(panel, runs))]
    if not drawn:
        return None, iter(())
    whole, all_axes = new_figure(len(drawn), TITLE)
    for axes, (panel, lines) in zip(all_axes, drawn, strict=True):
        draw_lines(axes, panel, lines, config)

    def alone() -> "Iterator[Figure]":
        for panel, lines in drawn:
            figure, (axes,) = new_figure(1, "", size=ALONE)
            draw_lines(axes, panel, lines, config)
            yield figure

    return whole, alone()


def _lines_of(panel: Lines, runs: Mapping[str, Recorded]) -> list[tuple[str, Series]]:
    """(label of the run, its series) of the panel's metric; none where there is nothing but rounding."""
    (metric,) = panel.metrics
    lines = [(label, series) for label, recorded in runs.items() if len(series := recorded.get(metric))]
    is_rounding = all(abs(value) < panel.noise for _, series in lines for value in series.values)
    return [] if is_rounding else lines


def labels_of(configs: Sequence[tuple[str, RunConfig]]) -> list[str]:
    """A label for each (folder's name, config): the name of its config where these differ, else its folder's."""
    names = [config.name for _, config in configs]
    return names if len(set(names)) == len(names) else [folder for folder, _ in configs]


def differing_settings(configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """(field, its value in each run, "-" where a run has no such field) of the fields in which the runs differ."""
    settings = [flatten(config.model_dump(mode="json")) for config in configs]
    fields = dict.fromkeys(field for values in settings for field in values if field not in OF_A_FOLDER)
    rows = [(field, [values.get(field, "-") for values in settings]) for field in fields]
    return [(field, values) for field, values in rows if len(set(values)) > 1]
