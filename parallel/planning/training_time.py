"""Seconds of a step's training: FLOPs, collectives, the pipeline's bubble, the optimizer. See ``time.py``.

Legend: as in ``memory.py``; m micro-batches of a minibatch on each rank.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture
from parallel.planning.decoding import Lengths
from parallel.planning.flops import Flops, Load, forward_flops, update_flops
from parallel.planning.machine import Machine, spanned
from parallel.planning.memory import trained_parameters
from parallel.planning.traffic import Group, Sent, data_bytes, forward_sent, scored_passes, update_sent
from parallel.planning.work import BYTES, COPIED, copies_of


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


def batch_of(
    config: RunConfig, lengths: Lengths, layout: LayoutConfig, models: Sequence[Architecture]
) -> Batch:
    """The batch of each of the ``dp`` copies, for all models. Micro-batches are full: as many as the tokens need."""
    rollout, learner = config.rollout, config.learner
    whole, counted = step_load(
        lengths,
        rollout.prompts_per_step,
        rollout.group_size,
        shares=all(shares_prompts(model, config, layout) for model in models),
    )
    full = math.ceil(counted / (layout.dp_size * learner.minibatches * learner.token_budget))
    multiple = layout.microbatch_multiple
    return Batch(load=whole.divided(layout.dp_size), microbatches=-(-max(1, full) // multiple) * multiple)


@lru_cache(maxsize=64)
def step_load(lengths: Lengths, groups: int, group_size: int, *, shares: bool) -> tuple[Load, float]:
    """All samples of a step, and the tokens that micro-batches count for them.

    shares: samples that share a prompt compute it once, and ``COPIED`` of it is counted for each. The last token of a
    response is no input.
    """
    responses, p = lengths.of(groups * group_size), lengths.prompt
    if shares:
        tokens = groups * p + sum(length - 1 for length in responses)
        pairs = groups * (p * (p + 1) // 2)
        pairs += sum((length - 1) * p + (length - 1) * length // 2 for length in responses)
        counted = tokens + len(responses) * p * COPIED
    else:
        places = [p + length - 1 for length in responses]
        tokens = counted = sum(places)
        pairs = sum(n * (n + 1) // 2 for n in places)
    return Load(tokens=tokens, pairs=pairs, predicted=sum(responses)), counted


def shares_prompts(architecture: Architecture, config: RunConfig, layout: LayoutConfig) -> bool:
    """Whether this model computes a shared prompt once. Transformer Engine, which a plan does not know of, does not."""
    is_whole = (
        architecture.recurrent is not None
        or layout.cp > 1
        or config.model.numerics == "aligned"
        or config.learner.routing != "own"
    )
    return config.learner.share_prompts and not is_whole


def training_time(
    architecture: Architecture,
    config: RunConfig,
    lengths: Lengths,
    machine: Machine,
    layout: LayoutConfig,
    *,
    critic: Architecture | None = None,
    reference: Architecture | None = None,
) -> Training:
    """Training of a step. A critic has as many passes as the policy, one of them before the update. reference: of a model of
    its own, which has one; None: its pass is as the policy's."""
    batch = batch_of(config, lengths, layout, [*filter(None, (architecture, critic, reference))])
    over, rollout = machine.hardware.overheads, config.rollout
    models = [(architecture, scored_passes(config) - (reference is not None), True)]
    if critic is not None:
        models.append((critic, 1, False))
    fill = bubble_share(layout, batch.microbatches)
    # The passes before the update take all minibatches at once.
    with_bubble = 1 + bubble_share(layout, batch.microbatches * config.learner.minibatches)

    def passes_of(model: Architecture, is_policy: bool = True) -> list[_Passes]:
        return [
            _Passes(model, config, machine, layout, batch, stage, is_policy) for stage in range(layout.pp)
        ]

    score = compute = collectives = bubble = optimizer = 0.0
    stages = [0.0] * layout.pp
    for model, scored, is_policy in models:
        passes = passes_of(model, is_policy)
        score += scored * max(each.forward for each in passes) * with_bubble
        slowest = max(passes, key=lambda each: each.update)
        compute += slowest.compute
        collectives += slowest.sending
        bubble += slowest.update * fill
        optimizer += config.learner.minibatches * max(
            optimizer_seconds(model, config, machine, layout, stage, is_policy=is_policy)
            for stage in range(layout.pp)
        )
        stages = [total + each.update for total, each in zip(stages, passes, strict=True)]
    if reference is not None:
        score += max(each.forward for each in passes_of(reference)) * with_bubble
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
        return self._sending(update_sent(*self._sent, recompute=self.config.learner.recompute))

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
    is_policy: bool,
) -> float:
    """One optimizer step: ``data_bytes`` over the link of the data-parallel group, and AdamW's numbers in memory.

    AdamW reads the gradient, twice with its norm, and the two moments and the float32 weight, and writes the latter three:
    8 + 12 + 12 bytes for each number whose state this rank has, and b to write the weight. Zeroing: 4 for each of the
    rank's gradients.
    """
    shared, expert = trained_parameters(architecture, layout, stage, config.learner if is_policy else None)
    state: float = shared + expert
    if config.learner.optimizer.distributed:
        copies, expert_copies = copies_of(layout)
        state = shared / copies + expert / expert_copies
    size = (32 + BYTES[config.model.dtype]) * state + 4 * (shared + expert)
    sent = machine.link_seconds(
        data_bytes(architecture, config, layout, stage, output=is_policy), spanned(layout, "data")
    )
    return machine.memory_seconds(size) + sent + machine.hardware.overheads.optimizer_s
