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
    living = processes
    while living and time.monotonic() < deadline:
        living = [process for process in living if _lives(process)]
        time.sleep(0.05)
    assert living == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
