"""What a stranger on this host could send to the ports of a run. Only to loopback addresses, a bounded number
of times."""

import contextlib
import http.client
import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import zmq

from rollout.sampling.messages import Stop

TIMEOUT_S = 20.0
REQUESTS = (
    ("POST", "/pause_generation", b'{"mode": "abort"}'),
    ("POST", "/abort_request", b'{"rid": "", "abort_all": true}'),
    ("POST", "/begin_weight_update", b"{}"),
    ("POST", "/update_weights_from_disk", b'{"model_path": "/tmp"}'),
    ("POST", "/update_weights_from_tensor", b'{"serialized_named_tensors": ["gASVGgAAAAAAAACMAm9z"]}'),
    ("POST", "/release_memory_occupation", b"{}"),
    ("POST", "/generate", b'{"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}'),
    ("GET", "/server_info", b""),
    ("POST", "/flush_cache", b""),
    ("POST", "/configure_logging", b'{"dump_requests_folder": "/tmp/dumped", "dump_requests_threshold": 1}'),
)
"""Requests that would end, stall, change or read a server."""


def payloads(rng: random.Random) -> Iterator[bytes]:
    """Random bytes, and beginnings of the protocols that are spoken in a run: gloo, torch's store, HTTP,
    ZeroMQ, pickle."""
    yield from (rng.randbytes(size) for size in (0, 1, 7, 8, 64, 5000))
    # Gloo: the number of a connection.
    yield from (struct.pack("<q", number) + rng.randbytes(40) for number in (0, 1, 2, 17))
    magic = struct.pack("<I", 0x3C85F7CE)
    # Torch's TCPStore.
    yield from (bytes([0]) + magic + bytes([query]) + rng.randbytes(30) for query in range(12))
    yield bytes([0]) + magic + bytes([1]) + struct.pack("<Q", 2**62)  # a key of four exabytes
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{"
    yield b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZeroMQ without security
    yield b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + rng.randbytes(300)
    yield b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x01#\x94\x85\x94R\x94."


def throw_at(place: tuple[str, int], rng: random.Random) -> int:
    """Every payload on a connection of its own, ended in one of three ways; how many arrived."""
    arrived = 0
    for payload in payloads(rng):
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=TIMEOUT_S) as connection:
            connection.sendall(payload)
            arrived += 1
            match rng.randrange(3):
                case 0:
                    connection.shutdown(socket.SHUT_WR)
                case 1:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return arrived


def ask_without_key(place: tuple[str, int]) -> set[int]:
    """HTTP status codes of every request, without a key and with a wrong one."""
    codes = set()
    for method, path, body in REQUESTS:
        for headers in (
            {},
            {"Authorization": "Bearer " + "0" * 64},
            {"Authorization": "Basic eDp5"},
            {"X-Api-Key": "0" * 64},
        ):
            connection = http.client.HTTPConnection(*place, timeout=TIMEOUT_S)
            with contextlib.closing(connection):
                connection.request(
                    method, path, body=body, headers=headers | {"Content-Type": "application/json"}
                )
                codes.add(connection.getresponse().status)
    return codes


def tell_to_stop(address: str) -> bool:
    """Whether a sample role answers a strange ZeroMQ client, once without keys and once with keys of its own."""
    answered = False
    for keys in (False, True):
        with zmq.Context() as context, context.socket(zmq.REQ) as channel:
            channel.linger = 0
            if keys:
                channel.curve_publickey, channel.curve_secretkey = zmq.curve_keypair()
                channel.curve_serverkey, _ = zmq.curve_keypair()
            events = channel.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            channel.connect(address)
            channel.send(msgspec.msgpack.encode(Stop()))
            poller = zmq.Poller()
            poller.register(channel, zmq.POLLIN)
            poller.register(events, zmq.POLLIN)
            answered |= channel in dict(poller.poll(TIMEOUT_S * 1000))
            channel.disable_monitor()
            events.close()
    return answered
