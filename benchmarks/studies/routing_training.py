"""Does routing replay change how a model with experts learns?

A grid of ``tandem train`` runs of a tiny Qwen3-MoE: ``learner.routing`` x seed, with several minibatches a step, so that
the router's weights move within a step. Both engines compute in bfloat16, so they choose different experts now and then
(``routing_replay.py`` measures how often, without training).

    tandem make-tiny-model random --family qwen3_moe
    tandem sft configs/recipes/countdown_tiny_sft.yaml model.path=random output=warm
    python benchmarks/studies/routing_training.py --model warm --folder routing_training
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import Cell, Curve, draw, grid_of, last, options, over_run, table

ROUTINGS = {"own": "#222222", "rollout": "#1f77b4", "old": "#d62728"}
"""With the color of its line."""
SETTINGS = ("model.dtype=bfloat16", "rollout.dtype=bfloat16", "learner.minibatches=4")


COLUMNS = {
    "reward": last("reward/mean"),
    "entropy": last("policy/entropy"),
    "gradient, median": over_run("optim/grad_norm", median),
    "mean |dp|": over_run("mismatch/abs_prob_mean", fmean),
    "max |dp|, median": over_run("mismatch/abs_prob_max", median),
    "max |dp|, greatest": over_run("mismatch/abs_prob_max", max),
    "k3": over_run("mismatch/k3", fmean),
    "1 - least ESS": over_run("mismatch/ess", lambda values: 1 - min(values)),
    "experts differ": over_run("mismatch/experts_differ", fmean),
    "max ratio, median": over_run("policy/ratio_max", median),
    "clipped": over_run("policy/clip_fraction", fmean),
    "k1 KL(old, current)": over_run("policy/ppo_kl", fmean),
}
"""Reward and entropy are of the last steps, the others of all steps. A sampled <pad>, whose embedding is zero, makes a
gradient norm of up to 2e4 in one step: hence the median."""
FIGURE = {
    "mean reward": "reward/mean",
    "max |dp|": "mismatch/abs_prob_max",
    "mean |dp|": "mismatch/abs_prob_mean",
}


def name_of(routing: str, seed: int) -> str:
    return f"{routing}-{seed}"


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    for seed in seeds:
        for routing in ROUTINGS:
            yield Cell(name_of(routing, seed), (f"seed={seed}", f"learner.routing={routing}"))


def main() -> None:
    given = options(__doc__.splitlines()[0], lr=2e-4, steps=100).parse_args()
    grid, seeds = grid_of(given, *SETTINGS), given.seeds
    grid.run_missing([*cells(seeds)], given.jobs)
    names = {routing: [name_of(routing, seed) for seed in seeds] for routing in ROUTINGS}
    print(table(grid, [([routing], runs) for routing, runs in names.items()], ["routing"], COLUMNS))
    curves = [Curve(routing, ROUTINGS[routing], runs) for routing, runs in names.items()]
    draw(grid, {"": curves}, FIGURE, grid.folder / "routing_training.png", size=(5.0, 2.2))


if __name__ == "__main__":
    main()
