"""Seconds of a training step, estimated: a roofline of each part. Pure functions of numbers, without torch.

    sampling    a server's prompts (FLOPs), then decoding, a token of each response at a time: whichever takes longer,
                reading weights and cache, or FLOPs. Responses that its cache has no room for wait for others to end.
                The longest response sets the end.
    training    the passes before the update (``old``, ``ref``) and the update: FLOPs, then collectives, which nothing
                hides; the bubble of the pipeline; the optimizer.
    transfer    all weights over the slowest link

    step = sampling + training + transfer,  or  max(sampling, training) + transfer  with rollout.max_staleness >= 1

Every rank has as much to do as the others, and every micro-batch as much as any. A description of the hardware
(``configs/schema/hardware.py``) has the rates. ``assumptions`` says in sentences what an estimate rests on.

Legend: as in ``memory.py`` and ``decoding.py``; m micro-batches of a minibatch on each rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from configs.schema.hardware import HardwareConfig
from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.adapters import adapter_parameters
from parallel.planning.decoding import Decoded, Decoder, Lengths, decode, mixed
from parallel.planning.flops import Flops, Load, forward_flops, update_flops
from parallel.planning.layout import Architecture, padded_vocab_size
from parallel.planning.memory import BYTES, RolloutMemory, stage_parameters
from parallel.planning.traffic import (
    Group,
    Sent,
    again_sent,
    backward_sent,
    bytes_to_send,
    data_bytes,
    forward_sent,
    scored_passes,
)

PROMPT_TOKENS = 256
"""Of a prompt, where nothing else is said."""
SHARED_COST = 8
"""A micro-batch counts an eighth of a shared prompt for each sample (``learner.share_prompts``)."""
PREFILL_TOKENS = 8192
"""Tokens of a server's pass over prompts: SGLang's --chunked-prefill-size on large GPUs."""


# ---------------------------------------------------------------------------------------------------------------------
# rates of a description


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices of one kind, in nodes."""

    hardware: HardwareConfig
    gpus_per_node: int

    def training_seconds(self, flops: Flops, dtype: str) -> float:
        attained, peak = self.hardware.attained, 1e12 * getattr(self.hardware.peak_tflops, dtype)
        matrices = (flops.matrices + flops.output) / (peak * attained.train_matmul)
        return matrices + flops.attention / (peak * attained.train_attention)

    def memory_seconds(self, size: float) -> float:
        return size / (1e9 * self.hardware.memory_gb_s * self.hardware.attained.memory)

    def link_seconds(self, size: float, ranks: int) -> float:
        """Of bytes that a rank sends in a group that ``ranks`` consecutive ranks span."""
        is_inside = ranks <= self.gpus_per_node
        rate = self.hardware.node_link_gb_s if is_inside else self.hardware.network_gb_s
        return size / (1e9 * rate * self.hardware.attained.links)

    def call_seconds(self, calls: float) -> float:
        return calls * self.hardware.overheads.collective_s


def spanned(layout: LayoutConfig, group: Group | str) -> int:
    """Consecutive ranks that a group of the learner lies within. Megatron's order: tp, cp, dp, pp; experts over
    consecutive ranks."""
    inner = layout.tp * layout.cp
    spans = {
        "tensor": layout.tp,
        "context": inner,
        "expert": layout.ep,
        "data": inner * layout.dp_size,
        "pipeline": layout.world_size,
    }
    return spans[group]


# ---------------------------------------------------------------------------------------------------------------------
# sampling


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

    With max_staleness k the responses of 1 + k steps are sampled together and their time is divided by as many, since
    the servers go on with later steps' where the step's last ones run; but each update interrupts the responses that
    run, and their tokens are computed again.
    """
    rollout, over = config.rollout, machine.hardware.overheads
    together = 1 + rollout.max_staleness
    prompts = rollout.prompts_per_step * together
    own = mixed(sorted(lengths.of(prompts * rollout.group_size), reverse=True)[::replicas])
    count = len(own)
    is_kept = keeps_prompts(config)
    of_prompt = lengths.prompt / rollout.group_size if is_kept else lengths.prompt
    tokens = (
        memory.tokens if rollout.max_total_tokens is None else min(memory.tokens, rollout.max_total_tokens)
    )
    held = int(tokens / (of_prompt + lengths.response))
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


def keeps_prompts(config: RunConfig) -> bool:
    """Whether a server's prefix cache keeps a prompt for its siblings."""
    flags = {name.replace("_", "-"): value for name, value in config.rollout.server_args.items()}
    return not flags.get("disable-radix-cache", False)


