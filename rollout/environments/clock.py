"""The time of an episode. It stops while a request of the episode waits for servers or while its reward is computed,
because the episode causes neither wait."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class EpisodeClock:
    """Deadlines of one episode, inside one event loop."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._left_s: dict[asyncio.Timeout, float] = {}
        """Seconds left of each deadline when the clock was last stopped."""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock inside. It continues when the last of several such waits has ended."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._stop()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._go()

    @asynccontextmanager
    async def deadline(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout`` by this clock."""
        async with asyncio.timeout(None if self._num_waiting else seconds) as timeout:
            self._left_s[timeout] = seconds
            try:
                yield timeout
            finally:
                del self._left_s[timeout]

    def _stop(self) -> None:
        now = asyncio.get_running_loop().time()
        for timeout in self._left_s:
            if (when := timeout.when()) is not None and not timeout.expired():
                self._left_s[timeout] = when - now
                timeout.reschedule(None)

    def _go(self) -> None:
        now = asyncio.get_running_loop().time()
        for timeout, left_s in self._left_s.items():
            if not timeout.expired():
                timeout.reschedule(now + left_s)
