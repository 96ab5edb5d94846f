"""A guard: a process that ends everything that it started, once our end of its input closes. There is one for an
environment or an agent (``environments/tandem_worker``), and one for the programs of responses
(``rewards/program_runner.py``)."""

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from rollout.servers.watchdog import listed, remove_left

logger = logging.getLogger(__name__)
T = TypeVar("T")

WORKER = (Path(__file__).parent / "environments" / "tandem_worker").resolve()
"""The guard's program. With a command as arguments, it guards that command."""

END_TIMEOUT_S = 10.0
"""Time limit of each: ending what an episode left over, ``close()``, and the guard's kill and reap of everything."""

SHORT = "/tmp"
"""The folder of folders whose path must be short."""
OWN_FOLDER = re.compile(r"tandem-[a-z]+-(?P<machine>\w+)-(?P<pid>\d+)-(?P<started>\d+)-\w+")
"""Name of a folder of ``own_folder``, with the process that removes it."""
OF_SERVERS = "tandem-server-"
"""How the name of a server's folder begins. Only such a folder may list files to remove: an agent writes into its own."""


class Guard(Protocol):
    """The part of ``asyncio.subprocess.Process`` that a guard needs. Closing its ``stdin`` ends it."""

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
    """A guard with pipes, in its own empty folder. Leaving ends it, with everything that it started, and removes the
    folder.

    Entering raises OSError if the guard cannot be started.
    """
    async with own_folder(prefix) as folder:
        guard = await start_guarded(*command, stderr=asyncio.subprocess.PIPE, cwd=folder, env=variables)
        try:
            yield guard
        finally:
            await finished(end_guarded(guard))


@asynccontextmanager
async def own_folder(prefix: str) -> AsyncIterator[str]:
    """An empty folder, which is removed with all in it. If this process is killed, ``remove_abandoned`` removes it."""
    folder = os.path.join(tempfile.gettempdir(), own_name(prefix))
    try:
        await finished(asyncio.to_thread(os.mkdir, folder, 0o700))
        yield folder
    finally:
        await finished(asyncio.to_thread(remove, folder))


def own_name(prefix: str) -> str:
    """A new name for a folder, by which ``remove_abandoned_in`` finds it if this process did not remove it."""
    return f"{prefix}{_machine()}-{os.getpid()}-{start_of(os.getpid())}-{secrets.token_hex(8)}"


def remove_abandoned(prefix: str = "") -> None:
    """``remove_abandoned_in`` the folders of temporary files.

    prefix: of the names of these folders; "": all kinds."""
    for folder in {tempfile.gettempdir(), SHORT}:
        remove_abandoned_in(folder, prefix)


def remove_abandoned_in(folder: str | Path, prefix: str = "") -> None:
    """Remove the folders that this user's processes left in this one because they were killed, alone or with a whole job of
    Slurm, and the files of such servers in /dev/shm. Other machines may share this folder; theirs stay."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_abandoned(entry):
                if entry.name.startswith(OF_SERVERS):
                    remove_left(None, listed(entry.path))
                remove(entry.path)


def _is_abandoned(entry: os.DirEntry) -> bool:
    owner = OWN_FOLDER.fullmatch(entry.name)
    if owner is None or owner["machine"] != _machine() or start_of(int(owner["pid"])) == owner["started"]:
        return False
    with suppress(FileNotFoundError):  # another role of this machine may remove it at this moment
        return (
            entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )
    return False


@cache
def _machine() -> str:
    """A name of the place in which a process id and a start time mean one process: this machine since its last boot, or a
    container on it with its own process ids."""
    with suppress(OSError):
        where = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        return hashlib.sha256(where.encode()).hexdigest()[:8]
    return secrets.token_hex(4)  # no later process will recognise these folders


def start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if no process has this id."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # The program's name, in parentheses, may hold blanks.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return None


def remove(folder: str) -> None:
    """Remove a folder with all in it. Some tools make folders in it in which nothing may be written, and a program may nest
    folders deeper than Python's stack, or than the longest path: these go too."""
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
    """Start a guard with pipes, in its own session: it outlives a kill of our process group, and ends what it guards. On a
    cancellation asyncio would kill the guard, which sets free what it guards. Instead this waits for the start and then
    ends the guard. Raises OSError."""
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
    """Have a guard (``tandem_worker``) kill all its descendants, and end. Returns after the last of them is gone."""
    assert guard.stdin is not None
    guard.stdin.close()  # the sign for the guard to end
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await guard.wait()
    except TimeoutError:
        logger.warning("guard %d does not end; killing it", guard.pid)
        kill_tree(guard.pid)
        await guard.wait()


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all its descendants."""
    tree = []
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        tree = [top, *top.children(recursive=True)]
    for process in tree:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. A cancellation does not interrupt it, and is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # the task's own; raised below
            break
    if cancelled is not None:
        raise cancelled
    return task.result()
