"""The layout study on a trained model with long responses: does the gap of the engines grow with the length?

A tiny Qwen3 learns chains of sums made here (``17+25=42:42-30=12:...``), by ``tandem sft`` at 2048 tokens and then at
4096. In a chain every second number is free, and its result is not: distributions are soft in one place and sharp in
the next, as a trained model's are. ``benchmarks/layout_mismatch.py`` then measures it at each length, in bfloat16, with
end tokens ignored. At 8192 tokens the model is beyond what it was trained on.

    python benchmarks/studies/long_responses.py --folder long [--lengths 1024 4096 8192] [--prompts 16]

Goes on where it was stopped: a trained model and a finished length are not made again.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

POSITIONS, THETA = 16384, 1e6
TRAINED = ((2048, 8, 400), (4096, 4, 40))
"""Of each part of the training: tokens of an example, examples of a step, steps."""
LARGEST = 99


def chain(rng: random.Random, tokens: int) -> str:
    """Links ``a+b=c:`` or ``a-b=c:`` with numbers from 0 to ``LARGEST``, each from the last one's result, cut to
    ``tokens``."""
    number, text = rng.randint(0, LARGEST), ""
    while len(text) < tokens:
        result = rng.randint(0, LARGEST)
        sign = "+" if result >= number else "-"
        text, number = f"{text}{number}{sign}{abs(result - number)}={result}:", result
    return text[:tokens]


def make_model(folder: Path) -> Path:
    """Random weights, with room for long responses."""
    from rollout.tiny_model import make_tiny_countdown_model

    make_tiny_countdown_model(folder, seed=0)
    for name, changes in (
        ("config.json", {"max_position_embeddings": POSITIONS, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}),
        ("tokenizer_config.json", {"model_max_length": POSITIONS}),
    ):  # fmt: skip
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2))
    return folder


def train(folder: Path) -> Path:
    """The trained model of ``folder``."""
    model = folder / "random"
    if not model.exists():
        make_model(model)
    for tokens, batch, steps in TRAINED:
        output = folder / f"trained-{tokens}"
        if not output.exists():
            rng, data = random.Random(tokens), folder / f"chains-{tokens}.jsonl"
            texts = (chain(rng, tokens - 1) for _ in range(batch * steps))  # and the end token
            lines = [json.dumps({"prompt": text[:2], "response": text[2:]}) for text in texts]
            data.write_text("\n".join(lines) + "\n")
            source = f"data={{type: jsonl, path: {data}, apply_chat_template: false}}"
            sizes = [f"steps={steps}", f"batch_size={batch}", f"token_budget={tokens}"]
            places = [f"model.path={model}", f"output={output}", f"launch.runs_dir={folder / 'runs'}"]
            recipe = ROOT / "configs/recipes/countdown_tiny_sft.yaml"
            command = [sys.executable, "-m", "launch", "sft", str(recipe), source, *sizes, *places]
            subprocess.run(command, check=True, cwd=ROOT)
        model = output
    return model


def measure(folder: Path, model: Path, tokens: int, prompts: int) -> None:
    results = folder / f"layout_mismatch_{tokens}"
    if results.with_suffix(".md").exists():
        return
    data, rng = folder / "prompts.jsonl", random.Random(1)
    data.write_text("".join(json.dumps({"prompt": chain(rng, 9), "answer": "0"}) + "\n" for _ in range(512)))
    command = [
        sys.executable, str(ROOT / "benchmarks/layout_mismatch.py"), "--model", str(model), "--results", str(results),
        "--prompts", str(prompts), f"task={{type: jsonl, train_path: {data}, heldout_path: {data}}}",
        "reward={type: math_verify}", f"rollout.max_new_tokens={tokens}", "rollout.max_total_tokens=262144",
        "rollout.request_timeout_s=3000", f"learner.token_budget={2 * tokens}",
        """rollout.server_args={disable_radix_cache: true, preferred_sampling_params: '{"ignore_eos": true}'}""",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--folder", type=Path, required=True, help="where model and results go")
    made.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    made.add_argument("--prompts", type=int, default=16)
    given = made.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = train(folder)
    for tokens in given.lengths:
        measure(folder, model, tokens, given.prompts)


if __name__ == "__main__":
    main()
