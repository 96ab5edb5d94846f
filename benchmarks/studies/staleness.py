"""Does staleness hurt learning, and which correction helps?

A grid of ``tandem train`` runs of the quickstart's model: ``rollout.max_staleness`` k x correction x seed. The sample
role is as far ahead as k allows, and every update waits for unfinished responses (``rollout.drain_s``). From step
k + 1 on, every token of a run has a lag of exactly k, however fast the machine is. The learning rate is higher than
the quickstart's, so that a few updates change the policy visibly.

    python benchmarks/studies/staleness.py --model runs/quickstart-*/warm --folder staleness [--jobs 2]

At k = 0 every correction is the same to rounding, so it is run with one of them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import Cell, Curve, draw, grid_of, last, options, table

STALENESS = (0, 1, 2, 4)
CORRECTIONS = ("disabled", "decoupled_token_is", "decoupled_geo_rs_token_is", "decoupled_seq_is")
COLORS = ("#222222", "#1f77b4", "#2ca02c", "#d62728")
COLUMNS = {
    "reward": last("reward/mean"),
    "entropy": last("policy/entropy"),
    "gradient": last("optim/grad_norm"),
    "k3": last("mismatch/k3"),
    "max |dp|": last("mismatch/abs_prob_max"),
    "ESS": last("mismatch/ess"),
    "kept": last("mismatch/kept_fraction"),
    "lag": last("staleness/mean"),
}


def name_of(k: int, correction: str, seed: int) -> str:
    return f"k{k}-{correction if k else CORRECTIONS[0]}-{seed}"


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    for seed in seeds:
        for k in STALENESS:
            for correction in CORRECTIONS if k else CORRECTIONS[:1]:
                settings = [f"seed={seed}", f"correction={correction}", f"rollout.max_staleness={k}"]
                settings += ["rollout.drain_s=300"] if k else []
                yield Cell(name_of(k, correction, seed), tuple(settings))


def main() -> None:
    given = options(__doc__.splitlines()[0], lr=4e-4, steps=60).parse_args()
    grid, seeds = grid_of(given), given.seeds
    grid.run_missing([*cells(seeds)], given.jobs)
    groups = [
        ([str(k), correction if k else "any"], [name_of(k, correction, seed) for seed in seeds])
        for k in STALENESS
        for correction in (CORRECTIONS if k else CORRECTIONS[:1])
    ]
    print(table(grid, groups, ["k", "correction"], COLUMNS))
    panels = {
        correction: [
            Curve(f"k = {k}", color, [name_of(k, correction, seed) for seed in seeds])
            for k, color in zip(STALENESS, COLORS, strict=True)
        ]
        for correction in CORRECTIONS
    }
    draw(grid, panels, {"mean reward": "reward/mean"}, grid.folder / "staleness.png")


if __name__ == "__main__":
    main()
