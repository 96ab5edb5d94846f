"""Packed matrices: their bytes by hand, their parts, and their numbers against torch's. How near to the weights these are
is tested in tests/parallel/weights/test_precision.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.grids import GRIDS, Packed


def pack(weight: Tensor, grid: str) -> tuple[Packed, Tensor]:
    form = Packed(GRIDS[grid], *weight.shape)
    packed = torch.full((form.nbytes,), 255, dtype=torch.uint8)
    form.pack_into(packed, weight)
    return form, packed


def unpack(form: Packed, packed: Tensor, dtype=torch.float32) -> Tensor:
    out = torch.empty(form.rows, form.columns, dtype=dtype)
    form.unpack_into(out, form.scales_of(packed), form.numbers_of(packed))
    return out


def test_bytes_of_int8_by_hand():
    """Two scales of 4 bytes, six numbers, two zeros to a whole number of 8."""
    form, packed = pack(torch.tensor([[12.7, -0.1, 6.4], [0.0, 0.0, 0.0]]), "int8")
    assert (form.scale_bytes, form.nbytes) == (8, 16)
    assert torch.allclose(packed[:8].view(torch.float32), torch.tensor([0.1, 0.0]))
    assert packed[8:].view(torch.int8).tolist() == [127, -1, 64, 0, 0, 0, 0, 0]


def test_bytes_of_int4_by_hand():
    """A row of 33 has two scales."""
    form, packed = pack(torch.tensor([[0.7, -0.31] * 16 + [70.0]]), "int4")
    assert (form.scale_bytes, form.nbytes) == (8, 48)
    assert torch.allclose(packed[:8].view(torch.float32), torch.tensor([0.1, 10.0]))
    assert packed[8:41].view(torch.int8).tolist() == [7, -3] * 16 + [7]


def test_bytes_of_fp8_are_torchs():
    form, packed = pack(torch.tensor([[448.0, 17.0, -0.001]]), "fp8_e4m3")
    assert packed[:4].view(torch.float32).tolist() == [1.0] and form.nbytes == 8
    expected = torch.tensor([448.0, 17.0, -0.001]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert packed[4:7].tolist() == expected.tolist()


def test_every_byte_of_fp8_is_the_number_that_it_is_to_torch():
    codes = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)  # else NaN
    form, out = Packed(GRIDS["fp8_e4m3"], 1, len(codes)), torch.empty(1, len(codes))
    for scale in (1.0, 2.0**-3, 0.3):
        form.unpack_into(out, torch.tensor([[scale]]), codes)
        assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("grid", GRIDS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 31, 32, 33, 128, 130, 257]),
    at_once=st.sampled_from([1, 4096, 2**18]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_some_rows_are_unpacked_as_all_of_them(grid, seed, rows, columns, at_once, dtype, data):
    """However many are packed or unpacked at a time, wherever the bytes begin, and if the weights lie the other way."""
    with pytest.MonkeyPatch.context() as patch:
        weight = torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed)).to(dtype).T
        form, packed = pack(weight, grid)
        whole = unpack(form, packed, dtype)
        assert not packed[form.scale_bytes + weight.numel() :].any()
        patch.setattr("numerics.grids.AT_ONCE", {"cpu": at_once})
        again = torch.empty(form.nbytes + 1, dtype=torch.uint8)[1:]
        form.pack_into(again, weight.contiguous())
        assert torch.equal(again, packed)
        first = data.draw(st.integers(0, rows - 1))
        last = data.draw(st.integers(first + 1, rows))
        some = torch.empty(last - first, columns, dtype=dtype)
        q = form.numbers_of(again)[first * columns : last * columns]
        form.unpack_into(some, form.scales_of(again), q, first)
        assert torch.equal(some, whole[first:last])


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_is_its_own_image(grid):
    """Packing what was unpacked gives the same numbers: it is idempotent."""
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    once = unpack(*pack(weight, grid))
    assert torch.allclose(unpack(*pack(once, grid)), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_whole_block_and_no_other(grid, bad):
    weight = torch.ones(129, 160)
    weight[0, 3] = bad
    height, width = GRIDS[grid].height or 129, GRIDS[grid].width or 160
    bad_ones = ~unpack(*pack(weight, grid)).isfinite()
    assert bad_ones[:height, :width].all() and bad_ones.sum() == height * width


def test_numbers_of_any_size_have_a_scale():
    """The least and the greatest of float32 among them; a block of zeros stays."""
    for size in (2.0**-149, 2.0**-126, 1e-20, 1e20, 3.4e38):
        found = unpack(*pack(torch.tensor([[size, -size, 0.0], [0.0, 0.0, 0.0]]), "int8"))
        assert found.isfinite().all() and not found[1].any()
        if size >= 2.0**-126:  # the scale of smaller ones has few bits
            assert found[0].tolist() == pytest.approx([size, -size, 0.0], rel=0.01, abs=0)


def test_scales_are_read_wherever_a_packed_matrix_begins_in_its_storage():
    """At a multiple of four bytes, which torch asks for, but not of the storage."""
    form, packed = pack(torch.ones(2, 3), "int8")
    memory = np.empty(form.nbytes + 4, dtype=np.uint8)
    storage = torch.from_numpy(memory[(3 - memory.ctypes.data) % 4 :])
    moved = storage[1 : 1 + form.nbytes].copy_(packed)
    assert moved.data_ptr() % 4 == 0 and torch.equal(form.scales_of(moved), form.scales_of(packed))
