"""``RUN/samples/step_000012.jsonl``: the samples of a few groups of each step, a line per sample. Those of a few problems
of the evaluation after it are in ``evaluation_000012.jsonl``.

A sample takes about 5 bytes per token, and 20 more per sampled token. Two groups of eight samples with 1,000 sampled
tokens each are 0.4 MB a step, with 10 tokens each 7 kB. Nothing is pruned. ``transcripts.py`` makes text of a sample.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from configs.reading.files import openable
from rollout.records import Trajectory
from rollout.sampling.messages import EvaluationResult

FOLDER = "samples"
DIGITS = 6
"""Decimals of log-probs."""


class SampledTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that one request has sampled, from ``start`` up to but not including ``end``."""

    start: int
    end: int
    finish_reason: str
    reward: float | None = None
    """The part of the sample's reward that this turn has earned, if the environment says so."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One line. Tokens outside of ``turns`` belong to the prompt or were observed. The three lists per token cover only
    the sampled tokens, in order. A number that was not finite is None."""

    step: int
    version: int
    """Of the learner's weights before the step's update."""
    group: int
    sibling: int
    branch: int = 0
    """The number of the sequence within its episode, if the episode forked."""
    prompt_id: str
    status: str
    reward: float | None
    """None: not scored."""
    parts: dict[str, float | None]
    turns: list[SampledTurn]
    token_ids: list[int]
    rollout_logprobs: list[float | None]
    learner_logprobs: list[float | None] | None
    """By the learner before the update, or in the update's own forward pass. None if it has not scored the
    step (the warm-up of a critic in bypass mode)."""
    versions: list[tuple[int, int]]
    """(version of the weights, number of tokens) of each stretch of tokens with one version."""
    heldout_set: str | msgspec.UnsetType = msgspec.UNSET
    """The further held-out set that the problem of an evaluation is from. A line of another problem has none."""

    @property
    def name(self) -> str:
        """The sample's name within its group."""
        return f"sibling {self.sibling}" + (f", sequence {self.branch + 1}" if self.branch else "")

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        *,
        step: int,
        version: int,
        learner_logprobs: np.ndarray | None = None,
        heldout_set: str | None = None,
    ) -> "Sample":
        """learner_logprobs: of the tokens after the first, as in a packed batch."""
        mask = trajectory.response_mask
        runs = groupby(trajectory.token_versions[mask].tolist())
        return cls(
            step=step,
            version=version,
            group=trajectory.group_id,
            sibling=trajectory.sibling_id,
            branch=trajectory.branch,
            prompt_id=trajectory.prompt_id,
            status=trajectory.status.value,
            reward=trajectory.reward,
            parts=dict(trajectory.reward_parts),
            turns=[
                SampledTurn(
                    start=turn.start, end=turn.end, finish_reason=turn.finish_reason.value, reward=turn.reward
                )
                for turn in trajectory.turns
            ],
            token_ids=trajectory.token_ids.tolist(),
            rollout_logprobs=_rounded(trajectory.rollout_logprobs[mask]),
            learner_logprobs=None if learner_logprobs is None else _rounded(learner_logprobs[mask[1:]]),
            versions=[(value, len(list(run))) for value, run in runs],
            heldout_set=msgspec.UNSET if heldout_set is None else heldout_set,
        )


def _rounded(logprobs: np.ndarray) -> list[float | None]:
    return logprobs.astype(np.float64).round(DIGITS).tolist()


def samples_of(
    trajectories: Sequence[Trajectory], logprobs: Mapping[int, np.ndarray], *, step: int, version: int
) -> list[Sample]:
    """logprobs: the learner's, by the trajectory's place."""
    return [
        Sample.of(trajectory, step=step, version=version, learner_logprobs=logprobs.get(place))
        for place, trajectory in enumerate(trajectories)
    ]


def of_evaluation(result: EvaluationResult, *, step: int, version: int) -> list[Sample]:
    """The samples that an evaluation keeps. The learner does not score them."""
    return [
        Sample.of(trajectory, step=step, version=version, heldout_set=name)
        for group, name in zip(result.groups, result.groups_from, strict=True)
        for trajectory in group.trajectories
    ]


def as_lines(samples: Sequence[Sample]) -> bytes:
    return msgspec.json.Encoder().encode_lines(samples)


STEP, EVALUATION = "step", "evaluation"
"""What samples are of."""


def sample_file(folder: Path, step: int, of: str = STEP) -> Path:
    return folder / f"{of}_{step:06d}.jsonl"


def sampled_steps(folder: Path, of: str = STEP) -> list[int]:
    """The steps whose samples a folder holds, ascending."""
    stems = (path.stem.removeprefix(f"{of}_") for path in folder.glob(f"{of}_*.jsonl"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def forget_samples_after(folder: Path, step: int) -> None:
    """Remove the samples of later steps: a resumed run makes its own."""
    for of in (STEP, EVALUATION):
        for later in sampled_steps(folder, of):
            if later > step:
                sample_file(folder, later, of).unlink()


def read_samples(path: Path) -> list[Sample]:
    """Raises ValueError for a file that cannot be read, or holds no samples."""
    try:
        samples = msgspec.json.Decoder(Sample).decode_lines(openable(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as samples of a step: {error}") from error
    if not samples:
        raise ValueError(f"{path} cannot be read as samples of a step: it is empty")
    for sample in samples:
        _require_whole(path, sample)
    return samples


def _require_whole(path: Path, sample: Sample) -> None:
    """Raises ValueError for turns or lists per token that do not fit the tokens."""
    ends = [0, *(place for turn in sample.turns for place in (turn.start, turn.end)), len(sample.token_ids)]
    count = sum(turn.end - turn.start for turn in sample.turns)
    lists = [len(sample.rollout_logprobs), sum(number for _, number in sample.versions)]
    lists += [] if sample.learner_logprobs is None else [len(sample.learner_logprobs)]
    if ends != sorted(ends) or set(lists) != {count}:
        raise ValueError(
            f"{path} cannot be read as samples of a step: the turns of group {sample.group}, {sample.name} "
            "do not fit its tokens"
        )
