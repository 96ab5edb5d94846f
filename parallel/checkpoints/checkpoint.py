"""Resumable checkpoints with Megatron's dist_checkpointing: weights, optimizer, schedule, random state and
the caller's own data.

On disk: ``ROOT/step_000010/``, complete or absent. It is written under a hidden name, flushed, then renamed;
``complete.json`` inside lists every file with its size and hash (``parallel/checkpoints/files.py``), which
are compared before anything is loaded. Weights and optimizer state are saved in a form that any layout can
read again. Nothing that a checkpoint says is run.
"""

import json
import pickle
import queue
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from parallel.checkpoints import pickles, writers
from parallel.checkpoints.files import (
    DamagedManifest,
    FileRecord,
    Manifest,
    damage,
    read_manifest,
    share,
    write_manifest,
)
from parallel.checkpoints.hashes import hashed_while_written
from parallel.megatron import platform
from parallel.weights.hf_files import replace_folder

T = TypeVar("T")

EXTRA = "extra.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not as it was written; the message names the files. Nothing of it was used."""


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint whose every bit is as it was written; ``verified`` gives it."""

    folder: Path
    manifest: Manifest


def optimizer_parts(optimizer) -> list:
    """The optimizers that a chained one is made of, or the one itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def initialise_optimizer_state(optimizer) -> None:
    """Zero moments for every parameter that has none: loading needs the state to be there, with a step tensor
    per parameter."""
    for part in optimizer_parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        _complete_steps(part)


def _complete_steps(part) -> None:
    """Torch's AdamW counts steps per parameter; Megatron saves no count before the first step."""
    if isinstance(part.optimizer, torch.optim.AdamW):
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _count_without_parameters(optimizer, steps: int) -> None:
    """Of a model with experts, a pipeline stage may have none: Megatron reads the step of a distributed
    optimizer from its parameters."""
    for part in optimizer_parts(optimizer):
        is_distributed = isinstance(part, DistributedOptimizer) and isinstance(
            part.optimizer, torch.optim.AdamW
        )
        if is_distributed and not any(group["params"] for group in part.optimizer.param_groups):
            part.optimizer.state["no parameter"] = {"step": torch.tensor(float(steps))}


def _restore_missing_step(optimizer, state: dict[Any, Any], steps: int) -> None:
    """A plain optimizer's state has no count, which torch's AdamW misses: saved before its first step, or by
    a rank 0 without experts."""
    parts = optimizer_parts(optimizer)
    for i, part in enumerate(parts):
        of_part = state[i] if len(parts) > 1 else state
        inner = of_part.get("optimizer", of_part)
        if "state" in inner and isinstance(part.optimizer, torch.optim.AdamW):
            inner["state"].setdefault("common_step", torch.tensor(float(steps)))


def save(
    folder: Path, *, chunks: Sequence[MegatronModule], optimizer, scheduler, extra: Mapping[str, Any]
) -> None:
    """Write ``folder`` (``files.step_folder(root, step)``), replacing an older one of that name. A
    collective.

    ``chunks`` are this rank's parts of the model, as for ``load``. ``extra`` is anything JSON can hold.
    Raises CheckpointError on every rank where the disk is full or a write fails on any of them; earlier
    checkpoints stay valid and nothing partial is left. Raises ValueError for ``extra`` that is no JSON.
    """
    folder = Path(folder)
    try:
        extra_text = json.dumps(dict(extra), allow_nan=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra of a checkpoint must be JSON: {error}") from error
    temporary = folder.parent / f".{folder.name}.partial"

    def prepare(state: dict[str, Any]) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / EXTRA).write_text(extra_text)
        _require_space(temporary, state)

    def write() -> dict[str, FileRecord]:
        # Megatron's own queue is a process, for saves in the background: it would import torch again on every
        # rank (3 CPU seconds, 200 MB) and live as long as the run. This save is over when it returns.
        filesystem_async._results_queue = queue.Queue()
        # Each rank hashes what its own writers write, while they wait for the disk.
        with hashed_while_written(temporary, f"__{dist.get_rank()}_*.distcp") as records:
            dist_checkpointing.save(state, str(temporary), content_metadata=_content_metadata())
        return records

    def finish(hashed: Mapping[str, FileRecord]) -> None:
        write_manifest(temporary, world_size=dist.get_world_size(), hashed=hashed)
        replace_folder(temporary, folder)

    try:
        state = _together(lambda: _state(chunks, optimizer, scheduler, is_loading=False))
        _together(lambda: prepare(state), only_rank_0=True)
        with writers.sigterm_blocked(), writers.watched():
            records = _gathered(_together(write))
        _together(
            lambda: finish({name: record for of_rank in records for name, record in of_rank.items()}),
            only_rank_0=True,
        )
    except CheckpointError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {folder}: {error}; earlier checkpoints are unchanged"
        ) from error


def verified(folder: Path) -> WholeCheckpoint:
    """The checkpoint in ``folder``, after every bit of it was compared with its manifest; each rank reads a
    share. A collective.

    Raises, on every rank, DamagedCheckpoint, which names the files; CheckpointError where it cannot be read,
    or has another format.
    """

    def look() -> tuple[Manifest | None, list[str]]:
        try:
            manifest = read_manifest(folder)
        except DamagedManifest as error:
            return None, [str(error)]
        return manifest, [*damage(folder, manifest, share(manifest, dist.get_rank(), dist.get_world_size()))]

    folder = Path(folder)
    try:
        manifest, found = _together(look)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    wrong = sorted({said for of_rank in _gathered(found) for said in of_rank})
    if wrong or manifest is None:
        raise DamagedCheckpoint(f"{folder} is damaged: {'; '.join(wrong)}")
    return WholeCheckpoint(folder, manifest)


