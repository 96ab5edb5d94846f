"""``tandem replay``: the effect of other corrections on a recorded step, as a table and, with --plot, as a
figure."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.loader import parse_config
from configs.presets import PRESETS
from configs.reading.files import text_of
from configs.reading.torn_overrides import OVERRIDE
from configs.schema import RunConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.layout import ONE_PROCESS
from launch.processes.run_folder import RunFolder, write_json
from parallel.checkpoints.files import valid_checkpoints
from trainer.batch.files import batch_file, recorded_steps
from trainer.file_system import read_required
from trainer.metric_names import known

if TYPE_CHECKING:
    from trainer.studies.replay import Replayed

AS_TRAINED, UNCORRECTED = "as trained", "disabled"
COLUMNS = (
    # title, key, format
    ("weight", "weight_mean", "{:.3f}"),
    ("max", "weight_max", "{:.3g}"),
    ("ESS", "ess", "{:.3f}"),
    ("bounded", "ess_bounded", "{:.3f}"),
    ("tokens kept", "tokens_kept", "{:.1%}"),
    ("sequences", "sequences_kept", "{:.1%}"),
    ("loss", "loss", "{:.4g}"),
    ("|gradient|", "gradient_norm", "{:.3g}"),
    ("cosine", "cosine", "{:.4f}"),
)
"""``ESS`` is of the ratios, ``bounded`` of the weights. The cosine is between the gradient and the one without
correction."""
GAP_BY_LAG = (
    ("tokens", "tokens", "{:.0f}"),
    ("mean |dp|", "abs_prob_mean", "{:.2e}"),
    ("max |dp|", "abs_prob_max", "{:.3f}"),
    ("k3", "k3", "{:.2e}"),
    ("ESS", "ess", "{:.3f}"),
)
"""The gap between the policies by the age of the tokens. No correction changes it."""
RECORDED = ("learner.old_logprobs=when_needed", "learner.routing=own")
"""Overrides for reading a correction. ``old`` is recorded with its experts, so no correction may contradict how the run
computed it."""
OF_LAG = re.compile(r"staleness/by_lag/(\w+)/(\w+)")


def corrections_named(folder: RunFolder, names: Sequence[str]) -> dict[str, CorrectionConfig]:
    """The correction of each name. A name is a preset's, a block of keys or ``key=value``, read like an override of the
    run's ``correction``. Without names: all presets. ``disabled`` is always there, for the comparison.

    Raises ConfigError for a name that is not a correction.
    """
    run = parse_config(folder.config, RECORDED)

    def read(name: str) -> CorrectionConfig:
        override = f"correction.{name}" if OVERRIDE.fullmatch(name) else f"correction={name}"
        return run.with_overrides([override], where="--correction").validated().correction

    return {name: read(name) for name in dict.fromkeys([UNCORRECTED, *(names or PRESETS)])}


def result_file(folder: RunFolder, step: int) -> Path:
    return folder.path / "replay" / f"step_{step:06d}.json"


def request_file(folder: RunFolder) -> Path:
    return folder.path / "replay" / "request.json"


def write_request(folder: RunFolder, step: int, names: Sequence[str]) -> None:
    write_json(request_file(folder), {"step": step, "corrections": list(names)})


def answer_request(folder: RunFolder, config: RunConfig) -> None:
    """The replay-rank role: replays the recorded step of the request file with gradients of the parameters, in one process
    whatever the run's layout."""
    request = read_required(request_file(folder))
    corrections = corrections_named(folder, request["corrections"])
    write_results(folder, config, request["step"], corrections, with_gradients=True)


def write_results(
    folder: RunFolder,
    config: RunConfig,
    step: int,
    corrections: Mapping[str, CorrectionConfig],
    *,
    with_gradients: bool,
) -> None:
    """Replay in this process and write ``result_file``: the step's own correction first, then
    ``corrections``.

    with_gradients: take those of the parameters, in an initialised process group of one.
    """
    from trainer.recording import read_batch
    from trainer.studies.replay import of_logprobs, of_parameters, replay

    recorded = read_batch(batch_file(folder.batches, step))
    gradient = of_logprobs
    if with_gradients:
        gradient = of_parameters(_engine_before(folder, config, step), temperature=config.rollout.temperature)
    corrections = {AS_TRAINED: recorded.correction, **corrections}
    base = replay(recorded, config, UNCORRECTED, corrections[UNCORRECTED], gradient)
    rows = []
    for name, correction in corrections.items():  # one at a time: a gradient is as large as the model
        replayed = base if name == UNCORRECTED else replay(recorded, config, name, correction, gradient)
        rows.append(_row(replayed, base))
    gradient_of = "parameters" if with_gradients else "log-probs"
    result = {"step": step, "gradient_of": gradient_of, "rows": rows, "by_lag": _by_lag(base)}
    write_json(result_file(folder, step), result)


