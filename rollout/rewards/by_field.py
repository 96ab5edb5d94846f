"""A separate reward for each source of the data (``reward: {type: by_field}``)."""

import os
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from configs.schema.reward import AnyReward, RewardByField
from rollout.records import FinishReason, Prompt, Score, source_name, source_of
from rollout.rewards.scorer import Scorer, default_num_workers


class ScorerByField:
    """A ``Scorer`` for each source, with its own processes and requests. Used inside ``async with``."""

    def __init__(self, config: RewardByField, *, max_new_tokens: int):
        self._config, self._names = config, config.names
        # The sources share the default number of processes.
        num_workers = max(1, default_num_workers(len(os.sched_getaffinity(0))) // len(config.rewards))
        scorer_of_one = partial(Scorer, max_new_tokens=max_new_tokens, num_workers=num_workers)
        self._scorers = {
            value: scorer_of_one(reward, field=f"reward.rewards.{value}")
            for value, reward in config.rewards.items()
        }
        self._exits = AsyncExitStack()

    def source_name(self, prompt: Prompt) -> str | None:
        """The name of the prompt's source in metrics."""
        return self._names[self._source(prompt)]

    @property
    def retries(self) -> int:
        """Requests to reward models and judges that failed and were repeated, so far."""
        return sum(scorer.retries for scorer in self._scorers.values())

    async def __aenter__(self) -> "ScorerByField":
        async with AsyncExitStack() as entered:
            for scorer in self._scorers.values():
                await entered.enter_async_context(scorer)
            self._exits = entered.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exits.aclose()

    async def score(
        self, prompt: Prompt, response_text: str, *, num_tokens: int, finish_reason: FinishReason
    ) -> Score:
        """``Scorer.score`` of the reward of the prompt's source. Unless it failed, its value is also a part,
        under the name of the source.

        Raises ValueError for a prompt without a source. A check before the start refuses such data.
        """
        source = self._source(prompt)
        score = await self._scorers[source].score(
            prompt, response_text, num_tokens=num_tokens, finish_reason=finish_reason
        )
        name = self._names[source]
        own = {f"{name}/{part}": value for part, value in score.parts.items()}
        return replace(score, parts=own if score.error else {name: score.value, **own})

    def _source(self, prompt: Prompt) -> str:
        return source_of(prompt.row, self._config.field, partial(known_source, self._config))


AnyScorer = Scorer | ScorerByField


def scorer_of(config: AnyReward, *, max_new_tokens: int) -> AnyScorer:
    kind = ScorerByField if isinstance(config, RewardByField) else Scorer
    return kind(config, max_new_tokens=max_new_tokens)  # pyright: ignore[reportArgumentType] - of its own config


def known_source(config: RewardByField, value: object) -> str:
    """The value of the field as the name of a source that has a reward. Raises ValueError."""
    source = source_name(value)
    if source not in config.rewards:
        known = ", ".join(map(repr, config.rewards))
        raise ValueError(
            f"is {source!r}, but reward.rewards has rewards only for {known}; add one, or drop such records"
        )
    return source
