"""The forward operations of a dense transformer, each row computed in one fixed order.

A row is a token, or a query of one head. Its result depends on the row itself and on the weights: not on how many
rows stand beside it, nor on its place among them. Two engines that call these functions with equal rows and equal
weights get equal bits. Kernels for CPU choose another order of sums for another number of rows; so matrix products
run in blocks of a fixed size here, and everything else on contiguous rows.

Nor does a result depend on how many tensor-parallel ranks compute it. Ranks that split the outputs of a product give
the bits of the whole. Ranks that split its inputs add their parts, so one rank adds the same parts: a sum over inputs
is one of ``pieces``, in one order (``tree_sum``).

The claim is measured, not proved: for torch on CPU, one thread per process and one type of processor
(``tests/numerics``). Gradients are the callers'.

Legend: n rows, K inputs, N outputs of a product; B pairs of sequence and key-value head, R queries of each (heads
that share a key-value head are further queries), S keys, D head size, F = D / 2; V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64
"""Rows of a matrix product."""
COLUMNS = 16
"""Fewest columns of a matrix product: float32 kernels take another order of sums below 12."""
QUERIES = 32
KEYS = 64
"""Queries and keys of a block of attention."""
ALIGNMENT = 64
"""Bytes; a matrix starts at an address that is a multiple of this: a kernel may treat data before a boundary
separately."""


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, pieces: int = 1) -> Tensor:
    """x @ weight^T + bias over the last dimension of x.

    The inputs are split into ``pieces`` equal parts. The product of each is rounded to the dtype, and so is each sum of
    two of them (``tree_sum``); the bias is added last.

    Raises RuntimeError if pieces does not divide K.
    """
    parts = (y.unflatten(-1, (pieces, -1)).unbind(-2) for y in (x, weight_NK))
    out = tree_sum([_product(part, weight) for part, weight in zip(*parts, strict=True)])
    return out if bias_N is None else out + bias_N


def _product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """In blocks of ``ROWS`` rows, the last one padded by zeros, as are fewer columns than ``COLUMNS``."""
    rows_nK = x.reshape(-1, x.shape[-1])
    num_rows, num_columns = rows_nK.shape[0], weight_NK.shape[0]
    blocks_nK = F.pad(rows_nK, (0, 0, 0, -num_rows % ROWS)).contiguous()
    if num_columns < COLUMNS:
        weight_NK = F.pad(weight_NK, (0, 0, 0, COLUMNS - num_columns))
    weight_KN = aligned_in_memory(weight_NK).t()
    out_nN = blocks_nK.new_empty(blocks_nK.shape[0], weight_KN.shape[1])
    for start in range(0, num_rows, ROWS):
        out_nN[start : start + ROWS] = blocks_nK[start : start + ROWS] @ weight_KN
    return out_nN[:num_rows, :num_columns].reshape(*x.shape[:-1], num_columns)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """((a + b) + (c + d)) + ... of neighbours, rounded to the dtype each time. The parts are a power of two in number.

    A rank that holds 1, 2, 4, ... neighbouring parts adds them to a node of this tree, so the sum over the ranks' sums
    has the bits of the sum over all parts.

    Raises ValueError for another number of parts.
    """
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def aligned_in_memory(matrix: Tensor) -> Tensor:
    """The matrix, contiguous; a copy if it does not start at a multiple of ``ALIGNMENT`` bytes."""
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % ALIGNMENT == 0 else matrix.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once to the dtype of x."""
    wide = x.contiguous().float()
    mean_square = wide.square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide / (mean_square + eps).sqrt() * weight.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, rounded to the dtype of x.

    torch's own takes another form of exp for the last few numbers of a tensor.
    """
    wide = x.contiguous().float()
    return (wide / (wide.neg().exp() + 1)).to(x.dtype)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) of the halves a and b of the first 2 F numbers of D, each product rounded to
    the dtype. The others stay.

    heads [n, heads, D], cos and sin [n, 1, F].
    """
    half = cos.shape[-1]
    a, b, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(a, cos, out=out[..., :half]).sub_(b * sin)
    torch.mul(b, cos, out=out[..., half : 2 * half]).add_(a * sin)
    out[..., 2 * half :] = rest
    return out


def attention(
    query_BRD: Tensor, key_BSD: Tensor, value_BSD: Tensor, sees_BRS: Tensor, scale: float
) -> Tensor:
    """softmax(q k^T scale) v over the keys that a query sees, [B, R, D] in the dtype of the query.

    Blocks of ``QUERIES`` x ``KEYS`` in float32, with a running maximum and a running sum over the blocks of keys, in
    order (Milakov and Gimelshein 2018). A block of which a query sees nothing adds exact zeros and leaves its maximum
    as it is: keys after a query's last one change nothing, so decoding equals prefill. ``sees_BRS`` is bool, with
    1 instead of B or R if it is the same for all; every query sees the first key.
    """
    num_rows, (batch, num_keys, size) = query_BRD.shape[1], key_BSD.shape
    blocks = -(-num_rows // QUERIES)
    query = F.pad(query_BRD.float(), (0, 0, 0, blocks * QUERIES - num_rows)).reshape(-1, QUERIES, size)
    sees_BRS = sees_BRS.expand(batch, num_rows, num_keys)
    sees = F.pad(sees_BRS, (0, -num_keys % KEYS, 0, blocks * QUERIES - num_rows))
    sees = sees.reshape(-1, QUERIES, sees.shape[-1])
    key, value = (F.pad(x.float(), (0, 0, 0, -num_keys % KEYS)) for x in (key_BSD, value_BSD))
    maximum = query.new_full((query.shape[0], QUERIES, 1), -1e30)
    total = torch.zeros_like(maximum)
    out = torch.zeros_like(query)
    for start in range(0, key.shape[1], KEYS):
        keys, values = (
            x[:, start : start + KEYS].repeat_interleave(blocks, 0).contiguous() for x in (key, value)
        )
        scores = (query @ keys.transpose(1, 2).contiguous()) * scale
        scores = scores.masked_fill(~sees[..., start : start + KEYS], -torch.inf)
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (maximum - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values
        maximum = higher
    out_BRD = (out / total).view(batch, blocks * QUERIES, size)[:, :num_rows]
    return out_BRD.to(query_BRD.dtype).contiguous()


def logprobs(logits_nV: Tensor, tokens_n: Tensor) -> Tensor:
    """log softmax(x)[token] of each row of float32 logits that are divided by the temperature already: float32 [n]."""
    logits_nV = logits_nV.contiguous()
    maximum_n = logits_nV.amax(-1)
    log_sum_n = (logits_nV - maximum_n.unsqueeze(1)).exp().sum(-1).log()
    return (logits_nV.gather(1, tokens_n.long().unsqueeze(1)).squeeze(1) - maximum_n) - log_sum_n
