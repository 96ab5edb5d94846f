"""The whole path on one machine: tiny model -> warm start -> RL -> evaluation -> Hugging Face export ->
report."""

import json
import time
from datetime import datetime
from pathlib import Path

from launch.commands.train import sft, train
from launch.processes.run_folder import write_json
from trainer.tracking.tracker import duration

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "recipes"
MODEL_S, WARM_START_S, RL_START_S, RL_STEP_S = 10.0, 160.0, 70.0, 1.1
"""Seconds of the parts on two idle cores (benchmarks/results/quickstart.md)."""


def run_quickstart(*, seed: int, steps: int, install_seconds: float) -> None:
    """Writes runs into ``runs/``, and the models in between into ``runs/quickstart-DATE-TIME``."""
    from rollout.tiny_model import make_tiny_countdown_model

    seconds = {"install": install_seconds}
    rl_s = RL_START_S + steps * RL_STEP_S
    total = duration(MODEL_S + WARM_START_S + rl_s)
    print(f"three parts, about {total} on two idle cores; times left below are of a part", flush=True)
    models = Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    initial, warm = models / "random", models / "warm"
    _announce(1, "a tiny Qwen3 model with a character tokenizer, random weights")
    make_tiny_countdown_model(initial, seed=seed)

    text = "warm start: supervised training on generated Countdown solutions, 40 % wrong on purpose"
    _announce(2, f"{text}; about {duration(WARM_START_S)}")
    began = time.perf_counter()
    sft(CONFIGS / "countdown_tiny_sft.yaml", [f"model.path={initial}", f"output={warm}", f"seed={seed}"])
    seconds["warm_start"] = time.perf_counter() - began

    left = duration(rl_s * seconds["warm_start"] / WARM_START_S)  # corrected by the pace of the warm start
    text = f"RL: {steps} GRPO steps, SGLang samples, Megatron-Core learns; held-out accuracy before and after"
    _announce(3, f"{text}; about {left}")
    began = time.perf_counter()
    folder = train(CONFIGS / "countdown_tiny.yaml", [f"model.path={warm}", f"seed={seed}", f"steps={steps}"])
    seconds["rl_run"] = time.perf_counter() - began

    assert folder is not None  # only a dry run gives None
    summary = json.loads(folder.summary.read_text())
    summary["seconds"] |= {part: round(value, 2) for part, value in seconds.items()}
    write_json(folder.summary, summary)


def _announce(part: int, text: str) -> None:
    print(f"\n[{part}/3] {text}", flush=True)
