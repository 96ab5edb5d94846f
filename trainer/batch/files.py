"""Recorded steps of a run and their files, and how files are replaced. Without torch, so that a missing step is reported at once."""

import os
from pathlib import Path


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.safetensors"))


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
