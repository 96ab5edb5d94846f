"""Hashes of files that other threads still write: a core hashes bytes faster than a disk stores them."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from parallel.checkpoints.files import FileRecord

LOOK_EVERY_S = 0.1
CHUNK_BYTES = 4 << 20


@contextlib.contextmanager
def hashed_while_written(folder: Path, pattern: str) -> Iterator[dict[str, FileRecord]]:
    """Inside, files of ``folder`` that match the pattern are hashed as they grow. At the end the yielded
    dictionary has their records by name.

    The writers only append, and are done when the block ends. Bytes are read back from the page cache while
    the writers wait for the disk. Raises OSError at the end if a file could not be read.
    """
    over, records, failures = threading.Event(), {}, []

    def follow(path: Path) -> None:
        try:
            records[path.name] = _hash_until(path, over)
        except OSError as error:
            failures.append(error)

    def find_files() -> None:
        followers: dict[Path, threading.Thread] = {}
        is_last = False
        while not is_last:
            is_last = over.wait(LOOK_EVERY_S)
            for path in set(folder.glob(pattern)) - followers.keys():
                followers[path] = threading.Thread(
                    target=follow, args=(path,), name=f"hash-{path.name}", daemon=True
                )
                followers[path].start()
        for thread in followers.values():
            thread.join()

    finder = threading.Thread(target=find_files, name="hash-growing-files", daemon=True)
    finder.start()
    try:
        yield records
    finally:
        over.set()
        finder.join()
    if failures:
        raise failures[0]


def _hash_until(path: Path, over: threading.Event) -> FileRecord:
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        is_last = False
        while not is_last:
            is_last = over.is_set()  # before the read: the end that it then finds is the file's end
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
            if not is_last:
                over.wait(LOOK_EVERY_S)
    return FileRecord(size, digest.hexdigest())
