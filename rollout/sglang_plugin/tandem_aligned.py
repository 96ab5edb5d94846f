"""``numerics=aligned``: SGLang's modules of a dense model with the operations of ``numerics.aligned``, which the
learner runs too. Attention: ``tandem_batched_attention.py``.

SGLang's embedding stays: it sums nothing, or, over ranks, one row and zeros. The gathered logits stay too: every
tensor-parallel rank has the whole vocabulary. The log-prob of a sampled token is computed again from its logits, because
SGLang's is the logarithm of a rounded probability.
"""

from functools import partial

import torch

from numerics import aligned

SGLANG = "sglang.srt"
LAYERS = f"{SGLANG}.layers"


def register(pieces: int) -> None:
    """pieces: number of pieces of a sum over inputs, on all tensor-parallel ranks together."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, replacement in {
        f"{LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": partial(linear, pieces),
        f"{LAYERS}.layernorm.RMSNorm.forward": rms_norm,
        f"{LAYERS}.activation.SiluAndMul.forward": silu_and_mul,
        f"{LAYERS}.rotary_embedding.base.RotaryEmbedding.forward": rotary,
        f"{LAYERS}.logits_processor.LogitsProcessor._compute_lm_head": head,
        f"{SGLANG}.distributed.parallel_state.GroupCoordinator.all_reduce": sum_over_ranks,
    }.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.register(f"{LAYERS}.sampler.Sampler.forward", sample, HookType.AROUND)


def linear(pieces, method, layer, x, bias=None):
    from sglang.srt.layers.linear import RowParallelLinear

    shares_inputs = isinstance(layer, RowParallelLinear)
    pieces_here = pieces * layer.input_size_per_partition // layer.input_size if shares_inputs else 1
    return aligned.linear(x, layer.weight, bias, pieces=pieces_here)


def sum_over_ranks(group, x):
    """Sums in place, as SGLang does."""
    if group.world_size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=group.device_group)
    return x.copy_(aligned.tree_sum(parts))


def rms_norm(module, x, residual=None, post_residual_addition=None, quant_linear=None):
    if residual is None:
        return aligned.rms_norm(x, module.weight, module.variance_epsilon)
    residual = x + residual
    return aligned.rms_norm(residual, module.weight, module.variance_epsilon), residual


def silu_and_mul(module, x, *unused, **also_unused):
    gate, up = x.chunk(2, -1)
    return aligned.silu(gate) * up


def rotary(module, positions, query, key, *unused, **also_unused):
    cos_sin = module.cos_sin_cache_as(query.dtype).index_select(0, positions.flatten())
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    query, key = (
        aligned.rotated(x.reshape(len(cos), -1, module.head_size), cos, sin).view(x.shape)
        for x in (query, key)
    )
    return query, key


def head(processor, hidden_states, lm_head, embedding_bias=None, *, out=None):
    """Logits without the rows with which SGLang pads the vocabulary."""
    weight = lm_head.weight[: processor.vocab_size]
    if processor.use_fp32_lm_head:
        hidden_states, weight = hidden_states.float(), weight.float()
    return aligned.linear(hidden_states, weight)


def attention(queries, keys, values, *, attn_mask, scale):
    """As ``scaled_dot_product_attention`` of [B, key-value heads, ...]; attn_mask [B, 1, R, S]."""
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    sees = attn_mask.expand(-1, keys.shape[1], -1, -1).flatten(0, 1)
    query, key, value = (x.flatten(0, 1) for x in (queries, keys, values))
    return aligned.attention(query, key, value, sees, scale).view(queries.shape)


def sample(original, sampler, logits_output, sampling_info, return_logprob, *rest, **options):
    # The original overwrites the logits with probabilities.
    logits = logits_output.next_token_logits
    logits = logits if sampling_info.is_all_greedy else logits / sampling_info.temperatures
    logits = logits.clone() if return_logprob else None
    tokens = original(sampler, logits_output, sampling_info, return_logprob, *rest, **options)
    if logits is not None:
        logits_output.next_token_logprobs = aligned.logprobs(logits, tokens)
    return tokens
