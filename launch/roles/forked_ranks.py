"""Ranks on CPU as forks of torchrun's agent, which has imported what they need.

torchrun starts each rank as a separate command, and each imports torch, Megatron-Core and transformers again, for 3
CPU seconds and most of its memory (``benchmarks/results/startup.md``). A fork shares the agent's imports. torchrun does
everything else: it waits for the ranks, ends them and reports how they ended.

Ranks stay separate commands if a fork would not be equivalent: with GPUs, whose driver a fork cannot use; if the agent has
further threads, which a fork lacks, so their locks would stay locked; and on several nodes, since the agent is connected to
the others.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from setproctitle import getproctitle, setproctitle
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from launch.processes.imports import imported_for_good

COMMAND = ("-m", "launch")
"""Behind it are the arguments of ``tandem``."""
IMPORTS = ("launch.cli", "launch.roles.table", "trainer.loop", "trainer.learner")
"""They import the rest."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torchrun's agent handles."""
POLL_S = 0.02

getproctitle()  # finds where the command line lies, by the environment: later that may have moved


def fork_ranks() -> None:
    """Import what ranks need, and make torchrun fork them from now on, if it can."""
    if not may_fork():
        return
    with imported_for_good():
        for name in IMPORTS:
            importlib.import_module(name)
    api.get_subprocess_handler = _handler  # pyright: ignore[reportPrivateImportUsage]


def may_fork() -> bool:
    """OpenMP reads its number of threads only once, so the agent must set the ranks' number before."""
    return (
        torch.version.cuda is None
        and "OMP_NUM_THREADS" in os.environ
        and len(os.listdir("/proc/self/task")) == 1
    )


def _handler(entrypoint: str, args: tuple, env: dict[str, str], *rest: Any, **more: Any) -> SubprocessHandler:
    is_ours = tuple(args[:3]) == ("-u", *COMMAND)
    handler = ForkedHandler if is_ours and may_fork() else SubprocessHandler
    return handler(entrypoint, args, env, *rest, **more)


class ForkedHandler(SubprocessHandler):
    """torchrun's handler of a rank, which is a fork. Its output is not redirected."""

    def _popen(self, args: tuple, env: dict[str, str]) -> "ForkedRank":  # pyright: ignore[reportIncompatibleMethodOverride]
        return ForkedRank(args[1 + len(("-u", *COMMAND)) :], env)


class ForkedRank:
    """What torchrun uses of ``subprocess.Popen``, of a fork that runs ``tandem`` with ``arguments``.

    ``returncode`` is None until the end was seen, and the negative number of a signal that ended it.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # or the fork would write it again
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(arguments, environment)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(POLL_S)
        return code


def _become_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Turn this fork into a command in its own session: its signals, its environment, its arguments, and its end. This never
    returns to the agent's code that called it."""

    def rank() -> None:
        os.setsid()
        handlers = {signal.SIGINT: signal.default_int_handler}
        for number in HANDLED:
            if callable(signal.getsignal(number)):
                signal.signal(number, handlers.get(number, signal.SIG_DFL))
        setproctitle(" ".join([sys.executable, *COMMAND, *arguments]))
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["tandem", *arguments]

        from launch.cli import main

        main()

    end_with(rank)


def end_with(function: Callable[[], object]) -> NoReturn:
    """Call it, and then end this process as Python would, without the libraries' checks for leaks."""
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
