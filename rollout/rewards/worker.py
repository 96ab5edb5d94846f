"""Processes for reward code that may hang or crash, and the pool that watches them.

::

    Scorer (event loop) ── WorkerPool.call in a thread ── pipe ──> worker process: serve()
                              waits with a deadline                  imports the reward, then answers one job at a time
                              kills and replaces a late worker

A worker is a fresh interpreter, not a fork, because the parent has threads and sockets. Like the process of
an environment it runs under a guard (``tandem_worker/guard.py``). When the worker or its parent ends, the
guard kills all that the worker started, orphans included.
"""

import asyncio
import inspect
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from rollout.environments.tandem_worker.failures import describe, place_of, readable
from rollout.guarded_process import WORKER, kill_tree
from rollout.pipe import jobs_of, receive, send, serving
from rollout.records import Score
from rollout.rewards.function import FURTHER, RewardFunction, import_reward_function, to_score
from rollout.rewards.math_answers import math_verify_reward
from rollout.servers.watched_process import how_it_ended
from rollout.user_code import further_parameters

START_TIMEOUT_S = 120.0
"""Time for a worker to start and import the reward, even if all others start too; the config may set more."""
STOP_TIMEOUT_S = 5.0
"""Time for a guard to end what it guards, and for the kernel to end a killed process."""
BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({descriptor}, *{arguments!r})"
)
MATH_VERIFY = "math_verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt_text: str
    response_text: str
    reference: str
    row: Mapping[str, object] | None = None
    num_tokens: int = 0
    """Of the response, with its end token."""
    finish_reason: str = "stop"


Reply = tuple[Literal["ready", "failed", "score", "raised", "unusable"], Score | str | None]
"""(event, score or message), sent as JSON. The process runs the user's code and perhaps a model's, so nothing
that it sends is unpickled. ``unusable``: the function's result is not a reward."""


class WorkerStartError(RuntimeError):
    """A fresh process could not import the reward, although the check before the start could."""


class NoAnswer(Exception):
    """What a process wrote is not an answer."""


def serve(descriptor: int, reward: str) -> None:
    """Main function of a worker: ``reward`` is ``math_verify`` or the user's ``module:function``."""
    with serving(descriptor) as connection:
        try:
            function = _load_reward(reward)
        except Exception as error:  # a user's module may raise anything; the parent reports it
            _reply(connection, ("failed", readable(str(error))))
            return
        _reply(connection, ("ready", None))
        own_pid = os.getpid()
        with asyncio.Runner() as runner:  # one event loop for all calls of a function that is async
            for job in jobs_of(connection.recv):
                reply = _score_job(function, job, runner)
                # The function may have forked. Its child's reply would be read as the next sample's.
                if os.getpid() != own_pid:
                    os._exit(0)
                _reply(connection, reply)


