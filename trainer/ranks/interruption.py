"""Interruptions end a run between two steps, on all ranks together.

Every rank raises one at the same place, with weights, optimizer and data position as the last complete step
left them, so a checkpoint of that step may follow. Any other error belongs to one rank: it ends the run at
once, and nothing is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollout.client import RolloutError

T = TypeVar("T")


class StopRequested(Exception):
    """The run was asked to stop; the message says by whom or why."""


INTERRUPTIONS = (StopRequested, RolloutError)


@dataclass(slots=True)
class Postponed:
    """Holds an interruption back until the step is recorded. A step is complete once its weights have moved."""

    interruption: Exception | None = None

    def attempt(self, part: Callable[[], T], *, in_any_case: bool = False) -> T | None:
        """The result of ``part``; None if it is interrupted. If an earlier part was interrupted, ``part`` is
        attempted only ``in_any_case``."""
        if self.interruption is not None and not in_any_case:
            return None
        try:
            return part()
        except INTERRUPTIONS as error:
            self.interruption = self.interruption or error
            return None

    def release(self) -> None:
        """Raise the interruption that was held back, if there is one."""
        if self.interruption is not None:
            raise self.interruption
