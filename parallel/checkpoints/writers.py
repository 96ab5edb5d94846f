"""The processes that Megatron forks to write a checkpoint: what they are spared, and what their death means."""

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
    """For the processes that Megatron forks inside, which inherit it, for good. Slurm sends SIGTERM to every
    process of a job, and then the last checkpoint is still to be written. They end with this process, or by
    SIGKILL."""
    resource_tracker.ensure_running()  # now, since it lets the signal through again when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, this process ends (exit code 1) where one that it has write its part is killed.

    The kernel does that for want of memory, and Megatron would wait for that part for ever. An exception
    would not do: the other ranks are inside Megatron's collectives, and end with this one.
    """
    over, others = threading.Event(), set(process._children)
    thread = threading.Thread(target=_watch, args=(over, others), name="checkpoint-writers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(over: threading.Event, others: set[process.BaseProcess]) -> None:
    seen: set[process.BaseProcess] = set()
    while not over.wait(LOOK_EVERY_S):
        seen |= (
            set(process._children) - others
        )  # active_children() forgets one that has ended before anybody saw it
        for writer in seen:
            if (code := writer.exitcode or 0) < 0:
                said = f"a process that wrote a part of the checkpoint was killed by {signal.Signals(-code).name}"
                print(f"{said}; was there too little memory?", file=sys.stderr, flush=True)
                os._exit(1)
