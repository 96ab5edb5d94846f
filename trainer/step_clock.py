"""The clock of a step: the seconds of its parts, for the metrics, and the same parts as spans, for the trace.

Only ``loop.py`` names parts. Work inside a part, such as a micro-batch, is a span of the file that does it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

from tracing import at_step, span
from tracing.reading import STEP


class StepClock:
    """Seconds per part of a step, and from its beginning to ``end_step``."""

    def __init__(self, doing: Callable[[str], None], before: Mapping[str, float] = MappingProxyType({})):
        """doing: called with each part as it begins. before: ``of_next_step`` of the step before."""
        self._doing, self._began = doing, time.perf_counter()
        self.seconds: dict[str, float] = {**before}
        self.of_next_step: dict[str, float] = {}
        """Seconds of parts that run after the step has been recorded."""

    @contextmanager
    def time(self, part: str, *, of_next_step: bool = False) -> Iterator[None]:
        started = time.perf_counter()
        self._doing(part)
        with span(part):
            yield
        seconds = self.of_next_step if of_next_step else self.seconds
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started

    def end_step(self) -> None:
        """Later parts, such as an evaluation, do not count in ``time/step``."""
        self.seconds["step"] = time.perf_counter() - self._began


def clocked(
    steps: Iterable[int],
    doing: Callable[[str], None],
    profiled: Callable[[int], AbstractContextManager[object]],
) -> Iterator[tuple[int, StepClock]]:
    """Each step with its clock. The body of the loop over them is a span of the trace.

    profiled: gives the context manager in which each traced step runs."""
    clock = StepClock(doing)
    for step in steps:
        with profiled(step) if at_step(step) else nullcontext(), span(STEP, step=step):
            clock = StepClock(doing, clock.of_next_step)
            yield step, clock
