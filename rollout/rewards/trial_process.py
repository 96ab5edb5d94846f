"""A process that tries the user's code before a run starts: the code cannot hang, end or print into this one.

    this process: TrialProcess ── pipe ──> serve(descriptor, ...) of a module, in a fresh interpreter

This process waits with a deadline and reports that it waits. It asks a late process for its current line, then
kills it. The kernel kills it where this one is killed.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from rollout.environments.tandem_worker.failures import is_library
from rollout.rewards.worker import end_tree, start_process
from rollout.servers.watched_process import how_it_ended
from rollout.user_code import TELL_EVERY_S, TRACE_WITHIN_S, users_line

NO_BYTECODE = "-B"
"""A check leaves no __pycache__ beside the user's module."""


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
                output=self._output.fileno(), options=[NO_BYTECODE], ends_with_this_thread=True,
            )  # fmt: skip
            exits.callback(end_tree, self._process)
            exits.enter_context(self._connection)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.close()

    def ask(self, job: object, doing: str, limit: str, limit_s: float, fix: str) -> Any:
        """Send a job and wait for its reply, as ``reply`` does."""
        with suppress(OSError):  # the process is gone; the reply reports it
            self._connection.send(job)
        return self.reply(doing, limit, limit_s, fix)

    def reply(self, doing: str, limit: str, limit_s: float, fix: str) -> Any:
        """The process's next reply. Raises ValueError where none comes."""
        began = time.monotonic()
        while not self._has_reply(min(TELL_EVERY_S, max(0.0, began + limit_s - time.monotonic()))):
            waited = time.monotonic() - began
            if waited >= limit_s:
                raise ValueError(f"{doing} took longer than {limit}={limit_s:g}{self._current_line()}; {fix}")
            self._tell(f"{doing} … {waited:.0f} s of {limit}={limit_s:g}")
        try:
            return self._connection.recv()
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
        """``, at rewards.py:3 in <module>``. faulthandler writes it even inside code that is not Python's."""
        before, own = self._read_output(), f"/{self._module.replace('.', '/')}.py"
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_WITHIN_S
        while time.monotonic() < deadline:
            trace = self._read_output()[len(before) :]
            if line := users_line(trace, lambda file: is_library(file) or file.endswith(own)):
                return line
            time.sleep(0.02)
        return ""

    def _last_output(self) -> str:
        lines = self._read_output().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f", after writing: {last[:200]}" if last else ""

    def _read_output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")
