"""A process's spans, written as they end: ``RUN/trace/ROLE-PID.jsonl``.

The first line says who writes and on which clock:

    {"who": "rank-0", "host": "a", "pid": 17, "boot": "…", "wall_ns": CLOCK_REALTIME, "clock_ns": CLOCK_MONOTONIC}

Each further line is a span, [name, row, begin, end, notes], with times in ns of CLOCK_MONOTONIC, which nobody sets.
``reading.py`` moves them to the wall clock by the pair of the first line.

A row is a line of the picture, on which spans nest or are disjoint. What one thread does one after another is the row
``main``. Coroutines overlap: each outermost span of a ``family`` takes the family's lowest free row ("requests 3"), and
the spans inside it, in the same coroutine, are on that row too.

Outside of the window of steps, and in a process without a recorder, ``span`` gives a constant that does nothing.
"""

import contextlib
import heapq
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

FOLDER = "trace"
MAIN = "main"
_row: ContextVar[str] = ContextVar("row", default=MAIN)


class Recorder:
    """Writes the spans of this process into ``folder`` while the step is in the window."""

    def __init__(
        self, folder: Path, who: str, window: range, *, clock: Callable[[], int] = time.monotonic_ns
    ):
        """window: the steps that are recorded."""
        self._folder, self._who, self._window, self.clock = folder, who, window, clock
        self._file: TextIO | None = None
        self._free: dict[str, list[int]] = defaultdict(list)
        """Rows of each family that were taken once and are free: a heap of numbers."""
        self._num_rows: dict[str, int] = defaultdict(int)
        self.is_on = False

    def at_step(self, step: int) -> None:
        self.is_on = step in self._window
        if self.is_on and self._file is None:
            with self._unless_disk_is_full():
                self._file = self._opened()
        elif step >= self._window.stop and self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> TextIO:
        self._folder.mkdir(exist_ok=True)
        # Line by line: a role may end by os._exit or SIGKILL.
        file = (self._folder / f"{self._who}-{os.getpid()}.jsonl").open("a", buffering=1)
        pair = {"wall_ns": time.time_ns(), "clock_ns": self.clock()}
        about = {"who": self._who, "host": socket.gethostname(), "pid": os.getpid(), "boot": _boot(), **pair}
        file.write(json.dumps(about) + "\n")
        return file

    def write(self, name: str, row: str, begin: int, end: int, notes: dict[str, Any]) -> None:
        """A span that began in the window may end after it, and is then left out."""
        if self._file is not None:
            with self._unless_disk_is_full():
                self._file.write(json.dumps([name, row, begin, end, notes]) + "\n")

    def take_row(self, family: str) -> str:
        """The lowest free one; they are numbered from 1 on."""
        if self._free[family]:
            return f"{family} {heapq.heappop(self._free[family])}"
        self._num_rows[family] += 1
        return f"{family} {self._num_rows[family]}"

    def free_row(self, row: str) -> None:
        family, _, number = row.rpartition(" ")
        heapq.heappush(self._free[family], int(number))

    @contextmanager
    def _unless_disk_is_full(self) -> Iterator[None]:
        """A trace that cannot be written ends, and the run continues."""
        try:
            yield
        except OSError as error:
            print(f"trace: {self._folder} cannot be written ({error}); no more is recorded", file=sys.stderr)
            self.is_on, self._window = False, range(0)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()


def _boot() -> str:
    """Of the kernel: processes of one boot share CLOCK_MONOTONIC, whatever their containers' host names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Span:
    """A context manager that records the time inside it. ``note`` adds facts that are known later."""

    __slots__ = ("_begin", "_family", "_name", "_notes", "_recorder", "_token")

    def __init__(self, recorder: Recorder, name: str, family: str | None, notes: dict[str, Any]):
        self._recorder, self._name, self._family, self._notes = recorder, name, family, notes
        self._token = None

    def note(self, **notes: Any) -> None:
        self._notes |= notes

    def __enter__(self) -> "Span":
        if self._family is not None:
            self._token = _row.set(self._recorder.take_row(self._family))
        self._begin = self._recorder.clock()
        return self

    def __exit__(self, *exception: object) -> None:
        end, row = self._recorder.clock(), _row.get()
        if exception[0] is not None:
            self._notes["error"] = getattr(exception[0], "__name__", "")
        self._recorder.write(self._name, row, self._begin, end, self._notes)
        if self._token is not None:
            _row.reset(self._token)
            self._recorder.free_row(row)


class _NoSpan(Span):
    __slots__ = ()

    def __init__(self) -> None:
        pass

    def note(self, **notes: Any) -> None:
        pass

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


_NO_SPAN = _NoSpan()
_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """The recorder of this process from now on."""
    global _recorder
    _recorder = recorder


def at_step(step: int) -> bool:
    """Say that the process has come to ``step``. Returns whether it records."""
    if _recorder is None:
        return False
    _recorder.at_step(step)
    return _recorder.is_on


def span(name: str, /, *, family: str | None = None, **notes: Any) -> Span:
    """``with span("request", family="requests", samples=8) as request: …; request.note(tokens=90)``

    family: of a span that overlaps others of its kind. None: on the row that this coroutine is on.
    """
    if _recorder is None or not _recorder.is_on:
        return _NO_SPAN
    return Span(_recorder, name, family, notes)


@contextmanager
def laps(name: str, /) -> Iterator[Callable[..., None]]:
    """Spans end to end: each call of the yielded function, with notes, ends one span and begins the next."""
    now: list[Span] = []

    def end() -> None:
        while now:
            now.pop().__exit__(None, None, None)

    def lap(**notes: Any) -> None:
        end()
        now.append(span(name, **notes).__enter__())

    try:
        yield lap
    finally:
        end()
