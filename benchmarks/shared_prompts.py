"""One update with each prompt computed once for its samples, against the same update on whole sequences: CPU seconds,
bytes that autograd keeps, and whether the results are the same.

    speedup = median over rounds of (whole / shared), the two in turn within a round
    places  = tokens that go through the layers

One process with one thread, so that CPU seconds are those of the update. Score pass, forward and backward, clip and step
are counted: the step of a run with several minibatches.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, cell, in_turn, parser, ratios, write  # noqa: E402

SIZES = {
    "vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
WORKLOADS = {
    "quickstart: 32 x 8, prompts of 10, responses of 3 to 14": (32, 8, 10, lambda r: int(r.integers(3, 15))),
    "8 x 8, prompts of 256, responses of 64": (8, 8, 256, lambda r: 64),
    "8 x 8, prompts of 256, responses lognormal around 128": (
        8, 8, 256, lambda r: int(min(128 * r.lognormal(0, 0.7), 1024)) + 1,
    ),
    "2 x 16, prompts of 1024, responses lognormal around 128": (
        2, 16, 1024, lambda r: int(min(128 * r.lognormal(0, 0.7), 1024)) + 1,
    ),
    "32 x 1, prompts of 64, responses of 64: nothing to share": (32, 1, 64, lambda r: 64),
}  # fmt: skip


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    about = announce(model=SIZES, rounds=rounds)
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(Path(folder))
        results = {name: compare(engine, *workload, rounds) for name, workload in WORKLOADS.items()}
    for name, result in results.items():
        print(
            f"{name}\n    places {result['places']}   CPU s {result['seconds']}   speedup {result['speedup']}   "
            f"MiB kept {result['mib']}   log-probs differ by {result['gap']:.1e}, gradient norm by {result['norm_gap']:.1e}"
        )
    write({**about, "results": results}, given.json)


def engine_of(folder: Path) -> Any:
    import torch

    from tests.support.megatron_workers import make_engine, make_hf_model

    torch.set_num_threads(1)
    model = make_hf_model(folder / "model", "qwen3", **SIZES)
    # The rate is almost zero, so both sides always have the same weights.
    return make_engine(model, lr=1e-30, steps=10_000)


def batch_of(prompts: int, samples: int, prompt_tokens: int, response_tokens: Any) -> Any:
    import numpy as np
    import torch

    from parallel.packing import pack_sequences

    rng = np.random.default_rng(0)
    ids, masks = [], []
    for _ in range(prompts):
        prompt = rng.integers(0, SIZES["vocab_size"], prompt_tokens)
        for _ in range(samples):
            response = rng.integers(0, SIZES["vocab_size"], response_tokens(rng))
            ids.append(np.concatenate([prompt, response]))
            masks.append(np.arange(len(ids[-1])) >= prompt_tokens)
    batch = pack_sequences(
        token_ids=ids,
        response_masks=masks,
        rollout_logprobs=[np.zeros(len(row)) for row in ids],
        sequence_ids=range(len(ids)),
        share_prompts=True,
    )
    weights_T = torch.from_numpy(rng.random(batch.num_tokens, dtype=np.float32)) * batch.response_mask_T
    return batch.with_fields(importance_weights_T=weights_T, aggregation_T=weights_T * 0.01)


def compare(
    engine: Any, prompts: int, samples: int, prompt_tokens: int, response_tokens: Any, rounds: int
) -> dict[str, Any]:
    from tests.support.memory_workers import KeptBytes

    shared = batch_of(prompts, samples, prompt_tokens, response_tokens)
    whole = shared.with_fields(prompt_ids_S=None, prompt_lengths_S=None)
    sides, logprobs, norms, kept = {"shared": shared, "whole": whole}, {}, {}, {}
    for name, batch in sides.items():  # also what is done on first use
        held = KeptBytes(parameter for chunk in engine.chunks for parameter in chunk.parameters())
        with held.watch():
            (logprobs[name],), norms[name] = step(engine, batch)
        kept[name] = held.peak
    seconds = in_turn({name: partial(step, engine, batch) for name, batch in sides.items()}, rounds)
    mask_T = shared.response_mask_T
    gap_T = (logprobs["shared"] - logprobs["whole"]).abs()[mask_T]
    plan = engine.chunks[0].pack(shared.cu_seqlens, shared.positions_T, prompts=shared.prompts).plan
    return {
        "places": {"shared": len(plan.to_model_order(shared.tokens_T)), "whole": whole.num_tokens},
        "seconds": {name: cell(values) for name, values in seconds.items()},
        "speedup": cell(ratios(seconds["whole"], seconds["shared"])),
        "mib": {name: round(size / 2**20, 1) for name, size in kept.items()},
        "gap": gap_T.max().item(),
        "norm_gap": abs(norms["shared"] / norms["whole"] - 1),
    }


def step(engine: Any, batch: Any) -> tuple[list[Any], float]:
    from tests.support.megatron_workers import weighted_loss

    scored = engine.logprobs([batch], temperature=1.0)
    return scored, engine.update([batch], weighted_loss, temperature=1.0).grad_norm


if __name__ == "__main__":
    main()
