"""The folders of checkpoints: listing, verification and removal, without torch, so for checks before a start
too.

On disk: ``ROOT/step_000010/``. The manifest ``complete.json`` inside, which
``parallel/checkpoints/checkpoint.py`` writes last, lists every other file with its size and its XXH3 (128
bits), and ends with a SHA-256 of itself. XXH3 is no cryptographic hash: it finds damage by disks, memory and
copies, but a user who may write to the folder can also write a fitting manifest. There are two checks:
- ``is_valid`` compares sizes, in milliseconds: for status, dry runs and supervisors.
- ``damage`` compares every bit, before a checkpoint is loaded (``checkpoint.verified``).
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import xxhash

from configs.reading.files import text_of

T = TypeVar("T")

FORMAT = 2
MANIFEST = "complete.json"
BEST = "best.json"
"""In the folder of the checkpoints: the step of the best one, if ``checkpoint.keep_best`` keeps it."""
HASH_THREADS = 4
"""Threads of one process. xxhash releases the interpreter; one thread reads and hashes 5 to 10 GB/s."""
READ_AGAIN_S = (0.0, 0.2, 1.0, 5.0)
"""Pauses before further reads of a file. On NFS one that another host replaces may fail once (ESTALE), and a server that
is away for a moment fails all (EIO)."""
_STEP = re.compile(r"step_(\d{6,})")


class DamagedManifest(ValueError):
    """A manifest is missing, or differs from the written one."""


class OtherFormat(ValueError):
    """Another version of Tandem wrote the checkpoint; its files cannot be checked."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    world_size: int
    """Number of processes that saved."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """The files by their paths inside the checkpoint."""

    def text(self) -> str:
        """The manifest as on disk."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return _with_digest({"format": FORMAT, "world_size": self.world_size, "files": files})


def _with_digest(content: dict) -> str:
    """JSON whose last entry is the SHA-256 of the JSON without it."""
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder; None for another name."""
    match = _STEP.fullmatch(folder.name)
    return match and int(match[1])


def step_folders(root: Path) -> dict[int, Path]:
    """All folders with a checkpoint's name under ``root``, by step, oldest first."""
    root = Path(root)
    paths = root.iterdir() if root.is_dir() else ()
    return dict(sorted((step, path) for path in paths if (step := step_of(path)) is not None))


def valid_checkpoints(root: Path) -> dict[int, Path]:
    """The complete checkpoints under ``root``, by step, oldest first."""
    return {step: folder for step, folder in step_folders(root).items() if is_valid(folder)}


def latest_valid(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``; None if there is none."""
    return next(reversed(valid_checkpoints(root).values()), None)


def is_valid(folder: Path) -> bool:
    """Whether every file of the manifest is there in full."""
    return missing(folder) is None


def missing(folder: Path) -> str | None:
    """The reason why a checkpoint is incomplete, naming the file; None for a complete one."""
    try:
        return _lack(folder)
    except (OSError, OtherFormat) as error:
        return str(error)


def is_torn(folder: Path) -> bool:
    """Whether a checkpoint is known to lack something. An error of reading, which may last a moment, is no knowledge, nor
    is another version's manifest."""
    try:
        return _lack(folder) is not None
    except (OSError, OtherFormat):
        return False


def is_absent(folder: Path) -> bool:
    """Whether there is no checkpoint, as it has no folder or no manifest. An error of reading does not mean that."""
    try:
        (folder / MANIFEST).stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _lack(folder: Path) -> str | None:
    """What a checkpoint lacks. Raises OSError if that cannot be read, and OtherFormat."""
    try:
        manifest = read_manifest(folder)
    except DamagedManifest as error:
        return str(error)
    differences = (_size_difference(folder, name, record) for name, record in manifest.files.items())
    return next(filter(None, differences), None)


def _size_difference(folder: Path, name: str, record: FileRecord) -> str | None:
    """Raises OSError if the size cannot be read."""
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == record.bytes else f"{name} has {size} bytes, of which {record.bytes} were written"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``. Raises DamagedManifest if a single bit differs, OtherFormat, with the fix,
    or OSError if it cannot be read."""
    try:
        text = text_of(folder / MANIFEST)
    except FileNotFoundError:
        raise DamagedManifest(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError:
        raise DamagedManifest(f"{MANIFEST} is damaged: it is not text") from None
    try:
        content = json.loads(text)
        has_digest = content.pop("sha256", None) is not None
        # Comparing text also finds flipped bits that JSON ignores, and those in the digest itself.
        if has_digest and text != _with_digest(content):
            raise DamagedManifest(f"{MANIFEST} is damaged: its content does not fit the SHA-256 in it")
        if content["format"] != FORMAT:
            raise OtherFormat(
                f"another version of Tandem wrote it (format {content['format']}, not {FORMAT}): its files cannot be checked; "
                "export its weights with that version, and start from them"
            )
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(world_size=content["world_size"], files=files)
    except (DamagedManifest, OtherFormat):
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedManifest(f"{MANIFEST} is damaged: {error!r}") from None
    if not has_digest:
        raise DamagedManifest(f"{MANIFEST} is damaged: it has no SHA-256 of itself")
    return manifest


def stored_bytes(root: Path) -> int:
    """Bytes of all checkpoints under ``root`` and of a critic's under ``root/critic``."""
    folders = [*valid_checkpoints(root).values(), *valid_checkpoints(Path(root) / "critic").values()]
    return sum(record.bytes for folder in folders for record in read_manifest(folder).files.values())


def write_manifest(folder: Path, *, world_size: int, hashed: Mapping[str, FileRecord] | None = None) -> None:
    """Write the manifest of all files in ``folder``, which completes it. ``hashed`` has the known records; the
    other files are hashed here."""
    hashed = hashed or {}
    names = {
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    }
    files = {**hash_files(folder, names - hashed.keys() - {MANIFEST}), **hashed}
    (folder / MANIFEST).write_text(Manifest(world_size=world_size, files=files).text(), encoding="utf-8")


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    names = list(names)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _hash_file(folder / name), names), strict=True))


