"""Bytes that ranks of a learner send, by process group: arithmetic on an architecture and a layout. No torch.

Legend: b bytes of a number in the model's dtype, H hidden size, N tokens on each rank, t, C tensor- and context-parallel
sizes, D head dimension, K key/value heads, k experts of a token. In rings all-reduce sends 2 (n - 1) / n of its bytes;
reduce-scatter, all-gather and all-to-all send (n - 1) / n.
"""

from dataclasses import dataclass, fields
from typing import Literal

from configs.schema.layout import LayoutConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture
from parallel.planning.memory import stage_parameters, trained_parameters
from parallel.planning.work import BYTES, copies_of, stage_layers

Group = Literal["tensor", "context", "pipeline", "expert"]
"""The groups that a pass sends in. Data-parallel ranks send once per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one rank sends in a process group."""

    bytes: int = 0
    calls: int = 0
    """Collectives of one micro-batch."""


def forward_sent(
    architecture: Architecture, layout: LayoutConfig, stage: int, tokens: int, dtype: str
) -> dict[Group, Sent]:
    """What a rank sends in a forward pass of a stage over ``tokens`` tokens of its own (N).

    - tensor: two all-reduces of b H N per dense layer, one per layer with experts, two beside a shared expert. Sequence
      parallelism sends as much in two halves each; of latent attention it gathers the short vectors in place of the hidden
      states.
    - context: keys and values of all C N tokens gathered, 2 b D K / t each (at least one head), per layer.
    - pipeline: b H N / (t under sequence parallelism) to the next stage.
    - expert: tokens there and back, 2 k b H N / (t under sequence parallelism), per layer with experts. A third call has
      the router's weights.

    Left out: the embedding's all-reduce and that of the logits' gradient, one each of the first and the last stage.
    """
    a, t, b = architecture, layout.tp, BYTES[dtype]
    layers = stage_layers(a, layout, stage)
    sparse = sum(map(a.is_sparse, layers))
    chosen = a.experts.experts_per_token if a.experts else 0
    hidden = b * a.hidden_size * tokens
    rank_hidden = hidden // t if layout.sp else hidden
    without_mlp = 0 if a.experts and a.experts.shared_size else sparse
    reduced = 2 * len(layers) - without_mlp
    sent, calls = reduced * 2 * hidden, reduced * (1 + layout.sp)
    if a.latent is not None and layout.sp:
        short = (a.latent.query_rank or a.hidden_size) + a.latent.rank + a.rotary_size
        sent += len(layers) * (b * short * tokens - hidden)
        calls += len(layers) * 2
    keys_values = 2 * b * a.head_dim * max(1, a.num_kv_heads // t) * tokens * layout.cp
    exchanged = 2 * sparse * chosen * rank_hidden * (layout.ep - 1) // layout.ep
    return {
        "tensor": Sent(bytes=sent * (t - 1) // t, calls=_calls(t, calls)),
        "context": Sent(
            bytes=len(layers) * keys_values * (layout.cp - 1) // layout.cp,
            calls=_calls(layout.cp, len(layers)),
        ),
        "pipeline": Sent(
            bytes=rank_hidden * layout.vpp if layout.pp > 1 else 0, calls=_calls(layout.pp, layout.vpp)
        ),
        "expert": Sent(bytes=exchanged, calls=_calls(layout.ep, 3 * sparse)),
    }


def _calls(ranks: int, calls: int) -> int:
    return calls if ranks > 1 else 0


def update_sent(
    architecture: Architecture, layout: LayoutConfig, stage: int, tokens: int, dtype: str, *, recompute: str
) -> list[dict[Group, Sent]]:
    """What a rank sends in each pass of an update: forward, backward and, with ``recompute: full``, of the layers that are
    computed again.

    Backward sends as much as forward, for the gradients; sequence parallelism gathers the input of each all-reduce once
    more: half as much again. Layers that are computed again send nothing to the next stage.
    """
    forward = forward_sent(architecture, layout, stage, tokens, dtype)
    backward = dict(forward)
    if layout.sp:
        tensor = forward["tensor"]
        backward["tensor"] = Sent(bytes=tensor.bytes * 3 // 2, calls=tensor.calls * 3 // 2)
    again: dict[Group, Sent] = {**forward, "pipeline": Sent()}
    return [forward, backward, again] if recompute == "full" else [forward, backward]


def data_bytes(
    architecture: Architecture, config: RunConfig, layout: LayoutConfig, stage: int, *, output: bool = True
) -> int:
    """What a rank sends to the other copies of its parameters in one optimizer step.

    Gradients 4 P reduce-scattered and weights b P gathered (distributed optimizer; else 4 P all-reduced), P the rank's
    trained parameters, over its cp dp copies; experts over tp cp dp / ep. ``output=False``: a critic, trained whole.
    """
    shared, expert = trained_parameters(architecture, layout, stage, config.learner if output else None)
    copies, expert_copies = copies_of(layout)
    of_data = shared * (copies - 1) / copies + expert * (expert_copies - 1) / expert_copies
    distributed = config.learner.optimizer.distributed
    return int((4 + BYTES[config.model.dtype] if distributed else 8) * of_data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank of the learner's busiest stage sends in one step.

    N = prompts_per_step group_size max_new_tokens / (dp cp): responses at full length, without prompts. A step has f
    forward passes of each (the update's, and those of ``old`` and ``ref`` if the run has them), one more of layers
    that are computed again, and one backward. data: of all its optimizer steps. transfer: the stage's whole weights to
    the servers, once, from its sending rank.

    A critic's own traffic is left out: its layout is the policy's, so that it adds to all layouts in about
    the same proportion.
    """

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    transfer: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def traffic(architecture: Architecture, config: RunConfig, layout: LayoutConfig) -> Traffic:
    """See ``Traffic``."""
    rollout, dtype, stages = config.rollout, config.model.dtype, range(layout.pp)
    samples = rollout.prompts_per_step * rollout.group_size
    tokens = samples * rollout.max_new_tokens // (layout.cp * layout.dp_size)

    def sent_by(stage: int) -> dict[Group, int]:
        of = (architecture, layout, stage, tokens, dtype)
        passes = update_sent(*of, recompute=config.learner.recompute)
        passes += [forward_sent(*of)] * scored_passes(config)
        return {group: sum(sent[group].bytes for sent in passes) for group in passes[0]}

    by_stage = [sent_by(stage) for stage in stages]
    passed = {group: max(sent[group] for sent in by_stage) for group in by_stage[0]}
    return Traffic(
        tensor=passed["tensor"],
        context=passed["context"],
        pipeline=passed["pipeline"],
        expert=passed["expert"],
        data=config.learner.minibatches
        * max(data_bytes(architecture, config, layout, stage) for stage in stages),
        transfer=max(bytes_to_send(architecture, rollout, layout)),
    )


def scored_passes(config: RunConfig) -> int:
    """Forward passes of the policy's size before the update: those of ``old`` and ``ref``."""
    return config.scores_old + (config.kl.coefficient > 0)


def matrix_parameters(architecture: Architecture, layout: LayoutConfig, stage: int) -> int:
    """Numbers of a stage's matrices that ``rollout.precision`` rounds, whole: attention's and the MLPs' of all experts."""
    a, count = architecture, 0
    for layer in stage_layers(a, layout, stage):
        count += sum(a.mixer_numbers(layer))
        if a.recurrent and a.is_recurrent(layer):  # steps and decays are not rounded
            count -= 2 * a.hidden_size * a.recurrent.value_heads
        widths = a.intermediate_size
        if a.experts and a.is_sparse(layer):
            widths = a.experts.num_experts * a.experts.intermediate_size + a.experts.shared_size
        count += 3 * a.hidden_size * widths
    return count


def bytes_to_send(architecture: Architecture, rollout: RolloutConfig, layout: LayoutConfig) -> list[int]:
    """Bytes that the sender of each pipeline stage sends to the servers: all tensors of the stage, whole
    and without padding. The last stage's copy of a tied embedding is not sent.

    A packed matrix has a byte for each number, and in groups of 32 a scale for each; the few scales of INT8 and FP8 are
    left out.
    """
    a, whole, sizes = architecture, LayoutConfig(pp=layout.pp, vpp=layout.vpp), []
    scales = 4 / 32 if rollout.precision in ("int4", "int3", "int2") else 0.0
    for stage in range(layout.pp):
        count = sum(stage_parameters(a, whole, stage))
        if a.tied and 0 < stage == layout.pp - 1:
            count -= a.vocab_size * a.hidden_size
        packed = matrix_parameters(a, whole, stage) if rollout.packs else 0
        sizes.append(BYTES[rollout.dtype] * (count - packed) + int((1 + scales) * packed))
        if a.experts and a.experts.has_bias:  # float32 in any dtype
            sizes[-1] += 4 * a.experts.num_experts * sum(map(a.is_sparse, stage_layers(a, whole, stage)))
    return sizes
