"""One long sequence trained whole and split over context-parallel ranks: memory of autograd against the planner's
arithmetic, and whether the step is the same.

    held    = the most bytes that autograd keeps on a rank in one update, each storage once
    planned = ``activations.activation_bytes`` of that layout
    above   = (greatest resident memory of the rank - that before the update)

Every rank is a process with one thread. Seconds are of a single update, and do not compare layouts: the ranks of
one layout share the machine's cores.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, parser, write  # noqa: E402

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 384, "head_dim": 32,
}  # fmt: skip
TOKENS, QUICK_TOKENS = 32768, 2048
CHUNK_TOKENS = 7
"""``make_engine``'s chunks of the vocabulary's logits."""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--cp", type=int, nargs="+", default=[1, 2])
    given = options.parse_args()
    tokens = QUICK_TOKENS if given.quick else TOKENS
    about = announce(model=SIZES, tokens=tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = {cp: run_layout(cp, tokens, Path(folder)) for cp in given.cp}
    logprobs = {cp: result.pop("logprobs_T") for cp, result in found.items()}
    first = given.cp[0]
    for cp, result in found.items():
        gap = (logprobs[cp] - logprobs[first]).abs().max().item()
        result["gap"], result["norm_ratio"] = gap, result["norm"] / found[first]["norm"]
        held = ", ".join(f"{size / 2**20:.1f}" for size in result["held"])
        above = ", ".join(f"{size / 2**20:.0f}" for size in result["above"])
        print(
            f"cp={cp}  held {held} MiB   planned {result['planned'] / 2**20:.1f} MiB   above {above} MiB   "
            f"{result['seconds']:.0f} s   log-probs differ by {gap:.1e}   norm times {result['norm_ratio']:.7f}"
        )
    write({**about, "layouts": found}, given.json)


def run_layout(cp: int, tokens: int, folder: Path) -> dict[str, Any]:
    from configs.schema.layout import LayoutConfig
    from parallel.planning.activations import activation_bytes
    from parallel.planning.architecture import architecture_of
    from parallel.planning.work import Work
    from tests.support.megatron_workers import make_hf_model, run_ranks

    model = make_hf_model(folder / f"model{cp}", "qwen3", max_position_embeddings=tokens, **SIZES)
    ranks = run_ranks(update_of_rank, cp, folder / f"ranks{cp}", model, cp, tokens, deadline_s=3600)
    work = Work(
        device="cpu", dtype="float32", token_budget=tokens, chunk_tokens=CHUNK_TOKENS, recompute="none",
        distributed_optimizer=True, num_microbatches=1,
    )  # fmt: skip
    architecture = architecture_of(model)
    return {
        "planned": activation_bytes(architecture, LayoutConfig(cp=cp, dp=1), work, 0),
        "held": [rank["held"] for rank in ranks],
        "above": [rank["above"] for rank in ranks],
        "seconds": max(rank["seconds"] for rank in ranks),
        "norm": ranks[0]["norm"],
        "logprobs_T": ranks[0]["logprobs_T"],
    }


def update_of_rank(model: Path, cp: int, tokens: int) -> dict[str, Any]:
    """One update on one sequence, on this rank."""
    from configs.schema.layout import LayoutConfig
    from tests.support.megatron_workers import make_batch, make_engine, weighted_loss
    from tests.support.memory_workers import KeptBytes

    engine = make_engine(model, layout=LayoutConfig(cp=cp, dp=1))
    batch = make_batch([tokens + 1], vocab=SIZES["vocab_size"])
    engine.logprobs([make_batch([9])], temperature=1.0)  # first-use allocations do not count
    kept = KeptBytes(parameter for chunk in engine.chunks for parameter in chunk.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with kept.watch():
        result = engine.update([batch], weighted_loss, temperature=1.0)
    return {
        "seconds": time.perf_counter() - began,
        "held": kept.peak,
        "above": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
        "norm": result.grad_norm,
        "logprobs_T": result.outputs[0]["logprobs_T"],
    }


if __name__ == "__main__":
    main()
