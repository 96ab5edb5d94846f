"""Unpickling of checkpoints, restricted to the classes of Tandem's checkpoints: a pickle can run any code.

.metadata       torch reads it with ``pickle.load``, here restricted to the classes below and dtypes
*.distcp        torch reads objects in it with ``torch.load(weights_only=False)``, which is refused here
common.pt       ``torch.load``, which is safe unless the environment says otherwise
"""

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

CAREFUL, CARELESS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Environment variables that override the arguments of ``torch.load``. Torch refuses both at once."""
METADATA_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}  # fmt: skip


class MetadataUnpickler(pickle.Unpickler):
    """Raises pickle.UnpicklingError for a class that is not part of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata: GLOBAL {module}.{name} is no part of a checkpoint")


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """Inside, reading a checkpoint runs none of its code: other pickles raise pickle.UnpicklingError (see
    ``reason``)."""
    refused: list[pickle.UnpicklingError] = []

    def load(file: IO[bytes]) -> Any:
        try:
            return MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            refused.append(error)
            raise

    before = {name: os.environ.pop(name, None) for name in (CAREFUL, CARELESS)}
    os.environ[CAREFUL] = "1"
    # Torch reads .metadata with the module's global ``pickle``, which has no other hook.
    filesystem.pickle = SimpleNamespace(load=load, dump=pickle.dump)  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except (Exception, CheckpointException) as error:
        if refused:  # torch then looks for metadata elsewhere, and only reports that there is none
            raise refused[0] from error
        raise
    finally:
        filesystem.pickle = pickle  # pyright: ignore[reportPrivateImportUsage]
        del os.environ[CAREFUL]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def reason(error: pickle.UnpicklingError) -> str:
    """The error in one line; torch's own message advises to unpickle the file all the same."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    content = f"the object {match[1]}" if match else "a pickle that cannot be read"
    return f"it holds {content}, which is no part of a Tandem checkpoint and could run code; nothing of it was run. Do not use this folder"
