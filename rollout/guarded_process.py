"""A process that ends all that it started, once our end of its input closes: the guard of an environment or an agent
(``environments/tandem_worker``), or what runs the programs of responses (``rewards/program_runner.py``)."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

logger = logging.getLogger(__name__)
T = TypeVar("T")

END_TIMEOUT_S = 10.0
"""Time to end what an episode left over, for ``close()``, and for the guard to kill and reap everything."""


@asynccontextmanager
async def guarded_process(
    command: Sequence[str | Path], *, prefix: str, variables: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A guard with pipes, in an empty folder of its own. Leaving ends it, with everything that it started, and removes
    the folder.

    Entering raises OSError where it cannot be started.
    """
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix=prefix)
    try:
        guard = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=folder, env=variables, start_new_session=True,
        )  # fmt: skip
        try:
            yield guard
        finally:
            await finished(end_guarded(guard))
    finally:
        with suppress(OSError):
            await finished(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def end_guarded(guard: asyncio.subprocess.Process) -> None:
    """Have a guard (``tandem_worker``) kill all below it, and end. Returns after the last of them is gone."""
    assert guard.stdin is not None
    guard.stdin.close()  # it sees that
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await guard.wait()
    except TimeoutError:
        logger.warning("guard %d does not end; it is killed", guard.pid)
        tree = []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(guard.pid)
            tree = [top, *top.children(recursive=True)]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await guard.wait()


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which a cancellation does not interrupt; it is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # it is the task's, and raised below
            break
    if cancelled is not None:
        raise cancelled
    return task.result()
