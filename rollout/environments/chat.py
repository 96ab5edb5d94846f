"""Episodes of messages: from the environment's messages to tokens, and from sampled tokens to a message.

The renderer gives only the tokens of new messages. Sampled tokens stay as they were sampled. They are decoded only for
the environment and for the parser of tool calls.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.environments.openenv import OpenEnvServers
from rollout.environments.processes import Message, Opened, ProcessPool, Stepped, require_parser
from rollout.environments.protocol import Context, Outcome, episode_failed
from rollout.environments.rendering import ChatRenderer
from rollout.environments.tandem_worker.failures import readable
from rollout.environments.tool_calls import ParsedTurn, Tools
from rollout.records import Completion, Prompt


class PlainRenderer:
    """The texts of the messages one after another, for a model without a chat template. See
    ``ChatRenderer``."""

    end_token_ids: tuple[int, ...] = ()
    writes_names = False

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._encode("".join(message["content"] for message in messages))

    def following(self, messages: Sequence[Mapping[str, Any]], *, sampled_end: bool) -> list[int]:
        return self.opening(messages)


Renderer = ChatRenderer | PlainRenderer
EpisodeSource = ProcessPool | OpenEnvServers
"""What plays the environment's side."""
ParseCalls = Callable[[str, Tools], Awaitable[ParsedTurn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How messages become tokens, and sampled texts become messages."""

    renderer_of: Callable[[Tools], Renderer]
    """Raises ValueError if the template cannot be used with these tools."""
    parse: ParseCalls | None = None
    """Finds the tool calls and the thinking in a text. None: nothing is looked for, and an agent's requests with tools
    are refused."""
    system_prompt: str | None = None
    """First message of each problem."""

    async def read_turn(
        self, context: Context, completion: Completion, renderer: Renderer, tools: Tools
    ) -> tuple[ParsedTurn, bool]:
        """(the sampled turn without the template's end of a turn, whether that end was sampled). The template's end need
        not be an end token of the model."""
        sampled_end = int(completion.token_ids[-1]) in renderer.end_token_ids
        if sampled_end:
            completion = replace(completion, token_ids=completion.token_ids[:-1])
        text = context.decode(completion)
        if self.parse is None:
            return ParsedTurn(content=text, calls=[]), sampled_end
        return await self.parse(text, tools), sampled_end


class ChatEpisodes:
    """An ``Environment`` in which the user's environment gives the messages."""

    def __init__(self, pool: EpisodeSource, conversation: Conversation) -> None:
        self._pool, self._conversation = pool, conversation

    async def check(self) -> None:
        """Start the first process and make its renderer.

        Raises:
            EnvironmentStartError: no process can be started.
            ValueError: the template cannot be used, or the environment has tools but no parser finds their calls.
        """
        ready = await self._pool.ready()
        self._require_parser(ready.tools)
        self._conversation.renderer_of(ready.tools)

    def _require_parser(self, tools: Tools) -> None:
        require_parser(tools, has_parser=self._conversation.parse is not None)

    async def run(self, problem: Prompt, context: Context) -> Outcome:
        async with self._pool.episode() as process:
            opened = await process.reset(problem_fields(problem, self._conversation.system_prompt))
            return await self._play(opened, process.step, context)

    async def _play(self, opened: Opened, step: Callable, context: Context) -> Outcome:
        try:
            self._require_parser(opened.tools)
        except ValueError as error:
            raise episode_failed(str(error)) from error
        with _messages_of_the_environment():
            renderer = self._conversation.renderer_of(opened.tools)
            opening = renderer.opening(opened.messages)
        totals = _Totals(has_tools=bool(opened.tools))
        context.observe(opening)
        while True:
            completion = await context.act(stop_token_ids=renderer.end_token_ids)
            turn, sampled_end = await self._conversation.read_turn(
                context, completion, renderer, opened.tools
            )
            if turn.error is not None:
                totals.unparsed += 1
                # The error may quote the policy's call, and tokenizers refuse half of a surrogate pair.
                answer = readable(f"Error: the tool call could not be read: {turn.error}")
                messages = [{"role": "user", "content": answer}]
            else:
                stepped: Stepped = await step(message_of(turn, first_call=totals.calls))
                totals.add(stepped)
                if stepped.reward is not None:
                    context.reward_turn(stepped.reward)
                if stepped.done:
                    return await totals.outcome(context, turn.content)
                messages = stepped.messages
            with _messages_of_the_environment():
                following = renderer.following(messages, sampled_end=sampled_end)
            context.observe(following)


@contextmanager
def _messages_of_the_environment() -> Iterator[None]:
    """Messages that the template refuses fail the episode."""
    try:
        yield
    except (ValueError, TypeError) as error:  # TypeError: tokenizers refuse half of a surrogate pair
        raise episode_failed(f"the environment's messages cannot become tokens: {error}") from error


@dataclass(slots=True, kw_only=True)
class _Totals:
    """Sums over the steps of an episode."""

    has_tools: bool
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    errors: int = 0
    unparsed: int = 0

    def add(self, stepped: Stepped) -> None:
        if stepped.reward is not None:
            self.reward = (self.reward or 0.0) + stepped.reward
        for name, value in stepped.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self.calls += stepped.tool_calls
        self.errors += stepped.tool_errors

    async def outcome(self, context: Context, last_answer: str) -> Outcome:
        """The reward is the sum of the steps' rewards. If no step gave one, it is the run's reward of the last answer."""
        parts = dict(self.parts)
        if self.has_tools:
            counts = {"tool_calls": self.calls, "tool_errors": self.errors, "unread_calls": self.unparsed}
            parts |= {name: float(count) for name, count in counts.items()}
        if self.reward is not None:
            return Outcome(reward=self.reward, parts=parts)
        return Outcome.of(await context.score(last_answer), **parts)


def problem_fields(problem: Prompt, system_prompt: str | None) -> dict[str, Any]:
    """The fields that ``reset`` gets."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return {
        "prompt_id": problem.prompt_id,
        "text": problem.text,
        "reference": problem.reference,
        "row": dict(problem.row or {}),
        "messages": [*system, *(problem.messages or [{"role": "user", "content": problem.text}])],
    }


def message_of(turn: ParsedTurn, *, first_call: int) -> Message:
    """The policy's turn as a message. first_call: number of its first call in the episode."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:05d}",  # nine letters and digits, as Mistral's templates require
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for number, call in enumerate(turn.calls, start=first_call)
        ]
    return message
