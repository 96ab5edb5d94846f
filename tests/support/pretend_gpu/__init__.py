"""A pretended GPU, for tests of the learner without a GPU.

Its tensors lie in the host's memory, and the CPU computes with them. But for torch it is a separate device. As on CUDA, it
refuses its tensors under numpy, and next to tensors of the CPU in an operation or a collective (``device.cpp``).
The product computes on it as on a GPU (``platform.is_gpu``). What it does not show: CUDA's kernels, streams and NCCL.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import types
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

VARIABLE = "TANDEM_PRETENDED_GPU"
"""The built device, in the environment of processes that should learn on it."""
NAME = "pretended"
SOURCE = Path(__file__).with_name("device.cpp")


def can_be_built() -> bool:
    return shutil.which("g++") is not None and Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def built_in(folder: Path) -> Path:
    return folder / "pretended_device.so"


def build(folder: Path) -> Path | None:
    """Compile the device into ``folder``, half a minute of one core; None if that is not possible."""
    if not can_be_built():
        return None
    library, of_torch = built_in(folder), Path(torch.__file__).parent
    includes = [
        of_torch / "include",
        of_torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    subprocess.run(
        [
            "g++", "-std=c++20", "-O0", "-fPIC", "-shared", *(f"-isystem{path}" for path in includes), str(SOURCE), "-o", str(library),
            f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ],
        check=True,
    )  # fmt: skip
    return library


def use() -> None:
    """Make it this process's device, if ``VARIABLE`` names it. Call this before engines are made."""
    if VARIABLE not in os.environ:
        return
    device = _loaded(Path(os.environ[VARIABLE]))
    from parallel.megatron import cpu, platform
    from parallel.planning.memory import BUCKET_BYTES, NUM_BUFFERS
    from parallel.weights import transfer

    cpu.DEVICE = torch.device(NAME, 0)
    platform._group_backends = lambda: f"cpu:gloo,{NAME}:{NAME}"
    for by_device in (BUCKET_BYTES, NUM_BUFFERS, transfer.ALONE_BYTES):
        by_device[NAME] = by_device["cuda"]
    torch.nn.Module._apply = _keeping_attributes(torch.nn.Module._apply)
    # The servers of these tests compute on the CPU, and receive by gloo.
    broadcast = transfer.WeightBroadcaster._broadcast
    transfer.WeightBroadcaster._broadcast = lambda self, flat: broadcast(self, device.on_cpu(flat))


def _keeping_attributes(apply):
    """A parameter that moves to CUDA stays the same object. One that moves to such a device becomes another."""

    def wrapped(module, function, recurse=True):
        before = dict(module._parameters)
        apply(module, function, recurse)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter is not before[name]:
                vars(parameter).update(vars(before[name]))
        return module

    return wrapped


def operations() -> int:
    """How many this process has done on the device; 0 without it."""
    return _loaded(Path(os.environ[VARIABLE])).operations() if VARIABLE in os.environ else 0


@cache
def _loaded(library: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pretended_device", library)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(
        NAME,
        lambda store, rank, size, timeout: device.Group(dist.ProcessGroupGloo(store, rank, size, timeout)),
        devices=[NAME],
    )
    return device


def _module() -> types.ModuleType:
    """What torch asks of ``torch.cuda``."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_device, module.device_count = lambda: 0, lambda: 1
    module.set_device = module.synchronize = module.manual_seed_all = lambda *unused: None
    module.device = lambda unused: contextlib.nullcontext()
    module.get_rng_state = lambda *unused: torch.get_rng_state()
    module.set_rng_state = lambda state, *unused: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float32, torch.bfloat16, torch.float16]
    return module
