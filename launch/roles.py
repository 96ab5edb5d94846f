"""What each role runs, given a run folder: serve (SGLang), sample (groups), learn (Megatron ranks, under torchrun).

Roles find each other through ``RUN/roles/*.json``, so each can be started by itself, on any node that sees the run folder.
"""

import asyncio
import contextlib
import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import psutil

from configs.loader import load_config
from configs.schema import RunConfig, SftConfig
from configs.schema.layout import ONE_PROCESS
from configs.schema.objective import KLConfig
from launch.addresses import own_address, role_environment
from launch.placement import serve_roles, servers_on
from launch.run_folder import RunFolder, wait_for_servers
from launch.stopping import StopListener, Stopped, report_stopped
from launch.supervisor import end_with_parent, kill
from rollout.server_share import ServerShare

if TYPE_CHECKING:
    from trainer.loop import Run
    from trainer.recording import Recorder

START_PROBE_TEMPERATURE = 0.7
"""Not 1: a server whose log-probs ignore the temperature would agree at 1."""
PROBE_PROMPT = [2 + i % 8 for i in range(12)]
"""Any tokens will do for comparing two engines; ids this small exist in every vocabulary."""
PROBE_TOKENS = 4
INTERRUPTED = 130
IN_JOB = "TANDEM_JOB"
"""In the environment of every role of a Slurm job, set by ``launch/job.py``."""


def serve(folder: RunFolder, node: int = 0) -> None:
    """Start the SGLang servers of one node, announce them when they are healthy, watch them until SIGTERM; all are gone at return."""
    config: RunConfig = load_config(folder.config, [])
    shares = _shares_of(folder, config, node)
    led = [f"replica-{share.replica}" for share in shares if share.node_rank == 0]
    for replica in led:  # before the imports, which take long: their other nodes may be looking already
        folder.forget(replica)

    import torch

    from rollout.sglang_server import ServerFleet

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    name, host = serve_roles(config)[node], own_address(config.launch.nodes)
    fleet = ServerFleet(
        config.rollout,
        model_path=config.model.path,
        log_dir=folder.logs,
        threads=config.launch.threads_per_process,
        cuda=torch.cuda.is_available(),
        seed=config.seed,
        shares=shares,
        host=host,
        meeting_points=_meeting_points(folder, config, shares, host),
        fp32_lm_head=config.model.fp32_lm_head,
        lends_memory=config.launch.placement == "colocated",
    )
    try:
        fleet.start()
        fleet.wait_healthy(config.rollout.server_start_timeout_s, print, should_stop=stop.is_set)
        if not stop.is_set():
            folder.announce(name, {"urls": fleet.urls, "pid": os.getpid(), "host": socket.gethostname()})
        while not stop.wait(0.5):
            fleet.poll()
    finally:
        fleet.stop()
        for announced in (name, *led):
            folder.withdraw(announced)


def _shares_of(folder: RunFolder, config: RunConfig, node: int) -> list[ServerShare]:
    """Their GPUs come after the learner's where those are here too, unless a request (of several fleets on one machine) says where."""
    shares = servers_on(config, node)
    request = folder.path / "request.json"
    asked = json.loads(request.read_text()) if request.exists() else {}
    moved_by = asked.get("first_gpu", shares[0].first_gpu) - shares[0].first_gpu
    return [replace(share, first_gpu=share.first_gpu + moved_by) for share in shares]


def _meeting_points(folder: RunFolder, config: RunConfig, shares: Sequence[ServerShare], host: str) -> dict[int, str]:
    """Of each replica that takes several nodes: its first node says where in the run folder, and the others wait for that."""
    from rollout.sglang_command import choose_ports

    for share in shares:
        if share.num_nodes > 1 and share.node_rank == 0:
            (ports,) = choose_ports([share.replica], None, host)
            folder.announce(f"replica-{share.replica}", {"address": f"{host}:{ports.nccl}"})
    timeout_s = config.launch.start_timeout_s
    return {
        share.replica: folder.wait_for_address(f"replica-{share.replica}", timeout_s=timeout_s)["address"]
        for share in shares
        if share.num_nodes > 1
    }


def sample(folder: RunFolder) -> None:
    """Hand groups to the learner until it says stop."""
    from rollout.sampler import run_sample_role

    config: RunConfig = load_config(folder.config, [])

    def server_urls() -> list[str]:
        return wait_for_servers(folder, serve_roles(config), timeout_s=config.launch.start_timeout_s)

    def announce(address: str) -> None:
        folder.announce("sample", {"address": address, "pid": os.getpid(), "host": socket.gethostname()})

    try:
        host = own_address(config.launch.nodes)
        asyncio.run(run_sample_role(config, server_urls=server_urls, announce=announce, log_dir=folder.logs, host=host))
    finally:
        folder.withdraw("sample")


