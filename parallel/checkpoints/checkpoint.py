"""Resumable checkpoints with Megatron's dist_checkpointing: weights, optimizer, schedule, random state and
the caller's own data.

On disk: ``ROOT/step_000010/``, complete or absent. It is written under a hidden name, flushed, then renamed;
``complete.json`` inside lists every file with its size and hash (``parallel/checkpoints/files.py``), which
are compared before anything is loaded. Any layout can read weights and optimizer state again. Code inside a
checkpoint is never run.
"""

import errno
import json
import os
import pickle
import queue
import random
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

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

from configs.reading.files import text_of
from parallel.checkpoints import base_model, pickles
from parallel.checkpoints.files import (
    DamagedManifest,
    FileRecord,
    Manifest,
    damage,
    read_again,
    read_manifest,
    share,
    write_manifest,
)
from parallel.checkpoints.hashes import hashed_while_written
from parallel.checkpoints.writers import safe_writers
from parallel.megatron import platform
from parallel.megatron.optimizer import optimizer_parts
from parallel.rank_objects import from_all_ranks
from parallel.weights.hf_files import replace_folder

T = TypeVar("T")

EXTRA = "extra.json"
NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Found only in the text of an error: on its way through Megatron and between ranks its number is lost."""
OF_CONFIG = ("max_lr", "min_lr", "betas", "eps", "foreach", "fused")
"""Settings of an optimizer's groups that a checkpoint holds too, and that the running config or device decides."""
CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    # Other formats cannot be read by another layout, or fail to load with torch's AdamW.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Otherwise every data-parallel rank, not only the first, holds the whole float32 state of its part.
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
"""Megatron's description of a checkpoint's content."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are unchanged."""


class DiskFull(CheckpointError):
    """A checkpoint found no space on its disk, or none left of the user's quota."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from the written one; the message names the files. Nothing of it was loaded."""


def tells_of_no_space(text: str) -> bool:
    """Whether an error's text says that its disk or the user's quota is full."""
    return any(reason in text for reason in NO_SPACE)


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint that ``verified`` has compared with its manifest."""

    folder: Path
    manifest: Manifest


def initialise_optimizer_state(optimizer) -> None:
    """Create missing moments as zeros, and a step tensor per parameter: loading needs the whole state."""
    for part in optimizer_parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        _complete_steps(part)


def _complete_steps(part) -> None:
    """Add the counts that torch's AdamW keeps per parameter and Megatron does not save before the first step. The
    fused kernel reads them on the device of the parameters."""
    if not isinstance(part.optimizer, torch.optim.AdamW):
        return
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            place = parameter.device if group["fused"] else torch.device("cpu")
            state["step"] = state.get("step", torch.tensor(0.0)).to(place)


def _count_without_parameters(optimizer, steps: int) -> None:
    """Give distributed optimizers without parameters a step count, which Megatron reads from a parameter. A
    pipeline stage of a model with experts may have no expert."""
    for part in optimizer_parts(optimizer):
        if not (isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW)):
            continue
        if not any(group["params"] for group in part.optimizer.param_groups):
            part.optimizer.state["no parameter"] = {"step": torch.tensor(float(steps))}


def _states_of_parts(optimizer, state: dict[Any, Any]) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Each part of the optimizer, and its state in that of a checkpoint."""
    parts = optimizer_parts(optimizer)
    for i, part in enumerate(parts):
        yield part, state[i] if len(parts) > 1 else state


