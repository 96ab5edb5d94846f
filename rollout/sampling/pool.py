"""Groups in progress: which of them may start, and which make up a step.

Groups are numbered in the order of the data, and every step takes the next P of them
(P = ``rollout.prompts_per_step``). While the learner makes step s, groups of the steps s + 1 ... s + k may
already be sampled (k = ``rollout.max_staleness``):

    group g may start when  g < (newest + k + 1) P        newest: updates of the weights since the start
    step s takes exactly    s P <= g < (s + 1) P

A token is thus at most k versions older than the weights that its step trains. The bound holds for answers of any
length; no group is dropped, and no clock decides. With k = 0 the steps are synchronous.

Under dynamic sampling a step takes more groups, and ``step_end`` replaces P.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollout.records import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group: Group
    has_signal: bool
    """False if dynamic sampling replaces the group."""
    failures: list[str]
    """Prompt and error of each sample whose reward or episode failed."""
    num_usable: int
    """Samples that are scored."""


def step_end(start: int, count: int, max_rounds: int, lacks_signal: Sequence[bool]) -> int:
    """The place after the last group of the step that begins at place ``start``:

        N_1 = count,  N_(r+1) = count + (groups without signal among the first N_r),  end = start + N_max_rounds

    Rounds, each of which replaces the groups without signal of the round before, would sample as many groups.
    A group that is not finished counts as one with signal (``lacks_signal`` False, or left out), so the end
    can only grow as groups finish. All groups before it belong to this step or an earlier one in any case.
    """
    end = start + count
    for _ in range(max_rounds - 1):
        grown = start + count + sum(lacks_signal[start:end])
        if grown == end:
            break
        end = grown
    return end


class GroupPool:
    """The groups that are being sampled, or are finished and wait for their step.

    sample: samples and scores the group of a number.
    """

    def __init__(self, sample: Callable[[int], Awaitable[ScoredGroup]], *, max_rounds: int) -> None:
        self._sample, self._max_rounds = sample, max_rounds
        self._tasks: list[asyncio.Task[ScoredGroup]] = []
        """From the group ``first`` on."""
        self._lacks_signal: list[bool] = []
        self._count, self._steps = 0, 0
        self.first = 0
        """The number of the first group that has not been handed out."""

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks)

    @property
    def ready(self) -> int:
        """Finished groups that wait for their step."""
        return len(self._tasks) - self.running

    def admit(self, count: int, *, ahead: int) -> None:
        """Start the groups of the next step (``count`` groups with signal) and of ``ahead`` further steps."""
        self._count, self._steps = count, 1 + ahead
        self._start_admitted()

    async def next_step(self) -> list[ScoredGroup]:
        """All groups of the next step, once they are finished. They stay in the pool until ``hand_out``.

        Raises the error of the first of them that fails.
        """
        while True:
            tasks = self._tasks[: self._end_of_step(0)]
            running = [task for task in tasks if not task.done()]
            finished = [task.result() for task in tasks if task.done()]
            if not running:
                return finished
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)

    def hand_out(self, number: int) -> None:
        """Remove the first ``number`` groups, a whole step, from the pool."""
        del self._tasks[:number], self._lacks_signal[:number]
        self.first += number
        self._steps -= 1

    async def restart(self, first: int) -> None:
        """Cancel all groups, wait until they have ended, and continue with group ``first``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._lacks_signal = [], []
        self.first, self._steps = first, 0

    def _end_of_step(self, start: int) -> int:
        return step_end(start, self._count, self._max_rounds, self._lacks_signal)

    def _start_admitted(self) -> None:
        end = 0
        for _ in range(self._steps):
            end = self._end_of_step(end)
        while len(self._tasks) < end:
            number = self.first + len(self._tasks)
            self._lacks_signal.append(False)
            self._tasks.append(asyncio.create_task(self._run(number)))

    async def _run(self, number: int) -> ScoredGroup:
        scored = await self._sample(number)
        if not scored.has_signal:
            self._lacks_signal[number - self.first] = True
            self._start_admitted()
        return scored