def read_again(read: Callable[[], T], *, whatever: bool = False) -> T:
    """What ``read`` gives by the last of several tries: an error of a network file system may last a moment. Raises its
    last OSError, and others than EIO and ESTALE at once, but with ``whatever``."""
    for pause_s in READ_AGAIN_S:
        try:
            return read()
        except OSError as error:
            if not whatever and error.errno not in (errno.EIO, errno.ESTALE):
                raise
        time.sleep(pause_s)
    return read()


def _hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileRecord(file.tell(), digest.hexdigest())


def share(manifest: Manifest, part: int, parts: int) -> list[str]:
    """The files that process ``part`` of ``parts`` checks, about as many bytes for each."""
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[part::parts]


def damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    """A line for each damaged one of the named files of a checkpoint. Every byte is read.

    Raises OSError for a file that exists and may not be read, which is no damage. Nor is an error of a disk or a server
    that is gone by a further read.
    """

    def compare(name: str) -> str | None:
        try:
            record = read_again(lambda: _hash_file(folder / name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            return f"{name} cannot be read ({error.strerror})"
        written = manifest.files[name]
        if record.bytes != written.bytes:
            return _size_difference(folder, name, written)
        return (
            None if record == written else f"{name} is damaged: its hash differs from the one in the manifest"
        )

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        yield from filter(None, pool.map(compare, names))


def set_aside(folder: Path) -> Path:
    """Rename an unusable checkpoint so that it is not listed any more; returns its new path. For one rank to
    call."""
    names = (f"{folder.name}.damaged{number}" for number in itertools.chain([""], itertools.count(2)))
    target = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    return folder.rename(target)


def best_step(root: Path) -> int | None:
    """The step that ``BEST`` names; None without one. Raises ValueError if it cannot be read."""
    try:
        return int(json.loads(text_of(root / BEST))["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{root / BEST} cannot be read: {error!r}") from error


def prune(root: Path, keep: int, also: int | None = None) -> None:
    """Remove all but the newest ``keep`` complete checkpoints, and that of the step ``also``. For one rank to call, after
    a save."""
    for step, folder in [*valid_checkpoints(root).items()][:-keep]:
        if step != also:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a complete checkpoint. For one rank to call."""
    # Without its manifest it is not a checkpoint any more, even if the removal of the rest is interrupted.
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Give ``folder`` its name again if a writer was killed after it had moved the old one aside, and before
    the new one had its name (``parallel/weights/hf_files.py``: ``replace_folder``). No other process may be
    writing there."""
    old = [*folder.parent.glob(f".{folder.name}.old.*/{folder.name}")]
    if old and not os.path.lexists(folder):
        max(old, key=lambda path: path.parent.stat().st_mtime).rename(folder)


def remove_leftovers(parent: Path, name: str) -> None:
    """Remove the hidden folders that killed writers of ``parent/name`` (a pattern) left. No other process may be
    writing there."""
    for folder in Path(parent).glob(f".{name}.*"):
        shutil.rmtree(folder, ignore_errors=True)
