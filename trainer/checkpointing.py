"""Resumable checkpoints of a run: engine state (weights, optimizer, schedule, RNG) with the step, version and
data position."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from configs.schema.learner import CheckpointConfig
from parallel.checkpoints.checkpoint import DiskFull, newest_whole
from parallel.checkpoints.files import (
    BEST,
    is_absent,
    is_valid,
    prune,
    remove,
    set_aside,
    step_folder,
    step_folders,
    valid_checkpoints,
)
from parallel.rank_objects import from_first_rank
from trainer.file_system import NO_SPACE, SHARED_FOLDER_S, write_whole
from trainer.learner import Learner
from trainer.sampling import SharedSampler
from trainer.tracking.held_out import is_sound
from trainer.turns import OwnDevices

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State besides the engine's own that a resumed run needs to continue as if it had never stopped."""

    step: int
    version: int
    sampler: dict | None
    kl_coefficient: float | None = None
    """The coefficient of the KL in the reward; None if no adaptive controller changes it."""
    evaluation_owed: bool = False
    """Whether an interruption came before this step's evaluation."""
    best: dict | None = None
    """Fields of ``Best``; None without ``checkpoint.keep_best``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation of a run so far, which ``checkpoints/best.json`` names for commands."""

    step: int
    metric: str
    value: float


