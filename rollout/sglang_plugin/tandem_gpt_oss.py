"""gpt-oss on SGLang's CPU servers: attention with sinks and windows, and experts in float32.

SGLang 0.5.23 runs the family only on its kernels for GPUs and AMX. Without AMX it selects triton, which does not exist on CPU.
Here the family gets the attention of ``tandem_batched_attention.py`` under every name. SGLang has a second cache for layers with
a window, but on CPU reads it by the places of the first; here all layers share one cache. SGLang's sinks are bfloat16 whatever
the model's dtype is, and its activation is compiled on first use; here sinks have the model's dtype, and the activation runs
without compilation.
"""

import os

NAMES = ("triton", "intel_amx")
"""Attention backends that SGLang selects for the family on CPU."""
MODEL = "sglang.srt.models.gpt_oss"
NATIVE = "sglang.srt.layers.moe.fused_moe_native"


def register(attention) -> None:
    """attention: makes the backend of a model runner."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "gpt_oss" in os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(","):
        return  # a server of another model: the hooks would import the code of this one
    for name in NAMES:
        original = ATTENTION_BACKENDS[name]
        register_attention_backend(name)(
            lambda runner, original=original: _backend(runner, original, attention)
        )
    HookRegistry.register(f"{MODEL}.GptOssAttention.__init__", _give_sinks_the_models_dtype, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.configs.model_config.is_hybrid_swa_model", _has_one_cache, HookType.AFTER
    )
    HookRegistry.register(f"{NATIVE}.swiglu_gpt_oss_sigmoid_alpha", _clamped_swiglu, HookType.REPLACE)


def _backend(runner, original, attention):
    is_gpt_oss = "GptOssForCausalLM" in runner.model_config.hf_config.architectures
    return attention(runner) if is_gpt_oss else original(runner)


def _give_sinks_the_models_dtype(result, attention, *arguments, params_dtype, **options) -> None:
    """Runs after ``GptOssAttention.__init__``, before weights are loaded."""
    import torch

    sinks = torch.empty_like(attention.sinks, dtype=params_dtype)
    attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)


def _has_one_cache(result: bool, architectures, *rest) -> bool:
    return result and "GptOssForCausalLM" not in architectures


def _clamped_swiglu(x, alpha, limit):
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * (gate * alpha).sigmoid() * (up + 1)
