"""From the config's ``environment`` block to what makes samples."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from configs.schema import RunConfig
from configs.schema.environment import TokenEnvironment
from rollout.environments.context import EpisodeLimits, ScoreText, Texts
from rollout.environments.episodes import Episodes, SampleMaker, SingleTurns
from rollout.environments.protocol import Environment
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import Scorer
from rollout.rewards.function import describe, import_named
from rollout.sampling.prompt_room import PromptsOf, sequence_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample_makers(
    config: RunConfig,
    *,
    scorer: Scorer,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: list[int],
    max_positions: int | None,
) -> Callable[[PromptsOf], SampleMaker]:
    """Makes what samples training or held-out problems; each has places of its own.

    Raises:
        ValueError: the environment cannot be made, or nothing limits the tokens of its episodes.
    """
    texts = Texts(tokenizer=tokenizer, end_token_ids=frozenset(stop_token_ids))
    score, block = score_by(scorer), config.environment
    if block.type == "single_turn":
        maker = SingleTurns(
            texts=texts,
            stop_token_ids=stop_token_ids,
            max_new_tokens=config.rollout.max_new_tokens,
            score=score,
        )
        return lambda which: maker
    environment = make_environment(block)

    def episodes(which: PromptsOf) -> Episodes:
        limits = sequence_limits(config, which, max_positions=max_positions)
        limits |= {} if block.max_tokens is None else {"environment.max_tokens": block.max_tokens}
        return Episodes(
            environment,
            config=block,
            limits=EpisodeLimits(
                max_turns=block.max_turns,
                max_tokens=min(limits.values(), default=_NO_LIMIT),
                max_new_tokens=config.rollout.max_new_tokens,
            ),
            texts=texts,
            score=score,
        )

    return episodes


_NO_LIMIT = 2**31 - 1
"""Held-out episodes of a model without positions, on servers that choose their own pool."""


def score_by(scorer: Scorer) -> ScoreText:
    async def score(prompt: Prompt, text: str, num_tokens: int, finish_reason: FinishReason) -> Score:
        return await scorer.score(prompt, text, num_tokens=num_tokens, finish_reason=finish_reason)

    return score


def make_environment(config: TokenEnvironment) -> Environment:
    """The environment that the config names.

    Raises:
        ValueError: the module or its class is missing, or raises, or what it makes has no ``run``.
    """
    make = import_named("environment", config.environment, "my_environment:Calculator")
    if not callable(make):
        raise ValueError(
            f"environment {config.environment!r} is a {type(make).__name__}; name a class with `async run(problem, context)`"
        )
    try:
        environment = make(**config.options)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"environment {config.environment!r} cannot be made with options {config.options}: {describe(error)}; "
            "correct environment.options"
        ) from error
    if not callable(getattr(environment, "run", None)):
        raise ValueError(
            f"environment {config.environment!r} has no run; define `async def run(self, problem, context)`"
        )
    return cast(Environment, environment)
