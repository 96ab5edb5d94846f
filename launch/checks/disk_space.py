"""What a run writes, against what its disk has free: for ``--dry-run``, and before every start.

Bytes of a checkpoint per parameter: the weights in the model's dtype, AdamW's two moments in float32 (8), and
a float32 copy of the weights (4) unless they are float32 themselves; the distributed optimizer saves that
copy in any case. Recorded batches, logs and pictures are small beside these and are not counted.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.loader import Finding
from configs.schema import RunConfig, SftConfig
from configs.schema.layout import LayoutConfig
from parallel.checkpoints.files import stored_bytes
from parallel.planning.layout import Architecture, read_architecture, read_hf_config
from parallel.planning.memory import BYTES, size_text, stage_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes."""

    checkpoint: int
    """Of one step, a critic's included."""
    checkpoints: int
    """How many there are at most at once: the oldest goes once a new one is whole."""
    model: int
    """Of the trained model, in Hugging Face format."""
    there: int
    """Of checkpoints that are on the disk already, of a run that is resumed."""

    @property
    def least(self) -> int:
        """For the run to end well."""
        return min(self.checkpoints, 1) * self.checkpoint + self.model

    @property
    def most(self) -> int:
        return max(self.checkpoints * self.checkpoint - self.there, 0) + self.model

    @property
    def text(self) -> str:
        kept = (
            f"{self.checkpoints} checkpoint(s) at once of {size_text(self.checkpoint)} each, "
            if self.checkpoints
            else ""
        )
        there = f" ({size_text(self.there)} of it there already)" if self.there else ""
        return f"{kept}the trained model {size_text(self.model)}{there}"


def disk_need(config: RunConfig | SftConfig) -> DiskNeed:
    """Raises ValueError for a model that cannot be used."""
    policy = read_architecture(read_hf_config(config.model.path))
    model = _parameters(policy) * BYTES[config.model.dtype]
    if isinstance(config, SftConfig):
        return DiskNeed(checkpoint=0, checkpoints=0, model=model, there=0)
    checkpoint = _checkpoint_bytes(
        _parameters(policy), config.model.dtype, distributed=config.learner.optimizer.distributed
    )
    if config.critic is not None:
        of_critic = config.critic.model or config.model
        parameters = _parameters(read_architecture(read_hf_config(of_critic.path)), output=False)
        checkpoint += _checkpoint_bytes(
            parameters, of_critic.dtype, distributed=config.critic.optimizer.distributed
        )
    settings = config.checkpoint
    at_once = min(settings.keep + 1, -(-config.steps // settings.every)) if settings.every else 0
    there = stored_bytes(config.resume / "checkpoints") if config.resume else 0
    return DiskNeed(checkpoint=checkpoint, checkpoints=at_once, model=model, there=there)


def _parameters(architecture: Architecture, *, output: bool = True) -> int:
    return sum(stage_parameters(architecture, LayoutConfig(), 0, output=output))


def _checkpoint_bytes(parameters: int, dtype: str, *, distributed: bool) -> int:
    copy = 4 if distributed or BYTES[dtype] < 4 else 0
    return parameters * (BYTES[dtype] + 8 + copy)


def disk_problems(config: RunConfig | SftConfig, notes: list[str]) -> Iterator[Finding]:
    """An error where the run could not even write its next checkpoint and its model; a note where it may run
    out of space later."""
    field, folder = _place(config)
    need, free = disk_need(config), _free(folder)
    if free is None or free >= need.most:
        return
    said = f"{field}={folder}: its disk has {size_text(free)} free, and the run needs {{}} ({need.text})"
    fix = "free space, give a folder on a larger disk, or lower checkpoint.keep"
    if free < need.least:
        yield field, f"{said.format(size_text(need.least))}; {fix}"
    else:
        notes.append(f"{said.format('up to ' + size_text(need.most))}; {fix}")


def disk_lines(config: RunConfig | SftConfig) -> Iterator[str]:
    """Of ``--dry-run``."""
    _, folder = _place(config)
    need, free = disk_need(config), _free(folder)
    there_is = "" if free is None else f", of {size_text(free)} free here"
    yield f"disk, in {folder}: up to {size_text(need.most)}{there_is}: {need.text}"


def _place(config: RunConfig | SftConfig) -> tuple[str, Path]:
    if isinstance(config, SftConfig):
        return "output", config.output
    return ("launch.runs_dir", config.launch.runs_dir) if config.resume is None else ("resume", config.resume)


def _free(folder: Path) -> int | None:
    """Bytes on the disk that ``folder`` is on, or will be; None where that is not told."""
    absolute = folder.absolute()
    try:
        return shutil.disk_usage(
            next(path for path in (absolute, *absolute.parents) if os.path.exists(path))
        ).free
    except OSError:
        return None
