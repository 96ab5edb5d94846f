"""Where the learner's tensors belong in SGLang's parameters, found by SGLang's own loader.

The loader gets tensors without memory (on the meta device), and the copies that it would make are recorded. So fused,
sharded and expert weights need no table here. Nothing is received here: see ``tandem_weight_receiver.py``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.grids import GRIDS, Packed

logger = logging.getLogger(__name__)
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sent:
    """A whole tensor as the learner announces it."""

    name: str
    dtype: torch.dtype
    """The dtype in which it is loaded."""
    shape: torch.Size
    packed: Packed | None = None
    """The form in which it comes. None: as numbers of ``dtype``."""

    @classmethod
    def parse(cls, name: str, form: str, shape: Sequence[int]) -> "Sent":
        """form: a dtype like ``bfloat16``, or a dtype and a grid like ``bfloat16/int8``. Raises ValueError."""
        dtype, _, grid = form.partition("/")
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or (
            grid and (grid not in GRIDS or len(shape) != 2 or min(shape) < 1)
        ):
            raise ValueError(
                f"{name} of shape {list(shape)} is announced as {form!r:.60}, a form that it cannot have"
            )
        return cls(name, kind, torch.Size(shape), Packed(GRIDS[grid], *shape) if grid else None)

    @property
    def nbytes(self) -> int:
        """Bytes in the form in which it comes."""
        return self.shape.numel() * self.dtype.itemsize if self.packed is None else self.packed.nbytes

    def unpacked(self, flat: Tensor) -> Tensor:
        """The whole tensor, from the uint8 [nbytes] that came; a view of them if it was not packed."""
        if self.packed is None:
            return flat.view(self.dtype).view(self.shape)
        whole = torch.empty(self.shape, dtype=self.dtype, device=flat.device)
        self.packed.unpack_into(whole, self.packed.scales_of(flat), self.packed.numbers_of(flat))
        return whole


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that SGLang's loader makes."""

    part: Tensor
    """View of a parameter."""
    source: Tensor
    """View of the sent tensor, without memory: the part of it that is copied."""

    def is_whole(self, sent: Sent) -> bool:
        """Whether the parameter's part is, byte for byte, the tensor in its dtype."""
        return (
            self.part.dtype == sent.dtype
            and self.part.is_contiguous()
            and self.source.is_contiguous()
            and self.part.numel() == self.source.numel() == sent.shape.numel()
        )


