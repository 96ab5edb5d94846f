"""Episodes of messages: which tokens are observed, tool calls that fail or cannot be read, where the reward comes from."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from configs.schema import RunConfig
from configs.schema.environment import ChatEnvironment
from rollout.environments import loading
from rollout.environments.chat import (
    ChatEpisodes,
    Conversation,
    PlainRenderer,
    message_of,
    problem_fields,
)
from rollout.environments.context import EpisodeLimits
from rollout.environments.episodes import Episodes, Sample
from rollout.environments.loading import sample_makers
from rollout.environments.processes import ProcessPool
from rollout.environments.tool_calls import ParsedTurn
from rollout.records import FinishReason, Prompt, Score, Status
from tests.rollout.environments.test_episodes import PROMPT, STOP, TEXTS, group_of, pack
from tests.support.chat_environments import fails
from tests.support.fake_engine import FakeEngine

END = 7
"""The template's end of a turn. It is no end token of the model."""
SEEDS = range(200, 216)
UNREADABLE = 13
LIMITS = EpisodeLimits(max_turns=5, max_tokens=400, max_new_tokens=6)


class ToyRenderer:
    """Made tokens, which say all that they are made of."""

    end_token_ids = (END,)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.num_tools = len(tools)

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [self.num_tools, *self._of(messages)]

    def following(self, messages: Sequence[Mapping[str, Any]], *, sampled_end: bool) -> list[int]:
        return [*([] if sampled_end else [END]), *self._of(messages)]

    def _of(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [token for m in messages for token in (len(m["role"]), len(m["content"]))]


async def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    """An even first number is a call, and some others are broken ones."""
    first, *_ = [*map(int, text.split()), 1]
    if first == UNREADABLE:
        return ParsedTurn(content=text, calls=[], error="no JSON")
    if first % 2:
        return ParsedTurn(content=text, calls=[])
    call = {"name": tools[0]["function"]["name"], "arguments": {"key": first}}
    return ParsedTurn(content="", calls=[call])


async def score_by_text(prompt: Prompt, text: str, num_tokens: int, finish_reason: FinishReason) -> Score:
    return Score(value=float(len(text)), parts={"scored": 1.0}, correct=True)


def play(
    name: str, *, interface: str, parse=None, limits=LIMITS, renderer_of=ToyRenderer, prompt=PROMPT, **options
) -> list[Sample]:
    config = ChatEnvironment(
        environment=f"tests.support.chat_environments:{name}",
        interface=interface,
        options=options,
        tool_call_parser="toy" if parse else None,
    )

    async def samples() -> list[Sample]:
        async with ProcessPool(config.model_copy(update={"max_processes": 2})) as pool:
            environment = ChatEpisodes(
                pool, Conversation(renderer_of=renderer_of, parse=parse, system_prompt="Be brief.")
            )
            await environment.check()
            maker = Episodes(environment, config=config, limits=limits, texts=TEXTS, score=score_by_text)
            async with asyncio.timeout(60):
                return await maker.sample(FakeEngine(), prompt, list(SEEDS), temperature=0.5)

    made = asyncio.run(samples())
    pack([group_of(made)])  # every turn is what was requested
    return made


def test_a_flaky_tool_answers_the_model_and_the_episode_goes_on():
    """Against a slow account of each episode from its sampled tokens."""
    seen = dict.fromkeys(("ok", "error", "unread", "limit"), 0)
    for one in play("FlakyTools", interface="tools", parse=parse):
        system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT.text}
        expected = ToyRenderer([{}]).opening([system, user])
        counts = {"tool_calls": 0.0, "tool_errors": 0.0, "unread_calls": 0.0}
        ids, found, is_done = one.sequence.token_ids.tolist(), 0.0, False
        for turn in one.sequence.turns:
            assert not is_done
            sampled = ids[turn.start : turn.end]
            sampled_end = sampled[-1] == END
            text = [token for token in sampled[: len(sampled) - sampled_end] if token != STOP]
            first = text[0] if text else 1
            expected += sampled
            if first == UNREADABLE:
                counts["unread_calls"] += 1
                seen["unread"] += 1
                messages = [
                    {"role": "user", "content": "Error: the tool call could not be read: no JSON"},
                ]
            elif first % 2:
                is_done = True
                continue
            else:
                counts["tool_calls"] += 1
                counts["tool_errors"] += fails(first)
                found += not fails(first)
                seen["error" if fails(first) else "ok"] += 1
                content = (
                    f"Error: ConnectionError: no answer for {first}" if fails(first) else f"value {first}"
                )
                messages = [{"role": "tool", "content": content}]
            expected += ToyRenderer().following(messages, sampled_end=sampled_end)
        assert ids == expected
        if is_done:
            assert (one.status, one.reward, one.parts) == (Status.OK, found, counts)
        else:
            seen["limit"] += 1
            assert (one.status, one.reward, one.error) == (Status.TURN_LIMIT, 0.0, None)
    assert min(seen.values()) > 0, seen


