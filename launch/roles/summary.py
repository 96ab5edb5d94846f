"""summary.json of a run: its last results, for scripts."""

from collections import defaultdict
from collections.abc import Mapping

from launch.processes.run_folder import RunFolder, write_json
from trainer.metric_names import TIME_PARTS
from trainer.tracking.held_out import ACCURACY, best_evaluation
from trainer.tracking.metrics_file import read_metrics


def write_summary(folder: RunFolder, *, seconds: Mapping, max_failed: float | None = None) -> dict:
    """Write accuracy at step 0, at the last evaluation and at the best one after a step, with their steps (None
    without one), steps, and seconds per part.

    seconds: by part. max_failed: an evaluation with a larger share of failed rewards cannot be the best; None: any can."""
    steps = read_metrics(folder.metrics)
    measured = {s["step"]: s[ACCURACY] for s in steps if s.get(ACCURACY) is not None}
    last = max(measured, default=0)
    best_step, best = best_evaluation((s for s in steps if s["step"] > 0), max_failed) or (None, None)
    spent: dict[str, float] = defaultdict(float)
    for step in steps:
        for part in TIME_PARTS:
            spent[part] += step.get(f"time/{part}") or 0.0
    summary = {
        "accuracy_before": measured.get(0),
        "accuracy_after": measured[last] if last > 0 else None,
        "accuracy_after_step": last if last > 0 else None,
        "accuracy_best": best,
        "accuracy_best_step": best_step,
        "steps": max((s["step"] for s in steps), default=0),
        "seconds": {part: round(value, 2) for part, value in (spent | dict(seconds)).items()},
    }
    write_json(folder.summary, summary, flush=True)
    return summary
