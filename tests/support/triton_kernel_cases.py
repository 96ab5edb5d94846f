"""The GPU kernels against the plain operations that they replace: cases of ``test_triton_kernels.py``, which runs them in a
separate process."""

import pytest
import torch
import torch.nn.functional as F

from numerics.aligned import rotated
from parallel.megatron import triton_kernels, vocab_parallel

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Two numbers next to each other, relative to the greatest."""


def drawn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(found, wanted, dtype, roundings=1):
    found, wanted = found.cpu().double(), wanted.cpu().double()
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= roundings * ROUNDING[dtype] * wanted.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "temperature"), [(7, 1.0), (4096, 0.7), (9001, 1.3)])
def test_logits_give_the_sums_and_the_gradient_of_plain_operations(dtype, columns, temperature):
    """Also of rows with ids that the sampler had not kept, targets of other ranks, and gradients of one number for all."""
    tokens = 5
    logits = drawn(tokens, columns, dtype=dtype, scale=4.0)
    logits[1, 2:] = max(vocab_parallel.NEVER, torch.finfo(dtype).min)
    targets = torch.tensor([0, 1, columns - 1, -3, columns + 2])
    plain = vocab_parallel._chunk_sums(logits.clone(), targets, temperature, with_entropy=True)
    there = logits.to(DEVICE)
    sums = triton_kernels.logit_sums(there, targets.to(DEVICE), temperature, with_entropy=True)
    assert_near(sums[0], plain[0], torch.float32)
    assert_near(sums[2], plain[2], torch.float32)
    assert sums.cpu() == pytest.approx(plain, rel=1e-5)
    without = triton_kernels.logit_sums(there, targets.to(DEVICE), temperature, with_entropy=False)
    assert torch.equal(without[:3], sums[:3])
    log_z, _, entropy = vocab_parallel._combine_ranks(plain[0], plain[1:], None)
    grad, grad_entropy = torch.tensor([0.5]).expand(tokens), drawn(tokens, seed=2)
    for of_entropy in (grad_entropy, None):
        rows = (targets, log_z, entropy, grad, of_entropy)
        wanted = vocab_parallel._grad_product(logits.clone(), *rows, temperature)
        on_device = (None if row is None else row.to(DEVICE) for row in rows)
        found = triton_kernels.logit_gradient_(logits.to(DEVICE), *on_device, temperature)
        assert_near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize(("heads", "size", "half"), [(3, 16, 8), (5, 24, 6), (40, 128, 64)])
def test_heads_rotate_to_the_bit(dtype, in_float32, heads, size, half):
    """Also parts of a longer product, and heads of which a part is rotated."""
    tokens, table = 6, torch.float32 if in_float32 else dtype
    whole = drawn(tokens, heads + 2, size, dtype=dtype)
    angles = drawn(tokens, 1, half, seed=1)
    cos, sin = angles.cos().to(table), angles.sin().to(table)
    x = whole[:, 1:-1]
    wanted = rotated(x.to(table), cos, sin).to(dtype)
    moved = whole.to(DEVICE)[:, 1:-1]
    found = triton_kernels.rotated(moved, cos.to(DEVICE), sin.to(DEVICE), backward=False)
    back = triton_kernels.rotated(moved, cos.to(DEVICE), sin.to(DEVICE), backward=True)
    for mine, right in ((found, wanted), (back, rotated(x.to(table), cos, -sin).to(dtype))):
        if HAS_GPU or dtype != torch.bfloat16:  # the interpreter cuts to bfloat16 instead of rounding
            assert torch.equal(mine.cpu(), right)
        else:
            assert_near(mine, right, dtype, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 10), (1, 4100), (0, 6)])
def test_the_gated_activation_and_its_gradient(dtype, shape):
    gate_up, grad = drawn(*shape, dtype=dtype), drawn(*shape[:-1], shape[-1] // 2, seed=1, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    wanted = F.silu(gate) * up
    wanted.backward(grad.double())
    moved = gate_up.to(DEVICE)
    found, of_halves = triton_kernels.swiglu(moved), triton_kernels.swiglu_gradient(grad.to(DEVICE), moved)
    assert found.dtype == of_halves.dtype == dtype
    if shape[0]:
        assert_near(found, wanted.detach(), dtype)
        assert_near(of_halves, exact.grad, dtype)


@pytest.mark.parametrize(
    ("dtype", "of_weight_dtype"), [*((one, one) for one in DTYPES), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize(("heads", "size"), [(1, 48), (3, 128), (2, 2500)])
def test_norms_and_their_gradients(dtype, of_weight_dtype, heads, size):
    """Also of heads that are parts of a longer product, and by a float32 weight, such as 1 + weight."""
    whole = drawn(37, 1, heads + 2, size, dtype=dtype)
    weight, grad = drawn(size, seed=1, dtype=of_weight_dtype), drawn(37, 1, heads, size, seed=2, dtype=dtype)
    exact, scale = whole[:, :, 1:-1].double().requires_grad_(), weight.double().requires_grad_()
    wanted = F.rms_norm(exact, (size,), scale, 1e-5)
    wanted.backward(grad.double())
    x, moved = whole.to(DEVICE)[:, :, 1:-1], weight.to(DEVICE)
    found, root = triton_kernels.rms_norm(x, moved, 1e-5)
    of_x, of_weight = triton_kernels.rms_norm_gradient(grad.to(DEVICE), x, moved, root)
    assert found.dtype == of_x.dtype == dtype and of_weight.dtype == of_weight_dtype
    for mine, right in ((found, wanted.detach()), (of_x, exact.grad), (of_weight, scale.grad)):
        assert_near(mine, right, dtype)
    again = triton_kernels.rms_norm_gradient(grad.to(DEVICE), x, moved, root)
    assert all(torch.equal(one, other) for one, other in zip(again, (of_x, of_weight), strict=True))
