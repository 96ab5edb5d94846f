"""Free ports of one node for the servers."""

import itertools
import random
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of one replica on one node. Its TP ranks meet at ``nccl``. Its other channels are unix sockets."""

    http: int
    nccl: int


def choose_ports(replicas: Sequence[int], first_port: int | None, host: str = LOOPBACK) -> list[Ports]:
    """Ports of ``host`` for each replica i of this node: first_port + 2 i (HTTP) and the next one (where
    ranks meet). If ``first_port`` is None, free ports. Raises ValueError: one of the given ports is taken or
    out of range, or too few are free."""
    if first_port is None:
        return _free_ports(len(replicas), host)
    chosen = [Ports(http=first_port + 2 * i, nccl=first_port + 2 * i + 1) for i in replicas]
    last = max(ports.nccl for ports in chosen)
    if last > 65535:
        raise ValueError(
            f"rollout.first_port={first_port} with {max(replicas) + 1} replicas needs ports up to {last}; choose a lower first_port"
        )
    for port in (port for ports in chosen for port in (ports.http, ports.nccl)):
        if not _is_free(host, port):
            raise ValueError(
                f"port {port} on {host} is taken by another process (rollout.first_port={first_port} needs {chosen[0].http} to {last}); "
                "choose another rollout.first_port, leave it out to use free ports, or end that process"
            )
    return chosen


def _free_ports(replicas: int, host: str) -> list[Ports]:
    """Free ports below the kernel's range for outgoing connections: such a connection could take a server's port
    while the server still loads."""
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
