"""summary.json of a run: what its last lines say, for scripts."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from launch.run_folder import RunFolder, write_json

PARTS = ("sampling", "logprobs", "update", "sync", "evaluation")


def read_steps(metrics_file: Path) -> list[dict]:
    """The lines of metrics.jsonl; a torn last line (the run was killed while writing) is left out."""
    steps = []
    for line in metrics_file.read_text().splitlines():
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return steps


def write_summary(folder: RunFolder, *, seconds: Mapping[str, float]) -> dict:
    """Accuracy at the first and last evaluation (None where nothing was evaluated), steps, and seconds per part."""
    steps = read_steps(folder.path / "metrics.jsonl")
    measured = [s["eval/accuracy"] for s in steps if s.get("eval/accuracy") is not None]
    spent: dict[str, float] = defaultdict(float)
    for step in steps:
        for part in PARTS:
            spent[part] += step.get(f"time/{part}") or 0.0
    summary = {
        "accuracy_before": measured[0] if len(measured) > 1 else None,
        "accuracy_after": measured[-1] if measured else None,
        "steps": max((s["step"] for s in steps), default=0),
        "seconds": {**{k: round(v, 2) for k, v in spent.items()}, **{k: round(v, 2) for k, v in seconds.items()}},
    }
    write_json(folder.summary, summary)
    return summary
