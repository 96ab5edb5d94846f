"""Agents' requests around a deterministic engine: which tokens are observed, and what is refused. The client is OpenAI's."""

import asyncio
import contextlib
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.client import GenerationError
from rollout.environments import gateway as gateway_module
from rollout.environments.chat import Conversation, PlainRenderer
from rollout.environments.context import EpisodeContext, EpisodeLimits, Texts, turn_seed
from rollout.environments.episodes import Sample
from rollout.environments.gateway import Gateway
from rollout.environments.gateway_session import GatewaySession
from rollout.environments.openai_form import Refused
from rollout.environments.rendering import ChatRenderer, encode_within
from rollout.environments.tool_calls import ParsedTurn
from rollout.records import FinishReason, Status
from tests.rollout.environments.test_chat import END, ToyRenderer
from tests.rollout.environments.test_episodes import (
    LARGEST,
    PROMPT,
    STOP,
    TEXTS,
    VOCAB,
    group_of,
    pack,
    score_by_length,
)
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.fake_engine import FakeEngine, fake_tokens
from tests.support.records import completion

DEADLINE_S = 60.0
LIMITS = EpisodeLimits(max_turns=5, max_tokens=400, max_new_tokens=6)
PLAIN = Conversation(renderer_of=lambda tools: PlainRenderer(TEXTS.encode))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def context_of(seed: int = 1, *, engine=None, limits=LIMITS, texts=TEXTS) -> EpisodeContext:
    return EpisodeContext(
        client=engine or FakeEngine(),
        problem=PROMPT,
        seed=seed,
        temperature=0.5,
        limits=limits,
        texts=texts,
        score=score_by_length,
    )


class Opened:
    """A session with OpenAI's client."""

    def __init__(self, session: GatewaySession, context: EpisodeContext, http) -> None:
        self.session, self.context, self.http = session, context, http
        self.client = self.client_with(session.key)

    def client_with(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.session.base_url, api_key=key, http_client=self.http)

    async def ask(self, messages, **fields):
        return await self.client.chat.completions.create(model="any", messages=messages, **fields)

    async def refused(self, code: str, messages, **fields) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            await self.ask(messages, **fields)
        assert caught.value.code == code, caught.value
        return caught.value

    async def post(self, path: str, body, **headers) -> tuple[int, dict]:
        given = {"Authorization": f"Bearer {self.session.key}"} | headers
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.session.base_url}/{path}", data=body, headers=given) as response,
        ):
            return response.status, await response.json()


@asynccontextmanager
async def opened(count: int = 1, *, conversation=PLAIN, **context) -> AsyncIterator[list[Opened]]:
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(asyncio.timeout(DEADLINE_S))
        gateway = await exits.enter_async_context(Gateway(vocab_size=VOCAB))
        http = await exits.enter_async_context(openai.DefaultAsyncHttpxClient(timeout=DEADLINE_S))
        made = []
        for number in range(count):
            own = context_of(number + 1, **context)
            session = await exits.enter_async_context(gateway.session(own, conversation))
            made.append(Opened(session, own, http))
        yield made


def run(test) -> None:
    asyncio.run(test())


def sampled(prompt_ids: Sequence[int], seed: int, turn: int, *, most: int = 6, stop: int = STOP) -> list[int]:
    return fake_tokens(prompt_ids, turn_seed(seed, turn), max_new_tokens=most, vocab_size=VOCAB, stop=stop)


async def play(
    one: Opened, seed: int, opening: str, following: Sequence[str], *, stream: bool = False
) -> None:
    """A conversation in which every answer and every token is as a slow account has them."""
    messages, ids = [], []
    for turn, text in enumerate([opening, *following]):
        messages.append(user(text))
        ids += TEXTS.encode(text)
        tokens = sampled(ids, seed, turn)
        expected = TEXTS.tokenizer.decode(
            tokens[:-1] if tokens[-1] == STOP else tokens, skip_special_tokens=False
        )
        finish = "stop" if tokens[-1] == STOP else "length"
        if stream:
            chunks = await one.ask(messages, stream=True, stream_options={"include_usage": True})
            parts = [chunk async for chunk in chunks]
            content = "".join(choice.delta.content or "" for chunk in parts for choice in chunk.choices)
            (reason,) = {c.finish_reason for chunk in parts for c in chunk.choices} - {None}
            answer, usage = {"role": "assistant", "content": content}, parts[-1].usage
        else:
            completion = await one.ask(messages)
            (choice,) = completion.choices
            answer, reason, usage = choice.message, choice.finish_reason, completion.usage
            content = answer.content
        assert (content, reason) == (expected, finish)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(tokens))
        messages.append(answer)
        ids += tokens
    assert one.context.token_ids.tolist() == ids
    assert (one.session.num_turns, one.session.last_text) == (1 + len(following), expected)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_sequence_of_tokens(stream):
    async def test():
        async with opened() as (one,):
            await play(one, 1, "3 4 5", ["7 8", "9"], stream=stream)
            models = await one.client.models.list()
            assert [model.id for model in models.data] == ["policy"]

    run(test)


