"""Truncated importance sampling under quantised rollouts: which corrections hold if the rollout's weights are rounded?

A grid of ``tandem train`` runs of the quickstart's model: ``rollout.precision`` x correction x seed, with several
minibatches a step, so that the runs are off-policy. Weights are rounded before they are sent (weight-only); both
engines compute in float32, so nothing else comes between them. Accuracy is of the learner's own weights, not of the
rounded ones that the servers hold (``own_policy.py``). Source of the question: Yao et al. 2025, Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training.

    python benchmarks/studies/quantised_rollout.py --model runs/quickstart-*/warm --folder quantised [--jobs 2]
    python benchmarks/studies/quantised_rollout.py --gap --model runs/latest/hf --folder gap

``--gap``: no training. The gap that each precision makes on a model: a few steps at a learning rate of almost zero.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import figure
from benchmarks.studies.grid import Cell, Curve, Grid, draw, grid_of, last, options, over_run, table
from benchmarks.studies.own_policy import own_accuracy
from configs.schema.rollout import Precision

PRECISIONS = ("int2", "bf16", "int4", "int8")
"""int2 is what moves a tiny model's probabilities as far as INT8 kernels move those of the source (max |dp| near 1)."""
ORDER = ("bf16", "int8", "int4", "int2")
BEFORE = 15.4
"""Accuracy of the warm model, %."""
CORRECTIONS = {
    "none": "disabled",
    "tis": "tis",
    "ppo_is": "ppo_is",
    "vanilla_is": "vanilla_is",
    "token_icepop": "decoupled_token_icepop",
    "geo_rs_token_is": "decoupled_geo_rs_token_is",
    "seq_is": "decoupled_seq_is",
    "pg_is": "pg_is",
}
"""Preset of each correction."""
GAP_STEPS, GAP_PROMPTS, NO_LEARNING = 4, 64, 1e-12
FEW_HELDOUT = "evaluation.max_prompts=50"
"""The servers' accuracy is not the learner's, which ``own_accuracy`` measures."""
COLORS = ("#222222", "#1f77b4", "#e69f00", "#d62728")
MINIBATCHES = 4


COLUMNS = {
    "reward": last("reward/mean"),
    "reward, weighted": last("reward/importance_weighted"),
    "entropy": last("policy/entropy"),
    "length": last("response/length_mean"),
    "k1 KL(old, current)": last("policy/ppo_kl"),
    "negative": last("policy/ppo_kl_negative_fraction"),
    "mean |dp|": last("mismatch/abs_prob_mean"),
    "max |dp|": last("mismatch/abs_prob_max"),
    "k3": last("mismatch/k3"),
    "ESS": last("mismatch/ess"),
    "kept": last("mismatch/kept_fraction"),
    "gradient": last("optim/grad_norm"),
    "worst reward": over_run("reward/mean", min),
}


FIGURE = {
    "mean reward": "reward/mean",
    "reward, weighted": "reward/importance_weighted",
    "entropy": "policy/entropy",
    "tokens per response": "response/length_mean",
    "k1 KL(old, current)": "policy/ppo_kl",
    "mean |Δp|": "mismatch/abs_prob_mean",
    "max |Δp|": "mismatch/abs_prob_max",
    "ESS": "mismatch/ess",
    "gradient norm": "optim/grad_norm",
}
"""Metric of each row of panels, by the text of its axis."""


def name_of(precision: str, correction: str, seed: int) -> str:
    return f"{precision}-{correction}-{seed}"


def cells(given) -> Iterator[Cell]:
    for precision in given.precisions:
        for seed in given.seeds:
            for correction in given.corrections:
                preset = CORRECTIONS[correction]
                settings = (f"seed={seed}", f"correction={preset}", f"rollout.precision={precision}")
                yield Cell(name_of(precision, correction, seed), settings)


GAP_COLUMNS = {
    "mean |dp|": last("mismatch/abs_prob_mean"),
    "max |dp|": last("mismatch/abs_prob_max"),
    "greatest gap, nats": last("mismatch/logprob_gap_max"),
    "k1": last("mismatch/k1"),
    "k3": last("mismatch/k3"),
    "ESS of tokens": last("mismatch/ess"),
    "chi2 of responses": last("mismatch/chi2_sequence"),
    "responses with |dp| > 0.5": last("mismatch/response_abs_prob_over"),
}


