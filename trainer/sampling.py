"""The learner's ranks' interface to the sample role. Rank 0 talks to it; the other ranks wait for the
outcome.

While rank 0 waits, it looks for three things:

    a request to stop            ends the wait, on all ranks
    a successor of the role      gets the data position of the last groups, and the same request again
    servers without weights      if all servers that had the weights have ended, and some were restarted: all ranks
                                 send the weights together, and the wait continues
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from parallel.rank_objects import from_first_rank
from rollout.records import Group
from rollout.sampling.messages import EvaluationResult, SampleRoleLost, SamplingStats
from rollout.sampling.remote import RemoteSampler
from trainer.ranks.interruption import INTERRUPTIONS, StopRequested
from trainer.weight_sync import WeightSync

T = TypeVar("T")
LOOK_EVERY_S = 1.0
"""Interval of the checks for servers without weights."""
_SEND_WEIGHTS, _WAIT_ON = "send weights", "wait on"
"""Rank 0's messages while the others wait. Every message restarts their collective's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The groups of one step and the statistics of sampling them; both None on all ranks but the first."""

    groups: list[Group] | None
    stats: SamplingStats | None


class SharedSampler:
    """``next_groups`` and ``evaluate`` are collectives. They raise an interruption on all ranks together (see
    trainer/ranks/interruption.py) when the sample role fails, or when a stop is requested before it answers.
    Its result is then discarded, and the data position does not advance.
    """

    def __init__(
        self,
        remote: RemoteSampler | None,
        stop_requested: Callable[[], str | None] = lambda: None,
        *,
        weights: WeightSync | None = None,
        role_start_s: float = 0.0,
        say: Callable[[str], None] = print,
    ):
        """
        Args:
            remote: None on all ranks but the first.
            stop_requested: the reason to stop, or None.
            weights: None, on all ranks, where the servers stay the same until the run ends.
            role_start_s: time for a successor of the sample role to start.
            say: called if the role has a successor.
        """
        self._remote, self._stop_reason = remote, stop_requested
        self._weights, self._role_start_s, self._say = weights, role_start_s, say
        self._looked_at = time.monotonic()
        self._state: dict | None = None

    def next_groups(self, count: int, *, newest: int, max_staleness: int, ahead: int) -> Sampled:
        def ask(remote: RemoteSampler) -> Sampled:
            # Asked together with the state: a sample role that has ended or is busy later gives no answer.
            groups, stats, self._state = remote.next_groups(
                count, newest=newest, max_staleness=max_staleness, ahead=ahead, meanwhile=self._look_around
            )
            return Sampled(groups=groups, stats=stats)

        return self._asked_by_first_rank(ask) or Sampled(groups=None, stats=None)

    def drain(self, within_s: float) -> None:
        """Before an update of the weights: wait for unfinished responses, for at most ``within_s``. A
        collective if it is above 0."""
        if within_s > 0:
            self._asked_by_first_rank(lambda remote: remote.drain(within_s, meanwhile=self._heed_stop))

    def admit(self, count: int, *, newest: int, ahead: int) -> None:
        """After an update of the weights to version ``newest``: start the groups of the next ``count`` prompts and of
        ``ahead`` further steps, which ``next_groups`` hands out. A collective."""
        self._asked_by_first_rank(
            lambda remote: remote.admit(count, newest=newest, ahead=ahead, meanwhile=self._heed_stop)
        )

    def evaluate(self) -> EvaluationResult | None:
        """Held-out accuracy; None if the task has no held-out problems, and on all ranks but the first."""
        return self._asked_by_first_rank(lambda remote: remote.evaluate(meanwhile=self._look_around))

    def stop_requested(self) -> bool:
        """Whether a stop was requested, as rank 0 sees it; the same on all ranks."""
        return from_first_rank(self._remote is not None and self._stop_reason() is not None)

    def _asked_by_first_rank(self, ask: Callable[[RemoteSampler], T]) -> T | None:
        """The answer on rank 0, None on the other ranks. A collective: an interruption of rank 0 is raised on
        all ranks."""
        if self._remote is None:
            return self._wait_for_first_rank()
        try:
            answer = self._ask_role_or_successor(self._remote, ask)
        except INTERRUPTIONS as interruption:
            from_first_rank(interruption)
            raise
        from_first_rank(None)
        return answer

    def _wait_for_first_rank(self) -> None:
        while isinstance(news := from_first_rank(None), str):
            if news == _SEND_WEIGHTS:
                assert self._weights is not None
                with suppress(*INTERRUPTIONS):  # rank 0 has the same error, and broadcasts it next
                    self._weights.send_again()
        if news is not None:
            raise news

    def _ask_role_or_successor(self, remote: RemoteSampler, ask: Callable[[RemoteSampler], T]) -> T:
        self._heed_stop()
        is_successor = False
        while True:
            try:
                if is_successor:
                    remote.load_state(self._state)
                return ask(remote)
            except SampleRoleLost as loss:
                from_first_rank(_WAIT_ON)
                self._follow_successor(remote, loss)
                from_first_rank(_WAIT_ON)
                is_successor = True

    def _follow_successor(self, remote: RemoteSampler, loss: SampleRoleLost) -> None:
        if not remote.follow(within_s=self._role_start_s, meanwhile=self._heed_stop):
            raise loss
        self._say(f"{loss}; its successor continues")

    def _look_around(self) -> None:
        self._heed_stop()
        if self._weights is None or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        if self._weights.are_needed():
            from_first_rank(_SEND_WEIGHTS)
            self._weights.send_again()

    def _heed_stop(self) -> None:
        reason = self._stop_reason()
        if reason is not None:
            raise StopRequested(reason)

    def state(self) -> dict | None:
        """The data position after the last groups, or the loaded one. None if there is neither, and on all
        ranks but the first."""
        return self._state

    def load_state(self, state: dict | None) -> None:
        """Continue from this data position; None: from the start. The role, or a successor, has it at
        return."""
        self._state = state if self._remote is not None else None
        while self._remote is not None:
            try:
                return self._remote.load_state(state)
            except SampleRoleLost as loss:
                self._follow_successor(self._remote, loss)

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.stop()
