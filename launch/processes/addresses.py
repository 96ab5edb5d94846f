"""Where the roles of a run reach this host: one address for everything that listens here, and the interface
that collectives use."""

import os
import socket
from contextlib import closing

import psutil

from configs.schema.launch import NodesConfig
from rollout.servers.command import LOOPBACK, choose_ports

SOMEWHERE = ("203.0.113.1", 9)
"""An address that nobody has (TEST-NET-3 of RFC 5737): a route to it is the default one. Nothing is sent."""


def own_address(nodes: NodesConfig | None) -> str:
    """The IPv4 address of this host in a run.

    The loopback address where the run is on one machine; else that of ``nodes.interface``; else what this
    host's name stands for, unless that is a loopback address; else the one that the default route leaves
    from.

    Raises:
        ValueError: the interface has no address or does not exist here, or none is given and nothing leads to
        another host.
    """
    if nodes is None:
        return LOOPBACK
    if nodes.interface is not None:
        return _address_of(nodes.interface)
    address = _of_host_name() or _of_default_route()
    if address is None:
        raise ValueError(
            f"launch.nodes: the name of this host ({socket.gethostname()}) stands for no address that others could reach, and there is no "
            f"default route; set launch.nodes.interface to one of: {_interfaces_here()}"
        )
    return address


def role_environment(nodes: NodesConfig | None) -> dict[str, str]:
    """What gloo, NCCL and tensorpipe of a role on this host are told, so that they use the interface of
    ``own_address``.

    On one machine that is the loopback interface, whatever the environment says: what they listen on has no
    password. On several, without ``nodes.interface`` NCCL is left to find the fastest one by itself, and what
    the environment says already is kept.
    """
    if nodes is None:
        return dict.fromkeys(
            ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
            _interface_with(LOOPBACK) or "lo",
        )
    if nodes.interface is not None:
        return dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), nodes.interface) | {
            "NCCL_SOCKET_IFNAME": f"={nodes.interface}"
        }
    interface = _interface_with(own_address(nodes))
    found = (
        dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface) if interface is not None else {}
    )
    return {name: value for name, value in found.items() if name not in os.environ}


def free_port(address: str) -> int:
    """One that is free on this host now, and that no outgoing connection takes before it is used."""
    return choose_ports([0], None, address)[0].http


def _addresses() -> dict[str, list[str]]:
    """IPv4, by interface."""
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def _address_of(interface: str) -> str:
    found = _addresses().get(interface)
    if found:
        return found[0]
    what = "has no IPv4 address" if found == [] else "does not exist"
    raise ValueError(
        f"launch.nodes.interface: {interface} {what} on {socket.gethostname()}; use one of: {_interfaces_here()}"
    )


def _interface_with(address: str) -> str | None:
    return next((name for name, found in _addresses().items() if address in found), None)


def _interfaces_here() -> str:
    return (
        ", ".join(f"{name} ({' '.join(found)})" for name, found in sorted(_addresses().items()) if found)
        or "none is up"
    )


def _of_host_name() -> str | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    # A name that stands for an address of another host (an old entry) is of no use either.
    here = {address for addresses in _addresses().values() for address in addresses}
    addresses = (str(address[0]) for *_, address in found)
    return next(
        (address for address in addresses if address in here and not address.startswith("127.")), None
    )


def _of_default_route() -> str | None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(SOMEWHERE)  # of UDP: only looks up the route
        except OSError:
            return None
        return probe.getsockname()[0]
