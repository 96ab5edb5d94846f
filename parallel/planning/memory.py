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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LearnerConfig
from parallel.planning.activations import (
    activation_bytes,
    batch_kept_bytes,
    kept_beside,
    logits_beside,
    waiting_gradient,
)
from parallel.planning.adapters import adapter_parameters
from parallel.planning.architecture import Architecture, padded_vocab_size
from parallel.planning.work import BYTES, Work, copies_of, in_flight, row_counts, stage_layers

GIB = 2**30
BUCKET_BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""Size by device of a bucket of small tensors that are sent to servers. On CPU it stays in the cache until it is sent."""
NUM_BUFFERS = {"cuda": 2, "cpu": 3}
"""Such buckets by device of which memory is kept, for each kind: one is filled while the others are sent. On one machine
servers take longer for a large tensor that needs no buffer than the next bucket takes to be filled; a third one is filled
then."""
OF_AN_UPDATE = ("activations", "logits", "kept_ids", "pipeline")
"""Items of the forward and backward passes of an update."""
MOMENTS = (OF_AN_UPDATE, ("optimizer_step",), ("transfer",))
"""Items that are in memory at one moment of a step each, and never at two."""
BESIDE_SERVERS = MOMENTS[1:]
"""Those that may be there beside the weights of servers on the same device: weights are sent, or a checkpoint is written, for
which an offloaded state comes back."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory for the items of this file."""


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
    # Policy and critic are updated one after the other: these four are of the one that takes more.
    activations: int
    logits: int
    kept_ids: int
    """Those of a truncated sampler; see ``activations.kept_beside``."""
    pipeline: int
    optimizer_step: int
    """Optimizer state that is there only during a step (``learner.optimizer.offload``), of policy or critic."""
    transfer: int
    on_host: int
    """Such states of both, in the memory of the machine. No part of ``items`` and ``total``."""

    @property
    def lasting(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        """Bytes at the worst moment: in the backward pass, or, when activations are gone, in the optimizer's step or while
        weights are sent."""
        return self.lasting + max(map(self._together, MOMENTS))

    @property
    def beside_servers(self) -> int:
        """Bytes at the worst moment of ``BESIDE_SERVERS``."""
        return self.lasting + max(map(self._together, BESIDE_SERVERS))

    def _together(self, names: Iterable[str]) -> int:
        return sum(getattr(self, name) for name in names)

    def at_peak(self, moments: Sequence[Sequence[str]] = MOMENTS) -> dict[str, int]:
        """The items that are in memory at the worst of ``moments``: of all, they sum to ``total``."""
        there = max(moments, key=self._together)
        gone = {name for names in MOMENTS if names != there for name in names}
        return {name: size for name, size in self.items().items() if name not in gone}

    def items(self) -> dict[str, int]:
        """Names and bytes of the items above zero."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stage", "on_host")}
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
    (``adapter_parameters``), and parameters have b of each more. Frozen routers are in the parameters alone.
    An offloaded optimizer's state counts as that of its step alone.
    """
    parameters, gradients, optimizer = _trained_bytes(architecture, layout, work, stage, output=True)
    stepping, critic, of_critics_step = optimizer if work.offloads_optimizer else 0, 0, 0
    updates = [_update_bytes(architecture, layout, work, stage, output=True)]
    if work.critic is not None:  # trained whole
        of_critic = replace(
            work,
            dtype=work.critic_dtype,
            distributed_optimizer=work.critic_distributed,
            lora=None,
            freeze_router=False,
        )
        *held, state = _trained_bytes(work.critic, layout, of_critic, stage, output=False)
        of_critics_step = state if work.critic_offloads else 0
        critic = sum(held) + state - of_critics_step
        updates.append(_update_bytes(work.critic, layout, of_critic, stage, output=False))
    reference = parameters if work.has_reference else 0
    if work.reference is not None:
        reference = BYTES[work.reference_dtype] * sum(stage_parameters(work.reference, layout, stage))
    activations, logits, kept_ids, pipeline = max(updates, key=sum)
    return LearnerMemory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer - stepping,
        reference=reference,
        critic=critic,
        activations=activations,
        logits=logits,
        kept_ids=kept_ids,
        pipeline=pipeline,
        optimizer_step=max(stepping, of_critics_step),
        transfer=_transfer_bytes(architecture, layout, work, stage) if work.transfers_weights else 0,
        on_host=stepping + of_critics_step,
    )


