"""Recorded steps of a run and their files, and how files are replaced. Without torch, so that a missing step is reported at once."""

import os
from pathlib import Path


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.safetensors"))


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file, whole or not at all, and make its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
