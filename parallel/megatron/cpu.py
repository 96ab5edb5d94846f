"""CPU stand-ins for the parts of ``torch.cuda`` that Megatron-Core 0.16 calls on a machine without a GPU.

``parallel.megatron.setup`` imports this module before ``megatron.core``. With CUDA it changes nothing; without
CUDA it makes Megatron run on CPU tensors and gloo. Each stand-in gives the CPU's value (current device, random
generator) or does nothing (streams, synchronise).
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.utils._device

SIMULATED_VARIABLE = "TANDEM_SIMULATED"
"""Set if the device is simulated (``parallel/simulation``): Megatron then runs on torch's ``meta`` device."""
DEVICE = torch.device("meta" if SIMULATED_VARIABLE in os.environ else "cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "arange", "full", "empty_like")


class _NoStream:
    """A stream or event of a device that runs everything in order: every method returns the object itself."""

    def __init__(self, *unused, **unused_named):
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *unused, **unused_named: self


def _on_cpu(factory: Callable) -> Callable:
    """The factory function with ``device="cuda"`` meaning the CPU and without pinned memory."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = DEVICE
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _cuda_named_type(original: Callable) -> Callable:
    """``Tensor.type()`` with names of CUDA tensors for Megatron's optimizer, which compares these strings."""

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core.optimizer"):
            return f"torch.cuda.{result.rpartition('.')[-1]}"
        return result

    return wrapped


def _install_torch_stand_ins() -> None:
    # transformers reads the device of torch.tensor([]) under a device context. Torch caches that context's list
    # of factory functions at first use. The cache must hold the originals: otherwise rotary frequencies of
    # models that are loaded later stay uninitialised, silently.
    torch.utils._device._device_constructors()
    stream = _NoStream()
    torch.cuda.current_device = lambda: DEVICE
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *unused, **unused_named: None)
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *unused, **unused_named: stream
    torch.cuda.stream = lambda unused: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *unused, **unused_named: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *unused, **unused_named: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *unused, **unused_named: self.to(DEVICE)
    torch.nn.Module.cuda = lambda self, *unused, **unused_named: self.to(DEVICE)
    torch.Tensor.record_stream = lambda self, stream: None  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.type = _cuda_named_type(torch.Tensor.type)
    barrier = dist.barrier
    # gloo refuses device_ids
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def _install_megatron_stand_ins() -> None:
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *unused, **unused_named: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *unused, **unused_named: torch.set_rng_state(state)
    # It warns when a CUDA seed moves the CPU generator; here the two generators are one.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _counts_on_host


def _counts_on_host(counts, as_numpy: bool = False, record_stream: bool = False):
    """Token counts as numpy, since collectives take no tensors as sizes. Megatron converts them only as it
    copies them from a GPU."""
    if not torch.is_tensor(counts):
        return counts
    return counts.cpu().numpy() if as_numpy else counts.cpu()


if not torch.cuda.is_available():
    # Megatron compiles small functions as it is imported; on CPU that costs start-up and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _install_torch_stand_ins()
    _install_megatron_stand_ins()
