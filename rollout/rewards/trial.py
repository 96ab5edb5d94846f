"""A trial of the user's reward function before a run starts: import, and a call on each of two made responses.

    this process: try_function ── pipe ──> a worker (worker.py), which cannot hang, end or print into this one

This process waits with a deadline and reports that it waits. It asks a late worker for its current line, then
kills it. A response can be unlike anything that a function expects: an exception on one of the two responses
is a remark, on both an error. Errors for any response: a hang, a process that dies, a result that is no reward.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING

from configs.schema.task import FunctionReward
from rollout.rewards import worker
from rollout.rewards.function import is_library
from rollout.rewards.worker import Job, Reply, kill_tree, start_process
from rollout.servers.watched_process import how_it_ended

if TYPE_CHECKING:
    from rollout.tasks.task import Problem

TELL_EVERY_S = 5.0
TRACE_WITHIN_S = 2.0
"""Time for a late process to write its current line."""
NO_BYTECODE = "-B"
"""A check leaves no __pycache__ beside the user's module."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def made_responses(reference: str) -> dict[str, str]:
    """Two possible responses, by their names in messages: the right answer in forms that graders look for,
    and an empty text."""
    return {
        "an ordinary response": f"The answer is \\boxed{{{reference}}}.\n#### {reference}",
        "an empty response": "",
    }


def try_function(
    reward: FunctionReward, problem: "Problem | None", tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Remarks on a usable function. ``tell`` is called while the trial takes long. Without a problem the
    function is only imported.

    Raises:
        ValueError: the function cannot be used; with the fix.
    """
    key = (reward, problem and (problem.text, problem.reference))
    if key not in _REMARKS:
        with tempfile.TemporaryFile() as output:
            process, connection = start_process(
                reward.function, output=output.fileno(), options=[NO_BYTECODE]
            )
            with connection:
                try:
                    _REMARKS[key] = _Trial(reward, process, connection, output, tell).run(problem)
                finally:
                    kill_tree(process)
    return _REMARKS[key]


_REMARKS: dict[tuple, tuple[str, ...]] = {}
"""Results of past trials: a study of layouts loads its config once per layout."""


@dataclass(frozen=True)
class _Trial:
    _reward: FunctionReward
    _process: subprocess.Popen
    _connection: Connection
    _output: IO[bytes]
    _tell: Callable[[str], None]

    def run(self, problem: "Problem | None") -> tuple[str, ...]:
        module = self._reward.function.partition(":")[0]
        fix = "do slow work in the function's first call, or raise its import_timeout_s"
        limit_s = self._reward.import_timeout_s
        kind, content = self._wait_for_reply(f"importing {module}", "import_timeout_s", limit_s, fix)
        if kind != "ready":
            raise ValueError(content)
        return () if problem is None else self._try_responses(problem)

    def _try_responses(self, problem: "Problem") -> tuple[str, ...]:
        raised: dict[str, str] = {}
        for name, response in made_responses(problem.reference).items():
            job = Job(
                prompt_text=problem.text,
                response_text=response,
                reference=problem.reference,
                row=problem.row,
                num_tokens=len(response) + 1,
            )
            self._connection.send(job)
            fix, limit_s = "make it faster, or raise its timeout_s", self._reward.timeout_s
            kind, content = self._wait_for_reply(f"scoring {name}", "timeout_s", limit_s, fix)
            if kind == "unusable":
                fix = "return a finite number, float(...), or (number, {name: number}), from every path through the function"
                raise ValueError(f"scoring {name} to the task's first problem: {content}; {fix}")
            if kind == "raised":
                raised[name] = str(content)
        failures = [
            f"scoring {name} to the task's first problem raised {content}" for name, content in raised.items()
        ]
        if len(failures) > 1:
            fix = "return a number for any response of a model, or set its `check: import`, which does not call it"
            raise ValueError(f"{', and '.join(failures)}; {fix}")
        return tuple(f"{text}: in a run such a response scores 0 and counts as failed" for text in failures)

    def _wait_for_reply(self, doing: str, limit: str, limit_s: float, fix: str) -> Reply:
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
        before = self._read_output()
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_WITHIN_S
        while time.monotonic() < deadline:
            for frame in _FRAME.finditer(self._read_output()[len(before) :]):  # innermost first
                if not is_library(frame["file"]) and frame["file"] != worker.__file__:
                    return f", at {os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}"
            time.sleep(0.02)
        return ""

    def _last_output(self) -> str:
        lines = self._read_output().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f", after writing: {last[:200]}" if last else ""

    def _read_output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")
