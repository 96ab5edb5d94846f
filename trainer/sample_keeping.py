"""Keeps the samples of a few groups of each step in the run folder; ``tracking/samples.py`` has the format.

The groups are the first of the step in the order of the data, so every rank knows without a question which of its
sequences they are. What the learner says of their tokens is gathered on rank 0, from one rank of each data-parallel
share. It costs one small collective a step, and no forward pass.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from configs.schema import RunConfig
from rollout.records import Group
from trainer.batch.files import write_whole
from trainer.batch.step_batch import StepBatch
from trainer.learner import Learner, Update
from trainer.tracking.samples import FOLDER, as_lines, sample_file, samples_of
from trainer.tracking.tracker import Tracker


class SampleKeeper:
    """All ranks call ``keep``; rank 0, which alone has a tracker, writes. Files of the first and the last step and of
    those with an evaluation go to MLflow too."""

    def __init__(self, folder: Path, config: RunConfig, tracker: Tracker | None):
        self._folder, self._tracker = folder, tracker
        self._num_groups, self._steps = config.tracking.sample_groups, config.steps
        self._group_size, self._evaluates_every = config.rollout.group_size, config.evaluation.every

    def keep(
        self,
        step: int,
        groups: Sequence[Group] | None,
        batch: StepBatch,
        updates: Sequence[Update],
        learner: Learner,
    ) -> None:
        """Before the updated weights are published. A file that cannot be written is told of once, and the run goes
        on.

        groups: None on all ranks but the first.
        """
        if self._num_groups == 0:
            return
        own = learner_logprobs(
            batch, updates, learner.correction_mode, below=self._num_groups * self._group_size
        )
        logprobs = gathered_on_first_rank(own, learner.groups.dp_group)
        if groups is None or self._tracker is None:
            return
        trajectories = [t for group in groups[: self._num_groups] for t in group.trajectories]
        file = sample_file(self._folder, step)
        try:
            write_whole(
                file, as_lines(samples_of(trajectories, logprobs, step=step, version=learner.version))
            )
        except OSError as error:
            fix = "free space, or set tracking.sample_groups=0"
            text = f"the samples of step {step} cannot be written to {file} ({error.strerror}); {fix}"
            self._tracker.warn_once("samples", text)
            return
        if step in (1, self._steps) or (self._evaluates_every and step % self._evaluates_every == 0):
            self._tracker.artifact(file, FOLDER)


def learner_logprobs(
    batch: StepBatch, updates: Sequence[Update], mode: str, *, below: int
) -> dict[int, np.ndarray]:
    """Log-probs of this rank's sequences with a number below ``below``, by number: ``old`` where it was computed, else
    by the forward passes of the updates. Empty where there is neither."""
    numbers = batch.packed.sequence_ids_S.tolist()
    wanted = {row: number for row, number in enumerate(numbers) if number < below}
    old_T = batch.packed.old_logprobs_T if mode == "decoupled" else None
    if old_T is not None:
        bounds = batch.packed.cu_seqlens.tolist()
        rows = ((row, old_T[bounds[row] : bounds[row + 1]]) for row in wanted)
    else:
        current = [logprobs_T for update in updates for logprobs_T in update.logprobs]
        rows = batch.by_row(current, wanted) if current else ()
    return {wanted[row]: values_T.float().cpu().numpy().copy() for row, values_T in rows}


def gathered_on_first_rank(
    own: dict[int, np.ndarray], group: dist.ProcessGroup | None
) -> dict[int, np.ndarray]:
    """What the ranks of the group have, on rank 0; elsewhere only ``own``. Tensor- and pipeline-parallel siblings of
    rank 0 have the same, so their groups are left alone."""
    if group is None or dist.get_world_size(group) == 1 or dist.get_global_rank(group, 0) != 0:
        return own
    shares = [own] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(own, shares, dst=0, group=group)
    return {number: row for share in shares or [own] for number, row in share.items()}
