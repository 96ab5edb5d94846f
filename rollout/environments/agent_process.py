"""The process of an agent: a command under a guard (``tandem_worker``), in its own working folder.

When the agent ends or is ended, the guard kills everything that it has started, daemons too. Only the ends of its
output streams are kept.
"""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from configs.schema.environment import AgentEnvironment
from rollout.environments.protocol import EpisodeFailed
from rollout.guarded_process import WORKER, Guard, end_guarded, finished, own_folder, start_guarded
from rollout.records import Status

logger = logging.getLogger(__name__)

LARGEST_LINE = 2**16
"""Bytes that are kept from the end of each of an agent's output streams."""
END_OF_OUTPUT_S = 2.0
"""Time for the pipes to end after the processes that hold them have ended."""
PYTHON = "{python}"

Inherited = Callable[[], Mapping[str, str]]
"""Gives the environment variables that an agent inherits from this process, as they are at the call."""


def command_of(config: AgentEnvironment) -> list[str]:
    """The command with its files as absolute paths. Raises ValueError if a file is missing or the program is not
    executable."""
    words = [sys.executable if word == PYTHON else _whole_path(word) for word in config.command]
    program = words[0]
    if program.endswith(".py"):
        words = [sys.executable, *words]
    elif shutil.which(program) is None:
        raise ValueError(
            f"environment.command={list(config.command)}: there is no program {program!r} in {os.getcwd()} or on PATH, or it "
            "is not executable; correct its name, or run from the folder that holds it"
        )
    script = words[1] if words[0] == sys.executable and len(words) > 1 else ""
    if script.endswith(".py") and not os.path.isfile(script):
        raise ValueError(
            f"environment.command={list(config.command)}: there is no file {script!r} in {os.getcwd()}; correct its name, or "
            "run from the folder that holds it"
        )
    return words


def _whole_path(word: str) -> str:
    # Links are not resolved: the interpreter of a virtual environment is a link and must stay one.
    return os.path.abspath(word) if os.path.isfile(word) else word


class AgentStarter(Protocol):
    async def start(self, folder: str, variables: Mapping[str, str]) -> Guard:
        """Start an agent in ``folder``, with ``agent_variables``. Raises EpisodeFailed."""
        ...


class NewProcesses:
    """Starts each agent as a new process of ``command``, with the variables that ``inherited`` gives."""

    def __init__(self, command: Sequence[str], inherited: Inherited) -> None:
        self._command, self._inherited = list(command), inherited

    async def start(self, folder: str, variables: Mapping[str, str]) -> Guard:
        try:
            return await start_guarded(
                sys.executable, "-I", WORKER, *self._command,
                stderr=asyncio.subprocess.PIPE, cwd=folder, env=agent_variables(self._inherited, variables),
            )  # fmt: skip
        except OSError as error:  # too many processes, or a problem that is too large for a variable
            raise EpisodeFailed(Status.FAILED, f"the agent cannot be started: {error}") from error


def agent_variables(inherited: Inherited, variables: Mapping[str, str]) -> dict[str, str]:
    return {**inherited(), "PYTHONUNBUFFERED": "1", **variables}


class AgentProcess:
    """Made by ``running``."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        assert guard.stdout is not None and guard.stderr is not None
        self._printed, self._errors = _Tail(), _Tail()
        self._readers = [
            asyncio.ensure_future(self._printed.read(guard.stdout)),
            asyncio.ensure_future(self._errors.read(guard.stderr)),
        ]

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._guard.pid

    async def ended(self) -> int:
        """The exit code, above 128 after a signal. Returns after everything that the agent started is gone."""
        await asyncio.wait(self._readers)
        return await self._guard.wait()

    async def end(self) -> None:
        await end_guarded(self._guard)
        _, waiting = await asyncio.wait(self._readers, timeout=END_OF_OUTPUT_S)
        if waiting:
            logger.warning(
                "a process that an agent started outlives the agent's guard (pid %d) and holds its output open; end it yourself",
                self.pid,
            )
            self._guard._transport.close()  # pyright: ignore[reportAttributeAccessIssue] - only this closes the pipes
            await asyncio.wait(self._readers)

    @property
    def last_line(self) -> str:
        """The last line that it printed and that is not blank."""
        return next((line for line in reversed(self._printed.text.splitlines()) if line.strip()), "")

    @property
    def errors(self) -> str:
        """The end of its error output."""
        return self._errors.text


class _Tail:
    """The last ``LARGEST_LINE`` bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = b""

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")

    async def read(self, stream: asyncio.StreamReader) -> None:
        while read := await stream.read(LARGEST_LINE):
            self._bytes = (self._bytes + read)[-LARGEST_LINE:]


@asynccontextmanager
async def running(starter: AgentStarter, variables: Mapping[str, str]) -> AsyncIterator[AgentProcess]:
    """Start an agent. On exit, end it with everything that it started, and remove its folder. Raises EpisodeFailed if
    it cannot be started."""
    async with own_folder("tandem-agent-") as folder:
        process = AgentProcess(await starter.start(folder, variables))
        try:
            yield process
        finally:
            await finished(process.end())
