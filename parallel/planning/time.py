"""Seconds of a training step, estimated: a roofline of each part. Pure functions of numbers, without torch.

    sampling    a server's prompts (FLOPs), then decoding, a token of each response at a time: whichever takes longer,
                reading weights and cache, or FLOPs. Responses that its cache has no room for wait for others to end.
                The longest response sets the end.
    training    the passes before the update (``old``, ``ref``) and the update: FLOPs, then collectives, which nothing
                hides; the bubble of the pipeline; the optimizer.
    transfer    all weights over the slowest link

    step = sampling + training + transfer,  or  max(sampling, training) + transfer  with rollout.max_staleness >= 1

With ``launch.placement: colocated`` both sides have all GPUs, one after the other. Weights then go through host
memory, which counts as no time.

Every rank has as much to do as the others, and every micro-batch as much as any. A description of the hardware
(``configs/schema/hardware.py``) has the rates. ``assumptions`` says in sentences what an estimate rests on.

Sampling is in ``sampling_time.py``, training in ``training_time.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial

from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture
from parallel.planning.decoding import Lengths
from parallel.planning.machine import Machine
from parallel.planning.sampling_time import Sampling, sampling_time
from parallel.planning.server_memory import RolloutMemory
from parallel.planning.traffic import bytes_to_send
from parallel.planning.training_time import Training, training_time

PROMPT_TOKENS = 256
"""Of a prompt, where nothing else is said."""


def transfer_seconds(
    architecture: Architecture, config: RunConfig, machine: Machine, layout: LayoutConfig, num_gpus: int
) -> float:
    """All stages' weights in turn, each gathered by its ranks (tensor and expert parallelism) while the bucket before is
    sent: the longer of the two. Every server rank gets all of them."""
    sent = sum(bytes_to_send(architecture, config.rollout, layout))
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

    def shares(self) -> dict[str, float]:
        """Seconds of the three parts by name."""
        return {"sampling": self.sampling.total, "training": self.training.total, "transfer": self.transfer}

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
        reference: Architecture | None = None,
    ):
        self._config = config
        step = (architecture, config, lengths, machine)
        self._sampling: Callable[..., Sampling] = cache(partial(sampling_time, *step))
        self._training: Callable[..., Training] = cache(
            partial(training_time, *step, critic=critic, reference=reference)
        )
        self._transfer = partial(transfer_seconds, architecture, config, machine)
        self._gpus_per_node = machine.gpus_per_node

    def step(self, layout: LayoutConfig, *, tp: int, replicas: int, memory: RolloutMemory) -> StepTime:
        """A step of a learner of this layout and ``replicas`` servers of ``tp`` ranks, each with ``memory``."""
        sides = (layout.world_size, tp * replicas)
        launch, rollout = self._config.launch, self._config.rollout
        num_gpus = max(sides) if launch.takes_turns else sum(sides)
        nodes = -(-num_gpus // self._gpus_per_node)
        if launch.copies_by_node(rollout, stages=layout.pp, replicas=replicas, nodes=nodes):
            num_gpus = min(num_gpus, self._gpus_per_node)  # no weights leave their node
        return StepTime(
            sampling=self._sampling(tp=tp, replicas=replicas, memory=memory),
            training=self._training(layout),
            transfer=self._transfer(layout, num_gpus),
            staleness=self._config.rollout.max_staleness,
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
            "siblings' prompts are computed once, in servers and (without cp, recurrent layers and Transformer Engine) in the learner"
        )
    if config.skips_zero_gradients:
        said.append("every group has signal: none is spared its backward pass (learner.skip_zero_gradients)")
    if config.learner.optimizer.offload or (config.critic is not None and config.critic.optimizer.offload):
        said.append("an optimizer's state gets to the device and back in no time (optimizer.offload)")
    if config.launch.takes_turns:
        said.append(
            "learner and servers take turns; moving the learner to host memory and back at every step takes no time, and weights go "
            "over the links (within each node if layout.pp=1 and no server spans two), while their way through host memory takes no "
            "time (launch.placement=colocated)"
        )
    if rollout.max_staleness:
        said.append(
            f"max_staleness={rollout.max_staleness}: sampling and training overlap, the longer one counts; while a step's last responses "
            "run, servers continue with those of later steps"
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
