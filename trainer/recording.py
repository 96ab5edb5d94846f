"""A step's batch on disk. ``tandem replay`` applies other corrections to it without an engine.

One safetensors file per recorded step, ``RUN/batches/step_000010.safetensors``: the packed fields of all
ranks in the order of sequence ids, and the rewards and groups of the step. Its metadata has the step, the
weight version that sampled it, and a SHA-256 of everything.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from configs.schema.correction import CorrectionConfig
from configs.schema.launch import RecordBatches, RecordEvery
from parallel.packing import PackedBatch
from trainer.algorithm.correction import scored_old
from trainer.batch.files import batch_file, recorded_steps
from trainer.batch.step_batch import StepBatch
from trainer.file_system import way_to_write, write_whole

if TYPE_CHECKING:
    from trainer.learner import Learner

FORMAT = "tandem batch 5"
PER_STEP = ("rewards_S", "group_ids_S", "episode_ids_S")
NOT_RECORDED = (
    "importance_weights_T", "aggregation_T", "value_aggregation_T",
    "prompt_ids_S", "prompt_lengths_S",
)  # fmt: skip
"""Fields that are not recorded: they follow from the correction, which a replay changes, or from the
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    step: int
    version: int
    """The version of the weights at the start of the step, from which its first update was computed."""
    packed: PackedBatch
    """All sequences, by id; ``old_logprobs_T`` are the learner's own, in bypass mode too."""
    rewards_S: Tensor
    group_ids_S: Tensor
    correction: CorrectionConfig
    """The correction of the run that recorded the step."""
    episode_ids_S: Tensor | None = None
    """None: each sequence is a separate episode."""


class Recorder:
    """Writes the batches that the config asks for; all ranks call it."""

    def __init__(self, folder: Path, which: RecordBatches, correction: CorrectionConfig):
        self._folder, self._which, self._correction = folder, which, correction

    def forget_after(self, step: int) -> None:
        """Remove the batches of later steps: a resumed run makes its own. Only one rank may call."""
        for later in recorded_steps(self._folder):
            if later > step:
                batch_file(self._folder, later).unlink()

    def record(self, step: int, batch: StepBatch, learner: "Learner") -> str | None:
        """Write the batch before its update, if the config asks for this step. If it cannot be written, rank
        0 returns the reason, and the run continues.

        Takes a forward pass if the step itself has none for ``old``: in bypass mode, and if current is old.
        """
        which = self._which
        is_due = step % which.every == 0 if isinstance(which, RecordEvery) else which == "all"
        if not is_due:
            return None
        if scored_old(batch.packed, self._correction) is None:
            batch = batch.with_fields(old_logprobs_T=learner.logprobs(batch))
        shares = [batch.packed] * learner.groups.dp_size
        dist.all_gather_object(shares, batch.packed, group=learner.groups.dp_group)
        if learner.is_first_rank:
            whole = RecordedBatch(
                step=step,
                version=learner.version,
                packed=in_order(shares),
                rewards_S=batch.rewards_S,
                group_ids_S=batch.group_ids_S,
                episode_ids_S=batch.episode_ids_S,
                correction=self._correction,
            )
            try:
                write_batch(batch_file(self._folder, step), whole)
            except OSError as error:
                return f"{error.filename}: {error.strerror}"
        return None


def in_order(parts: Sequence[PackedBatch]) -> PackedBatch:
    """The ranks' shares as one batch, sorted by sequence id."""
    first = parts[0]
    if any(part.num_kept_T is not None for part in parts):
        # A share has no kept sets if all its episodes failed before a first turn.
        none_M = torch.zeros(0, dtype=torch.int32)
        parts = [
            replace(part, num_kept_T=torch.zeros(part.num_tokens, dtype=torch.int32), kept_ids_M=none_M)
            if part.num_kept_T is None
            else part
            for part in parts
        ]
    joined = {
        f.name: torch.cat([getattr(part, f.name) for part in parts])
        for f in fields(PackedBatch)
        if f.name.endswith(("_T", "_TLK", "_M", "_S")) and getattr(parts[0], f.name) is not None
    }
    lengths = torch.cat([torch.diff(part.cu_seqlens) for part in parts])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    whole = replace(first, **joined, cu_seqlens=cu_seqlens)
    return whole.select(whole.sequence_ids_S.argsort().tolist())


def write_batch(path: Path, batch: RecordedBatch) -> None:
    """Write the file whole or not at all. Raises OSError."""
    tensors = {name: getattr(batch, name) for name in PER_STEP}
    packed = {
        f.name: getattr(batch.packed, f.name) for f in fields(PackedBatch) if f.name not in NOT_RECORDED
    }
    tensors = {name: value for name, value in (tensors | packed).items() if value is not None}
    numbers = {name: json.dumps(getattr(batch, name)) for name in ("step", "version")}
    about = {"format": FORMAT, **numbers, "correction": batch.correction.model_dump_json()}
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    try:
        write_whole(path, save(tensors, metadata={**about, "sha256": _digest(about, tensors)}))
    except OSError as error:
        message = f"the batch of step {batch.step} cannot be recorded ({error.strerror}); {way_to_write(error)}, or set record_batches=none"
        raise OSError(error.errno, message, str(path)) from error


def _digest(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_batch(path: Path) -> RecordedBatch:
    """Raises ValueError for a file that is not a batch, of another version, or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is no batch of this version of tandem (format {about.get('format')!r}, not {FORMAT!r})"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a recorded batch: {error}") from error
    if about.pop("sha256", None) != _digest(about, tensors):
        raise ValueError(
            f"{path} is damaged: its content does not fit the SHA-256 that it was written with; replay another step"
        )
    per_step = {name: tensors.pop(name) for name in PER_STEP if name in tensors}
    try:
        packed = PackedBatch(**tensors)
    except ValueError as error:
        raise ValueError(f"{path} holds no batch that fits together: {error}") from error
    return RecordedBatch(
        step=json.loads(about["step"]),
        version=json.loads(about["version"]),
        packed=packed,
        correction=CorrectionConfig.model_validate_json(about["correction"]),
        **per_step,
    )
