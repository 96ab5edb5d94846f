"""Messages over a pipe between us and a process that runs the user's code. At our end each has a deadline.

The other end is a ``multiprocessing.connection.Connection``. The ``recv`` and ``send`` of that class wait
forever for the rest of a message. The user's code may write into the pipe, or keep its process from reading.
"""

import faulthandler
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")

LARGEST_ANSWER = 4 * 2**20
"""Most bytes of an answer from the user's code or a server that is not ours: a million tokens of text."""
HEADER = struct.Struct("!i")
"""Before each message: its length in bytes."""


@contextmanager
def serving(descriptor: int) -> Iterator[Connection]:
    """The other end, in the process. The parent decides when the process ends: Ctrl-C, which reaches the
    whole group, does not end it. On SIGUSR1 it writes its current lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    with Connection(descriptor) as connection:
        yield connection


def jobs_of(receive: Callable[[], T]) -> Iterator[T]:
    """What ``receive`` gets, until the parent closes the pipe, or is gone."""
    with suppress(EOFError):
        while True:
            yield receive()


def send(connection: Connection, content: bytes, deadline: float) -> None:
    """deadline: in seconds of ``time.monotonic()``. Raises TimeoutError, or another OSError if the other end
    is closed."""
    left = memoryview(HEADER.pack(len(content)) + content)
    while left:
        _wait_for(connection, select.POLLOUT, deadline)
        left = left[os.write(connection.fileno(), left) :]


def receive(connection: Connection, deadline: float) -> bytes:
    """The next message, whole.

    Raises:
        TimeoutError: it has not arrived by the deadline.
        EOFError, OSError: the other end is closed.
        ValueError: the length before it cannot be that of a message.
    """
    (size,) = HEADER.unpack(_read(connection, HEADER.size, deadline))
    if not 0 <= size <= LARGEST_ANSWER:
        raise ValueError(f"a message of {size} bytes")
    return _read(connection, size, deadline)


def _read(connection: Connection, size: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        _wait_for(connection, select.POLLIN, deadline)
        part = os.read(connection.fileno(), size - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


def _wait_for(connection: Connection, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError
