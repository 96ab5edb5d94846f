"""What a tool and a second try are worth: Countdown by single turns, with a second try, with a calculator; and the second
try by an unchanged agent with OpenAI's client.

From one warm model, each arm gets a further warm start of as many steps, on examples of its own form, and then RL runs
whose configs differ only in the environment. Every turn of every step is compared with the server's request and answer
(``episode/turns_checked``), and every trained token with the learner's own log-prob.

    python benchmarks/studies/environments.py --model runs/quickstart-*/warm --folder environments [--jobs 1]
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.studies.grid import ROOT, Cell, Curve, Grid, Rows, draw, grid_of, last, options, table

AGENT = ROOT / "docs" / "examples" / "agent" / "agent.py"
ARMS = {
    "single turn": "{type: single_turn}",
    "second try": "{type: tokens, environment: 'docs.examples.try_again.try_again:TryAgain'}",
    "second try by an agent": f"{{type: agent, command: [{AGENT}], template: plain, max_turns: 2, preload: [openai.resources.chat]}}",
    "calculator": "{type: tokens, environment: 'docs.examples.calculator.calculator:Calculator', max_turns: 4}",
}
EXAMPLES = {"second try": "try_again", "second try by an agent": "try_again", "calculator": "calculator"}
NUM_EXAMPLES = 60_000
WARM_START = "configs/recipes/countdown_tiny_sft.yaml"
COLORS = ("#222222", "#1f77b4", "#2ca02c", "#d62728")


def total(metric: str):
    def of(rows: Rows) -> float:
        return sum(row.get(metric, 0.0) for row in rows)

    return of


def greatest(metric: str):
    def of(rows: Rows) -> float:
        return max(row[metric] for row in rows if metric in row)

    return of


def before(rows: Rows) -> float:
    return next(row["eval/accuracy"] for row in rows if "eval/accuracy" in row)


def rate(metric: str):
    """The metric of the last steps per second of sampling."""
    numerator, seconds = last(metric), last("sampling/seconds")
    return lambda rows: numerator(rows) / seconds(rows)


COLUMNS = {
    "before": before,
    "reward": last("reward/mean"),
    "turns per sample": last("episode/turns_mean"),
    "sampled tokens": last("response/length_mean"),
    "turns checked": total("episode/turns_checked"),
    "max |dp|": greatest("mismatch/abs_prob_max"),
    "max log-prob gap": greatest("mismatch/logprob_gap_max"),
    "turns/s": rate("episode/turns_checked"),
    "tokens/s": rate("response/tokens"),
}


def name_of(arm: str, seed: int) -> str:
    return f"{arm.replace(' ', '-')}-{seed}"


def warm_start(grid: Grid, arm: str, steps: int) -> Path:
    """The arm's model, made if it is missing."""
    example = EXAMPLES.get(arm)
    model = grid.folder / "models" / (example or "single_turn")
    if model.exists():
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    data = f"data.examples={NUM_EXAMPLES}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if example:
        file = grid.folder / f"{example}.jsonl"
        script = ROOT / "docs" / "examples" / example / f"{example}.py"
        with file.open("w") as output:
            command = [sys.executable, str(script), str(NUM_EXAMPLES)]
            subprocess.run(command, stdout=output, env=environment, check=True)
        data = f"data={{type: jsonl, path: {file}, apply_chat_template: false}}"
    settings = [f"model.path={grid.model}", f"output={model}", f"steps={steps}", "layout.dp=1", data]
    command = [sys.executable, "-m", "launch", "sft", str(ROOT / WARM_START), *settings]
    print(f"warm start: {arm}", flush=True)
    log = grid.folder / f"{example or 'single_turn'}.log"
    with log.open("w") as output:
        subprocess.run(command, cwd=grid.folder, stdout=output, stderr=output, env=environment, check=True)
    return model


def cells(grid: Grid, arms: Sequence[str], seeds: Sequence[int], warm_steps: int) -> list[Cell]:
    models = {arm: warm_start(grid, arm, warm_steps) for arm in arms}
    return [
        Cell(name_of(arm, seed), (f"model.path={models[arm]}", f"seed={seed}", f"environment={ARMS[arm]}"))
        for seed in seeds
        for arm in arms
    ]


def main() -> None:
    parser = options(__doc__.splitlines()[0], lr=3e-4, steps=100)
    parser.add_argument("--warm-steps", type=int, default=1500)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    given = parser.parse_args()
    grid, seeds, arms = grid_of(given), given.seeds, given.arms
    grid.folder.mkdir(parents=True, exist_ok=True)
    grid.run_missing(cells(grid, arms, seeds, given.warm_steps), given.jobs)
    groups = [([arm], [name_of(arm, seed) for seed in seeds]) for arm in arms]
    print(table(grid, groups, ["environment"], COLUMNS))
    panels = {
        "Countdown": [
            Curve(arm, COLORS[list(ARMS).index(arm)], [name_of(arm, seed) for seed in seeds]) for arm in arms
        ]
    }
    metrics = {"mean reward": "reward/mean", "turns per sample": "episode/turns_mean"}
    draw(grid, panels, metrics, grid.folder / "environments.png", size=(5.0, 2.6))


if __name__ == "__main__":
    main()