def learn(folder: RunFolder) -> None:
    """One Megatron rank (torchrun sets RANK, WORLD_SIZE, MASTER_ADDR): build everything, train, export."""
    began = time.perf_counter()
    import torch.distributed as dist

    from launch.summary import write_summary
    from trainer.interruption import INTERRUPTIONS, StopRequested
    from trainer.loop import evaluate_before, saved_where_interrupted, train
    from trainer.report import write_report

    listener = StopListener(folder, is_first_rank=os.environ.get("RANK", "0") == "0")
    run = build_run(folder, listener.reason)
    if run.learner.is_first_rank:
        folder.announce("learn", {"pid": os.getpid(), "host": socket.gethostname()})
    gc.freeze()  # what start-up made lives as long as the run: walking through it again and again would cost a tenth of a second each time
    try:
        # As a context manager the tracker closes with FINISHED, FAILED or KILLED, by the way out.
        with run.tracker or contextlib.nullcontext():
            with saved_where_interrupted(run):
                compare_engines(run)
                started = time.perf_counter()
                evaluate_before(run)
                train(run)
                run.weight_sync.probe(run.config.rollout.temperature)  # of the last update, which nothing was sampled from
                run.turns.learners()
            trained = time.perf_counter()
            # From here on a request to stop is not heeded: what is left to do ends the run too.
            run.checkpointer.save_before_export(run.learner, run.sampler)
            run.learner.save_hf(folder.hf)
            if run.tracker is not None:
                write_summary(folder, seconds={"start_up": started - began, "training": trained - started})
                for artifact in (write_report(folder.path), folder.figures, folder.summary):
                    run.tracker.artifact(artifact)
    except INTERRUPTIONS as interruption:
        is_stop = isinstance(interruption, StopRequested)
        if is_stop and run.learner.is_first_rank:
            report_stopped(folder, Stopped(step=run.checkpointer.complete, reason=str(interruption)))
        dist.barrier()  # the first rank has closed its tracker: torchrun ends the others as soon as one of them has failed
        if is_stop:
            _exit_now(0)  # the sample role may be busy for long with what nobody takes any more: the supervisor ends it
        raise
    end_run(run)


def build_run(folder: RunFolder, stop_requested: Callable[[], str | None] = lambda: None) -> "Run":
    """Everything that ``train`` needs on this rank, resumed where the run folder holds a checkpoint."""
    from parallel.platform import collective_backend, init_distributed
    from trainer.learner import Learner
    from trainer.loop import Run
    from trainer.recording import Recorder
    from trainer.resume import Checkpointer
    from trainer.sampling import SharedSampler
    from trainer.tracking import Tracker
    from trainer.turns import OwnDevices, SharedDevices
    from trainer.weight_sync import WeightSync

    config: RunConfig = load_config(folder.config, [])
    init_distributed(timeout_s=config.launch.collective_timeout_s)
    colocated = config.launch.placement == "colocated"
    if colocated:
        remote, control = _connect_and_make_room(folder, config)
    learner = Learner(config)
    if not colocated:
        remote, control = _connect(folder, config) if learner.is_first_rank else (None, None)
    turns = SharedDevices(learner, control) if colocated else OwnDevices()
    sampler = SharedSampler(remote, stop_requested)
    checkpointer = Checkpointer(folder.checkpoints, config.checkpoint, turns)
    progress = checkpointer.restore(learner, sampler)
    resumed_from = progress.step if progress else None
    recorder = Recorder(folder.batches, config.record_batches, config.correction)
    if learner.is_first_rank:
        _forget_lost_steps(folder, recorder, resumed_from)
    weight_sync = WeightSync(
        learner,
        control,
        rollout_dtype=config.rollout.dtype,
        tensor_parallel=config.rollout.tp,
        # NCCL refuses two ranks of a group on one GPU; gloo takes a GPU's tensors through host memory. Not run on GPUs by this project.
        backend="gloo" if colocated else collective_backend(),
        temperature=config.rollout.temperature,
        probe_prompt=PROBE_PROMPT,
        probe_tokens=PROBE_TOKENS,
        timeout_s=_patience_s(config),
        samples_are_probes=config.compares_samples,
        address=own_address(config.launch.nodes),
        quantization=config.rollout.quantization,
        peer_timeout_s=config.launch.peer_timeout_s,
        turns=turns,
    )
    return Run(
        config=config,
        learner=learner,
        sampler=sampler,
        weight_sync=weight_sync,
        checkpointer=checkpointer,
        recorder=recorder,
        # Last: once it is open, whoever fails has to close it.
        tracker=Tracker(config, folder.path, resumed_from_step=resumed_from) if learner.is_first_rank else None,
        turns=turns,
        first_step=1 if resumed_from is None else resumed_from + 1,
        evaluation_owed=progress is not None and progress.evaluation_owed,
    )