def test_256_sessions_at_once_lose_and_mix_nothing():
    async def test():
        async with opened(256) as sessions, asyncio.TaskGroup() as tasks:
            for seed, one in enumerate(sessions, start=1):
                following = [f"7 {seed % VOCAB}", f"{seed % 7}"]
                tasks.create_task(play(one, seed, f"3 {seed % 11} {seed // 16}", following))

    run(test)


REPEATED = {"X-Stainless-Retry-Count": "1"}
"""As OpenAI's client has it when it asks again because an answer was lost."""


def test_a_repeated_request_is_sampled_once_and_gets_the_same_answer():
    async def test():
        engine = FakeEngine()
        async with opened(engine=engine) as (one,):
            first = [user("3 4 5")]
            at_once = await asyncio.gather(*(one.ask(first, extra_headers=REPEATED) for _ in range(4)))
            ((text, answer_id),) = {(answer.choices[0].message.content, answer.id) for answer in at_once}
            second = [*first, at_once[0].choices[0].message, user("7")]
            await one.ask(second)
            again, streamed = [
                await one.ask(first, extra_headers=REPEATED, stream=stream) for stream in (False, True)
            ]
            assert (again.choices[0].message.content, again.id) == (text, answer_id)
            chunks = [chunk async for chunk in streamed]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
            assert {chunk.id for chunk in chunks} == {answer_id}
            await one.ask(second, extra_headers=REPEATED)
            # A client that does not number its attempts may have lost the answer too.
            status, answer = await one.post("chat/completions", json.dumps({"messages": first}))
            assert (status, answer["choices"][0]["message"]["content"], answer["id"]) == (
                200,
                text,
                answer_id,
            )
            assert (len(engine.calls), one.session.num_turns, one.session.num_forks) == (2, 2, 0)
            assert one.session.refused == 0

    run(test)


def test_a_request_that_is_asked_anew_is_sampled_anew():
    async def test():
        engine = FakeEngine()
        async with opened(engine=engine) as (one,):
            first = [user("3 4 5")]
            answers = await asyncio.gather(*(one.ask(first) for _ in range(4)), one.ask(first, max_tokens=2))
            assert {call[0] for call in engine.calls} == {(3, 4, 5)}
            assert len({call[1] for call in engine.calls}) == len({answer.id for answer in answers}) == 5
            found = [one.context.sequences()[n].token_ids.tolist()[3:] for n in range(5)]
            assert [len(answer) for answer in found] == [a.usage.completion_tokens for a in answers]
            assert (one.session.num_turns, one.session.num_forks) == (5, 4)
            assert one.session.first_difference is None  # the same messages

    run(test)


class Slow(FakeEngine):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def generate_group(self, *arguments, **named):
        self.asked.set()
        await self.may_answer.wait()
        return await super().generate_group(*arguments, **named)


def test_a_client_that_is_gone_gets_its_answer_later():
    async def test():
        engine = Slow()
        async with opened(engine=engine) as (one,):
            lost = asyncio.ensure_future(one.ask([user("3")]))
            await engine.asked.wait()
            lost.cancel()
            await asyncio.wait([lost])
            again = asyncio.ensure_future(one.ask([user("3")], extra_headers=REPEATED))
            other = asyncio.ensure_future(one.ask([user("4")]))  # another conversation, at the same time
            engine.may_answer.set()
            await asyncio.gather(again, other)
            assert (len(engine.calls), one.session.num_turns) == (2, 2)
            assert [s.token_ids[0] for s in one.context.sequences()] == [3, 4]

    run(test)


class Apart:
    """Each message has the tokens of its own text, wherever it stands."""

    end_token_ids: tuple[int, ...] = ()

    def opening(self, messages):
        return [token for message in messages for token in TEXTS.encode(message["content"])]

    def following(self, messages, *, sampled_end):
        return self.opening(messages)


APART = Conversation(renderer_of=lambda tools: Apart())