def measure_gaps(given) -> None:
    """The table of ``--gap``."""
    given.lr, given.steps = NO_LEARNING, GAP_STEPS
    grid = grid_of(given, f"rollout.prompts_per_step={GAP_PROMPTS}", "correction=disabled")
    served = {
        "as they are": (),
        **{precision: (f"rollout.precision={precision}",) for precision in get_args(Precision)},
    }
    cells = [
        Cell(f"{name.replace(' ', '-')}-{seed}", (f"seed={seed}", *settings))
        for name, settings in served.items()
        for seed in given.seeds
    ]
    grid.run_missing(cells, given.jobs)
    groups = [([name], [f"{name.replace(' ', '-')}-{seed}" for seed in given.seeds]) for name in served]
    print(table(grid, groups, ["weights"], GAP_COLUMNS))


def own(grid: Grid, name: str) -> float:
    return own_accuracy(grid.run_folder(name))


def main() -> None:
    made = options(__doc__.splitlines()[0], lr=2e-4, steps=40)
    made.add_argument("--minibatches", type=int, default=MINIBATCHES)
    made.add_argument(
        "--gap", action="store_true", help="measure what each precision does to a model, without training"
    )
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    made.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    made.add_argument("--finished", action="store_true", help="show only the finished cells; train nothing")
    given = made.parse_args()
    if given.gap and (
        given.finished or given.precisions != PRECISIONS or given.corrections != list(CORRECTIONS)
    ):
        made.error(
            "--gap measures every precision without a correction; leave --finished, --precisions, --corrections out"
        )
    if given.gap:
        measure_gaps(given)
        return
    grid, seeds = grid_of(given, f"learner.minibatches={given.minibatches}", FEW_HELDOUT), given.seeds
    if given.finished:
        grid.check_settings([*cells(given)])
    else:
        grid.run_missing([*cells(given)], given.jobs)
    order = [precision for precision in ORDER if precision in given.precisions]
    groups = [
        ([precision, correction], [name_of(precision, correction, seed) for seed in seeds])
        for precision in order
        for correction in given.corrections
    ]
    print(table(grid, groups, ["weights", "correction"], COLUMNS, own))

    def curve(label: str, color: str, precision: str, correction: str) -> Curve:
        return Curve(label, color, [name_of(precision, correction, seed) for seed in seeds])

    by_correction = {
        correction: [
            curve(precision, color, precision, correction)
            for precision, color in zip(ORDER, COLORS, strict=True)
            if precision in order
        ]
        for correction in given.corrections
    }
    draw(grid, by_correction, FIGURE, grid.folder / "quantised_rollout.png")
    draw_accuracies(grid, given, order, grid.folder / "quantised_rollout_accuracy.png")


def draw_accuracies(grid: Grid, given, order: Sequence[str], path: Path, *, before: float = BEFORE) -> None:
    """A group of bars per precision, a bar per correction, a point per run; a line at the accuracy ``before``, %."""
    with figure(path, dpi=110, figsize=(9.5, 3.6)) as axes:
        width = 0.9 / len(given.corrections)
        for number, correction in enumerate(given.corrections):
            label: str | None = correction
            for place, precision in enumerate(order):
                names = [name_of(precision, correction, seed) for seed in given.seeds]
                right = [100 * own(grid, name) for name in names if grid.rows(name) is not None]
                if right:
                    x = place + (number - (len(given.corrections) - 1) / 2) * width
                    axes.bar(x, statistics.fmean(right), width, color=f"C{number}", label=label)
                    label = None
                    axes.plot([x] * len(right), right, ".", color="black", markersize=4)
        axes.axhline(before, color="#555555", linestyle="--", linewidth=1)
        axes.set_xlim(-0.6, len(order) - 0.1)  # room for a word behind the last bar
        axes.text(len(order) - 0.5, before + 0.3, "before", fontsize=8, color="#555555")
        axes.set_xticks(range(len(order)), [f"rollout in {precision}" for precision in order])
        axes.set_ylabel("held-out accuracy of the learner, %")
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
