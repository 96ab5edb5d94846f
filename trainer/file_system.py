"""Files that are replaced whole or grow by lines, and the mounts of files: for all that a run or a command leaves behind."""

import contextlib
import os
import re
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file, and make its folder: a reader sees the old file or the new one, also after a failure
    (OSError). Several processes may write one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write to an open file names none
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


class LineFile:
    """A file to which lines are added, each on its disk at once. What a disk that is full does not take waits here, and
    goes before the next line."""

    def __init__(self, path: Path):
        self._file, self._waiting = path.open("ab", buffering=0), b""

    def write(self, line: str) -> OSError | None:
        """Returns the error where lines wait."""
        self._waiting += f"{line}\n".encode()
        return self._flush()

    def close(self) -> OSError | None:
        """Returns the error where lines are lost."""
        with self._file:
            return self._flush()

    def _flush(self) -> OSError | None:
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
