"""A trial of the user's reward function before a run starts: it is imported, and called on two made
responses.

    this process: try_function ── pipe ──> a worker (worker.py), which cannot hang, end or print into this one
                  waits with a deadline, and says so meanwhile; asks a late worker for the line that it is at;
                  kills it

A response can be unlike anything that a function expects, so that raising on one of the two is only told.
Raising on both is an error, and so is what no response excuses: a hang, a process that dies, a value that is
no reward.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
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
"""For a late process to say where it is."""
NO_BYTECODE = "-B"
"""A check leaves no __pycache__ beside the user's module."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def made_responses(reference: str) -> dict[str, str]:
    """What a model may answer, by what messages call it: the right answer in the forms that graders look for,
    and nothing at all."""
    return {
        "an ordinary response": f"The answer is \\boxed{{{reference}}}.\n#### {reference}",
        "an empty response": "",
    }


def try_function(
    reward: FunctionReward, problem: "Problem | None", tell: Callable[[str], None]
) -> tuple[str, ...]:
    """What is worth knowing of a function that can be used; ``tell`` is called while it takes long. Without a
    problem it is only imported.

    Raises:
        ValueError: "what is wrong; fix" of a function that cannot be used.
    """
    tried = (reward, problem and (problem.text, problem.reference))
    if tried not in _KNOWN:
        with tempfile.TemporaryFile() as output:
            process, connection = start_process(
                reward.function, output=output.fileno(), options=[NO_BYTECODE]
            )
            with connection:
                try:
                    _KNOWN[tried] = _Trial(reward, process, connection, output, tell).run(problem)
                finally:
                    kill_tree(process)
    return _KNOWN[tried]


_KNOWN: dict[tuple, tuple[str, ...]] = {}
"""What was found already: a study of layouts loads its config once per layout."""


class _Trial:
    def __init__(
        self,
        reward: FunctionReward,
        process: subprocess.Popen,
        connection: Connection,
        output: IO[bytes],
        tell: Callable[[str], None],
    ):
        self._reward, self._process, self._connection, self._output, self._tell = (
            reward,
            process,
            connection,
            output,
            tell,
        )

    def run(self, problem: "Problem | None") -> tuple[str, ...]:
        module = self._reward.function.partition(":")[0]
        slow_import = "do slow work in the function's first call, or raise its import_timeout_s"
        kind, content = self._wait(
            f"importing {module}", "import_timeout_s", self._reward.import_timeout_s, slow_import
        )
        if kind != "ready":
            raise ValueError(content)
        return () if problem is None else self._score(problem)

    def _score(self, problem: "Problem") -> tuple[str, ...]:
        raised: dict[str, str] = {}
        for name, response in made_responses(problem.reference).items():
            job = Job(
                prompt_text=problem.text, response_text=response, reference=problem.reference, row=problem.row
            )
            self._connection.send(job)
            kind, content = self._wait(
                f"scoring {name}",
                "timeout_s",
                self._reward.timeout_s,
                "make it faster, or raise its timeout_s",
            )
            if kind == "unusable":
                fix = "return a finite number, float(...), or (number, {name: number}), from every path through the function"
                raise ValueError(f"scoring {name} to the task's first problem: {content}; {fix}")
            if kind == "raised":
                raised[name] = str(content)
        said = [
            f"scoring {name} to the task's first problem raised {content}" for name, content in raised.items()
        ]
        if len(said) > 1:
            fix = "return a number for whatever a model writes, or set its `check: import` to have it not called before the start"
            raise ValueError(f"{', and '.join(said)}; {fix}")
        return tuple(f"{what}: in a run such a response scores 0 and counts as failed" for what in said)

    def _wait(self, doing: str, limit: str, limit_s: float, fix: str) -> Reply:
        """The process's next reply. Raises ValueError where none comes."""
        began = time.monotonic()
        while not self._answers(min(TELL_EVERY_S, max(0.0, began + limit_s - time.monotonic()))):
            waited = time.monotonic() - began
            if waited >= limit_s:
                raise ValueError(
                    f"{doing} took longer than {limit}={limit_s:g}{self._line_it_is_at()}; {fix}"
                )
            self._tell(f"{doing} … {waited:.0f} s of {limit}={limit_s:g}")
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            ending = how_it_ended(self._process.wait())
            raise ValueError(
                f"{doing}: its process {ending}{self._last_words()}; correct the module"
            ) from None

    def _answers(self, timeout_s: float) -> bool:
        try:
            return self._connection.poll(timeout_s)
        except OSError:  # the process is gone: to receive will say so
            return True

    def _line_it_is_at(self) -> str:
        """``, at rewards.py:3 in <module>``; faulthandler writes it even where Python's own code does not
        run."""
        before = self._written()
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_WITHIN_S
        while time.monotonic() < deadline:
            for frame in _FRAME.finditer(self._written()[len(before) :]):  # innermost first
                if not is_library(frame["file"]) and frame["file"] != worker.__file__:
                    return f", at {os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}"
            time.sleep(0.02)
        return ""

    def _last_words(self) -> str:
        lines = self._written().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f", after writing: {last[:200]}" if last else ""

    def _written(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")
