"""The watch over servers, with a few lines of Python in a server's place."""

import socket
import sys
import time
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from configs.schema.rollout import RolloutConfig
from rollout.run_key import run_key
from rollout.servers import fleet as fleets
from rollout.servers.fleet import ServerDied, ServerFleet
from tests.support.server_specs import server_spec

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        while Path(sys.argv[2]).exists():
            time.sleep(0.05)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"weight_version": sys.argv[3], "model_path": sys.argv[4]}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def fleet(request, tmp_path, monkeypatch):
    """Of one server, or as many as the test asks for."""

    def command(spec, share, ports, meeting_point=None, *, weight_version=0):
        state = [str(tmp_path / "hang"), str(weight_version), str(spec.config.model.path.resolve())]
        return [sys.executable, "-c", SERVER, str(ports.http), *state]

    monkeypatch.setattr(fleets, "server_command", command)
    monkeypatch.setattr(fleets, "RESTARTED_HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(RolloutConfig, "hang_timeout_s", 1.0)
    (tmp_path / "config.json").write_text("{}")
    started = ServerFleet(server_spec(tmp_path, replicas=getattr(request, "param", 1)), tmp_path / "logs")
    try:
        started.start()
        started.wait_healthy(30)
        yield started
    finally:
        started.stop()


def test_a_server_that_stops_to_answer_is_killed_and_started_again_without_weights(fleet, tmp_path):
    lives = fleet.lives()
    assert fleet.kill_hung() == [] and list(lives.values()) == [1]
    (tmp_path / "hang").touch()
    began = time.monotonic()
    assert fleet.kill_hung() == [], "one question in vain is not enough"
    while not (killed := fleet.kill_hung()):
        assert time.monotonic() - began < 30
    assert killed == [0] and time.monotonic() - began > 1.0
    assert fleet.kill_hung() == [], "it has ended"
    (tmp_path / "hang").unlink()
    (death,) = fleet.restart_ended(most=1)
    assert "was killed by SIGKILL" in str(death) and fleet.lives() == {}
    while not fleet.look_at_restarted():
        assert fleet.kill_hung() == [], "it starts"
        assert time.monotonic() - began < 60
    assert fleet.lives() == dict.fromkeys(lives, 2)
    replica = fleet._replicas[0]
    assert fleets._version_of(fleet._spec, replica.ports.http, 5.0) == "-1"


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_servers_that_end_together_are_not_started_more_often_than_is_left(fleet):
    for replica in fleet._replicas:
        psutil.Process(replica.process.pid).kill()
        replica.process.wait()
    assert fleet.note_ended()
    with pytest.raises(ServerDied, match="replica 0"):
        fleet.restart_ended(most=1)
    assert [replica.life for replica in fleet._replicas] == [1, 1]
    assert len(fleet.restart_ended(most=2)) == 2


def test_a_server_that_answers_again_is_not_hung(fleet, tmp_path):
    (tmp_path / "hang").touch()
    assert fleet.kill_hung() == []
    (tmp_path / "hang").unlink()
    time.sleep(1.1)  # longer than the limit: a second silence begins anew
    assert fleet.kill_hung() == []
    (tmp_path / "hang").touch()
    assert fleet.kill_hung() == []
    (tmp_path / "hang").unlink()


def test_a_server_of_another_model_at_the_port_is_not_ours(fleet, tmp_path):
    """It has taken the port after ours was told to use it, and ours still loads."""
    (other := tmp_path / "other").mkdir()
    port = fleet._replicas[0].ports.http
    assert fleets._is_healthy(fleet._spec, port, 5.0)
    assert not fleets._is_healthy(server_spec(other), port, 5.0)


@pytest.mark.parametrize("answer", [b"[]", b"null", b'"up"', b"{", b"{}"])
def test_an_answer_of_another_form_is_not_ours(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(fleets, "own_answer", lambda *arguments, **options: answer)
    assert fleets._version_of(server_spec(tmp_path), 1, 1.0) is None


def test_the_end_of_a_server_does_not_tell_the_key(tmp_path, monkeypatch):
    """SGLang prints its settings; what its end is reported by stands where others may read it."""
    key = run_key(tmp_path / "key.yaml")
    ending = f"print({{'api_key': {key.secret!r}}}); print('out of memory'); raise SystemExit(3)"
    monkeypatch.setattr(fleets, "server_command", lambda *_, **__: [sys.executable, "-c", ending])
    (tmp_path / "config.json").write_text("{}")
    started = ServerFleet(replace(server_spec(tmp_path), key=key), tmp_path / "logs")
    try:
        started.start()
        with pytest.raises(ServerDied, match="out of memory") as death:
            started.wait_healthy(30)
    finally:
        started.stop()
    assert "'api_key': '***'" in str(death.value) and key.secret not in str(death.value)


BOUND = """
import atexit, socket, sys
atexit.register(print, 'nanobind: leaked 64 types!' + 60 * '\\n - leaked type "x"')
try:
    socket.socket().bind(address := ("127.0.0.1", int(sys.argv[1])))
except OSError as error:
    reason = f"error while attempting to bind on address {address!r}: {error.strerror.lower()}"
    print(f"ERROR:    [Errno {error.errno}] {reason}")
    raise SystemExit(1)
"""
"""A server that finds its port taken, in the words of asyncio and uvloop, which uvicorn prints."""


def test_a_port_that_is_taken_before_its_server_listens_is_named(tmp_path, monkeypatch):
    """Behind the error are the lists of what libraries leak."""
    with closing(socket.socket()) as stranger:

        def command(spec, share, ports, *_, **__):
            if stranger.getsockname()[1] == 0:
                stranger.bind(("127.0.0.1", ports.http))
                stranger.listen()
            return [sys.executable, "-c", BOUND, str(ports.http)]

        monkeypatch.setattr(fleets, "server_command", command)
        monkeypatch.setattr(fleets, "HEALTH_REQUEST_TIMEOUT_S", 0.1)
        (tmp_path / "config.json").write_text("{}")
        started = ServerFleet(server_spec(tmp_path), tmp_path / "logs")
        try:
            started.start()
            with pytest.raises(ServerDied) as death:
                started.wait_healthy(60)
            (restarted,) = started.restart_ended(most=1)  # Tandem itself starts it again
        finally:
            started.stop()
        port = stranger.getsockname()[1]
    told = f"because another process had taken its port {port}"
    assert f"{told}: start again; last lines" in str(death.value)
    assert str(death.value).endswith("address already in use") and "leaked" not in str(death.value)
    assert f"{told}; last lines" in str(restarted) and "start again" not in str(restarted)


TAKEN_ELSEWHERE = (
    "The server socket has failed to listen on any local network address. port: 57893, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use",
    "Address already in use (addr='tcp://127.0.0.1:57893')",
    "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1{port}): address already in use",
)
"""torch's TCPStore and ZMQ about ports of their own, and uvicorn about one of other digits."""


@pytest.mark.parametrize("said", TAKEN_ELSEWHERE)
def test_another_taken_port_is_not_told_as_that_of_http(tmp_path, monkeypatch, said):
    def command(spec, share, ports, *_, **__):
        return [sys.executable, "-c", f"raise SystemExit({said.replace('{port}', str(ports.http))!r})"]

    monkeypatch.setattr(fleets, "server_command", command)
    (tmp_path / "config.json").write_text("{}")
    started = ServerFleet(server_spec(tmp_path), tmp_path / "logs")
    try:
        started.start()
        with pytest.raises(ServerDied, match="already in use") as death:
            started.wait_healthy(60)
    finally:
        started.stop()
    assert "had taken its port" not in str(death.value)
