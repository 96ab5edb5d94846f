"""Files that are replaced as a whole or grow by lines, their readers, and the mounts of files. Runs and
commands write all their files by it."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import yaml

from configs.reading.files import text_of

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
SHARED_FOLDER_S = 60.0
"""Delay of files of another node: NFS clients may show an old file, or miss a new one, for this long."""


def way_to_write(error: OSError) -> str:
    """What a user does about a write that failed."""
    if error.errno in NO_SPACE:
        return "free space"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable"
    return "raise the limit of file sizes (`ulimit -f`)" if error.errno == errno.EFBIG else "look at its disk"


def write_whole(path: Path, content: bytes, *, flush: bool = False) -> None:
    """Write or replace a file, and make its folder. A reader sees the old file or the new one, also after a
    failure (OSError). Several processes may write one file.

    flush: the same holds after a loss of power, which may otherwise leave the file empty. A flush waits for
    the disk, and so for a checkpoint that is being written there. Do not flush a heartbeat, nor a file of
    each step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of a write to an open file has no file name
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def open_lock(path: Path) -> TextIO:
    """A file for locking, created if it is missing. Its content stays. A link is not followed (ValueError):
    in a folder that several people write to, anybody may have made it, and it may point to a file of the user
    who takes the lock."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise ValueError(f"{path} is a link, and a lock must be a file; remove the link") from error
    return os.fdopen(handle, "r+")


def parse_json(text: str) -> object:
    """Raises ValueError also for NaN and infinities, which are not JSON and which no reader expects."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def read_file(
    file: Path,
    fields: Mapping[str, type | tuple[type, ...]],
    damaged: list[str],
    parse: Callable[[str], object] = parse_json,
) -> dict | None:
    """The content of a file that has at least these fields, of these types. None if the file is missing or
    damaged; ``damaged`` gets the problem."""
    try:
        content = parse(text_of(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        damaged.append(f"{file} cannot be read ({' '.join(str(error).split())})")
        return None
    if not isinstance(content, dict):
        damaged.append(f"{file} holds no block of keys")
        return None
    wrong = [name for name, kind in fields.items() if not isinstance(content.get(name), kind)]
    if wrong:
        damaged.append(f"{file} lacks a sound {wrong[0]!r}")
        return None
    return content


def read_required(file: Path, fields: Mapping[str, type | tuple[type, ...]] | None = None) -> dict:
    """As ``read_file``. Raises ValueError, naming the file, if it is missing or damaged."""
    damaged: list[str] = []
    content = read_file(file, fields or {}, damaged)
    if content is None:
        raise ValueError(damaged[0] if damaged else f"{file} is missing")
    return content


class LineFile:
    """A file to which lines are added, each written to disk at once. If the disk is full, lines wait here,
    and are written before the next line."""

    def __init__(self, path: Path):
        self._file, self._waiting = path.open("ab", buffering=0), b""

    def write(self, line: str) -> OSError | None:
        """Returns the error if lines wait."""
        self._waiting += f"{line}\n".encode()
        return self.flush()

    def close(self) -> OSError | None:
        """Returns the error if lines are lost."""
        with self._file:
            return self.flush()

    def flush(self) -> OSError | None:
        """Returns the error if lines wait."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None


def mount_of(path: Path) -> tuple[int, str]:
    """(inode, the kernel's line of the mount that the file is on, "" if unknown). Raises OSError."""
    handle = os.open(path, os.O_PATH)
    try:
        inode = os.fstat(handle).st_ino
        number = re.search(r"^mnt_id:\s+(\d+)", Path(f"/proc/self/fdinfo/{handle}").read_text(), re.M)
    finally:
        os.close(handle)
    line = number and re.search(rf"^{number[1]} .*", Path("/proc/self/mountinfo").read_text(), re.M)
    return inode, line[0] if line else ""
