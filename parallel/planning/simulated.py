"""What a simulated rank reports (``trainer/studies/simulation.py`` makes it), and the step that it runs. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.schema.run import RunConfig
from parallel.planning.architecture import Architecture

LONGEST_PROMPT = 1024
"""Tokens of a made prompt, if the micro-batch has room for them."""
START = "start"
"""What comes before the parts of a step, whose names are those of ``trainer/loop.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """The samples of a simulated step."""

    microbatches: int
    """Of each rank."""
    samples: int
    """Of each micro-batch."""
    places: int
    """Of each sample, packed."""
    response: int
    """Tokens of each response."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.samples * self.places


def made_step(config: RunConfig, architecture: Architecture) -> MadeStep:
    """As many micro-batches as fill the pipeline, each filled to the budget by samples of the greatest length."""
    budget, longest = config.learner.token_budget, config.rollout.max_new_tokens
    layout = config.layout
    places = min(budget, architecture.max_positions, longest + LONGEST_PROMPT)
    samples = budget // places
    places = min(budget // samples, architecture.max_positions)
    to_fill = layout.pp + 1 if layout.pp > 1 else 2
    multiple = layout.microbatch_multiple
    return MadeStep(
        microbatches=-(-to_fill // multiple) * multiple,
        samples=samples,
        places=places,
        response=min(longest, places - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Calls of one operation in one process group."""

    operation: str
    group: str
    size: int
    """Ranks of the group."""
    calls: int
    bytes: int
    """Of the whole tensors: the larger side of a gather or scatter."""


@dataclass(slots=True, kw_only=True)
class Part:
    """What one part of the step took."""

    peak: int = 0
    """Greatest bytes of the device."""
    at_peak: Mapping[str, int] = field(default_factory=dict)
    """These bytes by their purpose."""
    flops: int = 0
    host_reads: int = 0
    """Times that the host waits for a number of the device."""
    seconds: float = 0.0
    """Of the simulation itself."""
    collectives: list[Collective] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRank:
    rank: int
    stage: int
    step: MadeStep
    parameters: int
    parts: Mapping[str, Part]
    """By name, in their order."""
    buckets: tuple[int, ...]
    """Bytes of each bucket of the stage's weights for the servers; the stage's first rank sends them."""

    @property
    def fullest(self) -> str:
        """The part of the step that takes most memory."""
        return max(self.parts, key=lambda name: self.parts[name].peak)

    @property
    def peak(self) -> int:
        return self.parts[self.fullest].peak

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts.values())
