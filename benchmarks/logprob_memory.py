"""Chunked log-probs and entropy against plain log-softmax of whole logits: peak memory and seconds. Target: a
quarter of the memory.

    memory ratio = (peak resident memory with chunks - before) / (the same with whole logits)
    time ratio   = median seconds with chunks / median seconds with whole logits, forward and backward

Each variant runs in its own processes, in turn, so one cannot use memory that the other has freed. The chunked
backward computes each chunk's logits a second time: that is the price of the memory saved.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, in_own_process, line, parser, spread, write  # noqa: E402

TARGET = 0.25
CONFIG = {"tokens": 4096, "hidden": 512, "vocab": 32768, "chunk_tokens": 256, "dtype": "float32"}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--variant", choices=["chunked", "whole"], help="(internal) measure one variant in this process"
    )
    given = options.parse_args()
    if given.variant:
        print(json.dumps(measure(given.variant)))
        return
    rounds = 2 if given.quick else given.rounds
    about = announce(config=CONFIG, rounds=rounds)
    found: dict[str, list[dict]] = {"chunked": [], "whole": []}
    for _ in range(rounds):
        for variant, results in found.items():
            results.append(in_own_process(__file__, "--variant", variant))
    seconds = {variant: [r["seconds"] for r in results] for variant, results in found.items()}
    megabytes = {
        variant: statistics.median(r["megabytes"] for r in results) for variant, results in found.items()
    }
    for variant in found:
        print(line(variant, seconds[variant]), f"  peak {megabytes[variant]:,.0f} MiB above the start")
    memory = megabytes["chunked"] / megabytes["whole"]
    times = spread(seconds["chunked"])["median"] / spread(seconds["whole"])["median"]
    print(f"memory ratio {memory:.3f}   target: at most {TARGET}\ntime ratio   {times:.3f}")
    write(
        {
            **about, "memory_ratio": memory, "time_ratio": times, "target": TARGET,
            "megabytes": megabytes, "seconds": {v: spread(s) for v, s in seconds.items()},
        },
        given.json,
    )  # fmt: skip


def measure(variant: str) -> dict:
    import torch

    from parallel.megatron.vocab_parallel import linear_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(CONFIG["tokens"], CONFIG["hidden"], generator=generator).requires_grad_()
    weight_VH = (torch.randn(CONFIG["vocab"], CONFIG["hidden"], generator=generator) * 0.05).requires_grad_()
    targets_T = torch.randint(CONFIG["vocab"], (CONFIG["tokens"],), generator=generator)

    def chunked(rows: int):
        return linear_logprobs(
            hidden_TH[:rows],
            weight_VH,
            targets_T[:rows],
            vocab_size=CONFIG["vocab"],
            temperature=1.0,
            chunk_tokens=CONFIG["chunk_tokens"],
        )

    def whole(rows: int):
        logprobs_TV = torch.log_softmax(hidden_TH[:rows] @ weight_VH.t(), dim=-1)
        picked_T = logprobs_TV.gather(-1, targets_T[:rows, None]).squeeze(-1)
        return picked_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)

    def once(rows: int) -> float:
        began = time.perf_counter()
        logprobs_T, entropy_T = (chunked if variant == "chunked" else whole)(rows)
        (logprobs_T.sum() + entropy_T.sum()).backward()
        return time.perf_counter() - began

    once(8)  # first-use allocations do not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = once(CONFIG["tokens"])
    return {
        "seconds": seconds,
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