def test_a_history_that_was_rewritten_forks_behind_what_is_kept(caplog):
    async def test():
        engine = FakeEngine()
        async with opened(conversation=APART, engine=engine) as (one,):
            start = [{"role": "system", "content": "1 2"}, user("3 4 5")]
            answer = {"role": "assistant", "content": (await one.ask(start)).choices[0].message.content}
            sampled_first = sampled([1, 2, 3, 4, 5], 1, 0)
            other = {**answer, "content": "8"}
            asked = [
                ([*start, other, user("7")], [1, 2, 3, 4, 5, 8, 7]),
                ([*start, answer, user("6")], [1, 2, 3, 4, 5, *sampled_first, 6]),
                ([*start, answer, user("7")], [1, 2, 3, 4, 5, *sampled_first, 7]),
            ]
            for messages, tokens in asked:
                await one.ask(messages)
                assert engine.calls[-1][0] == tuple(tokens)
            parts = [{"type": "text", "text": answer["content"]}]
            same = {"role": "assistant", "content": parts, "refusal": None, "annotations": []}
            error = await one.refused("invalid_value", [*start, same])  # the same in another form
            assert "no message follows the last answer" in str(error)
            assert (one.session.num_turns, one.session.num_forks, one.session.refused) == (4, 2, 1)
            assert one.session.first_difference.startswith(
                "message 2 (assistant) differs: its content is '8'"
            )

    with caplog.at_level(logging.WARNING):
        run(test)
    (record,) = caplog.records
    assert "episode/sequences_mean" in record.getMessage()


@pytest.mark.parametrize("written", [False, True])
def test_names_of_answers_fork_only_if_the_template_writes_them(written):
    """Some agents name each answer that they send back."""

    async def test():
        renderer = PlainRenderer(TEXTS.encode)
        renderer.writes_names = written
        async with opened(conversation=Conversation(renderer_of=lambda tools: renderer)) as (one,):
            messages = [user("3 4 5")]
            for _ in range(2):
                content = (await one.ask(messages)).choices[0].message.content
                messages += [{"role": "assistant", "content": content, "name": "solver"}, user("7")]
            await one.ask(messages)
            assert (one.session.num_turns, one.session.num_forks) == (3, 2 if written else 0)

    run(test)


ACTIONS = st.tuples(
    st.sampled_from(("extend", "ask anew", "repeat", "edit", "drop")),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(1, VOCAB - 1),
)


@settings(max_examples=60, deadline=None)
@given(script=st.lists(ACTIONS, max_size=10))
def test_whatever_an_agent_asks_each_answer_is_trained_on_once_behind_what_was_asked(script):
    """Texts are numbers, so a request's prompt must have the numbers of its messages, and the end tokens of answers
    that were kept as they were sampled."""

    async def test():
        engine = FakeEngine()
        limits = EpisodeLimits(max_turns=99, max_tokens=9_000, max_new_tokens=6)
        async with opened(conversation=APART, engine=engine, limits=limits) as (one,):
            asked: list[tuple[list[dict], str]] = []

            async def ask(messages, **fields):
                before = len(engine.calls)
                answer = await one.ask(messages, **fields)
                if "extra_headers" in fields:
                    assert len(engine.calls) == before
                else:
                    numbers = [n for message in messages for n in TEXTS.encode(message["content"])]
                    assert [n for n in engine.calls[-1][0] if n != STOP] == numbers
                text = answer.choices[0].message.content
                asked.append((messages, text))
                return text

            await ask([user("3 4 5")])
            for action, which, where, number in script:
                messages, text = asked[which % len(asked)]
                whole = [*messages, {"role": "assistant", "content": text}]
                place = where % len(whole)
                if action == "extend":
                    await ask([*whole, user(str(number))])
                elif action == "ask anew":
                    await ask(messages)
                elif action == "repeat":
                    given = {answer for other, answer in asked if other == messages}
                    assert await ask(messages, extra_headers=REPEATED) in given
                elif action == "edit":
                    edited = {**whole[place], "content": str(number)}
                    await ask([*whole[:place], edited, *whole[place + 1 :], user("2")])
                else:
                    await ask([*whole[:place], *whole[place + 1 :], user("2")])
            assert one.session.num_turns == len(engine.calls)
            made = Sample(
                sequences=[s for s in one.context.sequences() if s.turns],
                reward=1.0, parts={}, correct=True, status=Status.OK, error=None,
            )  # fmt: skip
            _, batch = pack([group_of([made])])  # compares each turn with what was sent
            tokens = sum(len(sampled_by(engine_call)) for engine_call in engine.calls)
            assert int(batch.packed.response_mask_T.sum()) == tokens
            assert one.session.num_forks == len(made.sequences) - 1

    run(test)


def sampled_by(call: tuple[tuple[int, ...], int, float]) -> list[int]:
    return fake_tokens(call[0], call[1], max_new_tokens=6, vocab_size=VOCAB, stop=STOP)


def test_keys_are_of_one_session_and_end_with_it():
    async def test():
        async with opened(2) as (one, other):
            for key in (other.session.key, "wrong", one.session.key[:-1]):
                with pytest.raises(openai.AuthenticationError):
                    await one.client_with(key).chat.completions.create(model="m", messages=[user("3")])
            status, _ = await one.post("chat/completions", b"{}", Authorization=one.session.key)
            assert status == 401
            assert one.session.num_turns == 0 and not one.context.token_ids.size
            await other.ask([user("3")])
            gateway = Gateway(vocab_size=VOCAB)
            async with gateway:
                async with gateway.session(context_of(), PLAIN) as session:
                    closed = Opened(session, context_of(), one.http)
                    await closed.ask([user("3")])
                await closed.refused("no_session", [user("3")])

    run(test)


