"""Standard streams of a process that continues to work when its output can no longer be read.

A run leaves its results in its folder; printing is secondary. If the reader of a pipe leaves, a terminal closes, or the
disk of a log is full, the next ``print`` raises an OSError, which would end the run and lose all steps since its last
checkpoint. A command whose output is its result (a dry run, ``tandem list``) keeps the streams that raise.
"""

import contextlib
import sys
from typing import Any, TextIO


class _Unheard:
    """A stream that ignores the errors of its file."""

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
    """From now on no ``print``, warning or traceback of this process raises, even if its streams fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Unheard):
            setattr(sys, name, _Unheard(stream))
