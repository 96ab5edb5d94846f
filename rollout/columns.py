"""Trajectories by columns: the form in which they travel from the sample role to the learner, and between its ranks.

A step has thousands of trajectories, each with four arrays or more. An array that travels by itself is one object for the
encoder and one for the decoder. If responses are short, these objects cost more than the bytes. Here the arrays of a field
lie end to end, and a list of lengths separates them:

    Columns    everything but numbers per token, for msgpack: a head for each trajectory, the lengths of its arrays
    content    plain bytes: the arrays, field after field. Each run of one type starts at a multiple of ``ALIGNMENT``

The content is written once, straight into the message, and the arrays at the other end are views of it.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from rollout.records import EXPERTS, LOGPROBS, MASK, TOKEN_IDS, Status, Trajectory, Turn

ALIGNMENT = 16
DTYPES = frozenset(np.dtype(kind).str for kind in (TOKEN_IDS, LOGPROBS, MASK, *EXPERTS))
"""The types that arrays of a message may have."""
FIELDS = (
    "token_ids", "response_mask", "rollout_logprobs", "token_versions", "experts", "is_replayed", "num_kept", "kept_ids",
)  # fmt: skip
"""The fields of a trajectory that are arrays, or None."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The other fields of a trajectory."""

    group_id: int
    sibling_id: int
    prompt_id: str
    turns: list[Turn]
    reward: float | None
    reward_parts: dict[str, float]
    status: Status
    branch: int


class Run(msgspec.Struct, frozen=True, array_like=True):
    """One field of consecutive trajectories whose arrays have one type."""

    dtype: str | None
    """None: the field is None in all of them."""
    row: tuple[int, ...]
    """The arrays have the shape [length, *row]."""
    lengths: list[int]


class Columns(msgspec.Struct, frozen=True, array_like=True):
    heads: list[Head]
    runs: list[list[Run]]
    """One list for each of ``FIELDS``."""


class Taken(NamedTuple):
    """Trajectories that are taken apart. Their arrays are not copied."""

    columns: Columns
    parts: list[list[np.ndarray]]
    """The arrays of each run whose field is not None."""

    @classmethod
    def apart(cls, trajectories: Sequence[Trajectory]) -> Self:
        head_of = attrgetter(*Head.__struct_fields__)
        heads = [Head(*head_of(trajectory)) for trajectory in trajectories]
        runs, parts = [], []
        for name in FIELDS:
            runs.append([])
            for form, arrays in groupby([getattr(t, name) for t in trajectories], _form):
                arrays = list(arrays)
                lengths = [0] * len(arrays) if form[0] is None else [len(array) for array in arrays]
                runs[-1].append(Run(*form, lengths))
                parts += [] if form[0] is None else [arrays]
        return cls(Columns(heads, runs), parts)

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return sum(_rounded(_size(arrays)) for arrays in self.parts)

    def write(self, content: np.ndarray) -> None:
        """Put the arrays end to end into ``content``, which has ``size`` bytes."""
        start = 0
        for arrays in self.parts:
            size, end = _size(arrays), start + _rounded(_size(arrays))
            shape = (-1, *arrays[0].shape[1:])
            if size:  # numpy cannot derive the length of rows without numbers from their bytes
                np.concatenate(arrays, out=content[start : start + size].view(arrays[0].dtype).reshape(shape))
            content[start + size : end] = 0
            start = end


def joined(columns: Columns, content: np.ndarray) -> list[Trajectory]:
    """The trajectories. Their arrays are views of ``content``, uint8 [n]. Raises ValueError: heads, lengths and
    content do not fit together, or an array has none of ``DTYPES``."""
    if len(columns.runs) != len(FIELDS):
        raise ValueError(f"{len(columns.runs)} columns, not {len(FIELDS)}")
    start, arrays = 0, []
    for name, runs in zip(FIELDS, columns.runs, strict=True):
        arrays.append([])
        for run in runs:
            end = start + _rounded(_bytes_of(run))
            arrays[-1] += _read(run, content[start:end], name)
            start = end
    if start != len(content) or any(len(column) != len(columns.heads) for column in arrays):
        raise ValueError(f"{len(columns.heads)} heads, {len(content)} bytes for {start}")
    return [
        Trajectory(**msgspec.structs.asdict(head), **dict(zip(FIELDS, of_one, strict=True)))
        for head, of_one in zip(columns.heads, zip(*arrays, strict=True), strict=True)
    ]


def _form(array: np.ndarray | None) -> tuple[str | None, tuple[int, ...]]:
    return (None, ()) if array is None else (array.dtype.str, array.shape[1:])


def _bytes_of(run: Run) -> int:
    if run.dtype is None:
        return 0
    if run.dtype not in DTYPES or min(run.lengths, default=0) < 0 or min(run.row, default=0) < 0:
        raise ValueError(f"no arrays of a message: {run.dtype}, rows of {run.row}")
    return sum(run.lengths) * math.prod(run.row) * np.dtype(run.dtype).itemsize


def _read(run: Run, content: np.ndarray, name: str) -> Iterable[np.ndarray | None]:
    if run.dtype is None:
        return [None] * len(run.lengths)
    size = _bytes_of(run)
    if len(content) < size:
        raise ValueError(f"{name}: {len(content)} bytes for {size}")
    rows = content[:size].view(run.dtype).reshape(sum(run.lengths), *run.row)
    return (rows[start:end] for start, end in pairwise(accumulate(run.lengths, initial=0)))


def _size(arrays: Sequence[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned(content: Any) -> np.ndarray:
    """The bytes, uint8 [n]. They are copied if they do not start at a multiple of ``ALIGNMENT``: a socket's buffer may
    start anywhere."""
    found = np.frombuffer(content, dtype=np.uint8)
    return found if found.ctypes.data % ALIGNMENT == 0 else found.copy()
