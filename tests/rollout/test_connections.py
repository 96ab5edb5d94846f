"""Connections between hosts: a cut of the network is waited out, and a peer that is gone is noticed."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import aiohttp
import pytest
import zmq
from aiohttp import web

from rollout import connections
from rollout.client import GenerationError
from rollout.connections import PeerLost, Requester, connect, own_answer, require_own, watch
from rollout.run_key import run_key
from rollout.sampling.messages import SamplingError
from rollout.sampling.remote import RemoteSampler
from rollout.servers.client import SGLangClient
from rollout.servers.control_line import ControlError, ControlLine
from tests.support.server_specs import KEY

GONE = OSError(errno.ENETUNREACH, "Network is unreachable")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize("seconds", [60.0, 6.0, 0.5])
def test_the_kernel_gives_a_silent_host_up_in_time(seconds):
    with closing(watch(socket.socket(), seconds)) as connection:

        def option(name: int) -> int:
            return connection.getsockopt(socket.IPPROTO_TCP, name)

        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert idle <= max(seconds, 4)  # whole seconds: not less than one each
        assert option(socket.TCP_USER_TIMEOUT) == seconds * 1000


@pytest.fixture
def network(monkeypatch):
    """What happens to attempts to connect, one after another; beyond those listed they go through. Returns
    those made."""

    def make(*outcomes: OSError) -> list:
        made, real = [], socket.create_connection

        def attempt(address, timeout):
            made.append(address)
            if len(made) <= len(outcomes):
                raise outcomes[len(made) - 1]
            return real(address, timeout)

        monkeypatch.setattr(connections.socket, "create_connection", attempt)
        monkeypatch.setattr(connections, "CONNECT_AGAIN_S", 0.01)
        return made

    return make


@pytest.fixture
def listening():
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()


STRANGER = """
import os, socket, sys, time
os.setgid(65534), os.setuid(65534)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(float(sys.argv[1]))
connection, _ = server.accept()
print("got", connection.recv(2000), flush=True)
time.sleep(60)
"""


@pytest.fixture(params=[0, 1], ids=["accepts", "accepts late"])
def stranger(request):
    """Port of another user's process, which took it in place of a server; and what that process is told."""
    if os.geteuid() != 0:
        pytest.skip("starts a process of another user: run it as root")
    command = [sys.executable, "-I", "-c", STRANGER, str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield int(process.stdout.readline()), lambda: (process.stdout.readline(), process.kill())[0]
        process.kill()


def test_another_users_process_at_a_servers_port_is_not_told_the_key(stranger, tmp_path):
    port, told = stranger
    key = run_key(tmp_path / "key.yaml")

    async def generate():
        options = {"max_concurrency": 1, "timeout_s": 20, "max_retries": 0, "key": key}
        async with SGLangClient([f"http://127.0.0.1:{port}"], **options) as client:
            await client.generate_group([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[], seeds=[1])

    refused = "another user \\(uid 65534\\) listens"
    with pytest.raises(GenerationError, match=refused):
        asyncio.run(generate())
    assert told() == "got b''\n"


def test_another_users_process_controls_no_learner_and_is_no_healthy_server(stranger, tmp_path):
    port, told = stranger
    key = run_key(tmp_path / "key.yaml")
    line = ControlLine(f"http://127.0.0.1:{port}", timeout_s=20, key=key)
    with closing(line), pytest.raises(ControlError, match="another user"):
        line.ask("GET", "/model_info", None).result()
    assert told() == "got b''\n"
    assert own_answer("127.0.0.1", port, "/model_info", key=key, timeout_s=5.0) is None


class Connected(socket.socket):
    """Says that it is connected to a port of another host."""

    port = 0

    def getsockname(self) -> tuple[str, int]:
        return "198.51.100.1", 40000

    def getpeername(self) -> tuple[str, int]:
        return "198.51.100.2", self.port


def test_who_listens_at_a_port_here_says_nothing_of_the_port_of_another_host(monkeypatch):
    """The kernel would name the local process for both."""
    monkeypatch.setattr(connections, "ROOT", -1)
    monkeypatch.setattr(connections.os, "geteuid", lambda: 12345)  # so that this process is another user's
    with closing(socket.create_server(("0.0.0.0", 0))) as server, Connected() as elsewhere:
        Connected.port = server.getsockname()[1]
        for address in ("127.0.0.1", "127.0.0.2"):
            with (
                closing(socket.create_connection((address, Connected.port))) as here,
                pytest.raises(PermissionError, match="another user"),
            ):
                require_own(here)
        require_own(elsewhere)


@pytest.mark.parametrize(
    "cut", [GONE, OSError(errno.EHOSTUNREACH, "No route to host"), TimeoutError("timed out")]
)
def test_a_cut_is_waited_out(network, listening, cut):
    made = network(cut, cut, cut)
    with closing(connect(listening, peer_timeout_s=20)) as connection:
        assert connection.getpeername() == listening
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert len(made) == 4


def test_a_cut_for_good_ends_in_its_error_and_a_refusal_at_once(network, listening):
    made = network(*[GONE] * 1000)
    with pytest.raises(OSError, match="unreachable"):
        connect(listening, peer_timeout_s=1.0)
    assert 2 < len(made) < 110
    made = network(REFUSED)
    with pytest.raises(ConnectionRefusedError):
        connect(listening, peer_timeout_s=20)
    assert len(made) == 1


# --- generation
# ---------------------------------------------------------------------------------------------------------------------


async def generate(monkeypatch, outcomes: list[OSError], *, peer_timeout_s: float, max_retries: int):
    """Through a client whose attempts to connect have these outcomes first. Returns its stats."""
    sample = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]]}
    reply = {
        "output_ids": [5],
        "meta_info": sample | {"weight_versions": [{"version": "0", "start": 0, "end": 1}]},
    }

    async def answer(request):
        return web.json_response([reply])

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    left = list(outcomes)
    real = aiohttp.TCPConnector._wrap_create_connection

    async def attempt(self, *args, **kwargs):
        if left:
            raise aiohttp.ClientConnectorError(kwargs["req"].connection_key, left.pop(0))
        return await real(self, *args, **kwargs)

    monkeypatch.setattr(aiohttp.TCPConnector, "_wrap_create_connection", attempt)
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        async with SGLangClient(
            [url],
            max_concurrency=4,
            timeout_s=60,
            max_retries=max_retries,
            peer_timeout_s=peer_timeout_s,
            key=KEY,
        ) as client:
            await client.generate_group([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[], seeds=[1])
            return client.stats
    finally:
        await runner.cleanup()


def test_attempts_during_a_cut_are_repeated_and_counted_but_use_up_no_retry(monkeypatch):
    stats = asyncio.run(generate(monkeypatch, [GONE] * 4, peer_timeout_s=30, max_retries=0))
    assert (stats.requests, stats.retries) == (1, 4)


def test_a_server_that_refuses_uses_up_retries(monkeypatch):
    assert asyncio.run(generate(monkeypatch, [REFUSED], peer_timeout_s=30, max_retries=1)).retries == 1
    with pytest.raises(GenerationError, match=r"2 attempts at 1 samples failed \(max_retries=1\)"):
        asyncio.run(generate(monkeypatch, [REFUSED] * 2, peer_timeout_s=30, max_retries=1))


def test_a_cut_for_good_ends_the_generation(monkeypatch):
    with pytest.raises(GenerationError, match="unreachable"):
        asyncio.run(generate(monkeypatch, [GONE] * 1000, peer_timeout_s=0.3, max_retries=1))


# --- learner and sample role
# --------------------------------------------------------------------------------------------------------

ANSWERER = """
import signal, sys, zmq
channel = zmq.Context().socket(zmq.REP)
channel.curve_server = True
channel.curve_publickey, channel.curve_secretkey = (half.encode() for half in sys.argv[1:])
print(channel.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while (asked := channel.recv()) != b"never":
    channel.send(asked)
signal.pause()
"""


@pytest.fixture
def answerer():
    """A process that answers what it is asked, but for "never"; and its address."""
    command = [sys.executable, "-c", ANSWERER, *(half.decode() for half in KEY.curve_pair("sampler"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, f"tcp://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@pytest.fixture
def requester(answerer):
    context = zmq.Context()
    made = Requester(context, answerer[1], peer_timeout_s=3.0, key=KEY)
    yield made
    made.close()
    context.term()


def test_answers_come_through_and_a_slow_one_is_waited_for(requester):
    for message in (b"one", b"two"):
        requester.send(message)
        assert requester.poll(20_000)
        assert requester.recv() == message
    requester.send(b"never")
    assert not requester.poll(7500), "busy for longer than peer_timeout_s, and still there"


# A process that ended, and one (or a host) that is silent.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_ends_the_wait_for_its_answer(answerer, requester, number):
    requester.send(b"first")
    assert requester.poll(20_000) and requester.recv() == b"first"
    requester.send(b"never")
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (answerer[0].pid, number)).start()
    with pytest.raises(PeerLost, match="lost the connection to tcp://"):
        requester.poll(60_000)
    assert time.monotonic() - began < 40


def test_a_sample_role_that_cannot_be_reached_is_an_error_of_sampling_within_the_time_for_it():
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))  # not listening
        with RemoteSampler(
            f"tcp://127.0.0.1:{nobody.getsockname()[1]}", timeout_s=60, peer_timeout_s=0.3, key=KEY
        ) as remote:
            began = time.monotonic()
            with pytest.raises(
                SamplingError, match=r"the sample role is gone: no connection to tcp://127.0.0.1:\d+ in 0.3 s"
            ):
                remote.drain(0.0)
            assert time.monotonic() - began < 40
