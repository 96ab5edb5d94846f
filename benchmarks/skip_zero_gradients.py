"""One update without backward passes for groups that have no signal, against the same update with all: CPU seconds.

    speedup = median over rounds of (all / skipping), the two in turn within a round

A share of the groups is without signal: their samples have micro-batches of their own, as ``trainer/batch/sharing_out.py``
packs them, and a loss of zero. One process with one thread, so that CPU seconds are those of the update: forward, backward,
clip and step, as in a run with one minibatch.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import hardware, parser, write  # noqa: E402
from benchmarks.shared_prompts import SIZES, WORKLOADS, batch_of, engine_of  # noqa: E402

NAMES = tuple(WORKLOADS)[:2]
SHARES = (0.25, 0.5, 0.75)
"""Of the groups, without signal. The quickstart has 0.38 in its first 25 steps and 0.5 to 0.6 later."""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    print(json.dumps({"hardware": hardware(), "model": SIZES, "rounds": rounds}, indent=2))
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
    write({"hardware": hardware(), "model": SIZES, "results": results}, given.json)


def compare(
    engine: Any,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: Any,
    share: float,
    rounds: int,
) -> dict[str, Any]:
    from tests.support.megatron_workers import weighted_loss

    batch = batch_of(prompts, samples, prompt_tokens, response_tokens)
    flat = round(prompts * share) * samples
    parts = [batch.select(list(range(flat, prompts * samples))), batch.select(list(range(flat)))]
    flat_ids = set(parts[1].sequence_ids_S.tolist())

    def loss_fn(one: Any, logprobs_T: Any, entropy_T: Any) -> tuple[Any, Any]:
        loss, found = weighted_loss(one, logprobs_T, entropy_T)
        return (loss * 0.0 if flat_ids.issuperset(one.sequence_ids_S.tolist()) else loss), found

    # All backward passes have one micro-batch, as without ``learner.skip_zero_gradients``.
    def all_passes() -> float:
        def loss_of_signal(one: Any, logprobs_T: Any, entropy_T: Any) -> tuple[Any, Any]:
            is_flat = [number in flat_ids for number in one.sequence_ids_S.tolist()]
            weights_T = one.importance_weights_T.clone()
            bounds = one.cu_seqlens.tolist()
            for row, flat_one in enumerate(is_flat):
                if flat_one:
                    weights_T[bounds[row] : bounds[row + 1]] = 0.0
            masked = one.with_fields(
                importance_weights_T=weights_T, aggregation_T=one.aggregation_T * (weights_T != 0)
            )
            return weighted_loss(masked, logprobs_T, entropy_T)

        return engine.update([batch], loss_of_signal, temperature=1.0).grad_norm

    def skipping() -> float:
        return engine.update(parts, loss_fn, temperature=1.0, is_skipped=[False, True]).grad_norm

    sides = {"all": all_passes, "skipping": skipping}
    norms = {name: side() for name, side in sides.items()}  # also what is done on first use
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sorted(sides, reverse=turn % 2 == 1):
            began = time.process_time()
            sides[name]()
            seconds[name].append(time.process_time() - began)
    ratios = [a / s for a, s in zip(seconds["all"], seconds["skipping"], strict=True)]
    return {
        "seconds": {name: _spread(values) for name, values in seconds.items()},
        "speedup": _spread(ratios),
        "gap": abs(norms["skipping"] / norms["all"] - 1),
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})"


if __name__ == "__main__":
    main()
