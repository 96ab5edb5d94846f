"""Memory per rank of a learner in bytes: arithmetic on an architecture and a layout. A server's: ``server_memory``.

Legend: T tokens of a micro-batch (on each of C context-parallel ranks, a C-th of it), L layers of a stage, H
hidden size, A query heads, K key/value heads, D head dimension, I intermediate size of an MLP or expert, E
experts, V padded vocabulary, t tensor-parallel size; b bytes of a number in the model's dtype (4 or 2), c bytes
of a number in the attention's dtype (``platform.attention_dtype``: 4 on CPU, b on CUDA).

``USABLE_SHARE`` leaves room for everything else: the CUDA context, NCCL's buffers, the allocator's fragments,
and the gradients of activations that live for the length of one operation. The CPU's numbers are compared with
torch's (``tests/parallel/planning/test_memory.py``); CUDA's follow from the same derivation with the tensors
that the CUDA kernels save.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LoraConfig
from configs.schema.run import RunConfig, SftConfig
from parallel.planning.adapters import adapter_parameters
from parallel.planning.architecture import (
    CHUNK,
    ROTATED_IN_FLOAT32,
    SINK_SIZE,
    WINDOW_BLOCK,
    Architecture,
    padded_vocab_size,
)
from parallel.planning.model_parts import Latent

GIB = 2**30
Device = Literal["cpu", "cuda"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BUCKET_BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""Size by device of a bucket of small tensors that are sent to servers. On CPU it stays in the cache until it is sent."""
NUM_BUFFERS = {"cuda": 2, "cpu": 3}
"""Such buckets by device of which memory is kept, for each kind: one is filled while the others are sent. On one machine
servers take longer for a large tensor that needs no buffer than the next bucket takes to be filled; a third one is filled
then."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory for the items of this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The settings that decide a learner rank's memory, beside model and layout."""

    device: Device
    dtype: str
    token_budget: int
    chunk_tokens: int
    recompute: Literal["none", "full"]
    distributed_optimizer: bool
    num_microbatches: int | None = None
    """Micro-batches of one optimizer step on one rank; None: as many as fill the pipeline."""
    lora: LoraConfig | None = None
    has_reference: bool = False
    """Whether a reference policy has weights of its own. With adapters the policy without them is the reference."""
    reference: Architecture | None = None
    """Of a reference from another folder than the policy's."""
    reference_dtype: str = "bfloat16"
    fp32_lm_head: bool = False
    critic: Architecture | None = None
    critic_dtype: str = "bfloat16"
    critic_distributed: bool = True
    """Whether the critic's optimizer is distributed."""
    transfers_weights: bool = False
    converts_weights: bool = False
    """Whether weights are sent in another dtype, or rounded in theirs (``rollout.precision``): large ones then take buffers
    too."""
    packs_weights: bool = False
    """Whether matrices are sent with about a byte for each number."""

    @property
    def dtype_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def attention_bytes(self) -> int:
        return 4 if self.device == "cpu" else self.dtype_bytes


