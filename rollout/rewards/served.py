"""Scores over HTTP: what a reward model (model.py) and a judge (judge.py) have in common.

- No connection, a broken one, no answer in time, HTTP 429 or 5xx: another attempt, on another replica if
  there is one. After ``max_retries`` retries: ``RewardModelError``, which ends the run. A step with all scores
  at 0 would teach the model nonsense.
- HTTP 400, 413 or 422 (e.g. a text longer than the model's context, or one that a filter refuses), or a reply of more
  than ``LARGEST_ANSWER`` bytes: ``Refused``.
- Any other status, a reply of another form, or a redirection to another server: ``RewardModelError`` at once.
- After ``MAX_FAILED_IN_A_ROW`` failed samples without a good one between them the model counts as broken:
  ``RewardModelError``.
"""

import asyncio
import ipaddress
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from configs.schema.reward import JudgeReward, ModelReward
from rollout.client import AttemptFailed
from rollout.gathering import TasksToEnd
from rollout.http_replicas import Replica, open_session, request_with_retries
from rollout.pipe import LARGEST_ANSWER
from rollout.records import Score
from rollout.rewards.function import to_score

T = TypeVar("T")
logger = logging.getLogger(__name__)

BACKOFF_S = (0.2, 5.0)
LONGEST_WAIT_S = 60.0
"""A longer ``Retry-After`` of a server is cut to this."""
MAX_FAILED_IN_A_ROW = 64
REFUSED_ITEMS = frozenset({400, 413, 422})
"""HTTP statuses that blame the content of the request."""
PROBE = ("1 + 1 =", "2")
"""Prompt and response of the trial sample; the response is the reference too."""


class RewardModelError(RuntimeError):
    """A reward model or a judge cannot be used (any more); the message names its address and the fix."""


class Refused(Exception):
    """The server blames the content of the request, or its reply to it is too large."""


