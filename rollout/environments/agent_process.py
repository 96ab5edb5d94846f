"""The process of an agent: a command under a guard (``tandem_worker``), in a working folder of its own.

The guard kills everything that the agent has started, daemons too, when the agent ends or is ended. Of what the agent
prints the ends are kept.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from configs.schema.environment import AgentEnvironment
from rollout.environments.processes import WORKER, check_parser_names
from rollout.environments.protocol import EpisodeFailed
from rollout.guarded_process import end_guarded, finished, guarded_process
from rollout.records import Status

LARGEST_LINE = 2**16
"""Bytes that are kept of the end of what an agent prints."""
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of Tandem's packages, which the roles have on PYTHONPATH."""
PYTHON = "{python}"


def command_of(config: AgentEnvironment) -> list[str]:
    """The command with whole paths, from the current folder.

    Raises:
        ValueError: its program is missing or cannot be run.
    """
    words = [sys.executable if word == PYTHON else _whole_path(word) for word in config.command]
    program = words[0]
    if program.endswith(".py"):
        words = [sys.executable, *words]
    elif shutil.which(program) is None:
        raise ValueError(
            f"environment.command={list(config.command)}: there is no program {program!r} in {os.getcwd()} or on PATH that may "
            "be run; correct its name, or run from the folder that holds it"
        )
    script = words[1] if words[0] == sys.executable and len(words) > 1 else ""
    if script.endswith(".py") and not os.path.isfile(script):
        raise ValueError(
            f"environment.command={list(config.command)}: there is no file {script!r} in {os.getcwd()}; correct its name, or "
            "run from the folder that holds it"
        )
    return words


def _whole_path(word: str) -> str:
    # Not resolved: an interpreter of a virtual environment is a link, which must stay one.
    return os.path.abspath(word) if os.path.isfile(word) else word


def check_agent(config: AgentEnvironment) -> None:
    """Raises ValueError where the command or a parser's name cannot be used."""
    command_of(config)
    check_parser_names(config)


def agent_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process, without those by which Tandem finds its own modules, and ``variables``."""
    own = dict(os.environ)
    own.pop("PYTHONSAFEPATH", None)  # a script must find the modules in its folder
    path = [
        entry for entry in own.pop("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry) != PACKAGES
    ]
    if path:
        own["PYTHONPATH"] = os.pathsep.join(path)
    return {**own, "PYTHONUNBUFFERED": "1", **variables}


class AgentProcess:
    """Made by ``running``."""

    def __init__(self, guard: asyncio.subprocess.Process) -> None:
        self._guard = guard
        assert guard.stdout is not None and guard.stderr is not None
        self._printed, self._errors = _Tail(), _Tail()
        self._readers = [
            asyncio.ensure_future(self._printed.read(guard.stdout)),
            asyncio.ensure_future(self._errors.read(guard.stderr)),
        ]

    @property
    def pid(self) -> int:
        """Of its guard."""
        return self._guard.pid

    async def ended(self) -> int:
        """The exit code, above 128 after a signal. Returns after everything that it started is gone."""
        await asyncio.wait(self._readers)
        return await self._guard.wait()

    async def end(self) -> None:
        await end_guarded(self._guard)
        await asyncio.wait(self._readers)

    @property
    def last_line(self) -> str:
        """Of what it printed, without blank lines."""
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
async def running(command: Sequence[str], variables: Mapping[str, str]) -> AsyncIterator[AgentProcess]:
    """A process of ``command``. Leaving ends it, with everything that it started, and removes its folder.

    Raises:
        EpisodeFailed: it cannot be started.
    """
    command = [sys.executable, "-I", str(WORKER), *command]
    async with AsyncExitStack() as stack:
        try:
            guard = await stack.enter_async_context(
                guarded_process(command, prefix="tandem-agent-", variables=agent_environment(variables))
            )
        except OSError as error:  # too many processes, or a problem that is too large for a variable
            raise EpisodeFailed(Status.FAILED, f"the agent cannot be started: {error}") from error
        process = AgentProcess(guard)
        try:
            yield process
        finally:
            await finished(process.end())
