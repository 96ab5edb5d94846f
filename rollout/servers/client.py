"""Asynchronous generation over HTTP from any number of SGLang replicas."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import aiohttp
import orjson

from rollout.client import ClientStats, GenerationError
from rollout.connections import CONNECT_TIMEOUT_S, PEER_TIMEOUT_S, is_unreachable, watched_socket
from rollout.records import Completion, FinishReason
from rollout.run_key import RunKey

T = TypeVar("T")

REUSE_S = 4.0
"""Idle connections are dropped before SGLang does so, which would be found out only by a failed attempt."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0


FROM_UNREACHED = frozenset({"call_upstream_request_error", "no_available_workers"})
"""What sglang-router calls its answer where it has not reached a server, or has lost it."""


class _AttemptFailed(Exception):
    """One attempt failed in a way that another one may not."""


class _NotReached(_AttemptFailed):
    """By a router."""


@dataclass(slots=True)
class _Replica:
    url: str
    in_flight: int = 0
    """Samples."""


class SGLangClient:
    """A ``GenerationClient`` over HTTP; made and used inside one event loop.

    The samples of a group are one request, which saves the server most of its work per request. It goes to
    the replica with the fewest samples in flight. At most ``max_concurrency`` samples are in flight over all
    replicas: the others wait here in order of arrival, and a larger group is several requests, one after
    another. An attempt that fails in transport (connection refused or reset, 5xx, any sample aborted by the
    server) is repeated as a whole up to ``max_retries`` times, on a replica that has not failed this request
    if there is one. Attempts that did not reach a host are repeated for ``peer_timeout_s`` before they count:
    the network may come back. After that time a host that answers nothing at all, not even its kernel's
    probes, is given up in the middle of a request. ``timeout_s`` bounds all attempts of a request together,
    without its wait for places.

    Args:
        whole_groups: False: each sample is a request of its own. ``urls`` is then a router's.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int,
        timeout_s: float,
        max_retries: int,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        whole_groups: bool = True,
        key: RunKey | None = None,
    ) -> None:
        if not urls:
            raise ValueError("urls is empty; give the address of at least one SGLang server")
        self._replicas = [_Replica(url.rstrip("/")) for url in urls]
        self._max_concurrency, self._whole_groups = max_concurrency, whole_groups
        self._places = asyncio.Semaphore(max_concurrency)
        self._turn = asyncio.Lock()
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._peer_timeout_s = peer_timeout_s
        self._stats = ClientStats()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=REUSE_S,
                socket_factory=partial(watched_socket, peer_timeout_s=peer_timeout_s),
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S
            ),  # the deadline is our own
            headers=key.http_headers if key is not None else None,
        )

    async def __aenter__(self) -> "SGLangClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    @property
    def stats(self) -> ClientStats:
        return self._stats

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seeds: Sequence[int],
    ) -> list[Completion]:
        """See ``GenerationClient``. Seeds have an effect only on servers with
        ``enable-deterministic-inference``."""
        sampling = neutral_sampling_params(max_new_tokens=max_new_tokens, temperature=temperature)
        sampling["stop_token_ids"] = list(stop_token_ids)
        samplings = [sampling | {"sampling_seed": seed} for seed in seeds]
        if not self._whole_groups:
            return [
                only
                for (only,) in await _all_or_none(self._request(list(prompt_ids), [one]) for one in samplings)
            ]
        completions: list[Completion] = []
        for start in range(0, len(samplings), self._max_concurrency):
            completions += await self._request(
                list(prompt_ids), samplings[start : start + self._max_concurrency]
            )
        return completions

    async def _request(self, prompt_ids: list[int], samplings: list[dict[str, object]]) -> list[Completion]:
        """One completion per item of ``samplings``, at most ``max_concurrency`` of them, by one HTTP request
        (and its repetitions)."""
        count = len(samplings)
        # Ids in a list even for one sample: SGLang then answers with a list. A router takes no list of
        # parameters.
        sampling = samplings if self._whole_groups else samplings[0]
        body = orjson.dumps(
            {"input_ids": [prompt_ids] * count, "sampling_params": sampling, "return_logprob": True}
        )
        async with self._take_places(count):
            self._stats = replace(self._stats, requests=self._stats.requests + count)
            try:
                async with asyncio.timeout(self._timeout_s):
                    completions = await self._attempts(body, count)
            except TimeoutError as error:
                raise GenerationError(
                    f"no answer within request_timeout_s={self._timeout_s:g} s for {count} samples of a prompt of {len(prompt_ids)} tokens "
                    f"(max_new_tokens={samplings[0]['max_new_tokens']}); raise rollout.request_timeout_s, or lower max_concurrency"
                ) from error
        return completions

    @asynccontextmanager
    async def _take_places(self, count: int) -> AsyncIterator[None]:
        taken = 0
        try:
            async with (
                self._turn
            ):  # one at a time: two that each hold a part of what they need would wait for one another
                while taken < count:
                    await self._places.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._places.release()

    async def _attempts(self, body: bytes, count: int) -> list[Completion]:
        failures: list[str] = []
        failed: set[int] = set()
        num_counted, patience = 0, _Patience(self._peer_timeout_s)
        while True:
            index = self._least_loaded(avoiding=failed)
            replica = self._replicas[index]
            replica.in_flight += count
            try:
                return await self._attempt(replica.url, body, count)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _AttemptFailed) as error:
                failures.append(f"{replica.url}: {type(error).__name__ if not str(error) else error}")
                failed.add(index)
                num_counted += not patience.covers(error)
            finally:
                replica.in_flight -= count
            if num_counted > self._max_retries:
                last = failures[-1 - self._max_retries :]
                raise GenerationError(
                    f"{len(failures)} attempts at {count} samples failed (max_retries={self._max_retries}): {last}"
                )
            self._stats = replace(self._stats, retries=self._stats.retries + 1)
            if len(failed) == len(self._replicas):  # nobody left to ask at once
                failed.clear()
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (len(failures) - 1), LAST_BACKOFF_S))

    def _least_loaded(self, *, avoiding: set[int]) -> int:
        candidates = [index for index in range(len(self._replicas)) if index not in avoiding]
        return min(candidates, key=lambda index: self._replicas[index].in_flight)

    async def _attempt(self, url: str, body: bytes, count: int) -> list[Completion]:
        async with self._session.post(
            f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            content = await response.read()
            if response.status >= 500:
                failed = _NotReached if _error_code(content) in FROM_UNREACHED else _AttemptFailed
                raise failed(f"HTTP {response.status}: {server_message(content)}")
            if response.status != 200:
                raise GenerationError(
                    f"{url} refused a request with HTTP {response.status}: {server_message(content)}"
                )
        replies = orjson.loads(content)
        if not isinstance(replies, list) or len(replies) != count:
            found = (
                f"a list of {len(replies)}"
                if isinstance(replies, list)
                else f"a single {type(replies).__name__}"
            )
            raise GenerationError(
                f"{url} answered a request for {count} samples with {found}, not a list of one reply each"
            )
        for reply in replies:
            finish = reply["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                raise _AttemptFailed(f"aborted: {finish.get('message') or 'no reason given'}")
        try:
            return [parse_completion(reply) for reply in replies]
        except GenerationError as error:
            raise GenerationError(f"{url}: {error}") from error


async def _all_or_none(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once. Where one fails, the others are cancelled and its error is raised, bare."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _Patience:
    """With a network that is cut: ``seconds`` from the first attempt that did not reach a host, or lost it,
    on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def covers(self, error: Exception) -> bool:
        """Whether a failure is one that the network's return will mend, and there is time left for it."""
        of_connecting = isinstance(error, (aiohttp.ConnectionTimeoutError, _NotReached))
        if isinstance(error, aiohttp.ClientConnectorError):
            of_connecting = is_unreachable(error.os_error)
        if self._until is None:
            # A connection that the kernel gave up has used that time already.
            self._until = time.monotonic() + (self._seconds if of_connecting else 0.0)
        return of_connecting and time.monotonic() < self._until


