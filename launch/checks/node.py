"""Checks one node before a first job: versions, GPUs, driver, address, limits. Every problem has a fix.

``tandem check-cluster`` prints these findings, then those of ``between_nodes.py``.
"""

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from configs.schema import AnyConfig
from configs.schema.launch import NodesConfig
from launch.checks.devices import ask_gpus
from launch.processes.addresses import own_address
from launch.processes.placement import gpus_of_node
from parallel.planning.memory import GIB

PINNED = ("torch", "sglang", "megatron-core", "transformers", "pyzmq")
OPEN_FILES = 4096
BUSY_GPU_MIB = 1024
INFINIBAND = Path("/dev/infiniband")
MANYLINUX = re.compile(r"^Tag: .*\bmanylinux_(\d+)_(\d+)_", re.MULTILINE)
"""glibc version in a wheel's tags. Older forms of the tag are for glibc 2.17 and before, which every system has."""
SMALLEST_DRIVER = {"12": 525, "13": 580}
"""Oldest NVIDIA driver by CUDA's major version (CUDA Toolkit release notes, minor version compatibility)."""


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    level: Level
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.check:<12} {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(check: str, text: str) -> NodeFinding:
    return NodeFinding(level=Level.OK, check=check, text=text)


def warn(check: str, text: str, fix: str) -> NodeFinding:
    return NodeFinding(level=Level.WARN, check=check, text=text, fix=fix)


def fail(check: str, text: str, fix: str = "") -> NodeFinding:
    return NodeFinding(level=Level.FAIL, check=check, text=text, fix=fix)


def checks_of_node(nodes: NodesConfig | None, config: AnyConfig | None) -> Iterator[NodeFinding]:
    """Findings about this node, for any config or for this one. ``nodes``: those of the config, or other ones if several nodes
    are checked."""
    yield _versions()
    yield _libc()
    yield from _gpus(config)
    yield _address(nodes)
    yield from _environment()
    yield from _limits()
    yield _shared_memory(nodes)
    if config is not None:
        yield _model(config.model.path)


def _versions() -> NodeFinding:
    tested: dict[str, str] = {}
    for file in ("cpu.txt", "cuda.lock"):
        lines = (Path(__file__).parents[1] / "requirements" / file).read_text().splitlines()
        for name, _, version in (line.partition("==") for line in lines):
            tested.setdefault(name.lower(), version)
    installed, wrong = [], []
    for name in PINNED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        installed.append(f"{name} {version}")
        if name in ("sglang", "megatron-core") and version != tested[name]:
            wrong.append(f"{name} is {version}, tested is {tested[name]}")
    if wrong:
        return fail("versions", ", ".join(wrong), "run `bash launch/install.sh` on a node like this one")
    return ok("versions", ", ".join(installed))


def _libc() -> NodeFinding:
    """This system's C library against the wheels of the environment, which another system may have installed."""
    name, version = platform.libc_ver()
    if name != "glibc":
        text = "this system has no glibc, for which wheels are built"
        return warn("libc", text, "use a container (launch/containers)")
    needed, package = max(_glibc_of_wheels(), default=((0, 0), ""))
    text = f"glibc {version}, {package} needs {needed[0]}.{needed[1]}"
    if tuple(map(int, version.split(".")[:2])) < needed:
        fix = "use a newer system (RHEL 9, Debian 12, Ubuntu 22.04) or a container (launch/containers)"
        return fail("libc", text, fix)
    return ok("libc", text)


def _glibc_of_wheels() -> Iterator[tuple[tuple[int, int], str]]:
    """((major, minor), package) of what is installed: the oldest glibc that its wheel is for (PEP 600)."""
    for package in importlib.metadata.distributions():
        tags = MANYLINUX.findall(package.read_text("WHEEL") or "")
        if tags:
            yield min((int(major), int(minor)) for major, minor in tags), package.name


def _gpus(config: AnyConfig | None) -> Iterator[NodeFinding]:
    gpus = ask_gpus()
    needed, field = (0, "") if config is None else _needed_gpus(config)
    if len(gpus) < needed:
        look = "look at nvidia-smi, at CUDA_VISIBLE_DEVICES and at --gres of the job"
        if gpus or field:
            yield fail("gpus", f"{len(gpus)} GPUs are visible, {field or f'the run takes {needed}'}", look)
        else:
            text = f"none is visible: a run here would be on CPU, where it could take {needed} GPUs"
            yield warn("gpus", text, f"if it should, {look}")
        return
    if not gpus:
        yield ok("gpus", "none here and none needed: everything runs on CPU")
        return
    yield ok("gpus", f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory']} MiB, driver {gpus[0]['driver']}")
    for index, gpu in enumerate(gpus):
        # A part of a divided GPU (MIG) has [N/A] here.
        if gpu["used"].isdecimal() and int(gpu["used"]) > BUSY_GPU_MIB:
            text = f"GPU {index} has {gpu['used']} MiB in use before the run"
            yield warn("gpus", text, "end what is left of earlier jobs (nvidia-smi names the processes)")
    yield _driver(gpus[0]["driver"])


def _needed_gpus(config: AnyConfig) -> tuple[int, str]:
    """(GPUs of this node, the field that requires them). The field is "" if a run without GPUs would use the CPU."""
    nodes, asked = config.launch.nodes, config.launch.slurm.gpus
    needed = gpus_of_node(config.model_copy(update={"layout": config.layout.smallest()}))
    if nodes is not None:
        return needed, f"launch.nodes.gpus_per_node={needed}"
    return needed, "" if asked is None else f"launch.slurm.gpus={asked}"


def _driver(driver: str) -> NodeFinding:
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        fix = "remove .venv and run `bash launch/install.sh` on a node with GPUs"
        return fail("driver", "this node has GPUs, but torch was built without CUDA", fix)
    needed = SMALLEST_DRIVER.get(cuda.split(".")[0])
    version = driver.split(".")[0]
    if needed is not None and version.isdecimal() and int(version) < needed:
        text = f"driver {driver} is too old for CUDA {cuda} of torch"
        return fail("driver", text, f"ask for driver {needed} or newer")
    return ok("driver", f"driver {driver} with CUDA {cuda} of torch")


def _address(nodes: NodesConfig | None) -> NodeFinding:
    try:
        address = own_address(nodes)
    except ValueError as error:
        return fail("address", str(error))
    return ok("address", f"{socket.gethostname()} is {address} to the others")


def _environment() -> Iterator[NodeFinding]:
    """Variables of gloo and NCCL that a login script or an old job left behind."""
    interfaces = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        prefixes = [name.lstrip("=") for name in value.split(",") if name and not name.startswith("^")]
        if prefixes and not any(interface.startswith(tuple(prefixes)) for interface in interfaces):
            text = f"{variable}={value} names no interface of this node ({', '.join(sorted(interfaces))})"
            yield fail("environment", text, "unset it, and set launch.nodes.interface if the choice matters")
    infiniband = Path("/sys/class/infiniband")
    if os.environ.get("NCCL_IB_DISABLE") == "1" and infiniband.is_dir() and any(infiniband.iterdir()):
        text = "NCCL_IB_DISABLE=1 on a node with InfiniBand"
        yield warn("environment", text, "unset it, or collectives go over TCP")
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        text = "NCCL_P2P_DISABLE=1: GPUs of a node communicate through host memory"
        yield warn("environment", text, "unset it")


def _limits() -> Iterator[NodeFinding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which each role raises its own
    if hard < OPEN_FILES:
        text = f"{hard} open files are allowed (the hard limit)"
        yield warn("limits", text, f"have the administrators set LimitNOFILE={OPEN_FILES} or more")
    else:
        yield ok("limits", f"{hard} open files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and INFINIBAND.exists():
        text = f"{locked // 1024} KiB of memory may be locked, InfiniBand registers far more"
        yield fail("limits", text, "have the administrators set LimitMEMLOCK=infinity for slurmd")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        text = f"{space / GIB:.0f} GiB of addresses are allowed, and engines reserve more than they use"
        yield warn("limits", text, "lift it by `ulimit -v unlimited`, or a process may end without a message")


def _shared_memory(nodes: NodesConfig | None) -> NodeFinding:
    free = shutil.disk_usage("/dev/shm").free
    needed = GIB * max(1 if nodes is None else nodes.gpus_per_node, 1)
    if free < needed:
        text = f"{free / GIB:.1f} GiB are free, but NCCL and SGLang need about {needed // GIB}"
        return warn("/dev/shm", text, "raise its size (containers: --shm-size)")
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free")


def _model(path: Path) -> NodeFinding:
    try:
        json.loads((path / "config.json").read_text())
        for file in path.glob("*.safetensors"):
            with file.open("rb") as weights:
                weights.read(8)
    except (OSError, ValueError, RecursionError) as error:
        return fail("model", f"{path}: {error}", "put the model where every node sees it at this path")
    return ok("model", f"{path} is readable")
