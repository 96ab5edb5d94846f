"""What torch really holds on a rank of the learner, for the planner's arithmetic to be compared with."""

import gc
from pathlib import Path
from typing import Any

from configs.schema.layout import LayoutConfig
from parallel.held_memory import KeptBytes, lasting_bytes
from parallel.megatron.groups import destroy_groups
from tests.support.megatron_workers import make_batch, make_engine, weighted_loss


def work_memory(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What one update of each job's engine holds on this rank, in bytes. A job has a folder, a layout, a
    dtype, ...: see ``_measure``.

    Starting processes costs more than the work, so all layouts of as many ranks run in one set of them.
    """
    found = {}
    for name, job in jobs.items():
        found[name] = _measure(**job)
        gc.collect()  # an engine holds groups, and each of these threads
        destroy_groups()
    return found


def _measure(
    folder: Path,
    layout: dict[str, Any],
    *,
    lengths: list[int],
    microbatches: int,
    vocab: int,
    **settings: Any,
) -> dict[str, int]:
    """``lengths`` are those of each micro-batch's sequences; ``settings`` are ``make_engine``'s."""
    engine = make_engine(folder, layout=LayoutConfig(**layout), **settings)
    batches = [make_batch(lengths, vocab=vocab) for _ in range(microbatches)]
    kept = KeptBytes(p for chunk in engine.chunks for p in chunk.parameters())
    with kept.watch():
        engine.update(batches, weighted_loss, temperature=1.0)
    return lasting_bytes(engine) | {
        "activations": kept.peak,
        "left": kept.now,
        "tokens": batches[0].num_tokens,
    }
