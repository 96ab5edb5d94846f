"""Command line, environment and ports of one SGLang server.

CUDA_VISIBLE_DEVICES is inherited, and a share names some of its GPUs.
"""

import difflib
import importlib.util
import itertools
import json
import os
import random
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from configs.schema.model import ModelConfig
from configs.schema.rollout import RolloutConfig
from rollout.run_key import RunKey
from rollout.servers.share import ServerShare

LOOPBACK = "127.0.0.1"
INITIAL_WEIGHT_VERSION = 0
"""Version of the weights that servers load from disk."""
NO_WEIGHT_VERSION = -1
"""Version of a server that was started again, until the learner sends weights: the run may have left those on disk
behind."""
REUSED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
"""For glibc on CPU: blocks of up to 32 MiB (its maximum), such as received weights, reuse freed memory. By
default each block is new pages, which cost half the time of receiving into them."""
KEEP_IDLE_S = 120
"""Servers keep idle connections much longer than clients reuse them (``REUSE_S``): a connection that a server
closed during a cut of the network would lose the next request."""
LONGEST_FOLDER_OF_SOCKETS = 95
"""Bytes of a folder's path: Linux takes 107 for a socket's, of which SGLang's names have 12 (``/tmp`` and eight of
``tempfile``)."""
STAND_INS = Path(__file__).parents[1] / "cpu_stand_ins"
PLUGIN = Path(__file__).parents[1] / "sglang_plugin"
NUMERICS = Path(__file__).parents[2]
"""The folder of the package ``numerics``, which the plugin imports."""

ATTENTION_OF_FLOAT32 = "triton"
"""On GPUs: SGLang's defaults there, fa3 and flashinfer, take numbers of two bytes alone."""
OTHER_MODEL = re.compile("model-impl|json-model-override-args|speculative-")
"""Flags with which a server may load the code of another model than its config.json names."""

OWNED_FLAGS = frozenset(
    {
        "model",
        "model-path",
        "config",
        "device",
        "base-gpu-id",
        "gpu-id-step",
        "host",
        "port",
        "nccl-port",
        "dist-init-addr",
        "nccl-init-addr",
        "nnodes",
        "node-rank",
        "tp-size",
        "tensor-parallel-size",
        "pp-size",
        "pipeline-parallel-size",
        "dp-size",
        "data-parallel-size",
        "dtype",
        "max-total-tokens",
        "random-seed",
        "weight-version",
        "skip-tokenizer-init",
        "enable-fp32-lm-head",
        "quantization",
        "load-format",
        "rl-quant-profile",
        "enable-memory-saver",
        "enable-return-routed-experts",
        "api-key",
        "admin-api-key",
    }
)
"""Flags, with all their names, that the schema's fields or the design decide; ``server_args`` may not set
them."""
FP8_MODELS = ("qwen2", "qwen3")
"""Model types whose loader SGLang 0.5.23 lets load new weights into FP8 ones (its
``supports_quantized_rl_reload``)."""


Flags = dict[str, str | int | float | bool | None]
"""Of a server's command line. True: the flag alone; False: without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of one replica on one node. Its TP ranks meet at ``nccl``; its other channels are unix sockets."""

    http: int
    nccl: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Settings that the servers of one node share."""

    config: RunConfig
    cuda: bool
    host: str = LOOPBACK
    """Address of this node, at which the servers listen."""
    key: RunKey | None = None
    """Key that requests have to prove; SGLang reads it from its file. None, for tests alone: no proof."""


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
        "skip-tokenizer-init": True,  # ids in, ids out
        "sleep-on-idle": True,  # otherwise an idle server keeps a core busy
        "log-level-http": "warning",
        "enable-fp32-lm-head": spec.config.model.fp32_lm_head,
        "enable-return-routed-experts": spec.config.learner.routing == "rollout",
    }
    if share.num_nodes > 1:
        flags |= {"nnodes": share.num_nodes, "node-rank": share.node_rank, "dist-init-addr": meeting_point}
    if config.quantization == "fp8":
        # Without this loader SGLang quantises at start alone, and refuses the learner's weights.
        flags |= {"quantization": "fp8", "load-format": "flash_rl"}
    if config.max_total_tokens is not None:
        flags["max-total-tokens"] = config.max_total_tokens
    flags |= _cuda_flags(spec, share) if spec.cuda else _cpu_flags(spec)
    flags |= {name.replace("_", "-"): value for name, value in config.server_args.items()}
    if spec.key is not None:
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
        # The kernels that SGLang chooses on Blackwell route by themselves, past what captures experts: all ids are 0.
        flags["moe-runner-backend"] = "triton"
    if has_recurrent_layers(spec.config.model.path):
        # Otherwise a shared expert is one more among the experts that are captured.
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
        # SGLang keeps states for a prefix cache on GPUs alone, and takes half of the memory for those of responses.
        flags |= {"disable-radix-cache": True, "max-mamba-cache-size": spec.config.rollout.max_concurrency}
    return flags


def server_environment(spec: ServerSpec, share: ServerShare, place: int) -> dict[str, str]:
    """The environment of one replica: this process's, offline, and with the CPU engine without CUDA.

    Args:
        place: index of the share among the equally large ones on this node.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_IDLE_S),
        # A router asks /health before it takes a server. By default that samples a token, which a paused
        # server never gives.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # By default the last inputs of a convolution, part of a recurrent layer's state, are kept in bfloat16.
        "SGLANG_MAMBA_CONV_DTYPE": spec.config.rollout.dtype,
    }
    # By default it is in TMPDIR, which is the server's own and ends with it.
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)
    # By default a server imports the code of all models that SGLang knows, for more than a second.
    if not any(OTHER_MODEL.match(flag.replace("_", "-")) for flag in spec.config.rollout.server_args):
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
        # By default Triton rounds the factors of products to TF32, of 10 bits: attention was off by 1.6e-3 nats.
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    return environment


