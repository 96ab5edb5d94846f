"""The mismatch of rollout and learner by TP, SP and length, on a trained model with responses of thousands of tokens.

The quickstart's warm model learns to write chains of sums, each of which begins with the result of the one before, first
short ones and then up to 8192 tokens (``tandem sft`` on generated files). Results follow from the text before and operands
are free, so some tokens are almost certain and others are not. Then ``tandem mismatch`` in bfloat16: each rollout layout
samples responses that run to their limit, each learner layout scores them.

    python benchmarks/studies/long_mismatch.py --model WARM --folder long

Shown by length: the greatest Δp of a response's first tokens, mean over responses; the mean Δp of the tokens between one
length and the next, and its share of their p (1 - p). After a stop, the same command starts the interrupted training or
study again from its beginning.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, figure, table_head, table_row  # noqa: E402

LENGTHS = (256, 1024, 2048, 4096, 8192)
POSITIONS = 16384
LEARNERS, ROLLOUTS = ("tp=1", "tp=2", "tp=2,sp", "pp=2"), ("tp=1", "tp=2")
TITLES = {
    "most": "max Δp of the first N tokens",
    "mean": "mean Δp from the length before to N",
    "share": "the same as a share of p (1 - p)",
}
"""Titles of the fields of ``Length``."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model's training, on chains whose logarithm of the length is uniform."""

    name: str
    steps: int
    batch_size: int
    lengths: tuple[int, int]
    """Lengths of the shortest and the longest chain, in characters, one token each."""
    lr: float


STAGES = (
    Stage(name="short", steps=900, batch_size=64, lengths=(48, 192), lr=2e-3),
    Stage(name="long", steps=200, batch_size=8, lengths=(192, LENGTHS[-1]), lr=1e-3),
)


def chain(rng: random.Random, length: int) -> tuple[str, str]:
    """(prompt, response): ``17:`` and ``17+5=22 22-9=13 ...``, ``length`` characters."""
    number = start = rng.randint(0, 99)
    text = ""
    while len(text) < length:
        other = rng.randint(1, 9)
        adds = number + other <= 99 and (number - other < 0 or rng.random() < 0.5)
        result = number + other if adds else number - other
        text += f"{number}{'+' if adds else '-'}{other}={result} "
        number = result
    return f"{start}:", text[:length]


def chains(stage: Stage, seed: int) -> Iterator[tuple[str, str]]:
    rng, (shortest, longest) = random.Random(seed), stage.lengths
    for _ in range(stage.steps * stage.batch_size):
        yield chain(rng, round(shortest * (longest / shortest) ** rng.random()))


def right_share(text: str) -> float:
    """Share of a chain's sums whose result is right and whose first number is the result before."""
    sums, last, right = text.split(" ")[:-1], None, 0
    for each in sums:
        try:
            first, result = each.split("=")
            sign = "+" if "+" in first else "-"
            one, other = first.split(sign)
            right += (last is None or one == last) and int(one) + int(sign + other) == int(result)
            last = result
        except ValueError:
            last = None
    return right / max(len(sums), 1)


def with_room(model: Path, folder: Path) -> None:
    """The model with room for long responses: rotary embeddings have no table of limited length."""
    made = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(model, made)
    for name, changes in {
        "config.json": {"max_position_embeddings": POSITIONS},
        "tokenizer_config.json": {"model_max_length": POSITIONS},
    }.items():
        file = made / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    made.rename(folder)


def tandem(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "launch", *words], cwd=ROOT, check=True)


def train(folder: Path, model: Path) -> Path:
    trained = folder / "start"
    if not trained.exists():
        with_room(model, trained)
    for number, stage in enumerate(STAGES):
        before, trained, data = trained, folder / stage.name, folder / f"{stage.name}.jsonl"
        if trained.exists():
            continue
        lines = [json.dumps({"prompt": p, "response": r}) + "\n" for p, r in chains(stage, seed=number)]
        data.write_text("".join(lines))
        tandem(
            *("sft", str(ROOT / "configs/recipes/countdown_tiny_sft.yaml"), f"name=chains-{stage.name}"),
            *(f"model.path={before}", f"output={trained}", f"launch.runs_dir={folder / 'runs'}"),
            f"data={{type: jsonl, path: {data}, apply_chat_template: false}}",
            *(f"steps={stage.steps}", f"batch_size={stage.batch_size}", "token_budget=16384"),
            *(f"optimizer.lr={stage.lr}", f"optimizer.min_lr={stage.lr / 10}"),
        )
    return trained


def study(folder: Path, trained: Path, given: argparse.Namespace) -> Path:
    out, prompts = folder / "study", folder / "prompts.jsonl"
    if not (out / "mismatch.json").exists():
        shutil.rmtree(out, ignore_errors=True)  # of a study that was stopped
        rng = random.Random(1)
        prompts.write_text(
            "".join(
                json.dumps({"prompt": chain(rng, 1)[0], "answer": "-"}) + "\n"
                for _ in range(4 * given.prompts)
            )
        )
        task = f"task={{type: jsonl, train_path: {prompts}, apply_chat_template: false}}"
        layouts = [f"--learner={text}" for text in LEARNERS] + [f"--rollout={text}" for text in ROLLOUTS]
        longest = LENGTHS[-1]
        tandem(
            *("mismatch", str(ROOT / "configs/recipes/countdown_tiny.yaml"), *layouts),
            *("--prompts", str(given.prompts), "--out", str(out), f"model.path={trained}", task),
            *("reward={type: function, function: 'benchmarks.studies.long_mismatch:right'}",),
            *("model.dtype=bfloat16", "rollout.dtype=bfloat16", f"rollout.max_new_tokens={longest}"),
            *(
                f"rollout.max_total_tokens={given.prompts * (longest + 64)}",
                f"learner.token_budget={longest + 64}",
            ),
            """rollout.server_args={preferred_sampling_params: '{"ignore_eos": true}'}""",
            *("rollout.request_timeout_s=7200", "launch.collective_timeout_s=16000", "layout={}"),
        )
    return out


