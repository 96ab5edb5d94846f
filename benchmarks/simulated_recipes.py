"""Every recipe's learner at its full size, simulated, against the memory model. Target: peak memory within 5 % of the
estimate, on the first, a middle and the last pipeline stage.

    python benchmarks/simulated_recipes.py [--only qwen3] [--json FILE]

Nothing here is timed on a device: memory, FLOPs and bytes are counted (``parallel/simulation/``). Of the models there is
config.json alone.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.loader import load_config  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from configs.schema.layout import layout_text  # noqa: E402
from launch.commands.simulate import planned  # noqa: E402
from launch.studies.simulate import ranks_of_stages, simulate_ranks  # noqa: E402
from parallel.planning.layout import read_architecture, read_hf_config  # noqa: E402
from parallel.planning.memory import size_text  # noqa: E402

RECIPES = ROOT / "configs/recipes"
MODELS = ROOT / "tests/model_configs"
PARTS = ("grpo", "dapo", "fp8_rollout")
TARGET = 0.05
TITLES = (
    "recipe", "layout", "stage", "micro-batches", "peak", "in", "planned", "peak / planned", "update, TFLOP",
    "largest collectives of the update", "seconds",
)  # fmt: skip


def recipes() -> list[str]:
    of_models = [f.stem for f in RECIPES.glob("*.yaml") if f.stem not in PARTS and "countdown" not in f.stem]
    nested = [
        f"{folder}/{f.stem}"
        for folder in ("long_responses", "studies")
        for f in (RECIPES / folder).glob("*.yaml")
    ]
    return sorted(of_models) + sorted(nested)


def read_recipe(name: str, *overrides: str) -> RunConfig:
    """The recipe with its model's config.json of the tests."""
    named = load_config(RECIPES / f"{name}.yaml", overrides).model.path.name
    config = load_config(RECIPES / f"{name}.yaml", [*overrides, f"model.path={MODELS / named}"])
    assert isinstance(config, RunConfig)
    return config


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="recipes whose name has this text")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    rows, off = [], []
    for name in recipes():
        if given.only not in name:
            continue
        config = read_recipe(name)
        architecture = read_architecture(read_hf_config(config.model.path))
        for rank in sorted(
            simulate_ranks(config, ranks_of_stages(config.layout)), key=lambda rank: rank.rank
        ):
            estimate = planned(config, architecture, rank)
            ratio = rank.peak / estimate.total
            update = rank.parts["update"]
            by_size = sorted(update.collectives, key=lambda c: -c.bytes)[:2]
            sent = ", ".join(f"{size_text(c.bytes)} {c.operation}" for c in by_size)
            cells = (
                name, layout_text(config.layout), rank.stage, f"{rank.step.microbatches} x {rank.step.tokens:,}", size_text(rank.peak),
                rank.fullest, size_text(estimate.total), f"**{ratio:.3f}**", f"{update.flops / 1e12:,.0f}", sent, f"{rank.seconds:.0f}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            rows.append(
                {"recipe": name, "planned": estimate.items() | {"total": estimate.total}, **asdict(rank)}
            )
            if abs(ratio - 1) > TARGET:
                off.append(f"{name}, stage {rank.stage}: {ratio:.3f}")
    print(
        f"\n{len(rows)} ranks; {len(off)} further than {TARGET:.0%} from the estimate{': ' if off else ''}{'; '.join(off)}"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
