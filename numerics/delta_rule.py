"""The gated delta rule (S. Yang et al., "Gated Delta Networks", arXiv 2412.06464) and the convolution before it, of packed
sequences: what the learner differentiates and SGLang's CPU servers compute.

Legend: S sequences, T tokens, A heads, N numbers of a key's head, V of a value's, J chunks of C tokens each.

With a query q and a key k of length 1, a value v, a decay a_t in (0, 1) and a step b_t in (0, 1), the state M [N, V] of a head
and its output are

    M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T        o_t = M_t^T q_t / sqrt(N)

Sequences are cut into chunks (``plan_chunks``). Within a chunk all tokens are computed at once: the corrections of their values
solve a triangular system, and what a chunk changes of the state is a product (the paper's 3.3). The states go from chunk to
chunk, those of all sequences together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Most tokens of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The chunks of a micro-batch: the first of every sequence, then the second of those that have one, and so on."""

    tokens_JC: Tensor
    """int64, places in the model's order; T after the end of a sequence."""
    places_T: Tensor
    """int64, the flat place of each token in ``tokens_JC``."""
    counts: tuple[int, ...]
    """Sequences that have a first, a second, ... chunk. The longest come first, so those that continue are
    the first ones."""
    position_T: Tensor
    """int64, of each token in its sequence."""
    rows_S: Tensor
    """int64, the sequences in the order of their chunks."""


def plan_chunks(cu_seqlens: Tensor, device: torch.device, size: int = CHUNK) -> ChunkPlan:
    """Of the sequences between ``cu_seqlens`` (int [S + 1], on the CPU), in chunks of at most ``size`` tokens."""
    bounds = cu_seqlens.to(torch.int64)
    lengths_S, total = bounds.diff(), int(bounds[-1])
    size = min(size, int(lengths_S.max()))
    chunks_S, rows_S = (-(-lengths_S // size)).sort(descending=True, stable=True)
    counts = tuple(int((chunks_S > i).sum()) for i in range(int(chunks_S[0])))
    step_J = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    row_J = torch.cat([rows_S[:count] for count in counts])
    inside_JC = step_J[:, None] * size + torch.arange(size)
    tokens_JC = (bounds[:-1][row_J][:, None] + inside_JC).where(inside_JC < lengths_S[row_J][:, None], total)
    is_token = tokens_JC.flatten() < total
    places_T = torch.empty(total, dtype=torch.int64)
    places_T[tokens_JC.flatten()[is_token]] = is_token.nonzero().flatten()
    position_T = torch.arange(total) - torch.repeat_interleave(bounds[:-1], lengths_S)
    return ChunkPlan(
        tokens_JC=tokens_JC.to(device),
        places_T=places_T.to(device),
        counts=counts,
        position_T=position_T.to(device),
        rows_S=rows_S.to(device),
    )


def gated_delta_rule(
    query_TAN: Tensor,
    key_TAN: Tensor,
    value_TAV: Tensor,
    log_decay_TA: Tensor,
    step_TA: Tensor,
    plan: ChunkPlan,
    start_SANV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o_t [T, A, V] of the recurrence above, states after each sequence's last token [S, A, N, V]), float32
    as its arguments. Queries and keys have length 1. start_SANV: the states before the first tokens; None:
    zero."""
    scale = query_TAN.shape[-1] ** -0.5
    query, key, value = (
        _in_chunks(x, plan) for x in (query_TAN * scale, key_TAN, value_TAV)
    )  # [J, A, C, ..]
    step, log_a = (_in_chunks(x.unsqueeze(-1), plan) for x in (step_TA, log_decay_TA))  # [J, A, C, 1]
    g = log_a.cumsum(2)
    size = g.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    # Decay from token j of a chunk to its token i; 0 where j comes later.
    decay = (g - g.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
    keys_T = key.transpose(2, 3)
    written = step * key
    system = written @ keys_T * decay  # whose diagonal counts as 1
    both = torch.cat((step * value, written * g.exp()), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    among = query @ keys_T * decay
    from_state = query * g.exp()
    to_state = (key * (g[:, :, -1:] - g).exp()).transpose(2, 3)
    last = g[:, :, -1:].exp()
    outs, ends = [], []
    nothing = value.new_zeros(plan.counts[0], *to_state.shape[1:3], value.shape[-1])
    state = nothing if start_SANV is None else start_SANV[plan.rows_S]
    # Split, not sliced: the gradient of each slice would be as large as the whole.
    parts = (x.split(plan.counts) for x in (values, read, among, from_state, to_state, last))
    for value_i, read_i, among_i, from_state_i, to_state_i, last_i in zip(*parts, strict=True):
        count = len(value_i)
        ends.append(state[count:])
        state = state[:count]
        corrected = value_i - read_i @ state
        outs.append(from_state_i @ state + among_i @ corrected)
        state = state * last_i + to_state_i @ corrected
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, plan.places_T)
    end = torch.cat([state, *reversed(ends)])
    return out, torch.empty_like(end).index_copy(0, plan.rows_S, end)


def _in_chunks(x_TAD: Tensor, plan: ChunkPlan) -> Tensor:
    """[J, A, C, D], zero after the end of a sequence."""
    padded = F.pad(x_TAD, (0, 0, 0, 0, 0, 1))
    return (
        padded.index_select(0, plan.tokens_JC.flatten())
        .unflatten(0, plan.tokens_JC.shape)
        .transpose(1, 2)
        .contiguous()
    )


def causal_convolution(x_TD: Tensor, weight_DW: Tensor, position_T: Tensor) -> Tensor:
    """sum_w weight[:, w] x[t - W + 1 + w] over the tokens of t's sequence, for each of D numbers."""
    width = weight_DW.shape[1]
    out = x_TD * weight_DW[:, -1]
    for back in range(1, min(width, len(x_TD))):
        earlier = F.pad(x_TD[:-back], (0, 0, back, 0)) * (position_T >= back).unsqueeze(1)
        out = out + earlier * weight_DW[:, width - 1 - back]
    return out


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, with 1e-6 under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def log_decay(a_log_A: Tensor, decay_TA: Tensor, bias_A: Tensor) -> Tensor:
    """log a_t = -exp(a_log) softplus(decay_t + bias), float32."""
    return -a_log_A.float().exp() * F.softplus(decay_TA.float() + bias_A.float())


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) weight silu(gate) over the last dimension, in float32, rounded once to the dtype of x."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)
