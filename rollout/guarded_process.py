"""A process that ends all that it started, once our end of its input closes: the guard of an environment or an agent
(``environments/tandem_worker``), or what runs the programs of responses (``rewards/program_runner.py``)."""

import asyncio
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

logger = logging.getLogger(__name__)
T = TypeVar("T")

END_TIMEOUT_S = 10.0
"""Time to end what an episode left over, for ``close()``, and for the guard to kill and reap everything."""


class Guard(Protocol):
    """A guard as ``asyncio.subprocess.Process`` has it. Closing its ``stdin`` ends it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> Any: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    @property
    def stderr(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...


@asynccontextmanager
async def guarded_process(
    command: Sequence[str | Path], *, prefix: str, variables: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A guard with pipes, in an empty folder of its own. Leaving ends it, with everything that it started, and removes
    the folder.

    Entering raises OSError where it cannot be started.
    """
    async with own_folder(prefix) as folder:
        guard = await start_guarded(*command, stderr=asyncio.subprocess.PIPE, cwd=folder, env=variables)
        try:
            yield guard
        finally:
            await finished(end_guarded(guard))


@asynccontextmanager
async def own_folder(prefix: str) -> AsyncIterator[str]:
    """An empty folder, which is removed with all in it."""
    folder = os.path.join(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}")
    try:
        await finished(asyncio.to_thread(os.mkdir, folder, 0o700))
        yield folder
    finally:
        await finished(asyncio.to_thread(remove, folder))


def remove(folder: str) -> None:
    """Remove a folder with all in it, also folders in which nothing may be written, as some tools make them, and those
    that are nested deeper than Python's stack, and than a path is long, as a program may make them."""
    try:
        _remove(folder)
    except RecursionError:
        quiet = subprocess.DEVNULL
        subprocess.run(["rm", "-rf", "--", folder], stdin=quiet, stdout=quiet, stderr=quiet, check=False)


def _remove(folder: str) -> None:
    with suppress(OSError):
        os.chmod(folder, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    for inner, names, _ in os.walk(folder):  # what is left, from the top
        for path in (os.path.join(inner, name) for name in names):
            with suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


async def start_guarded(*command: str | Path, **options: Any) -> asyncio.subprocess.Process:
    """Start a guard with pipes, in a session of its own: it ends what it guards after a killed group too. asyncio would kill
    it where this is cancelled, which sets free what it guards: the start is waited for instead, and the guard ended.
    Raises OSError."""
    pipe = asyncio.subprocess.PIPE
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True, **options)
    )

    async def undo() -> None:
        with suppress(OSError):
            await end_guarded(await starting)

    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await finished(undo())
        raise


async def end_guarded(guard: Guard) -> None:
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
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
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
