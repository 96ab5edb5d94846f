"""The quickstart's RL in Tandem and in TRL's GRPOTrainer, in turn on one machine.

Both start from the quickstart's warm model and train on the same prompts in the same order, with the same
reward function, batch (``rollout.prompts_per_step`` x ``rollout.group_size``), response length, temperature,
learning rate, AdamW, clipping and loss: the clipped objective, averaged over the batch's tokens, advantages
divided by the group's standard deviation, no KL. Both compute in float32. TRL samples with transformers'
``generate``, its own default without vLLM; it runs in an environment of its own, which is made at the first
call (``--environment``), with the torch version that Tandem has.

A round is one run of each side, from the same seed; each round has another seed. Reported: seconds of a step
and of its parts, samples/s, held-out accuracy before and after. The first steps of a run are not counted.
The tenth percentile is shown beside the median: on a shared machine it has the steps that others disturbed least.
Two torch threads suffer most from other work, because each waits for the other at every operation.

    sampling    Tandem: from the learner's request to its groups, rewards included. TRL: ``_generate``.
    update      forward, backward, optimizer
    sync        Tandem: weights to the servers. TRL samples with the weights that it trains: 0.
    rest        everything else of a step: packing, metrics, logs; in TRL also rewards and advantages

Target: samples/s of Tandem at least 1.3 times those of TRL with two threads.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, parser, spread, write  # noqa: E402

TARGET = 1.3
WARM_UP = 5
"""Steps at the beginning of a run that are not counted."""
PARTS = ("sampling", "update", "sync", "rest")
REWARD_NEEDS = ("aiohttp", "numpy", "psutil", "pydantic", "pyzmq")
"""Packages that importing ``rollout.rewards`` needs."""


@dataclass(frozen=True, kw_only=True)
class TrlSide:
    """One way to run TRL: ``processes`` data-parallel ranks of ``threads`` torch threads each."""

    threads: int
    processes: int = 1


TRL_SIDES = {
    "TRL, 2 threads": TrlSide(threads=2),
    "TRL, 1 thread": TrlSide(threads=1),
    "TRL, 2 processes": TrlSide(threads=1, processes=2),
}
RIVAL = "TRL, 2 threads"
"""The side of the target."""
TANDEM = "Tandem"


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, default=ROOT / "configs/recipes/countdown_tiny.yaml")
    options.add_argument(
        "--model", type=Path, help="a warm-started model; made as the quickstart does if left out"
    )
    options.add_argument("--environment", type=Path, default=Path.home() / ".cache/tandem/trl", help="of TRL")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--trl", nargs="*", default=list(TRL_SIDES), choices=TRL_SIDES, help="ways to run TRL"
    )
    options.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'KEY=VALUE ...'",
        help="also run Tandem with these overrides; may be given several times",
    )
    given = options.parse_args()
    steps, rounds = (WARM_UP + 5, 1) if given.quick else (given.steps, given.rounds)
    python = trl_environment(given.environment)
    with tempfile.TemporaryDirectory() as scratch:
        model = (given.model or warm_model(Path(scratch))).resolve()
        about = announce(config=given.config, sides=[*given.trl, TANDEM, *given.variant], rounds=rounds)
        result = measure(given.config, model, python, given.trl, ["", *given.variant], steps, rounds)
    result = {**about, **result}
    report(result)
    write(result, given.json)


def trl_environment(folder: Path) -> Path:
    """The interpreter of an environment with the newest TRL, made if ``folder`` has none."""
    import torch

    python, stamp = folder / "bin" / "python", folder / f".complete-torch-{torch.__version__}"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # torch first: a later resolution would replace its CPU build.
        version = torch.__version__.partition("+")[0]
        subprocess.run([*pip, f"torch=={version}", *REWARD_NEEDS], check=True)
        subprocess.run([*pip, "trl"], check=True)
        stamp.touch()
    return python


def warm_model(scratch: Path) -> Path:
    """The quickstart's model of seed 0 after its warm start."""
    from launch.commands.quickstart import CONFIGS
    from launch.commands.train import sft
    from rollout.tiny_model import make_tiny_countdown_model

    initial, warm = scratch / "random", scratch / "warm"
    make_tiny_countdown_model(initial, seed=0)
    places = [f"model.path={initial}", f"output={warm}", f"launch.runs_dir={scratch}"]
    sft(CONFIGS / "countdown_tiny_sft.yaml", places)
    return warm


