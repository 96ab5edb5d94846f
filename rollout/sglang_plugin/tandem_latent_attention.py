"""Latent attention (MLA; DeepSeek-V3, GLM-4.7-Flash) on SGLang's CPU servers.

SGLang 0.5.23 computes prompts of such a model with the keys and values of every head, for attention that takes these. But its
``torch_native`` attention reads the cache, which holds the short latent vectors: the answers would be wrong. Here prompts are
computed in the space of the latent vectors, as responses are. SGLang also refuses plain rotary frequencies on CPU, although it
has the code for them.
"""

ROPE = "sglang.srt.layers.rotary_embedding.factory"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{ROPE}.get_rope_cpu", plain_frequencies, HookType.AROUND)


def compute_in_latent_space() -> None:
    """Compute all prompts of this process with ``torch_native`` attention in the space of the latent vectors."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def plain_frequencies(
    original,
    head_size,
    rotary_dim,
    max_position,
    base,
    is_neox_style=True,
    rope_scaling=None,
    *rest,
    **options,
):
    """``get_rope_cpu``; if nothing scales the frequencies, ``get_rope``, which other devices use."""
    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    if rope_scaling is not None:
        return original(*arguments, *rest, **options)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*arguments)
