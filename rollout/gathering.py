"""Several pieces of work at once, of which none may fail."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def all_or_first_error(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all, in order. The first error cancels the others, and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(_awaited(one)) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in started]


async def _awaited(one: Awaitable[T]) -> T:
    return await one
