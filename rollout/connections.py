"""Connections between hosts: they survive a short cut of the network, and give up on a host that is gone.

A connection is silent for minutes during a long generation. Only probes tell a busy peer from a vanished one.
"""

import errno
import http.client
import os
import socket
import struct
import time
from contextlib import closing

import zmq
from zmq.utils.monitor import parse_monitor_message

from rollout.run_key import RunKey

PEER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
"""Deadline of one attempt to connect."""
CONNECT_AGAIN_S = 0.5
REUSE_S = 4.0
"""Idle connections to a server are dropped after this time, before SGLang drops them and the next attempt fails."""
UNREACHABLE = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT}
"""Errors of a cut network. A host that is up and refuses answers with another error."""
ROOT = 0
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST = 4, 20, 1
"""Linux's numbers for a query of a socket: the netlink family, the message and its flag."""
LISTENER = ("0.0.0.0", 0)
"""The far end of a socket that listens."""


class PeerLost(ConnectionError):
    """The peer, or the network to it, is gone."""


def watch(connection: socket.socket, peer_timeout_s: float) -> socket.socket:
    """Have the kernel end ``connection`` when the other host has acknowledged nothing for ``peer_timeout_s``,
    with or without data under way."""
    options = {
        socket.TCP_KEEPIDLE: max(1, round(peer_timeout_s / 2)),
        socket.TCP_KEEPINTVL: max(1, round(peer_timeout_s / 6)),
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: round(peer_timeout_s * 1000),
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def watched_socket(address_info: tuple, *, peer_timeout_s: float) -> socket.socket:
    """A socket for one answer of ``socket.getaddrinfo``, not connected yet: aiohttp's ``socket_factory``."""
    family, kind, protocol, *_ = address_info
    return watch(socket.socket(family, kind, protocol), peer_timeout_s)


def connect(address: tuple[str, int], *, peer_timeout_s: float) -> socket.socket:
    """A watched connection to a process of this run. While the host cannot be reached, attempts are repeated for
    ``peer_timeout_s``. Raises OSError: the host refused or could not be reached in that time, or ``require_own`` raised."""
    deadline = time.monotonic() + peer_timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=min(CONNECT_TIMEOUT_S, peer_timeout_s))
        except OSError as error:
            if not is_unreachable(error) or time.monotonic() > deadline:
                raise
            time.sleep(CONNECT_AGAIN_S)
        else:
            try:
                require_own(connection)
            except PermissionError:
                connection.close()
                raise
            return watch(connection, peer_timeout_s)


def own_answer(host: str, port: int, path: str, *, key: RunKey, timeout_s: float) -> bytes | None:
    """The body of the answer to GET from a server of this run (``require_own``), if its status is 200; else None."""
    with closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
        try:
            connection.connect()
            require_own(connection.sock)
            connection.request("GET", path, headers=key.http_headers)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None


def require_own(connection: socket.socket) -> None:
    """Raise PermissionError if the other end is another user's process on this host. Callers check this before they send the
    key: a process that took a server's port, before its start or after its end, would get the key.

    Other hosts and closed connections are not checked, nor sockets whose user the kernel does not know.
    """
    if connection.family != socket.AF_INET:  # servers listen at no other
        return
    try:
        here, there = connection.getsockname(), connection.getpeername()
        # For another host's address the kernel would name a process here that listens at this port of every address.
        if not _is_of_this_host(there[0]):
            return
        user, inode = _owner(there, here)
        if not inode:  # not accepted yet: older kernels do not know the user then
            user, _ = _owner(there, LISTENER)
    except OSError:
        return
    if user not in (os.geteuid(), ROOT):
        host, port = there
        raise PermissionError(
            errno.EPERM,
            f"at {host}:{port} a process of another user (uid {user}) listens instead of this run's",
        )


