"""The sample role as the learner's ranks see it: rank 0 asks, the others wait at the next collective."""

from dataclasses import dataclass

from rollout.records import Group
from rollout.remote_sampler import RemoteSampler
from rollout.sampler import EvaluationResult, SamplingStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The groups of one step and what sampling them took; both None on all ranks but the first."""

    groups: list[Group] | None
    stats: SamplingStats | None


class SharedSampler:
    def __init__(self, remote: RemoteSampler | None):
        self._remote = remote

    def next_groups(self, count: int, *, newest: int, max_staleness: int) -> Sampled:
        if self._remote is None:
            return Sampled(groups=None, stats=None)
        groups, stats = self._remote.next_groups(count, newest=newest, max_staleness=max_staleness)
        return Sampled(groups=groups, stats=stats)

    def evaluate(self) -> EvaluationResult | None:
        """Held-out accuracy; None where the task has no held-out problems, and on all ranks but the first."""
        return self._remote.evaluate() if self._remote is not None else None

    def state(self) -> dict | None:
        return self._remote.state() if self._remote is not None else None

    def load_state(self, state: dict) -> None:
        if self._remote is not None:
            self._remote.load_state(state)

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.stop()
