"""Every recipe's learner at its full size, simulated, against the memory model. Target: peak memory within 5 % of the
estimate, on the first, a middle and the last pipeline stage.

    python benchmarks/simulated_recipes.py [--only qwen3] [--json FILE]
    python benchmarks/simulated_recipes.py --times              # estimated seconds of a step instead, without simulation

Nothing here is timed on a device: memory, FLOPs and bytes are counted (``parallel/simulation/``), and seconds are
estimated (``parallel/planning/time.py``). Of the models, only config.json is needed.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, table_head, table_row  # noqa: E402
from configs.loader import load_config  # noqa: E402
from configs.reading.hardware import read_hardware  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from configs.schema.layout import layout_text  # noqa: E402
from launch.commands.plan import PlanOptions, timing_of  # noqa: E402
from launch.commands.simulate import planned  # noqa: E402
from launch.studies.simulate import ranks_of_stages, simulate_ranks  # noqa: E402
from parallel.planning.architecture import architecture_of  # noqa: E402
from parallel.planning.memory import GIB, size_text  # noqa: E402
from parallel.planning.other_models import critic_architecture  # noqa: E402
from parallel.planning.server_memory import rollout_memory, static_share  # noqa: E402
from parallel.planning.time import Estimator, seconds_text  # noqa: E402

RECIPES = ROOT / "configs/recipes"
MODELS = ROOT / "tests/model_configs"
PARTS = ("grpo", "dapo", "fp8_rollout")
TARGET = 0.05
TITLES = (
    "recipe", "layout", "stage", "micro-batches", "peak", "in", "planned", "peak / planned", "update, TFLOP",
    "largest collectives of the update", "seconds",
)  # fmt: skip
GPUS = ("h100", "h200")
TIME_TITLES = (
    "recipe",
    "layout",
    "servers",
    "samples",
    "on",
    "s a step",
    "sampling",
    "score",
    "update",
    "rest",
    "transfer",
)


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
    options.add_argument("--times", action="store_true", help="estimate seconds of a step, simulate nothing")
    given = options.parse_args()
    announce(recipes=given.only or "all")
    if given.times:
        print_times([name for name in recipes() if given.only in name])
        return
    print(table_head(TITLES))
    rows, off = [], []
    for name in recipes():
        if given.only not in name:
            continue
        config = read_recipe(name)
        architecture = architecture_of(config.model.path)
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
            print(table_row(cells), flush=True)
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


def print_times(names: list[str]) -> None:
    """A row for each recipe and kind of GPU: the recipe's own layouts, and the lengths that ``tandem plan`` assumes by
    default."""
    print(table_head(TIME_TITLES))
    for name in names:
        config = read_recipe(name)
        architecture = architecture_of(config.model.path)
        for gpu in GPUS:
            hardware = read_hardware(gpu)
            options = PlanOptions(num_gpus=config.layout.world_size, gpu=gpu)
            timing = timing_of(config, architecture, options, hardware)
            assert timing is not None
            critic = critic_architecture(config, architecture)
            estimator = Estimator(architecture, config, timing.lengths, timing.machine, critic=critic)
            rollout = config.rollout
            memory = rollout_memory(
                architecture,
                rollout.tp,
                dtype=rollout.dtype,
                gpu_bytes=int(hardware.memory_gib * GIB),
                static_share=static_share(config),
                quantization=rollout.quantization,
                max_tokens=rollout.max_total_tokens,
            )
            step = estimator.step(config.layout, tp=rollout.tp, replicas=rollout.replicas, memory=memory)
            training = step.training
            update = training.compute + training.collectives + training.bubble
            parts = (
                step.sampling.total,
                training.score,
                update,
                training.optimizer + training.rest,
                step.transfer,
            )
            cells = (
                name, layout_text(config.layout), f"tp={rollout.tp} x {rollout.replicas}",
                f"{rollout.prompts_per_step} x {rollout.group_size} of {timing.lengths.response:,} (at most {rollout.max_new_tokens:,})",
                gpu, f"**{seconds_text(step.total)}**", *map(seconds_text, parts),
            )  # fmt: skip
            print(table_row(cells))


if __name__ == "__main__":
    main()