def right(prompt_text: str, response_text: str, reference: str) -> float:
    """The reward that the config requires; nothing is trained with it."""
    return right_share(response_text)


class Length(NamedTuple):
    """Of the tokens up to one length: means over responses, each with its standard error."""

    most: tuple[float, float | None]
    """The greatest Δp of a response's tokens from the first on."""
    mean: tuple[float, float | None]
    """Δp of the tokens since the length before."""
    share: tuple[float, float | None]
    """The sum of their Δp over the sum of their p (1 - p). Nearly certain tokens hardly change it."""


def by_length(out: Path, learner: str, rollout: str) -> dict[int, Length]:
    from trainer.studies.layout_statistics import mean_and_error, probability_gaps, read_samples, read_tensors

    part = out / f"rollout-{rollout.replace('=', '').replace(',', '-')}"
    scored = out / f"learner-{learner.replace('=', '').replace(',', '-')}" / "scores.safetensors"
    samples = read_samples(part / "samples.long.safetensors")
    gap_N = probability_gaps(samples.logprobs_N, read_tensors(scored)[f"{rollout}/long"])
    p_N = samples.logprobs_N.exp()
    gaps: tuple[Tensor, ...] = gap_N.split(samples.response_lengths_R.tolist())
    doubts = (p_N * (1 - p_N)).split(samples.response_lengths_R.tolist())
    result, before = {}, 0
    for length in LENGTHS:
        rows = [(gap, doubt) for gap, doubt in zip(gaps, doubts, strict=True) if len(gap) >= length]
        if not rows:
            break
        result[length] = Length(
            most=mean_and_error(torch.stack([gap[:length].max() for gap, _ in rows])),
            mean=mean_and_error(torch.stack([gap[before:length].mean() for gap, _ in rows])),
            share=mean_and_error(
                torch.stack([gap[before:length].sum() / doubt[before:length].sum() for gap, doubt in rows])
            ),
        )
        before = length
    return result


def texts(out: Path, trained: Path, rollout: str) -> list[str]:
    from rollout.tokenization import load_tokenizer
    from trainer.studies.layout_statistics import read_samples

    part = out / f"rollout-{rollout.replace('=', '')}" / "samples.long.safetensors"
    samples, tokenizer = read_samples(part), load_tokenizer(trained)
    pairs = zip(samples.sequences(), samples.prompt_lengths_R.tolist(), strict=True)
    return [tokenizer.decode(tokens[prompt:]) for tokens, prompt in pairs]


def report(out: Path, trained: Path) -> None:
    pairs = [(learner, rollout) for rollout in ROLLOUTS for learner in LEARNERS]
    rows = {pair: by_length(out, *pair) for pair in pairs}
    written = texts(out, trained, ROLLOUTS[0])
    print(f"\n{len(written)} responses; of their sums are right:")
    for before, length in zip((0, *LENGTHS[:-1]), LENGTHS, strict=True):
        shares = [right_share(text[before:length]) for text in written]
        print(f"  characters {before + 1} to {length}: {sum(shares) / len(shares):.1%}")
    print()
    for name, title in TITLES.items():
        print(table_head([title, *map(str, LENGTHS)]))
        for (learner, rollout), by_length in rows.items():
            cells = [
                f"{value:.3g} ± {error or 0.0:.1g}"
                for value, error in (getattr(v, name) for v in by_length.values())
            ]
            print(table_row([f"learner {learner}, rollout {rollout}", *cells]))
        print()
    draw(rows, out.parent / "long_mismatch.png")


def draw(rows: dict[tuple[str, str], dict[int, Length]], path: Path) -> None:
    """A panel for each title. Learners with the same log-probs are one line."""
    with figure(path, dpi=90, columns=len(TITLES), figsize=(12, 3.4)) as panels:
        for panel, (name, title) in zip(panels, TITLES.items(), strict=True):
            drawn: dict[tuple, list[str]] = {}
            for (learner, rollout), row in rows.items():
                drawn.setdefault((rollout, *row.items()), []).append(learner)
            for (rollout, *row), learners in drawn.items():
                lengths = [length for length, _ in row]
                values, errors = zip(*(getattr(value, name) for _, value in row), strict=True)
                style = "-" if rollout == ROLLOUTS[0] else "--"
                color = f"C{LEARNERS.index(learners[0])}"
                label = f"rollout {rollout}, learner {' and '.join(learners)}"
                panel.errorbar(lengths, values, errors, linestyle=style, marker=".", color=color, label=label)
            panel.set_xscale("log", base=2)
            panel.set_xticks(LENGTHS, [str(length) for length in LENGTHS], fontsize=8)
            panel.set_xlabel("N, tokens")
            panel.set_title(title, fontsize=9)
            panel.set_ylim(0)
            panel.grid(alpha=0.3)
        panels[1].legend(fontsize=7, frameon=False, loc="upper left")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--folder", type=Path, required=True, help="where the model and the study go")
    made.add_argument("--model", type=Path, required=True, help="the quickstart's warm model")
    made.add_argument("--prompts", type=int, default=12)
    given = made.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    announce(prompts=given.prompts)
    trained = train(folder, given.model.resolve())
    report(study(folder, trained, given), trained)


if __name__ == "__main__":
    main()
