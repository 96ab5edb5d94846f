"""Command line and environment of one SGLang server.

CUDA_VISIBLE_DEVICES is inherited, and a share (``share.py``) names some of its GPUs.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from rollout.run_key import RunKey
from rollout.servers.ports import LOOPBACK, Ports
from rollout.servers.share import ServerShare

INITIAL_WEIGHT_VERSION = 0
"""Version of the weights that servers load from disk."""
NO_WEIGHT_VERSION = -1
"""Version of a restarted server until the learner sends weights. It loads those on disk, which may be older than the run's."""
REUSED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
"""For glibc on CPU: blocks of up to 32 MiB (its maximum), such as received weights, reuse freed memory. By
default each block is new pages, which cost half the time of receiving into them."""
KEEP_IDLE_S = 120
"""Servers keep idle connections much longer than clients reuse them (``REUSE_S``): if a server closed a connection
while the network is cut, the next request would be lost."""
STAND_INS = Path(__file__).parents[1] / "cpu_stand_ins"
PLUGIN = Path(__file__).parents[1] / "sglang_plugin"
NUMERICS = Path(__file__).parents[2]
"""The folder of the package ``numerics``, which the plugin imports."""

ATTENTION_OF_FLOAT32 = "triton"
"""On GPUs: SGLang's defaults there, fa3 and flashinfer, compute only in 16-bit types."""
OTHER_MODEL = re.compile("model-impl|json-model-override-args|speculative-")
"""Flags with which a server may load the code of another model than its config.json names."""

Flags = dict[str, str | int | float | bool | None]
"""Flags of a server's command line. True: the flag without a value; False: no flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Settings that the servers of one node share."""

    config: RunConfig
    cuda: bool
    key: RunKey
    """Key that requests must prove; SGLang reads it from its file."""
    host: str = LOOPBACK
    """Address of this node, at which the servers listen."""


def server_command(
    spec: ServerSpec,
    share: ServerShare,
    ports: Ports,
    meeting_point: str | None = None,
    *,
    weight_version: int = INITIAL_WEIGHT_VERSION,
) -> list[str]:
    """The command line of one replica, or of one node's share of it.

    Args:
        meeting_point: HOST:PORT on the first node of a replica that takes several nodes.
        weight_version: of the weights on disk.
    """
    config = spec.config.rollout
    flags: Flags = {
        "model-path": str(spec.config.model.path.resolve()),
        "host": spec.host,
        "port": ports.http,
        "nccl-port": ports.nccl,
        "dtype": config.dtype,
        "tp-size": config.tp,
        "random-seed": (spec.config.seed + share.replica) % 2**31,  # replicas must draw different samples
        "weight-version": str(weight_version),
        "watchdog-timeout": config.hang_timeout_s,
        "skip-tokenizer-init": not config.stop,  # ids in, ids out; only a stop text needs texts
        "sleep-on-idle": True,  # otherwise an idle server keeps a core busy
        "log-level-http": "warning",
        "enable-fp32-lm-head": spec.config.model.fp32_lm_head,
        "enable-return-routed-experts": spec.config.learner.routing == "rollout",
    }
    if share.num_nodes > 1:
        flags |= {"nnodes": share.num_nodes, "node-rank": share.node_rank, "dist-init-addr": meeting_point}
    if config.quantization == "fp8":
        # Without this loader SGLang quantises only at the start, and refuses the learner's weights.
        flags |= {"quantization": "fp8", "load-format": "flash_rl"}
    if config.max_total_tokens is not None:
        flags["max-total-tokens"] = config.max_total_tokens
    flags |= _cuda_flags(spec, share) if spec.cuda else _cpu_flags(spec)
    flags |= config.server_flags
    flags["config"] = str(spec.key.file)
    has_launcher = config.sglang_plugin and not spec.cuda
    command = [sys.executable, "-m", "tandem_launch_server" if has_launcher else "sglang.launch_server"]
    for name, value in flags.items():
        if value is not False:
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return command


def _cuda_flags(spec: ServerSpec, share: ServerShare) -> Flags:
    flags: Flags = {"base-gpu-id": share.first_gpu}
    if spec.config.learner.routing == "rollout":
        # SGLang's default kernels on Blackwell route inside the kernel, where experts are not captured: all ids are 0.
        flags["moe-runner-backend"] = "triton"
    if has_recurrent_layers(spec.config.model.path):
        # Otherwise a shared expert counts as one of the experts that are captured.
        flags["disable-shared-experts-fusion"] = True
    if spec.config.launch.takes_turns:  # the server then lends its GPUs' memory on request
        flags["enable-memory-saver"] = True
    if spec.config.rollout.dtype == "float32":
        flags["attention-backend"] = ATTENTION_OF_FLOAT32
    return flags


