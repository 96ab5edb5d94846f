"""Scores from a reward model that is served over HTTP.

    Scorer ── score ──> waiting items ── batch_size of them, or LINGER_S after the first ──> request

A request waits for a free place, then goes to the least loaded replica. Each attempt has a deadline.

Requests, and the replies that must come back with HTTP 200:

``sglang``  POST <url>/classify  ``{"text": ["...", ...]}``, or ``"input_ids"`` after a chat template, so that
            the server adds no second begin token. Reply: ``[{"embedding": [score], ...}, ...]``, one object
            per text, in order. An empty text is a failed sample and is never sent: without a begin token it
            has no tokens, and SGLang 0.5.23 crashes in an empty forward pass.
``json``    POST <url>           ``{"items": [{"prompt": "...", "response": "...", "reference": "...", "text": "..."}, ...]}``.
            Reply: ``{"scores": [0.5, ...]}``, one number per item, in order; ``null`` for an item that
            cannot be scored.

served.py describes the failures. A refused batch is halved until each refused item is alone. An item that is
refused, or whose score is missing or not finite, is a failed sample: it is counted and not scored, and the
run continues.

Two traps of SGLang 0.5.23:

- SGLang's Qwen2ForSequenceClassification and Qwen3ForSequenceClassification have a bias after the last layer;
  those of transformers have none. If a checkpoint lacks the bias, SGLang draws it from --random-seed, up to
  1/sqrt(hidden_size). It shifts all scores of a replica alike. Store ``score.bias`` as zeros in such a
  checkpoint.
- SGLang never answers a text that fits the model's context but not the server's --max-total-tokens. This ends
  the run like a late answer. Set --max-total-tokens above the longest text.
"""

import asyncio
import json
from collections.abc import Sequence

from configs.schema.reward import ModelReward, PlainText
from rollout.http_replicas import Replica
from rollout.records import Messages, Prompt, Score
from rollout.rewards.served import PROBE, Refused, ServedReward, score_of
from rollout.tokenization import load_tokenizer

LINGER_S = 0.02
"""How long a batch waits to fill up; small against the time of a forward pass."""
Item = dict[str, str] | list[int] | str
"""A sample in a request: see ``json`` above; for ``sglang`` the text's tokens after a chat template, or the
text."""


class RewardModel(ServedReward):
    """Client of one reward model."""

    def __init__(self, config: ModelReward, *, name: str = "reward") -> None:
        """See ``ServedReward``. Raises ValueError also if the tokenizer cannot be loaded or has no chat template."""
        suffix = "/classify" if config.protocol == "sglang" else ""
        super().__init__(config, name=name, kind="reward model", suffix=suffix, fix=_fix_text(config, name))
        self._config: ModelReward = config
        self._tokenizer = None
        if config.text.type == "chat":
            self._tokenizer = load_tokenizer(config.text.tokenizer)
            if not self._tokenizer.chat_template:
                raise ValueError(
                    f"{name}.text.tokenizer={config.text.tokenizer} has no chat template; use text: {{type: plain}}"
                )
        field_of_sglang = "text" if self._tokenizer is None else "input_ids"
        self._field = "items" if config.protocol == "json" else field_of_sglang
        self._waiting: list[tuple[Item, asyncio.Future[Score]]] = []
        self._linger: asyncio.TimerHandle | None = None

    async def _score_probe(self, replicas: Sequence[Replica]) -> Score:
        [score] = await self._request([self._make_item(*PROBE, reference=PROBE[1])], replicas)
        return score

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """Raises RewardModelError: the servers do not answer, or an answer has the wrong form."""
        item = self._make_item(
            prompt.text, response_text, reference=prompt.reference, messages=prompt.messages
        )
        if not item:
            return Score(error="the text for the reward model is empty")
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == self._config.batch_size:
            self._send_waiting()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._send_waiting)
        return await future

    async def close(self) -> None:
        for _, future in self._take_waiting():
            future.cancel()
        await super().close()

    def _make_item(
        self, prompt: str, response: str, *, reference: str, messages: Messages | None = None
    ) -> Item:
        if isinstance(self._config.text, PlainText):
            text = self._config.text.template.format(prompt=prompt, response=response, reference=reference)
        else:
            assert self._tokenizer is not None
            asked = messages or [{"role": "user", "content": prompt}]
            turns = [*map(dict, asked), {"role": "assistant", "content": response}]
            text = str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        if self._config.protocol == "json":
            return {"prompt": prompt, "response": response, "reference": reference, "text": text}
        return text if self._tokenizer is None else self._tokenizer.encode(text, add_special_tokens=False)

    def _send_waiting(self) -> None:
        self._requests.start(self._send_batch(self._take_waiting()))

    def _take_waiting(self) -> list[tuple[Item, asyncio.Future[Score]]]:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        waiting, self._waiting = self._waiting, []
        return waiting

    async def _send_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Score]]]) -> None:
        """Give every future of the batch its score, or the error."""
        try:
            async with self._places:
                scores = await self._score_items([item for item, _ in batch])
            self.count_failures(scores)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # a defect must reach the callers too
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # its caller may be gone
                    future.set_result(score)

    async def _score_items(self, items: list[Item]) -> list[Score]:
        try:
            return await self._request(items)
        except Refused as error:
            if len(items) == 1:
                return [Score(error=str(error))]
        half = len(items) // 2
        return await self._score_items(items[:half]) + await self._score_items(items[half:])

    async def _request(self, items: list[Item], replicas: Sequence[Replica] | None = None) -> list[Score]:
        def parse(url: str, content: bytes) -> list[Score]:
            return self._parse_scores(url, content, len(items))

        return await self.request({self._field: items}, parse, num_samples=len(items), replicas=replicas)

    def _parse_scores(self, url: str, content: bytes, count: int) -> list[Score]:
        try:
            reply = json.loads(content)  # accepts NaN, which then fails only its own sample
        except (ValueError, RecursionError):  # invalid JSON or UTF-8; values nested too deep
            reply = None
        is_json = self._config.protocol == "json"
        scores = reply.get("scores") if is_json and isinstance(reply, dict) else reply
        if not isinstance(scores, list) or len(scores) != count:
            form = '{"scores": [...]}' if is_json else '[{"embedding": [...]}, ...]'
            received = str(len(scores)) if isinstance(scores, list) else repr(self.shown(content)[:200])
            raise self.wrong_form(url, f"sent {received} instead of {count} scores as {form}")
        return [_to_score(score if is_json else self._embedded_score(url, score)) for score in scores]

    def _embedded_score(self, url: str, reply: object) -> object:
        numbers = reply.get("embedding") if isinstance(reply, dict) else None
        if not isinstance(numbers, list) or len(numbers) > 1:
            received = (
                f"{len(numbers)} numbers" if isinstance(numbers, list) else self.shown(repr(reply))[:200]
            )
            raise self.wrong_form(
                url,
                f"sent {received} for a text, not one score; serve a reward model with a single label, with --is-embedding",
            )
        return numbers[0] if numbers else None


def _fix_text(config: ModelReward, name: str) -> str:
    if config.protocol == "json":
        return f"start the server, or correct {name}.urls; rollout/rewards/model.py describes the protocol"
    return (
        f"start it (python -m sglang.launch_server --is-embedding --model-path ...), or correct {name}.urls"
    )


def _to_score(number: object) -> Score:
    if number is None:
        return Score(error="the reward model gave no score")
    return score_of(number)