class Connection:
    """A connection to the gateway of a session."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session
        self._place, self._path = session.base_url.removeprefix("http://").split("/", 1)

    async def __aenter__(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection(*self._place.rsplit(":", 1))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.close()

    def begin(self, key: str) -> None:
        head = f"GET /{self._path}/models HTTP/1.1\r\nHost: {self._place}\r\nAuthorization: Bearer {key}\r\n"
        self._writer.write(head.encode())

    async def status_with(self, key: str) -> int:
        self.begin(key)
        self._writer.write(b"\r\n")
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        await self._reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        return int(head.split()[1])

    async def closed(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await self._reader.read() == b""


def test_a_connection_that_proves_no_key_is_closed_and_an_agents_stays(monkeypatch):
    monkeypatch.setattr(gateway_module, "STRANGER_S", 0.5)

    async def test():
        async with opened() as (one,), AsyncExitStack() as exits:
            agent, silent, slow, wrong = [
                await exits.enter_async_context(Connection(one.session)) for _ in range(4)
            ]
            assert await agent.status_with(one.session.key) == 200
            slow.begin(one.session.key)
            assert await wrong.status_with("wrong") == 401
            for stranger in (silent, slow, wrong):
                await stranger.closed()
            assert await agent.status_with(one.session.key) == 200

    run(test)


def test_of_too_many_connections_without_a_key_the_oldest_is_closed(monkeypatch):
    monkeypatch.setattr(gateway_module, "STRANGER_S", 10 * DEADLINE_S)
    monkeypatch.setattr(gateway_module, "MOST_STRANGERS", 2)

    async def test():
        async with opened() as (one,), AsyncExitStack() as exits:
            agent = await exits.enter_async_context(Connection(one.session))
            assert await agent.status_with(one.session.key) == 200
            first, *others = [await exits.enter_async_context(Connection(one.session)) for _ in range(3)]
            await first.closed()
            assert [await each.status_with(one.session.key) for each in (agent, *others)] == [200] * 3

    run(test)


def test_half_of_the_files_that_may_be_open_are_not_for_strangers(monkeypatch):
    monkeypatch.setattr(gateway_module, "STRANGER_S", 10 * DEADLINE_S)
    monkeypatch.setattr(gateway_module.resource, "getrlimit", lambda kind: (6, 8))

    async def test():
        async with opened() as (one,), AsyncExitStack() as exits:
            first, *_ = [await exits.enter_async_context(Connection(one.session)) for _ in range(4)]
            await first.closed()

    run(test)


def test_closing_a_session_ends_the_turn_under_way():
    async def test():
        engine = Slow()
        async with opened(engine=engine) as (one,):
            waiting = asyncio.ensure_future(one.refused("no_session", [user("3")]))
            await engine.asked.wait()
            await one.session.close()
            await waiting
            await one.refused("no_session", [user("3")])
            assert one.context.token_ids.tolist() == [3] and not engine.calls

    run(test)


def test_requests_that_cannot_be_understood(monkeypatch, caplog):
    monkeypatch.setattr(gateway_module, "LARGEST_BODY", 10_000)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    bad = [
        (b"x", 400, "not JSON"),
        (b"[" * 5000, 400, "not JSON"),
        (b"[]", 400, "is a list"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"x" * 20_000, 413, "may have"),
        ({}, 400, "messages is not a list"),
        ({"messages": []}, 400, "messages is not a list"),
        ({"messages": ["a"]}, 400, "message 0 is not a message"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content of message 0 is not text"),
        ({"messages": [image]}, 400, "a part that is not text"),
        ({"messages": [user("")]}, 400, "have no tokens"),
        ({"messages": [user("3")], "n": 2}, 400, "use n=1"),
        ({"messages": [user("3")], "stop": ["a"]}, 400, "stop"),
        ({"messages": [user("3")], "max_tokens": 0}, 400, "max_tokens=0"),
        ({"messages": [user("3")], "max_tokens": True}, 400, "max_tokens=True"),
        ({"messages": [user("3")], "tools": TOOLS}, 400, "environment.tool_call_parser"),
        ({"messages": [user("three")]}, 400, "cannot become tokens"),
    ]  # fmt: skip

    async def test():
        async with opened() as (one,):
            for body, status, message in bad:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                found, answer = await one.post("chat/completions", data)
                assert (found, message in answer["error"]["message"]) == (status, True), (body, answer)
            assert (await one.post("completions", b"{}"))[0] == 404
            assert one.session.num_turns == 0 and not one.context.token_ids.size
            with caplog.at_level(logging.WARNING):
                answer = await one.ask(
                    [user("3")], temperature=0.1, max_tokens=2, extra_body={"future": 1, "stop": []}
                )
                await one.ask([user("3")], temperature=0.2, max_tokens=2)
                thinking = {"chat_template_kwargs": {"enable_thinking": False}}
                await one.ask([user("3")], max_tokens=2, extra_body=thinking, logprobs=False)
                assert (await one.ask([user("3")], max_tokens=2, logprobs=True)).choices[0].logprobs is None
                both = {"seed": 0, "reasoning_effort": "high"}
                await one.ask([user("3")], max_tokens=2, parallel_tool_calls=True, **both)
            assert answer.usage.completion_tokens <= 2
            first, second, third, fourth, fifth = (record.getMessage() for record in caplog.records)
            assert (
                first.startswith("an agent's request has temperature=0.1") and "rollout.temperature" in first
            )
            assert second.startswith("an agent's request has chat_template_kwargs={'enable_thinking': False}")
            assert "model.chat_template_kwargs" in second
            assert third.startswith("an agent's request has logprobs=True") and "v1/generate" in third
            assert fourth.startswith("an agent's request has seed=0")
            assert (
                fifth.startswith("an agent's request has reasoning_effort='high'") and "model.chat" in fifth
            )

    run(test)


def test_limits_of_the_episode():
    async def test():
        limits = EpisodeLimits(max_turns=2, max_tokens=24, max_new_tokens=6)
        async with opened(limits=limits) as (one,):
            messages = [user("3 4")]
            for text in ("7", "8"):
                too_long = [*messages[:-1], user("5 " * 25)]
                assert (await one.refused("context_length_exceeded", too_long)).status_code == 400
                assert one.session.limit is not None
                answer = (await one.ask(messages)).choices[0].message  # a shorter one goes on
                assert one.session.limit is None
                messages += [answer, user(text)]
            for _ in range(2):
                error = await one.refused("turn_limit", messages)
                assert (error.status_code, "max_turns=2" in str(error)) == (429, True)
            assert one.session.limit is not None and one.session.num_turns == 2

    run(test)


def test_a_message_that_is_far_too_long_holds_up_no_other_episode():
    """The tokens of an agent's file of eight megabytes took ten seconds, for which all episodes waited."""
    lengths, most = [], 24

    class Tokenizer:
        def encode(self, text: str, **named) -> list[int]:
            lengths.append(len(text))
            return TEXTS.tokenizer.encode(text, **named)

    plain = PlainRenderer(partial(encode_within, Tokenizer(), most_tokens=most))

    async def test():
        conversation = Conversation(renderer_of=lambda tools: plain)
        limits = EpisodeLimits(max_turns=9, max_tokens=most, max_new_tokens=6)
        async with opened(conversation=conversation, limits=limits) as (one,):
            start, file = [user("3 4")], user("5 " * 500_000)
            await one.refused("context_length_exceeded", [file])
            answer = (await one.ask(start)).choices[0].message
            for messages in ([*start, answer, file], [*start, file], [file]):
                error = await one.refused("context_length_exceeded", messages)
                assert " characters has more tokens than environment.max_tokens=24" in str(error)
                assert one.session.limit is not None and one.session.limit.status is Status.TOKEN_LIMIT
            await one.ask([*start, answer, user("2")], max_tokens=1)
            assert (one.session.limit, one.session.num_turns) == (None, 2)
            assert len(one.context.sequences()) == 1
        assert max(lengths) <= 2**16

    run(test)


