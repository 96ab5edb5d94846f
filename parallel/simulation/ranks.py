"""All other ranks of a run, in a process that is one of them: collectives are counted, and move nothing.

Every other rank is taken to have what this one has. A gathered tensor is this rank's, repeated; a sum of known
integers is theirs times the number of ranks.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Kind:
    """Collectives that are counted together."""

    operation: str
    group: str
    size: int


class Collectives:
    """Takes the place of every process group's operations, and counts them."""

    def __init__(self) -> None:
        self.calls: defaultdict[Kind, int] = defaultdict(int)
        self.bytes: defaultdict[Kind, int] = defaultdict(int)
        self.message: tuple[int, ...] = ()
        """Shape of the tensor that a neighbour in the pipeline sends: all micro-batches of a simulation are
        alike."""

    def __call__(self, device: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        operation, size = self.count(func, args)
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if operation in ("allgather_base", "allgather"):
            _gather(device, args)
        elif operation == "allreduce":
            _reduce(device, args, size)
        elif operation == "recv" and not tensors[0].dtype.is_floating_point:
            device.know(tensors[0], torch.tensor(self.message))
        return _result(func, args)

    def count(self, func: Any, args: tuple) -> tuple[str, int]:
        """(operation, ranks of its group). ``bytes`` are of a rank's whole tensors, the larger side of a gather or a
        scatter."""
        operation = func._overloadpacket.__name__.strip("_")
        group = next((g for g in map(_as_group, args) if g is not None), None)
        sizes = [
            sum(t.numel() * t.element_size() for t in tree_leaves(arg) if self.counts(t)) for arg in args
        ]
        if group is None:
            return operation, 1
        if any(sizes):
            kind = Kind(operation, group.group_desc, group.size())
            self.calls[kind] += 1
            self.bytes[kind] += max(sizes)
        return operation, group.size()

    def counts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_meta


def _as_group(value: Any) -> ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return ProcessGroup.unbox(value)
    except RuntimeError:  # the operation of a reduction
        return None


def _gather(device: Any, args: tuple) -> None:
    out, own = args[:2]
    own = tree_leaves(own)[0]
    if (numbers := device.numbers(own)) is None:
        return
    for place in tree_leaves(out):
        gathered = numbers.flatten().repeat(place.numel() // own.numel()).view(place.shape)
        if place.is_meta:
            device.know(place, gathered)
        else:
            place.copy_(gathered)


def _reduce(device: Any, args: tuple[Any, ...], size: int) -> None:
    tensors = tree_leaves(args[0])
    is_sum = len(args) > 2 and "SUM" in str(getattr(args[2], "op", "SUM"))
    for tensor in tensors:
        numbers = device.numbers(tensor)
        if numbers is not None and is_sum and not numbers.dtype.is_floating_point:
            numbers.mul_(size)


def _result(func: Any, args: tuple) -> Any:
    """In the form of the operation's own: its tensors, if it gives any back, and a work that is done."""
    work = FakeWork().boxed() if hasattr(FakeWork, "boxed") else FakeWork()
    returns = [str(r.type) for r in func._schema.returns]
    if len(returns) == 1:
        return work
    return args[0], work
