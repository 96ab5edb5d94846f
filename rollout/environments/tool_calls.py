"""Tool calls in the text of a turn, found by SGLang's own parsers.

The parsers run in one process of their own. Importing them takes 9 CPU seconds, half a GiB and torch, which the
sample role is kept free of. A server's route ``/parse_function_call`` would have them already, but a router does not
pass it on, a lost server would fail an episode, and a parser that hangs on a sampled text (they are regular
expressions) would hang the server, and with it every sample there. A process of its own has a deadline, and is killed.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

from rollout.rewards.worker import WorkerStartError, kill_tree
from rollout.servers.tool_call_parsers import check_parser_name

START_TIMEOUT_S = 120.0
PARSE_TIMEOUT_S = 10.0
BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from rollout.servers.tool_call_parsers import serve; serve({descriptor})"

Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's form."""


class LateOrLost(Exception):
    """The process did not answer. It was killed; the next question starts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """The text of a turn, taken apart."""

    content: str
    """Without calls and thinking. The whole text, without thinking, where a call could not be read."""
    calls: list[dict[str, Any]]
    """{name, arguments} each; arguments are an object of JSON."""
    error: str | None = None
    """Why a call could not be read; there are no calls then."""
    reasoning: str = ""
    """The thinking, where a parser of it is given."""


class ParserProcess:
    """The process of SGLang's parsers. It starts again after it was lost. Several threads may ask."""

    def __init__(
        self, *, timeout_s: float = PARSE_TIMEOUT_S, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._asking = threading.Lock()
        """Held by the thread that asks or starts: one question at a time."""
        self._lock = threading.Lock()
        """Keeps ``close`` and a start apart. Nobody waits for the process while holding it."""
        self._is_closed = False
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Raises WorkerStartError."""
        with self._asking:
            self._running()

    def close(self) -> None:
        """End the process, for good. A thread that waits for it sees its end, and cleans up."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                kill_tree(self._process)
        if self._asking.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._asking.release()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of ``tool_call_parsers.parse``.

        Raises:
            WorkerStartError: the process cannot be started.
            LateOrLost: it did not answer in time, ended meanwhile, or was closed.
        """
        with self._asking:
            connection = self._running()
            try:
                connection.send_bytes(
                    json.dumps(request).encode()
                )  # JSON can carry a lone surrogate, UTF-8 cannot
                return _receive(connection, self._timeout_s)
            except TimeoutError as error:
                self._end()
                raise LateOrLost(f"no answer of the parser within {self._timeout_s:g} s") from error
            except (EOFError, OSError) as error:
                self._end()
                raise LateOrLost("the parser's process ended") from error

    def _running(self) -> Connection:
        connection = self._connection
        if connection is None or self._process is None or self._process.poll() is not None:
            self._end()
            connection = self._start()
        return connection

    def _start(self) -> Connection:
        ours, theirs = cast("tuple[Connection, Connection]", Pipe())
        path = [entry or os.getcwd() for entry in sys.path]
        command = BOOTSTRAP.format(path=path, descriptor=theirs.fileno())
        with theirs, self._lock:
            if self._is_closed:
                raise LateOrLost("the parser was closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL, stdout=sys.__stderr__, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            self._connection = ours
        try:
            _receive(ours, self._start_timeout_s)
        except (TimeoutError, EOFError, OSError) as error:
            self._end()
            if self._is_closed:
                raise LateOrLost("the parser was closed") from error
            raise WorkerStartError(
                "the process of SGLang's tool-call parsers did not start; its error output says why"
            ) from error
        return ours

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                kill_tree(self._process)
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None


class ToolCallParser:
    """A parser by its name in SGLang.

    Args:
        parser: such as ``qwen25`` or ``llama3``.
        reasoning_parser: such as ``qwen3``. Calls are looked for outside the thinking only. None: everywhere.
        process: may be shared by parsers, and is closed by its owner. None: one of its own.

    Raises:
        ValueError: SGLang has no such parser.
    """

    def __init__(
        self, parser: str, *, reasoning_parser: str | None = None, process: ParserProcess | None = None
    ) -> None:
        check_parser_name("tool_call_parser", parser)
        if reasoning_parser is not None:
            check_parser_name("reasoning_parser", reasoning_parser)
        self._names = {"parser": parser, "reasoning_parser": reasoning_parser}
        self._process, self._owns_process = process or ParserProcess(), process is None

    def __enter__(self) -> "ToolCallParser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, so that no turn waits for it. Raises WorkerStartError."""
        self._process.start()

    def close(self) -> None:
        """End the process if it is the parser's own."""
        if self._owns_process:
            self._process.close()

    def __call__(self, text: str, tools: Tools) -> ParsedTurn:
        """A call that cannot be read, a parser that fails and one that is late give an error.

        This blocks for about a millisecond, and for the process's ``timeout_s`` at most.

        Raises:
            WorkerStartError: the process cannot be started.
        """
        try:
            answer = self._process.ask({"text": text, "tools": [dict(tool) for tool in tools], **self._names})
        except LateOrLost as error:
            return ParsedTurn(content=text, calls=[], error=str(error))
        return ParsedTurn(
            content=answer["content"],
            calls=answer["calls"],
            error=answer["error"],
            reasoning=answer["reasoning"],
        )


def _receive(connection: Connection, timeout_s: float) -> dict[str, Any]:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return json.loads(connection.recv_bytes())
