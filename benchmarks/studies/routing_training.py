"""Does routing replay change how a model with experts learns?

A grid of ``tandem train`` runs of a tiny Qwen3-MoE: ``learner.routing`` x seed, with several minibatches a step, so that
the router's weights move within a step. Both engines compute in bfloat16, so that they choose different experts now and
then (``routing_replay.py`` measures how often, without training).

    tandem make-tiny-model random --family qwen3_moe
    tandem sft configs/recipes/countdown_tiny_sft.yaml model.path=random output=warm
    python benchmarks/studies/routing_training.py --model warm --folder routing_training
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import Cell, Column, Curve, Rows, draw, grid_of, last, options, table

ROUTINGS = {"own": "#222222", "rollout": "#1f77b4", "old": "#d62728"}
"""With the color of its line."""
SETTINGS = ("model.dtype=bfloat16", "rollout.dtype=bfloat16", "learner.minibatches=4")


def greatest(metric: str) -> Column:
    """The greatest value of a metric over the run."""

    def value(rows: Rows) -> float | None:
        return max((row[metric] for row in rows if row.get(metric) is not None), default=None)

    return value


COLUMNS = {
    "reward": last("reward/mean"),
    "entropy": last("policy/entropy"),
    "gradient": last("optim/grad_norm"),
    "its greatest": greatest("optim/grad_norm"),
    "mean |dp|": last("mismatch/abs_prob_mean"),
    "max |dp|": last("mismatch/abs_prob_max"),
    "k3": last("mismatch/k3"),
    "ESS": last("mismatch/ess"),
    "experts differ": last("mismatch/experts_differ"),
    "max ratio": last("policy/ratio_max"),
    "clipped": last("policy/clip_fraction"),
    "k1 KL(old, current)": last("policy/ppo_kl"),
}
FIGURE = {
    "mean reward": "reward/mean",
    "max |dp|": "mismatch/abs_prob_max",
    "gradient norm": "optim/grad_norm",
}


def name_of(routing: str, seed: int) -> str:
    return f"{routing}-{seed}"


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    for seed in seeds:
        for routing in ROUTINGS:
            yield Cell(name_of(routing, seed), (f"seed={seed}", f"learner.routing={routing}"))


def main() -> None:
    given = options(__doc__.splitlines()[0], lr=2e-4, steps=40).parse_args()
    grid, seeds = grid_of(given, *SETTINGS), given.seeds
    grid.run_missing([*cells(seeds)], given.jobs)
    names = {routing: [name_of(routing, seed) for seed in seeds] for routing in ROUTINGS}
    print(table(grid, [([routing], runs) for routing, runs in names.items()], ["routing"], COLUMNS))
    curves = [Curve(routing, ROUTINGS[routing], runs) for routing, runs in names.items()]
    draw(grid, {"": curves}, FIGURE, grid.folder / "routing_training.png", size=(5.0, 2.2))


if __name__ == "__main__":
    main()
