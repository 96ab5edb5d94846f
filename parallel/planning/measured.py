"""The expected mismatch of a pair of layouts: from a table of measurements, or by rule if the table lacks the
pair."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema.layout import parse_layout

Pair = tuple[int, bool, int]
"""(learner's tp, learner's sp, rollout's tp), which decide the mismatch of two layouts."""


def by_rule(pair: Pair) -> tuple[float, bool]:
    """(ratio of the two tp, sp): the rule expects less mismatch of the pair with the lower value."""
    low, high = sorted((pair[0], pair[2]))
    return high / low, pair[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A table of each pair's mismatch: the mean over responses of the greatest one. Empty: no table."""

    values: Mapping[Pair, float]
    step: float = 0.0
    """Twice the greatest standard error. Values are rounded to multiples of it and then compared: an order by
    "within two standard errors" itself would go in circles."""

    def expected(self, pair: Pair) -> float:
        """The rounded mismatch that is expected of a pair: its own value or, if it has none, the lowest value
        of the pairs that the rule ranks the same or worse, or infinity.

        A pair without a value therefore never ranks behind a measured pair that the rule ranks worse.
        """
        if pair in self.values:
            values = [self.values[pair]]
        else:
            values = [value for other, value in self.values.items() if by_rule(other) >= by_rule(pair)]
        lowest = min(values, default=math.inf)
        return round(lowest / self.step) * self.step if self.step and values else lowest


NO_TABLE = Measured(values={})


def read_measured(path: Path) -> Measured:
    """The table that ``tandem mismatch`` writes.

    Each of its ``pairs`` has ``learner`` and ``rollout`` (such as ``tp=2,sp`` and ``tp=1``), ``max_mean``, the
    mean over responses of the greatest mismatch, and optionally ``max_mean_se``, its standard error. Pairs that
    differ in pp, ep or dp alone count as one, with their greatest value.

    Raises ValueError naming the file and the problem.
    """
    values: dict[Pair, float] = {}
    errors = [0.0]
    try:
        for row in json.loads(Path(path).read_text(encoding="utf-8"))["pairs"]:
            learner, rollout = parse_layout(row["learner"]), _layout_parts(row["rollout"])
            pair = (learner.tp, learner.sp, int(rollout.get("tp", 1)))
            value, error = float(row["max_mean"]), row.get("max_mean_se")
            errors.append(0.0 if error is None else float(error))
            if not (0 <= value < math.inf and 0 <= errors[-1] < math.inf):
                raise ValueError(f"max_mean={value} or max_mean_se={error} is no size of a mismatch")
            values[pair] = max(value, values.get(pair, 0.0))
    except OSError as error:
        raise ValueError(f"--measured {path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--measured {path} is no table of `tandem mismatch` (pairs of learner, rollout, max_mean): {error!r}"
        ) from error
    return Measured(values=values, step=2 * max(errors))


def _layout_parts(text: str) -> dict[str, str]:
    """``tp=2,sp`` -> {tp: 2, sp: ""}."""
    return {part.partition("=")[0].strip(): part.partition("=")[2] for part in text.split(",")}
