"""Several pieces of work at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. The first error cancels the others and is raised, without an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in started]


class TasksToEnd:
    """Tasks that are ended together."""

    def __init__(self) -> None:
        self._running = set[asyncio.Task]()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def end(self) -> None:
        """Cancel all, and wait until they have ended. An await of a cancelled task raises CancelledError."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
