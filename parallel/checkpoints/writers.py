"""The processes that Megatron forks to write a checkpoint: protection from SIGTERM, and a watch for their death."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import process, resource_tracker

LOOK_EVERY_S = 1.0


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
