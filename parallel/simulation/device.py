"""A GPU without memory and arithmetic: its tensors have shapes, types and strides, and their costs are
counted.

Inside ``SimulatedDevice`` the device is torch's ``meta``. Tensors on the CPU are real, so that plans, splits and
checks are the product's own arithmetic. An operation that mixes the two raises, as it does on a GPU.

**Known numbers.** What comes from the host stays known on the device: indices, masks, lengths, advantages. So the
shapes that depend on numbers (``nonzero``, selection by a mask) are exact. What depends on a weight is not known: it is
finite, and 0 where the host reads it. The exception is ``topk``, the choice of experts: indices are spread evenly.

**Counted.** Bytes of live storages in the allocator's blocks, FLOPs by torch's formulas, and reads by the host, for
each of which a GPU is waited for. Temporary memory inside of kernels is not counted.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

META = torch.device("meta")
BLOCK_BYTES = 512
"""CUDA's caching allocator gives memory in multiples of this."""
MOST_KNOWN, MOST_KNOWN_FLOATS = 2**26, 2**20
"""Most elements of a tensor whose numbers are known. Numbers that shapes depend on are integers and truths; of floats
that are zero at first, such as gradients and moments, there is as much as the model is large."""

_CONSTANTS = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.zero_.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
_WITHOUT_NUMBERS = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "rand", "rand_like", "randn", "randn_like", "randint", "bernoulli", "bernoulli_", "normal_", "uniform_",
)  # fmt: skip
"""Operations whose result has no numbers yet, or random ones."""
_COPIES = (aten._to_copy.default, aten.copy_.default)
_MAY_MIX = (*_COPIES, aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
"""Operations that take tensors of both devices on CUDA too."""
_SHAPES_FROM_NUMBERS = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
)


class NotKnown(RuntimeError):
    """A shape depends on numbers that a simulation does not have."""


