"""Forks agents from a template process that has already imported their modules (``environment.preload``).

Importing OpenAI's client takes a CPU second, and each episode is a separate process. The template imports once; a fork
of it takes milliseconds. It runs ``tandem_worker/template.py``. Only this process can reach it, through an unnamed pair
of sockets.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from configs.schema.environment import AgentEnvironment
from rollout.environments.agent_process import (
    AgentStarter,
    Inherited,
    NewProcesses,
    agent_variables,
    command_of,
)
from rollout.environments.processes import (
    EnvironmentStartError,
    check_parser_names,
    users_variables,
)
from rollout.environments.protocol import EpisodeFailed
from rollout.guarded_process import END_TIMEOUT_S, WORKER, Guard, finished
from rollout.records import Status
from rollout.servers.watched_process import how_it_ended

LARGEST_REPLY = 2**16
FORK_TIMEOUT_S = 60.0
KILLED = 128 + 9


@asynccontextmanager
async def agent_starter(config: AgentEnvironment, keys: Collection[str] = ()) -> AsyncIterator[AgentStarter]:
    """keys: see ``users_variables``.

    Raises:
        ValueError: the command cannot be used.
        EnvironmentStartError: a module of ``preload`` cannot be imported.
    """
    command, inherited = command_of(config), partial(users_variables, config, keys)
    if not config.preload:
        yield NewProcesses(command, inherited)
        return
    if len(command) < 2 or not command[1].endswith(".py"):
        raise ValueError(
            f"environment.preload={list(config.preload)} needs a command that is a Python script, [agent.py, ...] or "
            f"[a Python, agent.py, ...], not {list(config.command)}; leave out preload"
        )
    async with AgentTemplate(
        command, config.preload, inherited, start_timeout_s=config.start_timeout_s
    ) as template:
        await template.ready()  # here, so that it takes no time of an episode
        yield template


def check_agent(config: AgentEnvironment, keys: Collection[str] = ()) -> None:
    """keys: see ``users_variables``. Raises ValueError if the command, a parser's name or a module of ``preload`` cannot be used."""

    async def start_template() -> None:
        async with agent_starter(config, keys):
            pass

    check_parser_names(config)
    try:
        asyncio.run(start_template())
    except EnvironmentStartError as error:
        raise ValueError(str(error)) from error


class AgentTemplate:
    """Starts agents, inside ``async with``. If the template has ended, the next agent starts another.

    Args:
        command: a Python, its script, and the script's arguments.
        modules: imported before the first fork.
        inherited: gives the variables that an agent inherits from this process.
        start_timeout_s: time to start the template and import the modules.
    """

    def __init__(
        self, command: Sequence[str], modules: Sequence[str], inherited: Inherited, *, start_timeout_s: float
    ) -> None:
        self._python, self._script, *self._arguments = command
        self._modules, self._start_timeout_s = list(modules), start_timeout_s
        self._inherited = inherited
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> "AgentTemplate":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end()

    async def ready(self) -> None:
        """Start the template, if there is none. Raises EnvironmentStartError."""
        if self._socket is None:
            await self._start()

    async def start(self, folder: str, variables: Mapping[str, str]) -> Guard:
        """Start an agent in ``folder``, under its guard.

        Raises:
            EpisodeFailed: it cannot be forked.
            EnvironmentStartError: the template cannot be started.
        """
        content = {
            "folder": folder,
            "variables": agent_variables(self._inherited, variables),
            "arguments": self._arguments,
        }
        with ExitStack() as closing:
            pipes = [_pipe(closing) for _ in range(4)]
            (input_reader, input_writer), *outputs = pipes
            request = os.memfd_create("an agent's request")
            closing.callback(os.close, request)
            with os.fdopen(os.dup(request), "w") as file:
                json.dump(content, file)
            theirs = [request, input_reader, *(writer for _, writer in outputs)]
            async with self._one_at_a_time:
                await self.ready()
                pid = await finished(self._fork(theirs))
            streams = [await _stream(os.dup(reader)) for reader, _ in outputs]
            return ForkedGuard(pid, os.dup(input_writer), streams)

    async def _fork(self, descriptors: Sequence[int]) -> int:
        assert self._socket is not None  # since ready
        try:
            socket.send_fds(self._socket, [b"fork"], list(descriptors))
            reply = json.loads(await self._reply(FORK_TIMEOUT_S))
        except (OSError, ValueError, TimeoutError) as error:
            await self._end()  # the next episode starts another
            raise EpisodeFailed(
                Status.FAILED, f"the agent cannot be started: its template ended: {error}"
            ) from error
        if "error" in reply:
            raise EpisodeFailed(Status.FAILED, f"the agent cannot be started: {reply['error']}")
        return int(reply["pid"])

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._socket = ours
        with theirs:
            words = ["--template", str(theirs.fileno()), self._script, *self._modules]
            try:
                self._process = await asyncio.create_subprocess_exec(
                    self._python, WORKER, *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else None,
                    env=agent_variables(self._inherited, {}), pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
            except BaseException as error:
                await self._end()
                if not isinstance(error, OSError):
                    raise
                raise EnvironmentStartError(f"{self._python} cannot be started: {error}") from error
        try:
            ready = json.loads(await self._reply(self._start_timeout_s))
        except BaseException as error:
            code = await self._end(END_TIMEOUT_S if isinstance(error, ConnectionError) else 0.0)
            if not isinstance(error, (OSError, ValueError, TimeoutError)):
                raise
            why = f"took longer than environment.start_timeout_s={self._start_timeout_s:g} s"
            if not isinstance(error, TimeoutError):
                why = f"{how_it_ended(code)}; its error output may say why"
            raise EnvironmentStartError(
                f"environment.preload={self._modules}: importing them {why}"
            ) from error
        if "error" in ready:
            await self._end()
            raise EnvironmentStartError(f"environment.preload={self._modules}: {ready['error']}")

    async def _reply(self, within_s: float) -> bytes:
        assert self._socket is not None
        async with asyncio.timeout(within_s):
            reply = await asyncio.get_running_loop().sock_recv(self._socket, LARGEST_REPLY)
        if not reply:
            raise ConnectionError("it closed its socket")
        return reply

    async def _end(self, within_s: float = END_TIMEOUT_S) -> int:
        """End the template. Running agents continue, each under its guard. -> its exit code

        within_s: time to end by itself, which it does when its socket closes. Killing a process that has just ended would
        lose its exit code: asyncio's watcher and ``kill`` both wait for it.
        """
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            async with asyncio.timeout(within_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()


class ForkedGuard:
    """A guard that is not this process's child. See ``guarded_process.Guard``."""

    def __init__(
        self, pid: int, stdin: int, streams: Sequence[tuple[asyncio.StreamReader, asyncio.BaseTransport]]
    ) -> None:
        (self.stdout, out), (self.stderr, errors), (status, _) = streams
        # Each is closed once, however often its closing is called.
        self.pid, self.stdin, self._transport = pid, ExitStack(), ExitStack()
        self.stdin.callback(os.close, stdin)
        self._transport.callback(errors.close)
        self._transport.callback(out.close)
        self._code = asyncio.ensure_future(status.read())

    async def wait(self) -> int:
        text = await asyncio.shield(self._code)
        return int(text) if text else KILLED


def _pipe(closing: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    closing.callback(os.close, reader)
    closing.callback(os.close, writer)
    return reader, writer


async def _stream(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A reader of a pipe, and its transport, which closes when the pipe ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader, transport
