"""The address of this host in a run, on which everything listens, and the interface of collectives."""

import os
import socket
from contextlib import closing

import psutil

from configs.schema.launch import NodesConfig
from rollout.servers.ports import LOOPBACK, choose_ports

SOMEWHERE = ("203.0.113.1", 9)
"""An unused address (TEST-NET-3 of RFC 5737), which the default route leads to. Nothing is sent to it."""
GLOO_AND_TENSORPIPE = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
AS_IN_SERVERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables that SGLang 0.5.23 sets in a server's processes if the environment does not (``_set_envs_and_config``). They decide
how NCCL shares memory between two ranks, and NCCL does not compare them. If learner and servers differ, their group fails or
hangs as it connects (NovaSky-AI/SkyRL#143, NVIDIA-NeMo/RL#564)."""


def own_address(nodes: NodesConfig | None) -> str:
    """The IPv4 address of this host in a run.

    The loopback address if the run is on one machine. Else, in this order: the address of
    ``nodes.interface``; that of this host's name, unless it is a loopback address; that of the default route.
    Raises ValueError if the interface has no address, or if none is given and no other host can be reached.
    """
    if nodes is None:
        return LOOPBACK
    if nodes.interface is not None:
        if addresses := _addresses().get(nodes.interface):
            return addresses[0]
        error = "does not exist" if addresses is None else "has no IPv4 address"
        where = f"launch.nodes.interface: {nodes.interface} {error} on {socket.gethostname()}"
        raise ValueError(f"{where}; use one of: {_interfaces_here()}")
    address = _host_name_address() or _default_route_address()
    if address is None:
        raise ValueError(
            f"launch.nodes: the name of this host ({socket.gethostname()}) has no address that others can reach, and there is no "
            f"default route; set launch.nodes.interface to one of: {_interfaces_here()}"
        )
    return address


def role_environment(nodes: NodesConfig | None) -> dict[str, str]:
    """Environment variables that make gloo, NCCL and tensorpipe use the interface of ``own_address``, and give learner and
    servers the same NCCL settings.

    On one machine this is the loopback interface, whatever the environment says, since their ports have no
    password. On several nodes without ``nodes.interface``, NCCL finds the fastest interface by itself, and
    variables that are already set are kept.
    """
    alike = {name: value for name, value in AS_IN_SERVERS.items() if name not in os.environ}
    if nodes is None:
        loopback = _interface_with(LOOPBACK) or "lo"
        return alike | dict.fromkeys((*GLOO_AND_TENSORPIPE, "NCCL_SOCKET_IFNAME"), loopback)
    if nodes.interface is not None:
        alike["NCCL_SOCKET_IFNAME"] = f"={nodes.interface}"
        return alike | dict.fromkeys(GLOO_AND_TENSORPIPE, nodes.interface)
    if (interface := _interface_with(own_address(nodes))) is not None:
        alike |= {name: interface for name in GLOO_AND_TENSORPIPE if name not in os.environ}
    return alike


def free_port(address: str) -> int:
    """A port that is free on this host now, and that no outgoing connection takes before it is used."""
    return choose_ports([0], None, address)[0].http


def _addresses() -> dict[str, list[str]]:
    """IPv4 addresses by interface."""
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def _interface_with(address: str) -> str | None:
    return next((name for name, addresses in _addresses().items() if address in addresses), None)


def _interfaces_here() -> str:
    used = [(name, addresses) for name, addresses in sorted(_addresses().items()) if addresses]
    return ", ".join(f"{name} ({' '.join(addresses)})" for name, addresses in used) or "none is up"


def _host_name_address() -> str | None:
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    # An outdated entry may resolve the name to another host's address.
    own = {address for addresses in _addresses().values() for address in addresses}
    candidates = (str(address[0]) for *_, address in resolved)
    return next((one for one in candidates if one in own and not one.startswith("127.")), None)


def _default_route_address() -> str | None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(SOMEWHERE)  # UDP: only looks up the route
        except OSError:
            return None
        return probe.getsockname()[0]
