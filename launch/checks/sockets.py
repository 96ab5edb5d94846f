"""Everything that a run listens on here, where, and what protects it: ``tandem check-cluster --run RUN``.

What is trusted, and what a firewall has to do, is in launch/README.md.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from configs.loader import load_config
from configs.schema import RunConfig
from launch.checks.node import Finding, fail, ok, warn
from launch.processes.addresses import own_address
from launch.processes.run_folder import RunFolder

BY_KEY = "the run's key"
BY_ADDRESS = "its address alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """One TCP port that a process of the run has open to others."""

    role: str
    pid: int
    address: str
    port: int
    what: str
    protection: str


def listening(folder: RunFolder) -> list[Listening]:
    """Of the roles that have announced themselves from this host, and of every process that came from them."""
    with_key = _ports_with_key(folder)
    found = {
        (pid, *address): Listening(
            role=role, pid=pid, address=address[0], port=address[1], what=what, protection=protection
        )
        for role, process in _processes(folder)
        for pid, address in _open_ports(process)
        for what, protection in [with_key.get(address[1]) or _other(process, address[1])]
    }
    return [found[place] for place in sorted(found)]


def sockets_of(folder: RunFolder) -> Iterator[Finding]:
    """A line per open port: a failure where it is reached from beyond the run's own address."""
    config = load_config(folder.config, [])
    expected = own_address(config.launch.nodes if isinstance(config, RunConfig) else None)
    ports = listening(folder)
    if not ports:
        yield warn(
            "sockets",
            f"no process of {folder.path} listens on this host",
            "ask while it runs, on a host that it runs on",
        )
    for port in ports:
        text = f"{port.role:<8} {port.address}:{port.port:<5} {port.what}, protected by {port.protection} (pid {port.pid})"
        if port.address == expected:
            yield ok("sockets", text)
        else:
            yield fail(
                "sockets",
                text,
                f"only {expected} should be listened on; set launch.nodes.interface, or report this as a defect",
            )


def _processes(folder: RunFolder) -> Iterator[tuple[str, psutil.Process]]:
    for file in sorted((folder.path / "roles").glob("*.json")):
        announced = json.loads(file.read_text())
        if announced.get("host") != socket.gethostname():
            continue
        try:
            first = psutil.Process(announced["pid"])
            # Learner ranks are children of torchrun, and only the first announces itself.
            root = first.parent() or first if file.stem == "learn" else first
            yield from ((file.stem, process) for process in (root, *root.children(recursive=True)))
        except psutil.NoSuchProcess:
            continue


def _open_ports(process: psutil.Process) -> list[tuple[int, tuple[str, int]]]:
    try:
        connections = process.net_connections("tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [
        (process.pid, (connection.laddr.ip, connection.laddr.port))
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def _ports_with_key(folder: RunFolder) -> dict[int, tuple[str, str]]:
    """(what, protection) by port."""
    ports = {}
    for file in (folder.path / "roles").glob("*.json"):
        announced = json.loads(file.read_text())
        ports |= {urlsplit(url).port: ("SGLang, HTTP", BY_KEY) for url in announced.get("urls", ())}
        if file.stem == "sample":
            ports[urlsplit(announced["address"]).port] = ("groups for the learner, ZeroMQ CURVE", BY_KEY)
    return ports


def _other(process: psutil.Process, port: int) -> tuple[str, str]:
    """(what, protection). The ports of a router are on the command line of its watchdog; it gives itself a
    title in place of its own."""
    try:
        parent = process.parent()
        command = parent.cmdline() if parent else []
    except psutil.NoSuchProcess:
        command = []
    if "rollout.servers.start_router" in command:
        flag = command[command.index(str(port)) - 1] if str(port) in command else ""
        return (
            ("sglang-router, HTTP", BY_KEY)
            if flag == "--port"
            else ("sglang-router's figures, read only", BY_ADDRESS)
        )
    return "collectives of gloo or NCCL, or a store for them", BY_ADDRESS
