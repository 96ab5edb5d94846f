"""Metrics that carry their reduction, so that merging micro-batches and ranks is exact under any split."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor


class Reduction(StrEnum):
    MEAN = "mean"
    """parts (sum, count); value sum / count."""
    SUM = "sum"
    """parts (sum,)."""
    MAX = "max"
    MIN = "min"
    ESS = "ess"
    """parts (sum of w, sum of w^2, count); value (sum w)^2 / (count sum w^2), the effective share of samples, in (0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value in parts that add up (or compare) exactly. ``value`` is None where nothing was counted."""

    reduction: Reduction
    parts: tuple[float, ...]

    @classmethod
    def mean(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        """Mean of the values on the mask; off-mask values (even NaN) never enter."""
        kept = _masked(values_T, mask_T)
        return cls(reduction=Reduction.MEAN, parts=(kept.sum().item(), float(kept.numel())))

    @classmethod
    def sum(cls, value: float) -> "Metric":
        return cls(reduction=Reduction.SUM, parts=(float(value),))

    @classmethod
    def max(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        kept = _masked(values_T, mask_T)
        return cls(reduction=Reduction.MAX, parts=(kept.max().item(),) if kept.numel() else ())

    @classmethod
    def min(cls, values_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        kept = _masked(values_T, mask_T)
        return cls(reduction=Reduction.MIN, parts=(kept.min().item(),) if kept.numel() else ())

    @classmethod
    def ess(cls, weights_T: Tensor, mask_T: Tensor | None = None) -> "Metric":
        kept = _masked(weights_T, mask_T)
        return cls(reduction=Reduction.ESS, parts=(kept.sum().item(), kept.square().sum().item(), float(kept.numel())))

    def merge(self, other: "Metric") -> "Metric":
        if self.reduction != other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} metric with a {other.reduction} metric")
        if self.reduction in (Reduction.MAX, Reduction.MIN):
            return Metric(reduction=self.reduction, parts=_extreme(self.reduction, self.parts + other.parts))
        return Metric(reduction=self.reduction, parts=tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    @property
    def value(self) -> float | None:
        if self.reduction is Reduction.MEAN:
            return self.parts[0] / self.parts[1] if self.parts[1] else None
        if self.reduction is Reduction.ESS:
            total, squares, count = self.parts
            return total * total / (count * squares) if count and squares else None
        return self.parts[0] if self.parts else None


def _extreme(reduction: Reduction, parts: tuple[float, ...]) -> tuple[float, ...]:
    """The greatest or least part; a NaN among them wins, wherever it stands (Python's max would depend on the order)."""
    if any(math.isnan(part) for part in parts):
        return (math.nan,)
    pick = max if reduction is Reduction.MAX else min
    return (pick(parts),) if parts else ()


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    kept = values.detach() if mask is None else values.detach()[mask]
    return kept.to(torch.float64).flatten()


Metrics = Mapping[str, Metric]


def merge_metrics(many: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge by name; a name that only some of them have is kept."""
    merged: dict[str, Metric] = {}
    for metrics in many:
        for name, metric in metrics.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def merge_over_ranks(metrics: Metrics, group: dist.ProcessGroup | None) -> dict[str, Metric]:
    """The exact merge over all ranks of ``group`` (None: this process alone), the same on each of them."""
    if group is None or dist.get_world_size(group) == 1:
        return dict(metrics)
    everyone: list[Metrics] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(metrics), group=group)
    return merge_metrics(everyone)


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers, without the metrics that counted nothing."""
    return {name: m.value for name, m in metrics.items() if m.value is not None}
