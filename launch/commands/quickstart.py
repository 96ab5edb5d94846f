"""The whole path on one machine: tiny model -> warm start -> RL -> evaluation -> Hugging Face export ->
report."""

import json
import time
from datetime import datetime
from pathlib import Path

from launch.commands import train as training
from launch.processes import run_folder
from trainer.tracking.tracker import duration

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "recipes"


MODEL_S, WARM_START_S, RL_START_S, RL_STEP_S = 10.0, 160.0, 70.0, 1.1
"""Seconds of its parts on two idle cores (benchmarks/results/quickstart.md)."""


def run_quickstart(*, seed: int, steps: int, install_seconds: float) -> None:
    """Everything lands in ``runs/``; the models on the way there in a ``runs/quickstart-DATE-TIME`` of their
    own."""
    from rollout.tiny_model import make_tiny_countdown_model

    seconds = {"install": install_seconds}
    rl_s = RL_START_S + steps * RL_STEP_S
    print(
        f"three parts, about {duration(MODEL_S + WARM_START_S + rl_s)} on two idle cores; times left below are of a part",
        flush=True,
    )
    models = Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    initial, warm = models / "random", models / "warm"
    _say(1, "a tiny Qwen3 model with a character tokenizer, random weights")
    make_tiny_countdown_model(initial, seed=seed)

    _say(
        2,
        f"warm start: supervised training on generated Countdown solutions, 40 % wrong on purpose; about {duration(WARM_START_S)}",
    )
    began = time.perf_counter()
    training.sft(
        CONFIGS / "countdown_tiny_sft.yaml", [f"model.path={initial}", f"output={warm}", f"seed={seed}"]
    )
    seconds["warm_start"] = time.perf_counter() - began

    left = duration(
        rl_s * seconds["warm_start"] / WARM_START_S
    )  # as much slower or faster than the measured ones as the warm start was
    _say(
        3,
        f"RL: {steps} GRPO steps, SGLang samples, Megatron-Core learns; held-out accuracy before and after; about {left}",
    )
    began = time.perf_counter()
    folder = training.train(
        CONFIGS / "countdown_tiny.yaml", [f"model.path={warm}", f"seed={seed}", f"steps={steps}"]
    )
    seconds["rl_run"] = time.perf_counter() - began

    assert folder is not None  # as no dry run gives none
    summary = json.loads(folder.summary.read_text())
    summary["seconds"] |= {part: round(value, 2) for part, value in seconds.items()}
    run_folder.write_json(folder.summary, summary)


def _say(part: int, text: str) -> None:
    print(f"\n[{part}/3] {text}", flush=True)
