"""Scores that a language model gives in words, over OpenAI's chat completions.

    Scorer ── score ──> the prompt, filled in once ──> POST <url>/chat/completions ──> the last match of score_pattern

One request per response. served.py describes the failures of requests. A sample also fails if the server
refuses it, or if the answer has no score or one outside of ``score_range``.

Prompt and response are not trusted. They are filled in in one pass, so that a ``{reference}`` in a response
is not expanded. The score is read only from the judge's own answer.
"""

import json
from collections.abc import Sequence

import regex

from configs.schema.reward import JudgeReward
from rollout.http_replicas import Replica
from rollout.records import Prompt, Score
from rollout.rewards.served import PROBE, Refused, ServedReward, score_of

_SHOWN = 200
"""Characters of an answer in a message."""
_SEARCH_S = 1.0
"""Limit of a search: a pattern that backtracks could block the sample role's event loop forever."""


class Judge(ServedReward):
    """Client of one judge."""

    def __init__(self, config: JudgeReward, *, name: str = "reward") -> None:
        """See ``ServedReward``."""
        super().__init__(
            config,
            name=name,
            kind="judge",
            suffix="/chat/completions",
            fix=f"start the server, or correct {name}.urls, {name}.model or {name}.api_key_variable",
        )
        self._config: JudgeReward = config

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """Raises RewardModelError: the servers do not answer, or an answer has the wrong form."""
        return await self._requests.start(self._score(prompt, response_text))

    async def _score_probe(self, replicas: Sequence[Replica]) -> Score:
        return await self._judge(self._body(*PROBE, reference=PROBE[1]), replicas)

    async def _score(self, prompt: Prompt, response_text: str) -> Score:
        body = self._body(prompt.text, response_text, reference=prompt.reference)
        async with self._places:
            try:
                score = await self._judge(body)
            except Refused as error:
                score = Score(error=str(error))
        self.count_failures([score])
        return score

    def _body(self, prompt: str, response: str, *, reference: str) -> dict[str, object]:
        config = self._config
        text = config.prompt.format(prompt=prompt, response=response, reference=reference)
        messages = [{"role": "user", "content": text}]
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        optional = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        sent = {field: value for field, value in optional.items() if value is not None}
        return {"model": config.model, "messages": messages, **sent, **config.extra_body}

    async def _judge(self, body: dict[str, object], replicas: Sequence[Replica] | None = None) -> Score:
        answer, is_cut = await self.request(body, self._parse_answer, replicas=replicas)
        pattern = self._config.score_pattern
        try:
            matches = [match[1] for match in regex.finditer(pattern, answer, timeout=_SEARCH_S)]
        except TimeoutError:
            slow = f"{self._name}.score_pattern={pattern!r} took longer than {_SEARCH_S:g} s on the judge's answer; simplify it"
            return Score(error=slow)
        if not matches:
            shown = self.shown(answer)[-_SHOWN:]
            cut = f", cut off after max_tokens={self._config.max_tokens}" if is_cut else ""
            return Score(
                error=f"{self._name}.score_pattern={pattern!r} matches nothing in the judge's answer{cut}: {shown!r}"
            )
        try:
            given = float(matches[-1])
        except (TypeError, ValueError):  # an optional group is None
            return Score(error=f"the judge's score {self.shown(str(matches[-1]))!r} is not a number")
        low, high = self._config.score_range
        if not low <= given <= high:
            return Score(
                error=f"the judge's score {given:g} is outside of {self._name}.score_range=[{low:g}, {high:g}]"
            )
        return score_of(((given - low) / (high - low), {"judge_score": given}))

    def _parse_answer(self, url: str, content: bytes) -> tuple[str, bool]:
        """(text of the answer, whether it was cut off)."""
        try:
            choice = json.loads(content)["choices"][0]
            text = choice["message"].get("content")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise self.wrong_form(
                url, f"sent {self.shown(content)[:_SHOWN]!r}, which is not a chat completion"
            ) from error
        return (text if isinstance(text, str) else ""), choice.get("finish_reason") == "length"
