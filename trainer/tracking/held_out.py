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
    count: float
    """Answers."""

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> "_Measured | None":
        """The accuracy and its standard error. None without both: of one problem no error is known."""
        accuracy, error, count = (metrics.get(name) for name in (ACCURACY, ERROR, COUNT))
        if accuracy is None or error is None or not count:
            return None
        return cls(accuracy, error, count)


class BestAccuracy:
    """The best held-out accuracy of a run so far."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, max_failed: float | None):
        """rows: the metrics of the steps before a resume. max_failed: see ``is_sound``. Evaluations that
        are not sound are not compared."""
        self._best: _Measured | None = None
        self._max_failed = max_failed
        for row in rows:
            self.fall_to(row)

    def fall_to(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """``{"eval/accuracy_fall": z}`` for the metrics of an evaluation that is not the first; else nothing.

            z = (a_best - a) / sqrt(s_best^2 + s^2)    s^2 = max(e^2, q (1 - q) / n)
            q = (n_best a_best + n a + 1) / (n_best + n + 2)

        a: accuracy. n: number of answers. e: standard error of a, from problem to problem. q: the share of right answers in
        both evaluations, with one right and one wrong answer added. z < 0: this one is the best so far.

        The binomial variance q (1 - q) / n is at most the expectation of e^2, if the samples of a problem are independent. e
        itself is near 0 when few problems happen to have equal shares of right answers.
        """
        measured, best = _Measured.of(metrics), self._best
        if measured is None or not is_sound(metrics, self._max_failed):
            return {}
        if best is None or measured.accuracy > best.accuracy:
            self._best = measured
        if best is None:
            return {}
        both = (best, measured)
        right = (sum(each.count * each.accuracy for each in both) + 1) / (
            sum(each.count for each in both) + 2
        )
        errors = [max(each.error, math.sqrt(right * (1 - right) / each.count)) for each in both]
        return {FALL: (best.accuracy - measured.accuracy) / math.hypot(*errors)}
