"""HTTP requests to several equal servers: first to the least loaded, after a failure to another. After all have failed, wait."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import aiohttp

from rollout.client import AttemptFailed, Session
from rollout.connections import CONNECT_TIMEOUT_S, PEER_TIMEOUT_S, require_own, watched_socket

T = TypeVar("T")

LOST_FOR_S = 30.0
"""After this time a lost replica gets requests like any other: it may have been restarted."""
MOST_DOUBLINGS = 32
"""Limit on the doublings of the first wait. A cut network may fail a request a thousand times, and no float holds 2**1024."""


class ReplicaLost(AttemptFailed):
    """The replica was restarted, so it may have other weights."""


@dataclass(slots=True, eq=False)
class Replica:
    url: str
    in_flight: int = 0
    """Samples of its unanswered requests."""
    lost_for_s: float = LOST_FOR_S
    """How long it stays lost. Infinite: until its owner clears ``is_lost``."""
    _lost_since: float = -math.inf

    @property
    def is_lost(self) -> bool:
        """Whether a connection failed, or the server was restarted with other weights. It then gets requests only if no
        other replica is left."""
        return time.monotonic() - self._lost_since < self.lost_for_s

    @is_lost.setter
    def is_lost(self, is_lost: bool) -> None:
        self._lost_since = time.monotonic() if is_lost else -math.inf

    def is_on_trial(self) -> bool:
        """Whether it was lost, and may be back. It then counts as lost again, so that only one request tries it."""
        if self.is_lost or self._lost_since == -math.inf:
            return False
        self.is_lost = True
        return True


class OwnServers(aiohttp.TCPConnector):
    """Connections to processes of this run only, because requests carry its key: see ``connections.require_own``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._own = WeakSet[asyncio.Transport]()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        if transport is not None and transport not in self._own:
            try:
                require_own(transport.get_extra_info("socket"))
            except PermissionError as error:
                connection.close()
                raise aiohttp.ClientConnectorError(req.connection_key, error) from error
            self._own.add(transport)
        return connection


def open_session(
    *,
    peer_timeout_s: float = PEER_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
    connector: type[aiohttp.TCPConnector] = aiohttp.TCPConnector,
    keepalive_timeout: float = 15.0,
) -> aiohttp.ClientSession:
    """A session without a limit on connections, and without a deadline for a whole request: callers set it."""
    watched = partial(watched_socket, peer_timeout_s=peer_timeout_s)
    return aiohttp.ClientSession(
        connector=connector(limit=0, socket_factory=watched, keepalive_timeout=keepalive_timeout),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=headers,
    )


def choose(replicas: Sequence[Replica], session: Session | None = None) -> Replica:
    """The session's replica, unless it is lost; else the one with the fewest samples in flight, which becomes the session's."""
    chosen = min(replicas, key=lambda r: (r.is_lost, r.in_flight))
    if session is not None:
        own = session.server
        chosen = next((r for r in replicas if r is own and not r.is_lost), chosen)
        session.server = chosen
    return chosen


async def request_with_retries(
    replicas: Sequence[Replica],
    attempt: Callable[[str], Awaitable[T]],
    on_failure: Callable[[Exception, list[str]], None],
    *,
    num_samples: int,
    backoff_s: tuple[float, float],
    session: Session | None = None,
) -> T:
    """The result of the first ``attempt(url)`` that succeeds.

    An attempt that raises AttemptFailed or an error of aiohttp is repeated on a replica that has not failed
    this request. After all have failed, it waits, and then tries all again. A failed trial of a replica that was lost
    (``is_on_trial``) is no failure of the request.

    Args:
        session: see ``Session``.
        on_failure: takes the error and the texts of all failures so far; it raises to give up.
        backoff_s: (the first wait, which doubles with every attempt, and the longest).
    """
    failures: list[str] = []
    failed: list[Replica] = []
    wait_s = 0.0
    while True:
        replica = choose([r for r in replicas if r not in failed], session)
        is_trial = replica.is_on_trial()
        replica.in_flight += num_samples
        try:
            result = await attempt(replica.url)
        except (aiohttp.ClientError, AttemptFailed) as error:
            if isinstance(error, (aiohttp.ClientConnectionError, ReplicaLost)):
                replica.is_lost = True
            if not is_trial:
                failures.append(f"{replica.url}: {str(error) or type(error).__name__}")
                on_failure(error, failures)
            wait_s = max(wait_s, getattr(error, "wait_s", 0.0))
        else:
            if is_trial:
                replica.is_lost = False
            return result
        finally:
            replica.in_flight -= num_samples
        failed.append(replica)
        if len(failed) == len(replicas):
            failed.clear()
            doublings = min(len(failures) - 1, MOST_DOUBLINGS)
            await asyncio.sleep(max(wait_s, min(backoff_s[0] * 2**doublings, backoff_s[1])))
            wait_s = 0.0
