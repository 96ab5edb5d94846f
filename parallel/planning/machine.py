"""The hardware of an estimate: seconds that FLOPs and bytes take."""

from dataclasses import dataclass

from configs.schema.hardware import HardwareConfig
from configs.schema.layout import LayoutConfig
from parallel.planning.flops import Flops
from parallel.planning.traffic import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices of one kind, in nodes."""

    hardware: HardwareConfig
    gpus_per_node: int

    def training_seconds(self, flops: Flops, dtype: str) -> float:
        attained, peak = self.hardware.attained, 1e12 * getattr(self.hardware.peak_tflops, dtype)
        matrices = (flops.matrices + flops.output) / (peak * attained.train_matmul)
        return matrices + (flops.attention + flops.rule) / (peak * attained.train_attention)

    def memory_seconds(self, size: float) -> float:
        return size / (1e9 * self.hardware.memory_gb_s * self.hardware.attained.memory)

    def link_seconds(self, size: float, ranks: int) -> float:
        """Of bytes that a rank sends in a group that ``ranks`` consecutive ranks span."""
        is_inside = ranks <= self.gpus_per_node
        rate = self.hardware.node_link_gb_s if is_inside else self.hardware.network_gb_s
        return size / (1e9 * rate * self.hardware.attained.links)

    def call_seconds(self, calls: float) -> float:
        return calls * self.hardware.overheads.collective_s


def spanned(layout: LayoutConfig, group: Group | str) -> int:
    """Consecutive ranks that a group of the learner lies within. Megatron's order: tp, cp, dp, pp; experts over
    consecutive ranks."""
    inner = layout.tp * layout.cp
    spans = {
        "tensor": layout.tp,
        "context": inner,
        "expert": layout.ep,
        "data": inner * layout.dp_size,
        "pipeline": layout.world_size,
    }
    return spans[group]
