"""The GPUs of this machine, and the device of a run's ranks: here, or on the nodes for which the run is planned."""

import csv
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.schema import AnyConfig, RunConfig
from launch.processes.placement import gpus_of_node
from parallel.planning.memory import GIB, size_text
from parallel.planning.work import DeviceKind

NVIDIA_SMI = (
    "nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader,nounits"
)
NVIDIA_SMI_TIMEOUT_S = 30.0
ON_GPUS = ("model.dtype=bfloat16", "rollout.dtype=bfloat16")
"""Settings of the runs that Tandem itself configures: SGLang's attention on GPUs does not accept float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a rank."""

    kind: DeviceKind
    bytes: int | None
    """Memory of one GPU; without GPUs, of the whole machine, which all processes share. None: unknown here."""
    name: str
    host: str = "this machine"
    """The host of a run without ``launch.nodes``."""

    @property
    def text(self) -> str:
        return self.name if self.bytes is None else f"{size_text(self.bytes)} of {self.name}"


def device_of(config: AnyConfig, gpu_memory: float | None, *, in_job: bool = False) -> Device:
    """The device of the run's ranks.

    gpu_memory: GiB of each GPU of the machines that the run is planned for; None: it runs here, on
    ``launch.nodes``, or in a job. in_job: it runs on the nodes of a Slurm job: ``launch.nodes``, or else one.
    """
    host = "the job's node" if in_job else "this machine"
    if gpu_memory is not None:
        return Device(kind="cuda", bytes=int(gpu_memory * GIB), name="a GPU (--gpu-memory)", host=host)
    if isinstance(config, RunConfig) and (in_job or config.launch.nodes is not None):
        if gpus_of_node(config):
            name = "a GPU of the nodes, whose size is unknown here (give --gpu-memory GIB)"
            return Device(kind="cuda", bytes=None, name=name, host=host)
        return Device(kind="cpu", bytes=None, name="the nodes", host=host)
    if gpus_here():
        return Device(kind="cuda", bytes=_smallest_gpu(), name="a GPU here")
    return Device(kind="cpu", bytes=psutil.virtual_memory().total, name="this machine")


def gpus_here() -> int:
    """GPUs that this process may use; 0 means that everything runs on CPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # saves the seconds that importing torch takes
    from rollout.servers.fleet import visible_gpus

    return visible_gpus()


def ask_gpus() -> list[dict[str, str]]:
    """name, memory and used (MiB) and driver of each GPU, by nvidia-smi; empty if it does not answer."""
    names, command, limit_s = ("name", "memory", "used", "driver"), NVIDIA_SMI.split(), NVIDIA_SMI_TIMEOUT_S
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(answer.stdout.splitlines())
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]


def _smallest_gpu() -> int | None:
    """Bytes; None if nvidia-smi does not say."""
    try:
        return min(int(gpu["memory"]) for gpu in ask_gpus()) * 2**20
    except ValueError:
        return None