def _update_bytes(
    architecture: Architecture, layout: LayoutConfig, work: Work, stage: int, *, output: bool
) -> tuple[int, int, int, int]:
    """Bytes of an update of one model, by ``OF_AN_UPDATE``. ``output=False``: a critic, without logits."""
    activations = activation_bytes(architecture, layout, work, stage)
    logits, kept_ids = 0, batch_kept_bytes(architecture, work)
    if output:
        activations += waiting_gradient(architecture, layout, work)
    if output and stage == layout.pp - 1:
        logits = logits_beside(architecture, layout, work, stage)
        kept_ids = kept_beside(architecture, layout, work, stage)
    return activations, logits, kept_ids, _pipeline_bytes(architecture, layout, work, stage)


def _trained_bytes(
    architecture: Architecture, layout: LayoutConfig, work: Work, stage: int, *, output: bool
) -> tuple[int, int, int]:
    """Bytes of (parameters, gradients, optimizer state) of a model with an optimizer."""
    shared, expert = trained_parameters(architecture, layout, stage, work if output else None)
    state = trained = shared + expert
    held = sum(stage_parameters(architecture, layout, stage, output=output)) + (trained if work.lora else 0)
    if work.distributed_optimizer:
        copies, expert_copies = copies_of(layout)
        state = -(-shared // copies) + -(-expert // expert_copies)
    per_number = 8 if work.dtype_bytes == 4 else 12  # AdamW's
    return work.dtype_bytes * held, 4 * trained, per_number * state


def trained_parameters(
    architecture: Architecture, layout: LayoutConfig, stage: int, settings: LearnerConfig | Work | None
) -> tuple[int, int]:
    """``stage_parameters`` that have a gradient: with adapters only theirs, else all but frozen routers. settings: None for a
    critic, which is trained whole and has no output layer."""
    if settings is None:
        return stage_parameters(architecture, layout, stage, output=False)
    if settings.lora is not None:
        return adapter_parameters(architecture, layout, settings.lora), 0
    shared, expert = stage_parameters(architecture, layout, stage)
    if settings.freeze_router and architecture.experts:
        sparse = sum(map(architecture.is_sparse, stage_layers(architecture, layout, stage)))
        shared -= sparse * router_parameters(architecture)
    return shared, expert


def router_parameters(architecture: Architecture) -> int:
    """Of one layer: H E, and E biases in a model with sinks."""
    assert architecture.experts is not None
    return architecture.experts.num_experts * (architecture.hidden_size + architecture.family.has_sinks)


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
        if a.experts and a.is_sparse(layer):
            shared += router_parameters(a) + a.hidden_size * (3 * a.experts.shared_size // t)
            shared += a.hidden_size if a.experts.has_shared_gate else 0
            of_expert = 3 * a.hidden_size * a.experts.intermediate_size
            if a.family.has_sinks:
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
    expert_size = 0
    if a.experts:
        of_one = 2 * a.hidden_size * a.experts.intermediate_size
        expert_size = layout.ep * of_one if layout.ep > 1 else 0
        # All experts of a layer in one tensor, which is gathered from parts of it.
        if a.experts.clamp is not None:
            expert_size = a.experts.num_experts * of_one * (1 if layout.ep == 1 else 3)
    largest = b * max(table, a.hidden_size * a.intermediate_size)
    gathered = b * max(table, 2 * a.hidden_size * a.intermediate_size) * (2 if layout.tp > 1 else 0)
    weights = b * (shared * layout.tp + expert * layout.ep)
    bucket = BUCKET_BYTES[work.device]
    # A byte for each number, and at most a scale of four for each 32.
    packed = a.hidden_size * a.intermediate_size * 9 // 8 if work.packs_weights else 0
    written = largest if work.converts_weights else packed
    buffers = min(NUM_BUFFERS[work.device] * max(bucket, written), weights)
    stays = 0 if layout.tp == 1 or written else 2 * b * a.hidden_size * a.intermediate_size
    return buffers + max(gathered + stays, b * expert_size)


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
