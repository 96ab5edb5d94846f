"""Files hashed while other processes still write them: a disk takes longer to store bytes than a core to hash
them."""

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
    """Inside, files of ``folder`` that fit the pattern are followed as they grow: by name, what is given here
    holds them at the end.

    Their writers only append, and are done when the block ends. Bytes are read back from the page cache as
    they come, while the writers wait for the disk. Raises OSError at the end where a file could not be read.
    """
    over, records, failures = threading.Event(), {}, []

    def follow(path: Path) -> None:
        try:
            records[path.name] = _hash_until(path, over)
        except OSError as error:
            failures.append(error)

    def look() -> None:
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

    looking = threading.Thread(target=look, name="hash-growing-files", daemon=True)
    looking.start()
    try:
        yield records
    finally:
        over.set()
        looking.join()
    if failures:
        raise failures[0]


def _hash_until(path: Path, over: threading.Event) -> FileRecord:
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        is_last = False
        while not is_last:
            is_last = over.is_set()  # first: then the end of the file, as found below, is the end
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
            if not is_last:
                over.wait(LOOK_EVERY_S)
    return FileRecord(size, digest.hexdigest())
