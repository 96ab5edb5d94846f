"""How Megatron writes a checkpoint, made safe: the processes that it forks are protected from SIGTERM and watched, and
errors of files that rank 0 alone writes leave no other rank waiting."""

import contextlib
import os
import signal
import sys
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from multiprocessing import process, resource_tracker
from typing import Any

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

LOOK_EVERY_S = 1.0
WRITTEN_BY_RANK_0 = (
    (TorchCommonSaveStrategy, "save_common"), (FileSystemWriterAsync, "finish"), (serialization, "save_config"),
)  # fmt: skip
"""What Megatron lets rank 0 write while the other ranks go on to its next collective."""


@contextlib.contextmanager
def errors_of_rank_0_kept() -> Iterator[None]:
    """Inside, an error of a file that rank 0 alone writes does not interrupt Megatron's save: the other ranks are in its
    collectives, and would wait for rank 0. The error is raised at the end."""
    errors: list[Exception] = []
    with contextlib.ExitStack() as patches:
        for owner, name in WRITTEN_BY_RANK_0:
            keeping = _keeping(getattr(owner, name), errors)
            patches.enter_context(unittest.mock.patch.object(owner, name, keeping))
        yield
    if errors:
        raise errors[0]


def _keeping(write: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            errors.append(error)

    return call


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Inside, Megatron forks writers, which block SIGTERM for good. Slurm sends SIGTERM to every process of a job,
    whose last checkpoint is still to be written. The writers end with this process, or by SIGKILL."""
    resource_tracker.ensure_running()  # starts it now: its start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, this process ends (exit code 1) when one of its writers is killed.

    The kernel kills a writer for lack of memory, and Megatron would wait for its part for ever. The other ranks
    are inside Megatron's collectives: they would not see an exception, but they end with this process.
    """
    over, others = threading.Event(), set(process._children)
    thread = threading.Thread(
        target=_watch_writers, args=(over, others), name="checkpoint-writers", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch_writers(over: threading.Event, others: set[process.BaseProcess]) -> None:
    seen: set[process.BaseProcess] = set()
    while not over.wait(LOOK_EVERY_S):
        seen |= set(process._children) - others  # active_children() forgets children that have ended
        for writer in seen:
            if (code := writer.exitcode or 0) < 0:
                name = signal.Signals(-code).name
                text = f"a process that wrote a part of the checkpoint was killed by {name}; was there too little memory?"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
