"""Asynchronous generation over HTTP from any number of SGLang replicas."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import aiohttp
import orjson

from configs.schema.rollout import LATE_RETRIES
from rollout.client import (
    AttemptFailed,
    ClientStats,
    GenerationError,
    KnownExperts,
    PromptTooLongError,
    Session,
)
from rollout.connections import PEER_TIMEOUT_S, REUSE_S, is_unreachable
from rollout.gathering import all_or_first_error
from rollout.http_replicas import OwnServers, Replica, ReplicaLost, open_session, request_with_retries
from rollout.records import Completion
from rollout.run_key import RunKey
from rollout.servers import kept_sets
from rollout.servers.answers import (
    Sent,
    collection_paused,
    error_code,
    is_too_long,
    neutral_sampling_params,
    read_answer,
    server_message,
    stop_pattern,
)
from rollout.servers.command import NO_WEIGHT_VERSION
from rollout.servers.kept_sets import Truncation
from rollout.servers.routing import Experts
from rollout.sglang_plugin.tandem_routed_experts import KNOWN_BY
from tracing import span

logger = logging.getLogger(__name__)

BACKOFF_S = (0.1, 2.0)
LOOK_S = 2.0
"""Deadline of a request that asks whether a lost server has the weights again."""
LOOK_EVERY_S = 0.5
"""Interval of these requests if no other server is left."""
UNREACHED_CODES = frozenset({"call_upstream_request_error", "no_available_workers"})
"""Error codes of sglang-router for a server that it did not reach, or has lost."""


class _ServerUnreached(AttemptFailed):
    """The router answered, but it did not reach a server."""


class _TimedOut(AttemptFailed):
    """The server did not answer in time."""


class _AllLost(Exception):
    """No server is left; one may be restarted."""


class SGLangClient:
    """A ``GenerationClient`` over HTTP; made and used inside one event loop.

    The samples of a group are one request, which saves the server most of its work per request. The request
    goes to the replica with the fewest samples in flight. At most ``max_concurrency`` samples are in flight
    over all replicas. Further samples wait here in order of arrival, and a larger group becomes several
    requests, one after another. An attempt that fails in transport (connection refused or reset, 5xx, any
    sample aborted by the server) is repeated as a whole up to ``max_retries`` times, on a replica that has
    not failed this request if there is one. An attempt without an answer after ``timeout_s`` is repeated too; its
    server sees the connection end, and aborts the samples. Attempts that did not reach a host do not count for
    ``peer_timeout_s``: the network may come back. If a host's kernel answers no probe for that time, its requests
    fail in the middle.

    Args:
        servers_restart: whether servers that end are restarted. If all are lost, requests then wait for one that
            has the weights. They wait without a deadline, because the learner, which brings the weights, may train
            for longer than any; it has a deadline for its groups. False: requests fail.
        whole_groups: whether a group is one request. False: each sample is its own request, so that a free place
            goes at once to the next sample of any group. A router's ``urls`` need this.
        experts: the served model's experts; answers then have each token's. None: answers have no experts.
        truncation: the sampler's limits; answers then have each token's kept ids. None: the full distribution.
        stop: texts that also end a response (``rollout.stop``). The servers need the tokenizer for them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int,
        timeout_s: float,
        max_retries: int,
        key: RunKey,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        servers_restart: bool = False,
        whole_groups: bool = True,
        experts: Experts | None = None,
        truncation: Truncation | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        if not urls:
            raise ValueError("urls is empty; give the address of at least one SGLang server")
        # A replica that comes back has old weights. ``_look_at`` decides when it is no longer lost.
        self._replicas = [Replica(url.rstrip("/"), lost_for_s=math.inf) for url in urls]
        self._max_concurrency, self._whole_groups, self._experts = max_concurrency, whole_groups, experts
        self._truncation = truncation
        self._limits = truncation.sampling_params if truncation is not None else {}
        self._stop_patterns = [stop_pattern(text) for text in stop]
        self._places = _Places(max_concurrency)
        self._in_flight = _InFlight()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._timeout_s, self._peer_timeout_s, self._max_retries = timeout_s, peer_timeout_s, max_retries
        self._servers_restart, self._newest, self._looking = servers_restart, _Newest(), asyncio.Lock()
        self._stats = ClientStats()
        self._session = open_session(
            peer_timeout_s=peer_timeout_s,
            headers=key.http_headers,
            connector=OwnServers,
            keepalive_timeout=REUSE_S,
        )

    async def __aenter__(self) -> "SGLangClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    @property
    def stats(self) -> ClientStats:
        return replace(self._stats, idle_s=self._in_flight.idle_s)

    def with_own_places(self, *, top_p: float = 1.0, top_k: int = -1) -> "SGLangClient":
        """See ``GenerationClient``. Both clients share the connections and the count of samples at each replica."""
        other = copy(self)
        other._places, other._stats = _Places(self._max_concurrency), ClientStats()
        other._experts = other._truncation = None
        other._limits = {"top_p": top_p, "top_k": top_k}
        return other

    async def see_version(self, newest: int) -> None:
        """See ``GenerationClient``."""
        if newest != self._newest.version:
            self._newest.version, self._newest.has_told_late = newest, False
        await self._look_at_lost()

    async def _look_at_lost(self) -> bool:
        """Look at every lost replica. Returns whether a host of one could be reached."""
        looks = [self._look_at(replica) for replica in self._replicas if replica.is_lost]
        return any(await asyncio.gather(*looks))

    async def _look_at(self, replica: Replica) -> bool:
        """Note in ``replica`` whether its server has the weights again. Returns whether its host could be reached, which
        includes a host that refuses the connection."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=LOOK_S / 2)
        try:
            async with (
                asyncio.timeout(LOOK_S),
                self._session.get(f"{replica.url}/model_info", timeout=limits) as response,
            ):
                version = int(orjson.loads(await response.read())["weight_version"])
                replica.is_lost = version < self._newest.version
        except aiohttp.ConnectionTimeoutError:
            return False
        except aiohttp.ClientConnectorError as error:
            return not is_unreachable(error.os_error)
        except (TimeoutError, aiohttp.ClientError, orjson.JSONDecodeError, LookupError, ValueError):
            pass
        return True

    async def _some_server(self) -> None:
        """Return once a server has the weights. Raises GenerationError if no server's host could be reached for
        ``peer_timeout_s``."""
        if not self._newest.num_waiting:
            logger.warning(
                "all servers are lost; requests wait until one has weights of the learner: %s", self._urls()
            )
        self._newest.num_waiting += 1
        try:
            reached = time.monotonic()
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                is_reached = await self._look_for_all()
                if not self._are_all_lost():
                    return
                reached = time.monotonic() if is_reached else reached
                if time.monotonic() - reached > self._peer_timeout_s:
                    raise GenerationError(
                        f"the hosts of all servers could not be reached for {self._peer_timeout_s:g} s: {self._urls()}"
                    )
        finally:
            self._newest.num_waiting -= 1

    async def _look_for_all(self) -> bool:
        """As ``_look_at_lost``. Thousands of requests may wait; one of them looks for all."""
        newest = self._newest
        async with self._looking:
            if self._are_all_lost() and time.monotonic() - newest.looked_at >= LOOK_EVERY_S:
                newest.is_reached = await self._look_at_lost()
                newest.looked_at = time.monotonic()
        return newest.is_reached or not self._are_all_lost()

    def _urls(self) -> str:
        return ", ".join(replica.url for replica in self._replicas)

    def _are_all_lost(self) -> bool:
        return all(replica.is_lost for replica in self._replicas)

    async def drain(self, within_s: float) -> None:
        """See ``GenerationClient``."""
        self._is_open.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._in_flight.none.wait()

    def reopen(self) -> None:
        self._is_open.set()

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seeds: Sequence[int],
        session: Session | None = None,
        known_experts: KnownExperts | None = None,
    ) -> list[Completion]:
        """See ``GenerationClient``. Only servers with ``enable-deterministic-inference`` use the seeds."""
        sampling = neutral_sampling_params(max_new_tokens=max_new_tokens, temperature=temperature)
        sampling |= self._limits
        if self._experts is not None and known_experts is not None:
            sampling["custom_params"] = {KNOWN_BY: str(known_experts.version)}
        sampling["stop_token_ids"] = list(stop_token_ids)
        if self._stop_patterns:
            sampling["stop_regex"] = self._stop_patterns
        samplings = [sampling | {"sampling_seed": seed} for seed in seeds]
        sent = Sent.of(prompt_ids, self._experts, self._truncation, known_experts)
        ask = partial(self._request_completions, list(prompt_ids), sent=sent, session=session)
        if not self._whole_groups:
            requests = (ask([sampling]) for sampling in samplings)
            return [completion for (completion,) in await all_or_first_error(requests)]
        completions: list[Completion] = []
        for start in range(0, len(samplings), self._max_concurrency):
            completions += await ask(samplings[start : start + self._max_concurrency])
        return completions

    async def _request_completions(
        self,
        prompt_ids: list[int],
        samplings: list[dict[str, object]],
        *,
        sent: "Sent",
        session: Session | None,
    ) -> list[Completion]:
        """One completion per item of ``samplings`` (at most ``max_concurrency``) by one HTTP request, which is repeated
        if it fails."""
        count = len(samplings)
        # If the ids come in a list, SGLang answers with a list, even for one sample. A router takes no list of
        # parameters.
        sampling = samplings if self._whole_groups else samplings[0]
        request = {"input_ids": [prompt_ids] * count, "sampling_params": sampling, "return_logprob": True}
        if sent.truncation is not None:
            request |= kept_sets.REQUEST
        if sent.experts is not None:
            known = 0 if sent.known_experts is None else sent.known_experts.before
            request |= {"return_routed_experts": True, "routed_experts_start_len": known}
        waiting = nullcontext if session is None else session.waiting
        async with AsyncExitStack() as stack:
            stack.enter_context(
                span("request", family="requests", samples=count, prompt_tokens=len(prompt_ids))
            )
            with waiting(), span("wait for admission"):
                await stack.enter_async_context(self._places.take(count))
                await self._is_open.wait()
            self._stats = replace(self._stats, requests=self._stats.requests + count)
            attempt = partial(self._attempt, body=orjson.dumps(request), count=count, sent=sent)
            while True:
                try:
                    with self._in_flight.counted(count):
                        return await self._request_with_retries(attempt, count, session)
                except _AllLost:
                    with waiting():
                        await self._some_server()
                        await self._is_open.wait()  # a drain may have begun meanwhile

    async def _request_with_retries(
        self, attempt: Callable[[str], Awaitable[list[Completion]]], count: int, session: Session | None
    ) -> list[Completion]:
        num_counted, num_late, patience = 0, 0, _NetworkPatience(self._peer_timeout_s)

        def count_failure(error: Exception, failures: list[str]) -> None:
            nonlocal num_counted, num_late
            is_cut, is_late = patience.covers(error), isinstance(error, _TimedOut)
            num_counted += not is_cut
            num_late += is_late
            may_return = self._servers_restart and self._are_all_lost() and not is_cut
            is_over = num_counted > self._max_retries or num_late > LATE_RETRIES
            if is_over and not may_return:
                last = failures[-1 - self._max_retries :]
                fix = "; raise rollout.request_timeout_s, or lower rollout.max_concurrency" if is_late else ""
                raise GenerationError(
                    f"{len(failures)} attempts at {count} samples failed (max_retries={self._max_retries}): {last}{fix}"
                )
            self._stats = replace(self._stats, retries=self._stats.retries + count)
            if may_return:
                raise _AllLost
            if is_late:
                self._tell_of_late(failures[-1])

        return await request_with_retries(
            self._replicas, attempt, count_failure, num_samples=count, backoff_s=BACKOFF_S, session=session
        )

    def _tell_of_late(self, failure: str) -> None:
        """Log a late request at once, because its next attempt may take as long. Only once per step."""
        if not self._newest.has_told_late:
            self._newest.has_told_late = True
            logger.warning(
                "%s; they are requested again, like any further late ones of this step: sampling/retries counts them",
                failure,
            )

    async def _attempt(self, url: str, *, body: bytes, count: int, sent: "Sent") -> list[Completion]:
        with span("generate", server=url) as generating:
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    completions = await self._answered(url, body, count, sent)
            except TimeoutError as error:
                if not deadline.expired():  # it is a connection's own
                    raise
                raise _TimedOut(
                    f"no answer within rollout.request_timeout_s={self._timeout_s:g} s for {count} samples of a prompt of "
                    f"{sent.num_tokens} tokens"
                ) from error
            generating.note(tokens=sum(len(completion.token_ids) for completion in completions))
        return completions

    async def _answered(self, url: str, body: bytes, count: int, sent: "Sent") -> list[Completion]:
        async with self._session.post(
            f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            content = await response.read()
            if response.status >= 500:
                failure = _ServerUnreached if error_code(content) in UNREACHED_CODES else AttemptFailed
                raise failure(f"HTTP {response.status}: {server_message(content)}")
            if response.status != 200:
                message = server_message(content)
                refusal = PromptTooLongError if is_too_long(message) else GenerationError
                raise refusal(f"{url} refused a request with HTTP {response.status}: {message}")
        with collection_paused():
            completions = read_answer(content, count, url, sent)
        if not all(len(completion.token_ids) for completion in completions):
            raise PromptTooLongError(
                f"{url} had no room for a token after a prompt of {sent.num_tokens} tokens"
            )
        if any((completion.token_versions[:1] == NO_WEIGHT_VERSION).any() for completion in completions):
            raise ReplicaLost(f"{url} was restarted, and does not have the learner's weights yet")
        return completions


@dataclass(slots=True)
class _Newest:
    """State that the clients of the same servers share."""

    version: int = 0
    """The newest weight version that the learner has reported."""
    num_waiting: int = 0
    """Requests that wait for a server with this version."""
    has_told_late: bool = False
    """Whether a late request was logged since the learner reported the version."""
    looked_at: float = -math.inf
    """When a waiting request last looked for a server, by ``time.monotonic``."""
    is_reached: bool = True
    """Whether that look reached a host."""


class _Places:
    """Room for ``number`` samples at once."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        taken = 0
        try:
            # One request at a time: two requests with a part of their places each would wait for one another.
            async with self._turn:
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


