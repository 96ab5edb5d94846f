"""Matrices on a grid of integers or FP8: as the learner sends them, and as the servers compute with them.

Every grid has a scale per block b of a matrix:

    s_b = max |W| over b / G        q = snap(W / s_b)        W' = s_b q

    int8             b an output channel (a row)              G = 127   snap to whole numbers
    int4             b 32 numbers of a row, one after another G = 7     snap to whole numbers
    int3, int2       b as in int4                             G = 3, 1  snap to whole numbers
    fp8_e4m3         b the matrix                             G = 448   snap to float8_e4m3fn
    fp8_e4m3_block   b 128 x 128 numbers                      G = 448   snap to float8_e4m3fn

Ties go to even. All is computed in float32. A block of zeros stays. A block with a number that is not finite has none
that is. Sources: absmax quantisation by rows, as in LLM.int8() (Dettmers et al. 2022); groups of 32, as in GGML's and
AWQ's INT4; per tensor and per 128 x 128 block FP8, as in DeepSeek-V3 (2024).

A packed matrix is the scales of its blocks, row by row, in float32, then q, a byte for each number, then zeros up to a
whole number of ``ALIGNMENT`` bytes.
"""

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8
"""Bytes. Whatever follows a packed matrix begins at a multiple of its item's size, if the matrix did."""
AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Numbers that are packed at a time, by device. What a CPU reads several times should come from a core's cache; a GPU
should not wait for the start of kernels."""


@dataclass(frozen=True, slots=True)
class Grid:
    height: int | None
    """Rows of a block; None: all."""
    width: int | None
    """Columns of a block; None: all."""
    greatest: int
    """G."""
    dtype: torch.dtype
    """Of q."""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-rows // (self.height or rows)), -(-columns // (self.width or columns))


GRIDS = {
    "int8": Grid(1, None, 127, torch.int8),
    "int4": Grid(1, 32, 7, torch.int8),
    "int3": Grid(1, 32, 3, torch.int8),
    "int2": Grid(1, 32, 1, torch.int8),
    "fp8_e4m3": Grid(None, None, 448, torch.float8_e4m3fn),
    "fp8_e4m3_block": Grid(128, 128, 448, torch.float8_e4m3fn),
}


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of ``rows`` x ``columns`` on a grid, as bytes."""

    grid: Grid
    rows: int
    columns: int

    @property
    def scale_bytes(self) -> int:
        height, width = self.grid.scale_shape(self.rows, self.columns)
        return 4 * height * width

    @property
    def nbytes(self) -> int:
        return -(-(self.scale_bytes + self.rows * self.columns) // ALIGNMENT) * ALIGNMENT

    @torch.no_grad()
    def pack_into(self, out: Tensor, weight: Tensor) -> None:
        """Pack ``weight`` [rows, columns] into uint8 ``out`` [nbytes]."""
        q = self.numbers_of(out).view(self.grid.dtype).view(weight.shape)
        out[self.scale_bytes + q.numel() :].zero_()
        at_once, height = self._rows_at_once(weight.device), self.grid.height
        scales = [] if height is not None else [self._only_scale(weight, at_once)]
        for part, snapped in zip(weight.split(at_once), q.split(at_once), strict=True):
            numbers, quotients = _as_float32(part), _work(part, "quotients")
            if height is not None:
                scales.append(self._most_of(numbers, quotients).div_(self.grid.greatest))
            # A block of zeros has zeros over the least number above zero.
            by = self._by_row(scales[-1].clamp(min=2.0**-149), len(part), 0)
            numbers, by = self._side_by_side(numbers, by)
            torch.div(numbers, by, out=quotients.view(numbers.shape))
            snapped.copy_(quotients if self.grid.dtype.is_floating_point else quotients.round_())
        out[: self.scale_bytes].copy_(torch.cat(scales).view(-1).view(torch.uint8))

    def scales_of(self, packed: Tensor) -> Tensor:
        """float32, rows and columns of blocks, of the first bytes of a packed matrix."""
        if packed.data_ptr() % 4 or packed.storage_offset() % 4:
            packed = packed[: self.scale_bytes].clone()
        scales = packed[: self.scale_bytes].view(torch.float32)
        return scales.view(self.grid.scale_shape(self.rows, self.columns))

    def numbers_of(self, packed: Tensor) -> Tensor:
        """uint8 [rows * columns]: q."""
        return packed[self.scale_bytes : self.scale_bytes + self.rows * self.columns]

    @torch.no_grad()
    def unpack_into(self, out: Tensor, scales: Tensor, q: Tensor, first: int = 0) -> None:
        """Write W' of the rows from ``first`` on into ``out`` [n, columns], in its dtype, contiguous.

        scales: all of the matrix. q: uint8 [n * columns], these rows' bytes.
        """
        at_once = self._rows_at_once(out.device)
        numbers = q.view(self.grid.dtype).view(out.shape)
        for part, some in zip(out.split(at_once), numbers.split(at_once), strict=True):
            work = part if part.dtype == torch.float32 else _work(part, "products")
            if self.grid.dtype == torch.float8_e4m3fn:
                # torch converts one number at a time on CPU. As bits of a float16, e4m3's are its number times 2^-8.
                bits = some.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000)
                work.copy_(bits.view(torch.float16))
                by = self._by_row(scales, len(part), first) * 2.0**8
            else:
                work.copy_(some)
                by = self._by_row(scales, len(part), first)
            side, by = self._side_by_side(work, by)
            side.mul_(by)
            if work is not part:
                part.copy_(work)
            first += len(part)

    def _rows_at_once(self, device: torch.device) -> int:
        """A whole number of blocks' rows."""
        height = self.grid.height or 1
        return max(1, AT_ONCE["cpu" if device.type == "cpu" else "cuda"] // (height * self.columns)) * height

    def _only_scale(self, weight: Tensor, at_once: int) -> Tensor:
        """float32 [1, 1]: the scale of a matrix that is one block, by a separate pass."""
        ends = torch.stack([torch.stack(torch.aminmax(_as_float32(part))) for part in weight.split(at_once)])
        return ends.abs().amax().view(1, 1).div_(self.grid.greatest)

    def _most_of(self, numbers: Tensor, work: Tensor) -> Tensor:
        """max |W| of the blocks of some rows: float32 [rows of blocks, columns of blocks]."""
        # Without their signs, floats are in the order of their bits; whole numbers are compared faster.
        sizes = torch.bitwise_and(numbers.view(torch.int32), 0x7FFFFFFF, out=work.view(torch.int32))
        width, height = self.grid.width or self.columns, self.grid.height or len(numbers)
        if self.columns % width:
            sizes = F.pad(sizes, (0, -self.columns % width))
        most = sizes.view(len(numbers), -1, width).amax(2)
        if height > 1:
            most = F.pad(most, (0, 0, 0, -len(most) % height)).view(-1, height, most.shape[1]).amax(1)
        return most.view(torch.float32)

    def _by_row(self, scales: Tensor, rows: int, first: int) -> Tensor:
        """The scales of so many rows, the first of which is this one of those that ``scales`` belong to."""
        height = self.grid.height
        if height is None:
            return scales
        if height == 1:
            return scales[first : first + rows]
        return scales[torch.arange(first, first + rows, device=scales.device) // height]

    def _side_by_side(self, numbers: Tensor, by_row: Tensor) -> tuple[Tensor, Tensor]:
        """Views of some rows of the matrix and of their scales that broadcast."""
        width = self.grid.width or self.columns
        if self.columns % width == 0:
            return numbers.view(len(numbers), -1, width), by_row.unsqueeze(-1)
        return numbers, by_row.repeat_interleave(width, dim=1)[:, : self.columns]


def _as_float32(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.float32 else _work(numbers, "numbers").copy_(numbers)


def _work(like: Tensor, purpose: str) -> Tensor:
    """float32 memory of this shape for one purpose. On CPU a thread keeps it until its end: the system gives new memory
    page by page, which takes as long as what is done in it."""
    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=torch.float32, device=like.device)
    kept = getattr(_kept, purpose, None)
    if kept is None or kept.numel() < like.numel():
        kept = torch.empty(like.numel(), dtype=torch.float32)
        setattr(_kept, purpose, kept)
    return kept[: like.numel()].view(like.shape)


_kept = threading.local()