def _is_of_this_host(address: str) -> bool:
    """Whether an IPv4 address is one of this host's. The near end of a connection does not show it: for 127.0.0.2 or a second
    address of an interface, the near end has the interface's first address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _owner(local: tuple[str, int], remote: tuple[str, int]) -> tuple[int, int]:
    """(user, inode) of this host's TCP socket with these ends (sock_diag(7)). Raises OSError: there is none."""
    addresses = [socket.inet_aton(address).ljust(16, b"\0") for address, _ in (local, remote)]
    ends = struct.pack("!HH", local[1], remote[1]) + b"".join(addresses)
    asked = (
        struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 2**32 - 1) + ends + bytes(4) + b"\xff" * 8
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, REQUEST, 0, 0) + asked)
        answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY or len(answer) < 88:
        raise OSError(errno.ENOENT, "no such socket")
    return struct.unpack_from("=II", answer, 80)


def is_unreachable(error: OSError) -> bool:
    """Whether an attempt to connect failed because of the network, which may come back."""
    return isinstance(error, TimeoutError) or error.errno in UNREACHABLE


def heartbeats(peer_timeout_s: float) -> dict[int, int]:
    """Options of a ZeroMQ socket that drops a connection after ``peer_timeout_s`` without a sign of its peer."""
    milliseconds = round(peer_timeout_s * 1000)
    return {
        zmq.HEARTBEAT_IVL: max(1, milliseconds // 4),
        zmq.HEARTBEAT_TIMEOUT: milliseconds,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: max(1, round(peer_timeout_s / 2)),
        zmq.TCP_KEEPALIVE_INTVL: max(1, round(peer_timeout_s / 6)),
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: milliseconds,
    }


class Requester:
    """A ZeroMQ REQ socket that reports a lost peer. A plain one would wait forever for the lost answer."""

    def __init__(self, context: zmq.Context, address: str, *, peer_timeout_s: float, key: RunKey) -> None:
        self._address, self._peer_timeout_s = address, peer_timeout_s
        self._socket = context.socket(zmq.REQ)
        self._socket.curve_serverkey, _ = key.curve_pair("sampler")
        self._socket.curve_publickey, self._socket.curve_secretkey = key.curve_pair("learner")
        self._socket.setsockopt(zmq.LINGER, 0)
        for option, value in heartbeats(peer_timeout_s).items():
            self._socket.setsockopt(option, value)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._connect_until = time.monotonic() + peer_timeout_s
        self._is_connected = False
        self._socket.connect(address)

    def send(self, message: bytes | memoryview) -> None:
        while self._events.poll(0):  # past events: a connection that was lost and made again works as before
            self._is_connected = self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not self._is_connected:
            self._connect_until = time.monotonic() + self._peer_timeout_s
        self._socket.send(message)

    def poll(self, timeout_ms: float) -> bool:
        """Whether the answer has come within ``timeout_ms``. Raises PeerLost: the connection was lost, or could not be
        made, so the answer will never come."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            left_s = deadline - time.monotonic()
            until_s = left_s if self._is_connected else min(left_s, self._connect_until - time.monotonic())
            ready = dict(self._poller.poll(int(max(until_s, 0) * 1000)))
            if self._socket in ready:
                return True
            if self._events in ready:
                self._is_connected = self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
                # The answer may have come just before the loss.
                if not self._is_connected and not self._socket.poll(0):
                    raise PeerLost(f"lost the connection to {self._address}: its process or its host is gone")
            elif not self._is_connected and time.monotonic() >= self._connect_until:
                raise PeerLost(
                    f"no connection to {self._address} in {self._peer_timeout_s:g} s: its process or its host is gone"
                )
            elif time.monotonic() >= deadline:
                return False

    def recv(self) -> memoryview:
        """The answer, in ZeroMQ's own memory: it is not copied."""
        return self._socket.recv(copy=False).buffer

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()

    def _next_event(self) -> int:
        return parse_monitor_message(self._events.recv_multipart())["event"]
