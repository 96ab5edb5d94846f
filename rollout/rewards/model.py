"""Scores from a reward model that is served over HTTP.

    Scorer ── score ──> waiting items ── batch_size of them, or LINGER_S after the first ──> request

A request waits for a free place, then goes to the least loaded replica. Each attempt has a deadline.

Requests, and the replies that must come back with HTTP 200:

``sglang``  POST <url>/classify  ``{"text": ["...", ...]}``, or ``"input_ids"`` after a chat template, so that
            the server adds no second begin token. Reply: ``[{"embedding": [score], ...}, ...]``, one object
            per text, in order. An empty text is a failed sample and is never sent: without a begin token it
            has no tokens, and SGLang 0.5.23 dies of an empty forward pass.
``json``    POST <url>           ``{"items": [{"prompt": "...", "response": "...", "reference": "...", "text": "..."}, ...]}``.
            Reply: ``{"scores": [0.5, ...]}``, one number per item, in order; ``null`` where an item cannot be
            scored.

Failures:

- No connection, a broken one, no answer in time, HTTP 429 or 5xx: another attempt, on another replica if
  there is one. After ``max_retries`` retries: ``RewardModelError``, which ends the run. A step with all scores
  at 0 would teach the model nonsense.
- HTTP 400, 413 or 422 (e.g. a text longer than the model's context): the batch is halved until the refused
  items are alone. A refused item, or one whose score is missing or not finite, is a failed sample: it scores
  0, is counted, and the run goes on. After ``MAX_FAILED_IN_A_ROW`` failed samples without a good one between
  them the model counts as broken: ``RewardModelError``.
- Any other status, or a reply of another form: ``RewardModelError`` at once.

Two traps of SGLang 0.5.23:

- Its Qwen2ForSequenceClassification and Qwen3ForSequenceClassification have a bias after the last layer,
  transformers' have none. Where a checkpoint lacks the bias, SGLang draws it from --random-seed, up to
  1/sqrt(hidden_size), which shifts all scores of a replica alike. Store ``score.bias`` as zeros in such a
  checkpoint.
- A text that fits the model's context but not the server's --max-total-tokens is never answered and ends the
  run like a late answer. Set --max-total-tokens above the longest text.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from configs.schema.task import ModelReward, PlainText
from rollout.http_replicas import AttemptFailed, Replica, open_session, request_with_retries
from rollout.records import Prompt, Score
from rollout.rewards.function import to_score
from rollout.tokenization import load_tokenizer

logger = logging.getLogger(__name__)

LINGER_S = 0.02
"""Wait for a batch to fill up; small against the time of a forward pass."""
BACKOFF_S = (0.2, 5.0)
MAX_FAILED_IN_A_ROW = 64
REFUSED_ITEMS = frozenset({400, 413, 422})
"""HTTP statuses that blame the content of the request."""
PROBE = ("1 + 1 =", "2")


class RewardModelError(RuntimeError):
    """A reward model cannot be used (any more); the message names its address and the fix."""


class _Refused(Exception):
    """The server blames an item of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    prompt: str
    response: str
    reference: str
    text: str
    token_ids: list[int] | None
    """Tokens of ``text`` where a chat template wrote it; None leaves the tokens to the server."""


