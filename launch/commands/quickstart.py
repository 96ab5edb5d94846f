"""The whole path on one machine: tiny model -> warm start -> RL -> evaluation -> Hugging Face export ->
report. With ``--study`` also what Tandem is for: a quantised rollout, uncorrected and corrected."""

import time
from datetime import datetime
from pathlib import Path

from launch.checks.devices import ON_GPUS, gpus_here
from launch.commands.results import compare
from launch.commands.train import evaluate, sft, train
from launch.processes import run_folder
from launch.processes.run_folder import RunFolder, write_json
from trainer.file_system import read_required
from trainer.tracking.console import duration

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "recipes"
MODEL_S, WARM_START_S, RL_START_S, RL_STEP_S = 10.0, 160.0, 70.0, 1.1
"""Seconds of the parts on two idle cores (benchmarks/results/quickstart.md)."""
STUDY_STEPS, STUDY_STEP_S, EVALUATION_S = 40, 1.0, 30.0
STUDY = (
    "rollout.precision=int2", "learner.minibatches=4", "learner.optimizer.lr=2e-4", "rollout.prompts_per_step=16",
    "layout.dp=1", f"steps={STUDY_STEPS}", f"evaluation.every={STUDY_STEPS}", "evaluation.max_prompts=50",
    "checkpoint.every=0",
)  # fmt: skip
"""Settings of both runs of ``--study``, as in benchmarks/results/quantised_rollout.md."""
STUDY_CORRECTIONS = {"clipped-against-rollout": "ppo_is", "corrected": "decoupled_seq_is"}
"""The first takes the servers' log-probs for those of the old policy. A run without any correction would show nothing: it
differs from a corrected run no more than two runs of one setting do."""


def settings_of_machine() -> list[str]:
    """Settings of these runs. Each learner rank takes a GPU of its own."""
    gpus = gpus_here()
    alone = ["layout.dp=1"] if gpus == 1 else []
    return [*ON_GPUS, *alone] if gpus else []


def run_quickstart(*, seed: int, steps: int, install_seconds: float, study: bool) -> None:
    """Writes runs into ``runs/``, and the models in between into ``runs/quickstart-DATE-TIME``."""
    from rollout.tiny_model import make_tiny_countdown_model

    seconds = {"install": install_seconds}
    rl_s, of_a_study = RL_START_S + steps * RL_STEP_S, RL_START_S + STUDY_STEPS * STUDY_STEP_S + EVALUATION_S
    study_s = len(STUDY_CORRECTIONS) * of_a_study if study else 0.0
    total, parts = duration(MODEL_S + WARM_START_S + rl_s + study_s), 4 if study else 3
    print(f"{parts} parts, about {total} on two idle cores; times left below are of a part", flush=True)
    models = Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    initial, warm = models / "random", models / "warm"
    _announce(1, parts, "a tiny Qwen3 model with a character tokenizer, random weights", MODEL_S)
    make_tiny_countdown_model(initial, seed=seed)

    text = "warm start: supervised training on generated Countdown solutions, 40 % wrong on purpose"
    _announce(2, parts, text, WARM_START_S)
    began = time.perf_counter()
    here = settings_of_machine()
    layout = [setting for setting in here if setting.startswith("layout.")]
    settings = [f"model.path={initial}", f"output={warm}", f"seed={seed}", *layout]
    sft(CONFIGS / "countdown_tiny_sft.yaml", settings)
    seconds["warm_start"] = time.perf_counter() - began

    pace = seconds["warm_start"] / WARM_START_S
    text = f"RL: {steps} GRPO steps, SGLang samples, Megatron-Core learns; held-out accuracy before and after"
    _announce(3, parts, text, rl_s * pace)
    began = time.perf_counter()
    settings = [f"model.path={warm}", f"seed={seed}", f"steps={steps}"]
    folder = train(CONFIGS / "countdown_tiny.yaml", [*settings, *here])
    seconds["rl_run"] = time.perf_counter() - began

    assert folder is not None  # only a dry run gives None
    summary = read_required(folder.summary, {"seconds": dict})
    summary["seconds"] |= {part: round(value, 2) for part, value in seconds.items()}
    write_json(folder.summary, summary, flush=True)
    if study:
        text = "a rollout of int2 weights, which is not the learner's policy: once taken for the old policy, once corrected"
        _announce(4, parts, text, study_s * pace)
        compare_corrections(warm, seed)
        run_folder.point_latest(folder)


def compare_corrections(model: Path, seed: int) -> None:
    """Train with a quantised rollout in two ways, evaluate both with the learner's own weights, which the servers of the
    runs never had, and write a page with the curves of both beside the model."""
    here = [setting for setting in settings_of_machine() if setting not in STUDY]
    recipe, folders = CONFIGS / "countdown_tiny.yaml", list[RunFolder]()
    accuracies = dict[str, float | None]()
    for name, preset in STUDY_CORRECTIONS.items():
        own = [f"name=countdown-tiny-int2-{name}", f"correction={preset}", f"seed={seed}"]
        print(f"\n{name} (correction={preset}):", flush=True)
        folder = train(recipe, [f"model.path={model}", *here, *STUDY, *own])
        assert folder is not None
        folders.append(folder)
        print("with the learner's own weights:", flush=True)
        accuracies[name] = evaluate(recipe, [f"model.path={folder.hf}", f"seed={seed}", *here])
    print()
    for name, accuracy in accuracies.items():
        if accuracy is not None:
            print(f"held-out accuracy of the learner's own weights, {name}: {accuracy:.1%}", flush=True)
    compare([folder.path for folder in folders], model.parent / "comparison.html")


def _announce(part: int, parts: int, text: str, seconds: float) -> None:
    print(f"\n[{part}/{parts}] {text}; about {duration(seconds)}", flush=True)