def test_requests_that_have_no_room_begin_no_further_forks():
    """An agent that asks in an endless loop would fill the memory with them."""

    async def test():
        limits = EpisodeLimits(max_turns=9, max_tokens=12, max_new_tokens=6)
        async with opened(conversation=APART, limits=limits) as (one,):
            start = [user("3 4 5")]
            answer = (await one.ask(start)).choices[0].message
            full = [user("6 " * 12)]  # an observation that fits, and no turn behind it
            too_long = [[*start, user("7 " * 12)], [user("8 " * 20)], full, [user("three")]]
            for _ in range(3):
                for messages in too_long:
                    for number in range(3):
                        code = "no_tokens" if "three" in messages[0]["content"] else "context_length_exceeded"
                        await one.refused(code, messages, max_tokens=1 + number % 2)
            for number in range(3):
                status, _ = await one.post("generate", json.dumps({"token_ids": [3, *[9] * 20, number]}))
                assert status == 400
            assert len(one.context.sequences()) <= 4
            assert one.session.limit is not None and one.session.limit.status is Status.TOKEN_LIMIT
            await one.ask([user("9")])
            await one.ask([*start, answer, user("2")], max_tokens=1)
            assert (one.session.limit, one.session.num_turns) == (None, 3)

    run(test)


@pytest.mark.parametrize("refuses", ["the limit", "the server"])
def test_a_history_that_the_servers_do_not_take_is_refused_as_too_long(refuses):
    async def test():
        limits = EpisodeLimits(max_turns=9, max_tokens=64, max_new_tokens=6)
        engine = FakeEngine()
        if refuses == "the limit":
            limits = replace(limits, max_prompt_tokens=20)
        else:
            engine.longest_prompt = 20
        async with opened(conversation=APART, limits=limits, engine=engine) as (one,):
            await one.refused("context_length_exceeded", [user("5 " * 21)])
            assert one.session.limit is not None and one.session.limit.status is Status.TOKEN_LIMIT
            for _ in range(9):
                await one.ask([user("5 " * 20)])
            assert one.session.limit is None and not one.session.failure.done()

    run(test)