def _forget_lost_steps(folder: RunFolder, recorder: "Recorder", resumed_from: int | None) -> None:
    """What an earlier attempt has left of steps that are done again. No supervisor may have cleared the folder."""
    recorder.forget_after(resumed_from or 0)
    if resumed_from is None:
        folder.put_metrics_aside()


def compare_engines(run: "Run") -> None:
    """Before the first step: the servers get the weights of a resumed run, or rounded ones, or where they lent their memory to the learner;
    then they must give the learner's log-probs.

    So do servers that have outlived the learner of an earlier attempt."""
    sends = run.first_step > 1 or run.config.rollout.quantization == "fake_int8" or run.turns.are_shared
    if sends or run.weight_sync.finds_other_version():
        run.weight_sync.restore()
    gap = run.weight_sync.probe(START_PROBE_TEMPERATURE)
    if run.tracker is not None:
        run.tracker.say(f"learner and servers agree to {gap:.1e} nats at temperature {START_PROBE_TEMPERATURE} before the first step")


def end_run(run: "Run") -> None:
    """Tell the sample role to stop and leave every process group, all ranks together."""
    import torch.distributed as dist

    run.sampler.stop()
    run.weight_sync.close()
    dist.barrier()
    dist.destroy_process_group()


def _connect(folder: RunFolder, config: RunConfig):
    """Rank 0's lines to the sample role and to the servers."""
    from rollout.remote_sampler import RemoteSampler
    from rollout.sglang_control import SGLangControl

    timeout_s = config.launch.start_timeout_s
    urls = wait_for_servers(folder, serve_roles(config), timeout_s=timeout_s)
    address = folder.wait_for_address("sample", timeout_s=timeout_s)["address"]
    limits = {"timeout_s": _patience_s(config), "peer_timeout_s": config.launch.peer_timeout_s}
    remote = RemoteSampler(address, **limits)
    control = SGLangControl(urls, tensor_parallel=config.rollout.tp, **limits)
    return remote, control


def _connect_and_make_room(folder: RunFolder, config: RunConfig):
    """The same before there is a learner, which shares the servers' devices: they have given their memory back at return, on all ranks."""
    import torch.distributed as dist

    from trainer.ranks import on_first_rank
    from trainer.turns import CACHE, WEIGHTS, make_room

    remote, control = _connect(folder, config) if dist.get_rank() == 0 else (None, None)
    on_first_rank(control and (lambda: make_room(control, CACHE, WEIGHTS)))
    return remote, control


def _patience_s(config: RunConfig) -> float:
    """With the rollout side: less than that of the ranks which wait in a collective meanwhile, so that they hear what has failed."""
    return 0.9 * config.launch.collective_timeout_s


def supervised(folder: RunFolder) -> None:
    """One Megatron rank of a warm start."""
    import torch.distributed as dist

    from parallel.platform import init_distributed
    from trainer.sft import train_sft

    config: SftConfig = load_config(folder.config, [])
    init_distributed(timeout_s=config.launch.collective_timeout_s)
    train_sft(config, report=lambda line: print(line, flush=True))
    dist.destroy_process_group()


def export(folder: RunFolder) -> None:
    """The newest checkpoint of a run into its ``export/`` folder; one process, whatever layout wrote it."""
    import torch.distributed as dist

    from parallel.checkpoint import latest_valid
    from parallel.platform import init_distributed
    from trainer.learner import Learner

    config: RunConfig = load_config(folder.config, [*ONE_PROCESS])
    config = config.model_copy(update={"kl": KLConfig(), "critic": None})  # the policy alone
    newest = latest_valid(folder.checkpoints)
    init_distributed(timeout_s=config.launch.collective_timeout_s)
    learner = Learner(config)
    learner.engine.load(newest)
    learner.save_hf(folder.export)
    dist.destroy_process_group()


def replay(folder: RunFolder) -> None:
    """What the request file asks of a recorded step, with gradients of the parameters; one process, whatever layout trained."""
    import torch.distributed as dist

    from launch.replay import answer_request
    from parallel.platform import init_distributed

    config: RunConfig = load_config(folder.config, [])
    init_distributed(timeout_s=config.launch.collective_timeout_s)
    answer_request(folder)
    dist.destroy_process_group()


def verify(folder: RunFolder) -> None:
    """One Megatron rank of a layout whose transfer is verified."""
    from launch.verify_sync import send_other_weights

    send_other_weights(folder)