def neutral_sampling_params(*, max_new_tokens: int, temperature: float) -> dict[str, object]:
    """Sampling from the full distribution at ``temperature``, with nothing left to a server's or a model's
    defaults."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def parse_completion(reply: Mapping) -> Completion:
    """The record of one sample in a ``/generate`` reply that was asked with ``return_logprob``.

    Raises:
        GenerationError: ids, log-probs and versions do not fit together, a log-prob is not finite, or a
        version is not a decimal number.
    """
    meta = reply["meta_info"]
    triples = meta["output_token_logprobs"]
    token_ids = [int(token) for _, token, *_ in triples]
    if token_ids != reply["output_ids"]:
        raise GenerationError(
            f"the server's log-probs are of other tokens than its output: {token_ids} and {reply['output_ids']}"
        )
    return Completion(
        token_ids=token_ids,
        rollout_logprobs=finite_logprobs(triples),
        token_versions=_versions_per_token(meta, len(token_ids)),
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
    )


def finite_logprobs(triples: Sequence[Sequence]) -> list[float]:
    """Of SGLang's (log-prob, id, text) of each token. What is not finite comes as null, as JSON has no word
    for it.

    Raises:
        GenerationError: a log-prob is not finite, naming the token's place.
    """
    for place, (logprob, token, *_) in enumerate(triples, start=1):
        if logprob is None or not math.isfinite(logprob):
            raise GenerationError(
                f"the server gave no finite log-prob for token {place} of {len(triples)} (id {token}); check the served weights and dtype"
            )
    return [float(logprob) for logprob, *_ in triples]


def _versions_per_token(meta: Mapping, num_tokens: int) -> list[int]:
    """Spans ``{version, start, end}`` cover the output in order: a pause for new weights may fall inside a
    response."""
    versions: list[int] = []
    for span in meta["weight_versions"]:
        if span["start"] != len(versions):
            raise GenerationError(f"weight version spans leave a gap: {meta['weight_versions']}")
        versions += [_version_number(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise GenerationError(
            f"weight version spans {meta['weight_versions']} do not cover {num_tokens} tokens"
        )
    return versions


def _version_number(version: str) -> int:
    try:
        return int(version)
    except ValueError:
        raise GenerationError(
            f"the server calls its weights {version!r}, not a decimal number; start it with --weight-version 0"
        ) from None


def _error_code(content: bytes) -> object:
    try:
        return orjson.loads(content)["error"]["code"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None


def server_message(content: bytes) -> str:
    """What the server says went wrong, out of any of its error shapes."""
    try:
        reply = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")[:500]
    if isinstance(reply, dict):
        inner = reply.get("error", reply.get("message", reply.get("detail", reply)))
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(reply)
