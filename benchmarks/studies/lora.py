"""Adapters (LoRA) on the real engines: what they save, and the gap between learner and server with each forward pass.

    python benchmarks/studies/lora.py memory   [--rounds 3]
    python benchmarks/studies/lora.py mismatch --folder lora [--model FOLDER] [--prompts 48]

memory: the peak of resident memory over two updates of one rank, above the memory before the engine was built, beside
the planner's figure; full training, and adapters of rank 16 with both forward passes. Each measurement is a process.

mismatch: a server of the merged weights samples; the learner scores the same tokens with the factored form, with the
merged weight, and, as a control, as a model without adapters that was loaded from the same export. A is as at the start
of training. B is random and scaled, so that its product with A has the given share of the weight's norm. Without --model
it is a tiny random model with all matrices three times as large, so that probabilities are far from uniform.
"""

import argparse
import json
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, in_own_process, table_head, table_row  # noqa: E402

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536,
}  # fmt: skip
RANK, CHUNK_TOKENS, LENGTHS = 16, 256, [256] * 4
WAYS = ("full", "factored", "merged")
SHARES = (0.01, 0.1)
PRECISIONS = (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"))
"""(learner, server)."""
NEW_TOKENS = 64
MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""A setting of glibc: freed tensors go back to the system at once, so resident memory is the memory in use."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["memory", "mismatch"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("lora"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--one", help="(internal) measure WAY,DTYPE in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(peak_of(*given.one.split(","))))
        return
    announce(part=given.part, rounds=given.rounds, prompts=given.prompts)
    if given.part == "memory":
        compare_memory(given.rounds)
    else:
        compare_mismatch(given.folder, given.model, given.prompts)


# ---------------------------------------------------------------------------------------------------------------
# memory


def compare_memory(rounds: int) -> None:
    print(
        table_head(
            ["dtype", "trained", "measured peak, MiB (each process)", "planner, MiB", "planner's items"]
        )
    )
    for dtype in ("bfloat16", "float32"):
        for way in WAYS:
            one = ("memory", "--one", f"{way},{dtype}")
            found = [in_own_process(__file__, *one, env=os.environ | MALLOC) for _ in range(rounds)]
            peaks = sorted(each["peak"] / MIB for each in found)
            texts = ", ".join(f"{peak:.0f}" for peak in peaks)
            peak, planned = statistics.median(peaks), found[0]["planned"] / MIB
            print(
                table_row([dtype, way, f"{peak:.0f} ({texts})", f"{planned:.0f}", found[0]["items"]]),
                flush=True,
            )


def peak_of(way: str, dtype: str) -> dict[str, Any]:
    """Peak of this process's resident memory over two updates, above that before the engine."""
    import psutil

    from configs.schema.layout import LayoutConfig
    from configs.schema.learner import LoraConfig
    from parallel.planning.architecture import architecture_of
    from parallel.planning.memory import describe, learner_memory
    from parallel.planning.work import Work
    from tests.support.megatron_workers import make_batch, make_engine, make_hf_model, weighted_loss

    lora = None if way == "full" else LoraConfig(rank=RANK, forward=way)
    process = psutil.Process()
    with TemporaryDirectory() as folder:
        model = make_hf_model(Path(folder) / "m", "qwen3", **SIZES, max_position_embeddings=512)
        # Code that is loaded at first use does not count as the model's memory.
        warm = make_hf_model(Path(folder) / "warm", "qwen3")
        adapters = None if lora is None else lora.model_dump() | {"rank": 4}
        make_engine(warm, dtype=dtype, lora=adapters).update(
            [make_batch([9, 5])], weighted_loss, temperature=1.0
        )
        before, peak, over = process.memory_info().rss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.005):
                peak = max(peak, process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        engine = make_engine(model, dtype=dtype, lora=None if lora is None else lora.model_dump())
        engine.chunks[0].chunk_tokens = CHUNK_TOKENS
        batch = make_batch(LENGTHS, vocab=SIZES["vocab_size"])
        for _ in range(2):
            engine.update([batch], weighted_loss, temperature=1.0)
        over.set()
        watcher.join()
        work = Work(
            device="cpu", dtype=dtype, token_budget=batch.num_tokens, chunk_tokens=CHUNK_TOKENS, recompute="none",
            distributed_optimizer=True, num_microbatches=1, lora=lora,
        )  # fmt: skip
        planned = learner_memory(architecture_of(model), LayoutConfig(dp=1), work, 0)
    return {"peak": peak - before, "planned": planned.total, "items": describe(planned)}


# ---------------------------------------------------------------------------------------------------------------
# mismatch


def compare_mismatch(folder: Path, model: Path | None, prompts: int) -> None:
    import torch

    from tests.support.megatron_workers import make_engine

    torch.set_num_threads(1)
    base = model or _random_model(folder / "base")
    print(table_head(["learner, server", "size of B A", "forward", "max Δp", "mean Δp ± se", "max nats"]))
    for (dtype, served), share in ((pair, share) for pair in PRECISIONS for share in SHARES):
        exported = folder / f"{dtype}-{served}-{share}"
        batch = None
        for way in ("factored", "merged", "no adapters"):
            if way == "no adapters":
                engine = make_engine(exported, dtype=dtype)
            else:
                lora = {"rank": RANK, "alpha": 2.0 * RANK, "forward": way}
                engine = make_engine(base, dtype=dtype, served=served, lora=lora)
                _set_share(engine, share)
            if batch is None:
                engine.save_hf(exported)
                batch = _sample(exported, served, folder / "logs", prompts)
            cells = [f"{dtype}, {served}", f"{share:.0%} of W", way, *_gaps(engine, batch)]
            print(table_row(cells), flush=True)


def _random_model(folder: Path) -> Path:
    from rollout.tiny_model import make_tiny_countdown_model
    from tests.support.real_servers import sharpen

    make_tiny_countdown_model(folder, seed=0)
    sharpen(folder)
    return folder


def _set_share(engine: Any, share: float) -> None:
    """Scale every random B so that |alpha / rank B A| = share |W| (Frobenius norms)."""
    import torch

    from parallel.megatron.lora import adapted_layers

    for layer in adapted_layers(engine.chunks[0]).values():
        with torch.no_grad():
            size = (layer.lora_b.float() @ layer.lora_a.float()).norm() * layer.lora.scale
            layer.lora_b.mul_(share * layer.weight.float().norm() / size)


def _sample(folder: Path, dtype: str, logs: Path, prompts: int) -> Any:
    """The samples of one server, packed."""
    from benchmarks.studies.served_samples import packed, sample
    from configs.schema import RunConfig

    rollout = {"dtype": dtype, "max_total_tokens": 16384}
    config = RunConfig.model_validate(
        {"model": {"path": folder}, "task": {"type": "countdown"}, "rollout": rollout}
    )
    (samples,) = sample(config, logs, prompts=prompts, new_tokens=NEW_TOKENS, temperature=1.0, end=0)
    return packed(samples)


def _gaps(engine: Any, batch: Any) -> Iterator[str]:
    """Max Δp, mean Δp with the standard error of the mean over responses, max nats."""
    import torch

    (logprobs_T,) = engine.logprobs([batch], temperature=1.0)
    dp_T = (batch.rollout_logprobs_T.exp() - logprobs_T.exp()).abs()
    mask_T = batch.response_mask_T
    rows = [
        dp[mask].mean()
        for dp, mask in zip(dp_T.split(batch.lengths), mask_T.split(batch.lengths), strict=True)
    ]
    se = torch.stack(rows).std() / len(rows) ** 0.5
    yield f"{dp_T[mask_T].max():.2e}"
    yield f"{dp_T[mask_T].mean():.2e} ± {se:.1e}"
    yield f"{(batch.rollout_logprobs_T - logprobs_T)[mask_T].abs().max():.2e}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
