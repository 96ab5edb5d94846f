"""Processes that run reward code which may hang or crash, and the pool that watches them.

::

    Scorer (event loop) ── WorkerPool.call in a thread ── pipe ──> worker process: serve()
                              waits with a deadline                  imports the reward, then answers one job at a time
                              kills and replaces what is late        ends when the pipe closes, so also when its parent dies

A worker is a fresh interpreter (no fork: the parent has threads and sockets) in the process group of its
parent, so whoever ends that group ends it too.
"""

import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from rollout.records import Score
from rollout.rewards.function import (
    RewardFunction,
    describe,
    import_reward_function,
    place_of,
    takes_row,
    to_score,
)
from rollout.rewards.math_answers import math_verify_reward
from rollout.servers.watched_process import how_it_ended

START_TIMEOUT_S = 120.0
"""For a worker to start and import the reward, on a machine where all of them may be starting at once; more
where the config says so."""
STOP_TIMEOUT_S = 5.0
"""For the kernel to end a killed process."""
BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from rollout.rewards.worker import serve; serve({descriptor}, {reward!r})"
MATH_VERIFY = "math_verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt_text: str
    response_text: str
    reference: str
    row: Mapping[str, object] | None = None


Reply = tuple[Literal["ready", "failed", "score", "raised", "unusable"], Score | str | None]
"""(what happened, the score or what is told of it); ``unusable``: the function returned what is no reward."""


class WorkerStartError(RuntimeError):
    """The reward could not be imported in a fresh process, although a check at start-up did: nothing can be
    scored."""


def serve(descriptor: int, reward: str) -> None:
    """Main function of a worker: ``reward`` is ``math_verify`` or the user's ``module:function``."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides when this process ends
    faulthandler.register(
        signal.SIGUSR1
    )  # on request, the lines that it is at, whatever the user's code does
    with Connection(descriptor) as connection:
        try:
            function = _resolve(reward)
        except Exception as error:  # whatever a user's module raises; the parent reports it
            connection.send(("failed", str(error)))
            return
        connection.send(("ready", None))
        while True:
            try:
                job = connection.recv()
            except EOFError:  # the parent closed the pipe, or is gone
                return
            connection.send(_answer(function, job))


def _resolve(reward: str) -> RewardFunction:
    if reward != MATH_VERIFY:
        return import_reward_function(reward)
    math_verify_reward("1", "1")  # loads sympy and its tables now, not on the clock of the first sample
    return _math_verify


def _math_verify(prompt_text: str, response_text: str, reference: str) -> tuple[float, dict[str, float]]:
    score = math_verify_reward(reference, response_text)
    return score.value, score.parts


def _answer(function: RewardFunction, job: Job) -> Reply:
    try:
        row = {"row": job.row} if takes_row(function) else {}
        returned = function(job.prompt_text, job.response_text, job.reference, **row)
    except (
        Exception,
        SystemExit,
    ) as error:  # reward code may raise anything, or call exit(); the run goes on
        return "raised", describe(error)
    try:
        return "score", to_score(returned)
    except (TypeError, ValueError, OverflowError) as error:
        return "unusable", f"{type(error).__name__}: {error} ({place_of(function)})"


def start_process(
    reward: str, *, output: int, options: Sequence[str] = ()
) -> tuple[subprocess.Popen, Connection]:
    """A process that runs ``serve``, and our end of its pipe. ``output``: where all goes that it prints;
    ``options``: of Python."""
    ours, theirs = Pipe()
    path = [entry or os.getcwd() for entry in sys.path]
    command = BOOTSTRAP.format(path=path, descriptor=theirs.fileno(), reward=reward)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *options, "-c", command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return process, ours


class WorkerPool:
    """Workers of one reward. ``call`` may be called from as many threads as there are workers; processes
    start on first use."""

    def __init__(
        self, reward: str, *, num_workers: int, timeout_s: float, start_timeout_s: float = START_TIMEOUT_S
    ):
        self._workers = [_Worker(reward, timeout_s, start_timeout_s) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = (
            queue.LifoQueue()
        )  # the last one used is next: no more are started than are needed at once
        for worker in self._workers:
            self._idle.put(worker)

    def call(self, job: Job) -> Score:
        """Score one job. A failure of the reward code, a crash or a timeout is a score with an error.

        Raises:
            WorkerStartError: no worker can be started.
            CancelledError: the pool was closed meanwhile.
        """
        worker = self._idle.get()
        try:
            return worker.call(job)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End every worker and what it started; calls that are under way return at once."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process and our end of its pipe; ``_lock`` keeps ``close`` and a restart apart."""

    def __init__(self, reward: str, timeout_s: float, start_timeout_s: float):
        self._reward = reward
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def call(self, job: Job) -> Score:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._connection.send(job)
            _, content = self._receive(self._timeout_s)
        except TimeoutError:
            self._end()
            self._raise_if_closed()
            return Score(
                value=0.0,
                error=f"TimeoutError: no answer within {self._timeout_s:g} s; its process was killed",
            )
        except (EOFError, OSError):
            process = self._process
            self._end()
            self._raise_if_closed()
            return Score(
                value=0.0,
                error=f"the reward's process (pid {process.pid}) {how_it_ended(process.returncode)}",
            )
        return content if isinstance(content, Score) else Score(value=0.0, error=content)

    def _start(self) -> None:
        self._end()
        with self._lock:
            if self._closed:
                raise CancelledError
            # Standard output stays free for the run's own lines: what reward code prints goes to the error
            # stream.
            self._process, self._connection = start_process(self._reward, output=sys.__stderr__.fileno())
        try:
            kind, content = self._receive(self._start_timeout_s)
        except (TimeoutError, EOFError, OSError) as error:
            self._end()
            self._raise_if_closed()
            raise WorkerStartError(
                f"the process of reward {self._reward!r} did not start; its error output says why"
            ) from error
        if kind != "ready":
            self._end()
            raise WorkerStartError(content)

    def _receive(self, timeout_s: float) -> Reply:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return self._connection.recv()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise CancelledError

    def _end(self) -> None:
        """Kill the process, if there is one, and reap it; the next call starts another."""
        with self._lock:
            if self._process is not None:
                kill_tree(self._process)
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None

    def close(self) -> None:
        """Kill the process; a thread that waits for it sees the pipe end, and cleans up itself."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                kill_tree(self._process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process of ours and all that it started, and reap it."""
    descendants = _descendants(process.pid)
    process.kill()
    for pid in descendants:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself
            continue
    process.wait(timeout=STOP_TIMEOUT_S)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program, in parentheses, may hold blanks; after it come the state and the
            # parent's id.
            parent = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # ended while we were reading
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        todo += (born := children.get(todo.pop(), []))
        found += born
    return found
