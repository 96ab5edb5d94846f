"""The key of a run, and a sample role that ignores everybody who does not prove it."""

import asyncio
import contextlib
import os
import random
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from configs.schema.rollout import RouterConfig
from launch.processes.run_folder import RunFolder
from rollout.run_key import RunKey, run_key
from rollout.sampling.messages import SamplingError, Stop
from rollout.sampling.remote import RemoteSampler
from rollout.sampling.role import serve
from rollout.servers.command import server_command
from rollout.servers.ports import choose_ports
from rollout.servers.router import router_command
from rollout.servers.share import on_one_machine
from tests.rollout.sampling.test_sampler import make_sampler, model_dir, tokenizer  # noqa: F401  (fixtures)
from tests.support.server_specs import server_spec

PATIENCE_S = 30.0


def test_all_processes_of_a_run_get_one_key_which_only_its_owner_can_read(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        keys = [*threads.map(lambda _: run_key(tmp_path / "key.yaml"), range(32))]
    assert len({key.secret for key in keys}) == 1 and len(keys[0].secret) == 64
    assert stat.S_IMODE(os.stat(tmp_path / "key.yaml").st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key.yaml"]
    assert keys[0].secret not in repr(keys[0])
    assert keys[0].curve_pair("sampler") != keys[0].curve_pair("learner")
    assert keys[0].curve_pair("learner") == keys[1].curve_pair("learner")


def test_a_key_that_others_can_read_and_a_file_without_one_are_refused(tmp_path):
    file = tmp_path / "key.yaml"
    run_key(file)
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"others can read .*key\.yaml.*remove it"):
        run_key(file)
    cut_off = file.read_bytes()[:-8]
    for content in (b"", b"api-key: short", b"- a", b"api-key: 3", cut_off, b"\xff"):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ValueError, match=r"key\.yaml holds no key of a run; remove it"):
            run_key(file)