def _cpu_flags(spec: ServerSpec) -> Flags:
    # Nothing is compiled on first use, and wait_healthy generates a token anyway.
    flags: Flags = {"device": "cpu", "skip-server-warmup": True}
    if has_recurrent_layers(spec.config.model.path):
        # SGLang keeps states for a prefix cache only on GPUs, and takes half of the memory for states of responses.
        flags |= {"disable-radix-cache": True, "max-mamba-cache-size": spec.config.rollout.max_concurrency}
    return flags


def server_environment(spec: ServerSpec, share: ServerShare, place: int) -> dict[str, str]:
    """The environment of one replica: this process's, offline, and without CUDA for the CPU engine. place:
    index of the share among the equally large ones on this node."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_IDLE_S),
        # A router asks /health before it uses a server. By default this samples a token, which a paused
        # server never does.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # By default the last inputs of a convolution, part of a recurrent layer's state, are kept in bfloat16.
        "SGLANG_MAMBA_CONV_DTYPE": spec.config.rollout.dtype,
    }
    # By default this cache is in TMPDIR, which belongs to one server and is removed with it.
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)
    # By default a server imports the code of all models that SGLang knows, which takes more than a second.
    if not any(map(OTHER_MODEL.match, spec.config.rollout.server_flags)):
        others = files_of_other_models(spec.config.model.path)
        environment.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
    ours = [] if spec.cuda else [str(STAND_INS)]
    if spec.config.rollout.sglang_plugin:
        ours += [str(PLUGIN), str(NUMERICS)]
    if spec.config.numerics_pieces is not None:
        environment["TANDEM_NUMERICS"] = f"aligned:{spec.config.numerics_pieces}"
    paths = [*ours, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if not spec.cuda:
        return environment | _cpu_environment(spec, share, place)
    if spec.config.rollout.dtype == "float32":
        # By default Triton rounds factors of products to TF32 (10 bits of mantissa): attention was 1.6e-3 nats off.
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    return environment


def _cpu_environment(spec: ServerSpec, share: ServerShare, place: int) -> dict[str, str]:
    threads = spec.config.launch.threads_per_process
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), **REUSED_MEMORY}
    compiles = any("torch-compile" in flag for flag in spec.config.rollout.server_flags)
    if not compiles and "TORCHDYNAMO_DISABLE" not in os.environ:
        # By default decorators import torch's compiler, which takes more than a second, and nothing is compiled.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if share.num_ranks * share.num_nodes > 1:
        cpus = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_binding(
            cpus, place=place, num_ranks=share.num_ranks, threads=threads
        )
    return environment


def cpu_binding(cpus: list[int], *, place: int, num_ranks: int, threads: int) -> str:
    """Cores of each TP rank of a replica as SGLang reads them, ``0,1|2,3``. Ranks share cores if there are too
    few."""
    ranks = range(place * num_ranks, (place + 1) * num_ranks)
    return "|".join(
        ",".join(str(cpus[(rank * threads + i) % len(cpus)]) for i in range(min(threads, len(cpus))))
        for rank in ranks
    )


def sglang_sources() -> Path:
    """The folder ``sglang/srt``; the current folder, without SGLang's files, if SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent / "srt" if spec and spec.origin else Path()


def files_of_other_models(model: Path) -> list[str]:
    """Names of SGLang's model files, without the file that defines the architecture of ``model``. Files that this one
    imports are imported nevertheless. Empty if the architecture is not found."""
    try:
        architectures = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, LookupError, TypeError, ValueError):
        return []
    files = {file.stem: file for file in (sglang_sources() / "models").glob("*.py")}
    defined = [re.compile(rf"^class {re.escape(str(name))}\b", re.MULTILINE) for name in architectures or ()]
    ours = {
        name
        for name, file in files.items()
        if any(pattern.search(file.read_text(encoding="utf-8")) for pattern in defined)
    }
    return sorted(files.keys() - ours) if ours else []


def has_recurrent_layers(model: Path) -> bool:
    """Whether the folder's model has gated delta nets, whose recurrent state a server keeps for each request."""
    try:
        return "linear_num_value_heads" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