def _row(one: "Replayed", base: "Replayed") -> dict[str, Any]:
    return {
        "correction": one.name,
        "weight_mean": one.metrics.get(known("mismatch/weight_mean")),
        "weight_max": one.metrics.get(known("mismatch/weight_max")),
        "ess": one.metrics.get(known("mismatch/ess")),
        "ess_bounded": one.metrics.get(known("mismatch/ess_bounded")),
        "tokens_kept": one.metrics.get(known("mismatch/kept_fraction")),
        "sequences_kept": 1 - one.metrics.get(known("mismatch/rejected/total/sequences"), 0.0),
        "loss": one.loss,
        "gradient_norm": one.gradient_norm,
        "cosine": one.cosine(base),
        "by_lag": _by_lag(one),
    }


def _by_lag(one: "Replayed") -> dict[str, dict[str, float]]:
    """{bucket of lags: {metric: value}}, the freshest first; empty for a batch whose tokens have no lags."""
    buckets: dict[str, dict[str, float]] = {}
    for name, value in one.metrics.items():
        if match := OF_LAG.fullmatch(name):
            buckets.setdefault(match[1], {})[match[2]] = value
    return buckets


def starting_weights(folder: RunFolder, step: int) -> Path | None:
    """The checkpoint that a step started from; None for step 1, which starts from the run's model.

    Raises ValueError if it was not kept.
    """
    if step == 1:
        return None
    kept = valid_checkpoints(folder.checkpoints)
    if step - 1 not in kept:
        possible = [s for s in recorded_steps(folder.batches) if s == 1 or s - 1 in kept]
        error = f"--gradients needs the weights that step {step} started from, but the checkpoint of step {step - 1} was not kept"
        fix = f"recorded steps that have such a checkpoint: {possible or 'none'}"
        raise ValueError(f"{error}; {fix} (see checkpoint.every, checkpoint.keep and record_batches)")
    return kept[step - 1]


def _engine_before(folder: RunFolder, config: RunConfig, step: int):
    from trainer.learner import Learner

    # Ref log-probs are recorded, and a replay leaves out a critic's loss.
    engine = Learner.of_policy_alone(config.model_copy(update={"layout": ONE_PROCESS})).engine
    checkpoint = starting_weights(folder, step)
    if checkpoint is not None:
        engine.load(checkpoint)
    return engine


def table(result: Mapping[str, Any]) -> str:
    rows = [["correction", *(title for title, _, _ in COLUMNS)]]
    for row in result["rows"]:
        cells = ("-" if row[key] is None else show.format(row[key]) for _, key, show in COLUMNS)
        rows.append([row["correction"], *cells])
    return _in_columns(rows, 13)


def _in_columns(rows: Sequence[Sequence[str]], width: int) -> str:
    """The first column is as wide as its widest cell, the others are ``width``."""
    first = max(len(row[0]) for row in rows)
    lines = (title.ljust(first) + "".join(cell.rjust(width) for cell in row) for title, *row in rows)
    return "\n".join(lines)


def lag_table(result: Mapping[str, Any]) -> str:
    """The gap by the age of the tokens, and below it the mean weight and the kept share that each correction gives
    them; empty for a step without lags."""
    lags: Mapping[str, Mapping[str, float]] = result.get("by_lag", {})
    if not lags:
        return ""
    rows = [["lag", *(label.replace("le_", "up to ").replace("over_", "over ") for label in lags)]]
    rows += [[title, *(show.format(of[key]) for of in lags.values())] for title, key, show in GAP_BY_LAG]
    for row in result["rows"]:
        cells = (f"{of['weight_mean']:.3f} ({of['kept_fraction']:.1%})" for of in row["by_lag"].values())
        rows.append([row["correction"], *cells])
    return _in_columns(rows, 20)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """ESS, kept tokens, gradient norm and cosine of each correction, as bars."""
    from matplotlib.figure import Figure

    rows = result["rows"][::-1]
    names = [row["correction"] for row in rows]
    figure = Figure(figsize=(13, 1.6 + 0.24 * len(rows)), layout="constrained")
    panels = (
        ("ESS of the bounded weights", "ess_bounded"),
        ("tokens kept", "tokens_kept"),
        (f"gradient norm ({result['gradient_of']})", "gradient_norm"),
        ("cosine to the uncorrected gradient", "cosine"),
    )
    all_axes = figure.subplots(1, len(panels), sharey=True)
    all_axes[0].margins(y=0.01)
    for axes, (title, key) in zip(all_axes, panels, strict=True):
        axes.barh(names, [row[key] or 0.0 for row in rows], color="#3b6ea5")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"Step {result['step']} under other corrections", fontsize=11)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def read_result(folder: RunFolder, step: int) -> dict[str, Any]:
    return json.loads(text_of(result_file(folder, step)))
