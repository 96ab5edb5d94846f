"""The line to a server, against one that is read and answered by hand."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from rollout.servers import control_line
from rollout.servers.control import SGLangControl
from rollout.servers.control_line import ControlError, ControlLine
from rollout.sglang_plugin.tandem_weight_transfer import PROTOCOL
from tests.support.server_specs import KEY, make_control

TIMEOUT_S = 10.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n"


class Server:
    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT_S)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(TIMEOUT_S)
        return connection


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with closing(server.listener):
        yield server


@pytest.fixture
def make_line() -> Iterator[Callable[..., ControlLine]]:
    lines = []

    def make(url: str, timeout_s: float = TIMEOUT_S) -> ControlLine:
        lines.append(ControlLine(url, timeout_s=timeout_s, key=KEY))
        return lines[-1]

    yield make
    for line in lines:
        line.close()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        part = connection.recv(4096)
        assert part, f"closed after {found!r}"
        found += part
    return found


def test_requests_travel_before_answers_and_answers_come_in_their_order(server, make_line):
    line = make_line(server.url)
    first, second = line.ask("POST", "/first", {"a": 1}), line.ask("GET", "/second", None)
    with server.accept() as connection:
        host, proof = server.url.removeprefix("http://"), f"Authorization: Bearer {KEY.secret}\r\n"
        assert read_until(connection, b"Length: 0\r\n\r\n").decode() == (
            f"POST /first HTTP/1.1\r\nHost: {host}\r\n{proof}Content-Type: application/json\r\nContent-Length: 7\r\n\r\n"
            f'{{"a":1}}GET /second HTTP/1.1\r\nHost: {host}\r\n{proof}Content-Type: application/json\r\nContent-Length: 0\r\n\r\n'
        )
        assert not first.done() and not second.done()
        connection.sendall(OK + b'{"x":1}' + OK + b'{"x"')
        assert first.result(TIMEOUT_S) == {"x": 1}
        assert not second.done()
        connection.sendall(b":2}")
        assert second.result(TIMEOUT_S) == {"x": 2}


def test_a_refusal_carries_the_servers_words_and_the_line_goes_on(server, make_line):
    line = make_line(server.url)
    refused, after = line.ask("POST", "/refused", {}), line.ask("POST", "/after", {})
    with server.accept() as connection:
        message = b'{"message":"no such group"}'
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(message)}\r\n\r\n"
        connection.sendall(head.encode() + message + OK + b'{"x":3}')
        with pytest.raises(
            ControlError, match=r"POST http://127.0.0.1:\d+/refused answered HTTP 400: no such group"
        ):
            refused.result(TIMEOUT_S)
        assert after.result(TIMEOUT_S) == {"x": 3}


def test_an_answer_that_is_no_json_is_empty(server, make_line):
    answer = make_line(server.url).ask("POST", "/flush_cache", {})
    with server.accept() as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\ndone\n")
        assert answer.result(TIMEOUT_S) == {}


BROKEN = {
    b"": "closed the connection without an answer",
    OK + b'{"x"': "in the middle of an answer",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n": "has no Content-Length",
}


@pytest.mark.parametrize("sent", BROKEN)
def test_a_broken_connection_fails_all_that_is_due_and_the_next_request_gets_a_new_one(
    server, make_line, sent
):
    line = make_line(server.url)
    due = [line.ask("POST", "/one", {}), line.ask("POST", "/two", {})]
    with server.accept() as connection:
        read_until(connection, b"{}")
        connection.sendall(sent)
    with pytest.raises(ControlError, match=BROKEN[sent]):
        due[0].result(TIMEOUT_S)
    with pytest.raises(ControlError):
        due[1].result(TIMEOUT_S)
    again = line.ask("POST", "/again", {})
    with server.accept() as connection:
        connection.sendall(OK + b'{"x":4}')
        assert again.result(TIMEOUT_S) == {"x": 4}


def test_silence_ends_at_the_deadline(server, make_line):
    answer = make_line(server.url, timeout_s=0.2).ask("POST", "/one", {})
    started = time.monotonic()
    with pytest.raises(ControlError, match="timed out"):
        answer.result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S


def test_a_server_that_is_not_there_fails_the_request(server, make_line):
    server.listener.close()
    with pytest.raises(ControlError, match=r"POST http://127.0.0.1:\d+/one failed: .*refused"):
        make_line(server.url).ask("POST", "/one", {}).result(TIMEOUT_S)


def test_close_fails_what_is_due(server, make_line):
    line = make_line(server.url)
    answer: Future = line.ask("POST", "/one", {})
    with server.accept():
        line.close()
        with pytest.raises(ControlError, match="failed"):
            answer.result(TIMEOUT_S)


def test_an_idle_connection_is_not_used_again(server, make_line, monkeypatch):
    line = make_line(server.url)
    for reuse_s, same in ((60.0, True), (0.0, False)):
        answer = line.ask("POST", "/one", {})
        if reuse_s == 60.0:
            connection = server.accept()
        connection.sendall(OK + b'{"x":1}')
        answer.result(TIMEOUT_S)
        monkeypatch.setattr(control_line, "REUSE_S", reuse_s)
        further = line.ask("POST", "/two", {})
        other = connection if same else server.accept()
        other.sendall(OK + b'{"x":2}')
        assert further.result(TIMEOUT_S) == {"x": 2}
        if other is not connection:
            other.close()
    connection.close()


def json_answer(content: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()


def probe(control: SGLangControl) -> object:
    return control.probe([3, 4], max_new_tokens=1, temperature=1.0)


def greedy(control: SGLangControl) -> object:
    return control.greedy([[3, 4]], max_new_tokens=1)


def close_update(control: SGLangControl) -> object:
    return control.close_update()


def checksums(control: SGLangControl) -> object:
    return control.checksums()


VERSION, CHECKSUMS = '{"weight_version": "3"}', '{"ranks": [{"checksums": {"w": "00ff"}}]}'
SAMPLE = (
    '{"output_ids": [5], "meta_info": {"output_token_logprobs": [[%s, null]], "finish_reason": {"type": "length"}, '
    '"weight_versions": [{"version": "3", "start": 0, "end": 1}]}}'
)
GREEDY = '{"output_ids": [5], "meta_info": {"input_token_logprobs": [[%s], [%s]], "output_token_logprobs": [[%s]]}}'


@pytest.mark.parametrize(
    ("ask", "answers", "message"),
    [
        (probe, [SAMPLE % "-0.5, 5"], None),
        (probe, [SAMPLE % "null, 5"], "probe: .*no finite log-prob for token 1 of 1"),
        # The first token of a prompt has none.
        (
            greedy,
            ["{}", GREEDY % ("null, 3", "-1.0, 4", "-0.5, 5")],
            None,
        ),
        (
            greedy,
            ["{}", GREEDY % ("null, 3", "null, 4", "-0.5, 5")],
            "greedy continuation: .*no finite log-prob for token 1 of 1",
        ),
        (
            greedy,
            ["{}", GREEDY % ("null, 3", "-1.0, 4", "null, 5")],
            "greedy continuation: .*no finite log-prob for token 1 of 1",
        ),
        (probe, [SAMPLE % "-0.5, 6"], "probe: .*GenerationError: the server's log-probs are of other tokens"),
        (probe, ["{}"], "probe: .*KeyError: 'meta_info'"),
        (probe, ["[]"], "probe: .*TypeError"),
        (probe, ["{"], "/generate: the answer is not valid JSON"),
        (close_update, ["{}", VERSION], None),
        (close_update, ["{}", "{}"], "read versions: .*KeyError: 'weight_version'"),
        (close_update, ["{}", '{"weight_version": 3}'], "read versions: .*TypeError"),
        (checksums, [CHECKSUMS], None),
        (checksums, ["{}"], "checksums: .*KeyError: 'ranks'"),
        (checksums, ['{"ranks": [{"checksums": null}]}'], "checksums: .*AttributeError"),
    ],
)
def test_an_answer_that_cannot_be_read_is_the_servers_failure(server, ask, answers, message):
    """Anything but a ControlError would end the first rank alone, in the middle of a collective."""
    with (
        make_control([server.url], timeout_s=TIMEOUT_S) as control,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(ask, control)
        with closing(server.accept()) as connection:
            connection.sendall(b"".join(map(json_answer, answers)))
            error = asked.exception(TIMEOUT_S)
        if message is None:
            assert error is None
        else:
            with pytest.raises(ControlError, match=message):
                raise error


def test_a_run_s_control_refuses_servers_that_capture_no_experts_where_they_are_replayed(server):
    """Also the control of servers that took the place of the first ones, which is made by the same function."""
    launch = LaunchConfig(collective_timeout_s=10 * TIMEOUT_S)
    control_of = partial(SGLangControl, RolloutConfig(), launch, key=KEY, needs_experts=True)
    with control_of([server.url]) as control, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(control.require_plugin)
        with closing(server.accept()) as connection:
            connection.sendall(
                json_answer("{}") + json_answer(json.dumps({"success": True, "message": PROTOCOL}))
            )
            with pytest.raises(ControlError, match="does not return routed experts"):
                asked.result(TIMEOUT_S)
