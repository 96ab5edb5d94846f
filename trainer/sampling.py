"""The sample role as the learner's ranks see it. Rank 0 talks to it and polls for stop requests; the other ranks
wait for the outcome."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from rollout.records import Group
from rollout.sampling.messages import EvaluationResult, SamplingStats
from rollout.sampling.remote import RemoteSampler
from trainer.ranks.interruption import StopRequested
from trainer.ranks.totals import on_first_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The groups of one step and the statistics of sampling them; both None on all ranks but the first."""

    groups: list[Group] | None
    stats: SamplingStats | None


class SharedSampler:
    """``next_groups`` and ``evaluate`` are collectives. They raise an interruption on all ranks together (see
    trainer/ranks/interruption.py) when the sample role fails, or when a stop is requested before it answers.
    Its result is then discarded, and the data position does not advance.

    remote: None on all ranks but the first. stop_requested: the reason to stop, or None.
    """

    def __init__(self, remote: RemoteSampler | None, stop_requested: Callable[[], str | None] = lambda: None):
        self._remote, self._stop_reason = remote, stop_requested
        self._state: dict | None = None

    def next_groups(self, count: int, *, newest: int, max_staleness: int, ahead: int) -> Sampled:
        def ask() -> Sampled:
            self._heed_stop()
            remote = self._of_first_rank()
            groups, stats = remote.next_groups(
                count, newest=newest, max_staleness=max_staleness, ahead=ahead, meanwhile=self._heed_stop
            )
            self._state = remote.state()  # now: a sample role that is gone or busy later gives no answer
            return Sampled(groups=groups, stats=stats)

        return on_first_rank(ask) or Sampled(groups=None, stats=None)

    def drain(self, within_s: float) -> None:
        """Before an update of the weights: wait for responses that are under way, for ``within_s`` at most. A
        collective where it is above 0."""

        def ask() -> None:
            self._heed_stop()
            self._of_first_rank().drain(within_s, meanwhile=self._heed_stop)

        if within_s > 0:
            on_first_rank(ask)

    def evaluate(self) -> EvaluationResult | None:
        """Held-out accuracy; None where the task has no held-out problems, and on all ranks but the first."""

        def ask() -> EvaluationResult | None:
            self._heed_stop()
            return self._of_first_rank().evaluate(meanwhile=self._heed_stop)

        return on_first_rank(ask)

    def stop_requested(self) -> bool:
        """Whether a stop was requested, as rank 0 sees it; the same on all ranks."""
        requested = [self._remote is not None and self._stop_reason() is not None]
        dist.broadcast_object_list(requested, src=0)
        return requested[0]

    def _of_first_rank(self) -> RemoteSampler:
        assert self._remote is not None
        return self._remote

    def _heed_stop(self) -> None:
        reason = self._stop_reason()
        if reason is not None:
            raise StopRequested(reason)

    def state(self) -> dict | None:
        """The data position after the last groups, or the one that was loaded. None before either, and on all
        ranks but the first."""
        return self._state

    def load_state(self, state: dict | None) -> None:
        """Go on from this data position; None: from the start."""
        if self._remote is not None:
            self._remote.load_state(state)
            self._state = state

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.stop()
