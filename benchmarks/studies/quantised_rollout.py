"""Truncated importance sampling under quantised rollouts: which corrections hold where the rollout's weights are rounded?

A grid of ``tandem train`` runs of the quickstart's model: ``rollout.precision`` x correction x seed, with several
minibatches a step, so that the runs are off-policy. Weights are rounded before they are sent (weight-only); both
engines compute in float32, so nothing else comes between them. Accuracy is of the learner's own weights, not of the
rounded ones that the servers hold (``own_policy.py``). Source of the question: Yao et al. 2025, Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training.

    python benchmarks/studies/quantised_rollout.py --model runs/quickstart-*/warm --folder quantised [--jobs 2]
    python benchmarks/studies/quantised_rollout.py --gap --model runs/latest/hf --folder gap

``--gap``: no training. The gap that each precision makes on a model: a few steps at a learning rate of nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import Cell, Column, Curve, Grid, Rows, draw, grid_of, last, options, table
from benchmarks.studies.own_policy import own_accuracy
from configs.schema.rollout import Precision

PRECISIONS = ("int2", "int4", "bf16", "int8")
"""int2 is what moves a tiny model's probabilities as far as INT8 kernels move those of the source (max |dp| near 1)."""
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
"""The servers' accuracy is of another policy than the learner's; ``own_accuracy`` measures that."""
COLORS = ("#d62728", "#e69f00", "#222222", "#1f77b4")
SUMMARY = {"none": "#d62728", "vanilla_is": "#e69f00", "ppo_is": "#9467bd", "tis": "#0072b2"}
"""Colour of each correction of the small figure: those that the source compares."""
MINIBATCHES = 4


def least(metric: str) -> Column:
    """The least value of a metric over the run."""

    def value(rows: Rows) -> float | None:
        return min((row[metric] for row in rows if row.get(metric) is not None), default=None)

    return value


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
    "worst reward": least("reward/mean"),
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


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    for precision in PRECISIONS:
        for seed in seeds:
            for correction, preset in CORRECTIONS.items():
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
    given = made.parse_args()
    if given.gap:
        measure_gaps(given)
        return
    grid, seeds = grid_of(given, f"learner.minibatches={given.minibatches}", FEW_HELDOUT), given.seeds
    grid.run_missing([*cells(seeds)], given.jobs)
    groups = [
        ([precision, correction], [name_of(precision, correction, seed) for seed in seeds])
        for precision in PRECISIONS
        for correction in CORRECTIONS
    ]
    print(table(grid, groups, ["weights", "correction"], COLUMNS, own))

    def curve(label: str, color: str, precision: str, correction: str) -> Curve:
        return Curve(label, color, [name_of(precision, correction, seed) for seed in seeds])

    by_correction = {
        correction: [
            curve(precision, color, precision, correction)
            for precision, color in zip(PRECISIONS, COLORS, strict=True)
        ]
        for correction in CORRECTIONS
    }
    draw(grid, by_correction, FIGURE, grid.folder / "quantised_rollout.png")
    by_precision = {
        f"rollout in {precision}": [curve(label, color, precision, label) for label, color in SUMMARY.items()]
        for precision in PRECISIONS
    }
    metrics = {"mean reward": "reward/mean"}
    draw(grid, by_precision, metrics, grid.folder / "quantised_rollout_summary.png", size=(3.6, 3.2))


if __name__ == "__main__":
    main()