async def no_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    return ParsedTurn(content=text, calls=[])


async def think(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    assert tools == []
    return ParsedTurn(content="7", calls=[], reasoning=text)


def test_thinking_is_apart_without_tools_too():
    """The reward is the number that the environment reads in the second answer."""
    assert [one.reward for one in play("Faulty", interface="chat", parse=think)] == [7.0] * len(SEEDS)


def test_without_a_reward_the_run_scores_the_last_answer():
    for one in play("Unscored", interface="tools", parse=no_calls):
        (turn,) = one.sequence.turns
        ids = one.sequence.token_ids[turn.start : turn.end]
        text = TEXTS.decode(ids[:-1] if ids[-1] == END else ids)
        assert one.reward == len(text) and one.correct
        assert one.parts == {"scored": 1.0, "tool_calls": 0.0, "tool_errors": 0.0, "unread_calls": 0.0}


def test_rewards_and_parts_of_steps_are_added_up():
    plain = lambda tools: PlainRenderer(TEXTS.encode)  # noqa: E731
    for one in play("Countdown", interface="text", renderer_of=plain, prompt=numbers()):
        assert (one.status, one.reward, one.parts, one.correct) == (Status.OK, 1.0, {"steps": 2.0}, True)
        first, second = one.sequence.turns
        assert (first.reward or 0.0) + second.reward == 1.0
        ids = one.sequence.token_ids.tolist()
        assert ids[: first.start] == [3, 4, 5]
        assert ids[first.end : second.start] == [7, 8]


def test_the_message_of_a_turn():
    calls = [{"name": "look", "arguments": {"key": 1}}, {"name": "look", "arguments": {}}]
    message = message_of(ParsedTurn(content="now", calls=calls, reasoning="hm"), first_call=9)
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert ids == ["call00009", "call00010"]
    assert message == {
        "role": "assistant", "content": "now", "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }  # fmt: skip


def numbers() -> Prompt:
    return Prompt(prompt_id="p", token_ids=[9], text="3 4 5", reference="")


def test_an_observation_that_does_not_fit_ends_the_episode():
    limits = EpisodeLimits(max_turns=5, max_tokens=16, max_new_tokens=6)
    made = play("FlakyTools", interface="tools", parse=parse, limits=limits)
    assert Status.TOKEN_LIMIT in {one.status for one in made}
    for one in made:
        assert len(one.sequence) <= 16
        assert (one.status is Status.TOKEN_LIMIT) <= (one.reward == 0.0)


def test_tools_without_a_parser_are_refused():
    with pytest.raises(ValueError, match=r"environment\.tool_call_parser is null"):
        play("Faulty", interface="chat", tools=True)
    with pytest.raises(ValueError, match=r"needs environment\.tool_call_parser"):
        ChatEnvironment(environment="m:C", interface="tools")


def test_tools_that_reset_chooses_without_a_parser_fail_their_episode():
    """Their calls would be plain text, and never be made."""
    for one in play("LateTools", interface="chat"):
        assert (one.reward, one.status) == (None, Status.FAILED)
        assert "tools (look), but environment.tool_call_parser is null" in str(one.error)
        assert "name the parser" in str(one.error)


def test_a_template_that_cannot_be_used_is_found_before_the_first_episode():
    def renderer_of(tools):
        raise ValueError("this template cannot be used")

    with pytest.raises(ValueError, match="this template cannot be used"):
        play("Faulty", interface="chat", renderer_of=renderer_of)


def test_renderers_of_the_last_sets_of_tools_are_kept(monkeypatch):
    """An environment may have other tools for every problem. What is odd about a template is told once."""
    made, told = [], []

    class Renderer(ToyRenderer):
        notes = ("odd",)

        def __init__(self, tokenizer, *, tools, arguments, most_tokens) -> None:
            super().__init__(tools)
            made.append(tools[0]["name"])

    monkeypatch.setattr(loading, "ChatRenderer", Renderer)
    monkeypatch.setattr(loading.logger, "warning", lambda form, *values: told.append(form % values))
    block = ChatEnvironment(environment="a:B")
    renderer_of = loading.renderers(block, TEXTS.tokenizer, {}, most_tokens=400)
    for number in range(200):
        first, other = (renderer_of([{"name": name}]) for name in ("always", number))
        assert first is renderer_of([{"name": "always"}]) and other is not first
    assert made == ["always", *range(200)]
    renderer_of([{"name": 0}])
    renderer_of([{"name": 138}])
    assert len(made) == 202 and told == ["odd"]
    renderer_of([{"name": 137}])  # which the 64 others have put out
    assert len(made) == 203


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_messages_that_the_template_refuses_fail_their_episode(kind):
    """With a TypeError the tokenizers refuse half of a surrogate pair."""

    class Refusing(ToyRenderer):
        def following(self, messages, *, sampled_end):
            raise kind("roles must alternate")

    made = play("Countdown", interface="text", renderer_of=Refusing)
    assert {one.status for one in made} == {Status.FAILED}
    assert {one.error for one in made} == {
        "the environment's messages cannot become tokens: roles must alternate"
    }


def test_the_error_of_a_call_shows_half_of_a_surrogate_pair_as_a_question_mark():
    """The policy can write one as the name of a tool. It has no tokens, and the call was no score."""

    async def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        return ParsedTurn(content=text, calls=[], error="there is no tool \ud83d")

    class Recording(ToyRenderer):
        def following(self, messages, *, sampled_end):
            shown.update(message["content"] for message in messages)
            return super().following(messages, sampled_end=sampled_end)

    shown = set[str]()
    play("FlakyTools", interface="tools", parse=parse, renderer_of=Recording)
    assert shown == {"Error: the tool call could not be read: there is no tool ?"}


def test_the_sample_role_makes_training_and_held_out_episodes_and_ends_their_processes():
    """From a config. Each kind has processes of its own."""
    environment = {
        "type": "chat", "environment": "tests.support.chat_environments:Countdown", "interface": "text",
        "template": "plain", "max_processes": 2,
    }  # fmt: skip
    config = RunConfig.model_validate(
        {"model": {"path": "model"}, "task": {"type": "countdown"}, "environment": environment}
    )

    async def samples() -> list[Sample]:
        made = []
        before = psutil.Process().children(recursive=True)
        async with sample_makers(
            config,
            scorer=SimpleNamespace(score=None),  # pyright: ignore[reportArgumentType] - the environment gives the rewards
            tokenizer=TEXTS.tokenizer,
            stop_token_ids=[STOP],
            max_positions=256,
            vocab_size=len(TEXTS.tokenizer),
        ) as samples_of:
            for which in ("training", "held-out"):
                maker = samples_of(which)
                made += await maker.sample(FakeEngine(), numbers(), list(SEEDS)[:4], temperature=0.5)
            guards = psutil.Process().children()
            assert len({*guards} - {*before}) == 4
        assert {*psutil.Process().children(recursive=True)} <= {*before}
        return made

    made = asyncio.run(samples())
    assert [one.reward for one in made] == [1.0] * 8


def test_the_fields_of_a_problem():
    prompt = Prompt(prompt_id="p", token_ids=[1], text="2+3?", reference="5", row={"at": np.float32(1)})
    fields = problem_fields(prompt, None)
    assert fields.pop("messages") == [{"role": "user", "content": "2+3?"}]
    assert fields == {"prompt_id": "p", "text": "2+3?", "reference": "5", "row": {"at": np.float32(1)}}
    asked = (
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    )
    turns = problem_fields(replace(prompt, messages=asked), "Think.")["messages"]
    assert turns == [{"role": "system", "content": "Think."}, *asked]
