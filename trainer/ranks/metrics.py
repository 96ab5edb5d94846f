"""Metrics that carry their reduction, so that merging micro-batches and ranks is exact under any split.

Parts are sums in float64 (or extremes), so merging is adding. STD and PEARSON do not change with a constant
shift. They keep more digits if the caller subtracts a constant near the values (1 from weights and from
probabilities); it must not depend on the batch. A distribution is one MEAN per fixed bin: the share of samples.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor


class Reduction(StrEnum):
    MEAN = "mean"
    """parts (sum, count); value sum / count. Weighted: (sum of w x, sum of w)."""
    SUM = "sum"
    """parts (sum,)."""
    LOSS = "loss"
    """parts (sum,) of one minibatch; a step has the mean of its minibatches' sums (``per_minibatch``)."""
    MAX = "max"
    MIN = "min"
    ESS = "ess"
    """parts (sum of w, sum of w^2, count); value (sum w)^2 / (count sum w^2), the effective share of samples,
    in (0, 1]."""
    STD = "std"
    """parts (count, sum, sum of squares); value the population's standard deviation (divided by the count), 0
    for one sample."""
    PEARSON = "pearson"
    """parts (count, sum x, sum y, sum x^2, sum y^2, sum x y); value the correlation, None where x or y does
    not vary beyond rounding."""


