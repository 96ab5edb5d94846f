"""Keeps the samples of a few groups of each step, and of a few problems of each evaluation, in the run folder;
``tracking/samples.py`` has the format.

The groups are the first of the step in the order of the data, so every rank knows without communication which
of its sequences they are. Rank 0 sums their log-probs over its data-parallel group, in which each rank has
zeros for the tokens that it lacks. It costs one small collective per step, and no forward pass.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import RunConfig
from parallel.megatron import platform
from rollout.records import Group
from rollout.sampling.messages import EvaluationResult
from trainer.batch.step_batch import StepBatch
from trainer.file_system import way_to_write, write_whole
from trainer.learner import Learner
from trainer.tracking.samples import (
    EVALUATION,
    FOLDER,
    STEP,
    Sample,
    as_lines,
    of_evaluation,
    sample_file,
    samples_of,
)
from trainer.tracking.tracker import Tracker


class SampleKeeper:
    """All ranks call ``keep``; rank 0, the only one with a tracker, writes. Files of the first and the last step and of
    those with an evaluation go to MLflow too."""

    def __init__(self, folder: Path, config: RunConfig, tracker: Tracker | None):
        self._folder, self._tracker = folder, tracker
        self._num_groups, self._steps = config.tracking.sample_groups, config.steps
        self._evaluates_every = config.evaluation.every

    def keep(
        self,
        step: int,
        groups: Sequence[Group] | None,
        batch: StepBatch,
        learner_T: Tensor | None,
        learner: Learner,
    ) -> None:
        """Write the samples of the step, before the updated weights are published. A file that cannot be
        written is reported once, and the run continues.

        groups: None on all ranks but the first. learner_T: of ``learner_logprobs``.
        """
        if self._num_groups == 0:
            return
        count = sum(batch.group_sizes[: self._num_groups])
        logprobs: Mapping[int, Tensor] = {}
        if learner_T is not None:
            numbered = zip(
                batch.packed.sequence_ids_S.tolist(), learner_T.split(batch.packed.lengths), strict=True
            )
            logprobs = {number: row for number, row in numbered if number < count}
            if batch.lengths_S is not None:
                logprobs = gathered_on_first_rank(logprobs, batch.lengths_S[:count], learner.groups.dp_group)
        if groups is None or self._tracker is None:
            return
        trajectories = [t for group in groups[: self._num_groups] for t in group.trajectories]
        by_place = {
            place: row.float().cpu().numpy()
            for place, row in logprobs.items()
            # Samples that are left out or masked are off the learner's mask.
            if batch.group_ids_S[place] >= 0 and place not in batch.masked
        }
        samples = samples_of(trajectories, by_place, step=step, version=learner.version)
        is_for_mlflow = step in (1, self._steps) or (
            self._evaluates_every > 0 and step % self._evaluates_every == 0
        )
        self._write(self._tracker, samples, STEP, step, to_mlflow=is_for_mlflow)

    def keep_evaluation(self, step: int, result: EvaluationResult | None, version: int) -> None:
        """Of the evaluation after this step, on the rank that has its result."""
        if self._tracker is not None and result is not None and result.groups:
            samples = of_evaluation(result, step=step, version=version)
            self._write(self._tracker, samples, EVALUATION, step, to_mlflow=True)

    def _write(
        self, tracker: Tracker, samples: Sequence[Sample], of: str, step: int, *, to_mlflow: bool
    ) -> None:
        file = sample_file(self._folder, step, of)
        try:
            write_whole(file, as_lines(samples))
        except OSError as error:
            fix = f"{way_to_write(error)}, or set tracking.sample_groups=0 and tracking.evaluation_problems=0"
            text = f"the samples of {of} {step} cannot be written to {file} ({error.strerror}); {fix}"
            tracker.warn_once("samples", text)
            return
        if to_mlflow:
            tracker.artifact(file, FOLDER)


def gathered_on_first_rank(
    own: Mapping[int, Tensor], lengths: Tensor, group: dist.ProcessGroup | None
) -> Mapping[int, Tensor]:
    """All sequences, of these lengths, on rank 0; elsewhere only ``own``. Tensor- and pipeline-parallel siblings of
    rank 0 have the same, so their groups have nothing to do."""
    if group is None or dist.get_world_size(group) == 1 or dist.get_global_rank(group, 0) != 0:
        return own
    values = torch.zeros(int(lengths.sum()))
    rows = values.split(lengths.tolist())
    for number, values_T in own.items():
        rows[number].copy_(values_T)
    # Only one rank has a value at each place, so the sum keeps its bits.
    sums = values.to(platform.device())
    dist.reduce(sums, dst=0, group=group)
    return dict(enumerate(sums.cpu().split(lengths.tolist()))) if dist.get_rank() == 0 else own
