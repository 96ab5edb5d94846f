"""Memory per rank of a rollout server in bytes, by SGLang's own rules, alone and beside a learner's (``memory``)."""

import math
from dataclasses import dataclass

from configs.schema.rollout import Quantization
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture, padded_vocab_size
from parallel.planning.memory import LearnerMemory
from parallel.planning.work import BYTES

STATES_SHARE = 0.9 / 1.9
"""Of the memory for states and cache: SGLang's --mamba-full-memory-ratio is 0.9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMemory:
    """Bytes of one rank of an SGLang server, which takes the rest of the memory as ``kv_cache``, or as much
    as its limit allows."""

    weights: int
    reserved: int
    kv_cache: int
    kv_bytes_per_token: int
    unused: int = 0
    """Memory that a limit of the cache's tokens leaves free."""
    states: int = 0
    """Of recurrent layers, for as many responses at once as it holds."""
    state_bytes_per_response: int = 0

    @property
    def responses(self) -> int | None:
        """Responses at once that ``states`` holds; None: no state limits them."""
        return self.states // self.state_bytes_per_response if self.state_bytes_per_response else None

    @property
    def tokens(self) -> int:
        """Tokens in the key/value cache; each rank of a server holds its own heads of all of them."""
        return self.kv_cache // self.kv_bytes_per_token


def rollout_memory(
    architecture: Architecture,
    tensor_parallel: int,
    dtype: str,
    gpu_bytes: int,
    *,
    static_share: float | None = None,
    quantization: Quantization = "none",
    max_tokens: int | None = None,
) -> RolloutMemory:
    """Memory of a server's rank: weights and cache share ``static_share`` of the GPU, SGLang's
    --mem-fraction-static. The cache has at most ``max_tokens``, SGLang's --max-total-tokens.

    By default SGLang 0.5.23 leaves ``left_by_sglang``.
    Weights: all matrices over t, norms and router whole, key/value heads copied if there are fewer than
    ranks. A token of the cache: a key and a value per layer, 2 L max(1, K / t) D numbers of the server's
    dtype. Of latent attention a token has L (r + R) on every rank, and beside the weights there is a copy of the factor of
    keys and values. Of recurrent layers a response has a state (``state_bytes``), whatever its length, and SGLang gives the
    states ``STATES_SHARE`` of the room for states and cache. FP8 (of dense models with attention alone): the layers' matrices
    have 1 byte a number and 4 an output channel; while it starts, a server holds them in its dtype, before there is a cache.
    """
    a, t, b = architecture, tensor_parallel, BYTES[dtype]
    matrices, others = _numbers_of_weights(a, t, b)
    weights = (matrices + others) * b
    if quantization == "fp8":
        outputs = _rows_of_qkv(a, t) + 2 * a.hidden_size + 2 * a.intermediate_size // t
        weights = matrices + 4 * a.num_layers * outputs + others * b
    reserved = left_by_sglang(gpu_bytes, t) if static_share is None else int((1 - static_share) * gpu_bytes)
    of_layer = 2 * _kv_heads(a, t) * a.head_dim if a.latent is None else a.latent.rank + a.rotary_size
    of_token = a.num_attentions * of_layer * b
    room = max(0, gpu_bytes - reserved - weights)
    of_response = state_bytes(a, t, b)
    states = int(STATES_SHARE * room) if of_response else 0
    room -= states
    kv_cache = room if max_tokens is None else min(room, max_tokens * of_token)
    return RolloutMemory(
        weights=weights,
        reserved=reserved,
        kv_cache=kv_cache,
        kv_bytes_per_token=of_token,
        unused=room - kv_cache,
        states=states,
        state_bytes_per_response=of_response,
    )


def static_share(config: RunConfig) -> float | None:
    """The share of a GPU that the config gives to the servers, if it does."""
    for name, value in config.rollout.server_args.items():
        if name.replace("_", "-") != "mem-fraction-static":
            continue
        try:
            share = float(value)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 < share < 1:
            raise ValueError(
                f"rollout.server_args.{name}={value!r} is no share of a GPU; give a number between 0 and 1, or leave it out"
            )
        return share
    return None


def both_bytes(learner: LearnerMemory, server: RolloutMemory) -> int:
    """Bytes on a GPU that learner and servers share, while weights are sent or a checkpoint is written: nothing is sampled and
    nothing is trained, so that neither cache nor activations are there (``trainer/turns.py``)."""
    return learner.beside_servers + server.weights


