"""The SGLang servers of a run: ports, command lines, start, health, watch, and an end that leaves no process behind.

Each replica is a session and process group of its own under ``sglang_watchdog``. ServerFleet is used by one thread.
Not its concern: requests (``sglang_client``), weights (``sglang_control``), and which GPUs this machine may use: CUDA_VISIBLE_DEVICES
is inherited, and of those GPUs replica i takes ``tp`` from first_gpu + i * tp on; the ones below first_gpu are the learner's.
"""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.schema.rollout import RolloutConfig

HOST = "127.0.0.1"
INITIAL_WEIGHT_VERSION = 0
"""What the servers call the weights that they loaded from disk."""
LOG_TAIL_LINES = 40
HEALTH_POLL_S = 0.25
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL. SGLang looks at SIGTERM every 5 s only, and a server has nothing to save."""
HEALTH_REQUEST_TIMEOUT_S = 60.0
REUSED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
"""For glibc on CPU: blocks of up to 32 MiB (its maximum), such as received weights, get the memory of the last ones again. By default
each is new pages, which takes half as long as receiving into them."""
STAND_INS = Path(__file__).parent / "cpu_stand_ins"
WATCHDOG = Path(__file__).parent / "sglang_watchdog.py"

OWNED_FLAGS = frozenset(
    {
        "model-path",
        "device",
        "base-gpu-id",
        "gpu-id-step",
        "host",
        "port",
        "nccl-port",
        "tp-size",
        "tensor-parallel-size",
        "dtype",
        "max-total-tokens",
        "random-seed",
        "weight-version",
        "skip-tokenizer-init",
        "enable-fp32-lm-head",
        "quantization",
        "load-format",
        "rl-quant-profile",
    }
)
"""Flags that the schema's own fields or the design decide; ``server_args`` may not override them."""
FP8_MODELS = ("qwen2", "qwen3")
"""Model types whose loader SGLang 0.5.23 lets load new weights into FP8 ones (its ``supports_quantized_rl_reload``)."""