def _cpu_environment(spec: ServerSpec, share: ServerShare, place: int) -> dict[str, str]:
    threads = spec.config.launch.threads_per_process
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), **REUSED_MEMORY}
    compiles = any("torch-compile" in flag.replace("_", "-") for flag in spec.config.rollout.server_args)
    if not compiles and "TORCHDYNAMO_DISABLE" not in os.environ:
        # By default decorators import torch's compiler, for more than a second, and nothing is compiled.
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


def check_temporary_folder() -> None:
    """Raise ValueError where files in this machine's folder for temporary ones have names too long for sockets."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length > LONGEST_FOLDER_OF_SOCKETS:
        error = f"TMPDIR={folder} has {length} characters, and sockets of SGLang's processes lie in it, whose paths Linux limits"
        raise ValueError(f"{error}; set TMPDIR to a folder with at most {LONGEST_FOLDER_OF_SOCKETS}")


def choose_ports(replicas: Sequence[int], first_port: int | None, host: str = LOOPBACK) -> list[Ports]:
    """Ports of ``host`` for each replica i of this node: first_port + 2 i (HTTP) and the next one (ranks meet
    there), or free ones where ``first_port`` is None.

    Raises:
        ValueError: one of the given ports is taken or out of range, or too few are free.
    """
    if first_port is None:
        return _free_ports(len(replicas), host)
    chosen = [Ports(http=first_port + 2 * i, nccl=first_port + 2 * i + 1) for i in replicas]
    last = max(ports.nccl for ports in chosen)
    if last > 65535:
        raise ValueError(
            f"rollout.first_port={first_port} with {max(replicas) + 1} replicas needs ports up to {last}; choose a lower one"
        )
    for port in (port for ports in chosen for port in (ports.http, ports.nccl)):
        if not _is_free(host, port):
            raise ValueError(
                f"port {port} on {host} is taken by another process (rollout.first_port={first_port} needs {chosen[0].http} to {last}); "
                "choose another rollout.first_port, leave it out to take free ports, or end that process"
            )
    return chosen


def _free_ports(replicas: int, host: str) -> list[Ports]:
    """Free ports below the kernel's range for outgoing connections: those could take a port while its server
    still loads."""
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest_outgoing = 32768
    top = lowest_outgoing if lowest_outgoing > 4096 else 65536
    candidates = list(range(max(2048, top - 16384), top - 1, 2))
    random.SystemRandom().shuffle(candidates)
    free = (port for port in candidates if _is_free(host, port) and _is_free(host, port + 1))
    chosen = [Ports(http=port, nccl=port + 1) for port in itertools.islice(free, replicas)]
    if len(chosen) < replicas:
        raise ValueError(
            f"fewer than {2 * replicas} free ports between {candidates[0]} and {top} on {host}; set rollout.first_port"
        )
    return chosen


def _is_free(host: str, port: int) -> bool:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server can take a port in TIME_WAIT
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_server_args(config: RolloutConfig) -> None:
    """Refuse flags in ``server_args`` that other fields or the design decide.

    Raises:
        ValueError: a name has dashes in front, or is or abbreviates one of ``OWNED_FLAGS``.
    """
    for name in config.server_args:
        flag = name.replace("_", "-")
        # SGLang accepts the beginning of a flag for the flag.
        owned = next((owned for owned in sorted(OWNED_FLAGS) if owned.startswith(flag)), None)
        if flag.startswith("-") or owned:
            short = f": it is short for {owned}" if owned and owned != flag else ""
            raise ValueError(
                f"rollout.server_args: {name!r} cannot be set there{short}; write names without dashes in front, and set the model, ports, "
                "dtype, quantization, sizes and seed by their own config fields"
            )


def check_flags_exist(config: RolloutConfig) -> None:
    """Refuse flags in ``server_args`` that SGLang's sources do not declare by their full names.

    Raises:
        ValueError: SGLang has no such flag.
    """
    sglang_flags = flags_of_sglang() if config.server_args else ()
    for name in config.server_args:
        flag = name.replace("_", "-")
        if sglang_flags and flag.removeprefix("no-") not in sglang_flags:
            close = difflib.get_close_matches(flag, sglang_flags, n=1)
            listing = "`python -m sglang.launch_server --help` lists them"
            fix = f"did you mean {close[0]!r}?" if close else listing
            raise ValueError(f"rollout.server_args: SGLang has no flag {name!r}; {fix}")


def sglang_sources() -> Path:
    """The folder ``sglang/srt``; one without its files where SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent / "srt" if spec and spec.origin else Path()


