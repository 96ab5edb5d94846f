"""Recorded steps of a run and their files. Without torch, so that a missing step is reported at once."""

from pathlib import Path


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """The steps whose batches a folder holds, ascending."""
    stems = (path.stem.removeprefix("step_") for path in folder.glob("step_*.safetensors"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())