class ServerDied(RuntimeError):
    """A server process ended while the run needed it."""

    def __init__(self, replica: int, exit_code: int, log_file: Path) -> None:
        self.replica, self.exit_code, self.log_file = replica, exit_code, log_file
        super().__init__(
            f"SGLang replica {replica} ended with exit code {exit_code}; last lines of {log_file}:\n{log_tail(log_file)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of one replica, both on 127.0.0.1. ``nccl`` is where its TP ranks meet; the other channels are unix sockets."""

    http: int
    nccl: int


@dataclass(frozen=True, slots=True)
class _Replica:
    process: subprocess.Popen
    ports: Ports
    log_file: Path


class ServerFleet:
    """The replicas of a run. ``start``, ``wait_healthy``, then ``poll`` now and then, and always ``stop``."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: Path,
        log_dir: Path,
        threads: int,
        cuda: bool,
        seed: int,
        first_gpu: int = 0,
        fp32_lm_head: bool = False,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        """
        ``first_gpu`` is how many GPUs of this machine belong to the learner, one per rank. On CPU it says nothing.
        ``fp32_lm_head``: the output projection runs in float32.

        Raises:
            ValueError: ``server_args`` holds a flag that another field decides, or the config needs kernels that CPU lacks.
        """
        check_server_args(config)
        check_has_kernels(config, cuda=cuda)
        if first_gpu < 0:
            raise ValueError(f"first_gpu={first_gpu} must be at least 0")
        self._config = config
        self._model_path = Path(model_path).resolve()
        self._log_dir = Path(log_dir)
        self._threads = threads
        self._cuda = cuda
        self._seed = seed
        self._first_gpu = first_gpu
        self._fp32_lm_head = fp32_lm_head
        self._stop_grace_s = stop_grace_s
        self._replicas: list[_Replica] = []

    @property
    def urls(self) -> list[str]:
        """One per replica, in order; empty before ``start``."""
        return [f"http://{HOST}:{replica.ports.http}" for replica in self._replicas]

    def start(self) -> None:
        """Start every replica and return at once.

        Raises:
            ValueError: there are too few GPUs, a port is taken, or the model folder is missing; then nothing was started.
        """
        if self._replicas:
            raise RuntimeError("the servers were started already")
        if not (self._model_path / "config.json").is_file():
            raise ValueError(f"{self._model_path} has no config.json; give the folder of a Hugging Face model")
        if self._cuda:
            check_gpus(self._config, first_gpu=self._first_gpu, available=visible_gpus())
        all_ports = choose_ports(self._config.replicas, self._config.first_port)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for index, ports in enumerate(all_ports):
                self._replicas.append(self._start_replica(index, ports))
        except OSError:
            self.stop()
            raise

    def _start_replica(self, index: int, ports: Ports) -> _Replica:
        command = server_command(
            self._config,
            replica=index,
            model_path=self._model_path,
            ports=ports,
            cuda=self._cuda,
            seed=self._seed,
            first_gpu=self._first_gpu,
            fp32_lm_head=self._fp32_lm_head,
        )
        log_file = self._log_dir / f"sglang-{index}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                # The pipe is the lifeline: nobody writes to it, and its end of file tells the watchdog that this process is gone.
                [sys.executable, "-I", str(WATCHDOG), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self._config, replica=index, threads=self._threads, cuda=self._cuda),
                start_new_session=True,
            )
        return _Replica(process, ports, log_file)

    def wait_healthy(
        self,
        timeout_s: float,
        on_progress: Callable[[str], None] = lambda message: None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when every replica has generated a token, or as soon as ``should_stop`` says so.

        Raises:
            ServerDied: one ended meanwhile.
            TimeoutError: ``timeout_s`` passed; it names who is late and the end of the log.
        """
        started = time.monotonic()
        waiting = dict(enumerate(self._replicas))
        while waiting and not should_stop():
            self.poll()
            left_s = started + timeout_s - time.monotonic()
            for index, replica in list(waiting.items()):
                if _is_healthy(replica.ports.http, min(HEALTH_REQUEST_TIMEOUT_S, max(left_s, 0.1))):
                    del waiting[index]
                    on_progress(f"SGLang replica {index} is ready on port {replica.ports.http} after {time.monotonic() - started:.0f} s")
            if waiting and left_s <= 0:
                raise TimeoutError(self._late(waiting, timeout_s))
            if waiting:
                time.sleep(HEALTH_POLL_S)  # between looks at the condition above

    def _late(self, waiting: dict[int, _Replica], timeout_s: float) -> str:
        log_file = next(iter(waiting.values())).log_file
        return (
            f"SGLang replicas {sorted(waiting)} were not ready after {timeout_s:g} s; raise rollout.server_start_timeout_s if they "
            f"only need longer. Last lines of {log_file}:\n{log_tail(log_file)}"
        )

    def poll(self) -> None:
        """Look at every process once.

        Raises:
            ServerDied: a replica ended.
        """
        for index, replica in enumerate(self._replicas):
            code = replica.process.poll()
            if code is not None:
                raise ServerDied(index, code, replica.log_file)

    def stop(self) -> None:
        """End every replica: SIGTERM to its group, the grace, SIGKILL to the group. May be called twice.

        Raises:
            RuntimeError: a process survived SIGKILL.
        """
        replicas, self._replicas = self._replicas, []
        members = [_group_members(replica.process.pid) for replica in replicas]
        for replica in replicas:
            _signal_group(replica.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_grace_s
        for replica in replicas:
            with suppress(subprocess.TimeoutExpired):
                replica.process.wait(max(deadline - time.monotonic(), 0.0))
        for replica, known in zip(replicas, members, strict=True):
            self._end_for_good(replica, known)

    def _end_for_good(self, replica: _Replica, known: set[psutil.Process]) -> None:
        known |= _group_members(replica.process.pid)
        _signal_group(replica.process.pid, signal.SIGKILL)
        for process in known:  # also one that moved to a group of its own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        replica.process.wait(self._stop_grace_s)
        if replica.process.stdin is not None:
            replica.process.stdin.close()
        _, alive = psutil.wait_procs(known, timeout=self._stop_grace_s)
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        if alive:
            raise RuntimeError(f"processes of the SGLang server on port {replica.ports.http} survived SIGKILL: {alive}")


def server_command(
    config: RolloutConfig,
    *,
    replica: int,
    model_path: Path,
    ports: Ports,
    cuda: bool,
    seed: int,
    first_gpu: int = 0,
    fp32_lm_head: bool = False,
) -> list[str]:
    """The command line of one replica."""
    flags: dict[str, str | int | float | bool] = {
        "model-path": str(model_path),
        "host": HOST,
        "port": ports.http,
        "nccl-port": ports.nccl,
        "dtype": config.dtype,
        "tp-size": config.tp,
        "random-seed": (seed + replica) % 2**31,  # replicas must not draw the same samples
        "weight-version": str(INITIAL_WEIGHT_VERSION),
        "skip-tokenizer-init": True,  # ids in, ids out
        "sleep-on-idle": True,  # otherwise an idle server keeps a core busy
        "log-level-http": "warning",
    }
    if fp32_lm_head:
        flags["enable-fp32-lm-head"] = True
    if config.quantization == "fp8":
        # Without this loader SGLang quantises once, at start, and refuses what the learner sends.
        flags |= {"quantization": "fp8", "load-format": "flash_rl"}
    if config.max_total_tokens is not None:
        flags["max-total-tokens"] = config.max_total_tokens
    if cuda:
        flags["base-gpu-id"] = first_gpu + replica * config.tp
    else:
        flags |= {"device": "cpu", "skip-server-warmup": True}  # nothing is compiled on first use, and wait_healthy generates a token
    flags |= {name.replace("_", "-"): value for name, value in config.server_args.items()}
    return [sys.executable, "-m", "sglang.launch_server", *_as_arguments(flags)]


def _as_arguments(flags: dict[str, str | int | float | bool]) -> list[str]:
    arguments: list[str] = []
    for name, value in flags.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def server_environment(config: RolloutConfig, *, replica: int, threads: int, cuda: bool) -> dict[str, str]:
    """The environment of one replica: this process's, nothing looked up on the network, and the CPU engine where there is no CUDA."""
    environment = dict(os.environ)
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    if cuda:
        return environment
    paths = [str(STAND_INS), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= REUSED_MEMORY
    if config.tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_binding(
            sorted(os.sched_getaffinity(0)), replica=replica, tensor_parallel=config.tp, threads=threads
        )
    return environment


def cpu_binding(cpus: list[int], *, replica: int, tensor_parallel: int, threads: int) -> str:
    """Cores of each TP rank of a replica as SGLang reads them, ``0,1|2,3``; ranks share cores where there are too few."""
    first = replica * tensor_parallel
    ranks = range(first, first + tensor_parallel)
    return "|".join(",".join(str(cpus[(rank * threads + i) % len(cpus)]) for i in range(min(threads, len(cpus)))) for rank in ranks)


def choose_ports(replicas: int, first_port: int | None) -> list[Ports]:
    """Ports first_port + 2 i (HTTP) and the next (rank meeting point) of replica i, or free ones.

    Raises:
        ValueError: one of the given ports is taken or out of range, or too few are free.
    """
    if first_port is None:
        return _free_ports(replicas)
    last = first_port + 2 * replicas - 1
    if last > 65535:
        raise ValueError(f"rollout.first_port={first_port} with {replicas} replicas needs ports up to {last}; choose a lower one")
    for port in range(first_port, last + 1):
        if not _is_free(port):
            raise ValueError(
                f"port {port} on {HOST} is taken by another process (rollout.first_port={first_port} needs {first_port} to {last}); "
                "choose another rollout.first_port, leave it out to take free ports, or end that process"
            )
    return [Ports(http=first_port + 2 * i, nccl=first_port + 2 * i + 1) for i in range(replicas)]


def _free_ports(replicas: int) -> list[Ports]:
    """Below the kernel's range for outgoing connections, one of which could otherwise take a port while its server still loads."""
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest_outgoing = 32768
    top = lowest_outgoing if lowest_outgoing > 4096 else 65536
    candidates = list(range(max(2048, top - 16384), top - 1, 2))
    random.SystemRandom().shuffle(candidates)
    free = (Ports(http=port, nccl=port + 1) for port in candidates if _is_free(port) and _is_free(port + 1))
    chosen = [ports for ports, _ in zip(free, range(replicas), strict=False)]
    if len(chosen) < replicas:
        raise ValueError(f"fewer than {2 * replicas} free ports between {candidates[0]} and {top} on {HOST}; set rollout.first_port")
    return chosen


def _is_free(port: int) -> bool:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free for a server
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def log_tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, without its progress bars."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 65536, 0))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.splitlines()[-lines:])


def check_server_args(config: RolloutConfig) -> None:
    """Whether ``server_args`` holds further flags only.

    Raises:
        ValueError: one has dashes in front, or another field or the design decides it.
    """
    for name in config.server_args:
        if name.startswith("-") or name.replace("_", "-") in OWNED_FLAGS:
            raise ValueError(
                f"rollout.server_args: {name!r} cannot be set there; write names without dashes in front, and set the model, ports, "
                "dtype, quantization, sizes and seed by their own config fields"
            )


def check_quantization(config: RolloutConfig, model_type: str) -> None:
    """Whether SGLang can serve this kind of model so and take new weights for it.

    Raises:
        ValueError: FP8 of a model whose loader cannot.
    """
    if config.quantization == "fp8" and model_type not in FP8_MODELS:
        raise ValueError(
            f"rollout.quantization=fp8: SGLang cannot update a {model_type} model while it serves it in FP8, only models of type "
            f"{' and '.join(FP8_MODELS)}; set rollout.quantization=none"
        )


def check_has_kernels(config: RolloutConfig, *, cuda: bool) -> None:
    """Whether this machine's servers have the kernels that the config asks for.

    Raises:
        ValueError: they are on CPU, where SGLang has none for FP8.
    """
    if config.quantization == "fp8" and not cuda:
        raise ValueError(
            "rollout.quantization=fp8 needs NVIDIA GPUs, which SGLang has its FP8 kernels for; set rollout.quantization=none, or fake_int8 "
            "for a quantised rollout without them"
        )


def check_gpus(config: RolloutConfig, *, first_gpu: int, available: int) -> None:
    """Whether this machine has a GPU for every learner rank and every rank of every replica.

    Raises:
        ValueError: fewer are ``available`` than needed; it names both numbers and the fix.
    """
    needed = first_gpu + config.replicas * config.tp
    if available < needed:
        raise ValueError(
            f"{needed} GPUs are needed, {first_gpu} of the learner or other servers and rollout.replicas={config.replicas} times "
            f"rollout.tp={config.tp} of the servers, but {available} are visible here; use fewer learner ranks "
            "(layout) or fewer or smaller replicas (rollout), or make more visible (CUDA_VISIBLE_DEVICES)"
        )


def visible_gpus() -> int:
    """GPUs that this process and its children may use; takes none of them."""
    import torch  # seconds; whoever only checks a config never comes here

    return torch.cuda.device_count()


def _is_healthy(port: int, timeout_s: float) -> bool:
    """Whether the server generates; while it still loads, the connection is refused or the answer is 503."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    with closing(connection):
        try:
            connection.request("GET", "/model_info")
            response = connection.getresponse()
            if response.status != 200 or "weight_version" not in json.loads(response.read()):
                return False
            connection.request("GET", "/health_generate")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return False


def _group_members(group: int) -> set[psutil.Process]:
    """Every process of the group, and every descendant of its leader."""
    members: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(group)
        members |= {leader, *leader.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                members.add(process)
    return members


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
