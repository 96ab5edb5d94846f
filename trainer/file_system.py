"""Files that are replaced whole, and the mounts that files are on: for everything that a run or a command leaves behind."""

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
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


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
