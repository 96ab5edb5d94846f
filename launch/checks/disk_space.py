"""Compares the bytes that a run writes with the free bytes of its disk: for ``--dry-run``, and before every
start.

Bytes of a checkpoint per parameter: the weights in the model's dtype, AdamW's two moments in float32 (8), and
a float32 copy of the weights (4) unless they are float32 themselves; the distributed optimizer saves that
copy in any case. A checkpoint of a run with adapters holds only the adapters, and the run writes them beside the merged
model. Recorded batches, logs and pictures are comparatively small and are not counted.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.errors import counted
from configs.loader import Finding
from configs.schema import AnyConfig, SftConfig
from configs.schema.layout import LayoutConfig
from configs.schema.learner import OptimizerConfig
from parallel.checkpoints.files import stored_bytes
from parallel.planning.adapters import adapter_parameters
from parallel.planning.architecture import Architecture, architecture_of
from parallel.planning.memory import GIB, size_text, stage_parameters
from parallel.planning.work import BYTES

LARGEST_FILE = 4 * GIB
"""A larger model is written in several files."""
FILES_OF_RANK = 2
"""Most files of tensors that a learner rank writes into a checkpoint: Megatron's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a run writes."""

    checkpoint: int
    """One step's checkpoint, a critic's included."""
    checkpoints: int
    """Most checkpoints at a time: the oldest is removed once a new one is complete."""
    model: int
    """The trained model, in Hugging Face format, and its adapters."""
    there: int
    """Checkpoints of a resumed run that are on the disk already."""
    largest_file: int
    """The largest file of all has these bytes or more."""

    @property
    def least(self) -> int:
        """Bytes that the run needs to end well."""
        return min(self.checkpoints, 1) * self.checkpoint + self.model

    @property
    def most(self) -> int:
        return max(self.checkpoints * self.checkpoint - self.there, 0) + self.model

    @property
    def text(self) -> str:
        each = f"{counted(self.checkpoints, 'checkpoint')} at once of {size_text(self.checkpoint)} each, "
        there = f" ({size_text(self.there)} of it there already)" if self.there else ""
        return f"{each if self.checkpoints else ''}the trained model {size_text(self.model)}{there}"


def disk_need(config: AnyConfig) -> DiskNeed:
    """Raises ValueError for a model that cannot be used."""
    policy = architecture_of(config.model.path)
    model = _parameters(policy) * BYTES[config.model.dtype]
    of_model = min(model, LARGEST_FILE)
    if isinstance(config, SftConfig):
        return DiskNeed(checkpoint=0, checkpoints=0, model=model, there=0, largest_file=of_model)
    trained = _parameters(policy)
    if config.learner.lora is not None:
        trained = adapter_parameters(policy, LayoutConfig(), config.learner.lora)
        model += trained * BYTES[config.model.dtype]
    saved = [_checkpoint_bytes(trained, config.model.dtype, config.learner.optimizer)]
    if config.critic is not None:
        backbone = config.critic.model or config.model
        parameters = _parameters(architecture_of(backbone.path), output=False)
        saved.append(_checkpoint_bytes(parameters, backbone.dtype, config.critic.optimizer))
    settings = config.checkpoint
    at_once = min(settings.keep + 1, -(-config.steps // settings.every)) if settings.every else 0
    at_once += settings.keep_best is not None
    there = stored_bytes(config.resume / "checkpoints") if config.resume else 0
    of_checkpoint = max(saved) // (FILES_OF_RANK * config.layout.world_size) if at_once else 0
    largest = max(of_model, of_checkpoint)
    return DiskNeed(
        checkpoint=sum(saved), checkpoints=at_once, model=model, there=there, largest_file=largest
    )


def _parameters(architecture: Architecture, *, output: bool = True) -> int:
    return sum(stage_parameters(architecture, LayoutConfig(), 0, output=output))


def _checkpoint_bytes(parameters: int, dtype: str, optimizer: OptimizerConfig) -> int:
    copy = 4 if optimizer.distributed or BYTES[dtype] < 4 else 0
    return parameters * (BYTES[dtype] + 8 + copy)


def disk_problems(config: AnyConfig, notes: list[str]) -> Iterator[Finding]:
    """An error if there is no space for the next checkpoint and the model, or if their files may not become that large; a note
    if the space may run out later."""
    field, folder = _output_folder(config)
    need, free = disk_need(config), free_bytes(folder)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < need.largest_file:
        text = f"files may have at most {size_text(limit)} here, and the run writes one of {size_text(need.largest_file)} or more"
        fix = "raise the limit (`ulimit -f`), or have the administrators do so"
        yield field, f"{field}={folder}: {text}; {fix}"
    if free is None or free >= need.most:
        return
    text = f"{field}={folder}: its disk has {size_text(free)} free, and the run needs {{}} ({need.text})"
    fix = "free space, give a folder on a larger disk, or lower checkpoint.keep"
    if free < need.least:
        yield field, f"{text.format(size_text(need.least))}; {fix}"
    else:
        notes.append(f"{text.format('up to ' + size_text(need.most))}; {fix}")


def disk_lines(config: AnyConfig) -> Iterator[str]:
    """The lines of ``--dry-run``."""
    _, folder = _output_folder(config)
    need, free = disk_need(config), free_bytes(folder)
    available = "" if free is None else f", of {size_text(free)} free here"
    yield f"disk, in {folder}: up to {size_text(need.most)}{available}: {need.text}"


def _output_folder(config: AnyConfig) -> tuple[str, Path]:
    if isinstance(config, SftConfig):
        return "output", config.output
    return ("launch.runs_dir", config.launch.runs_dir) if config.resume is None else ("resume", config.resume)


def free_bytes(folder: Path) -> int | None:
    """Free bytes of the disk that ``folder`` is on, or will be on; None if the system does not say."""
    absolute = folder.absolute()
    try:
        nearest = next(path for path in (absolute, *absolute.parents) if os.path.exists(path))
        usage = shutil.disk_usage(nearest)
        return usage.free if usage.total else None  # such as /proc: no disk at all
    except OSError:
        return None