_ROUNDING = 1e-13
"""A variance below this share of the mean square is rounding of float64 sums of a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value in parts that add up (or compare) exactly. ``value`` is None where nothing was counted."""

    reduction: Reduction
    parts: tuple[float, ...]

    @classmethod
    def mean(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        """Mean of the values on the mask, or share that is True. Values off the mask may be anything, even NaN."""
        if values_T.dtype == torch.bool:
            hits_T = values_T if mask_T is None else values_T & mask_T
            return cls.quotient(torch.count_nonzero(hits_T).item(), _count(values_T, mask_T))
        return cls.quotient(_filled(values_T, mask_T, 0.0).sum().item(), _count(values_T, mask_T))

    @classmethod
    def quotient(cls, total: float, count: float) -> "Metric":
        """The mean of a known sum and count, or weighted sum and sum of weights."""
        return cls(reduction=Reduction.MEAN, parts=(float(total), float(count)))

    @classmethod
    def weighted_mean(cls, values_T: Tensor, weights_T: Tensor) -> "Metric":
        """sum w x / sum w, with w >= 0."""
        weights_T = _filled(weights_T, None, 0.0)
        return cls.quotient((weights_T * _filled(values_T, None, 0.0)).sum().item(), weights_T.sum().item())

    @classmethod
    def sum(cls, value: float) -> "Metric":
        return cls(reduction=Reduction.SUM, parts=(float(value),))

    @classmethod
    def loss(cls, value: float) -> "Metric":
        return cls(reduction=Reduction.LOSS, parts=(float(value),))

    @classmethod
    def max(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        parts = (_filled(values_T, mask_T, -math.inf).max().item(),) if _count(values_T, mask_T) else ()
        return cls(reduction=Reduction.MAX, parts=parts)

    @classmethod
    def min(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        parts = (_filled(values_T, mask_T, math.inf).min().item(),) if _count(values_T, mask_T) else ()
        return cls(reduction=Reduction.MIN, parts=parts)

    @classmethod
    def ess(cls, weights_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        kept_T = _filled(weights_T, mask_T, 0.0)
        return cls(
            reduction=Reduction.ESS,
            parts=(kept_T.sum().item(), (kept_T @ kept_T).item(), _count(weights_T, mask_T)),
        )

    @classmethod
    def std(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        """Standard deviation of values near 0 (see the top of the file)."""
        kept_T = _filled(values_T, mask_T, 0.0)
        return cls(
            reduction=Reduction.STD,
            parts=(_count(values_T, mask_T), kept_T.sum().item(), (kept_T @ kept_T).item()),
        )

    @classmethod
    def pearson(cls, x_T: Tensor, y_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        """Correlation of two equally long lists of values near 0 (see the top of the file)."""
        x, y = _filled(x_T, mask_T, 0.0), _filled(y_T, mask_T, 0.0)
        sums = (x.sum(), y.sum(), x @ x, y @ y, x @ y)
        return cls(reduction=Reduction.PEARSON, parts=(_count(x_T, mask_T), *(s.item() for s in sums)))

    def merge(self, other: "Metric") -> "Metric":
        if self.reduction != other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} metric with a {other.reduction} metric")
        if self.reduction in (Reduction.MAX, Reduction.MIN):
            return Metric(reduction=self.reduction, parts=_extreme(self.reduction, self.parts + other.parts))
        return Metric(
            reduction=self.reduction, parts=tuple(a + b for a, b in zip(self.parts, other.parts, strict=True))
        )

    @property
    def value(self) -> float | None:
        if self.reduction is Reduction.MEAN:
            return self.parts[0] / self.parts[1] if self.parts[1] else None
        if self.reduction is Reduction.ESS:
            total, squares, count = self.parts
            return total * total / (count * squares) if count and squares else None
        if self.reduction is Reduction.STD:
            count, total, squares = self.parts
            # Rounding may leave -1e-17 of a variance of 0; NaN stays NaN.
            return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else None
        if self.reduction is Reduction.PEARSON:
            return _correlation(*self.parts)
        return self.parts[0] if self.parts else None


def _extreme(reduction: Reduction, parts: tuple[float, ...]) -> tuple[float, ...]:
    """The greatest or least part; NaN if one of them is NaN (Python's max would depend on the order)."""
    if any(math.isnan(part) for part in parts):
        return (math.nan,)
    pick = max if reduction is Reduction.MAX else min
    return (pick(parts),) if parts else ()


def _correlation(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float | None:
    x_variance, y_variance = count * xx - x * x, count * yy - y * y
    if x_variance <= _ROUNDING * count * xx or y_variance <= _ROUNDING * count * yy:
        return None
    correlation = (count * xy - x * y) / math.sqrt(x_variance) / math.sqrt(y_variance)
    return correlation if math.isnan(correlation) else min(max(correlation, -1.0), 1.0)


def _filled(values_T: Tensor, mask_T: Tensor | None, fill: float) -> Tensor:
    """float64 [T], ``fill`` off the mask: several times cheaper than picking the masked values out."""
    values_T = values_T.detach().to(torch.float64)
    return (values_T if mask_T is None else torch.where(mask_T, values_T, fill)).flatten()


def _count(values_T: Tensor, mask_T: Tensor | None) -> float:
    return float(values_T.numel() if mask_T is None else torch.count_nonzero(mask_T).item())


Metrics = Mapping[str, Metric]


def merge_metrics(many: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge by name; names that only some of them have are kept."""
    merged: dict[str, Metric] = {}
    for metrics in many:
        for name, metric in metrics.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def scale_losses(metrics: Metrics, factor: float) -> dict[str, Metric]:
    """The metrics, with the terms of the loss times ``factor``."""
    return _with_losses(metrics, lambda loss: Metric.loss(loss * factor))


def per_minibatch(metrics: Metrics) -> dict[str, Metric]:
    """The metrics of a minibatch, with losses that merge to their mean over the minibatches of a step."""
    return _with_losses(metrics, lambda loss: Metric.quotient(loss, 1))


def _with_losses(metrics: Metrics, change: Callable[[float], Metric]) -> dict[str, Metric]:
    return {n: change(m.parts[0]) if m.reduction is Reduction.LOSS else m for n, m in metrics.items()}


def merge_over_ranks(metrics: Metrics, group: dist.ProcessGroup | None) -> dict[str, Metric]:
    """The exact merge over all ranks of ``group`` (None: this process alone), the same on every rank."""
    if group is None or dist.get_world_size(group) == 1:
        return dict(metrics)
    everyone: list[Metrics] = [metrics] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(metrics), group=group)
    return merge_metrics(everyone)


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers; metrics that counted nothing are left out."""
    return {name: m.value for name, m in metrics.items() if m.value is not None}
