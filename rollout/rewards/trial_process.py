"""A process that tries the user's code before a run starts. The code cannot hang or end this process, or
print into its output.

    this process: TrialProcess ── pipe ──> serve(descriptor, ...) of a module, in a fresh interpreter

This process waits with a deadline and reports that it waits. It asks a late process for its current line, then
kills it. If this process is killed, the guard kills the other one.
"""

import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from rollout.environments.tandem_worker.failures import is_library
from rollout.pipe import receive, send
from rollout.rewards.worker import end_tree, start_process
from rollout.servers.watched_process import how_it_ended, server_pid
from rollout.user_code import TELL_EVERY_S, TRACE_WITHIN_S, users_line

NO_BYTECODE = "-B"
"""A check leaves no __pycache__ next to the user's module."""
MOST_READ = 2**16
"""Most bytes that are read of a process's output, which may have any length."""


class TrialProcess:
    """Runs ``serve(descriptor, *arguments)`` of ``module``, inside ``with``. ``tell`` is called while an answer takes
    long."""

    def __init__(self, module: str, *arguments: str, tell: Callable[[str], None]):
        self._module, self._arguments, self._tell = module, arguments, tell
        self._exits = ExitStack()

    def __enter__(self) -> "TrialProcess":
        with ExitStack() as exits:
            self._output = exits.enter_context(tempfile.TemporaryFile())
            self._process, self._connection = start_process(
                self._module, *self._arguments,
                output=self._output.fileno(), options=[NO_BYTECODE],
            )  # fmt: skip
            exits.callback(end_tree, self._process)
            exits.enter_context(self._connection)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.close()

    def ask(self, job: object, doing: str, limit: str, limit_s: float, fix: str) -> Any:
        """Send a job and wait for its reply, as ``reply`` does."""
        with suppress(OSError):  # the process is gone, or does not read; the reply reports it
            send(self._connection, pickle.dumps(job), time.monotonic() + limit_s)
        return self.reply(doing, limit, limit_s, fix)

    def reply(self, doing: str, limit: str, limit_s: float, fix: str) -> Any:
        """The process's next reply. Raises ValueError if none comes."""
        began = time.monotonic()
        while not self._has_reply(min(TELL_EVERY_S, max(0.0, began + limit_s - time.monotonic()))):
            waited = time.monotonic() - began
            if waited >= limit_s:
                raise ValueError(f"{doing} took longer than {limit}={limit_s:g}{self._current_line()}; {fix}")
            self._tell(f"{doing} … {waited:.0f} s of {limit}={limit_s:g}")
        try:
            return json.loads(receive(self._connection, began + limit_s))
        except TimeoutError:
            raise ValueError(
                f"{doing} wrote only a part of an answer within {limit}={limit_s:g}; {fix}"
            ) from None
        except (ValueError, RecursionError):
            raise ValueError(
                f"{doing}: its process wrote something into our pipe that is not an answer; write only to descriptors that the code opened"
            ) from None
        except (EOFError, OSError):
            ending = how_it_ended(self._process.wait())
            raise ValueError(
                f"{doing}: its process {ending}{self._last_output()}; correct the module"
            ) from None

    def _has_reply(self, timeout_s: float) -> bool:
        try:
            return self._connection.poll(timeout_s)
        except OSError:  # the process is gone; receiving reports it
            return True

    def _current_line(self) -> str:
        """``, at rewards.py:3 in <module>``. faulthandler writes it even while native code runs."""
        own, pid = f"/{self._module.replace('.', '/')}.py", server_pid(self._process)
        before = self._num_printed()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_WITHIN_S
        while time.monotonic() < deadline:
            trace = self._read_output(before)
            if line := users_line(trace, lambda file: is_library(file) or file.endswith(own)):
                return line
            time.sleep(0.02)
        return ""

    def _last_output(self) -> str:
        lines = self._read_output(self._num_printed() - MOST_READ).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f", after writing: {last[:200]}" if last else ""

    def _num_printed(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _read_output(self, start: int) -> str:
        """At most ``MOST_READ`` bytes of the output, from byte ``start`` on."""
        return os.pread(self._output.fileno(), MOST_READ, max(0, start)).decode(errors="replace")