def work_of(
    config: RunConfig | SftConfig,
    device: Device,
    critic: Architecture | None = None,
    reference: Architecture | None = None,
) -> Work:
    """The work of a run. ``critic`` is the architecture of the run's critic, if it has one; ``reference`` that of
    ``kl.model``."""
    is_rl = isinstance(config, RunConfig)
    of_critic = config.critic if is_rl else None
    return Work(
        device=device,
        dtype=config.model.dtype,
        token_budget=config.learner.token_budget if is_rl else config.token_budget,
        chunk_tokens=config.learner.logprob_chunk_tokens if is_rl else config.logprob_chunk_tokens,
        recompute=config.learner.recompute if is_rl else "none",
        distributed_optimizer=(config.learner.optimizer if is_rl else config.optimizer).distributed,
        lora=config.learner.lora if is_rl else None,
        has_reference=is_rl and config.has_reference_weights,
        reference=reference,
        reference_dtype=((is_rl and config.kl.model) or config.model).dtype,
        fp32_lm_head=config.model.fp32_lm_head,
        critic=critic,
        critic_dtype=((of_critic and of_critic.model) or config.model).dtype,
        critic_distributed=of_critic is None or of_critic.optimizer.distributed,
        transfers_weights=is_rl,
        converts_weights=is_rl
        and (
            config.rollout.dtype != config.model.dtype
            or (config.rollout.precision is not None and not config.rollout.packs)
        ),
        packs_weights=is_rl and config.rollout.packs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Itemised bytes of one rank of pipeline stage ``stage``."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    """Parameters, gradients and optimizer state of the value model."""
    # Policy and critic are updated one after the other: these three are of the one that takes more.
    activations: int
    logits: int
    pipeline: int
    transfer: int

    @property
    def lasting(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        """Bytes at the worst moment, in the backward pass or while weights are sent, when activations are gone."""
        return self.lasting + max(self.activations + self.logits + self.pipeline, self.transfer)

    def items(self) -> dict[str, int]:
        """Names and bytes of the items above zero."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}
        return {name: size for name, size in sizes.items() if size}


def worst_stage(architecture: Architecture, layout: LayoutConfig, work: Work) -> LearnerMemory:
    """Memory of the stage that needs most: the first has the embedding and most micro-batches in flight, the
    last the output layer."""
    stages = (learner_memory(architecture, layout, work, stage) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total)


def learner_memory(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> LearnerMemory:
    """Memory of each rank of one pipeline stage. ``layout`` is resolved and valid (``validate_layout``).

    parameters b P; gradients 4 P (Megatron's buffers hold float32 sums whatever the dtype); optimizer:
    AdamW's two moments, 8 P, and a float32 copy of the weights, 4 P, unless they are float32 themselves. The
    distributed optimizer divides these 8 or 12 P over the ranks that hold the same parameters: tp cp dp / ep
    ranks for experts, cp dp ranks for all others. With adapters P of gradients and optimizer are the adapters'
    (``adapter_parameters``), and parameters have b of each more.
    """
    parameters, gradients, optimizer = _trained_bytes(architecture, layout, work, stage, output=True)
    critic, updates = (0, 0, 0), [_update_bytes(architecture, layout, work, stage, output=True)]
    if work.critic is not None:  # trained whole
        of_critic = replace(
            work, dtype=work.critic_dtype, distributed_optimizer=work.critic_distributed, lora=None
        )
        critic = _trained_bytes(work.critic, layout, of_critic, stage, output=False)
        updates.append(_update_bytes(work.critic, layout, of_critic, stage, output=False))
    reference = parameters if work.has_reference else 0
    if work.reference is not None:
        reference = BYTES[work.reference_dtype] * sum(stage_parameters(work.reference, layout, stage))
    activations, logits, pipeline = max(updates, key=sum)
    return LearnerMemory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        reference=reference,
        critic=sum(critic),
        activations=activations,
        logits=logits,
        pipeline=pipeline,
        transfer=_transfer_bytes(architecture, layout, work, stage) if work.transfers_weights else 0,
    )


def _update_bytes(
    architecture: Architecture, layout: LayoutConfig, work: Work, stage: int, *, output: bool
) -> tuple[int, int, int]:
    """Bytes of an update of one model: (activations, logits, pipeline). ``output=False``: a critic, without logits."""
    activations = activation_bytes(architecture, layout, work, stage)
    logits = 0
    if output:
        activations += _waiting_gradient(architecture, layout, work)
        logits = _logits_beside(architecture, layout, work, stage) if stage == layout.pp - 1 else 0
    return activations, logits, _pipeline_bytes(architecture, layout, work, stage)


def _trained_bytes(
    architecture: Architecture, layout: LayoutConfig, work: Work, stage: int, *, output: bool
) -> tuple[int, int, int]:
    """Bytes of (parameters, gradients, optimizer state) of a model with an optimizer."""
    shared, expert = trained_parameters(architecture, layout, stage, work.lora, output=output)
    frozen = 0 if work.lora is None else sum(stage_parameters(architecture, layout, stage))
    state = trained = shared + expert
    if work.distributed_optimizer:
        copies = layout.cp * layout.dp_size
        expert_copies = layout.tp * copies // layout.ep
        state = -(-shared // copies) + -(-expert // expert_copies)
    per_number = 8 if work.dtype_bytes == 4 else 12  # AdamW's
    return work.dtype_bytes * (frozen + trained), 4 * trained, per_number * state


def trained_parameters(
    architecture: Architecture,
    layout: LayoutConfig,
    stage: int,
    lora: LoraConfig | None,
    *,
    output: bool = True,
) -> tuple[int, int]:
    """``stage_parameters`` that have a gradient: with adapters theirs alone."""
    if lora is not None:
        return adapter_parameters(architecture, layout, lora), 0
    return stage_parameters(architecture, layout, stage, output=output)


def stage_parameters(
    architecture: Architecture, layout: LayoutConfig, stage: int, *, output: bool = True
) -> tuple[int, int]:
    """Parameters on one rank of a stage: (those of no expert, the experts').

    A layer: qkv and projection (``Architecture.mixer_numbers``); biases in Qwen2, (A + 2 K) D / t, and norms inside attention
    (``Architecture.mixer_vectors``); two norms 2 H, or four; an MLP 3 H I / t, or a router H E and E / ep
    whole experts of 3 H I, and a shared expert of size S 3 H S / t. The bias of a router, E frozen numbers, is not
    counted. The first stage has the embedding V H / t; the last the final norm H and the output layer V H / t, which a tied
    model shares with the embedding if both are on one stage. ``output=False``: a critic, whose output layer is a
    head of H. A model with sinks has A / t of them, and biases H of the projection, E of the router and 2 I + H of an expert.
    """
    a, t = architecture, layout.tp
    shared = expert = 0
    for layer in stage_layers(a, layout, stage):
        numbers = (a.mixer_numbers(layer), a.mixer_vectors(layer))
        shared += sum(split for split, _ in numbers) // t + sum(whole for _, whole in numbers)
        shared += a.layer_norms * a.hidden_size
        if a.experts and a.experts.is_sparse[layer]:
            shared += a.hidden_size * (a.experts.num_experts + 3 * a.experts.shared_size // t)
            shared += a.hidden_size if a.experts.has_shared_gate else 0
            of_expert = 3 * a.hidden_size * a.experts.intermediate_size
            if a.has_sinks:
                shared += a.experts.num_experts
                of_expert += 2 * a.experts.intermediate_size + a.hidden_size
            expert += a.experts.num_experts // layout.ep * of_expert
        else:
            shared += 3 * a.hidden_size * a.intermediate_size // t
    table = padded_vocab_size(a.vocab_size, t) // t * a.hidden_size
    if stage == 0:
        shared += table
    if stage == layout.pp - 1:
        has_own_output = output and not (a.tied and layout.pp == 1)
        shared += a.hidden_size + (table if has_own_output else 0) + (0 if output else a.hidden_size)
    return shared, expert


def stage_layers(architecture: Architecture, layout: LayoutConfig, stage: int) -> list[int]:
    """The numbers of a stage's layers. All chunks have equally many; chunk v of stage p is the model's chunk
    v pp + p. Without chunks the last stage may have fewer (``last_stage_layers``)."""
    depth = -(-architecture.num_layers // (layout.pp * layout.vpp))
    chunks = range(stage, layout.pp * layout.vpp, layout.pp)
    layers = [chunk * depth + i for chunk in chunks for i in range(depth)]
    return [layer for layer in layers if layer < architecture.num_layers]


def in_flight(layout: LayoutConfig, stage: int, num_microbatches: int | None) -> int:
    """Greatest number of a stage's forward passes (per chunk) whose backward has not begun.

    1F1B: pp - stage, since a stage goes on forward until its first micro-batch has come back. Interleaved:
    Megatron's warm-up of 2 (pp - stage - 1) + (vpp - 1) pp passes, and the running one. There are at most
    ``num_microbatches`` vpp passes. Source: ``get_pp_rank_microbatches`` of Megatron-Core 0.16.1.
    """
    pp, vpp = layout.pp, layout.vpp
    passes = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return passes if num_microbatches is None else min(passes, num_microbatches * vpp)


def activation_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """Greatest memory of autograd for the micro-batches in flight on a stage.

    Each pass keeps its chunk's layers, under recompute only the input of each, b H a token; one layer at a
    time is then computed again and kept whole. All stages keep the rotary tables, b a token for each rotated number of a
    head, or 4 where GPUs rotate in float32; with windows twice that at most, and a mask of B (B - 1 + W) numbers for blocks of B
    queries and windows of W tokens. The last stage keeps the final norm and its output, the input of the log-probs,
    until layers are computed again.
    """
    layers = stage_layers(architecture, layout, stage)
    passes = in_flight(layout, stage, work.num_microbatches)
    whole = _whole_layers(architecture, layout, work, stage)
    rows, tokens = row_counts(layout, work.token_budget)
    per_chunk = len(layers) // layout.vpp
    in_float32 = work.device == "cuda" and architecture.rotated_head in ROTATED_IN_FLOAT32
    tables = passes * tokens * architecture.rotary_size * (4 if in_float32 else work.dtype_bytes)
    windows = {architecture.windows[layer] for layer in layers if architecture.windows} - {None}
    if windows:  # which may rotate by tables of their own; one mask for all layers with a window
        tables *= 2
        tables += sum(WINDOW_BLOCK * (WINDOW_BLOCK - 1 + w) * work.attention_bytes for w in windows if w)
    hidden_bytes = architecture.hidden_size * work.dtype_bytes
    end = _end_bytes(architecture, layout, work) if stage == layout.pp - 1 else 0
    if work.recompute == "full":
        return tables + passes * per_chunk * rows * hidden_bytes + max(end, *whole)
    # Chunks differ where a model has dense and sparse layers.
    chunks = [range(first, first + per_chunk) for first in range(0, len(whole), per_chunk)]
    largest_chunk = max(sum(whole[i] for i in chunk) for chunk in chunks)
    # In a backward pass, when a recurrent layer is computed again: it and those before it are there.
    before = [
        sum(whole[chunk[0] : i]) + _while_mixed(architecture, layout, work)
        for chunk in chunks
        for i in chunk
        if architecture.is_recurrent(layers[i])
    ]
    return tables + (passes - 1) * largest_chunk + max(largest_chunk + end, *before, 0)


def _while_mixed(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """A recurrent layer's first norm and product, and what the rule keeps."""
    rows, tokens = row_counts(layout, work.token_budget)
    b, hidden = work.dtype_bytes, architecture.hidden_size
    product = tokens * b * _mixed(architecture) // layout.tp
    return (
        rows * (_norm_row(hidden, work, architecture) + b * hidden)
        + product
        + rule_bytes(architecture, layout, work)
    )


def _mixed(architecture: Architecture) -> int:
    """Numbers of a token that a gated delta net's first product makes."""
    r = architecture.recurrent
    return 0 if r is None else r.key_heads * sum(r.group_rows)


def _whole_layers(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> list[int]:
    layers = stage_layers(architecture, layout, stage)
    whole = [layer_activation_bytes(architecture, layout, work, layer) for layer in layers]
    if work.recompute == "none":
        return whole
    # The product is no input of another pass then.
    rule = rule_bytes(architecture, layout, work) - row_counts(layout, work.token_budget)[1] * (
        work.dtype_bytes * _mixed(architecture) // layout.tp
    )
    return [size + rule * architecture.is_recurrent(layer) for size, layer in zip(whole, layers, strict=True)]


def _end_bytes(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """The final norm and its output."""
    rows, tokens = row_counts(layout, work.token_budget)
    norm = rows * _norm_row(architecture.hidden_size, work, architecture)
    return norm + tokens * architecture.hidden_size * work.dtype_bytes


def _waiting_gradient(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """The gradient of a tied output layer, b V H / t, which waits for the embedding's to be added while layers are computed
    again. Without recomputation all layers are whole while the logits, which count it, are there."""
    is_shared = architecture.tied and layout.pp == 1 and work.lora is None
    if not is_shared or work.recompute == "none":
        return 0
    rows = padded_vocab_size(architecture.vocab_size, layout.tp) // layout.tp
    return work.dtype_bytes * rows * architecture.hidden_size


def _logits_beside(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """What the log-probs' backward pass takes beside the activations. Under recompute no layer is whole then: it is what
    they take, with the final norm, beyond the whole layer that the activations count."""
    logits = logits_bytes(architecture, layout, work)
    if work.recompute == "none":
        return logits
    end = _end_bytes(architecture, layout, work)
    layer = max(end, *_whole_layers(architecture, layout, work, stage))
    return max(0, end + logits - layer - _waiting_gradient(architecture, layout, work))


def layer_activation_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, layer: int) -> int:
    """Memory of autograd for one layer and micro-batch: the tensors that the local layers' operations save,
    each storage once.

    Two norms, each with its output: ``_norm_row`` and b H a token, of T / t tokens under sequence parallelism.
    Attention on T tokens, A / t and K / t heads (at least one key/value head): rotated queries and the output,
    2 c D A; keys and values, see ``_keys_and_values``, or of latent attention 2 c D A and, of T / t tokens, ``_latent_row``;
    the sums of the softmax, 4 A; the packed output for the projection, b D A, or b V A of values of another size. Norms of
    queries and keys: see ``_qk_norm_token``. MLP on T tokens: the halves of gate and up, 2 I,
    silu(gate), up, and their product: 5 b I / t.
    Experts on the rank's own T tokens (T / t under sequence parallelism), if the router spreads tokens evenly
    over ranks: for each chosen expert the token b H, 5 b I, and b I for the product times the router's weight;
    8 bytes an expert for the router's probabilities and choice; of float32 logits a copy of a 2-byte input, 4 H. A shared
    expert of size S is an MLP on T tokens.

    Of a gated delta net: the product of T tokens with its inputs' matrices, and the output for the projection, b A V / t;
    what the rule keeps of one layer at a time is ``rule_bytes``. With a gate at attention's output the qkv product has A D
    more, and the gate's sigmoid is kept, 4 A D, and the output that it multiplies, b A D.

    A frozen matrix keeps no input. Beside adapters that of a matrix is therefore kept where it has one (``_inputs``), and
    b r a token and adapter for A x; of experts it is never kept. Merged weights are not kept but made again.
    """
    a, b, c = architecture, work.dtype_bytes, work.attention_bytes
    rows, tokens = row_counts(layout, work.token_budget)
    is_sparse = a.experts is not None and a.experts.is_sparse[layer]
    kept = a.layer_norms * rows * _norm_row(a.hidden_size, work, a)
    kept += _inputs(a, layout, work, layer, is_sparse=is_sparse)
    if a.is_recurrent(layer):
        kept += tokens * b * _mixed(a) // layout.tp
        return kept + _mlp_bytes(a, layout, work, is_sparse=is_sparse)
    heads, kv_heads = a.num_heads // layout.tp, max(1, a.num_kv_heads // layout.tp)
    # With fewer key/value heads than ranks Megatron gathers all ranks' product and takes this rank's heads.
    product = a.num_heads + 2 * a.num_kv_heads if layout.tp > a.num_kv_heads else heads + 2 * kv_heads
    if a.recurrent is not None:
        product += a.num_heads if layout.tp > a.num_kv_heads else heads
        kept += tokens * a.head_dim * heads * (4 + b)
    if a.latent is None:
        kept += _keys_and_values(
            a, layout, work, tokens, product=b * a.head_dim * product, head=c * a.head_dim * kv_heads
        )
    else:
        kept += rows * _latent_row(a.latent, a.rotary_size, work)
        kept += 2 * layout.cp * tokens * c * a.head_dim * heads
    kept += tokens * (2 * c * a.head_dim * heads + 4 * heads)
    if (
        a.whole_qk_norm and layout.tp > 1
    ):  # a sum each, and x, which is inside the values' product if a rank has one group
        is_inside = kv_heads == 1 and b == c and layout.cp == 1
        kept += tokens * (2 * 4 + (0 if is_inside else b * a.head_dim * (heads + kv_heads)))
    elif a.qk_norm or a.whole_qk_norm:
        kept += tokens * _qk_norm_token(a, heads, kv_heads, work)
    window = a.windows[layer] if a.windows else None
    if window and work.device == "cuda":  # copies of keys and values for each query head
        kept += 2 * layout.cp * tokens * c * a.head_dim * (heads - kv_heads)
    if (
        a.has_sinks
    ):  # at most: longer heads, copies of keys and values, and masks of blocks that are not whole
        copies = 1 + -(-(window or 0) // WINDOW_BLOCK)
        longer = 2 * SINK_SIZE * heads + 2 * layout.cp * (a.head_dim + SINK_SIZE) * kv_heads * copies
        kept += tokens * c * (longer + (min(WINDOW_BLOCK, tokens) + window if window else 0))
    return kept + _mlp_bytes(a, layout, work, is_sparse=is_sparse)


def _mlp_bytes(a: Architecture, layout: LayoutConfig, work: Work, *, is_sparse: bool) -> int:
    """Of a layer's MLP or experts, without the inputs of ``_inputs``."""
    b = work.dtype_bytes
    rows, tokens = row_counts(layout, work.token_budget)
    if a.experts and is_sparse:
        e = a.experts
        inputs = 0 if work.lora else a.hidden_size + e.intermediate_size
        halves = 5 if e.clamp is None else 7  # the sum with the bias, both clamped halves
        copied = 4 * a.hidden_size if e.float32_logits and b == 2 and not work.lora else 0
        shared = tokens * (4 if work.lora else 5) * b * e.shared_size // layout.tp
        if e.has_shared_gate:  # the output and the gate that it is multiplied by
            shared += rows * b * (a.hidden_size + 1)
        return shared + rows * (
            e.experts_per_token * b * (inputs + halves * e.intermediate_size) + 8 * e.num_experts + copied
        )
    return tokens * 4 * b * a.intermediate_size // layout.tp


def rule_bytes(a: Architecture, layout: LayoutConfig, work: Work) -> int:
    """What one gated delta net keeps while it is computed again for its gradient, float32, if sequences fill their chunks of C
    tokens: for each of T tokens and A / t heads, N numbers of a key and V of a value, 6 N + 8 V, within a chunk 5 C, the state
    2 N V / C, and 8 for what heads have one of; and 6 for each of D / t numbers that are convolved. 0 without such layers."""
    r = a.recurrent
    if r is None:
        return 0
    _, tokens = row_counts(layout, work.token_budget)
    of_head = 6 * r.key_dim + 8 * r.value_dim + 5 * CHUNK + 2 * r.key_dim * r.value_dim // CHUNK + 8
    return tokens * 4 * (r.value_heads * of_head + 6 * r.convolved) // layout.tp


def _projected(a: Architecture, layer: int) -> int:
    """Numbers of a token that the projection behind attention, or behind a gated delta net, takes."""
    if a.is_recurrent(layer):
        assert a.recurrent is not None
        return a.recurrent.value_heads * a.recurrent.value_dim
    return a.value_dim * a.num_heads


def _inputs(a: Architecture, layout: LayoutConfig, work: Work, layer: int, *, is_sparse: bool) -> int:
    """The inputs of a layer's matrices, for the gradients of these or of their adapters: b H of ``rows`` for qkv and fc1,
    b D A / t and b I / t a token for proj and fc2. The MLP's are here for dense layers; experts read the output of the
    norm too."""
    b, (rows, tokens) = work.dtype_bytes, row_counts(layout, work.token_budget)
    sizes = {
        "qkv": rows * b * a.hidden_size,
        "proj": tokens * b * _projected(a, layer) // layout.tp,
        "fc1": rows * b * a.hidden_size,
        "fc2": 0 if is_sparse else tokens * b * a.intermediate_size // layout.tp,
    }
    if work.lora is None:
        return sum(sizes.values())
    targets = work.lora.targets
    return sum(sizes[target] for target in targets) + len(targets) * tokens * b * work.lora.rank


def _keys_and_values(
    a: Architecture, layout: LayoutConfig, work: Work, tokens: int, *, product: int, head: int
) -> int:
    """Rotated keys, c D K a token, and the values: inside the whole qkv product, b D (A + 2 K), or in a float32
    copy, c D K. ``product`` and ``head`` are b D (A + 2 K) and c D K.

    Under context parallelism both are gathered: 2 c D K for each of the micro-batch's tokens. The product is then
    kept only where a norm on CUDA keeps the keys inside it.
    """
    if layout.cp > 1:
        has_product = a.qk_norm and work.device == "cuda"
        return tokens * (2 * layout.cp * head + (product if has_product else 0))
    return tokens * (head + (product if work.dtype_bytes == work.attention_bytes else head))


def _latent_row(latent: Latent, rotary_size: int, work: Work) -> int:
    """The norms of a row's short vectors, each with its output. On CUDA they are kept inside the product, whose rotated part
    is kept with them."""
    sizes = [size for size in (latent.query_rank, latent.rank) if size]
    kept = sum(_norm_row(size, work) + work.dtype_bytes * size for size in sizes)
    return kept + (work.dtype_bytes * rotary_size if work.device == "cuda" else 0)


def row_counts(layout: LayoutConfig, tokens: int) -> tuple[int, int]:
    """(this rank's tokens between matrices, its tokens of the micro-batch): a C-th of all under context
    parallelism, padded to a multiple of t under sequence parallelism."""
    tokens = -(-tokens // layout.cp)
    rows = -(-tokens // layout.tp)
    return (rows, rows * layout.tp) if layout.sp else (tokens, tokens)


def _norm_row(size: int, work: Work, architecture: Architecture | None = None) -> int:
    """RMSNorm of one row keeps x and 1 / rms, b size + 4, on CUDA. On CPU it keeps x / rms and 1 / rms in
    float32, 4 size + 4, and for a 2-byte dtype x in float32 too; beside adapters the weight is frozen, and of the two
    x alone is kept. A norm that multiplies by 1 + weight keeps float32 numbers alone, 4 size + 4."""
    if architecture is not None and architecture.recurrent is not None:
        return 4 * size + 4
    if work.device == "cuda":
        return work.dtype_bytes * size + 4
    return (4 if work.dtype_bytes == 4 or work.lora else 8) * size + 4


def _qk_norm_token(a: Architecture, heads: int, kv_heads: int, work: Work) -> int:
    """Norms of queries and keys keep ``_norm_row`` per head; on CUDA the keys' x is free inside the qkv product."""
    kept_anyway = work.dtype_bytes if work.device == "cuda" and a.recurrent is None else 0
    return (heads + kv_heads) * _norm_row(a.head_dim, work, a) - kv_heads * kept_anyway * a.head_dim


def logits_bytes(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """Greatest memory of the backward pass of the log-probs (``vocab_parallel.linear_logprobs``).

    A chunk of C tokens: logits and probabilities in float32, 8 C V / t, and in a 2-byte dtype the product
    before the logits, 2 C V / t. The weight's gradient is summed in float32, 4 V H / t, and rounded to a 2-byte
    dtype, 2 V H / t; a frozen one, beside adapters, has none. The hidden states' gradient is b T H. ``fp32_lm_head``
    multiplies by a float32 copy of a 2-byte weight, 4 V H / t, and needs no product in that dtype.
    """
    rows = padded_vocab_size(architecture.vocab_size, layout.tp) // layout.tp
    rounded = 2 if work.dtype_bytes == 2 else 0
    tokens = -(-work.token_budget // layout.cp)
    has_copy = work.fp32_lm_head and rounded > 0
    chunk = min(work.chunk_tokens, tokens) * rows * (8 + (0 if has_copy else rounded))
    copy = rows * architecture.hidden_size * 4 if has_copy else 0
    weight_gradient = rows * architecture.hidden_size * (4 + rounded) if work.lora is None else 0
    return chunk + copy + weight_gradient + tokens * architecture.hidden_size * work.dtype_bytes


def _pipeline_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """The outputs that a stage sent on, kept until their backward, and the gradient that comes back, each b H
    a token; 0 without a pipeline."""
    if layout.pp == 1:
        return 0
    sent = in_flight(layout, stage, work.num_microbatches) if stage < layout.pp - 1 or layout.vpp > 1 else 0
    return (sent + 1) * row_counts(layout, work.token_budget)[0] * architecture.hidden_size * work.dtype_bytes


def _transfer_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """Two buckets (on CPU three) of the device's size, of the largest tensor's where weights are converted or packed, but
    no more than the stage's weights; and the tensors of one gathering: the shards of one tensor and the whole, or one
    expert's gate and up of each expert-parallel rank. A gathered tensor that is sent as it is stays while the next one is
    gathered.
    """
    a, b = architecture, work.dtype_bytes
    shared, expert = stage_parameters(a, layout, stage)
    has_table = stage in (0, layout.pp - 1)
    table = padded_vocab_size(a.vocab_size, layout.tp) * a.hidden_size if has_table else 0
    expert_size = layout.ep * 2 * a.hidden_size * a.experts.intermediate_size if a.experts else 0
    is_joined = a.experts is not None and a.experts.clamp is not None
    if a.experts and is_joined:  # all experts of a layer in one tensor, which is gathered from parts of it
        expert_size = 2 * a.hidden_size * a.experts.intermediate_size * a.experts.num_experts
        expert_size *= 1 if layout.ep == 1 else 3
    largest = b * max(table, a.hidden_size * a.intermediate_size)
    gathered = b * max(table, 2 * a.hidden_size * a.intermediate_size) * (2 if layout.tp > 1 else 0)
    weights = b * (shared * layout.tp + expert * layout.ep)
    bucket = BUCKET_BYTES[work.device]
    # A byte for each number, and at most a scale of four for each 32.
    packed = a.hidden_size * a.intermediate_size * 9 // 8 if work.packs_weights else 0
    written = largest if work.converts_weights else packed
    buffers = min(NUM_BUFFERS[work.device] * max(bucket, written), weights)
    stays = 0 if layout.tp == 1 or written else 2 * b * a.hidden_size * a.intermediate_size
    return buffers + max(gathered + stays, b * expert_size if layout.ep > 1 or is_joined else 0)


def describe(memory: LearnerMemory) -> str:
    """One line: the total and its items, greatest first."""
    parts = sorted(memory.items().items(), key=lambda item: -item[1])
    return f"{size_text(memory.total)} ({', '.join(f'{name} {size_text(size)}' for name, size in parts)})"


def size_text(size: int) -> str:
    """``size`` bytes in the greatest unit that is not above it, to three digits."""
    for name, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.{max(0, 2 - len(str(size // scale)) + 1)}f} {name}"
    return f"{size} B"