class Short:
    """Few tokens for any text."""

    end_token_ids: tuple[int, ...] = ()

    def opening(self, messages):
        return [1 + len(message["content"]) % 7 for message in messages]

    def following(self, messages, *, sampled_end):
        return self.opening(messages)


def test_a_long_conversation_is_kept_once():
    """Each request repeats it from its beginning."""
    limits = EpisodeLimits(max_turns=99, max_tokens=10**6, max_new_tokens=6)

    async def test():
        conversation = Conversation(renderer_of=lambda tools: Short())
        session = GatewaySession(context_of(limits=limits), conversation, base_url="", model="")
        tracemalloc.start()
        messages = []
        for _ in range(40):
            messages.append(user("x" * 50_000))
            messages.append((await session.chat(json.loads(json.dumps({"messages": messages})))).message)
        assert tracemalloc.get_traced_memory()[0] < 5 * len(json.dumps(messages))

        engine = FakeEngine()
        context = context_of(limits=limits, engine=engine)
        session = GatewaySession(context, conversation, base_url="", model="")
        tracemalloc.stop()
        tracemalloc.start()
        for _ in range(40):
            ids = [*context.token_ids.tolist(), *[9] * 2000]
            await session.generate(json.loads(json.dumps({"token_ids": ids})), VOCAB)
            engine.calls.clear()  # it notes the prompts
        assert tracemalloc.get_traced_memory()[0] < 20 * len(ids)

    try:
        run(test)
    finally:
        tracemalloc.stop()


def test_a_request_looks_at_its_conversation_once_however_many_turns_it_had():
    class Counted(list):
        looked_at = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            self.looked_at += len(found) if isinstance(place, slice) else 1
            return found

    async def test():
        limits = EpisodeLimits(max_turns=99, max_tokens=10**6, max_new_tokens=6)
        session = GatewaySession(context_of(limits=limits), APART, base_url="", model="")
        messages = []
        for _ in range(30):
            messages.append(user("3"))
            messages.append((await session.chat({"messages": messages})).message)
        (branch,) = session._branches
        keys = branch.keys = Counted(branch.keys)
        await session.chat({"messages": [*messages, user("4")]})
        assert keys.looked_at <= 2 * len(keys)
        with pytest.raises(Refused, match="no message follows the last answer"):
            await session.chat({"messages": messages})

    run(test)


def test_a_limit_is_not_forgotten_for_a_turn_that_was_asked_for_before_it():
    async def test():
        engine = Slow()
        limits = EpisodeLimits(max_turns=1, max_tokens=400, max_new_tokens=6)
        async with opened(engine=engine, limits=limits) as (one,):
            asking = asyncio.ensure_future(one.ask([user("3")]))
            await engine.asked.wait()
            await one.refused("turn_limit", [user("4")])
            engine.may_answer.set()
            await asking
            assert one.session.limit is not None and one.session.limit.status is Status.TURN_LIMIT

    run(test)


def test_a_failing_engine_is_no_fault_of_the_agent():
    async def test():
        async with opened(engine=FakeEngine(fail=lambda prompt, seed: True)) as (one,):
            error = await one.refused("failed", [user("3")])
            assert error.status_code == 503
            assert isinstance(one.session.failure.result(), GenerationError)

    run(test)


def test_thinking_is_apart_without_tools_too():
    async def parse(text, tools):
        return ParsedTurn(content="7", calls=[], reasoning=f"of {tools}")

    async def test():
        async with opened(conversation=Conversation(renderer_of=ToyRenderer, parse=parse)) as (one,):
            message = (await one.ask([user("abc")])).choices[0].message.model_dump()
            assert (message["content"], message["reasoning_content"]) == ("7", "of []")
            assert one.session.last_text == "7"

    run(test)


