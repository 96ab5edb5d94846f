"""What may end a run between two steps, and how all ranks come to end it together.

An interruption is raised on every rank at the same place, with weights, optimizer and position in the data as
the last complete step left them; so a checkpoint of that step may be written then. Any other error is one
rank's own, ends the run at once, and nothing is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollout.client import RolloutError

T = TypeVar("T")


class StopRequested(Exception):
    """Somebody asked the run to stop; the message says who or why."""


INTERRUPTIONS = (StopRequested, RolloutError)


@dataclass(slots=True)
class Postponed:
    """Once the weights of a step have moved, that step is done: what interrupts the rest of it is held back
    until the step is recorded."""

    interruption: Exception | None = None

    def attempt(self, part: Callable[[], T]) -> T | None:
        """What ``part`` gives; None where it is interrupted, or something before it was."""
        if self.interruption is not None:
            return None
        try:
            return part()
        except INTERRUPTIONS as error:
            self.interruption = error
            return None

    def release(self) -> None:
        """Raise what was held back, if anything."""
        if self.interruption is not None:
            raise self.interruption
