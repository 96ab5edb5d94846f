"""Megatron's and torch's checkpoints hold pickles, which can run any code: here, only what a checkpoint of
Tandem is made of is unpickled.

.metadata       torch reads it with ``pickle.load``: the classes below and dtypes, nothing else
*.distcp        torch reads objects in it with ``torch.load(weights_only=False)``; it is told to refuse that
common.pt       ``torch.load``, which is careful unless the environment says otherwise
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
"""In the environment; torch heeds them whatever the caller of ``torch.load`` asks for. Torch refuses both at
once."""
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
    """Raises pickle.UnpicklingError at a name that is no part of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if name in METADATA_CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata: GLOBAL {module}.{name} is no part of a checkpoint")


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """Inside, reading a checkpoint runs none of its code: a pickle of anything else is a
    pickle.UnpicklingError (see ``reason``)."""
    refused: list[pickle.UnpicklingError] = []

    def load(file: IO[bytes]) -> Any:
        try:
            return MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            refused.append(error)
            raise

    before = {name: os.environ.pop(name, None) for name in (CAREFUL, CARELESS)}
    os.environ[CAREFUL] = "1"
    # Torch gives no other way to read .metadata; the module's own name for pickle is looked up at each call.
    filesystem.pickle = SimpleNamespace(load=load, dump=pickle.dump)  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except (Exception, CheckpointException) as error:
        if refused:  # torch looks for metadata elsewhere then, and says only that there is none
            raise refused[0] from error
        raise
    finally:
        filesystem.pickle = pickle  # pyright: ignore[reportPrivateImportUsage]
        del os.environ[CAREFUL]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def reason(error: pickle.UnpicklingError) -> str:
    """In one line; torch's own message advises to unpickle the file all the same."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    what = f"the object {found[1]}" if found else "a pickle that cannot be read"
    return f"it holds {what}, which no checkpoint of Tandem holds and which could run code; nothing of it was run. Do not use this folder"
