"""Sampling-mask replay on the real engines: the gap between server and learner under top_p, top_k and min_p, with the kept
sets replayed in the learner's softmax and, as a control, without replay.

A tiny Qwen3 of random weights, sharpened so that its probabilities are far from uniform. For each truncation a server
samples and a learner scores the same tokens two ways: over the kept set, as the server does, and
over the full vocabulary. A table per precision is printed.

    python benchmarks/studies/sampling_mask.py --folder masks [--prompts 8]
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.common import announce, table_head, table_row  # noqa: E402
from benchmarks.studies.served_samples import packed, sample, sharpen  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from configs.schema.layout import LayoutConfig  # noqa: E402
from configs.schema.model import ModelConfig  # noqa: E402
from parallel.engine import MegatronEngine  # noqa: E402
from parallel.packing import PackedBatch  # noqa: E402
from parallel.planning.architecture import architecture_of  # noqa: E402
from rollout.servers.kept_sets import Truncation  # noqa: E402
from rollout.tiny_model import make_tiny_countdown_model  # noqa: E402
from tests.support.megatron_workers import run_ranks  # noqa: E402

NEW_TOKENS, TEMPERATURE, END = 32, 0.7, 0
TRUNCATIONS = [
    {"top_p": 0.9, "top_k": 10, "min_p": 0.0},
    {"top_p": 1.0, "top_k": 10, "min_p": 0.0},
    {"top_p": 0.9, "top_k": 64, "min_p": 0.0},
    {"top_p": 0.5, "top_k": 64, "min_p": 0.0},
    {"top_p": 1.0, "top_k": 64, "min_p": 0.1},
    {"top_p": 0.9, "top_k": 10, "min_p": 0.05},
    {"top_p": 1.0, "top_k": 2, "min_p": 0.0},
]
TITLES = (
    "top_p",
    "top_k",
    "min_p",
    "tokens",
    "mean kept ids",
    "max gap, TP 1",
    "max gap, TP 2",
    "without replay: max",
    "mean",
)
LAYOUTS = {"one process": LayoutConfig(dp=1), "TP 2": LayoutConfig(tp=2, dp=1)}
ENGINE = {"logprob_chunk_tokens": 100, "seed": 0}


def sample_truncated(folder: Path, logs: Path, dtype: str, prompts: int) -> Iterator[PackedBatch]:
    """A batch per truncation, of one server."""
    rollout = {"dtype": dtype, "max_total_tokens": 8192}
    config = RunConfig(model=ModelConfig(path=folder), task={"type": "countdown"}, rollout=rollout)
    vocab_size = architecture_of(folder).vocab_size
    clients = [{"truncation": Truncation(**limits, vocab_size=vocab_size)} for limits in TRUNCATIONS]
    limits = {"new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "end": END}
    for samples in sample(config, logs, prompts=prompts, **limits, clients=clients):
        num_kept = [[*[0] * len(p), *c.num_kept] for p, c in samples]
        yield packed(samples, num_kept=num_kept, kept_ids=[c.kept_ids for _, c in samples])


def score(
    folder: Path, dtype: str, layout: LayoutConfig, batches: list[PackedBatch]
) -> list[tuple[Tensor, Tensor]]:
    """For each batch: log-probs over the kept sets, and over the full vocabulary."""
    engine = MegatronEngine(ModelConfig(path=folder, dtype=dtype), layout, None, **ENGINE)
    plain = [replace(batch, num_kept_T=None, kept_ids_M=None) for batch in batches]
    kept, full = (engine.logprobs(each, temperature=TEMPERATURE) for each in (batches, plain))
    return list(zip(kept, full, strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(description="Sampling-mask replay: with the kept sets, and without")
    arguments.add_argument(
        "--folder", type=Path, required=True, help="for models and logs; it must not exist"
    )
    arguments.add_argument("--prompts", type=int, default=8)
    options = arguments.parse_args()
    options.folder.mkdir(parents=True)
    torch.set_num_threads(1)
    announce(prompts=options.prompts)
    folder = options.folder / "model"
    make_tiny_countdown_model(folder, seed=0)
    sharpen(folder, 8)  # a token's likeliest id then has anything from a tenth to nearly all of the mass
    for dtype in ("float32", "bfloat16"):
        batches = [*sample_truncated(folder, options.folder / f"logs-{dtype}", dtype, options.prompts)]
        scores = {
            name: run_ranks(
                partial(score, folder, dtype),
                layout.world_size,
                options.folder / f"{dtype} {name}",
                layout,
                batches,
            )[0]
            for name, layout in LAYOUTS.items()
        }
        print(f"\n{dtype}, T = {TEMPERATURE}\n")
        print(table_head(TITLES))
        for number, (limits, batch) in enumerate(zip(TRUNCATIONS, batches, strict=True)):
            mask_T, rollout_T = batch.response_mask_T, batch.rollout_logprobs_T
            assert batch.num_kept_T is not None
            gaps = [(scores[name][number][0] - rollout_T)[mask_T].abs().max() for name in LAYOUTS]
            control_N = (scores["one process"][number][1] - rollout_T)[mask_T].abs()
            numbers = [limits["top_p"], limits["top_k"], limits["min_p"], int(mask_T.sum())]
            numbers += [f"{batch.num_kept_T[mask_T].float().mean():.2f}", *(f"{gap:.1e}" for gap in gaps)]
            print(table_row([*numbers, f"{control_N.max():.2f}", f"{control_N.mean():.2f}"]), flush=True)


if __name__ == "__main__":
    main()
