"""Standard streams of a process whose work goes on when nobody can hear it any more.

A run leaves what it found in its folder, and tells of it besides. The reader of a pipe may leave, a terminal may close,
the disk of a log may be full: each makes the next ``print`` raise an OSError, which would end the run and lose all
steps since its last checkpoint. A command whose output is its result (a dry run, ``tandem list``) keeps the streams
that raise.
"""

import contextlib
import sys
from typing import Any, TextIO


class _Unheard:
    """A stream, but for the errors of its file."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def go_on_unheard() -> None:
    """From here on no ``print``, warning or traceback of this process raises, however its streams fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Unheard):
            setattr(sys, name, _Unheard(stream))
