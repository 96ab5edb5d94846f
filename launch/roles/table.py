"""The roles, each as a function of a run folder: serve (SGLang), sample (groups), learn (Megatron ranks, under
torchrun); and their command lines.

Roles find each other through ``RUN/roles/*.json``. Each can be started by itself, on any node that sees the run
folder.
"""

import asyncio
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, get_args

from configs.loader import load_config
from configs.schema import RunConfig, SftConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig
from launch.processes.addresses import own_address, role_environment
from launch.processes.heartbeat import Pulse, stopped_note
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, wait_for_servers
from launch.processes.supervisor import end_with_parent, exit_now
from launch.processes.unheard import go_on_unheard
from launch.roles.learn import learn
from launch.roles.serve import serve, serving_node
from launch.selftest.ranks import run_part
from launch.studies.mismatch import draw, score
from launch.studies.verify_sync import send_other_weights
from parallel.checkpoints.files import step_folder, step_folders
from parallel.planning.architecture import read_architecture, read_hf_config
from parallel.planning.model_parts import Experts
from rollout.servers.kept_sets import Truncation
from rollout.servers.watched_process import guard_session
from tracing import Recorder, Window, install

INTERRUPTED = 130
MOST_OPEN_FILES = 65_536
Config = TypeVar("Config", RunConfig, SftConfig)
IN_JOB = "TANDEM_JOB"
"""An environment variable of every role of a Slurm job, set by ``launch/slurm/inside_job.py``."""


def sample(folder: RunFolder, config: RunConfig, doing: Callable[[str], None] = lambda what: None) -> None:
    """Give groups to the learner until it sends stop."""
    from rollout.guarded_process import remove_abandoned
    from rollout.sampling.role import run_sample_role
    from rollout.tokenization import import_transformers_without_torch

    import_transformers_without_torch()
    remove_abandoned()  # by now the guards have ended what a sample role that was killed has left running

    def server_urls() -> list[str]:
        return wait_for_servers(folder, serve_roles(config), timeout_s=config.launch.start_timeout_s)

    def announce(address: str) -> None:
        cancel_at_sigterm()  # not before: the start waits for servers outside of the event loop, which would not hear it
        folder.announce("sample", {"address": address, "pid": os.getpid(), "host": socket.gethostname()})

    try:
        host, key, log_dir = own_address(config.launch.nodes), folder.run_key(), folder.logs
        role = run_sample_role(
            config, server_urls=server_urls, announce=announce, log_dir=log_dir, host=host, key=key, doing=doing,
            experts=experts_to_replay(config), truncation=truncation_of(config),
        )  # fmt: skip
        asyncio.run(role)
    finally:
        folder.withdraw("sample")


def cancel_at_sigterm() -> None:
    """Have SIGTERM cancel the running task, for a role's main task: episodes under way have folders of their own, which
    are removed as they end. A second one ends this process at once, and where it is ignored it stays so."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGTERM, cancel)


def experts_to_replay(config: RunConfig) -> Experts | None:
    """Those of the policy; None where the learner needs none of the servers' experts."""
    if config.learner.routing != "rollout":
        return None
    return read_architecture(read_hf_config(config.model.path)).experts


def truncation_of(config: RunConfig) -> Truncation | None:
    """None where samples to train on come from the full distribution."""
    rollout = config.rollout
    if not rollout.is_truncated:
        return None
    vocab_size = read_architecture(read_hf_config(config.model.path)).vocab_size
    return Truncation(top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p, vocab_size=vocab_size)


def supervised(folder: RunFolder, config: SftConfig) -> None:
    """One Megatron rank of a warm start."""
    import torch.distributed as dist

    from parallel.megatron.platform import init_distributed
    from trainer.sft import train_sft

    init_distributed(timeout_s=config.launch.collective_timeout_s)
    train_sft(config, report=lambda line: print(line, flush=True))
    dist.destroy_process_group()