def _kv_heads(a: Architecture, t: int) -> int:
    """Of a rank."""
    return max(1, a.num_kv_heads // t)


def _rows_of_qkv(a: Architecture, t: int) -> int:
    """Of a rank's matrix of queries, keys and values."""
    return (a.num_heads // t + 2 * _kv_heads(a, t)) * a.head_dim


def _numbers_of_weights(a: Architecture, t: int, b: int) -> tuple[int, int]:
    """Of a rank: numbers of the layers' matrices, and all others. Those in float32 count as 4 / b numbers each."""
    copied = 2 * a.hidden_size * a.head_dim * (_kv_heads(a, t) * t - a.num_kv_heads) // t
    if a.latent is not None:
        copied = a.latent.rank * a.num_heads * (a.head_dim - a.rotary_size + a.value_dim) // t
    # SGLang does not split an embedding that it multiplies by a number.
    rows = a.vocab_size if a.family.is_gemma else padded_vocab_size(a.vocab_size, t) // t
    matrices = a.num_attentions * copied
    others = a.hidden_size + rows * a.hidden_size * (1 if a.tied else 2)
    for layer in range(a.num_layers):
        of_attention, of_mlp = _numbers_of_attention(a, layer, t), _numbers_of_mlp(a, layer, t, b)
        matrices += of_attention[0] + of_mlp[0]
        others += of_attention[1] + of_mlp[1] + a.layer_norms * a.hidden_size
    return matrices, others


def _numbers_of_attention(a: Architecture, layer: int, t: int) -> tuple[int, int]:
    """Of the matrices, and of the vectors. Copied heads are not among those."""
    split, whole = a.mixer_numbers(layer)
    matrices = split // t + whole
    split, whole = a.mixer_vectors(layer)
    if a.qkv_bias:  # those of copied heads are copied too
        split = _rows_of_qkv(a, t) * t + (a.num_heads if a.family.has_sinks else 0)
    if a.family.whole_qk_norm:  # whole on every rank
        split, whole = 0, whole + (a.num_heads + a.num_kv_heads) * a.head_dim
    return matrices, split // t + whole


def _numbers_of_mlp(a: Architecture, layer: int, t: int, b: int) -> tuple[int, int]:
    """Of the matrices, and of the router and biases, which every rank has whole."""
    experts = a.experts
    if experts is None or not a.is_sparse(layer):
        return 3 * a.hidden_size * a.intermediate_size // t, 0
    routed = experts.num_experts * experts.intermediate_size
    matrices = 3 * a.hidden_size * (routed + experts.shared_size) // t
    others = a.hidden_size * experts.num_experts
    if a.family.has_sinks:  # the experts' biases are float32
        biases = experts.num_experts * (2 * experts.intermediate_size // t + a.hidden_size)
        others += experts.num_experts + biases * (4 // b)
    return matrices, others


def state_bytes(architecture: Architecture, tensor_parallel: int, size: int) -> int:
    """What a rank of a server keeps of a response for its recurrent layers: of each a float32 matrix N V of each of A / t
    heads, and the W - 1 last inputs of the convolution in the server's dtype, of ``size`` bytes."""
    r, t = architecture.recurrent, tensor_parallel
    if r is None:
        return 0
    of_layer = 4 * r.value_heads * r.key_dim * r.value_dim + size * r.convolved * (r.width - 1)
    return sum(r.is_recurrent) * of_layer // t


def left_by_sglang(gpu_bytes: int, tensor_parallel: int) -> int:
    """Bytes of a GPU that SGLang 0.5.23 leaves beside weights and cache (``handle_gpu_memory_settings``): MiB of 512, 1.5 for
    each token of the largest prefill, 128 a rank, 2 for each response of the largest CUDA graph of decoding, and 8 for each
    of prefill. Both largest ones depend on the memory, the second on the ranks too."""
    size, has_many_ranks = gpu_bytes / 2**20, tensor_parallel >= 4
    if size < 20 * 1024:
        prefill, responses = 2048, 8
    elif size < 60 * 1024:
        prefill, responses = 4096, 160 if has_many_ranks else 48 if size < 35 * 1024 else 32
    elif size < 160 * 1024:
        prefill, responses = 8192, 512 if has_many_ranks else 256
    else:
        prefill, responses = 16384, 512
    graphs = 50 + (prefill - 4096) // (512 if prefill > 4096 else 256)
    left = 512 + 1.5 * prefill + 128 * tensor_parallel + 2 * responses + 8 * graphs
    return int(max(left, 10 * 1024 if size > 60 * 1024 else 0) * 2**20)
