"""How far an evaluation lies below the best one of the run so far."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.metric_names import known

ACCURACY, ERROR, COUNT = known("eval/accuracy"), known("eval/accuracy_error"), known("eval/count")
FAILED, FALL = known("eval/failed_fraction"), known("eval/accuracy_fall")


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
        """rows: the metrics of the steps before a resume. max_failed: an evaluation with a larger share of failed rewards, which
        count as wrong answers, is not compared; None: each is."""
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
        is_sound = self._max_failed is None or (metrics.get(FAILED) or 0.0) <= self._max_failed
        if measured is None or not is_sound:
            return {}
        if best is None or measured.accuracy > best.accuracy:
            self._best = measured
        if best is None:
            return {}
        return {FALL: (best.accuracy - measured.accuracy) / math.hypot(best.error, measured.error)}
