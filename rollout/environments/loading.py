"""Builds sample makers from the config's ``environment`` block."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from configs.schema import RunConfig
from configs.schema.environment import (
    AgentEnvironment,
    ChatEnvironment,
    EnvironmentLimits,
    MessageEnvironment,
    OpenEnvironment,
    TokenEnvironment,
)
from rollout.environments.agent import AgentEpisodes
from rollout.environments.agent_template import agent_starter
from rollout.environments.chat import ChatEpisodes, Conversation, ParseCalls, PlainRenderer, Renderer
from rollout.environments.context import EpisodeLimits, Texts
from rollout.environments.episodes import Episodes, SampleMaker, SingleTurns
from rollout.environments.gateway import Gateway
from rollout.environments.openenv import OpenEnvServers
from rollout.environments.processes import ProcessPool, max_processes
from rollout.environments.protocol import Environment
from rollout.environments.rendering import ChatRenderer, encode_within
from rollout.environments.tandem_worker.failures import describe
from rollout.environments.tool_calls import ParsedTurn, ToolCallParser, Tools
from rollout.rewards.scorer import Scorer
from rollout.sampling.prompt_room import PromptsOf, response_limit, sequence_limits
from rollout.user_code import import_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

BOTH: tuple[PromptsOf, PromptsOf] = ("training", "held-out")
_AFTER_AGENT_S = 60.0
"""Time to end an agent after its own deadline. The error of that deadline has the last lines that the agent wrote."""
MOST_RENDERERS = 64
_Block = TokenEnvironment | ChatEnvironment | AgentEnvironment | OpenEnvironment


@asynccontextmanager
async def sample_makers(
    config: RunConfig,
    *,
    scorer: Scorer,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: list[int],
    max_positions: int,
    vocab_size: int,
    host: str = "127.0.0.1",
) -> AsyncIterator[Callable[[PromptsOf], SampleMaker]]:
    """Yields a function that gives the sample maker of training or held-out problems. Each of the two has its own
    concurrency limit. On exit all processes of environments end.

    vocab_size: of the model. It may have more ids than its tokenizer, and may sample them.
    host: the address on which agents reach the policy.

    Raises:
        ValueError: the environment cannot be made.
        EnvironmentStartError: its process cannot be started.
    """
    texts = Texts(tokenizer=tokenizer, end_token_ids=frozenset(stop_token_ids), vocab_size=vocab_size)
    block = config.environment
    if block.type == "single_turn":
        yield lambda which: SingleTurns(
            texts=texts, max_new_tokens=response_limit(config, which)[1], score=scorer.score
        )
        return
    limits = {which: _limits(config, block, which, max_positions) for which in BOTH}
    most_tokens = max(limit.max_tokens for limit in limits.values())
    async with _environments(config, block, texts, host, most_tokens) as environments:

        def episodes(which: PromptsOf) -> Episodes:
            return Episodes(
                environments[which],
                config=limits_around(block),
                limits=limits[which],
                texts=texts,
                score=scorer.score,
                end_s=_AFTER_AGENT_S if block.type == "agent" else 0.0,
            )

        yield episodes


def _limits(config: RunConfig, block: _Block, which: PromptsOf, max_positions: int) -> EpisodeLimits:
    most = sequence_limits(config, which, max_positions=max_positions)
    own = [] if block.max_tokens is None else [block.max_tokens]
    return EpisodeLimits(
        max_turns=block.max_turns,
        max_tokens=min([*own, *(limit.sequence for limit in most)]),
        max_prompt_tokens=min(limit.prompt for limit in most),
        max_new_tokens=response_limit(config, which)[1],
    )


@asynccontextmanager
async def _environments(
    config: RunConfig, block: _Block, texts: Texts, host: str, most_tokens: int
) -> AsyncIterator[Mapping[PromptsOf, Environment]]:
    """The environment of training problems and that of held-out ones. most_tokens: of a sequence."""
    if isinstance(block, TokenEnvironment):
        yield dict.fromkeys(BOTH, make_environment(block))
        return
    async with AsyncExitStack() as exits:
        conversation = Conversation(
            renderer_of=renderers(
                block, texts.tokenizer, config.model.chat_template_kwargs, most_tokens=most_tokens
            ),
            parse=await exits.enter_async_context(call_parser(block)),
            system_prompt=getattr(config.task, "system_prompt", None),
        )
        if isinstance(block, AgentEnvironment):
            gateway = Gateway(host=host, model=config.model.path.name, vocab_size=texts.vocab_size)
            await exits.enter_async_context(gateway)
            starter = await exits.enter_async_context(agent_starter(block, config.key_variables))
            agents = AgentEpisodes(gateway, starter, block, conversation)
            agents.check()
            yield dict.fromkeys(BOTH, agents)
            return
        chats = {}
        for which in BOTH:
            is_served = isinstance(block, OpenEnvironment)
            source = OpenEnvServers(block) if is_served else ProcessPool(block, config.key_variables)
            chats[which] = ChatEpisodes(await exits.enter_async_context(source), conversation)
        await chats["training"].check()
        yield chats


def limits_around(block: _Block) -> EnvironmentLimits:
    """The limits of an episode's time and of episodes at once."""
    if block.type == "tokens" or block.type == "openenv":
        return block
    # No episode may wait until another releases a process: the wait would count as time of the waiting episode.
    return block.model_copy(update={"max_concurrency": max_processes(block)})


def renderers(
    block: MessageEnvironment,
    tokenizer: "PreTrainedTokenizerBase",
    arguments: Mapping[str, Any],
    *,
    most_tokens: int,
) -> Callable[[Tools], Renderer]:
    """Returns a function from tools to their renderer. It caches renderers, because making one takes tens of milliseconds.
    It raises ValueError if the template cannot be used. most_tokens: of a sequence."""
    if block.template == "plain":
        plain = PlainRenderer(partial(encode_within, tokenizer, most_tokens=most_tokens))
        return lambda tools: plain
    told = set[str]()

    @lru_cache(maxsize=MOST_RENDERERS)
    def renderer_of(tools: str) -> Renderer:
        renderer = ChatRenderer(
            tokenizer, tools=json.loads(tools), arguments=arguments, most_tokens=most_tokens
        )
        for note in renderer.notes:
            if note not in told:
                told.add(note)
                logger.warning("%s", note)
        return renderer

    return lambda tools: renderer_of(json.dumps(tools))


@asynccontextmanager
async def call_parser(block: MessageEnvironment) -> AsyncIterator[ParseCalls | None]:
    """Starts SGLang's parser in its own process. Yields None if the config names no parser.

    Raises:
        ValueError: SGLang has no such parser.
        WorkerStartError: the process cannot be started.
    """
    if block.tool_call_parser is None:
        yield None
        return
    parser = ToolCallParser(block.tool_call_parser, reasoning_parser=block.reasoning_parser)
    with closing(parser):
        await asyncio.to_thread(parser.start)

        async def parse(text: str, tools: Tools) -> ParsedTurn:
            if not tools and block.reasoning_parser is None:
                return ParsedTurn(content=text, calls=[])
            return await asyncio.to_thread(parser, text, tools)

        yield parse


def make_environment(config: TokenEnvironment) -> Environment:
    """The environment that the config names. Raises ValueError if the module or its class is missing or raises, or if
    the object has no ``run``."""
    make = import_function("environment", config.environment, "module:Class, e.g. my_environment:Calculator")
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
