"""Process groups that a test has started, and their end."""

import os
import time

import psutil


def group_of(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader:
                members.append(process)
        except ProcessLookupError:
            continue
    return members


def assert_all_end(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while (living := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living == []


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended; it stays listed until its parent looks, which the first process of some containers
    never does."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