def key_of(variable: str | None, name: str) -> str | None:
    """The key for the servers of the block ``name``, from an environment variable. Raises ValueError if the
    variable holds none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"{name}.api_key_variable={variable} is not set in the environment, or empty; export it before the start"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{name}.api_key_variable={variable} holds characters that an HTTP header cannot have; export only the key"
        )
    return key


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for an outside server (``http_proxy``, ``https_proxy``,
    ``no_proxy``, in either case); None: requests go to it directly. A host without a dot in its name, or in a
    private network, never gets a proxy: it is this machine or another of the cluster.

    aiohttp's ``trust_env`` is not used, because it would also send what ~/.netrc holds for the host.
    """
    address = urlsplit(url)
    host = address.hostname or ""
    if _is_near(host) or proxy_bypass(host if address.port is None else f"{host}:{address.port}"):
        return None
    proxy = getproxies().get(address.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _is_near(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host


class ServedReward:
    """The servers of one reward. Made and used inside one event loop, between ``start`` and ``close``."""

    def __init__(
        self, config: ModelReward | JudgeReward, *, name: str, kind: str, suffix: str, fix: str
    ) -> None:
        """
        Args:
            name: the config field that holds this reward, for messages.
            kind: what the servers are, for messages.
            suffix: appended to each of the config's addresses.
            fix: what to do, for the end of messages.

        Raises ValueError: the key's variable is not set.
        """
        self._config, self._name, self._kind, self._fix = config, name, kind, fix
        self._key = key_of(config.api_key_variable, name)  # the bearer token of each request, never shown
        self._replicas = [Replica(f"{url.rstrip('/')}{suffix}" if suffix else url) for url in config.urls]
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._requests = TasksToEnd()
        self._failed_in_a_row = 0
        self._proxies = {replica.url: proxy_of(replica.url) for replica in self._replicas}
        self._session: aiohttp.ClientSession | None = None
        self.retries = 0
        """Attempts that failed and were repeated."""

    async def _score_probe(self, replicas: Sequence[Replica]) -> Score:
        """The score of the trial sample, ``PROBE``, by one of these."""
        raise NotImplementedError

    async def start(self) -> None:
        """Have every replica score one trial sample, before anything is sampled. Raises RewardModelError: a replica
        does not answer, or its answer has no score."""
        self._session = open_session(headers={"Authorization": f"Bearer {self._key}"} if self._key else None)
        scores = await asyncio.gather(*map(self._probe, self._replicas))
        for replica, score in zip(self._replicas, scores, strict=True):
            if score.error is not None:
                raise RewardModelError(
                    f"{self._name}: the {self._kind} at {replica.url} cannot score a trial sample: {score.error}"
                )

    async def _probe(self, replica: Replica) -> Score:
        try:
            return await self._score_probe([replica])
        except Refused as error:
            raise RewardModelError(f"{self._name}: {error}; {self._fix}") from error

    async def close(self) -> None:
        """Drop all requests under way; their callers get a CancelledError. Safe to call twice."""
        await self._requests.end()
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        body: object,
        parse: Callable[[str, bytes], T],
        *,
        num_samples: int = 1,
        replicas: Sequence[Replica] | None = None,
    ) -> T:
        """Send ``body`` as JSON. Returns ``parse(url, content)`` of the reply.

        Raises:
            Refused: the server blames the content, or its reply is too large.
            RewardModelError: no attempt succeeded, or the reply has the wrong form.
        """
        content = json.dumps(body).encode()

        async def attempt(url: str) -> T:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    reply = await self._post(url, content)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within timeout_s={self._config.timeout_s:g} s") from error
            return parse(url, reply)

        def count_failure(_: Exception, failures: list[str]) -> None:
            if len(failures) > self._config.max_retries:
                raise RewardModelError(
                    f"{self._name}: {len(failures)} attempts to score {num_samples} samples failed "
                    f"(max_retries={self._config.max_retries}): {failures}; {self._fix}"
                )
            self.retries += 1
            logger.warning("%s: attempt %d failed, trying again: %s", self._name, len(failures), failures[-1])

        return await request_with_retries(
            replicas or self._replicas, attempt, count_failure, num_samples=num_samples, backoff_s=BACKOFF_S
        )

    async def _post(self, url: str, body: bytes) -> bytes:
        assert self._session is not None  # since start
        async with self._session.post(
            url, data=body, headers={"Content-Type": "application/json"}, proxy=self._proxies[url]
        ) as response:
            content = await _beginning(response.content)
        self._check_redirections(url, response)
        if response.status == 200:
            if len(content) > LARGEST_ANSWER:
                raise Refused(f"{url} answered it with more than {LARGEST_ANSWER} bytes")
            return content
        problem = f"HTTP {response.status}: {self.shown(content)[:500]}"
        if response.status == 429 or response.status >= 500:
            raise AttemptFailed(problem, wait_s=_retry_after_s(response.headers.get("Retry-After")))
        if response.status in REFUSED_ITEMS:
            raise Refused(f"{url} refused it with {problem}")
        raise RewardModelError(f"{self._name}: {url} answered {problem}; {self._fix}")

    def _check_redirections(self, url: str, response: aiohttp.ClientResponse) -> None:
        """Refuse a redirection to another server, to which aiohttp does not send the key, and one that makes
        the request a GET. Raises RewardModelError."""
        servers = {answer.url.origin() for answer in (*response.history, response)}
        if len(servers) > 1 or response.method != "POST":
            raise self.wrong_form(url, f"redirects to {response.url}")

    def shown(self, content: bytes | str) -> str:
        """The content as a message may show it: a server may repeat the key."""
        text = content if isinstance(content, str) else content.decode(errors="replace")
        return text.strip().replace(self._key, "***") if self._key else text.strip()

    def wrong_form(self, url: str, problem: str) -> RewardModelError:
        """problem: the reason. Text of the server in it must have gone through ``shown``."""
        return RewardModelError(f"{self._name}: {url} {problem}; {self._fix}")

    def count_failures(self, scores: Sequence[Score]) -> None:
        """Raises RewardModelError after too many failed samples in a row."""
        for score in scores:
            self._failed_in_a_row = 0 if score.error is None else self._failed_in_a_row + 1
            if self._failed_in_a_row == MAX_FAILED_IN_A_ROW:
                raise RewardModelError(
                    f"{self._name}: {MAX_FAILED_IN_A_ROW} samples in a row could not be scored, the last: {score.error}"
                )


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """All of a reply, or a bit more than ``LARGEST_ANSWER`` bytes of it."""
    read = bytearray()
    async for part in content.iter_any():
        read += part
        if len(read) > LARGEST_ANSWER:
            break
    return bytes(read)


def score_of(number: object) -> Score:
    """The score of a number from a server; a failed score if it is not a number."""
    try:
        return to_score(number)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(error=f"{type(error).__name__}: {error}")


def _retry_after_s(header: str | None) -> float:
    """Seconds that a server asks to wait. A date counts as nothing."""
    if header is None or not (header.isascii() and header.isdigit()):
        return 0.0
    return min(float(header), LONGEST_WAIT_S)
