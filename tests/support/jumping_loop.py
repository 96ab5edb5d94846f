"""An event loop whose time can be advanced, for tests of long deadlines."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self.jumped_s


async def jump(seconds: float) -> None:
    """Advance the time. Returns after everything that is due then has run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.jumped_s += seconds
    for _ in range(20):
        await asyncio.sleep(0)


def run_jumping(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
