"""The processes of an environment. Each plays one episode at a time, with a time limit for each stage.

An episode takes an idle process or starts one, and gives it back after an orderly end. After a crash, a late answer,
an exception or a cancellation the process is killed with everything that it started (see ``tandem_worker``).
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from configs.schema.base import looks_secret
from configs.schema.environment import (
    ChatEnvironment,
    MessageEnvironment,
    ProcessEnvironment,
    TokenEnvironment,
)
from rollout.environments.protocol import EpisodeFailed, episode_failed
from rollout.guarded_process import END_TIMEOUT_S, WORKER, end_guarded, finished, start_guarded
from rollout.pipe import LARGEST_ANSWER
from rollout.records import Status
from rollout.rewards.worker import WorkerStartError
from rollout.servers.tool_call_parsers import check_parser_name
from rollout.servers.watched_process import how_it_ended
from rollout.user_code import TELL_EVERY_S, TRACE_WITHIN_S, users_line

logger = logging.getLogger(__name__)

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of Tandem's packages, which the roles have on PYTHONPATH."""
MOST_AWAY_S = 300.0
"""The run ends after this many seconds in which no episode got a process, or no server accepted a connection."""
RETRY_S = (0.05, 1.0)
"""The first wait before another try, and the longest. Each wait is twice the one before."""
PER_CORE = 16
"""Default number of processes per core: most of the time they wait for the policy."""

Message = dict[str, Any]
InProcess = ChatEnvironment | TokenEnvironment
"""An environment of tokens is only checked in a process; it plays in the sample role."""
T = TypeVar("T")


class EnvironmentStartError(WorkerStartError):
    """No process of the environment can be started. It ends the run."""


class Outage:
    """The time since the first failure after the last success."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note_failure(self) -> None:
        self._since = time.monotonic() if self._since is None else self._since

    def end(self) -> None:
        self._since = None

    @property
    def seconds(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since


class Ready(msgspec.Struct):
    tools: list[dict[str, Any]]
    """JSON schemas of functions, in OpenAI's form."""