class Checkpointer:
    """Writes ``folder/step_000010`` every so many steps. ``restore`` never takes an unfinished one (see
    parallel/checkpoints/files.py).

    A critic's checkpoints lie in ``folder/critic``. Each is written before the policy's of the same step, so
    every complete policy checkpoint has one.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        turns: OwnDevices | None = None,
        *,
        max_failed: float | None = None,
    ):
        """max_failed: an evaluation with a larger share of failed rewards cannot be the best; None: any
        can."""
        self._turns, self._max_failed = turns or OwnDevices(), max_failed
        self._folder, self._critic_folder, self._config = folder, folder / "critic", config
        self.complete, self._saved = 0, 0
        self.last_save_s: float | None = None
        """Seconds of the newest checkpoint that this process has written."""
        self._position: dict | None = None
        self.notices: list[str] = []
        """Checkpoints that ``restore`` could not use, for console.log. They were already printed on the
        console."""
        self._evaluation_owed = False
        self._best: Best | None = None

    def after_step(
        self,
        step: int,
        learner: Learner,
        sampler: SharedSampler,
        *,
        evaluation_owed: bool = False,
        evaluated: Mapping[str, float] = MappingProxyType({}),
    ) -> str | None:
        """Note that ``step`` is complete (weights, metrics and data position), and save it if it is due, or
        if it is the best so far by ``evaluated``, the metrics of its evaluation (on rank 0). A full disk does
        not end the run: rank 0 returns a warning."""
        self.complete, self._evaluation_owed = step, evaluation_owed
        # The sampler's own position advances with the next groups, which may be dropped.
        self._position = sampler.state()
        best_before = self._best
        is_due = self.is_best(step, evaluated) or (self._config.every and step % self._config.every == 0)
        if not is_due:
            return None
        try:
            return self.save(step, learner)
        except DiskFull as full:
            self._best = best_before
            return f"step {step}: {full}; free space: the run continues, and tries again with the next checkpoint"

    def after_owed_evaluation(self, learner: Learner, evaluated: Mapping[str, float]) -> str | None:
        """Note whether the step from which a run was resumed, which has a checkpoint, is the best so far. If
        the disk is full, rank 0 returns a warning."""
        is_best = self.is_best(self.complete, evaluated)
        return self._prune() if is_best and learner.is_first_rank else None

    def is_best(self, step: int, evaluated: Mapping[str, float]) -> bool:
        """Whether the evaluation of ``step`` is better than all before, the same on all ranks. If so, it is
        noted as the best."""
        metric = self._config.keep_best
        if metric is None:
            return False
        can_be_best = is_sound(evaluated, self._max_failed, of=metric.rpartition("/")[0])
        found = from_first_rank(evaluated.get(metric) if can_be_best else None)
        before = -math.inf if self._best is None or self._best.metric != metric else self._best.value
        if found is None or not found > before:
            return False
        self._best = Best(step=step, metric=metric, value=found)
        return True

    def save_last(self, learner: Learner) -> str | None:
        """Save the last complete step, as ``save`` does, unless it is saved already. The weights must be
        those of that step."""
        return self.save(self.complete, learner) if self._saved < self.complete else None

    def save_before_export(self, learner: Learner, sampler: SharedSampler) -> str | None:
        """Save the last steps, as ``save`` does, before a long export, which may be killed. A disk without
        space for them gives only a warning, which rank 0 returns: the disk may have space for the model,
        which is several times smaller.

        A run without checkpoints gets one only if it was asked to stop, as its time to finish may run out.
        """
        if not (self._config.every or sampler.stop_requested()):
            return None
        try:
            return self.save_last(learner)
        except DiskFull as full:
            return f"{full}; the model is written nevertheless, and a resume to more steps continues from an earlier checkpoint"

    def save(self, step: int, learner: Learner) -> str | None:
        """Raises DiskFull on all ranks. Rank 0 returns a warning if the disk had space for the checkpoint but
        not for the name of the best one."""
        warning, full, began = None, None, time.perf_counter()
        progress = Progress(
            step=step,
            version=learner.version,
            sampler=from_first_rank(self._position),
            kl_coefficient=learner.kl_in_reward.state,
            evaluation_owed=self._evaluation_owed,
            best=self._best and asdict(self._best),
        )
        with self._turns.learner_there():  # which an error would leave without the servers' turn
            try:
                if learner.critic is not None:
                    learner.critic.engine.save(step_folder(self._critic_folder, step), {"step": step})
                learner.engine.save(step_folder(self._folder, step), asdict(progress))
            except DiskFull as error:
                full = error
                if learner.is_first_rank:
                    self._remove_lone_critics()
            else:
                self._saved = step
                warning = self._prune() if learner.is_first_rank else None
        if full is not None:
            raise full
        self.last_save_s = time.perf_counter() - began
        return warning

    def _prune(self) -> str | None:
        if self._best is not None:  # first, as it may name a step in the place of one that is removed
            try:
                write_whole(self._folder / BEST, json.dumps(asdict(self._best)).encode(), flush=True)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                return (
                    f"could not write {error.filename}: {error.strerror}; free space: the run continues, checkpoints stay, "
                    "and the next one writes it"
                )
        prune(self._folder, keep=self._config.keep, also=self._best and self._best.step)
        self._remove_lone_critics()
        return None

    def _remove_lone_critics(self) -> None:
        for folder in valid_checkpoints(self._critic_folder).values():
            if is_absent(self._folder / folder.name):  # not where it cannot be read: that may last a moment
                remove(folder)

    def restore(self, learner: Learner, sampler: SharedSampler) -> Progress | None:
        """Load the newest undamaged checkpoint. None without checkpoints: the data then starts from the
        beginning.

        Newer checkpoints that are damaged, or whose critic's checkpoint is, are named on the console and set
        aside. Raises CheckpointError if all are damaged, and for checkpoints of another version, without a
        critic, or of another model.
        """
        steps = self._folders_of_steps(has_critic=learner.critic is not None)
        if not steps:
            sampler.load_state(None)
            return None
        whole, damaged = newest_whole(_seen_by_this_node(folders, in_full) for folders, in_full in steps)
        if learner.critic is not None:
            learner.critic.engine.load(whole[1])
        progress = Progress(**learner.engine.load(whole[0]))
        learner.version = progress.version
        learner.kl_in_reward.load_state(progress.kl_coefficient)
        sampler.load_state(progress.sampler)
        self._position = progress.sampler
        self.complete = self._saved = progress.step
        self._best = Best(**progress.best) if progress.best else None
        if damaged and learner.is_first_rank:
            self._set_aside(damaged, instead=whole[0].folder)
        return progress

    def _folders_of_steps(self, *, has_critic: bool) -> list[tuple[list[Path], list[Path]]]:
        """(folders of policy and critic, those that rank 0 sees complete) of each checkpoint, newest first."""
        seen = []
        if dist.get_rank() == 0:
            roots = (self._folder, self._critic_folder) if has_critic else (self._folder,)
            names = [folder.name for folder in step_folders(self._folder).values()]
            steps = [[root / name for root in roots] for name in reversed(names)]
            seen = [(folders, [*filter(is_valid, folders)]) for folders in steps]
        return from_first_rank(seen)

    def _set_aside(self, damaged: Mapping[Path, str], *, instead: Path) -> None:
        """Rename damaged checkpoints, so that they do not count as the newest, and print it. On rank 0."""
        for policy, damage in damaged.items():
            folders = (policy, self._critic_folder / policy.name)
            kept = [str(set_aside(folder)) for folder in folders if folder.is_dir()]
            self.notices.append(
                f"checkpoint {damage}; continuing from {instead.name} instead (the damaged one is now {' and '.join(kept)})"
            )
            print(self.notices[-1], flush=True)


def _seen_by_this_node(folders: Sequence[Path], in_full: Sequence[Path]) -> Sequence[Path]:
    """``folders``, as soon as this node sees the same complete checkpoints as rank 0, or after a deadline: a
    node's view of a shared folder may lag."""
    deadline = time.monotonic() + SHARED_FOLDER_S
    while not all(map(is_valid, in_full)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return folders
