"""Which checkpoints are there, complete, and how they are removed; without torch, so for checks before a start too.

On disk: ``ROOT/step_000010/``. ``complete.json`` inside lists every file with its size; ``parallel/checkpoint.py`` writes it last.
"""

import json
import re
import shutil
from pathlib import Path

FORMAT = 1
MANIFEST = "complete.json"
_STEP = re.compile(r"step_(\d{6,})")


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """None where it has no checkpoint's name."""
    match = _STEP.fullmatch(folder.name)
    return match and int(match[1])


def valid_checkpoints(root: Path) -> dict[int, Path]:
    """Complete checkpoints under ``root`` by step, oldest first."""
    root = Path(root)
    found = {step_of(path): path for path in (root.iterdir() if root.is_dir() else ())}
    return {step: found[step] for step in sorted(found.keys() - {None}) if is_valid(found[step])}


def latest_valid(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``; None where there is none."""
    return next(reversed(valid_checkpoints(root).values()), None)


def is_valid(folder: Path) -> bool:
    """Whether every file that the manifest lists is there in full."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
    """The hidden folders of writers of ``parent/name`` (a pattern) that were killed. Only where nobody else can be writing there now."""
    for folder in Path(parent).glob(f".{name}.*"):
        shutil.rmtree(folder, ignore_errors=True)
