"""Equal prompts of one prefill, computed once, on CPU servers.

The samples of a group have the same prompt. SGLang's prefix cache knows a prompt only after its prefill, so for a group
that arrives at once it computes the prompt once per sample. Here the first of equal sequences is computed. Its keys and
values are copied to the others' slots, and its logits are repeated. The scheduler sees no difference.

SGLang's own code computes a prefill that is not plain text with plain attention, or that asks for log-probs, experts or
hidden states of its tokens.

S sequences and T tokens of the prefill; C sequences that are computed; V size of the vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
SHARED = "tandem: equal prompts of a prefill are computed once"
SEQUENCES = (
    "req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu", "req_pool_indices_cpu", "extend_seq_lens",
    "extend_prefix_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu",
    "top_logprobs_nums", "token_ids_logprobs", "lora_ids", "rids",
)  # fmt: skip
"""Fields of SGLang's ``ForwardBatch`` with an entry per sequence: tensors [S] and lists."""
TOKENS = ("input_ids", "positions", "out_cache_loc")
"""Fields with an entry per token, [T]."""
COUNTS = (
    "batch_size", "seq_lens_sum", "extend_num_tokens", "extend_start_loc", "global_num_token_non_padded_cpu",
)  # fmt: skip
"""Fields that follow from those above."""
WHOLE = (
    "forward_mode", "capture_hidden_mode", "return_logprob", "sampling_info", "spec_algorithm", "is_extend_in_batch",
    "contains_last_prefill_chunk", "global_forward_mode", "kv_loc_plan", "out_cache_loc_is_physical",
    "extend_input_logprob_token_ids_gpu",
)  # fmt: skip
"""Fields that hold for all sequences. If any other field is not at its default, SGLang computes the prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    computed: list[int]
    """The C sequences that are computed, in their order."""
    place_S: Tensor
    """int64: for each sequence, its own place in ``computed``, or that of the equal sequence."""
    computed_tokens: Tensor
    """int64: the places of the C sequences' tokens in the prefill."""
    copied_tokens: Tensor
    """int64: the places of all other tokens. Each is a copy of the one in ``source_tokens``."""
    source_tokens: Tensor


def find_equal(token_ids: Tensor, lengths: Sequence[int], prefixes: Sequence[bytes]) -> Sharing | None:
    """Which sequences are equal; None if all differ.

    Args:
        token_ids: int [T], of all sequences one after another.
        lengths: number of tokens of each sequence.
        prefixes: a key for what each sequence continues, equal for those that continue the same.
    """
    place_of: dict[tuple[bytes, bytes], int] = {}
    computed: list[int] = []
    places: list[int] = []
    for sequence, tokens in enumerate(token_ids.split(list(lengths))):
        place = place_of.setdefault((prefixes[sequence], tokens.numpy().tobytes()), len(computed))
        if place == len(computed):
            computed.append(sequence)
        places.append(place)
    if len(computed) == len(places):
        return None
    place_S, length_S = torch.tensor(places), torch.tensor(lengths)
    start_S = length_S.cumsum(0) - length_S
    shift_S = start_S[torch.tensor(computed)[place_S]] - start_S
    token_T = torch.arange(len(token_ids))
    source_T = token_T + shift_S.repeat_interleave(length_S)
    is_copy_T = source_T != token_T
    return Sharing(
        computed=computed,
        place_S=place_S,
        computed_tokens=(~is_copy_T).nonzero()[:, 0],
        copied_tokens=is_copy_T.nonzero()[:, 0],
        source_tokens=source_T[is_copy_T],
    )


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend",
        compute_equal_prompts_once,
        HookType.AROUND,
    )


def compute_equal_prompts_once(original: Callable, eager_runner, batch, pp_proxy_tensors=None):
    """Instead of a prefill by ``original``: computes C sequences, and returns the logits of S."""
    runner = eager_runner.model_runner
    sharing = None
    if pp_proxy_tensors is None and can_share(runner, batch):
        prefixes = cached_prefixes(runner.req_to_token_pool.req_to_token, batch)
        sharing = find_equal(batch.input_ids, batch.extend_seq_lens_cpu, prefixes)
    if sharing is None:
        return original(eager_runner, batch, pp_proxy_tensors)
    _say_once()
    output = original(eager_runner, reduced(batch, sharing), None)
    slots, sources = (batch.out_cache_loc[t] for t in (sharing.copied_tokens, sharing.source_tokens))
    pool = runner.token_to_kv_pool
    for layer in (*pool.k_buffer, *pool.v_buffer):
        layer.index_copy_(0, slots, layer.index_select(0, sources))
    # [S, V]. A copy, because the sampler overwrites each sequence's logits.
    output.next_token_logits = output.next_token_logits.index_select(0, sharing.place_S)
    return output


def cached_prefixes(req_to_token: Tensor, batch) -> list[bytes]:
    """For each sequence, the slots of its cached prefix: equal slots mean equal prefixes."""
    lengths = batch.extend_prefix_lens_cpu
    if not any(lengths):
        return [b""] * len(lengths)
    rows = batch.req_pool_indices.tolist()
    return [req_to_token[row, :length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


@cache
def _say_once() -> None:
    logger.info(SHARED)


def can_share(runner, batch) -> bool:
    """Whether this prefill only asks for a next token of each sequence, and its inputs are only tokens."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    pool = runner.token_to_kv_pool
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and runner.is_generation
        and runner.lora_manager is None
        and type(pool) is MHATokenToKVPool
        and not (pool.use_hnd or pool.is_quantized_kv_cache)
        and get_global_experts_capturer() is None
        and batch.capture_hidden_mode in (None, CaptureHiddenMode.NULL)
        and not (batch.return_logprob and asks_for_prompt(batch))
        and not unknown_fields(batch)
    )


def unknown_fields(batch) -> list[str]:
    """Fields outside the lists above that are neither at their default nor a list of None."""
    known = {*SEQUENCES, *TOKENS, *COUNTS, *WHOLE}
    return [
        field.name
        for field in fields(batch)
        if field.name not in known and not is_nothing(getattr(batch, field.name), field.default)
    ]


def is_nothing(value: object, default: object) -> bool:
    if isinstance(value, list):
        return all(each is None for each in value)
    return value is None or value is default or (isinstance(value, int) and value == default)


def asks_for_prompt(batch) -> bool:
    """Whether the prefill asks for log-probs of a prompt's tokens."""
    return any(
        start < length
        for start, length in zip(batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
    )


def reduced(batch, sharing: Sharing):
    """The batch of the C sequences."""
    index = torch.tensor(sharing.computed)
    changes: dict[str, object] = {}
    for name in SEQUENCES:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            changes[name] = value[index]
        elif value is not None:
            changes[name] = [value[i] for i in sharing.computed]
    for name in TOKENS:
        changes[name] = getattr(batch, name)[sharing.computed_tokens]
    num_tokens, lengths = len(sharing.computed_tokens), batch.extend_seq_lens[index]
    return replace(
        batch,
        **changes,
        batch_size=len(sharing.computed),
        seq_lens_sum=int(batch.seq_lens_cpu[index].sum()),
        extend_num_tokens=num_tokens,
        global_num_token_non_padded_cpu=num_tokens,
        extend_start_loc=(lengths.cumsum(0) - lengths).to(batch.extend_start_loc.dtype),
    )