def export(folder: RunFolder, config: RunConfig) -> None:
    """Export the newest checkpoint of a run, or the one that the command asks for, into its ``export/`` folder, in one
    process, whatever layout wrote it, and its adapters into ``export-adapter/``."""
    import torch.distributed as dist

    from parallel.checkpoints.checkpoint import newest_whole
    from parallel.megatron.platform import init_distributed
    from trainer.learner import Learner

    init_distributed(timeout_s=config.launch.collective_timeout_s)
    learner = Learner.of_policy_alone(config.model_copy(update={"layout": ONE_PROCESS}))
    step = json.loads(folder.export_request.read_text())["step"]
    newest_first = reversed(step_folders(folder.checkpoints).values())
    newest_first = newest_first if step is None else [step_folder(folder.checkpoints, step)]
    (whole,), damaged = newest_whole([step] for step in newest_first)
    for wrong in damaged.values():
        print(f"checkpoint {wrong}; exporting {whole.folder.name} instead", flush=True)
    learner.engine.load(whole)
    learner.save_hf(folder.export)
    learner.save_adapter(folder.exported_adapter)
    dist.destroy_process_group()


def replay(folder: RunFolder, config: RunConfig) -> None:
    """Replay the recorded step of the request file with gradients of the parameters, in one process, whatever layout
    trained."""
    import torch.distributed as dist

    from launch.studies.replay import answer_request
    from parallel.megatron.platform import init_distributed

    init_distributed(timeout_s=config.launch.collective_timeout_s)
    answer_request(folder, config)
    dist.destroy_process_group()


MEGATRON_ROLES = (
    "learn", "sft-rank", "export-rank", "replay-rank", "verify-rank", "score-rank", "selftest-rank",
)  # fmt: skip
BESIDE_A_RUN = ("export-rank", "replay-rank")
"""Roles of a command on the folder of a run, which may go on meanwhile. They have no beat: to all who read it, such as `tandem status`
and `tandem stop`, it would be a sign of life of the run."""
SIDES = ("serve", "sample", "learn")
"""The roles of a training run, which may be on different nodes."""
ROLES = {
    "serve": serve,
    "sample": sample,
    "learn": learn,
    "sft-rank": supervised,
    "export-rank": export,
    "replay-rank": replay,
    "verify-rank": send_other_weights,
    "mismatch-draw": draw,
    "score-rank": score,
    "selftest-rank": run_part,
}


def config_of(folder: RunFolder, kind: type[Config]) -> Config:
    """The config of a run. Raises ValueError for a run of another kind."""
    config = load_config(folder.config, [])
    if not isinstance(config, kind):
        (kind_name,) = get_args(kind.model_fields["kind"].annotation)
        raise ValueError(
            f"RUN: {folder.path} is a run of kind {config.kind}; this is for runs of kind {kind_name}"
        )
    return config


def run_role(name: str, folder: RunFolder, node: int | None = None) -> None:
    """Run one role in this process. Its end, good or bad, is the end of the process.

    node: number of the servers' node, for the serve role. Raises ValueError, before anything is started, for a run
    of another kind, for a node that does not exist, or where the other hosts cannot reach this one.
    """
    go_on_unheard()
    run, label = ROLES[name], name
    config = config_of(folder, SftConfig) if name == "sft-rank" else config_of(folder, RunConfig)
    os.environ.update(role_environment(config.launch.nodes if name in SIDES else None))
    allow_open_files()
    if name == "serve" and isinstance(config, RunConfig):
        node = serving_node(config, node)
        run, label = partial(serve, node=node), serve_roles(config)[node]
    is_rank = name in MEGATRON_ROLES and name not in BESIDE_A_RUN
    beat = f"rank-{os.environ.get('RANK', '0')}" if is_rank else label
    note = stopped_note(folder, beat)
    note.parent.mkdir(exist_ok=True)
    note.unlink(missing_ok=True)
    guard_session(timeout_s=config.launch.heartbeat_timeout_s, note=note)
    if name in MEGATRON_ROLES:
        os.environ.update(rank_environment(config.layout))
        # torchrun puts ranks into sessions of their own, so that they would survive if it were killed.
        end_with_parent(signal.SIGKILL)
    else:
        folder.forget(label)
        if IN_JOB in os.environ:
            # Slurm sends SIGTERM to everything at once, while the learner still needs this role to finish its
            # step. The job's supervisor ends it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isinstance(config, RunConfig) and name in ("sample", "learn"):
        install(recorder_of(folder, config, beat))
    try:
        limit_s = config.launch.heartbeat_timeout_s
        with nullcontext() if name in BESIDE_A_RUN else Pulse(folder, beat, timeout_s=limit_s) as pulse:
            run(folder, config, **({"doing": pulse.doing} if pulse is not None and name in SIDES else {}))
    except BaseException as error:
        # Ignore SIGTERM (of a peer's failure) during shutdown, whatever else fails (a full disk).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if isinstance(error, Exception):
                folder.report_error(label, error)
                traceback.print_exc()
        finally:
            exit_now(1 if isinstance(error, Exception) else INTERRUPTED)