def test_every_start_of_a_run_has_a_key_of_its_own(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    folder = RunFolder(tmp_path)
    folder.claim()
    first = folder.run_key().secret
    assert folder.run_key().secret == first
    folder.release()
    folder.claim()
    assert folder.run_key().secret != first
    folder.release()


def test_no_command_line_shows_the_key(tmp_path):
    key, ports = run_key(tmp_path / "key.yaml"), choose_ports([0], None)[0]
    (share,) = on_one_machine(1, 1)
    server = server_command(replace(server_spec(tmp_path), key=key), share, ports)
    router = router_command(RouterConfig(), ["http://127.0.0.1:9"], ports=ports, request_timeout_s=1, key=key)
    for command in (server, router):
        assert key.secret not in " ".join(command)
        assert str(key.file) in command


# ---------------------------------------------------------------------------------------------------------------------
# sample role


class Role:
    """A sample role in a thread."""

    def __init__(self, sampler, key: RunKey) -> None:
        announced, ready = [], threading.Event()

        def announce(address: str) -> None:
            announced.append(address)
            ready.set()

        self.thread = threading.Thread(
            target=lambda: asyncio.run(serve(sampler, announce=announce, key=key, doing=print)), daemon=True
        )
        self.thread.start()
        assert ready.wait(PATIENCE_S)
        self.address = announced[0]
        self.place = (urlsplit(self.address).hostname, urlsplit(self.address).port)


@pytest.fixture
def key(tmp_path) -> RunKey:
    return run_key(tmp_path / "key.yaml")


@pytest.fixture
def role(tokenizer, key):  # noqa: F811
    role = Role(make_sampler(tokenizer), key)
    yield role
    with RemoteSampler(role.address, timeout_s=PATIENCE_S, key=key) as remote:
        remote.stop()
    role.thread.join(PATIENCE_S)
    assert not role.thread.is_alive()


def is_heard(address: str, message: bytes, **curve: bytes) -> bool:
    """Whether an answer comes to a REQ socket with these CURVE keys."""
    with zmq.Context() as context, context.socket(zmq.REQ) as channel:
        channel.linger = 0
        for name, value in curve.items():
            setattr(channel, name, value)
        events = channel.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                                            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)  # fmt: skip
        channel.connect(address)
        channel.send(message)
        poller = zmq.Poller()
        poller.register(channel, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        ready = dict(poller.poll(PATIENCE_S * 1000))
        assert ready, "neither an answer nor a refusal"
        channel.disable_monitor()
        events.close()
        return channel in ready


def position_of(learner: RemoteSampler) -> int:
    """In the data, after one more group."""
    *_, state = learner.next_groups(1, newest=0, max_staleness=0)
    return state["position"]


def test_nobody_without_the_key_can_stop_a_sample_role_or_move_its_position(role, key, tmp_path):
    stop = msgspec.msgpack.encode(Stop())
    other = run_key(tmp_path / "other.yaml")
    (server, _), (public, secret) = key.curve_pair("sampler"), other.curve_pair("learner")
    with RemoteSampler(role.address, timeout_s=PATIENCE_S, key=key) as learner:
        before = position_of(learner)
        assert not is_heard(role.address, stop), "no key at all"
        assert not is_heard(
            role.address, stop, curve_serverkey=server, curve_publickey=public, curve_secretkey=secret
        )
        assert not is_heard(
            role.address,
            stop,
            curve_serverkey=other.curve_pair("sampler")[0],
            curve_publickey=public,
            curve_secretkey=secret,
        )
        assert position_of(learner) == before + 1
        assert role.thread.is_alive()


def test_bytes_that_are_no_request_end_neither_the_role_nor_another_connection(role, key):
    rng = random.Random(0)
    with RemoteSampler(role.address, timeout_s=PATIENCE_S, key=key) as learner:
        before = position_of(learner)
        for size in (0, 1, 7, 10, 64, 65, 4096):
            for _ in range(5):
                with socket.create_connection(role.place) as connection, contextlib.suppress(OSError):
                    connection.sendall(rng.randbytes(size))
        server, (public, secret) = key.curve_pair("sampler")[0], key.curve_pair("learner")
        for message in (
            b"",
            b"\xc1",
            rng.randbytes(100),
            msgspec.msgpack.encode({"type": "Unknown"}),
            msgspec.msgpack.encode(["Stop"]),
        ):
            assert is_heard(
                role.address, message, curve_serverkey=server, curve_publickey=public, curve_secretkey=secret
            ), "it gets a Failure"
        assert position_of(learner) == before + 1


class Recorder:
    """A connection to ``place`` in the middle, which keeps what the client has sent."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place, self.sent = place, bytearray()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(self._place)
        threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()
        self._pump(client, server, self.sent)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_recorded_conversation_that_is_sent_again_does_nothing(role, key):
    recorder = Recorder(role.place)
    with RemoteSampler(recorder.address, timeout_s=PATIENCE_S, key=key) as learner:
        position = position_of(learner)
    assert position == 1 and len(recorder.sent) > 300
    assert b"NextGroups" not in recorder.sent, "it is encrypted too"
    with socket.create_connection(role.place, timeout=PATIENCE_S) as connection, contextlib.suppress(OSError):
        connection.sendall(bytes(recorder.sent))
        while connection.recv(4096):  # until the role hangs up
            pass
    with RemoteSampler(role.address, timeout_s=PATIENCE_S, key=key) as learner:
        assert position_of(learner) == position + 1


def test_a_learner_of_another_run_is_told(role, tmp_path):
    with RemoteSampler(
        role.address, timeout_s=PATIENCE_S, peer_timeout_s=2.0, key=run_key(tmp_path / "another.yaml")
    ) as stranger:
        with pytest.raises(SamplingError, match=r"the sample role is gone|key"):
            stranger.drain(0.0)
    assert isinstance(role.address, str) and Path(tmp_path, "another.yaml").exists()
