"""The mismatch of rollout and learner over a grid of layouts, with its causes: ``tandem mismatch --why`` on a
model made here or given.

On a machine without a GPU: the tiny model in bfloat16, learner {TP 1, TP 2, TP 2 + SP, PP 2} x rollout {TP 1,
TP 2}. Without --model it has random weights, scaled so that its distributions are as sharp as a trained
model's, and every response runs to its limit: a Countdown answer has 8 tokens, too few for an effect of
length. On CUDA give --config, a config of your own model.

Writes RESULTS.md and RESULTS_*.png (benchmarks/results/layout_mismatch by default).
"""

import json
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import hardware, parser  # noqa: E402

LEARNERS = ("tp=1", "tp=2", "tp=2,sp", "pp=2")
ROLLOUTS = ("tp=1", "tp=2")
BFLOAT16 = ("model.dtype=bfloat16", "rollout.dtype=bfloat16")
TO_THE_LIMIT = (
    "rollout.max_new_tokens=128",
    """rollout.server_args={preferred_sampling_params: '{"ignore_eos": true}'}""",
)
LAYER_SCALE, HEAD_SCALE = 6.0, 10.0
"""Factors for a freshly made tiny model, whose layers do next to nothing and whose distributions are almost uniform.
"""
MADE = (
    f"random (seed 0), no trained model: the layers' matrices are multiplied by {LAYER_SCALE:g} and the final norm by {HEAD_SCALE:g}, so "
    "that the distributions are sharp; end-of-text tokens are ignored, so that every response runs to its limit"
)
SAME_SP = (
    "SP and plain TP 2 are the same to the last bit because two ranks share each sum: a sum of two numbers has the same bits whichever way "
    "it is made (reduce-scatter and gather, or all-reduce). With more ranks they can differ."
)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, default=ROOT / "configs/recipes/countdown_tiny.yaml")
    options.add_argument("--model", type=Path, help="a Hugging Face folder; random weights if none is given")
    options.add_argument("--learner", action="append", help=f"layouts, instead of {', '.join(LEARNERS)}")
    options.add_argument("--rollout", action="append", help=f"layouts, instead of {', '.join(ROLLOUTS)}")
    options.add_argument("--prompts", type=int, default=256)
    options.add_argument(
        "--results",
        type=Path,
        help="where, without .md (default: benchmarks/results/layout_mismatch, with --quick a temporary folder)",
    )
    options.add_argument("override", nargs="*", help="KEY=VALUE, as for tandem mismatch")
    given = options.parse_args()
    prompts = 16 if given.quick else given.prompts
    with tempfile.TemporaryDirectory() as scratch:
        study = measure(given, prompts, Path(scratch))
        publish(
            study,
            given.results
            or (Path(scratch) if given.quick else ROOT / "benchmarks/results") / "layout_mismatch",
            {"command": f"`{command(given, prompts)}`"} | ({"weights": MADE} if makes_model(given) else {}),
        )
        if given.json:
            shutil.copyfile(study / "mismatch.json", given.json)


def measure(given, prompts: int, scratch: Path) -> Path:
    from launch.commands import studies
    from launch.studies.mismatch_plan import Request

    overrides = [*BFLOAT16, *given.override]
    if given.model is not None:
        overrides = [f"model.path={given.model}", *overrides]
    elif makes_model(given):
        make_sharp_model(scratch / "random-tiny")
        overrides = [f"model.path={scratch / 'random-tiny'}", *TO_THE_LIMIT, *overrides]
    request = Request(
        learners=tuple(given.learner or LEARNERS),
        rollouts=tuple(given.rollout or ROLLOUTS),
        prompts=prompts,
        threshold=0.1,
        out=scratch / "study",
        why=True,
    )
    return studies.mismatch(given.config, overrides, request)


def makes_model(given) -> bool:
    return given.model is None and given.config == ROOT / "configs/recipes/countdown_tiny.yaml"


def command(given, prompts: int) -> str:
    """The command of the same study, without the paths of this machine."""
    words = [f"--model {given.model}"] if given.model else []
    if given.config != ROOT / "configs/recipes/countdown_tiny.yaml":
        words.append(f"--config {given.config}")
    words += [f"--{side} {text}" for side in ("learner", "rollout") for text in getattr(given, side) or ()]
    words += [f"--results {given.results}"] if given.results else []
    words += [f"--prompts {prompts}", *(o for o in given.override if not o.startswith("launch."))]
    return f"python benchmarks/layout_mismatch.py {' '.join(words)}"


def make_sharp_model(folder: Path) -> None:
    """Random weights whose layers matter and whose next-token distributions are sharp."""
    from safetensors.torch import load_file, save_file

    from rollout.tiny_model import make_tiny_countdown_model

    make_tiny_countdown_model(folder, seed=0)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "layers" in name and tensor.dim() == 2:
            tensor.mul_(LAYER_SCALE)
    weights["model.norm.weight"].mul_(HEAD_SCALE)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def is_sp_the_same(result: dict) -> bool:
    """Whether every learner with SP on two ranks gave the same bits as without SP, and no other SP was compared."""
    from configs.schema.layout import parse_layout

    rows = [row for row in result["comparisons"] if row["about"] == "sp"]
    return bool(rows) and all(row["bitwise"] and parse_layout(row["second"]).tp == 2 for row in rows)


def publish(study: Path, results: Path, how: dict[str, str]) -> None:
    """The page of the study, headed with when, where and ``how``, beside its figures."""
    from trainer.studies.layout_text import markdown

    result = json.loads((study / "mismatch.json").read_text())
    machine = hardware()
    result["setting"] = {
        "date": date.today().isoformat(),
        **how,
        "machine": f"{machine['cpu']}, {machine['cores']} cores, GPUs: {', '.join(machine['gpus']) or 'none'}; torch {machine['torch']}",
    } | result["setting"]
    if is_sp_the_same(result):
        result["findings"].append(SAME_SP)
    results.parent.mkdir(parents=True, exist_ok=True)
    figures = []
    for figure in sorted(study.glob("*.png")):
        figures.append(f"{results.name}_{figure.name}")
        shutil.copyfile(figure, results.parent / figures[-1])
    results.with_suffix(".md").write_text(markdown(result, figures))
    print(f"\n{results.with_suffix('.md')}", flush=True)


if __name__ == "__main__":
    main()
