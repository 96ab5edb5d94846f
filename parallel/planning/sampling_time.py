"""Seconds of a step's sampling: prompts by their FLOPs, then decoding (``decoding.py``). See ``time.py``."""

from dataclasses import dataclass, replace

from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture, padded_vocab_size
from parallel.planning.decoding import Decoded, Decoder, Lengths, decode, mixed
from parallel.planning.flops import Flops, Load, forward_flops
from parallel.planning.machine import Machine
from parallel.planning.server_memory import RolloutMemory
from parallel.planning.traffic import Sent, forward_sent
from parallel.planning.work import BYTES

PREFILL_TOKENS = 8192
"""Tokens of a server's pass over prompts: SGLang's --chunked-prefill-size on large GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Seconds of the server that has the longest response, for the responses of one step."""

    prefill: float
    decode: float
    requests: float
    running: int
    """Responses that a server decodes at once, at most."""
    decoded: Decoded
    """Of all the steps that are sampled together."""

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.requests


def sampling_time(
    architecture: Architecture,
    config: RunConfig,
    lengths: Lengths,
    machine: Machine,
    *,
    tp: int,
    replicas: int,
    memory: RolloutMemory,
) -> Sampling:
    """Sampling of a step by ``replicas`` servers of ``tp`` ranks.

    A server gets every ``replicas``-th response by length, the longest among them, up to its share of
    ``max_concurrency``, and as many as its cache holds: of each the mean response and, where a prompt's keys and values
    are kept for its siblings, a share of the prompt. Prompts are computed once then.

    With max_staleness k the responses of 1 + k steps are sampled together, and their time is divided by 1 + k: while the
    last responses of a step run, the servers continue with those of later steps. But each update interrupts the responses
    that run, and their tokens are computed again.
    """
    rollout, over = config.rollout, machine.hardware.overheads
    together = 1 + rollout.max_staleness
    prompts = rollout.prompts_per_step * together
    own = mixed(sorted(lengths.of(prompts * rollout.group_size), reverse=True)[::replicas])
    count = len(own)
    is_kept = not rollout.server_flags.get("disable-radix-cache", False)  # a prompt, for its siblings
    of_prompt = lengths.prompt / rollout.group_size if is_kept else lengths.prompt
    held = int(memory.tokens / (of_prompt + lengths.response))
    if memory.responses is not None:
        held = min(held, memory.responses)
    places = max(1, min(-(-rollout.max_concurrency // replicas), held, count))
    decoded = decode(own, lengths.prompt, places, decoder_of(architecture, config, machine, tp, memory))
    of_server = -(-prompts // replicas) if is_kept else count
    interrupted = rollout.max_staleness > 0 and not rollout.drain_s
    prefill = prefill_seconds(architecture, config, machine, tp, lengths.prompt, of_server) / together
    if interrupted:
        so_far = lengths.prompt + lengths.response // 2
        prefill += prefill_seconds(architecture, config, machine, tp, so_far, places)
    return Sampling(
        prefill=prefill + over.prompt_s * of_server / together,
        decode=decoded.seconds / together,
        requests=over.response_s * count / together,
        running=places,
        decoded=decoded,
    )


def server_flops(architecture: Architecture, tp: int) -> Flops:
    """FLOPs of one token in a server's rank, if it attends only to itself."""
    layout = LayoutConfig(tp=tp, sp=architecture.experts is not None and tp > 1, dp=1)
    # Rows over t ranks: of t tokens each rank of a model with experts takes one.
    flops = forward_flops(architecture, layout, 0, Load(tokens=tp, pairs=tp, predicted=tp))
    # But what it has whole of latent attention is multiplied by all of them.
    of_others = 2 * architecture.num_layers * architecture.attention_numbers[1] * (tp - 1) if layout.sp else 0
    matrices = (flops.matrices + of_others) // tp
    return Flops(
        matrices=matrices, attention=flops.attention // tp, output=flops.output // tp, rule=flops.rule // tp
    )


def decoder_of(
    architecture: Architecture, config: RunConfig, machine: Machine, tp: int, memory: RolloutMemory
) -> Decoder:
    """The decoder of a server's rank. Weights are read whole but for the embedding, of which a token reads a row; an
    untied model's output layer is another table."""
    a, over, rollout = architecture, machine.hardware.overheads, config.rollout
    of_token = server_flops(a, tp)
    if a.latent is not None:  # scores and sums in the space of the cache
        of_pair = 2 * (2 * a.latent.rank + a.rotary_size) * a.num_layers * (a.num_heads // tp)
        of_token = replace(of_token, attention=of_pair)
    matmul, attention = _server_rates(config, machine)
    size = BYTES[rollout.dtype]
    table = 0 if a.tied else padded_vocab_size(a.vocab_size, tp) // tp * a.hidden_size * size
    experts, chosen = 0, 0.0
    if a.experts is not None:
        experts = (
            sum(a.experts.is_sparse) * a.experts.num_experts * 3 * a.hidden_size * a.experts.intermediate_size
        )
        experts = experts * size // tp
        chosen = a.experts.experts_per_token / a.experts.num_experts
    sent = _server_sent(a, tp, 1, rollout.dtype)
    return Decoder(
        fixed_s=over.decode_step_s + a.num_layers * over.decode_layer_s + machine.call_seconds(sent.calls),
        # A state is read and written.
        each_s=over.decode_response_s
        + machine.link_seconds(sent.bytes, tp)
        + machine.memory_seconds(2 * memory.state_bytes_per_response),
        weights_s=machine.memory_seconds(memory.weights - table - experts),
        experts_s=machine.memory_seconds(experts),
        chosen=chosen,
        read_s=machine.memory_seconds(memory.kv_bytes_per_token),
        product_s=(of_token.matrices + of_token.output + of_token.rule) / matmul,
        pair_s=of_token.attention / attention,
    )


def prefill_seconds(
    architecture: Architecture, config: RunConfig, machine: Machine, tp: int, tokens: int, count: int
) -> float:
    """A server's passes over ``count`` sequences of ``tokens`` tokens each: FLOPs, with logits of the last tokens only,
    collectives, and its layers' overhead once for each pass."""
    of_token = server_flops(architecture, tp)
    matmul, attention = _server_rates(config, machine)
    passes = -(-count * tokens // PREFILL_TOKENS)
    sent = _server_sent(architecture, tp, count * tokens, config.rollout.dtype)
    over = machine.hardware.overheads
    of_passes = passes * (architecture.num_layers * over.decode_layer_s + machine.call_seconds(sent.calls))
    products = tokens * (of_token.matrices + of_token.rule) + of_token.output
    pairs = tokens * (tokens + 1) / 2
    computing = count * (products / matmul + pairs * of_token.attention / attention)
    return computing + machine.link_seconds(sent.bytes, tp) + of_passes


def _server_sent(architecture: Architecture, tp: int, tokens: int, dtype: str) -> Sent:
    """Two all-reduces for each layer, with experts or without."""
    dense = replace(architecture, experts=None)
    return forward_sent(dense, LayoutConfig(tp=tp, dp=1), 0, tokens, dtype)["tensor"]


def _server_rates(config: RunConfig, machine: Machine) -> tuple[float, float]:
    """FLOPs a second that a server attains: (products with weights, products between tokens)."""
    peak, attained = machine.hardware.peak_tflops, machine.hardware.attained
    own = getattr(peak, config.rollout.dtype)
    products = peak.fp8 if config.rollout.quantization == "fp8" and peak.fp8 is not None else own
    return 1e12 * products * attained.prefill_matmul, 1e12 * own * attained.prefill_attention
