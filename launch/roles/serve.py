"""The serve role: the SGLang servers of one node, from their start to their end."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from configs.errors import counted
from configs.schema import RunConfig
from launch.processes import stopping
from launch.processes.addresses import own_address
from launch.processes.placement import serve_roles, servers_on
from launch.processes.run_folder import RunFolder
from rollout.servers.share import ServerShare
from trainer.file_system import read_required

if TYPE_CHECKING:
    from rollout.servers.fleet import ServerFleet

LOOK_S = 5.0
"""Interval at which the role checks its own announcement."""


def serve(folder: RunFolder, config: RunConfig, doing: Callable[[str], None], *, node: int) -> None:
    """Start the SGLang servers of one node, announce them when they are healthy, and watch them until SIGTERM. All
    have ended at return."""
    is_over = stopping.EndOfStart(folder).has_come  # before the slow imports: it may come meanwhile
    shares = shares_of(folder, config, node)
    led_replicas = [f"replica-{share.replica}" for share in shares if share.node_rank == 0]
    for replica in led_replicas:  # before the slow imports: their other nodes may read the files already
        folder.forget(replica)

    from launch.checks.devices import gpus_here
    from rollout.guarded_process import OF_SERVERS, remove_abandoned
    from rollout.servers.command import ServerSpec
    from rollout.servers.fleet import ServerFleet

    remove_abandoned(OF_SERVERS)  # a node may have no sample role, which removes all kinds
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    name, host = serve_roles(config)[node], own_address(config.launch.nodes)
    spec = ServerSpec(config=config, cuda=gpus_here() > 0, host=host, key=folder.run_key())
    fleet = ServerFleet(spec, folder.logs, shares, meeting_points(folder, config, shares, host))
    is_announced = False

    try:
        fleet.start()
        timeout_s = config.rollout.server_start_timeout_s
        fleet.wait_healthy(timeout_s, print, should_stop=lambda: stop.is_set() or is_over())
        if not stop.is_set() and not is_over():
            announce(folder, name, fleet, stop, is_over)
            is_announced = True
            doing("serving")
            restarts = config.rollout.max_server_restarts if config.servers_may_restart else 0
            watch(fleet, folder, name, stop, is_over, restarts=restarts)
    finally:
        fleet.stop()
        if not (is_announced and is_superseded(folder, name)):
            for announced in (name, *led_replicas):
                folder.withdraw(announced)


def watch(
    fleet: "ServerFleet",
    folder: RunFolder,
    name: str,
    stop: threading.Event,
    is_over: Callable[[], bool],
    *,
    restarts: int,
) -> None:
    """Check the servers until ``stop`` or ``is_over()``, and restart those that have ended, ``restarts`` times in all.

    Raises:
        ServerDied: a server has ended, and no restart is left for it.
        TimeoutError: a restarted server does not become healthy.
    """
    looked = time.monotonic()
    while not stop.wait(0.5):
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            if is_superseded(folder, name):
                print("another start of this run has replaced this role: its servers end", flush=True)
                return
            if is_over():
                print("this start of the run has ended: its servers end", flush=True)
                return
            if hung := fleet.kill_hung():
                print(f"SGLang replicas {hung} stopped answering, and were killed", flush=True)
        if restarts <= 0:
            fleet.poll()
        elif fleet.note_ended():
            announce(folder, name, fleet, stop, is_over)  # first: cleaning up after a server may take long
            deaths = fleet.restart_ended(most=restarts)
            restarts -= len(deaths)
            for death in deaths:
                print(f"restarted (restarts left: {restarts}): {death}", flush=True)
        if back := fleet.look_at_restarted():
            announce(folder, name, fleet, stop, is_over)
            text = "are ready again, and wait for the next weight update"
            print(f"SGLang replicas {back} {text}", flush=True)


def announce(
    folder: RunFolder, name: str, fleet: "ServerFleet", stop: threading.Event, is_over: Callable[[], bool]
) -> None:
    about = {"urls": fleet.urls, "pid": os.getpid(), "host": socket.gethostname()}
    about |= {"lives": fleet.lives()}
    folder.announce(name, about, gives_up=lambda: stop.is_set() or is_over())


def is_superseded(folder: RunFolder, name: str) -> bool:
    """Whether the announced address of this process is gone, or is another process's. A node that was cut off may return with
    roles of an earlier start of the run, and no supervisor may be left to end them."""
    with contextlib.suppress(OSError):  # no answer from the file system is no evidence
        address = folder.read_address(name) or {}
        return (address.get("pid"), address.get("host")) != (os.getpid(), socket.gethostname())
    return False


def shares_of(folder: RunFolder, config: RunConfig, node: int) -> list[ServerShare]:
    """The servers of a node. Their GPUs follow the learner's on the same machine, unless a request (of several
    fleets on one machine) sets the first one."""
    shares, file = servers_on(config, node), folder.request
    request = read_required(file) if file.exists() else {}
    offset = request.get("first_gpu", shares[0].first_gpu) - shares[0].first_gpu
    return [replace(share, first_gpu=share.first_gpu + offset) for share in shares]


def meeting_points(
    folder: RunFolder, config: RunConfig, shares: Sequence[ServerShare], host: str
) -> dict[int, str]:
    """The address at which the ranks of each replica on several nodes meet, by replica. Its first node writes the
    address into the run folder, and the others wait for it."""
    from rollout.servers.ports import choose_ports

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


def serving_node(config: RunConfig, asked: int | None) -> int:
    """The number of this node among the servers': ``asked``, or that of this process in its Slurm step. Raises
    ValueError."""
    names = serve_roles(config)
    by_slurm = os.environ.get("SLURM_NODEID", "0") if config.launch.nodes is not None else "0"
    node = int(by_slurm) if asked is None else asked
    if not 0 <= node < len(names):
        source = f"--node {node}" if asked is not None else f"SLURM_NODEID={node}"
        count = counted(len(names), "node")
        raise ValueError(f"{source}: the servers of this run are on {count}, counted from 0")
    return node
