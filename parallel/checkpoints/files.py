"""Which checkpoints are there, whether they are whole, and how they are removed; without torch, so for checks
before a start too.

On disk: ``ROOT/step_000010/``. The manifest ``complete.json`` inside, which
``parallel/checkpoints/checkpoint.py`` writes last, lists every other file with its size and its XXH3 (128
bits), and ends with a SHA-256 of itself. XXH3 is no cryptographic hash: it finds what disks, memory and
copies do to files. Whoever may write to the folder can write a manifest that fits. Two questions are asked of
a checkpoint:
- Is it there in full? ``is_valid`` compares sizes, in milliseconds: for status, dry runs and supervisors.
- Is every bit as it was written? ``damage`` reads everything. Whoever loads asks this first
  (``checkpoint.verified``).
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

FORMAT = 2
MANIFEST = "complete.json"
HASH_THREADS = 4
"""Of one process. xxhash leaves the interpreter to others meanwhile; one thread reads and hashes 5 to 10
GB/s."""
_STEP = re.compile(r"step_(\d{6,})")


class DamagedManifest(ValueError):
    """A manifest is missing or is not what was written."""


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
    """Processes that saved."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """By their paths inside the checkpoint."""

    def text(self) -> str:
        """As on disk."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return _with_digest({"format": FORMAT, "world_size": self.world_size, "files": files})


def _with_digest(content: dict) -> str:
    """JSON whose last entry is the SHA-256 of the JSON without it."""
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """None where it has no checkpoint's name."""
    match = _STEP.fullmatch(folder.name)
    return match and int(match[1])


def step_folders(root: Path) -> dict[int, Path]:
    """Whatever has a checkpoint's name under ``root``, by step, oldest first."""
    root = Path(root)
    paths = root.iterdir() if root.is_dir() else ()
    found = {step: path for path in paths if (step := step_of(path)) is not None}
    return dict(sorted(found.items()))


def valid_checkpoints(root: Path) -> dict[int, Path]:
    """Checkpoints under ``root`` that are there in full, by step, oldest first."""
    return {step: folder for step, folder in step_folders(root).items() if is_valid(folder)}


def latest_valid(root: Path) -> Path | None:
    """The newest checkpoint under ``root`` that is there in full; None where there is none."""
    return next(reversed(valid_checkpoints(root).values()), None)


def is_valid(folder: Path) -> bool:
    """Whether every file that the manifest lists is there in full."""
    return missing(folder) is None


def missing(folder: Path) -> str | None:
    """Why a checkpoint is not there in full, naming the file; None where it is."""
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return next(
        (
            said
            for name, record in manifest.files.items()
            if (said := _difference_in_size(folder, name, record))
        ),
        None,
    )


def _difference_in_size(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == record.bytes else f"{name} has {size} bytes, of which {record.bytes} were written"


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedManifest where a single bit is not as it was written; OtherFormat, with the fix; OSError
    where it cannot be read."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedManifest(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError:
        raise DamagedManifest(f"{MANIFEST} is damaged: it is no text") from None
    try:
        content = json.loads(text)
        has_digest = content.pop("sha256", None) is not None
        # Text against text: a flipped bit that JSON does not mind, or one in the digest itself, shows too.
        if has_digest and text != _with_digest(content):
            raise DamagedManifest(f"{MANIFEST} is damaged: its content does not fit the SHA-256 in it")
        if content["format"] != FORMAT:
            raise OtherFormat(
                f"another version of Tandem wrote it (format {content['format']}, not {FORMAT}), so that its files cannot be checked; "
                "export its weights with that version, and start from them"
            )
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(world_size=content["world_size"], files=files)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DamagedManifest(f"{MANIFEST} is damaged: {error!r}") from None
    if not has_digest:
        raise DamagedManifest(f"{MANIFEST} is damaged: it has no SHA-256 of itself")
    return manifest


def stored_bytes(root: Path) -> int:
    """Of all checkpoints under ``root`` and of a critic's, which lie in ``root/critic``."""
    folders = [*valid_checkpoints(root).values(), *valid_checkpoints(Path(root) / "critic").values()]
    return sum(record.bytes for folder in folders for record in read_manifest(folder).files.values())


def write_manifest(folder: Path, *, world_size: int, hashed: Mapping[str, FileRecord] | None = None) -> None:
    """Of all files in ``folder``, which is complete then. ``hashed``: those whose digest is known; the others
    are hashed here."""
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
        return dict(zip(names, pool.map(lambda name: _record(folder / name), names), strict=True))


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileRecord(file.tell(), digest.hexdigest())


def share(manifest: Manifest, part: int, parts: int) -> list[str]:
    """The files that process ``part`` of ``parts`` checks, about as many bytes for each."""
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[part::parts]


def damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    """What is wrong with the named files of a checkpoint, a line each. Every byte is read.

    Raises OSError where a file is there and may not be read: that is no damage.
    """

    def look(name: str) -> str | None:
        try:
            found = _record(folder / name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            return f"{name} cannot be read ({error.strerror})"
        written = manifest.files[name]
        if found.bytes != written.bytes:
            return _difference_in_size(folder, name, written)
        return (
            None
            if found == written
            else f"{name} is damaged: its hash is not the one that it was written with"
        )

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        yield from filter(None, pool.map(look, names))


def set_aside(folder: Path) -> Path:
    """Give a checkpoint that cannot be used a name under which nobody looks for one; returns its new path.
    For one rank to call."""
    names = (f"{folder.name}.damaged{number}" for number in itertools.chain([""], itertools.count(2)))
    target = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    return folder.rename(target)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints. For one rank to call, after a save."""
    for folder in [*valid_checkpoints(root).values()][:-keep]:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a complete checkpoint. For one rank to call."""
    # Without its manifest it is no checkpoint any more, even if removing the rest is interrupted.
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path, name: str) -> None:
    """The hidden folders of writers of ``parent/name`` (a pattern) that were killed. Only where nobody else
    can be writing there now."""
    for folder in Path(parent).glob(f".{name}.*"):
        shutil.rmtree(folder, ignore_errors=True)