class Memory:
    """Bytes of the device that are in use, by the part that they were allocated in."""

    def __init__(self) -> None:
        self._in_use: dict[str, int] = {}
        self._part_of: dict[int, tuple[str, int, Any]] = {}
        self._on_host: set[int] = set()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.part = "other"

    def hold(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._part_of:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._part_of[key] = (self.part, size, weakref.ref(storage, lambda _: self._free(key)))
        self._add(self.part, size)

    def _add(self, part: str, size: int) -> None:
        self._in_use[part] = self._in_use.get(part, 0) + size
        self.total += size
        if self.total > self.peak:
            self.start_peak()

    def _remove(self, part: str, size: int) -> None:
        self._in_use[part] -= size
        self.total -= size

    def _free(self, key: int) -> None:
        part, size, _ = self._part_of.pop(key)
        if key in self._on_host:
            self._on_host.remove(key)
        else:
            self._remove(part, size)

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors no longer, until ``from_host``."""
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self._part_of.keys():
            self._remove(*self._part_of[key][:2])
            self._on_host.add(key)

    def from_host(self, tensors: Iterable[Tensor]) -> None:
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self._on_host:
            self._on_host.remove(key)
            self._add(*self._part_of[key][:2])

    def start_peak(self) -> None:
        """Take the present use for the greatest, which then grows."""
        self.peak, self.at_peak = self.total, {part: size for part, size in self._in_use.items() if size}

    def relabel(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count these tensors to another part."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._part_of:
                before, size, reference = self._part_of[key]
                self._part_of[key] = (part, size, reference)
                if key not in self._on_host:
                    self._in_use[before] -= size
                    self._in_use[part] = self._in_use.get(part, 0) + size

    @contextmanager
    def allocating(self, part: str) -> Iterator[None]:
        """Inside, new memory counts to this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before


class SimulatedDevice(TorchDispatchMode):
    """See the module. ``collective`` gets every operation of a process group: ``ranks.Collectives``."""

    def __init__(self, collective: Callable[..., Any] | None = None):
        super().__init__()
        self.memory = Memory()
        self.flops = 0
        self.host_reads = 0
        self._collective = collective
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = kwargs.get("device")
        if func.namespace == "c10d" and self._collective is not None:
            return self._collective(self, func, args, kwargs)
        if not any(t.is_meta for t in tensors) and (target is None or torch.device(target).type != "meta"):
            return func(*args, **kwargs)
        _require_one_device(func, tensors)
        if func is aten._local_scalar_dense.default:
            return self._read_number(tensors[0])
        if func in _COPIES and _copies_to_host(func, args, target):
            return self._read(func, args, kwargs)
        if func in _SHAPES_FROM_NUMBERS:
            return self._from_numbers(func, args, kwargs)
        if func is aten.index.Tensor:
            args = (args[0], [self._without_mask(index) for index in args[1]])
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        self._learn(func, args, kwargs, tensors, result)
        return result

    def numbers(self, tensor: Tensor) -> Tensor | None:
        """What is known of a tensor, on the CPU."""
        return self._known.get(tensor) if tensor.is_meta else tensor

    def know(self, tensor: Tensor, numbers: Tensor) -> None:
        self._known[tensor] = numbers

    def _read_number(self, tensor: Tensor) -> Any:
        self.host_reads += 1
        numbers = self.numbers(tensor)
        if numbers is None and tensor.dtype == torch.bool:
            raise NotKnown("the host asks the device for a truth that depends on weights")
        return 0.0 if numbers is None else numbers.item()

    def _read(self, func, args, kwargs) -> Tensor:
        """A copy on the host."""
        self.host_reads += 1
        if func is aten.copy_.default:
            place, source = args[:2]
            numbers = self.numbers(source)
            return place.zero_() if numbers is None else place.copy_(numbers)
        source, numbers = args[0], self.numbers(args[0])
        dtype = kwargs.get("dtype") or source.dtype
        return torch.zeros(source.shape, dtype=dtype) if numbers is None else numbers.to(dtype, copy=True)

    def _from_numbers(self, func, args, kwargs) -> Any:
        """The result of an operation whose shape depends on numbers: its own numbers, or a selection of unknown ones."""
        known = tree_map_only(Tensor, self.numbers, (args, kwargs))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if all(self.numbers(tensor) is not None for tensor in tensors):
            return tree_map_only(Tensor, self._on_device, func(*known[0], **known[1]))
        if func is aten.masked_select.default and (mask := self.numbers(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            return args[0].new_empty(int(mask.expand(shape).sum()))
        raise NotKnown(f"the shape of {func} depends on weights")

    def _on_device(self, numbers: Tensor) -> Tensor:
        tensor = torch.empty_like(numbers, device=META)
        self.memory.hold(tensor)
        self.know(tensor, numbers)
        return tensor

    def _without_mask(self, index: Tensor | None) -> Tensor | None:
        """A boolean index as the places that it selects."""
        if index is None or index.dtype not in (torch.bool, torch.uint8) or not index.is_meta:
            return index
        mask = self.numbers(index)
        if mask is None:
            raise NotKnown("a selection by a mask depends on weights")
        if mask.dim() != 1:
            raise NotKnown("a selection by a mask of several dimensions is not simulated")
        self.host_reads += 1  # CUDA counts the places before it knows the shape
        return self._on_device(mask.nonzero().flatten())

    def _count(self, func, args, kwargs, result) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.memory.hold(tensor)
        formula = _flop_formula(func)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)

    def _learn(self, func, args, kwargs, tensors: list[Tensor], result) -> None:
        """Keep the numbers of the result if all numbers that it comes from are known."""
        if func._overloadpacket.__name__ in _WITHOUT_NUMBERS:
            return
        written = tensors[0] if func._schema.is_mutable and tensors else None
        if func is aten.topk.default:
            self.know(result[1], _spread_evenly(result[1].shape, args[0].shape[-1]))
        elif func in _CONSTANTS and _is_small(result):
            self.know(result, torch.full(result.shape, _CONSTANTS[func], dtype=result.dtype))
        elif (truth := _certain_truth(func, args)) is not None:
            everywhere = torch.tensor(truth).expand(result.shape)
            self.know(result, everywhere.contiguous() if _is_small(result) else everywhere)
        elif all(_is_small(t) for t in tree_leaves(result) if isinstance(t, Tensor)) and all(
            t is written or self.numbers(t) is not None for t in tensors
        ):
            self._compute(func, args, kwargs, written, result)
        elif written is None and torch.Tag.pointwise in func.tags and all(map(self._has_one_number, tensors)):
            once = tree_map_only(Tensor, self._one_number, (args, _on_host(kwargs)))
            self.know(result, func(*once[0], **once[1]).expand(result.shape))
        elif written is not None:
            self._known.pop(written, None)

    def _has_one_number(self, tensor: Tensor) -> bool:
        """Whether one number is known to be everywhere in a tensor, of any size."""
        numbers = self.numbers(tensor)
        return numbers is not None and not any(numbers.stride())

    def _one_number(self, tensor: Tensor) -> Tensor:
        numbers = self.numbers(tensor)
        assert numbers is not None
        return numbers.as_strided((), ())

    def _compute(self, func, args, kwargs, written: Tensor | None, result) -> None:
        if written is not None and self.numbers(written) is None:
            if func not in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor):
                return  # it changes numbers that are not known
            self.know(written, torch.zeros(written.shape, dtype=written.dtype))
        known_args, known_kwargs = tree_map_only(Tensor, self.numbers, (args, _on_host(kwargs)))
        numbers = func(*known_args, **known_kwargs)
        if not func._schema.is_mutable:
            for place, value in zip(tree_leaves(result), tree_leaves(numbers), strict=True):
                if isinstance(place, Tensor):
                    self.know(place, value)


def _flop_formula(func) -> Callable[..., int] | None:
    """torch's formula of an operation, or of the one that it does in place (``addmm_``), which torch leaves out."""
    name = func._overloadpacket.__name__.removesuffix("_")
    return flop_registry.get(func._overloadpacket) or flop_registry.get(getattr(aten, name, None))


def _require_one_device(func, tensors: list[Tensor]) -> None:
    """As CUDA: only numbers without a dimension may be on the other device."""
    if func in _MAY_MIX:
        return
    if any(t.is_meta for t in tensors) and any(not t.is_meta and t.dim() for t in tensors):
        raise RuntimeError(f"{func} takes tensors on the device and on the CPU; move them to one of them")


def _copies_to_host(func, args, target) -> bool:
    if func is aten.copy_.default:
        return not args[0].is_meta
    return args[0].is_meta and target is not None and torch.device(target).type == "cpu"


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "device"}


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_KNOWN_FLOATS if tensor.is_floating_point() else MOST_KNOWN)


def _spread_evenly(shape: torch.Size, choices: int) -> Tensor:
    """int64 [T, K]: row t has the K places from t K on, modulo the number of choices."""
    return torch.arange(shape.numel()).view(shape) % choices


def _certain_truth(func, args) -> bool | None:
    """What a comparison gives for any finite number: those of ``isfinite``, ``isnan`` and ``isinf``."""
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return func is aten.eq.Tensor
    if func in (aten.eq.Scalar, aten.ne.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return func is aten.ne.Scalar
    return None