def server_flops(architecture: Architecture, tp: int) -> Flops:
    """FLOPs of one token in a server's rank, to which it attends alone."""
    layout = LayoutConfig(tp=tp, sp=architecture.experts is not None and tp > 1, dp=1)
    # Rows over t ranks: of t tokens each rank of a model with experts takes one.
    flops = forward_flops(architecture, layout, 0, Load(tokens=tp, pairs=tp, predicted=tp))
    return Flops(matrices=flops.matrices // tp, attention=flops.attention // tp, output=flops.output // tp)


def decoder_of(
    architecture: Architecture, config: RunConfig, machine: Machine, tp: int, memory: RolloutMemory
) -> Decoder:
    """The decoder of a server's rank. Weights are read whole but for the embedding, of which a token reads a row; an
    untied model's output layer is another table."""
    a, over, rollout = architecture, machine.hardware.overheads, config.rollout
    of_token = server_flops(a, tp)
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
        each_s=over.decode_response_s + machine.link_seconds(sent.bytes, tp),
        weights_s=machine.memory_seconds(memory.weights - table - experts),
        experts_s=machine.memory_seconds(experts),
        chosen=chosen,
        read_s=machine.memory_seconds(memory.kv_bytes_per_token),
        product_s=(of_token.matrices + of_token.output) / matmul,
        pair_s=of_token.attention / attention,
    )


