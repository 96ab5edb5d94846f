"""The one file that tells CUDA from CPU: device, collective backend, kind of Megatron's layers, start and stop."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

# Repairs of megatron.core and, without CUDA, stand-ins; they must come before its first import.
import parallel.megatron.setup  # noqa: F401
from parallel.megatron import cpu, transformer_engine
from parallel.megatron.rank_store import STORE_VARIABLE
from parallel.planning.architecture import ROTATED_IN_FLOAT32


def has_cuda() -> bool:
    return torch.cuda.is_available()


def is_gpu() -> bool:
    """Whether the device is a GPU, or stands for one (``parallel/simulation``): what a rank computes and keeps there
    follows from this, and from ``has_cuda`` what only a real one can do."""
    return has_cuda() or cpu.DEVICE.type != "cpu"


def device() -> torch.device:
    """This process's device: the GPU of its LOCAL_RANK, the simulated one, or the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda() else cpu.DEVICE


def collective_backend() -> str:
    """The backend for tensors on this process's device, such as the weights for the servers."""
    return "nccl" if has_cuda() else "gloo"


def _group_backends() -> str:
    """Backends of the default group and all groups made from it: gloo for CPU tensors and pickled objects, NCCL
    for a GPU."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether layers of a model in ``dtype`` are Transformer Engine's (fused norms, flash attention), not Megatron's local
    ones and ours. In float32 they are ours: none of its fast kernels takes float32, and the one that does pads all
    sequences to the longest and holds a score for each pair of tokens."""
    return has_cuda() and dtype != torch.float32 and transformer_engine.ABSENCE is None


def attention_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of our own attention: on CPU float32 even for a bfloat16 model, since torch's backward pass of
    attention is several times slower there in bfloat16, and less exact."""
    return model_dtype if is_gpu() else torch.float32


def rotary_dtype(model_dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """The dtype of rotary tables and of their products with heads of this size: the servers' (``ROTATED_IN_FLOAT32``)."""
    return torch.float32 if is_gpu() and head_dim in ROTATED_IN_FLOAT32 else model_dtype


def return_free_memory() -> None:
    """Give the device memory that torch caches back to the device, for other processes."""
    if has_cuda():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait until the device has finished; on CPU work is done when a call returns."""
    if has_cuda():
        torch.cuda.synchronize()


@contextmanager
def side_stream(place: torch.device) -> Iterator[None]:
    """Inside, the device works on a separate stream: after earlier work, beside that of other threads, and
    done on leaving. On CPU nothing changes.
    """
    if place.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(place)
    stream.wait_stream(torch.cuda.current_stream(place))
    # Of each thread torch's current device is the first at its start, and leaving a stream opens a context on it.
    with torch.cuda.device(place), torch.cuda.stream(stream):
        yield
    stream.synchronize()


def init_distributed(timeout_s: float) -> None:
    """Join the process group of torchrun's environment, or form a group of one without such an environment.

    On one node the ranks meet in a file (``launch/roles/rendezvous.py``), on several at torchrun's
    MASTER_ADDR and MASTER_PORT. ``timeout_s`` seconds is the deadline of every collective. A second call does
    nothing. Raises ValueError for an incomplete environment.
    """
    if dist.is_initialized():
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing and len(missing) < len(names) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"environment variables {missing} are missing beside WORLD_SIZE={os.environ['WORLD_SIZE']}; start with torchrun"
        )
    if has_cuda():
        torch.cuda.set_device(device())
    meeting: dict[str, Any] = {}
    if missing:
        meeting = {"store": HashStore(), "rank": 0, "world_size": 1}
    elif STORE_VARIABLE in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = {"store": FileStore(os.environ[STORE_VARIABLE], size), "rank": rank, "world_size": size}
    dist.init_process_group(_group_backends(), timeout=timedelta(seconds=timeout_s), **meeting)