class Memory:
    """Memory on the CPU that receives the rows of all buckets of a model, some rows at a time."""

    def __init__(self, size: int) -> None:
        """size: bytes for the numbers of these rows."""
        self.numbers, self.packed = torch.empty(size, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        self.scales = self.packed

    def of_packed(self, scales: int, packed: int) -> tuple[Tensor, Tensor]:
        """uint8 [scales] and uint8 [packed], separate. Tensors that were given before stay valid."""
        if len(self.scales) < scales:
            self.scales = torch.empty(scales, dtype=torch.uint8)
        if len(self.packed) < packed:
            self.packed = torch.empty(packed, dtype=torch.uint8)
        return self.scales[:scales], self.packed[:packed]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a sent tensor, or the scales of a packed one, in memory that all rows of a bucket share."""

    memory: Tensor
    """uint8 [bytes], as they come."""
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """Parts of parameters, each with the view of the numbers' memory that belongs there."""
    unpack: Callable[[], None] | None = None
    """Unpacks ``memory`` into numbers."""

    def load(self) -> None:
        if self.unpack is not None:
            self.unpack()
        for part, source in self.copies:
            part.copy_(source)


def split_rows(sent: Sent, copies: Sequence[Copy], memory: Memory) -> list[Rows] | None:
    """All rows of a tensor (of a vector: its numbers), as many at a time as fit into ``memory``. None if one row does
    not fit, or if a copy does not take the same columns of consecutive rows."""
    if not sent.nbytes or not sent.shape:
        return None
    num_rows, width = sent.shape[0], sent.shape[1:].numel()
    at_once = min(num_rows, memory.numbers.numel() // (width * sent.dtype.itemsize))
    if not at_once or not all(_is_by_rows(copy, width) for copy in copies):
        return None
    packed = sent.packed
    if packed is None:
        come, rows = memory.numbers, []
    else:
        rest = packed.nbytes - packed.scale_bytes - num_rows * width
        scale_bytes, come = memory.of_packed(packed.scale_bytes, at_once * width + rest)
        rows, scales = [Rows(scale_bytes)], packed.scales_of(scale_bytes)
    is_there = len(copies) == 1 and copies[0].is_whole(sent)
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        numbers = memory.numbers[: (end - start) * width * sent.dtype.itemsize].view(sent.dtype)
        if packed is None:
            rows.append(Rows(come[: numbers.nbytes], _taken(copies, numbers, start, end, width)))
            continue
        to = copies[0].part.view(sent.shape)[start:end] if is_there else numbers.view(end - start, width)
        unpack = partial(packed.unpack_into, to, scales, come[: to.numel()], start)
        taken = () if is_there else _taken(copies, numbers, start, end, width)
        rows.append(Rows(come[: to.numel() + (rest if end == num_rows else 0)], taken, unpack))
    return rows


def _is_by_rows(copy: Copy, width: int) -> bool:
    """Whether it takes the same columns of consecutive rows of the tensor."""
    source = copy.source
    extent = 1 + sum((n - 1) * step for n, step in zip(source.shape[1:], source.stride()[1:], strict=True))
    return (
        source.dim() > 0
        and source.stride(0) == width
        and copy.part.shape == source.shape
        and source.storage_offset() % width + extent <= width
    )


def _taken(
    copies: Sequence[Copy], numbers: Tensor, start: int, end: int, width: int
) -> list[tuple[Tensor, Tensor]]:
    """The part of each copy that comes from the rows ``start`` to ``end``, which are in ``numbers``."""
    taken = []
    for copy in copies:
        # The copy's first row is row ``before`` of the tensor.
        before, column = divmod(int(copy.source.storage_offset()), width)
        first, last = max(start - before, 0), min(end - before, copy.source.shape[0])
        if first < last:
            shape = (last - first, *copy.source.shape[1:])
            offset = (before + first - start) * width + column
            taken.append((copy.part[first:last], numbers.as_strided(shape, copy.source.stride(), offset)))
    return taken


@dataclass(slots=True)
class Places:
    """What SGLang's loader would do with tensors."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    """By name of the sent tensor. A tensor is missing if SGLang's loader does more than copy it."""
    filled: list[Tensor] = field(default_factory=list)
    """Parts of parameters that get a constant, such as padding."""


class Recorder(TorchDispatchMode):
    """Records the copies from tensors on the meta device instead of making them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.filled: list[Tensor] = []
        self.overwritten: set[int] = set()
        """Sent tensors, by their storage, that the loader fills with a constant before it copies them."""
        self._joined: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By its storage: a tensor that is the concatenation of others by rows, and these others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and args[1].device.type == "meta" and args[0].device.type != "meta":
            self._add(args[0], args[1])
            return args[0]
        if func in (aten.fill_.Scalar, aten.zero_.default) and args[0].device.type != "meta":
            self.filled.append(args[0])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self.overwritten.add(args[0].untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        if func is aten.cat.default and result.device.type == "meta" and args[1:] in ((), (0,)):
            self._joined[result.untyped_storage()._cdata] = (result, list(args[0]))
        return result

    def _add(self, part: Tensor, source: Tensor) -> None:
        whole, joined = self._joined.get(source.untyped_storage()._cdata, (None, []))
        if whole is not None and part.shape == source.shape == whole.shape:
            self.copies += zip(part.split([len(tensor) for tensor in joined]), joined, strict=True)
        else:
            self.copies.append((part, source))


def record(load_weights: Callable, tensors: Sequence[Sent]) -> Places:
    """The copies that ``load_weights`` would make. Tensors that it cannot load without their content are left out."""
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
    kept = {name: t for name, t in empty.items() if t.untyped_storage()._cdata not in recorder.overwritten}
    places = Places({name: [] for name in kept}, recorder.filled)
    for part, source in recorder.copies:
        name = name_of.get(source.untyped_storage()._cdata)
        if name is None:  # computed from sent tensors, and from which of them is unknown
            return Places()
        if name not in kept:  # SGLang loads it itself
            continue
        places.copies[name].append(Copy(part.detach(), source))
    return places


def lies_behind(one: Tensor, other: Tensor) -> bool:
    is_next = other.data_ptr() == one.data_ptr() + one.nbytes
    return is_next and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def left_out(parameters: Mapping[str, Tensor], parts: Sequence[Tensor]) -> str | None:
    """A message that names the parameters that ``parts`` do not cover, counted in elements; None if there are none."""
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