class RewardModel:
    """Client of one reward model; made and used inside one event loop, after ``start`` and until ``close``."""

    def __init__(self, config: ModelReward, *, name: str = "reward") -> None:
        """
        Args:
            name: the config field that holds this reward, for messages.

        Raises:
            ValueError: the tokenizer cannot be loaded or has no chat template.
        """
        self._config, self._name = config, name
        self._tokenizer = None
        if config.text.type == "chat":
            self._tokenizer = load_tokenizer(config.text.tokenizer)
            if not self._tokenizer.chat_template:
                raise ValueError(
                    f"{name}.text.tokenizer={config.text.tokenizer} has no chat template; use text: {{type: plain}}"
                )
        suffix = "/classify" if config.protocol == "sglang" else ""
        self._replicas = [Replica(f"{url.rstrip('/')}{suffix}" if suffix else url) for url in config.urls]
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._waiting: list[tuple[Item, asyncio.Future[Score]]] = []
        self._linger: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._failed_in_a_row = 0
        self._session: aiohttp.ClientSession | None = None
        self.retries = 0
        """Attempts that failed and were repeated."""

    async def start(self) -> None:
        """Have every replica score one trial sample, before anything is sampled.

        Raises:
            RewardModelError: a replica does not.
        """
        self._session = open_session()
        probe = self._make_item(*PROBE, reference="2")
        scores = await asyncio.gather(*(self._probe_replica(replica, probe) for replica in self._replicas))
        for replica, score in zip(self._replicas, scores, strict=True):
            if score.error is not None:
                raise RewardModelError(
                    f"{self._name}: the reward model at {replica.url} cannot score a trial sample: {score.error}"
                )

    async def _probe_replica(self, replica: Replica, item: Item) -> Score:
        try:
            [score] = await self._request_with_retries([item], [replica])
        except _Refused as error:
            raise RewardModelError(f"{self._name}: {error}; {self._fix_text()}") from error
        return score

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """The model's score of one response.

        Raises:
            RewardModelError: the model does not answer, or its answer has the wrong form.
        """
        item = self._make_item(prompt.text, response_text, reference=prompt.reference)
        content = item.text if item.token_ids is None else item.token_ids
        if self._config.protocol == "sglang" and not content:
            return Score(value=0.0, error="the text for the reward model is empty")
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == self._config.batch_size:
            self._send_waiting()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._send_waiting)
        return await future

    async def close(self) -> None:
        """Drop all requests under way; their callers get a CancelledError. Safe to call twice."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.cancel()
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _make_item(self, prompt: str, response: str, *, reference: str) -> Item:
        token_ids = None
        if isinstance(self._config.text, PlainText):
            text = self._config.text.template.format(prompt=prompt, response=response, reference=reference)
        else:
            assert self._tokenizer is not None
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = str(self._tokenizer.apply_chat_template(turns, tokenize=False))
            token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        return Item(prompt=prompt, response=response, reference=reference, text=text, token_ids=token_ids)

    def _send_waiting(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        batch, self._waiting = self._waiting, []
        request = asyncio.get_running_loop().create_task(self._send_batch(batch))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _send_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Score]]]) -> None:
        """Give every future of the batch its score, or the error."""
        try:
            async with self._places:
                scores = await self._score_items([item for item, _ in batch])
            self._count_failures(scores)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # callers must hear of a defect too
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # its caller may be gone
                    future.set_result(score)

    async def _score_items(self, items: list[Item]) -> list[Score]:
        try:
            return await self._request_with_retries(items, self._replicas)
        except _Refused as error:
            if len(items) == 1:
                return [Score(value=0.0, error=str(error))]
        half = len(items) // 2
        return await self._score_items(items[:half]) + await self._score_items(items[half:])

    def _count_failures(self, scores: Sequence[Score]) -> None:
        for score in scores:
            self._failed_in_a_row = 0 if score.error is None else self._failed_in_a_row + 1
            if self._failed_in_a_row == MAX_FAILED_IN_A_ROW:
                raise RewardModelError(
                    f"{self._name}: {MAX_FAILED_IN_A_ROW} samples in a row could not be scored, the last: {score.error}"
                )

    async def _request_with_retries(self, items: list[Item], replicas: Sequence[Replica]) -> list[Score]:
        body = json.dumps(self._request_body(items)).encode()

        async def attempt(url: str) -> list[Score]:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    content = await self._post(url, body)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within timeout_s={self._config.timeout_s:g} s") from error
            return self._parse_scores(url, content, len(items))

        def count_failure(_: Exception, failures: list[str]) -> None:
            if len(failures) > self._config.max_retries:
                raise RewardModelError(
                    f"{self._name}: {len(failures)} attempts to score {len(items)} samples failed "
                    f"(max_retries={self._config.max_retries}): {failures}; {self._fix_text()}"
                )
            self.retries += 1
            logger.warning(
                "%s: attempt %d failed, another follows: %s", self._name, len(failures), failures[-1]
            )

        return await request_with_retries(
            replicas, attempt, count_failure, num_samples=len(items), backoff_s=BACKOFF_S
        )

    def _request_body(self, items: Sequence[Item]) -> dict[str, object]:
        if self._config.protocol == "json":
            return {
                "items": [
                    {"prompt": i.prompt, "response": i.response, "reference": i.reference, "text": i.text}
                    for i in items
                ]
            }
        if self._tokenizer is not None:
            return {"input_ids": [item.token_ids for item in items]}
        return {"text": [item.text for item in items]}

    async def _post(self, url: str, body: bytes) -> bytes:
        assert self._session is not None  # since start
        async with self._session.post(
            url, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            content = await response.read()
        if response.status == 200:
            return content
        problem = f"HTTP {response.status}: {content.decode(errors='replace').strip()[:500]}"
        if response.status == 429 or response.status >= 500:
            raise AttemptFailed(problem)
        if response.status in REFUSED_ITEMS:
            raise _Refused(f"{url} refused it with {problem}")
        raise RewardModelError(f"{self._name}: {url} answered {problem}; {self._fix_text()}")

    def _parse_scores(self, url: str, content: bytes, count: int) -> list[Score]:
        try:
            reply = json.loads(content)  # reads NaN too, which then fails its own sample only
        except ValueError:
            reply = None
        is_json = self._config.protocol == "json"
        scores = reply.get("scores") if is_json and isinstance(reply, dict) else reply
        if not isinstance(scores, list) or len(scores) != count:
            form = '{"scores": [...]}' if is_json else '[{"embedding": [...]}, ...]'
            received = f"{len(scores)} of them" if isinstance(scores, list) else repr(content[:200])
            raise RewardModelError(
                f"{self._name}: {url} was asked for {count} scores as {form} and sent {received}; {self._fix_text()}"
            )
        return [_to_score(score if is_json else self._embedded_score(url, score)) for score in scores]

    def _embedded_score(self, url: str, reply: object) -> object:
        numbers = reply.get("embedding") if isinstance(reply, dict) else None
        if not isinstance(numbers, list) or len(numbers) > 1:
            received = f"{len(numbers)} numbers" if isinstance(numbers, list) else f"{reply!r:.200}"
            raise RewardModelError(
                f"{self._name}: {url} sent {received} for a text, not one score; "
                "serve a reward model with a single label, with --is-embedding"
            )
        return numbers[0] if numbers else None

    def _fix_text(self) -> str:
        if self._config.protocol == "json":
            return f"start the server, or correct {self._name}.urls; rollout/rewards/model.py describes the protocol"
        return f"start it (python -m sglang.launch_server --is-embedding --model-path ...), or correct {self._name}.urls"


def _to_score(number: object) -> Score:
    if number is None:
        return Score(value=0.0, error="the reward model gave no score")
    try:
        return to_score(number)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(value=0.0, error=f"{type(error).__name__}: {error}")
