"""Which steps of a run are recorded, and where. Without torch: a step that is not there is told of at once."""

from pathlib import Path


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.safetensors"))
