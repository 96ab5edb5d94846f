"""One HTTP/1.1 connection to a server, on which the next request may travel before the last one is answered.

The server reads requests in the order in which they were sent and answers one before it begins the next
(pipelining, RFC 9112 §9.3.2): whoever needs two things done one after the other need not wait for the first
answer to ask for the second.
"""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException, parse_headers
from io import BufferedReader
from urllib.parse import urlsplit

import orjson

from rollout.client import RolloutError
from rollout.connections import PEER_TIMEOUT_S, connect
from rollout.run_key import RunKey
from rollout.servers.client import REUSE_S, server_message


class ControlError(RolloutError):
    """A server refused or failed a control request; the message holds its own words."""


class ControlLine:
    """Used by one thread; answers are read in another. Whatever takes longer than ``timeout_s`` on the wire
    fails, and so does all that is under way when the server's host has answered nothing, not even its
    kernel's probes, for ``peer_timeout_s``."""

    def __init__(
        self, url: str, *, timeout_s: float, peer_timeout_s: float = PEER_TIMEOUT_S, key: RunKey | None = None
    ) -> None:
        self._proof = "".join(
            f"{name}: {value}\r\n" for name, value in (key.http_headers if key is not None else {}).items()
        )
        self._url, self._timeout_s, self._peer_timeout_s = url, timeout_s, peer_timeout_s
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 80)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="control-line")
        self._socket: socket.socket | None = None
        self._answers: BufferedReader
        self._last: Future | None = None
        self._answered_at = 0.0
        self._is_over = False
        """The connection failed, or the server said that it will close it."""

    def ask(self, method: str, path: str, body: dict | None) -> Future[dict]:
        """Send a request; its JSON answer, {} where it is none. A ControlError of the future says what
        failed, or the server's refusal."""
        what, content = f"{method} {self._url}{path}", b"" if body is None else orjson.dumps(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"{self._proof}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            connection, answers = self._open()
            connection.sendall(head.encode() + content)
        except OSError as error:
            self._is_over = True
            failed: Future[dict] = Future()
            failed.set_exception(ControlError(f"{what} failed: {error}"))
            return failed
        self._last = self._reader.submit(self._read, answers, what)
        return self._last

    def close(self) -> None:
        """What is not answered yet fails."""
        self._drop()
        self._reader.shutdown(
            wait=False
        )  # what is still in its line finds the connection gone, and fails by that

    def _open(self) -> tuple[socket.socket, BufferedReader]:
        """The connection, and what the answers come by: of the same connection as before where it can be used again."""
        waiting = self._last is not None and not self._last.done()
        if self._is_over or (not waiting and time.monotonic() - self._answered_at > REUSE_S):
            self._drop()
        if self._socket is None:
            self._socket = connect(self._address, peer_timeout_s=self._peer_timeout_s)
            self._socket.settimeout(self._timeout_s)
            self._socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )  # or a second small request waits for the first's receipt
            self._answers, self._is_over, self._answered_at = (
                self._socket.makefile("rb"),
                False,
                time.monotonic(),
            )
        return self._socket, self._answers

    def _drop(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the other side was faster
                self._socket.shutdown(socket.SHUT_RDWR)  # ends a read that is under way
            self._socket.close()
            self._socket = None

    def _read(self, answers: BufferedReader, what: str) -> dict:
        try:
            status, content, is_json = self._read_answer(answers)
        except (OSError, HTTPException, ValueError) as error:
            self._is_over = True
            raise ControlError(f"{what} failed: {error}") from error
        self._answered_at = time.monotonic()
        if status != 200:
            raise ControlError(f"{what} answered HTTP {status}: {server_message(content)}")
        if not is_json:
            return {}
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ControlError(f"{what} answered what is no JSON: {error}") from error

    def _read_answer(self, answers: BufferedReader) -> tuple[int, bytes, bool]:
        first_line = answers.readline().split()
        if len(first_line) < 2:
            raise ConnectionError("the server closed the connection without an answer")
        headers = parse_headers(answers)
        if "Content-Length" not in headers:
            raise ConnectionError("the answer does not tell its length")
        content = answers.read(int(headers["Content-Length"]))
        if len(content) < int(headers["Content-Length"]):
            raise ConnectionError("the server closed the connection in the middle of an answer")
        self._is_over = headers.get("Connection", "").lower() == "close"
        return int(first_line[1]), content, "json" in headers.get("Content-Type", "")
