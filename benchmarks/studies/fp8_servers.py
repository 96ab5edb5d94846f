"""Corrections if the servers compute in FP8: SGLang's own quantisation of weights and activations, on one GPU.

A grid of ``tandem train`` runs of the quickstart's model: servers in bfloat16 or in FP8 (``rollout.quantization: fp8``) x
correction x seed, with several minibatches a step. Learner and servers share the GPU, and the learner computes in bfloat16.
Accuracy is of the learner's own weights (``own_policy.py``). ``quantised_rollout.py`` is the same study with only the weights
rounded, on any machine.

    python benchmarks/studies/fp8_servers.py --model runs/quickstart-*/warm --folder fp8 --jobs 14
    ... --set rollout.server_args.attention_backend=triton    # if SGLang's default attention is not installed
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import Cell, grid_of, options, table
from benchmarks.studies.quantised_rollout import (
    COLUMNS,
    CORRECTIONS,
    FEW_HELDOUT,
    MINIBATCHES,
    draw_accuracies,
    name_of,
    own,
)

SERVERS = {"bf16": "none", "fp8": "fp8"}
"""``rollout.quantization`` of each kind of servers."""
BEFORE = 15.9
"""Accuracy of the warm model, %."""
ON_ONE_GPU = ("launch.placement=colocated", "model.dtype=bfloat16", "rollout.dtype=bfloat16")


def cells(given) -> Iterator[Cell]:
    for seed in given.seeds:
        for correction in given.corrections:
            for servers in given.servers:
                settings = (
                    f"seed={seed}",
                    f"correction={CORRECTIONS[correction]}",
                    f"rollout.quantization={SERVERS[servers]}",
                )
                yield Cell(name_of(servers, correction, seed), settings)


def main() -> None:
    made = options(__doc__.splitlines()[0], lr=2e-4, steps=60)
    made.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    made.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    made.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run")
    given = made.parse_args()
    grid = grid_of(given, f"learner.minibatches={MINIBATCHES}", FEW_HELDOUT, *ON_ONE_GPU, *given.set)
    grid.run_missing([*cells(given)], given.jobs)
    groups = [
        ([servers, correction], [name_of(servers, correction, seed) for seed in given.seeds])
        for servers in given.servers
        for correction in given.corrections
    ]
    print(table(grid, groups, ["servers", "correction"], COLUMNS, own))
    draw_accuracies(grid, given, given.servers, grid.folder / "fp8_servers.png", before=BEFORE)


if __name__ == "__main__":
    main()
