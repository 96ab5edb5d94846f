"""Kernels for CUDA, each of which replaces several torch kernels on the same numbers. Triton comes with
torch's CUDA wheels.

A GPU reads and writes its memory far slower than it computes: of a small model's passes these operations, one after another,
took half the time. Their plain forms are beside their callers, and the two are compared by
``tests/parallel/megatron/test_triton_kernels.py``, on a GPU or in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
"""Numbers of a row of logits that a program takes at once, and its warps of 32 threads."""
MLP_BLOCK = 1024
NORM_NUMBERS, NORM_PROGRAMS = 2048, 1024
"""Most numbers of short rows that a program takes at once, and most programs that add up a weight's gradient."""
ROTATED_NUMBERS = 2048
"""Most numbers of a token's heads that one program rotates."""


def logit_sums(logits_CV: Tensor, targets_C: Tensor, temperature: float, *, with_entropy: bool) -> Tensor:
    """Of x = logits / temperature, float32 [4, C]: the maximum m, sum exp(x - m), x_target or 0, and, with entropy,
    sum exp(x - m) (x - m)."""
    tokens, columns = logits_CV.shape
    out_4C = torch.empty(4, tokens, dtype=torch.float32, device=logits_CV.device)
    _logit_sums[(tokens,)](
        logits_CV, targets_C, out_4C, logits_CV.stride(0), tokens, columns, float(temperature), with_entropy,
        BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out_4C


@triton.jit
def _logit_sums(
    logits, targets, out, row_stride, tokens, columns, temperature, with_entropy: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    maximum, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        x = tl.math.div_rn(x, temperature)
        higher = tl.maximum(maximum, tl.max(x, 0))
        shifted = x - higher
        exponential = tl.exp(shifted)
        # What was summed below a lower maximum: exp(x - m) = exp(x - m') exp(m' - m), and x - m = (x - m') + (m' - m).
        scale = tl.exp(maximum - higher)
        if with_entropy:
            before = tl.where(total > 0, (weighted + total * (maximum - higher)) * scale, 0.0)
            weighted = before + tl.sum(tl.where(exponential > 0, exponential * shifted, 0.0), 0)
        total = total * scale + tl.sum(exponential, 0)
        maximum = higher
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < columns)
    x_target = tl.math.div_rn(tl.load(logits + tl.where(is_here, target, 0)).to(tl.float32), temperature)
    tl.store(out + row, maximum)
    tl.store(out + tokens + row, total)
    tl.store(out + 2 * tokens + row, tl.where(is_here, x_target, 0.0))
    tl.store(out + 3 * tokens + row, weighted)


def logit_gradient_(
    logits_CV: Tensor,
    targets_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """The logits, overwritten by their gradient (``vocab_parallel.linear_logprobs``)."""
    tokens, columns = logits_CV.shape
    has_entropy = grad_entropy_C is not None
    grad_logprobs_C = grad_logprobs_C.contiguous()
    grad_entropy_C = grad_entropy_C.contiguous() if grad_entropy_C is not None else grad_logprobs_C
    _logit_gradient[(tokens, triton.cdiv(columns, BLOCK))](
        logits_CV, targets_C, log_z_C, entropy_C, grad_logprobs_C, grad_entropy_C,
        logits_CV.stride(0), columns, float(temperature), has_entropy, BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logits_CV


@triton.jit
def _logit_gradient(
    logits, targets, log_z, entropy, grad_logprobs, grad_entropy, row_stride, columns, temperature,
    has_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    place = logits + row * row_stride + column
    grad = tl.load(grad_logprobs + row)
    x = tl.load(place, mask=column < columns, other=-float("inf")).to(tl.float32)
    logp = tl.math.div_rn(x, temperature) - tl.load(log_z + row)
    probability = tl.exp(logp)
    factor = grad
    if has_entropy:
        factor = tl.load(grad_entropy + row) * (logp + tl.load(entropy + row)) + grad
    # No product of 0 and infinity: where the probability is 0, so is its part.
    own = tl.where(probability > 0, probability * factor, 0.0)
    grad_x = tl.where(column == tl.load(targets + row), grad, 0.0) - own
    grad_x = tl.math.div_rn(grad_x, temperature)
    tl.store(place, grad_x.to(logits.dtype.element_ty), mask=column < columns)


def rotated(heads_TAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, *, backward: bool) -> Tensor:
    """``numerics.aligned.rotated`` of the heads in the dtype of the tables, in the dtype of the heads, to the bit. backward: by
    the opposite angle."""
    heads_TAD = heads_TAD if heads_TAD.stride(-1) == 1 else heads_TAD.contiguous()
    tokens, heads, size = heads_TAD.shape
    half = cos_T1F.shape[-1]
    out = torch.empty((tokens, heads, size), dtype=heads_TAD.dtype, device=heads_TAD.device)
    if not out.numel():
        return out
    block_half, rest = triton.next_power_of_2(half), size - 2 * half
    block_heads = min(triton.next_power_of_2(heads), max(1, ROTATED_NUMBERS // block_half))
    _rotated[(tokens, triton.cdiv(heads, block_heads))](
        heads_TAD, cos_T1F.contiguous(), sin_T1F.contiguous(), out, heads_TAD.stride(0), heads_TAD.stride(1), heads, size, half,
        -1.0 if backward else 1.0, block_heads, block_half, triton.next_power_of_2(rest) if rest else 0,
        enable_fp_fusion=False,  # each product is rounded, as torch's
    )  # fmt: skip
    return out


@triton.jit
def _rotated(
    heads, cos, sin, out, token_stride, head_stride, num_heads, size, half, sign,
    block_heads: tl.constexpr, block_half: tl.constexpr, block_rest: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    f = tl.arange(0, block_half)[None, :]
    is_there = (head < num_heads) & (f < half)
    table = cos.dtype.element_ty
    c = tl.load(cos + token * half + f, mask=f < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + f, mask=f < half, other=0.0).to(tl.float32) * sign
    source, place = heads + token * token_stride + head * head_stride, out + (token * num_heads + head) * size
    a = tl.load(source + f, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(source + half + f, mask=is_there, other=0.0).to(tl.float32)
    first = (a * c).to(table).to(tl.float32) - (b * s).to(table).to(tl.float32)
    second = (b * c).to(table).to(tl.float32) + (a * s).to(table).to(tl.float32)
    tl.store(place + f, first.to(table).to(out.dtype.element_ty), mask=is_there)
    tl.store(place + half + f, second.to(table).to(out.dtype.element_ty), mask=is_there)
    if block_rest > 0:
        r = 2 * half + tl.arange(0, block_rest)[None, :]
        is_rest = (head < num_heads) & (r < size)
        tl.store(place + r, tl.load(source + r, mask=is_rest), mask=is_rest)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) up of the two halves of the last dimension, in float32, rounded once."""
    gate_up = gate_up_T2I.contiguous()
    rows, size = gate_up.shape[:-1].numel(), gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _swiglu[(rows, triton.cdiv(size, MLP_BLOCK))](gate_up, out, size, MLP_BLOCK)
    return out


@triton.jit
def _swiglu(gate_up, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(gate_up + row * 2 * size + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < size)


def swiglu_gradient(grad_TI: Tensor, gate_up_T2I: Tensor) -> Tensor:
    """Of gate and up, by that of ``swiglu``."""
    gate_up, grad = gate_up_T2I.contiguous(), grad_TI.contiguous()
    rows, size = grad.shape[:-1].numel(), grad.shape[-1]
    out = torch.empty_like(gate_up)
    if rows:
        _swiglu_gradient[(rows, triton.cdiv(size, MLP_BLOCK))](grad, gate_up, out, size, MLP_BLOCK)
    return out


@triton.jit
def _swiglu_gradient(grads, gate_up, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(gate_up + row * 2 * size + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=i < size, other=0.0).to(tl.float32)
    grad = tl.load(grads + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + row * 2 * size + i, of_gate.to(out.dtype.element_ty), mask=i < size)
    tl.store(out + row * 2 * size + size + i, (grad * gate * sigmoid).to(out.dtype.element_ty), mask=i < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + eps) weight over the last dimension, rounded once; 1 / sqrt(mean(x^2) + eps) of each row, float32)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    root = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x_TAD = _by_heads(x)
    rows, size = root.numel(), x.shape[-1]
    block_rows, block = _norm_blocks(size)
    if rows:
        _rms_norm[(triton.cdiv(rows, block_rows),)](
            x_TAD, weight, out, root, *x_TAD.stride()[:2], rows, x_TAD.shape[1], size, eps, block_rows, block
        )
    return out, root


@triton.jit
def _rms_norm(
    x, weight, out, root, token_stride, head_stride, rows, heads, size, eps, block_rows: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    i = tl.arange(0, block)[None, :]
    is_there = (row < rows)[:, None] & (i < size)
    place = (row // heads * token_stride + row % heads * head_stride)[:, None] + i
    value = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(value * value, 1) / size + eps)
    scale = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)
    normed = value * r[:, None] * scale
    tl.store(out + row[:, None] * size + i, normed.to(out.dtype.element_ty), mask=is_there)
    tl.store(root + row, r, mask=row < rows)


def rms_norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight, whose sum over rows is in a fixed order."""
    grad, of_x = grad.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_TAD = _by_heads(x)
    rows, size = root.numel(), x.shape[-1]
    block_rows, block = _norm_blocks(size)
    programs = min(triton.cdiv(rows, block_rows), NORM_PROGRAMS)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    if rows:
        _rms_norm_gradient[(programs,)](
            grad, x_TAD, weight, root, of_x, parts, *x_TAD.stride()[:2], rows, x_TAD.shape[1], size, block_rows, block,
        )  # fmt: skip
    return of_x, parts.sum(0).to(weight.dtype)


@triton.jit
def _rms_norm_gradient(
    grads, x, weight, root, of_x, parts, token_stride, head_stride, rows, heads, size,
    block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, block)[None, :]
    scale = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)
    of_weight = tl.zeros([1, block], dtype=tl.float32)
    for number in range(tl.program_id(0), tl.cdiv(rows, block_rows), tl.num_programs(0)):
        row = (number * block_rows + tl.arange(0, block_rows)).to(tl.int64)
        is_there = (row < rows)[:, None] & (i < size)
        place = (row // heads * token_stride + row % heads * head_stride)[:, None] + i
        value = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
        grad = tl.load(grads + row[:, None] * size + i, mask=is_there, other=0.0).to(tl.float32)
        r = tl.load(root + row, mask=row < rows, other=0.0)[:, None]
        n, grad_n = value * r, grad * scale
        mean = tl.sum(grad_n * n, 1)[:, None] / size
        value = (grad_n - n * mean) * r
        tl.store(of_x + row[:, None] * size + i, value.to(of_x.dtype.element_ty), mask=is_there)
        of_weight += tl.sum(grad * n, 0)[None, :]
    tl.store(parts + tl.program_id(0) * size + i, of_weight, mask=i < size)


def _by_heads(x: Tensor) -> Tensor:
    """[tokens, heads, D] of [..., heads, D]; a view where rows are parts of longer ones."""
    x = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _norm_blocks(size: int) -> tuple[int, int]:
    """Rows and numbers of a row that a program takes at once."""
    block = triton.next_power_of_2(size)
    return max(1, min(32, NORM_NUMBERS // block)), block
