"""What one node can find out by itself before a first job: versions, GPUs, driver, address, limits. Every
problem comes with a fix.

``tandem check-cluster`` prints these, then those of ``between_nodes.py``.
"""

import importlib.metadata
import json
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from configs.schema import RunConfig, SftConfig
from configs.schema.launch import NodesConfig
from launch.checks.device_memory import ask_gpus
from launch.processes.addresses import own_address
from launch.processes.placement import gpus_of_node

GIB = 2**30
PINNED = ("torch", "sglang", "megatron-core", "transformers", "pyzmq")
OPEN_FILES = 4096
BUSY_GPU_MIB = 1024
INFINIBAND = Path("/dev/infiniband")
SMALLEST_DRIVER = {"12": 525, "13": 580}
"""Of the NVIDIA driver, by CUDA's major version (CUDA Toolkit release notes, minor version compatibility)."""


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.check:<12} {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(check: str, text: str) -> Finding:
    return Finding(level=Level.OK, check=check, text=text)


def warn(check: str, text: str, fix: str) -> Finding:
    return Finding(level=Level.WARN, check=check, text=text, fix=fix)


def fail(check: str, text: str, fix: str = "") -> Finding:
    return Finding(level=Level.FAIL, check=check, text=text, fix=fix)


def checks_of_node(nodes: NodesConfig | None, config: RunConfig | SftConfig | None) -> Iterator[Finding]:
    """What one node can tell by itself, of any config or of this one. ``nodes``: its own, or where several
    nodes are checked some."""
    yield _versions()
    yield from _gpus(config)
    yield _address(nodes)
    yield from _environment()
    yield from _limits()
    yield _shared_memory(nodes)
    if config is not None:
        yield _model(config.model.path)


def _versions() -> Finding:
    wanted = {}
    for file in ("cpu.txt", "cuda.txt"):
        lines = (Path(__file__).parents[1] / "requirements" / file).read_text().splitlines()
        for name, _, version in (line.partition("==") for line in lines):
            wanted.setdefault(name.lower(), version)
    found, wrong = [], []
    for name in PINNED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if name in ("sglang", "megatron-core") and version != wanted[name]:
            wrong.append(f"{name} is {version}, tested is {wanted[name]}")
    if wrong:
        return fail("versions", ", ".join(wrong), "run `bash launch/install.sh` on a node like this one")
    return ok("versions", ", ".join(found))


def _gpus(config: RunConfig | SftConfig | None) -> Iterator[Finding]:
    gpus = ask_gpus()
    wanted, asked_by = (0, "") if config is None else _gpus_wanted(config)
    if len(gpus) < wanted:
        look = "look at nvidia-smi, at CUDA_VISIBLE_DEVICES and at --gres of the job"
        if gpus or asked_by:
            yield fail("gpus", f"{len(gpus)} GPUs are visible, {asked_by or f'the run takes {wanted}'}", look)
        else:
            yield warn(
                "gpus",
                f"none is visible: a run here would be on CPU, where it could take {wanted} GPUs",
                f"if it should, {look}",
            )
        return
    if not gpus:
        yield ok("gpus", "none here and none asked for: everything runs on CPU")
        return
    yield ok("gpus", f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory']} MiB, driver {gpus[0]['driver']}")
    for index, gpu in enumerate(gpus):
        if int(gpu["used"]) > BUSY_GPU_MIB:
            yield warn(
                "gpus",
                f"GPU {index} has {gpu['used']} MiB in use before the run",
                "end what is left of earlier jobs (nvidia-smi names the processes)",
            )
    yield _driver(gpus[0]["driver"])


def _gpus_wanted(config: RunConfig | SftConfig) -> tuple[int, str]:
    """On this node, and the field that asks for them; "": none does, and a run without GPUs takes the CPU."""
    nodes, asked = config.launch.nodes, config.launch.slurm.gpus
    wanted = gpus_of_node(config.model_copy(update={"layout": config.layout.smallest()}))
    if nodes is not None:
        return wanted, f"launch.nodes.gpus_per_node={wanted}"
    return wanted, "" if asked is None else f"launch.slurm.gpus={asked}"


def _driver(driver: str) -> Finding:
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return fail(
            "driver",
            "GPUs are here, but torch is the build without CUDA",
            "remove .venv and run `bash launch/install.sh` on a node with GPUs",
        )
    needed = SMALLEST_DRIVER.get(cuda.split(".")[0])
    if needed is not None and int(driver.split(".")[0]) < needed:
        return fail(
            "driver",
            f"driver {driver} is too old for CUDA {cuda} of torch",
            f"ask for driver {needed} or newer",
        )
    return ok("driver", f"driver {driver} with CUDA {cuda} of torch")


def _address(nodes: NodesConfig | None) -> Finding:
    try:
        address = own_address(nodes)
    except ValueError as error:
        return fail("address", str(error))
    return ok("address", f"{socket.gethostname()} is {address} to the others")


def _environment() -> Iterator[Finding]:
    """Variables of collectives that a login script or an old job left behind."""
    interfaces = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        named = [
            name.lstrip("=")
            for name in os.environ.get(variable, "").split(",")
            if name and not name.startswith("^")
        ]
        if named and not any(here.startswith(name) for name in named for here in interfaces):
            yield fail(
                "environment",
                f"{variable}={os.environ[variable]} names no interface of this node ({', '.join(sorted(interfaces))})",
                "unset it, and set launch.nodes.interface if the choice matters",
            )
    infiniband = Path("/sys/class/infiniband")
    if os.environ.get("NCCL_IB_DISABLE") == "1" and infiniband.is_dir() and any(infiniband.iterdir()):
        yield warn(
            "environment",
            "NCCL_IB_DISABLE=1 on a node with InfiniBand",
            "unset it, or collectives go over TCP",
        )
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        yield warn("environment", "NCCL_P2P_DISABLE=1: GPUs of a node talk through its memory", "unset it")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        yield warn(
            "limits",
            f"{soft} open files are allowed (hard limit {hard})",
            f"`ulimit -n {OPEN_FILES}` in launch.slurm.setup",
        )
    else:
        yield ok("limits", f"{soft} open files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and INFINIBAND.exists():
        yield fail(
            "limits",
            f"{locked // 1024} KiB of memory may be locked, InfiniBand registers far more",
            "have the administrators set LimitMEMLOCK=infinity for slurmd",
        )


def _shared_memory(nodes: NodesConfig | None) -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    wanted = GIB * max(1 if nodes is None else nodes.gpus_per_node, 1)
    if free < wanted:
        return warn(
            "/dev/shm",
            f"{free / GIB:.1f} GiB are free, NCCL and SGLang want about {wanted // GIB}",
            "raise its size (containers: --shm-size)",
        )
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free")


def _model(path: Path) -> Finding:
    try:
        json.loads((path / "config.json").read_text())
        for file in path.glob("*.safetensors"):
            with file.open("rb") as weights:
                weights.read(8)
    except (OSError, ValueError, RecursionError) as error:
        return fail("model", f"{path}: {error}", "put the model where every node sees it at this path")
    return ok("model", f"{path} is readable")