class Opened(msgspec.Struct):
    """The answer to reset."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Stepped(msgspec.Struct):
    """The answer to a message of the policy."""

    messages: list[Message]
    reward: float | None = None
    """None: no reward for this step."""
    done: bool = False
    parts: dict[str, float] = {}
    tool_calls: int = 0
    tool_errors: int = 0


class _Error(msgspec.Struct):
    kind: str
    message: str


class _Answer(msgspec.Struct):
    ok: msgspec.Raw = msgspec.Raw()
    error: _Error | None = None


class EnvironmentProcess:
    """One process. Requests that fail raise ``EpisodeFailed``; the process cannot be used after that."""

    def __init__(self, process: asyncio.subprocess.Process, config: InProcess, trace: int) -> None:
        """trace: descriptor of a file to which the process writes its current lines."""
        self._process, self._config, self._trace = process, config, trace
        self._is_clean = True

    @property
    def is_clean(self) -> bool:
        """Whether every request got an orderly answer, and the process still runs."""
        return self._is_clean and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._process.pid

    @classmethod
    async def start(cls, config: InProcess, keys: Collection[str] = ()) -> tuple["EnvironmentProcess", Ready]:
        """keys: see ``users_variables``. Raises EnvironmentStartError."""
        is_chat = isinstance(config, ChatEnvironment)
        python = config.python if is_chat else None  # None: Tandem's own, with its module search path
        trace = os.memfd_create("lines of an environment")
        try:
            process = await start_guarded(
                python or sys.executable,
                WORKER,
                stderr=sys.__stderr__.fileno() if sys.__stderr__ is not None else None,
                limit=LARGEST_ANSWER + 2**16,
                pass_fds=[trace],
                env=users_variables(config, keys),
            )
        except BaseException as error:
            os.close(trace)
            if not isinstance(error, OSError):
                raise
            raise EnvironmentStartError(
                f"environment.python={python or sys.executable} cannot be started: {error}; name a Python interpreter"
            ) from error
        started = cls(process, config, trace)
        request = {
            "do": "start",
            "environment": config.environment,
            "interface": config.interface if is_chat else "tokens",
            "options": config.options,
            "path": [entry or os.getcwd() for entry in sys.path] if python is None else None,
            "largest_answer": LARGEST_ANSWER,
            "trace": trace,
        }
        stage = f"importing and making {config.environment}"
        try:
            return started, await started._ask(request, Ready, stage, "start_timeout_s")
        except EpisodeFailed as error:
            await finished(started.kill())
            raise EnvironmentStartError(
                f"environment {config.environment!r} cannot be started: {error}"
            ) from error
        except BaseException:
            await finished(started.kill())
            raise

    async def reset(self, problem: dict[str, Any]) -> Opened:
        request = {"do": "reset", "problem": problem}
        return await self._ask(request, Opened, "reset", "reset_timeout_s")

    async def step(self, message: Message) -> Stepped:
        """The environment's answer to a message of the policy. Tools that the message calls are run."""
        request = {"do": "step", "message": message}
        return await self._ask(request, Stepped, "step", "step_timeout_s")

    async def end_episode(self) -> None:
        """Kill the processes that the episode left behind."""
        await self._ask({"do": "end"}, dict, "the end of an episode")

    async def close(self) -> None:
        """Have the environment close itself, if it can, then kill its process."""
        try:
            if self.is_clean:
                with suppress(EpisodeFailed):
                    await self._ask({"do": "close"}, dict, "close")
        finally:
            await finished(self.kill())

    async def kill(self) -> None:
        """Kill it with all that it started. Returns after the last of them is gone."""
        self._is_clean = False
        await end_guarded(self._process)
        if self._trace >= 0:
            os.close(self._trace)
            self._trace = -1

    async def _ask(self, request: dict[str, Any], kind: type[T], stage: str, limit: str | None = None) -> T:
        """limit: the config's field with the deadline. None: ``END_TIMEOUT_S``."""
        limit_s = getattr(self._config, limit) if limit else END_TIMEOUT_S
        # With escapes: the policy can write half of a surrogate pair, which UTF-8 cannot carry.
        asked = json.dumps(request, default=partial(msgspec.to_builtins, enc_hook=plain_value)).encode()
        was_clean, self._is_clean = self._is_clean, False
        try:
            async with asyncio.timeout(limit_s):
                line = await self._exchange(asked)
        except TimeoutError:
            name, fix = "", ""
            if limit:
                name, fix = f"environment.{limit}=", f"; make it faster, or raise environment.{limit}"
            where = await self._current_line()
            raise EpisodeFailed(
                Status.TIME_LIMIT,
                f"{stage} took longer than {name}{limit_s:g} s{where}, and its process was killed{fix}",
            ) from None
        except ValueError as error:  # of StreamReader
            raise episode_failed(
                f"{stage}: the environment's process wrote a line of more than {LARGEST_ANSWER} bytes"
            ) from error
        if line is None:
            code = await self._ended()
            raise episode_failed(
                f"the environment's process (pid {self.pid}) {how_it_ended(code)} in {stage}; its error output may say why"
            )
        try:
            answer = msgspec.json.decode(line, type=_Answer)
            content = None if answer.error else msgspec.json.decode(answer.ok, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise episode_failed(
                f"the environment's process wrote {line[:60]!r} in {stage}, which is not an answer"
            ) from error
        if answer.error is not None:
            raise _failure(answer.error)
        assert content is not None
        self._is_clean = was_clean
        return content

    async def _exchange(self, line: bytes) -> bytes | None:
        """The answer to a request; None if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        return answer if answer.endswith(b"\n") else None

    async def _current_line(self) -> str:
        """``, at env.py:12 in step``; an empty text if the process does not report it in time."""
        with suppress(psutil.NoSuchProcess, TimeoutError, OSError):
            # Several: the server has just ended, and the guard has adopted its orphans. Without a handler the signal
            # would end the process.
            servers = psutil.Process(self.pid).children()
            if len(servers) != 1 or not _catches(servers[0].pid, signal.SIGUSR1):
                return ""
            servers[0].send_signal(signal.SIGUSR1)
            written, before = b"", None
            async with asyncio.timeout(TRACE_WITHIN_S):
                while not written.endswith(b"\n") or written != before:  # it is written piece by piece
                    await asyncio.sleep(0.01)
                    written, before = os.pread(self._trace, 2**16, 0), written
            return users_line(
                written.decode(errors="replace"),
                lambda file: Path(file).parent == WORKER or _LIBRARY.search(file) is not None,
            )
        return ""

    async def _ended(self) -> int:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            raise episode_failed("the environment's process closed its pipe") from None


def plain_value(value: Any) -> Any:
    """A value that JSON does not have, as one that it has: numpy's numbers and arrays as numbers and lists, others as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def users_variables(config: ProcessEnvironment | TokenEnvironment, keys: Collection[str]) -> dict[str, str]:
    """The variables of this process for a user's program. Those by which Tandem finds its own modules are left out. So are
    secrets that ``pass_secrets`` does not name, because agents and tools do what a model tells them. An environment of
    tokens gets the secrets: it plays in the role's own process.

    keys: names of variables that are secrets, whatever their names look like.
    """
    variables = dict(os.environ)
    if isinstance(config, ProcessEnvironment):
        variables = {
            name: value
            for name, value in variables.items()
            if name in config.pass_secrets or not (name in keys or looks_secret(name, value))
        }
    variables.pop("PYTHONSAFEPATH", None)  # a script must find the modules in its folder
    entries = variables.pop("PYTHONPATH", "").split(os.pathsep)
    if path := [entry for entry in entries if entry and Path(entry) != PACKAGES]:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


_LIBRARY = re.compile(r"^<|/lib(64)?/python\d")


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def _failure(error: _Error) -> EpisodeFailed:
    prefixes = {"raised": "the environment raised ", "start": ""}
    prefix = prefixes.get(error.kind, "the environment's ")
    status = Status.REWARD_FAILED if error.kind == "reward" else Status.FAILED
    return EpisodeFailed(status, f"{prefix}{error.message}")


class ProcessPool(AbstractAsyncContextManager["ProcessPool"]):
    """Processes of one environment, started on demand, at most ``max_processes``. Inside ``async with``."""

    def __init__(self, config: ChatEnvironment, keys: Collection[str] = ()) -> None:
        """keys: see ``users_variables``."""
        self._config, self._keys = config, keys
        self._places = asyncio.Semaphore(max_processes(config))
        # More starts at a time would only make each of them late.
        self._starts = asyncio.Semaphore(max(1, cores() // 2))
        self._idle: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()
        self._has_started, self._has_told, self._outage = False, False, Outage()

    async def __aexit__(self, *exc_info: object) -> None:
        """End all processes, with everything that they started, even if their episodes are under way."""
        self._idle.clear()
        await asyncio.gather(*(process.close() for process in [*self._all]))
        self._all.clear()

    async def ready(self) -> Ready:
        """Start a process for the first episode. Raises EnvironmentStartError."""
        process, ready = await self._start()
        self._idle.append(process)
        return ready

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[EnvironmentProcess]:
        """A process for one episode.

        Raises:
            EpisodeFailed: this process cannot be started, though others could.
            EnvironmentStartError: no process can be started.
        """
        async with self._places:
            process = await self._take()
            try:
                yield process
            finally:
                await finished(self._give_back(process))

    async def _take(self) -> EnvironmentProcess:
        """An idle process, or a new one. A start that fails is tried again: a disk or memory may be unavailable for only a
        moment, or another episode may end meanwhile."""
        wait_s, deadline = RETRY_S[0], time.monotonic() + self._config.start_timeout_s
        while True:
            if (process := await self._take_idle()) is not None:
                self._outage.end()
                return process
            try:
                process, _ = await self._start()
            except EnvironmentStartError as error:
                if not self._has_started or self._outage.seconds >= MOST_AWAY_S:
                    raise
                if not self._has_told:
                    self._has_told = True
                    logger.warning(
                        "episodes wait for a process, since a new one could not be started: %s; later failures are not reported",
                        error,
                    )
                self._outage.note_failure()
                if time.monotonic() + wait_s > deadline:
                    raise episode_failed(str(error)) from error
            else:
                return process
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S[1])

    async def _take_idle(self) -> EnvironmentProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_clean:
                return process
            await self._drop(process)  # it ended by itself
        return None

    async def _start(self) -> tuple[EnvironmentProcess, Ready]:
        async with self._starts:
            process, ready = await EnvironmentProcess.start(self._config, self._keys)
        self._all.add(process)
        self._has_started = True
        self._outage.end()
        return process, ready

    async def _give_back(self, process: EnvironmentProcess) -> None:
        if process.is_clean:
            with suppress(EpisodeFailed):
                await process.end_episode()
        if process.is_clean:
            self._idle.append(process)
        else:
            await self._drop(process)

    async def _drop(self, process: EnvironmentProcess) -> None:
        await process.kill()
        self._all.discard(process)


def max_processes(config: ProcessEnvironment) -> int:
    """Processes for the episodes of one kind, training or held out."""
    return min(config.max_concurrency, config.max_processes or PER_CORE * cores())


def cores() -> int:
    return len(os.sched_getaffinity(0))


def check_environment(
    config: InProcess, tell: Callable[[str], None] = logger.info, keys: Collection[str] = ()
) -> Ready:
    """Import and make an environment in a separate process, which is then ended. ``tell`` reports a long wait;
    keys: see ``users_variables``. Raises ValueError."""

    async def check() -> Ready:
        telling = asyncio.ensure_future(_tell_of_waiting(config, tell))
        try:
            process, ready = await EnvironmentProcess.start(config, keys)
        finally:
            telling.cancel()
        await process.close()
        return ready

    if isinstance(config, ChatEnvironment):
        check_parser_names(config)
    try:
        ready = asyncio.run(check())
    except EnvironmentStartError as error:
        raise ValueError(str(error)) from error
    if isinstance(config, ChatEnvironment):
        require_parser(ready.tools, has_parser=config.tool_call_parser is not None)
    return ready


def check_parser_names(config: MessageEnvironment) -> None:
    """Raises ValueError if SGLang has no such parser."""
    for kind in ("tool_call_parser", "reasoning_parser"):
        if (name := getattr(config, kind)) is not None:
            check_parser_name(kind, name)


async def _tell_of_waiting(config: InProcess, tell: Callable[[str], None]) -> None:
    waited, limit_s = 0.0, config.start_timeout_s
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        waited += TELL_EVERY_S
        tell(f"making {config.environment} … {waited:.0f} s of environment.start_timeout_s={limit_s:g}")


def require_parser(tools: Sequence[Mapping[str, Any]], *, has_parser: bool) -> None:
    """Refuse an environment with tools if no parser finds their calls. Raises ValueError."""
    if tools and not has_parser:
        names = ", ".join(str(tool.get("function", {}).get("name", "?")) for tool in tools)
        raise ValueError(
            f"the environment has tools ({names}), but environment.tool_call_parser is null, so no call would be found; "
            "name the parser of the model's form of calls"
        )