def draw_for_mismatch(folder: RunFolder) -> None:
    from launch.mismatch import draw

    draw(folder)


def score_for_mismatch(folder: RunFolder) -> None:
    from launch.mismatch import score

    score(folder)


MEGATRON_ROLES = ("learn", "sft-rank", "export-rank", "replay-rank", "verify-rank", "score-rank")
SIDES = ("serve", "sample", "learn")
"""The roles of a training run, which may be on different nodes."""
ROLES = {
    "serve": serve,
    "sample": sample,
    "learn": learn,
    "sft-rank": supervised,
    "export-rank": export,
    "replay-rank": replay,
    "verify-rank": verify,
    "mismatch-draw": draw_for_mismatch,
    "score-rank": score_for_mismatch,
}


def run_role(name: str, folder: RunFolder, node: int | None = None) -> None:
    """Run one role in this process; its end, good or bad, is the end of the process.

    Args:
        node: of the servers' nodes, for the serve role.

    Raises:
        ValueError: there is no such node, or this host has no address that the others could reach. Nothing was started.
    """
    run, label = ROLES[name], name
    if name in SIDES:
        config: RunConfig = load_config(folder.config, [])
        os.environ.update(role_environment(config.launch.nodes))
        if name == "serve":
            node = serving_node(config, node)
            run, label = partial(serve, node=node), serve_roles(config)[node]
    if name in MEGATRON_ROLES:
        # torchrun puts ranks into sessions of their own: nothing else would end them if it were killed.
        end_with_parent(signal.SIGKILL)
    else:
        folder.forget(label)
        if IN_JOB in os.environ:
            # Slurm sends it to everything at once, while the learner still finishes its step with us. The job's supervisor ends us.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        run(folder)
    except BaseException as error:
        # Nothing may interrupt or stop the way out, whatever fails on it (a full disk, the SIGTERM of a peer's failure).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if isinstance(error, Exception):
                folder.report_error(label, error)
                traceback.print_exc()
        finally:
            _exit_now(1 if isinstance(error, Exception) else INTERRUPTED)


def serving_node(config: RunConfig, asked: int | None) -> int:
    """Which of the servers' nodes this is: the one asked for, or by the place of this process in its Slurm step. Raises ValueError."""
    names = serve_roles(config)
    by_slurm = os.environ.get("SLURM_NODEID", "0") if config.launch.nodes is not None else "0"
    node = int(by_slurm) if asked is None else asked
    if not 0 <= node < len(names):
        how = f"--node {node}" if asked is not None else f"SLURM_NODEID={node}"
        raise ValueError(f"{how}: the servers of this run are on {len(names)} node{'s' * (len(names) > 1)}, counted from 0")
    return node


def _exit_now(code: int) -> NoReturn:
    """Not sys.exit: a thread that still waits for a server or a peer would keep this rank, and so the run, alive for minutes.

    Nobody else cleans up then: child processes (a checkpoint's writers) are ended here.
    """
    try:
        kill(psutil.Process().children(recursive=True))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the torchrun agents of the learner's nodes, one on each, find one another."""

    nodes: int
    endpoint: str
    """HOST:PORT of the learner's first node, whose agent listens there."""
    is_host: bool
    """Whether the agent is that one. It cannot find out by itself where the name of its host stands for another address."""
    address: str | None = None
    """Of this agent's node, where its ranks are met if they are the first. None: what the host calls itself, which may be localhost."""
    id: str
    """The same for all agents of one start of one run."""
    timeout_s: float
    """For all of them to have come."""


def command(role: str, folder: RunFolder, *, ranks: int = 1, node: int | None = None, rendezvous: Rendezvous | None = None) -> list[str]:
    """The command line that starts ``role``; Megatron roles run under torchrun.

    Args:
        ranks: of a Megatron role, on each node. node: of the servers, where there are several. rendezvous: of a Megatron role on several
            nodes; None: all ranks are here.
    """
    arguments = ["launch", role, str(folder.path), *([] if node is None else ["--node", str(node)])]
    if role not in MEGATRON_ROLES:
        return [sys.executable, "-m", *arguments]
    return [sys.executable, "-m", "torch.distributed.run", *_meeting(rendezvous), f"--nproc-per-node={ranks}", "-m", *arguments]


def _meeting(rendezvous: Rendezvous | None) -> list[str]:
    if rendezvous is None:
        return ["--standalone"]
    # No --node-rank: c10d has no use for it. It numbers nodes by their names, and the ranks of one node one after another.
    return [
        f"--nnodes={rendezvous.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=join_timeout={math.ceil(rendezvous.timeout_s)},is_host={str(rendezvous.is_host).lower()}",
        *([] if rendezvous.address is None else [f"--local-addr={rendezvous.address}"]),
    ]