def prefill_seconds(
    architecture: Architecture, config: RunConfig, machine: Machine, tp: int, tokens: int, count: int
) -> float:
    """A server's passes over ``count`` sequences of ``tokens`` tokens each: FLOPs, with logits of the last tokens alone,
    collectives, and its layers' overhead once for each pass."""
    of_token = server_flops(architecture, tp)
    matmul, attention = _server_rates(config, machine)
    passes = -(-count * tokens // PREFILL_TOKENS)
    sent = _server_sent(architecture, tp, count * tokens, config.rollout.dtype)
    over = machine.hardware.overheads
    of_passes = passes * (architecture.num_layers * over.decode_layer_s + machine.call_seconds(sent.calls))
    products = tokens * of_token.matrices + of_token.output
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


# ---------------------------------------------------------------------------------------------------------------------
# training


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Seconds of the learner for one step."""

    score: float
    """The passes before the update, with their collectives and bubble."""
    compute: float
    """Of the update, on the slowest stage: arithmetic and the host's time for each pass."""
    collectives: float
    """Of the update, on the slowest stage, without those of the optimizer step."""
    bubble: float
    """Of the update: while the pipeline fills and drains."""
    optimizer: float
    """Gradients summed, weights gathered, numbers read and written."""
    rest: float
    """Samples on their way into batches, and all else."""
    stages: tuple[float, ...]
    """Update's seconds of each stage that it computes and sends."""

    @property
    def total(self) -> float:
        return self.score + self.compute + self.collectives + self.bubble + self.optimizer + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a copy of the model trains in a step."""

    load: Load
    microbatches: int
    """m, of each minibatch."""


def batch_of(config: RunConfig, lengths: Lengths, layout: LayoutConfig) -> Batch:
    """The batch of each of the ``dp`` copies. Micro-batches are full: as many as the tokens need."""
    rollout, learner = config.rollout, config.learner
    whole, counted = step_load(
        lengths, rollout.prompts_per_step, rollout.group_size, shares=shares_prompts(config, layout)
    )
    full = math.ceil(counted / (layout.dp_size * learner.minibatches * learner.token_budget))
    multiple = layout.microbatch_multiple
    return Batch(load=whole.divided(layout.dp_size), microbatches=-(-max(1, full) // multiple) * multiple)


@lru_cache(maxsize=64)
def step_load(lengths: Lengths, groups: int, group_size: int, *, shares: bool) -> tuple[Load, float]:
    """All samples of a step, and the tokens that micro-batches count for them.

    shares: samples that share a prompt compute it once, and an eighth of it is counted for each. The last token of a
    response is no input.
    """
    responses, p = lengths.of(groups * group_size), lengths.prompt
    if shares:
        tokens = groups * p + sum(length - 1 for length in responses)
        pairs = groups * (p * (p + 1) // 2)
        pairs += sum((length - 1) * p + (length - 1) * length // 2 for length in responses)
        counted = tokens + len(responses) * p / SHARED_COST
    else:
        places = [p + length - 1 for length in responses]
        tokens = counted = sum(places)
        pairs = sum(n * (n + 1) // 2 for n in places)
    return Load(tokens=tokens, pairs=pairs, predicted=sum(responses)), counted


def shares_prompts(config: RunConfig, layout: LayoutConfig) -> bool:
    """Whether the learner computes a shared prompt once. Transformer Engine, which a plan does not know of, does not."""
    is_whole = layout.cp > 1 or config.model.numerics == "aligned" or config.learner.routing != "own"
    return config.learner.share_prompts and not is_whole


def training_time(
    architecture: Architecture,
    config: RunConfig,
    lengths: Lengths,
    machine: Machine,
    layout: LayoutConfig,
    *,
    critic: Architecture | None = None,
) -> Training:
    """Training of a step. A critic has as many passes as the policy, one of them before the update."""
    batch = batch_of(config, lengths, layout)
    over, rollout = machine.hardware.overheads, config.rollout
    models = [(architecture, scored_passes(config), True)]
    if critic is not None:
        models.append((critic, 1, False))
    score = compute = collectives = bubble = optimizer = 0.0
    stages = [0.0] * layout.pp
    for model, scored, is_policy in models:
        passes = [
            _Passes(model, config, machine, layout, batch, stage, is_policy=is_policy)
            for stage in range(layout.pp)
        ]
        fill = bubble_share(layout, batch.microbatches)
        # The passes before the update take all minibatches at once.
        of_score = bubble_share(layout, batch.microbatches * config.learner.minibatches)
        score += scored * max(each.forward for each in passes) * (1 + of_score)
        slowest = max(passes, key=lambda each: each.update)
        compute += slowest.compute
        collectives += slowest.sending
        bubble += slowest.update * fill
        optimizer += config.learner.minibatches * max(
            optimizer_seconds(model, config, machine, layout, stage, is_policy=is_policy)
            for stage in range(layout.pp)
        )
        stages = [total + each.update for total, each in zip(stages, passes, strict=True)]
    sampled = rollout.prompts_per_step * rollout.group_size * lengths.response
    return Training(
        score=score,
        compute=compute,
        collectives=collectives,
        bubble=bubble,
        optimizer=optimizer,
        rest=over.step_s + over.token_s * sampled,
        stages=tuple(stages),
    )


def bubble_share(layout: LayoutConfig, microbatches: int) -> float:
    """Idle time of a stage while the pipeline fills and drains, as a share of the time in which it works:
    (pp - 1) / (m vpp). Source: Narayanan et al., arXiv 2104.04473, 2.2."""
    return (layout.pp - 1) / (microbatches * layout.vpp)


@dataclass(frozen=True)
class _Passes:
    """Seconds of a stage's passes over a step's tokens."""

    model: Architecture
    config: RunConfig
    machine: Machine
    layout: LayoutConfig
    batch: Batch
    stage: int
    is_policy: bool = True

    @cached_property
    def forward(self) -> float:
        """One forward pass, with its collectives."""
        flops = forward_flops(self.model, self.layout, self.stage, self.batch.load, output=self.is_policy)
        return self._computing(flops, 1) + self._sending([forward_sent(*self._sent)])

    @cached_property
    def compute(self) -> float:
        learner = self.config.learner
        flops = update_flops(
            self.model,
            self.layout,
            self.stage,
            self.batch.load,
            recompute=learner.recompute,
            lora=learner.lora if self.is_policy else None,
            output=self.is_policy,
        )
        return self._computing(flops, 3 if learner.recompute == "full" else 2)

    @cached_property
    def sending(self) -> float:
        sent = [forward_sent(*self._sent), backward_sent(*self._sent)]
        return self._sending(sent + [again_sent(*self._sent)] * (self.config.learner.recompute == "full"))

    @property
    def update(self) -> float:
        return self.compute + self.sending

    @property
    def _sent(self) -> tuple[Architecture, LayoutConfig, int, int, str]:
        tokens = self.batch.load.divided(self.layout.cp).tokens
        return self.model, self.layout, self.stage, tokens, self.config.model.dtype

    @property
    def _microbatches(self) -> int:
        """Of the whole step."""
        return self.batch.microbatches * self.config.learner.minibatches

    def _computing(self, flops: Flops, passes: int) -> float:
        host = self.machine.hardware.overheads.pass_s * passes * self._microbatches
        return self.machine.training_seconds(flops, self.config.model.dtype) + host

    def _sending(self, passes: Iterable[dict[Group, Sent]]) -> float:
        return sum(
            self.machine.link_seconds(sent.bytes, spanned(self.layout, group))
            + self.machine.call_seconds(sent.calls * self._microbatches)
            for each in passes
            for group, sent in each.items()
        )


def optimizer_seconds(
    architecture: Architecture,
    config: RunConfig,
    machine: Machine,
    layout: LayoutConfig,
    stage: int,
    *,
    is_policy: bool = True,
) -> float:
    """One optimizer step: ``data_bytes`` over the link of the data-parallel group, and AdamW's numbers in memory.

    AdamW reads the gradient, twice with its norm, and the two moments and the float32 weight, and writes the latter three:
    8 + 12 + 12 bytes for each number whose state this rank has, and b to write the weight. Zeroing: 4 for each of the
    rank's gradients.
    """
    shared, expert = stage_parameters(architecture, layout, stage, output=is_policy)
    copies = layout.cp * layout.dp_size
    if is_policy and config.learner.lora is not None:
        shared, expert = adapter_parameters(architecture, layout, config.learner.lora), 0
    state: float = shared + expert
    if config.learner.optimizer.distributed:
        state = shared / copies + expert * layout.ep / (layout.tp * copies)
    size = (32 + BYTES[config.model.dtype]) * state + 4 * (shared + expert)
    sent = machine.link_seconds(
        data_bytes(architecture, config, layout, stage, output=is_policy), spanned(layout, "data")
    )
    return machine.memory_seconds(size) + sent + machine.hardware.overheads.optimizer_s


# ---------------------------------------------------------------------------------------------------------------------
# the step


def transfer_seconds(
    architecture: Architecture, config: RunConfig, machine: Machine, layout: LayoutConfig, num_gpus: int
) -> float:
    """All stages' weights in turn, each gathered by its ranks (tensor and expert parallelism) while the bucket before is
    sent: the longer of the two. Every server rank gets all of them."""
    sent = sum(bytes_to_send(architecture, config.rollout.dtype, layout))
    gathering = 0.0
    if layout.tp > 1 or layout.ep > 1:
        gathering = machine.link_seconds(sent, max(layout.tp, layout.ep))
    return max(machine.link_seconds(sent, num_gpus), gathering) + machine.hardware.overheads.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step."""

    sampling: Sampling
    training: Training
    transfer: float
    staleness: int

    @property
    def total(self) -> float:
        both = self.sampling.total, self.training.total
        return (max(both) if self.staleness else sum(both)) + self.transfer

    @property
    def server_waits(self) -> float:
        """Seconds in which servers have nothing to do, transfer aside."""
        return self.total - self.transfer - self.sampling.total

    @property
    def learner_waits(self) -> float:
        return self.total - self.transfer - self.training.total

    def shares(self) -> dict[str, float]:
        """Seconds of the three parts by name."""
        return {
            "sampling": self.sampling.total,
            "training": self.training.total,
            "transfer": self.transfer,
        }

    def parts(self) -> dict[str, float]:
        """Names and seconds of all parts, in their order."""
        of_sampling = {name: getattr(self.sampling, name) for name in ("prefill", "decode", "requests")}
        names = [f.name for f in fields(Training) if f.name != "stages"]
        of_training = {name: getattr(self.training, name) for name in names}
        return of_sampling | of_training | {"transfer": self.transfer}


class Estimator:
    """Estimates steps of one model and config in any layouts. Many pairs of layouts have the same servers or the same
    learner, so that each is estimated once."""

    def __init__(
        self,
        architecture: Architecture,
        config: RunConfig,
        lengths: Lengths,
        machine: Machine,
        *,
        critic: Architecture | None = None,
    ):
        self._of, self._critic = (architecture, config, lengths, machine), critic
        self._sampling: dict[tuple[int, int], Sampling] = {}
        self._training: dict[LayoutConfig, Training] = {}

    def step(self, layout: LayoutConfig, *, tp: int, replicas: int, memory: RolloutMemory) -> StepTime:
        """A step of a learner of this layout and ``replicas`` servers of ``tp`` ranks, each with ``memory``."""
        architecture, config, _, machine = self._of
        servers = (tp, replicas)
        if servers not in self._sampling:
            self._sampling[servers] = sampling_time(*self._of, tp=tp, replicas=replicas, memory=memory)
        if layout not in self._training:
            self._training[layout] = training_time(*self._of, layout, critic=self._critic)
        num_gpus = layout.world_size + tp * replicas
        return StepTime(
            sampling=self._sampling[servers],
            training=self._training[layout],
            transfer=transfer_seconds(architecture, config, machine, layout, num_gpus),
            staleness=config.rollout.max_staleness,
        )


def two_digits(seconds: float) -> float:
    """Rounded to two significant digits: an estimate is worth no more."""
    return float(f"{seconds:.1e}")


def seconds_text(seconds: float) -> str:
    """``two_digits`` as text: 0.10, 9.6, 1,200."""
    rounded = two_digits(seconds)
    digits = 0 if rounded == 0 else max(0, 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{digits}f}"


def assumptions(config: RunConfig, lengths: Lengths, machine: Machine) -> list[str]:
    """What an estimate rests on, a sentence each."""
    hardware, rollout = machine.hardware, config.rollout
    attained, over = hardware.attained, hardware.overheads
    said = [
        f"{hardware.name}: {hardware.source}",
        f"attained of the peak: matrix products {attained.train_matmul:.0%} in training, {attained.prefill_matmul:.0%} in servers; "
        f"attention {attained.train_attention:.0%} and {attained.prefill_attention:.0%}; memory {attained.memory:.0%}; "
        f"links {attained.links:.0%}",
        "overheads: "
        + ", ".join(
            f"{name} {getattr(over, name):g}" for name in type(over).model_fields if getattr(over, name)
        ),
        f"prompts of {lengths.prompt:,} tokens; {_lengths_text(lengths)}",
        "one turn a sample; rewards and environments take no time",
        "responses run as many at a time as the cache holds of mean length; the one that is longest sets the end",
        "all ranks have as much to do, micro-batches are full, and nothing hides a collective",
    ]
    if (
        config.learner.share_prompts
        and config.model.numerics == "default"
        and config.learner.routing == "own"
    ):
        said.append(
            "siblings' prompts are computed once, in servers and (without cp and without Transformer Engine) in the learner"
        )
    if rollout.max_staleness:
        said.append(
            f"max_staleness={rollout.max_staleness}: sampling and training overlap, the longer one counts; servers go on with later "
            "steps' responses where a step's last ones run"
            + ("" if rollout.drain_s else ", and compute interrupted ones again at each update")
        )
    if rollout.dynamic_sampling.type == "resample":
        said.append("no group is sampled again (rollout.dynamic_sampling)")
    return said


def _lengths_text(lengths: Lengths) -> str:
    if lengths.spread == 0 or lengths.response >= lengths.longest:
        return f"responses of {min(lengths.response, lengths.longest):,} tokens each"
    return (
        f"responses of {lengths.response:,} tokens in the mean, lognormal with a spread of {lengths.spread:g} in the logarithm, "
        f"cut at {lengths.longest:,}"
    )
