"""Resumable checkpoints of a run: engine state (weights, optimizer, schedule, RNG) with the step, version and data position."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from configs.schema.learner import CheckpointConfig
from parallel.checkpoint import latest_valid, prune, step_folder
from trainer.learner import Learner
from trainer.sampling import SharedSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a run needs beside the engine's own state to go on as if it had never stopped."""

    step: int
    version: int
    sampler: dict


class Checkpointer:
    """Writes ``folder/step_000010`` every so many steps; an unfinished one is never picked up (see parallel/checkpoint.py)."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self._folder, self._config = folder, config

    def after_step(self, step: int, learner: Learner, sampler: SharedSampler) -> None:
        if self._config.every and step % self._config.every == 0:
            self.save(step, learner, sampler)

    def save(self, step: int, learner: Learner, sampler: SharedSampler) -> Path:
        state: list = [sampler.state()]
        dist.broadcast_object_list(state, src=0)
        target = step_folder(self._folder, step)
        learner.engine.save(target, asdict(Progress(step=step, version=learner.version, sampler=state[0])))
        if learner.is_first_rank:
            prune(self._folder, keep=self._config.keep)
        return target

    def restore(self, learner: Learner, sampler: SharedSampler) -> Progress | None:
        """Load the newest valid checkpoint; None where there is none."""
        newest = latest_valid(self._folder)
        if newest is None:
            return None
        progress = Progress(**learner.engine.load(newest))
        learner.version = progress.version
        sampler.load_state(progress.sampler)
        return progress
