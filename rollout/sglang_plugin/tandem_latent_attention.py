"""Latent attention (MLA; DeepSeek-V3, GLM-4.7-Flash) on SGLang's CPU servers.

SGLang 0.5.23 computes the prompts of such a model from keys and values of every head, for attention that takes these. Its
``torch_native`` attention reads the cache, which holds the short vectors: the answers would be wrong. Here prompts are
computed in the space of these vectors, as responses are. And SGLang refuses plain rotary frequencies on CPU, for which it
has the code all the same.
"""

ROPE = "sglang.srt.layers.rotary_embedding.factory"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{ROPE}.get_rope_cpu", plain_frequencies, HookType.AROUND)


def compute_in_latent_space() -> None:
    """For all prompts of this process that ``torch_native`` computes."""
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
    """``get_rope_cpu``, or what other devices have where nothing scales the frequencies."""
    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    if rope_scaling is not None:
        return original(*arguments, *rest, **options)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*arguments)