def allow_open_files() -> None:
    """Raise this process's limit of open files, which is often 1024, as far as it may be: each connection of a server, an
    agent or a peer is one. Not further than ``MOST_OPEN_FILES``: programs that close every file that they might have open
    take minutes where a billion are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def rank_environment(layout: LayoutConfig) -> dict[str, str]:
    """With one queue a GPU starts kernels in the order of the calls. Megatron-Core 0.16.1 asks for that where collectives of
    tensor parallelism, with and without sequence parallelism, overlap with matrix products, for speed alone. A value that is
    set is kept."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: "1"} if layout.tp > 1 and name not in os.environ else {}


def recorder_of(folder: RunFolder, config: RunConfig, who: str) -> Recorder | None:
    """None where no step is traced. The sample role begins a step before the learner: samples of the first traced step
    may be under way by then (``rollout.max_staleness``)."""
    trace = config.tracking.trace
    window = Window(trace.first - (who == "sample"), trace.end)
    return Recorder(folder.trace, who, window) if trace.steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting place of the torchrun agents, one on each of the learner's nodes."""

    nodes: int
    endpoint: str
    """HOST:PORT of the learner's first node, whose agent listens there."""
    is_host: bool
    """Whether this agent is on the first node. It cannot find out by itself where the name of its host stands for
    another address."""
    address: str | None = None
    """Address of this agent's node, at which its ranks are met if they are the first. None: the host's own name,
    which may be localhost."""
    id: str
    """The same for all agents of one start of one run."""
    timeout_s: float
    """Time for all agents to come."""


def role_command(
    role: str,
    folder: RunFolder,
    *,
    ranks: int = 1,
    node: int | None = None,
    rendezvous: Rendezvous | None = None,
) -> list[str]:
    """The command line that starts ``role``; Megatron roles run under torchrun.

    ranks: of a Megatron role, on each node. node: number of the servers' node, where there are several.
    rendezvous: of a Megatron role on several nodes; None: all ranks are on this node.
    """
    arguments = ["-m", "launch", role, str(folder.path), *([] if node is None else ["--node", str(node)])]
    if role not in MEGATRON_ROLES:
        return [sys.executable, *arguments]
    torchrun = [sys.executable, "-m", "launch.roles.rendezvous", *_rendezvous_options(rendezvous)]
    return [*torchrun, f"--nproc-per-node={ranks}", *arguments]


def _rendezvous_options(rendezvous: Rendezvous | None) -> list[str]:
    if rendezvous is None:
        return ["--rdzv-backend=tandem"]
    # No --node-rank: the host is node 0, and the others are numbered in the order in which they come.
    return [
        f"--nnodes={rendezvous.nodes}",
        "--rdzv-backend=tandem",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=join_timeout={math.ceil(rendezvous.timeout_s)},is_host={str(rendezvous.is_host).lower()}",
        *([] if rendezvous.address is None else [f"--local-addr={rendezvous.address}"]),
    ]