def test_tool_calls_come_and_go_in_openais_form():
    huge = 10**40

    async def parse(text, tools):
        first = [*map(int, text.split()), 1][0]
        calls = [{"name": "look", "arguments": {"key": huge + first, "half": "\ud83d"}}]
        return ParsedTurn(content="", calls=calls if len(turns) < 2 else [], reasoning="hm")

    turns = []

    async def test():
        conversation = Conversation(renderer_of=ToyRenderer, parse=parse)
        async with opened(conversation=conversation) as (one,):
            messages, ids = [user("abc")], ToyRenderer(TOOLS).opening([user("abc")])
            for turn in range(2):
                turns.append(turn)
                tokens = sampled(ids, 1, turn)
                completion = await one.ask(messages, tools=TOOLS)
                (choice,) = completion.choices
                ids += tokens
                if turn == 0:
                    (call,) = choice.message.tool_calls
                    assert choice.finish_reason == "tool_calls" and choice.message.content is None
                    assert json.loads(call.function.arguments)["key"] - huge in range(VOCAB)
                    reply = {"role": "tool", "tool_call_id": call.id, "content": "four"}
                    sent = choice.message.model_dump()
                    # Another client writes the same arguments in another way.
                    again = json.loads(sent["tool_calls"][0]["function"]["arguments"])
                    sent["tool_calls"][0]["function"]["arguments"] = json.dumps(again, indent=1)
                    messages += [sent, reply]
                    ids += ToyRenderer().following([reply], sampled_end=tokens[-1] == END)
            assert choice.finish_reason in ("stop", "length")
            assert one.context.token_ids.tolist() == ids
            changed = [*messages, choice.message, user("a")]
            await one.ask(changed, tools=[])  # the tools are in the prompt
            assert one.session.first_difference == "the tools changed" and one.session.num_forks == 1
            assert one.context.token_ids.tolist() == ids

    run(test)


def test_half_of_a_surrogate_pair_in_a_call_comes_back_with_openais_client():
    """As the policy can write it in JSON. The client could not send it, so the agent died at its next request."""

    async def parse(text, tools):
        calls = [{"name": "look", "arguments": {"half": "\ud83d", "whole": "\U0001f642é"}}]
        return ParsedTurn(content="", calls=calls)

    async def test():
        conversation = Conversation(renderer_of=ToyRenderer, parse=parse)
        async with opened(conversation=conversation) as (one,):
            messages = [user("abc")]
            for _ in range(2):
                message = (await one.ask(messages, tools=TOOLS)).choices[0].message
                (call,) = message.tool_calls
                assert json.loads(call.function.arguments) == {"half": "\ud83d", "whole": "\U0001f642é"}
                assert "\U0001f642é" in call.function.arguments
                reply = {"role": "tool", "tool_call_id": call.id, "content": "four"}
                messages += [message.model_dump(), reply]
            assert one.session.num_forks == 0 and one.session.num_turns == 2

    run(test)


class Says(FakeEngine):
    """Says given texts, one after another."""

    def __init__(self, tokenizer, texts: Sequence[str]) -> None:
        super().__init__()
        self.answers = iter([tokenizer.encode(text) for text in texts])

    async def generate_group(self, prompt_ids, **named):
        ids = next(self.answers)
        values = {"rollout_logprobs": [-1.0] * len(ids), "token_versions": [0] * len(ids)}
        return [completion(prompt_ids=prompt_ids, token_ids=ids, finish_reason=FinishReason.STOP, **values)]


async def parse_qwen(text: str, tools) -> ParsedTurn:
    """A stand-in for SGLang's parser ``qwen25``."""
    content, start, call = text.partition("<tool_call>")
    calls = [json.loads(call.removesuffix("</tool_call>"))] if start else []
    return ParsedTurn(content=content.strip(), calls=calls)


