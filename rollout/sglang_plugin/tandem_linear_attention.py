"""Gated delta nets (linear attention; Qwen3-Next, Qwen3.5) on SGLang's CPU servers.

On CPU SGLang 0.5.23 computes them only by kernels for Intel's AMX, which it looks up by name when it imports such a model.
Here functions of torch have these names. They use the learner's own rule (``numerics/delta_rule.py``). The norm of their outputs
and the gate of a shared expert are here too, because SGLang has them only as Triton kernels.

A layer's state is kept for each request: the last inputs of the convolution, [slots, D, W - 1], and a matrix for each head,
[slots, A, V, N]. SGLang clears both for a new request. A prompt that comes in pieces continues from them.

Legend: B requests, T tokens of a prefill, D numbers of queries, keys and values, W tokens that the convolution sees, K key heads,
A value heads, N numbers of a key's head, V of a value's.
"""

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from numerics.delta_rule import causal_convolution, gated_delta_rule, gated_norm, log_decay, plan_chunks, unit

NORMS = tuple(f"sglang.kernels.ops.attention.fla.{name}" for name in ("layernorm_gated", "fused_norm_gate"))
EXPERTS = "sglang.srt.models.qwen2_moe"


def register() -> None:
    """To be called before the code of a model is imported."""
    module = ModuleType("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    for name, function in OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, function)


def replace_kernels_of_triton() -> None:
    """Replace the norms and the gate of a shared expert, in the modules that the model's code has imported."""
    for name in sys.modules.keys() & set(NORMS):
        vars(sys.modules[name])["_use_cpu"] = True
    if EXPERTS in sys.modules:
        vars(sys.modules[EXPERTS])[fused_gate_sigmoid_mul_add.__name__] = fused_gate_sigmoid_mul_add


def causal_conv1d_fn_cpu(
    x_DT: Tensor,
    weight_DW: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **unused,
) -> Tensor:
    """[D, T], of all requests of a prefill. Each continues from its state, or starts from zeros."""
    before, slots = weight_DW.shape[1] - 1, cache_indices.long()
    states_BWD = conv_states[slots].transpose(1, 2) * has_initial_state[:, None, None]
    bounds = query_start_loc.long()
    # Each request's tokens follow the last inputs in its state.
    row_T = torch.repeat_interleave(torch.arange(len(slots)), bounds.diff())
    place_T = torch.arange(x_DT.shape[1]) + (row_T + 1) * before
    first_B = bounds[:-1] + torch.arange(len(slots)) * before
    both_TD = x_DT.new_empty(x_DT.shape[1] + len(slots) * before, len(x_DT))
    both_TD[(first_B[:, None] + torch.arange(before)).flatten()] = states_BWD.flatten(0, 1).to(x_DT.dtype)
    both_TD[place_T] = x_DT.t()
    end_B = bounds[1:] + torch.arange(len(slots)) * before
    last_BWD = both_TD[end_B[:, None] + torch.arange(before)]
    conv_states[slots] = last_BWD.transpose(1, 2).to(conv_states.dtype)
    everywhere = torch.full((len(both_TD),), before)
    out_TD = causal_convolution(both_TD.float(), weight_DW.float(), everywhere)[place_T]
    return F.silu(out_TD).to(x_DT.dtype).t()


def causal_conv1d_update_cpu(
    x_BD: Tensor,
    conv_states: Tensor,
    weight_DW: Tensor,
    bias: None,
    activation: str,
    conv_state_indices: Tensor,
) -> Tensor:
    """[B, D], for one token of each request."""
    slots = conv_state_indices.long()
    seen_BDW = torch.cat((conv_states[slots].to(x_BD.dtype), x_BD.unsqueeze(-1)), -1)
    conv_states[slots] = seen_BDW[..., 1:].to(conv_states.dtype)
    return F.silu((seen_BDW.float() * weight_DW.float()).sum(-1)).to(x_BD.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **unused,
) -> tuple[Tensor, None, None]:
    """([1, T, A, V], None, None), of all requests of a prefill. Each continues from its state."""
    slots = initial_state_indices.long()
    query_TAN, key_TAN = _of_value_heads(q[0], k[0], v.shape[2])
    plan = plan_chunks(cu_seqlens, q.device)
    start_SANV = initial_state[slots].transpose(-1, -2).float()
    out_TAV, end_SANV = gated_delta_rule(
        query_TAN, key_TAN, v[0].float(), g.view(-1, v.shape[2]), beta.view(-1, v.shape[2]), plan, start_SANV
    )
    initial_state[slots] = end_SANV.transpose(-1, -2).to(initial_state.dtype)
    return out_TAV.to(q.dtype).unsqueeze(0), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **unused,
) -> Tensor:
    """[1, B, A, V], for one token of each request."""
    slots, heads = initial_state_indices.long(), v.shape[2]
    query_BAN, key_BAN = _of_value_heads(q[0], k[0], heads)
    decay_BA = log_decay(A_log, a.view(-1, heads), dt_bias).exp()
    state_BAVN = initial_state_source[slots].float() * decay_BA[..., None, None]
    found_BAV = (state_BAVN @ key_BAN.unsqueeze(-1)).squeeze(-1)
    step_BA = b.view(-1, heads).float().sigmoid()
    corrected_BAV = (v[0].float() - found_BAV) * step_BA.unsqueeze(-1)
    state_BAVN = state_BAVN + corrected_BAV.unsqueeze(-1) * key_BAN.unsqueeze(-2)
    initial_state_source[slots] = state_BAVN.to(initial_state_source.dtype)
    out_BAV = (state_BAVN @ query_BAN.unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
    return out_BAV.to(q.dtype).unsqueeze(0)


def _of_value_heads(query_TKN: Tensor, key_TKN: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1, float32, for each value head."""
    shared = value_heads // query_TKN.shape[1]
    query, key = (unit(x.float()).repeat_interleave(shared, 1) for x in (query_TKN, key_TKN))
    return query, key


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log-decay, step), each float32 [1, T, A]."""
    return log_decay(A_log, a, dt_bias).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """([T, D], gates [T, A, V], steps [T, A], decays [T, A]) from the concatenated outputs of the projections."""
    values = value_heads * value_dim
    mixed, gate = qkvz.split([2 * key_heads * key_dim + values, values], -1)
    step, decay = ba.split(value_heads, -1)
    return mixed, gate.unflatten(-1, (value_heads, value_dim)), step.contiguous(), decay.contiguous()


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    queries: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, gates), each [heads, head_dim] of all tokens one after another. Queries and keys are normed per head. In
    ``queries`` the gate of a head follows its query."""
    query, gate = queries.unflatten(-1, (heads, 2, head_dim)).unbind(-2)
    query, key = (
        _centred_norm(x, weight, eps)
        for x, weight in ((query, q_weight), (keys.unflatten(-1, (-1, head_dim)), k_weight))
    )
    return query.flatten(0, 1), key.flatten(0, 1), gate.reshape(-1, head_dim).contiguous()


def _centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), eps).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    queries: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """As above, without gates."""
    query, key = (
        _centred_norm(x.unflatten(-1, (-1, head_dim)), weight, eps).view_as(x)
        for x, weight in ((queries, q_weight), (keys, k_weight))
    )
    return query, key


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return gated_norm(x, gate, weight, eps)


def fused_gate_sigmoid_mul_add(hidden: Tensor, weight_H: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add the shared expert's output times its gate."""
    output += F.linear(hidden, weight_H.unsqueeze(0)).sigmoid() * shared


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x.copy_(x.float() * gate.view_as(x).float().sigmoid())


OPERATORS = {
    function.__name__: function
    for function in (
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_rmsnorm_gated_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    )
}
