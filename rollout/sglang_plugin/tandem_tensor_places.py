"""Where the learner's tensors belong in SGLang's parameters, asked of SGLang's own loader.

It loads tensors without memory (on the meta device), and what it would copy is recorded. So fused, sharded and
expert weights need no table here. Nothing is received here: ``tandem_weight_receiver.py``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sent:
    """A whole tensor as the learner announces it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of SGLang's loader."""

    part: Tensor
    """View of a parameter."""
    source: Tensor
    """View of the sent tensor, without memory: which part of it is copied."""

    def is_whole(self, sent: Sent) -> bool:
        """Whether the parameter's part is, byte for byte, the sent tensor."""
        return (
            self.part.dtype == sent.dtype
            and self.part.is_contiguous()
            and self.source.is_contiguous()
            and self.part.numel() == self.source.numel() == sent.shape.numel()
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a sent tensor, in memory that all rows of a bucket share."""

    memory: Tensor
    """uint8 [bytes]."""
    copies: list[tuple[Tensor, Tensor]]
    """Parts of parameters, and the views of ``memory`` that belong there."""

    def load(self) -> None:
        for part, source in self.copies:
            part.copy_(source)


def split_rows(sent: Sent, copies: Sequence[Copy], memory: Tensor) -> list[Rows] | None:
    """All rows of a tensor (of a vector: its numbers), as many at a time as fit into ``memory``, uint8. None where one
    does not fit, or where a copy does not take the same of one row after another."""
    if not sent.nbytes or not sent.shape:
        return None
    num_rows, width = sent.shape[0], sent.shape[1:].numel()
    at_once = memory.numel() // (width * sent.dtype.itemsize)
    if not at_once:
        return None
    for copy in copies:
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(copy.source.shape[1:], copy.source.stride()[1:], strict=True)
        )
        is_by_rows = copy.source.dim() > 0 and copy.source.stride(0) == width
        if (
            not is_by_rows
            or copy.part.shape != copy.source.shape
            or copy.source.storage_offset() % width + extent > width
        ):
            return None
    rows = []
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        flat = memory[: (end - start) * width * sent.dtype.itemsize]
        numbers, taken = flat.view(sent.dtype), []
        for copy in copies:
            # The copy's first row is this one of the tensor.
            before, column = divmod(int(copy.source.storage_offset()), width)
            first, last = max(start - before, 0), min(end - before, copy.source.shape[0])
            if first < last:
                shape = (last - first, *copy.source.shape[1:])
                view = numbers.as_strided(
                    shape, copy.source.stride(), (before + first - start) * width + column
                )
                taken.append((copy.part[first:last], view))
        rows.append(Rows(flat, taken))
    return rows


@dataclass(slots=True)
class Places:
    """What SGLang's loader would do with tensors."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    """By name of the sent tensor. Of other tensors SGLang's loader makes more than copies."""
    filled: list[Tensor] = field(default_factory=list)
    """Parts of parameters that get a constant, such as padding."""


class Recorder(TorchDispatchMode):
    """Records what would be copied from tensors on the meta device, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.filled: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and args[1].device.type == "meta" and args[0].device.type != "meta":
            self.copies.append((args[0], args[1]))
            return args[0]
        if func in (aten.fill_.Scalar, aten.zero_.default) and args[0].device.type != "meta":
            self.filled.append(args[0])
        return func(*args, **(kwargs or {}))


def record(load_weights: Callable, tensors: Sequence[Sent]) -> Places:
    """What ``load_weights`` would copy where. Tensors at which it fails without their content are left out."""
    empty = {sent.name: torch.empty(sent.shape, dtype=sent.dtype, device="meta") for sent in tensors}
    try:
        with Recorder() as recorder:
            load_weights(list(empty.items()))
    except Exception as error:
        if len(tensors) == 1:
            logger.info("tandem: SGLang loads %s itself (%s)", tensors[0].name, error)
            return Places()
        half = len(tensors) // 2
        one, other = record(load_weights, tensors[:half]), record(load_weights, tensors[half:])
        return Places(one.copies | other.copies, one.filled + other.filled)
    name_of = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    places = Places({name: [] for name in empty}, recorder.filled)
    for part, source in recorder.copies:
        name = name_of.get(source.untyped_storage()._cdata)
        if name is None:  # computed from sent tensors; from which is unknown
            return Places()
        places.copies[name].append(Copy(part.detach(), source))
    return places


def lies_behind(one: Tensor, other: Tensor) -> bool:
    is_next = other.data_ptr() == one.data_ptr() + one.nbytes
    return is_next and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def left_out(parameters: Mapping[str, Tensor], parts: Sequence[Tensor]) -> str | None:
    """Names the parameters that ``parts`` do not cover, counted in elements."""
    covered: dict[int, int] = {}
    for part in {(p.data_ptr(), p.shape, p.stride()): p for p in parts}.values():
        storage = part.untyped_storage().data_ptr()
        covered[storage] = covered.get(storage, 0) + part.numel()
    wrong = [
        name
        for name, parameter in parameters.items()
        if covered.get(parameter.untyped_storage().data_ptr(), 0) != parameter.numel()
    ]
    return f"the update did not fill {len(wrong)} parameters: {', '.join(wrong[:5])}" if wrong else None