def play_with_a_template(parse) -> None:
    """The tokens are those of the whole conversation in the model's template, which rewrites no earlier turn."""

    async def test():
        tokenizer = chat_tokenizer("qwen2_5")
        call = '<tool_call>\n{"name": "look", "arguments": {"key": 1}}\n</tool_call>'
        engine = Says(
            tokenizer, [f"{call}<|im_end|>", "It is four.<|im_end|>", "Yes.<|im_end|>", "Four.<|im_end|>"]
        )
        (end,) = tokenizer.encode("<|im_end|>")
        conversation = Conversation(
            renderer_of=lambda tools: ChatRenderer(tokenizer, tools=tools), parse=parse
        )
        texts = Texts(tokenizer=tokenizer, end_token_ids=frozenset([end]), vocab_size=len(tokenizer))
        limits = EpisodeLimits(max_turns=5, max_tokens=4000, max_new_tokens=100)
        async with opened(conversation=conversation, engine=engine, texts=texts, limits=limits) as (one,):
            messages = [{"role": "system", "content": "Be brief."}, user("What is 2 + 2?")]
            first = (await one.ask(messages, tools=TOOLS)).choices[0]
            (called,) = first.message.tool_calls
            assert (called.function.name, json.loads(called.function.arguments)) == ("look", {"key": 1})
            reply = {"role": "tool", "tool_call_id": called.id, "content": "4"}
            messages += [first.message.model_dump(exclude_none=True), reply]
            second = (await one.ask(messages, tools=TOOLS)).choices[0]
            assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
            assert second.message.content == "It is four."
            messages += [second.message.model_dump(exclude_none=True), user("Are you sure?")]
            await one.ask(messages, tools=TOOLS)
            messages.append({"role": "assistant", "content": "Yes."})
            for message in messages:
                for made in message.get("tool_calls", []):
                    made["function"]["arguments"] = json.loads(made["function"]["arguments"])
            whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
            assert tokenizer.decode(one.context.token_ids) == whole.removesuffix("\n")
            rewritten = [*messages[:4], {"role": "assistant", "content": "Four."}, user("Are you sure?")]
            prompt = tokenizer.apply_chat_template(
                rewritten, tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
            await one.ask(rewritten, tools=TOOLS)
            kept, forked = one.context.sequences()
            assert tokenizer.decode(forked.token_ids[: forked.turns[0].start]) == prompt
            until = kept.turns[0].end  # the call, as it was sampled
            assert forked.token_ids[:until].tolist() == kept.token_ids[:until].tolist()

    run(test)


def test_a_conversation_with_tools_in_a_chat_template():
    play_with_a_template(parse_qwen)


def test_a_conversation_in_tokens():
    async def test():
        async with opened(limits=EpisodeLimits(max_turns=6, max_tokens=400, max_new_tokens=6)) as (one,):
            ids, answers = [3, 4, 5], []
            for turn in range(3):
                body = {
                    "model": "m",
                    "token_ids": ids,
                    "sampling_params": {"max_tokens": 5, "stop_token_ids": [9]},
                }
                status, answer = await one.post("generate", json.dumps(body))
                again = await one.post("../inference/v1/generate", json.dumps(body))
                assert status == 200 and again[1] == answer
                (choice,) = answer["choices"]
                expected = sampled(ids, 1, turn, most=5)
                assert choice["token_ids"] == expected
                assert [c["token"] for c in choice["logprobs"]["content"]] == [
                    f"token_id:{t}" for t in expected
                ]
                assert choice["logprobs"]["content"][0]["logprob"] == -(1 + expected[0]) / 0.5
                answers.append(answer)
                ids = [*ids, *expected, 7, 8]
            so_far = one.context.token_ids.tolist()
            wrong = [
                ([*so_far, VOCAB], 400, f"from 0 to {VOCAB - 1}"),
                ([*so_far, True], 400, "not a list of token ids"),
                ([*so_far, -1], 400, "not a list of token ids"),
                ([], 400, "token_ids is empty"),
            ]
            for token_ids, status, message in wrong:
                found, answer = await one.post("generate", json.dumps({"token_ids": token_ids}))
                assert (found, message in answer["error"]["message"]) == (status, True), answer
            stop = {"token_ids": so_far, "sampling_params": {"stop_token_ids": [LARGEST]}}
            found, answer = await one.post("generate", json.dumps(stop))
            assert (found, answer["error"]["param"]) == (400, "stop_token_ids")
            assert one.context.token_ids.tolist() == so_far and one.session.num_turns == 3
            for changed in ([*so_far[:4], (so_far[4] + 1) % VOCAB, *so_far[5:], 7], so_far[:5]):
                status, answer = await one.post("generate", json.dumps({"token_ids": changed}))
                found = one.context.sequences()[-1].token_ids.tolist()
                assert (status, found) == (200, [*changed, *answer["choices"][0]["token_ids"]])
            await one.ask([user("3")])  # a conversation beside it
            assert one.context.token_ids.tolist() == so_far and one.session.num_forks == 3

    run(test)


def test_a_conversation_that_goes_on_in_tokens():
    """It stays one sequence. Messages, which do not say what its tokens hold, then fork behind the last answer to messages."""

    async def test():
        async with opened(conversation=APART) as (one,):

            async def generate(token_ids: list[int]) -> list[int]:
                body = {"token_ids": token_ids, "sampling_params": {"stop_token_ids": [9]}}
                status, answer = await one.post("generate", json.dumps(body))
                assert status == 200, answer
                return [*token_ids, *answer["choices"][0]["token_ids"]]

            messages = [user("3 4 5")]
            messages.append((await one.ask(messages)).choices[0].message)
            first = one.context.token_ids.tolist()
            whole = await generate([*first, 7, 8])
            assert one.context.token_ids.tolist() == whole and one.session.num_forks == 0
            forked = await generate([*first[:-1], 6])
            await one.ask([*messages, user("7 8")])
            made = [sequence.token_ids.tolist() for sequence in one.context.sequences()]
            assert made[:2] == [whole, forked] and made[2][: len(first) + 2] == [*first, 7, 8]
            assert (one.session.num_turns, one.session.num_forks) == (4, 2)

    run(test)
