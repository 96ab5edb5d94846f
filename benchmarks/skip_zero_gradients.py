"""One update without backward passes for groups that have no signal, against the same update with all: CPU seconds.

    speedup = median over rounds of (all / skipping), the two in turn within a round

A share of the groups is without signal: their samples have micro-batches of their own, as ``trainer/batch/sharing_out.py``
packs them, and a loss of zero. One process with one thread, so that CPU seconds are those of the update: forward, backward,
clip and step, as in a run with one minibatch.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, cell, in_turn, parser, ratios, write  # noqa: E402
from benchmarks.shared_prompts import SIZES, WORKLOADS, batch_of, engine_of  # noqa: E402

NAMES = tuple(WORKLOADS)[:2]
SHARES = (0.25, 0.5, 0.75)
"""Shares of groups without signal. The quickstart has 0.38 in its first 25 steps and 0.5 to 0.6 later."""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    about = announce(model=SIZES, rounds=rounds)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(Path(folder))
        for name in NAMES:
            for share in SHARES:
                results[f"{name}; {share:.0%} without signal"] = compare(
                    engine, *WORKLOADS[name], share, rounds
                )
    for name, result in results.items():
        print(
            f"{name}\n    CPU s {result['seconds']}   speedup {result['speedup']}   norm differs by {result['gap']:.1e}"
        )
    write({**about, "results": results}, given.json)


def compare(
    engine: Any,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: Any,
    share: float,
    rounds: int,
) -> dict[str, Any]:
    import torch

    from tests.support.megatron_workers import weighted_loss

    batch = batch_of(prompts, samples, prompt_tokens, response_tokens)
    num_flat = round(prompts * share) * samples
    has_signal_T = torch.arange(batch.num_tokens) >= batch.cu_seqlens[num_flat]
    batch = batch.with_fields(
        importance_weights_T=batch.importance_weights_T * has_signal_T,
        aggregation_T=batch.aggregation_T * has_signal_T,
    )
    sequences = list(range(prompts * samples))
    parts = [batch.select(sequences[num_flat:]), batch.select(sequences[:num_flat])]

    def update(microbatches: list[Any], **options: Any) -> float:
        return engine.update(microbatches, weighted_loss, temperature=1.0, **options).grad_norm

    sides = {"all": lambda: update([batch]), "skipping": lambda: update(parts, forward_only=[False, True])}
    norms = {name: side() for name, side in sides.items()}  # also what is done on first use
    seconds = in_turn(sides, rounds)
    return {
        "seconds": {name: cell(values) for name, values in seconds.items()},
        "speedup": cell(ratios(seconds["all"], seconds["skipping"])),
        "gap": abs(norms["skipping"] / norms["all"] - 1),
    }


if __name__ == "__main__":
    main()