def measure(
    config_path: Path, model: Path, python: Path, trl: list[str], variants: list[str], steps: int, rounds: int
) -> dict:
    tandem = {f"{TANDEM}, {overrides}" if overrides else TANDEM: overrides.split() for overrides in variants}
    sides = [*trl, *tandem]
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for seed in range(rounds):
        # The order alternates, so a drift of the machine affects all sides.
        for side in sides[:: 1 if seed % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                if side in tandem:
                    one = run_tandem(config_path, model, tandem[side], steps, seed, Path(folder))
                else:
                    one = run_trl(config_path, model, python, TRL_SIDES[side], steps, seed, Path(folder))
            runs[side].append(one)
            step = statistics.median(one["seconds"]["step"])
            accuracy = f"{one['accuracy_before']:.3f} -> {one['accuracy_after']:.3f}"
            print(f"seed {seed}  {side:<28} step {step:.3f} s   accuracy {accuracy}", flush=True)
    first = next(iter(runs[side] for side in trl), [{}])[0]
    config = load(config_path, model, [])
    return {
        "config": {
            "samples per step": config.rollout.prompts_per_step * config.rollout.group_size,
            "steps": steps,
            "rounds": rounds,
            "learning rate": config.learner.optimizer.lr,
            "layout": config.layout.model_dump(),
            "replicas": config.rollout.replicas,
            "server_args": config.rollout.server_args,
        },
        "versions": first.get("versions", {}),
        "runs": runs,
    }


def load(config_path: Path, model: Path, overrides: list[str]):
    from configs.loader import load_config

    return load_config(config_path, [f"model.path={model}", *overrides])


def run_tandem(
    config_path: Path, model: Path, overrides: list[str], steps: int, seed: int, folder: Path
) -> dict:
    """One ``tandem train``: evaluation at both ends, no checkpoint."""
    fixed = [
        f"model.path={model}",
        f"launch.runs_dir={folder}",
        f"steps={steps}",
        f"seed={seed}",
        "evaluation.every=0",
        "checkpoint.every=0",
    ]
    command = [sys.executable, "-m", "launch", "train", str(config_path), *fixed, *overrides]
    call(command, os.environ | {"PYTHONPATH": str(ROOT)})
    run = (folder / "latest").resolve()
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    seconds: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    # The last step's time holds the evaluation.
    for before, row in list(itertools.pairwise(rows))[WARM_UP : steps - 1]:
        parts = {
            "sampling": row["time/sampling"],
            "update": row["time/update"] + row["time/logprobs"],
            "sync": row["time/sync"],
        }
        step = row["elapsed_s"] - before["elapsed_s"]
        for name, value in (parts | {"step": step, "rest": step - sum(parts.values())}).items():
            seconds[name].append(value)
    summary = json.loads((run / "summary.json").read_text())
    return {"seconds": seconds} | {name: summary[name] for name in ("accuracy_before", "accuracy_after")}


def run_trl(
    config_path: Path, model: Path, python: Path, side: TrlSide, steps: int, seed: int, folder: Path
) -> dict:
    """One run of ``benchmarks/trl_side.py`` in TRL's environment."""
    config = load(config_path, model, [f"seed={seed}"])
    task, result = folder / "task.json", folder / "result.json"
    task.write_text(json.dumps(trl_task(config, steps) | {"output": str(folder), "result": str(result)}))
    script = [str(ROOT / "benchmarks" / "trl_side.py"), str(task)]
    if side.processes > 1:
        script = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={side.processes}",
            *script,
        ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(side.threads))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    call([str(python), *script], os.environ | threads | offline | {"PYTHONPATH": str(ROOT)})
    return json.loads(result.read_text())


def trl_task(config, steps: int) -> dict:
    """Prompts in Tandem's order, and the settings of the recipe."""
    from rollout.sampling.order import epoch_order
    from rollout.tasks import load_task
    from rollout.tokenization import load_tokenizer

    task = load_task(config.task, tokenizer=load_tokenizer(config.model.path))
    order = epoch_order(len(task.train), seed=config.seed, epoch=0)[: steps * config.rollout.prompts_per_step]
    optimizer, rollout = config.learner.optimizer, config.rollout
    return {
        "model": str(config.model.path),
        "train": [[task.train[i].text, task.train[i].reference] for i in order],
        "heldout": [[problem.text, problem.reference] for problem in task.heldout],
        "samples_per_prompt": config.evaluation.samples_per_prompt,
        "steps": steps,
        "warm_up": WARM_UP,
        "seed": config.seed,
        "prompts_per_step": rollout.prompts_per_step,
        "group_size": rollout.group_size,
        "max_new_tokens": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "clip_low": config.objective.clip_low,
        "clip_high": config.objective.clip_high,
    }


def call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def report(result: dict) -> None:
    print(json.dumps({name: result[name] for name in ("config", "versions")}, indent=2))
    samples = result["config"]["samples per step"]
    medians, quiet = {}, {}
    for side, runs in result["runs"].items():
        steps = [seconds for run in runs for seconds in run["seconds"]["step"]]
        of_runs = spread([statistics.median(run["seconds"]["step"]) for run in runs])
        medians[side], quiet[side] = statistics.median(steps), statistics.quantiles(steps, n=10)[0]
        parts = "   ".join(
            f"{part} {statistics.median([s for run in runs for s in run['seconds'][part]]):.3f}"
            for part in PARTS
        )
        after = [run["accuracy_after"] for run in runs]
        print(
            f"{side:<28} step {medians[side]:.3f} s (medians of runs {of_runs['min']:.3f} - {of_runs['max']:.3f}; "
            f"tenth percentile {quiet[side]:.3f})   "
            f"{samples / medians[side]:.0f} samples/s   {parts}   "
            f"accuracy {runs[0]['accuracy_before']:.3f} -> {statistics.mean(after):.3f} ({min(after):.3f} - {max(after):.3f})"
        )
    if RIVAL in medians:
        for side in medians:
            if side.startswith(TANDEM):
                ratio, undisturbed = (values[RIVAL] / values[side] for values in (medians, quiet))
                print(
                    f"samples/s, {side} / {RIVAL}: {ratio:.2f}   by tenth percentiles {undisturbed:.2f}   target: {TARGET}"
                )


if __name__ == "__main__":
    main()