def _reply(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(msgspec.json.encode(reply))


def _load_reward(reward: str) -> RewardFunction:
    if reward != MATH_VERIFY:
        return import_reward_function(reward)
    math_verify_reward("1", "1")  # loads sympy and its tables outside the first sample's deadline
    return _math_verify


def _math_verify(prompt_text: str, response_text: str, reference: str) -> tuple[float, dict[str, float]]:
    score = math_verify_reward(reference, response_text)
    return score.value, score.parts


def _score_job(function: RewardFunction, job: Job, runner: asyncio.Runner) -> Reply:
    try:
        further = {name: getattr(job, name) for name in further_parameters(function, FURTHER)}
        returned = function(job.prompt_text, job.response_text, job.reference, **further)
        if inspect.iscoroutine(returned):
            returned = runner.run(returned)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # it may raise anything, or exit()
        return "raised", describe(error)
    try:
        return "score", to_score(returned)
    except (TypeError, ValueError, OverflowError) as error:
        return "unusable", readable(f"{type(error).__name__}: {error} ({place_of(function)})")


def start_process(
    module: str, *arguments: str, output: int, options: Sequence[str] = ()
) -> tuple[subprocess.Popen, Connection]:
    """Start a process that runs ``serve(descriptor, *arguments)`` of ``module`` under a guard. Returns the
    guard and our end of the pipe to the process, for ``pipe.py``.

    Args:
        output: descriptor for all that the process prints.
        options: of the Python interpreter.
    """
    ours, theirs = Pipe()
    os.set_blocking(ours.fileno(), False)
    path = [entry or os.getcwd() for entry in sys.path]
    code = BOOTSTRAP.format(path=path, module=module, descriptor=theirs.fileno(), arguments=arguments)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", WORKER, sys.executable, *options, "-c", code],
            stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    return process, ours


class WorkerPool:
    """Workers of one reward. Their processes start on first use. A thread waits for each busy worker."""

    def __init__(self, reward: str, *, num_workers: int, timeout_s: float, start_timeout_s: float) -> None:
        self._workers = [_Worker(reward, timeout_s, start_timeout_s) for _ in range(num_workers)]
        # The worker used last is used next, so no more processes start than are busy at once.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    async def call(self, job: Job) -> Score:
        """Score one job. A failure of the reward code, a crash or a timeout gives a score with an error.

        Raises:
            WorkerStartError: no worker can be started.
            CancelledError: the pool was closed meanwhile.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, job)

    def _call(self, job: Job) -> Score:
        worker = self._idle.get()
        try:
            return worker.call(job)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End every worker and all that it started; calls under way return at once."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


class AnsweringProcess:
    """A process that answers questions, and our end of its pipe. The first question starts the process. After
    a loss the next question starts another. Several threads may ask."""

    def __init__(
        self, name: str, module: str, *arguments: str, timeout_s: float, start_timeout_s: float
    ) -> None:
        """name: for messages. module, arguments: see ``start_process``. timeout_s: of an answer."""
        self._name, self._module, self._arguments = name, module, arguments
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._asking = threading.Lock()
        """Held by the thread that asks or starts: one question at a time."""
        self._lock = threading.Lock()
        """Keeps ``close`` and a start apart. No thread waits for an answer while it holds this lock."""
        self._is_closed = False
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process id of its guard."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process now, before the first question. Raises WorkerStartError."""
        with self._asking:
            self._running()

    def close(self) -> None:
        """End the process for good. A thread that waits for its answer sees its end and cleans up."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                end_tree(self._process)
        if self._asking.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._asking.release()

    def ask(self, question: object) -> Any:
        """The answer.

        Raises:
            WorkerStartError: the process cannot be started.
            TimeoutError: it did not answer in time, and was killed.
            EOFError: it ended, or it was killed because it wrote something else; the message says which.
            CancelledError: it was closed.
        """
        with self._asking:
            process, connection = self._running()
            deadline = time.monotonic() + self._timeout_s
            try:
                send(connection, self._encode(question), deadline)
                return self._answer(connection, deadline)
            except (EOFError, OSError, NoAnswer) as error:
                self._end()
                if self._is_closed:
                    raise CancelledError from error
                if isinstance(error, TimeoutError):
                    raise
                ending = str(error) if isinstance(error, NoAnswer) else how_it_ended(process.returncode)
                raise EOFError(f"(pid {process.pid}) {ending}") from error

    def _running(self) -> tuple[subprocess.Popen, Connection]:
        process, connection = self._process, self._connection
        if process is not None and connection is not None and process.poll() is None:
            return process, connection
        self._end()
        with self._lock:
            if self._is_closed:
                raise CancelledError
            # Its standard output goes to the error stream: standard output has only the lines of the run.
            process, connection = start_process(
                self._module, *self._arguments, output=sys.__stderr__.fileno()
            )
            self._process, self._connection = process, connection
        try:
            self._check_start(self._answer(connection, time.monotonic() + self._start_timeout_s))
        except (WorkerStartError, EOFError, OSError, NoAnswer) as error:
            self._end()
            if self._is_closed:
                raise CancelledError from error
            if isinstance(error, WorkerStartError):
                raise
            raise WorkerStartError(f"{self._name} did not start; its error output says why") from error
        return process, connection

    def _answer(self, connection: Connection, deadline: float) -> Any:
        try:
            return self._decode(receive(connection, deadline))
        except (ValueError, RecursionError) as error:
            raise NoAnswer("wrote something into its pipe that is not an answer, and was killed") from error

    def _end(self) -> None:
        """Kill and reap the process, if there is one; the next question starts another."""
        with self._lock:
            if self._process is not None:
                end_tree(self._process)
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None

    def _encode(self, question: Any) -> bytes:
        return json.dumps(question).encode()

    def _decode(self, answer: bytes) -> Any:
        """Raises ValueError or RecursionError."""
        return json.loads(answer)

    def _check_start(self, answer: Any) -> None:
        """Raises WorkerStartError if the first answer says that the process cannot be used."""


class _Worker(AnsweringProcess):
    def __init__(self, reward: str, timeout_s: float, start_timeout_s: float) -> None:
        super().__init__(
            f"the process of reward {reward!r}",
            __name__,
            reward,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )

    def call(self, job: Job) -> Score:
        try:
            _, content = self.ask(job)
        except TimeoutError:
            content = f"TimeoutError: no answer within {self._timeout_s:g} s; its process was killed"
        except EOFError as error:
            content = f"the reward's process {error}"
        return content if isinstance(content, Score) else Score(error=content or "no score came")

    def _encode(self, question: Job) -> bytes:
        return pickle.dumps(question)  # a row of the data may hold anything

    def _decode(self, answer: bytes) -> Reply:
        return msgspec.json.decode(answer, type=Reply)

    def _check_start(self, answer: Reply) -> None:
        kind, content = answer
        if kind != "ready":
            raise WorkerStartError(content)


def end_tree(process: subprocess.Popen) -> None:
    """Kill a process of ours with all its descendants, and reap it. A guard kills its descendants itself,
    orphans included."""
    if process.stdin is not None:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_TIMEOUT_S)
    if process.poll() is None:  # otherwise its id may belong to another process
        kill_tree(process.pid)
    process.wait(timeout=STOP_TIMEOUT_S)