class _InFlight:
    """Counts the samples at the servers, and the time without any. The time before the first sample does not count:
    the other roles start then."""

    def __init__(self) -> None:
        self._count, self._idle_s, self._idle_since = 0, 0.0, math.inf
        self.none = asyncio.Event()
        self.none.set()

    @property
    def idle_s(self) -> float:
        return self._idle_s + (0.0 if self._count else max(0.0, time.monotonic() - self._idle_since))

    @contextmanager
    def counted(self, count: int) -> Iterator[None]:
        self._idle_s = self.idle_s
        self._count += count
        self.none.clear()
        try:
            yield
        finally:
            self._count -= count
            if not self._count:
                self._idle_since = time.monotonic()
                self.none.set()


class _NetworkPatience:
    """How long a request waits for a cut network: ``seconds`` from its first attempt that did not reach a host."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def covers(self, error: Exception) -> bool:
        """Whether the failure would go away if the network came back, and time is left to wait for that."""
        is_unreached = isinstance(error, (aiohttp.ConnectionTimeoutError, _ServerUnreached))
        if isinstance(error, aiohttp.ClientConnectorError):
            is_unreached = is_unreachable(error.os_error)
        if self._until is None and is_unreached:
            self._until = time.monotonic() + self._seconds
        elif self._until is None and isinstance(error, aiohttp.ClientOSError) and is_unreachable(error):
            self._until = time.monotonic()  # a connection that the kernel gave up has used that time already
        return is_unreached and self._until is not None and time.monotonic() < self._until
