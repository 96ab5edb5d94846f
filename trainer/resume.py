"""Resumable checkpoints of a run: engine state (weights, optimizer, schedule, RNG) with the step, version and data position."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from configs.schema.learner import CheckpointConfig
from parallel.checkpoint_files import is_valid, latest_valid, prune, remove, step_folder, valid_checkpoints
from trainer.learner import Learner
from trainer.sampling import SharedSampler
from trainer.turns import OwnDevices

SEEN_TIMEOUT_S = 60.0
"""For a checkpoint of another node to be seen: clients of NFS remember for as long what was not there."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a run needs beside the engine's own state to go on as if it had never stopped."""

    step: int
    version: int
    sampler: dict
    kl_coefficient: float | None = None
    """Of the KL in the reward, where an adaptive controller moves it."""
    evaluation_owed: bool = False
    """Of this step; an interruption came before it."""


class Checkpointer:
    """Writes ``folder/step_000010`` every so many steps; an unfinished one is never picked up (see parallel/checkpoint_files.py).

    A critic's checkpoints lie in ``folder/critic``, each written before the policy's of the same step: a policy's that is complete has one.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, turns: OwnDevices | None = None):
        self._turns = turns or OwnDevices()
        self._folder, self._critic_folder, self._config = folder, folder / "critic", config
        self.complete, self._saved = 0, 0
        self._evaluation_owed = False

    def after_step(self, step: int, learner: Learner, sampler: SharedSampler, *, evaluation_owed: bool = False) -> None:
        """``step`` is complete: weights, metrics and position in the data are of its end."""
        self.complete, self._evaluation_owed = step, evaluation_owed
        if self._config.every and step % self._config.every == 0:
            self.save(step, learner, sampler)

    def save_last(self, learner: Learner, sampler: SharedSampler) -> None:
        """A checkpoint of the last complete step, unless there is one or no step is complete. While nothing has moved since that step."""
        if self._saved < self.complete:
            self.save(self.complete, learner, sampler)

    def save_before_export(self, learner: Learner, sampler: SharedSampler) -> None:
        """Before the trained model is written: whoever ends the run in the middle of a long export must not cost it its last steps.

        A run that writes no checkpoints gets none, unless it was asked to stop: then its time to finish may run out.
        """
        if self._config.every or sampler.stop_requested():
            self.save_last(learner, sampler)

    def save(self, step: int, learner: Learner, sampler: SharedSampler) -> Path:
        state: list = [sampler.state()]
        dist.broadcast_object_list(state, src=0)
        progress = Progress(
            step=step,
            version=learner.version,
            sampler=state[0],
            kl_coefficient=learner.kl_in_reward.state,
            evaluation_owed=self._evaluation_owed,
        )
        target = step_folder(self._folder, step)
        with self._turns.learner_there():
            if learner.critic is not None:
                learner.critic.engine.save(step_folder(self._critic_folder, step), {"step": step})
            learner.engine.save(target, asdict(progress))
            self._saved = step
            if learner.is_first_rank:
                self._prune()
        return target

    def _prune(self) -> None:
        prune(self._folder, keep=self._config.keep)
        kept = valid_checkpoints(self._folder)
        for step, folder in valid_checkpoints(self._critic_folder).items():
            if step not in kept:
                remove(folder)

    def restore(self, learner: Learner, sampler: SharedSampler) -> Progress | None:
        """Load the newest valid checkpoint. None where there is none: then the data begins anew, whoever has taken of it before.

        Raises CheckpointError where a critic's is missing.
        """
        newest = self._newest()
        if newest is None:
            sampler.load_state(None)
            return None
        if learner.critic is not None:
            learner.critic.engine.load(self._critic_folder / newest.name)
        progress = Progress(**learner.engine.load(newest))
        learner.version = progress.version
        learner.kl_in_reward.restore(progress.kl_coefficient)
        sampler.load_state(progress.sampler)
        self.complete = self._saved = progress.step
        return progress

    def _newest(self) -> Path | None:
        """The newest valid checkpoint as rank 0 sees it: what another node has last read of a shared folder may be older.

        The other ranks wait until they see it too, and a critic's beside it; ``load`` is an error on all of them where one does not.
        """
        seen: list[list[Path]] = [[]]
        if dist.get_rank() == 0 and (newest := latest_valid(self._folder)) is not None:
            seen = [[newest, *filter(is_valid, [self._critic_folder / newest.name])]]
        dist.broadcast_object_list(seen, src=0)
        deadline = time.monotonic() + SEEN_TIMEOUT_S
        while not all(map(is_valid, seen[0])) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return next(iter(seen[0]), None)
