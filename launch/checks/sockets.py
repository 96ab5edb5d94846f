"""Lists the ports that a run listens on here, with their protection: ``tandem check-cluster --run RUN``.

launch/README.md says what is trusted, and what a firewall has to do.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from configs.loader import load_config
from configs.reading.files import text_of
from configs.schema import RunConfig
from launch.checks.node import NodeFinding, fail, ok, warn
from launch.processes.addresses import own_address
from launch.processes.run_folder import RunFolder

BY_KEY = "the run's key"
BY_ADDRESS = "its address alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A TCP port on which a process of the run listens."""

    role: str
    pid: int
    address: str
    port: int
    what: str
    protection: str


def listening(folder: RunFolder) -> list[Listening]:
    """The ports of the roles that have announced themselves from this host, and of all their descendants."""
    with_key = _ports_with_key(folder)
    ports = {}
    for role, process in _processes(folder):
        for address, port in _open_ports(process):
            what, protection = with_key.get(port) or _port_without_key(process, port)
            ports[process.pid, address, port] = Listening(
                role=role, pid=process.pid, address=address, port=port, what=what, protection=protection
            )
    return [ports[place] for place in sorted(ports)]


def sockets_of(folder: RunFolder) -> Iterator[NodeFinding]:
    """A finding per open port: a failure if it listens on another address than the run's own."""
    config = load_config(folder.config)
    expected = own_address(config.launch.nodes if isinstance(config, RunConfig) else None)
    ports = listening(folder)
    if not ports:
        text = f"no process of {folder.path} listens on this host"
        yield warn("sockets", text, "ask while it runs, on a host that it runs on")
    for port in ports:
        text = f"{port.role:<8} {port.address}:{port.port:<5} {port.what}, protected by {port.protection} (pid {port.pid})"
        if port.address == expected:
            yield ok("sockets", text)
        else:
            fix = "set launch.nodes.interface, or report this as a defect"
            yield fail("sockets", text, f"only {expected} should be listened on; {fix}")


def _processes(folder: RunFolder) -> Iterator[tuple[str, psutil.Process]]:
    for file in sorted(folder.roles.glob("*.json")):
        announced = json.loads(text_of(file))
        if announced.get("host") != socket.gethostname():
            continue
        try:
            first = psutil.Process(announced["pid"])
            # Learner ranks are children of torchrun, and only the first announces itself.
            root = first.parent() or first if file.stem == "learn" else first
            yield from ((file.stem, process) for process in (root, *root.children(recursive=True)))
        except psutil.NoSuchProcess:
            continue


def _open_ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Pairs (address, port)."""
    try:
        connections = process.net_connections("tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN]


def _ports_with_key(folder: RunFolder) -> dict[int, tuple[str, str]]:
    """Pairs (what, protection) by port."""
    ports = {}
    for file in folder.roles.glob("*.json"):
        announced = json.loads(text_of(file))
        ports |= {urlsplit(url).port: ("SGLang, HTTP", BY_KEY) for url in announced.get("urls", ())}
        if file.stem == "sample":
            ports[urlsplit(announced["address"]).port] = ("groups for the learner, ZeroMQ CURVE", BY_KEY)
    return ports


def _port_without_key(process: psutil.Process, port: int) -> tuple[str, str]:
    """(what, protection). A router replaces its own command line by a title, but that of its watchdog names its
    ports."""
    try:
        parent = process.parent()
        command = parent.cmdline() if parent else []
    except psutil.NoSuchProcess:
        command = []
    if "rollout.servers.start_router" in command:
        flag = command[command.index(str(port)) - 1] if str(port) in command else ""
        figures = ("sglang-router's figures, read only", BY_ADDRESS)
        return ("sglang-router, HTTP", BY_KEY) if flag == "--port" else figures
    return "collectives of gloo or NCCL, or a store for them", BY_ADDRESS
