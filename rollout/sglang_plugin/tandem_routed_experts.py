"""The experts that SGLang sends each token to, in its answers. No SGLang at the top: both sides import this file.

SGLang captures them itself (``--enable-return-routed-experts``). Three things are different here. On CPU the buffer is plain
memory: SGLang 0.5.23 pins it with CUDA on every device that it does not name, and fails. An id is returned in as few bytes
as the number of experts needs; SGLang returns four. And a request may name the weights that chose the experts of its first
tokens (``KNOWN_BY``), and ask only for the experts after these. If newer weights sampled its end, they computed the first
tokens again, and the answer has the experts of all tokens.
"""

WITH_EXPERTS = ", with routed experts"
"""Appended to the plugin's answer to ``QUESTION`` (``tandem_weight_receiver``) if its server captures experts."""
KNOWN_BY = "tandem_experts_known_by"
"""A field of a request's ``custom_params``: the version of the weights that chose the experts of the tokens before
``routed_experts_start_len``."""
CAPTURER = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create"
COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_maybe_collect_routed_experts"
)


def wire_type(num_experts: int) -> str:
    """The type of an id in an answer; numpy and torch have the same name for it."""
    return "uint8" if num_experts <= 256 else "int16"


def register(*, on_cpu: bool) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(COLLECT, tell_all_after_an_update, HookType.BEFORE)
    HookRegistry.register(COLLECT, narrow_ids, HookType.AFTER)
    if on_cpu:
        HookRegistry.register(CAPTURER, use_plain_memory, HookType.BEFORE)


def tell_all_after_an_update(processor, request) -> None:
    """Runs before a request's experts are collected."""
    known_by = (request.sampling_params.custom_params or {}).get(KNOWN_BY)
    if known_by is not None and known_by != served_version():
        request.routed_experts_start_len = 0


def served_version() -> str | None:
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


def narrow_ids(result: None, processor, request) -> None:
    """Runs after a request's experts were collected as int32."""
    if request.routed_experts is not None:
        import torch

        kind = getattr(torch, wire_type(num_experts_of(processor.model_config.hf_text_config)))
        request.routed_experts = request.routed_experts.to(kind)


def num_experts_of(config) -> int:
    """The number in a Hugging Face config of Qwen3-MoE, or of Mixtral and GLM-4.5, which have the same name for it."""
    return config.num_experts if hasattr(config, "num_experts") else config.num_local_experts


def use_plain_memory(*args: object, **kwargs: object) -> None:
    """Runs before the capturer is made."""
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory


def plain_memory(dims, dtype, device, pin_memory, allocator, *args: object, **kwargs: object):
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def is_captured() -> bool:
    """Whether this server captures experts."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer() is not None
