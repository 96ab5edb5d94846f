"""How Megatron writes a checkpoint, made safe: threads of this process write a rank's files, and errors of one rank
leave no other rank waiting."""

import contextlib
import io
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

WRITTEN_BY_RANK_0 = ((FileSystemWriterAsync, "finish"), (serialization, "save_config"))
"""What Megatron lets rank 0 write, beside ``common.pt``, while the other ranks continue to its next collective."""


@contextlib.contextmanager
def safe_writers() -> Iterator[None]:
    """Inside, a save of Megatron forks no process, and an error of a file that rank 0 alone writes does not interrupt it:
    the other ranks are in its collectives, and would wait for rank 0. That error is raised at the end. A rank without host
    memory for a copy of its GPU's tensors fails as it does where it cannot write them: together with all others.

    Megatron forks a process for each file of a rank. A fork of a process with threads copies locks that no thread of the
    copy will ever release: in CPython 3.11 that of the list of threads, which hung a writer before its first line, and
    with it all ranks. Threads write as fast, since the interpreter's lock is free while bytes are copied and stored.
    """
    errors: list[Exception] = []
    copied = _copied_or_error(FileSystemWriterAsync.preload_tensors)
    stand_ins: list[tuple[Any, str, Any]] = [
        *((owner, name, _keeping(getattr(owner, name), errors)) for owner, name in WRITTEN_BY_RANK_0),
        (TorchCommonSaveStrategy, "save_common", _keeping(_save_common, errors)),
        (FileSystemWriterAsync, "preload_tensors", staticmethod(copied)),
        (FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(_write_by_threads)),
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, stand_in in stand_ins:
            patches.enter_context(unittest.mock.patch.object(owner, name, stand_in))
        yield
    if errors:
        raise errors[0]


def _save_common(strategy: TorchCommonSaveStrategy, state: Any, folder: str) -> None:
    """In place of Megatron's, which gives torch the path: torch's own stream loses the reason of a failed write."""
    if dist.get_rank() == 0:
        content = io.BytesIO()
        torch.save(state, content)
        Path(folder, COMMON_STATE_FNAME).write_bytes(content.getbuffer())


def _keeping(write: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            errors.append(error)

    return call


def _copied_or_error(copy: Callable[..., list]) -> Callable[..., Sequence[Any] | Exception]:
    """What the writers are then called with."""

    def call(*args: Any) -> Sequence[Any] | Exception:
        try:
            return copy(*args)
        except Exception as error:
            return error

    return call


def _write_by_threads(
    transforms: list, use_msc: bool, rank: int, files: Sequence[Any] | Exception, outcome: Queue
) -> None:
    """In place of ``write_preloaded_data_multiproc``: ``outcome`` gets the results of each file, by its number, or the
    error of one that could not be written."""
    if isinstance(files, Exception):
        outcome.put(files)
        return
    results, unfinished = Queue(), Queue()

    def write(number: int, file: Any) -> None:
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, file, results, unfinished, use_fsync=True, use_msc=use_msc
        )

    with ThreadPoolExecutor(len(files), thread_name_prefix="checkpoint-writer") as pool:
        list(pool.map(write, range(len(files)), files))
    by_number = dict(results.get_nowait() for _ in files)
    failed = next((result for result in by_number.values() if isinstance(result, Exception)), None)
    outcome.put(by_number if failed is None else _first_error(failed))


def _first_error(error: BaseException) -> BaseException:
    """The error that caused this one: torch closes its archive after a failed write, and reports only the
    failure to close."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