def files_of_other_models(model: Path) -> list[str]:
    """SGLang's files of models, by their names, without the one that defines the architecture of ``model``. Files that
    this one imports are imported all the same. Empty where the architecture is not found."""
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
    """Whether the folder's model has gated delta nets, whose state a server keeps for each request."""
    try:
        return "linear_num_value_heads" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def flags_of_sglang() -> list[str]:
    """The flags that SGLang's sources declare, and a few settings without a flag; an import would take seconds.

    A flag is a field, ``model_path: A[...]``, or a text, ``"--model"``: an alias, or an argument by itself.
    Empty where SGLang is not installed, or its sources have another form.
    """
    home = sglang_sources()
    sources = (home / "arg_groups" / "fields").glob("*.py")
    fields = "".join(file.read_text(encoding="utf-8") for file in sources)
    if not fields:
        return []
    text = fields + (home / "server_args.py").read_text(encoding="utf-8")
    names = {*re.findall(r"^    (\w+): A\[", fields, re.MULTILINE), *re.findall(r'"--([\w-]+)"', text)}
    return sorted(name.replace("_", "-") for name in names)


def check_quantization(config: RolloutConfig, model_type: str) -> None:
    """Refuse FP8 for a model whose loader in SGLang cannot take new weights. Raises ValueError."""
    if config.quantization == "fp8" and model_type not in FP8_MODELS:
        raise ValueError(
            f"rollout.quantization=fp8: SGLang cannot update a {model_type} model while it serves it in FP8, only models of type "
            f"{' and '.join(FP8_MODELS)}; set rollout.quantization=none"
        )


def check_numerics_device(model: ModelConfig, *, cuda: bool) -> None:
    """Refuse aligned numerics on CUDA, where nothing of it was tried. Raises ValueError."""
    if model.numerics == "aligned" and cuda:
        raise ValueError(
            "model.numerics=aligned is of CPU kernels, and this run is for GPUs; set model.numerics=default"
        )


def check_has_kernels(config: RolloutConfig, *, cuda: bool) -> None:
    """Refuse FP8 on CPU, where SGLang has no kernels for it. Raises ValueError."""
    if config.quantization == "fp8" and not cuda:
        raise ValueError(
            "rollout.quantization=fp8 needs NVIDIA GPUs, which SGLang has its FP8 kernels for; set rollout.quantization=none. "
            "rollout.precision rounds the weights alone, on any device"
        )


def check_windows_are_served(
    config: RolloutConfig, model_type: str, windows: Sequence[int | None], *, cuda: bool
) -> None:
    """Refuse SGLang 0.5.23's Triton attention for windows: of each token that it samples it leaves out the oldest one of the
    window (its pull request 32087), which a prefill does not. A tiny Olmo 3 was 0.7 to 1.3 nats off on an H200.

    windows: of each layer; empty: none has any. Raises ValueError.
    """
    named = {name.replace("_", "-"): value for name, value in config.server_args.items()}
    backend = named.get("attention-backend", ATTENTION_OF_FLOAT32 if config.dtype == "float32" else None)
    if cuda and any(windows) and named.get("decode-attention-backend", backend) == "triton":
        raise ValueError(
            f"SGLang's Triton attention leaves out the oldest token of a window for each token that it samples, and this "
            f"{model_type} has windows; set rollout.dtype=bfloat16, and no rollout.server_args.attention_backend, or another one"
        )


def check_dtype_is_served(config: RolloutConfig, model: Path, *, cuda: bool) -> None:
    """Refuse float32 on GPUs for gated delta nets, whose kernels of SGLang take numbers of two bytes. Raises ValueError."""
    if cuda and config.dtype == "float32" and has_recurrent_layers(model):
        raise ValueError(
            "rollout.dtype=float32: SGLang's kernels of gated delta nets on GPUs take numbers of two bytes alone; set "
            "rollout.dtype=bfloat16 (and model.dtype, for the smallest gap)"
        )
