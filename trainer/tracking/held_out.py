"""Which evaluations of a run may be compared, and how far one lies below the best one so far."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.metric_names import known

ACCURACY, ERROR, COUNT = known("eval/accuracy"), known("eval/accuracy_error"), known("eval/count")
FAILED, FALL = known("eval/failed_fraction"), known("eval/accuracy_fall")


def is_sound(evaluated: Mapping[str, Any], max_failed: float | None, *, of: str = "eval") -> bool:
    """Whether at most ``max_failed`` of an evaluation's rewards failed (None: any share). They count as wrong answers.

    of: the part of the metrics' names before the last slash, such as ``eval/set/hard``."""
    return max_failed is None or (evaluated.get(f"{of}/failed_fraction") or 0.0) <= max_failed


def best_evaluation(rows: Iterable[Mapping[str, Any]], max_failed: float | None) -> tuple[int, float] | None:
    """(step, accuracy) of the best evaluation among the rows of metrics.jsonl; None without one that is sound. Of equal ones
    the earliest is the best, as for the best checkpoint."""
    sound = [row for row in rows if row.get(ACCURACY) is not None and is_sound(row, max_failed)]
    best = max(sound, key=lambda row: (row[ACCURACY], -row["step"]), default=None)
    return None if best is None else (best["step"], best[ACCURACY])


@dataclass(frozen=True, slots=True)
class _Measured:
    accuracy: float
    error: float

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> "_Measured | None":
        """The accuracy and its standard error. None without both: of one problem no error is known."""
        accuracy, error, count = (metrics.get(name) for name in (ACCURACY, ERROR, COUNT))
        if accuracy is None or error is None or not count:
            return None
        # All answers right, or all wrong, do not make an accuracy exact.
        return cls(accuracy, max(error, 1 / count))


class BestAccuracy:
    """The best held-out accuracy of a run so far."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), *, max_failed: float | None = None):
        """rows: the metrics of the steps before a resume. max_failed: see ``is_sound``. Evaluations that
        are not sound are not compared."""
        self._best: _Measured | None = None
        self._max_failed = max_failed
        for row in rows:
            self.fall_to(row)

    def fall_to(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """``{"eval/accuracy_fall": z}`` for the metrics of an evaluation that is not the first; else nothing.

            z = (a_best - a) / sqrt(e_best^2 + e^2)

        a: accuracy. e: its standard error, at least 1 / number of answers. z < 0: this one is the best so far.
        """
        measured, best = _Measured.of(metrics), self._best
        if measured is None or not is_sound(metrics, self._max_failed):
            return {}
        if best is None or measured.accuracy > best.accuracy:
            self._best = measured
        if best is None:
            return {}
        return {FALL: (best.accuracy - measured.accuracy) / math.hypot(best.error, measured.error)}