def _plain_states(optimizer, state: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """In a checkpoint's state, that of each part with torch's AdamW that is not distributed."""
    for part, part_state in _states_of_parts(optimizer, state):
        inner = part_state.get("optimizer", part_state)
        if "state" in inner and isinstance(part.optimizer, torch.optim.AdamW):
            yield inner["state"]


def _clean_saved(optimizer, state: dict[Any, Any]) -> None:
    """Move the step counts of plain optimizers to the host: Megatron pickles them for all ranks, each of which would open rank
    0's device. Of distributed optimizers the first data-parallel rank saves the state for all, and the others have None in
    its place: Megatron would warn at each checkpoint that their state has a key more than rank 0's."""
    for of_part in _plain_states(optimizer, state):
        if isinstance(step := of_part.get("common_step"), torch.Tensor):
            of_part["common_step"] = step.cpu()
    for _, part_state in _states_of_parts(optimizer, state):
        if "param_state" in part_state and part_state["param_state"] is None:
            del part_state["param_state"]


def _restore_missing_step(optimizer, state: dict[Any, Any], steps: int) -> None:
    """Give plain optimizers the step count that torch's AdamW needs. It is missing if the state was saved
    before the first step, or by a rank 0 without experts."""
    for of_part in _plain_states(optimizer, state):
        of_part.setdefault("common_step", torch.tensor(float(steps)))


def save(
    folder: Path,
    *,
    chunks: Sequence[MegatronModule],
    optimizer,
    scheduler,
    extra: Mapping[str, Any],
    adapters: Mapping[str, Any] | None = None,
) -> None:
    """Write ``folder`` (``files.step_folder(root, step)``), replacing an older one of that name. A
    collective.

    ``chunks`` are this rank's parts of the model, as for ``load``. ``extra`` is any JSON value. ``adapters`` names the
    model that the chunks' adapters belong to (``base_model.describe``); None for chunks without adapters. Raises
    DiskFull on every rank if any finds no space, CheckpointError if a write fails otherwise; earlier
    checkpoints stay valid, and no partial one remains. Raises ValueError for ``extra`` that is not JSON.
    """
    folder = Path(folder)
    try:
        extra_text = json.dumps(dict(extra), allow_nan=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra of a checkpoint must be JSON: {error}") from error
    temporary = folder.parent / f".{folder.name}.partial"

    def prepare(state: dict[str, Any]) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # and empty, or Megatron would warn of a damaged checkpoint
        _require_space(temporary, state)

    def write() -> dict[str, FileRecord]:
        # Megatron's own queue is a process, for saves in the background, which lives as long as the run. This save
        # is over when it returns.
        filesystem_async._results_queue = queue.Queue()
        # Each rank hashes its own writers' files while the writers wait for the disk.
        own_files = f"__{dist.get_rank()}_*.distcp"
        with hashed_while_written(temporary, own_files) as records, safe_writers():
            dist_checkpointing.save(state, str(temporary), content_metadata=dict(CONTENT))
        return records

    def finish(hashed: Mapping[str, FileRecord]) -> None:
        (temporary / EXTRA).write_text(extra_text)
        if adapters is not None:
            (temporary / base_model.ADAPTERS).write_text(json.dumps(adapters, indent=2))
        write_manifest(temporary, world_size=dist.get_world_size(), hashed=hashed)
        replace_folder(temporary, folder)

    try:
        state = _run_on_all(lambda: _checkpoint_state(chunks, optimizer, scheduler, is_loading=False))
        _run_on_all(lambda: prepare(state), only_rank_0=True)
        records = dict(ChainMap(*from_all_ranks(_run_on_all(write))))
        _run_on_all(lambda: finish(records), only_rank_0=True)
    except CheckpointError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise type(error)(
            f"could not write checkpoint {folder}: {error}; earlier checkpoints are unchanged"
        ) from error


def verified(folder: Path) -> WholeCheckpoint:
    """The checkpoint in ``folder``, after the ranks, each a share, have compared every bit of it with its
    manifest. A collective.

    Raises on every rank DamagedCheckpoint, which names the files, or CheckpointError for a folder that cannot
    be read or has another format.
    """

    def check_share() -> tuple[Manifest | None, list[str]]:
        try:
            manifest = read_again(lambda: read_manifest(folder))
        except DamagedManifest as error:
            return None, [str(error)]
        return manifest, [*damage(folder, manifest, share(manifest, dist.get_rank(), dist.get_world_size()))]

    folder = Path(folder)
    try:
        manifest, rank_damages = _run_on_all(check_share)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    damages = sorted(set().union(*from_all_ranks(rank_damages)))
    if damages or manifest is None:
        raise DamagedCheckpoint(f"{folder} is damaged: {'; '.join(damages)}")
    return WholeCheckpoint(folder, manifest)


def newest_whole(newest_first: Iterable[Sequence[Path]]) -> tuple[list[WholeCheckpoint], dict[Path, str]]:
    """The first entry whose checkpoints are all whole, and the damage of the entries before it, by their first
    folders. A collective.

    An entry has the checkpoints of one step: a policy's, or a policy's and a critic's. Raises CheckpointError
    where none is whole.
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
    checkpoint: Path | WholeCheckpoint,
    *,
    chunks: Sequence[MegatronModule],
    optimizer,
    scheduler,
    adapters: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Restore the state that ``save`` wrote, in any layout, and return its ``extra``. A collective.

    A folder is verified first. The running config decides learning rates, schedule and AdamW's betas and eps; the
    number of steps comes from the checkpoint. Random state is restored if the number of processes is the same. Raises
    CheckpointError on every rank if for any rank the checkpoint is damaged (DamagedCheckpoint), holds
    another model, adapters of another model or of other settings (``adapters``, as in ``save``), or anything that could
    run code.
    """
    whole = checkpoint if isinstance(checkpoint, WholeCheckpoint) else verified(checkpoint)
    folder = whole.folder
    same_processes = whole.manifest.world_size == dist.get_world_size()

    def restore() -> dict[str, Any]:
        settings = [{name: group[name] for name in OF_CONFIG} for group in optimizer.param_groups]
        state = _checkpoint_state(chunks, optimizer, scheduler, is_loading=True, with_random=same_processes)
        with pickles.restricted():
            loaded = cast("dict[str, Any]", dist_checkpointing.load(state, str(folder)))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{i}"])
        _restore_missing_step(optimizer, loaded["optimizer"], loaded["scheduler"]["num_steps"])
        optimizer.load_state_dict(loaded["optimizer"])
        for group, of_config in zip(optimizer.param_groups, settings, strict=True):
            group.update(of_config)
        for part in optimizer_parts(optimizer):
            _complete_steps(part)
        scheduler.num_steps = 0
        scheduler.load_state_dict(loaded["scheduler"])
        if same_processes:
            _set_random_state(loaded["random"])
        return json.loads(text_of(folder / EXTRA))

    def check_base() -> None:
        if (reason := base_model.why_not(folder, adapters)) is not None:
            raise CheckpointError(reason)

    try:
        _run_on_all(check_base, only_rank_0=True)
        return _run_on_all(restore)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be loaded into this run: {error}") from error


def _checkpoint_state(
    chunks: Sequence[MegatronModule], optimizer, scheduler, *, is_loading: bool, with_random: bool = True
) -> dict[str, Any]:
    _count_without_parameters(optimizer, scheduler.num_steps)
    dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**CONTENT, "dp_cp_group": dp_cp_group}
    # Tensors are found by their names in the whole model, not by their places here, so that any layout can load.
    model_state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    state = {
        **model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
        "scheduler": scheduler.state_dict(),
    }
    if not is_loading:
        _clean_saved(optimizer, state["optimizer"])
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
    """Check before a write that rank 0's own share fits; one rank of each other stage or slice holds as much."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in _find_tensors(state))
    free = shutil.disk_usage(folder).free
    if needed > free:
        text = (
            f"{NO_SPACE[0]}: the disk has {free / 1e9:.2f} GB free, at least {needed / 1e9:.2f} GB are needed"
        )
        raise OSError(errno.ENOSPC, text)


def _find_tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _find_tensors(item)
    elif isinstance(data := getattr(state, "data", state), Tensor):
        yield data


def _error_text(error: BaseException) -> str:
    """The error in one line; of torch's CheckpointException, which has a traceback per rank, the causes."""
    causes = error.failures.values() if isinstance(error, CheckpointException) else ()
    if isinstance(error, pickle.UnpicklingError):
        return pickles.reason(error)
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return "; ".join(_error_text(cause[0]) for cause in causes) or text


def _run_on_all(action: Callable[[], T], *, only_rank_0: bool = False) -> T:
    """This rank's result of ``action``, which runs on every rank, or only on rank 0 (others have none). Raises CheckpointError on
    all ranks if it failed on any, DiskFull if one of them found no space."""
    result, failure = None, None
    if not only_rank_0 or dist.get_rank() == 0:
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # any error must reach the waiting ranks
            failure = _error_text(error)
    failures = enumerate(from_all_ranks(failure))
    texts = [f"rank {rank}: {text}" for rank, text in failures if text is not None]
    for text in texts:
        if tells_of_no_space(text):
            raise DiskFull(text)
    if texts:
        raise CheckpointError(texts[0])
    return cast("T", result)
