"""Locks of files, which end with the process that took them: taking one, and seeing who has it."""

import errno
import fcntl
import re
from pathlib import Path
from typing import TextIO

from trainer.file_system import mount_of, open_lock

_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock on a file system without locks."""


class WithoutLocks(ValueError):
    """The file system has no locks."""


def locked(path: Path) -> TextIO:
    """The open file (made if missing), with a lock that ends when the file is closed.

    Raises BlockingIOError if another process has the lock, WithoutLocks with a fix on a file system without locks, and
    ValueError if ``path`` is a link.
    """
    file = open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise WithoutLocks(
            f"{path.parent} is on a file system without file locks ({error.strerror}), which keep two processes from running one folder; "
            "have it mounted with them (Lustre: -o flock), or put launch.runs_dir elsewhere"
        ) from error
    return file


def holders_of(lock: Path, locks: Path = Path("/proc/locks")) -> list[int]:
    """The processes of this machine that hold a lock file. The number of a process in another container is not positive.

    Trying the lock could make a run's own claim fail, so the kernel's table is read.
    """
    try:
        name = _kernel_name_of(lock)
        # 3: FLOCK  ADVISORY  WRITE 4711 08:02:1234 0 EOF
        return [
            int(line.split("FLOCK", 1)[1].split()[2])
            for line in locks.read_text().splitlines()
            if "FLOCK" in line and name in line
        ]
    except OSError:
        return []


def _kernel_name_of(lock: Path) -> str:
    """The kernel's name of the lock, MAJOR:MINOR:INODE between spaces; only the inode if the device is unknown.

    The device is that of the mount; stat gives another one on btrfs and overlays.
    """
    inode, mount = mount_of(lock)
    device = re.match(r"\d+ \d+ (\d+):(\d+) ", mount)
    return f" {int(device[1]):02x}:{int(device[2]):02x}:{inode} " if device else f":{inode} "
