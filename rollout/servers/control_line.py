"""One HTTP/1.1 connection to a server with pipelining (RFC 9112 §9.3.2).

The server reads requests in the order in which they were sent and answers one before it begins the next. A
caller with two requests in sequence can therefore send the second without waiting for the first answer.
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
from rollout.connections import PEER_TIMEOUT_S, REUSE_S, connect
from rollout.run_key import RunKey
from rollout.servers.answers import server_message


class ControlError(RolloutError):
    """A server refused or failed a control request; the message contains the server's."""


class ControlLine:
    """For one caller's thread; another thread reads the answers. A request fails if it takes longer than
    ``timeout_s`` on the wire. All requests fail if the server's host has not even answered the kernel's
    probes for ``peer_timeout_s``."""

    def __init__(
        self, url: str, *, timeout_s: float, key: RunKey, peer_timeout_s: float = PEER_TIMEOUT_S
    ) -> None:
        self._proof = "".join(f"{name}: {value}\r\n" for name, value in key.http_headers.items())
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
        """Send a request. The future gives its JSON answer, {} for an answer in another format, or raises
        ControlError for a failure or the server's refusal."""
        request, content = f"{method} {self._url}{path}", b"" if body is None else orjson.dumps(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"{self._proof}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            connection, answers = self._open_connection()
            connection.sendall(head.encode() + content)
        except OSError as error:
            self._is_over = True
            failed: Future[dict] = Future()
            failed.set_exception(ControlError(f"{request} failed: {error}"))
            return failed
        self._last = self._reader.submit(self._read_reply, answers, request)
        return self._last

    def close(self) -> None:
        """Close the connection. Unanswered requests fail."""
        self._drop_connection()
        self._reader.shutdown(wait=False)  # its remaining reads fail: the connection is gone

    def _open_connection(self) -> tuple[socket.socket, BufferedReader]:
        """The connection and the stream of its answers; the last connection is reused if it can be."""
        waiting = self._last is not None and not self._last.done()
        if self._is_over or (not waiting and time.monotonic() - self._answered_at > REUSE_S):
            self._drop_connection()
        if self._socket is None:
            self._socket = connect(self._address, peer_timeout_s=self._peer_timeout_s)
            self._socket.settimeout(self._timeout_s)
            # Without it a second small request waits until the first is acknowledged.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answers = self._socket.makefile("rb")
            self._is_over, self._answered_at = False, time.monotonic()
        return self._socket, self._answers

    def _drop_connection(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the server closed it first
                self._socket.shutdown(socket.SHUT_RDWR)  # ends a read that is under way
            self._socket.close()
            self._socket = None

    def _read_reply(self, answers: BufferedReader, request: str) -> dict:
        try:
            status, content, is_json = self._read_answer(answers)
        except (OSError, HTTPException, ValueError) as error:
            self._is_over = True
            raise ControlError(f"{request} failed: {error}") from error
        self._answered_at = time.monotonic()
        if status != 200:
            raise ControlError(f"{request} answered HTTP {status}: {server_message(content)}")
        if not is_json:
            return {}
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ControlError(f"{request}: the answer is not valid JSON: {error}") from error

    def _read_answer(self, answers: BufferedReader) -> tuple[int, bytes, bool]:
        first_line = answers.readline().split()
        if len(first_line) < 2:
            raise ConnectionError("the server closed the connection without an answer")
        headers = parse_headers(answers)
        if "Content-Length" not in headers:
            raise ConnectionError("the answer has no Content-Length")
        content = answers.read(int(headers["Content-Length"]))
        if len(content) < int(headers["Content-Length"]):
            raise ConnectionError("the server closed the connection in the middle of an answer")
        self._is_over = headers.get("Connection", "").lower() == "close"
        return int(first_line[1]), content, "json" in headers.get("Content-Type", "")