def newest_whole(newest_first: Iterable[Sequence[Path]]) -> tuple[list[WholeCheckpoint], dict[Path, str]]:
    """The first entry whose checkpoints are all whole, and what is wrong with the entries before it, by their
    first folders. A collective.

    An entry is what must be of one step: a policy's checkpoint, or a policy's and a critic's. Raises
    CheckpointError where none is whole.
    """
    damaged: dict[Path, str] = {}
    for folders in newest_first:
        try:
            return [verified(folder) for folder in folders], damaged
        except DamagedCheckpoint as error:
            damaged[folders[0]] = str(error)
    raise CheckpointError(
        f"no checkpoint of this run is whole: {'; '.join(damaged.values()) or 'there is none'}; put one back from a copy"
    )


def load(
    checkpoint: Path | WholeCheckpoint, *, chunks: Sequence[MegatronModule], optimizer, scheduler
) -> dict[str, Any]:
    """Restore what ``save`` wrote and return its ``extra``. The layout may differ from the one that saved.

    A folder is verified first. The running config decides learning rates and schedule, the checkpoint how
    many steps were done. Random state is restored where the number of processes is the same. A collective.
    Raises CheckpointError on every rank where the folder is no whole checkpoint (DamagedCheckpoint), or holds
    another model, or anything that could run code, for any of them.
    """
    whole = checkpoint if isinstance(checkpoint, WholeCheckpoint) else verified(checkpoint)
    folder = whole.folder
    same_processes = whole.manifest.world_size == dist.get_world_size()

    def restore() -> dict[str, Any]:
        rates = [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]
        state = _state(chunks, optimizer, scheduler, is_loading=True, with_random=same_processes)
        with pickles.restricted():
            found = cast("dict[str, Any]", dist_checkpointing.load(state, str(folder)))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(found[f"model{i}"])
        _restore_missing_step(optimizer, found["optimizer"], found["scheduler"]["num_steps"])
        optimizer.load_state_dict(found["optimizer"])
        for part in optimizer_parts(optimizer):
            _complete_steps(part)
        for group, (max_lr, min_lr) in zip(optimizer.param_groups, rates, strict=True):
            group["max_lr"], group["min_lr"] = max_lr, min_lr
        scheduler.num_steps = 0
        scheduler.load_state_dict(found["scheduler"])
        if same_processes:
            _set_random_state(found["random"])
        return json.loads((folder / EXTRA).read_text())

    try:
        return _together(restore)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be loaded into this run: {error}") from error


def _content_metadata() -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        # The other formats cannot be read by another layout, or fail to load with torch's AdamW.
        "distrib_optim_sharding_type": "fully_reshardable",
        # Without it every data-parallel rank, not the first alone, would hold the whole float32 state of its
        # part of the model.
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }


def _state(
    chunks: Sequence[MegatronModule], optimizer, scheduler, *, is_loading: bool, with_random: bool = True
) -> dict[str, Any]:
    _count_without_parameters(optimizer, scheduler.num_steps)
    metadata = {
        **_content_metadata(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    # A tensor is known by its own name in the whole model, never by where it stands in this dictionary: any
    # layout finds it.
    model_state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    state = {
        **model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
        "scheduler": scheduler.state_dict(),
    }
    if with_random:
        place = ((dist.get_world_size(),), (dist.get_rank(),))
        state["random"] = ShardedObject("random", _random_state(), *place, replica_id=0)
    return state


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = cast("tuple", numpy.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if platform.has_cuda() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and platform.has_cuda():
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _require_space(folder: Path, state: Any) -> None:
    """Seen before a byte is written: rank 0's own share (an estimate; one rank of each other stage or slice
    holds as much) must fit."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"the disk has {free / 1e9:.2f} GB free, at least {needed / 1e9:.2f} GB are needed")


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _tensors(item)
    elif isinstance(data := getattr(state, "data", state), Tensor):
        yield data


def _reason(error: BaseException) -> str:
    """One line; torch's CheckpointException carries a whole traceback per rank, of which the causes matter."""
    causes = error.failures.values() if isinstance(error, CheckpointException) else ()
    if isinstance(error, pickle.UnpicklingError):
        return pickles.reason(error)
    said = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return "; ".join(_reason(cause[0]) for cause in causes) or said


@overload
def _together(action: Callable[[], T]) -> T: ...
@overload
def _together(action: Callable[[], T], *, only_rank_0: bool) -> T | None: ...
def _together(action: Callable[[], T], *, only_rank_0: bool = False) -> T | None:
    """What ``action`` gives on this rank, run on every rank (or on rank 0): raises CheckpointError on all of
    them if it failed on any."""
    result, failure = None, None
    if not only_rank_0 or dist.get_rank() == 0:
        try:
            result = action()
        except (
            Exception,
            CheckpointException,
        ) as error:  # whatever a writer raises, the other ranks must hear of it rather than wait
            failure = _reason(error)
    for rank, text in enumerate(_gathered(failure)):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return result


def _gathered(mine: T) -> list[T]:
    """What each rank has, by rank."""
    everything: list = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    return everything
