"""Reads small files that another process, or a person, may have written, replaced or damaged."""

import errno
import stat
from pathlib import Path

MOST_BYTES = 1 << 26
"""Of a file that ``text_of`` reads: far above the manifest of any checkpoint."""


def openable(path: Path) -> Path:
    """The path. Raises OSError for a pipe or a device: opening it may wait forever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder fails by itself
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def text_of(path: Path, *, errors: str = "strict") -> str:
    """The text of a small file. Raises OSError, see ``openable``, and for a file that would fill the memory.

    errors: of the encoding, as in ``open``."""
    if openable(path).stat().st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"a file of more than {MOST_BYTES >> 20} MiB", str(path))
    return path.read_text(encoding="utf-8", errors=errors)
