"""Environments of OpenEnv, against a server that speaks its messages (those of 0.10.0, which
``test_openenv_package.py`` compares with the package's own server)."""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from configs.schema.environment import OpenEnvironment
from rollout.environments import openenv
from rollout.environments.chat import ChatEpisodes, Conversation, PlainRenderer, problem_fields
from rollout.environments.context import EpisodeLimits
from rollout.environments.episodes import Episodes, Sample
from rollout.environments.openenv import OpenEnvServers, check_openenv, with_answer
from rollout.environments.processes import EnvironmentStartError
from rollout.environments.tool_calls import ParsedTurn
from rollout.records import Prompt, Status
from tests.rollout.environments.test_episodes import TEXTS, group_of, pack, score_by_length
from tests.support.fake_engine import FakeEngine

DEADLINE_S = 30.0
PROMPT = Prompt(prompt_id="p7", token_ids=[3, 4], text="3 4", reference="", row={"level": 5})
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}  # fmt: skip


class Server:
    """Counts the answers of an episode: the third is the last. A step's reward is its number."""

    def __init__(self, *, places: int = 10**6, fault: str = "none", away: int = 0) -> None:
        """away: connections that are refused before the first one that is not."""
        self.places, self.fault, self.away = places, fault, away
        self.now, self.most, self.sessions = 0, 0, 0
        self.received: list[dict] = []
        self.keys: set[str | None] = set()
        self.url = ""

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        if self.away:
            self.away -= 1
            raise web.HTTPServiceUnavailable
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.keys.add(request.headers.get("Authorization"))
        self.sessions += 1
        if self.now >= self.places:
            error = {
                "message": "full",
                "code": "CAPACITY_REACHED",
                "active_sessions": self.now,
                "max_sessions": self.places,
            }
            await socket.send_json({"type": "error", "data": error})
            await socket.close()
            return socket
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            steps = 0
            async for message in socket:
                content = json.loads(message.data)
                self.received.append(content)
                steps += content["type"] == "step" and content["data"].get("type") != "list_tools"
                await self.answer(socket, content, steps)
        finally:
            self.now -= 1
        return socket

    async def answer(self, socket: web.WebSocketResponse, content: dict, steps: int) -> None:
        if steps == 2 or self.fault == "hang in reset":
            if self.fault.startswith("hang"):
                await asyncio.Event().wait()
            if self.fault == "close":
                await socket.close()
                return
            if self.fault == "error":
                await socket.send_json(
                    {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
                )
                return
            if self.fault == "no json":
                await socket.send_str("{")
                return
            if self.fault == "another form":
                await socket.send_json(
                    {"type": "observation", "data": {"observation": "text", "done": False}}
                )
                return
            if self.fault == "too large":
                await socket.send_str("x" * (5 * 2**20))
                return
        reward: object = float(steps) if steps else None
        if self.fault == "infinite reward":
            reward = "a text" if steps else None
        if self.fault == "no reward":
            reward = None
        observation: dict = {"text": f"{steps + 5} ", "metadata": {"hidden": True}}
        if content["data"].get("type") == "list_tools":
            observation = {"tools": [TOOL], "metadata": {}}
        elif content["data"].get("type") == "call_tool":
            failed = self.fault == "tool error" and steps == 1
            result = {
                "content": [{"type": "text", "text": "7 "}],
                "data": None if failed else "half \ud83d" if self.fault == "half" else 7,
                "is_error": failed,
            }
            observation = {"tool_name": "add", "result": result, "error": None, "metadata": {}}
        data = {"observation": observation, "reward": reward, "done": steps == 3}
        await socket.send_json({"type": "observation", "data": data})


@asynccontextmanager
async def serving(server: Server):
    app = web.Application()
    app.router.add_get("/ws", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


def plain(tools) -> PlainRenderer:
    return PlainRenderer(TEXTS.encode)


def samples_of(
    *servers: Server, seeds: Sequence[int] = (1, 2), parse=None, renderer_of=None, urls=(), **fields
) -> list[Sample]:
    async def samples() -> list[Sample]:
        async with asyncio.timeout(DEADLINE_S):
            async with AsyncExitStack() as exits:
                for server in servers:
                    await exits.enter_async_context(serving(server))
                defaults = {"observation": "text", "template": "plain"} | fields
                config = OpenEnvironment(type="openenv", urls=(*urls, *(s.url for s in servers)), **defaults)
                async with OpenEnvServers(config) as source:
                    environment = ChatEpisodes(
                        source, Conversation(renderer_of=renderer_of or plain, parse=parse)
                    )
                    limits = EpisodeLimits(max_turns=9, max_tokens=400, max_new_tokens=6)
                    maker = Episodes(
                        environment, config=config, limits=limits, texts=TEXTS, score=score_by_length
                    )
                    made = await maker.sample(FakeEngine(), PROMPT, list(seeds), temperature=0.5)
            return made

    made = asyncio.run(samples())
    if all(sample.sequence.turns for sample in made):
        pack([group_of(made)])  # every turn is what was requested
    return made


def observed(sample: Sample) -> list[list[int]]:
    """The tokens between turns."""
    turns = sample.sequence.turns
    ends = [0, *(turn.end for turn in turns)]
    return [
        sample.sequence.token_ids[end : turn.start].tolist() for end, turn in zip(ends, turns, strict=False)
    ]


def test_an_episode():
    server = Server()
    made = samples_of(server, action={"message": "say {answer}", "level": 2}, reset={"difficulty": "level"})
    for sample in made:
        assert (sample.reward, sample.status, sample.error, len(sample.sequence.turns)) == (
            6.0,
            Status.OK,
            None,
            3,
        )
        assert observed(sample) == [TEXTS.encode(text) for text in ("5 ", "6 ", "7 ")]
    resets = [one["data"] for one in server.received if one["type"] == "reset"]
    assert resets[0] == resets[1]  # samples of a group get the same problem
    assert (resets[0]["difficulty"], 0 <= resets[0]["seed"] < 2**31) == (5, True)
    steps = {json.dumps(one["data"]) for one in server.received if one["type"] == "step"}
    said = [TEXTS.decode(s.sequence.token_ids[t.start : t.end]) for s in made for t in s.sequence.turns]
    assert steps == {json.dumps({"message": f"say {text}", "level": 2}) for text in said}
    assert server.now == 0


def test_the_answer_is_text_wherever_it_stands():
    action = {"a": ["{answer}", 3], "b": {"c": "<{answer}>"}, "d": None}
    assert with_answer(action, "{answer}!") == {"a": ["{answer}!", 3], "b": {"c": "<{answer}!>"}, "d": None}


class Recording:
    """A renderer that keeps the messages."""

    end_token_ids: tuple[int, ...] = ()

    def __init__(self, tools) -> None:
        self.tools, self.messages = tools, []

    def opening(self, messages) -> list[int]:
        return self.following(messages, sampled_end=True)

    def following(self, messages, *, sampled_end: bool) -> list[int]:
        self.messages += messages
        return [3, 4]


def test_half_of_a_surrogate_pair_in_the_answer_of_a_tool_is_shown_as_a_question_mark():
    """A tool may repeat what the policy wrote. As half of a pair has no tokens, it was no score."""
    renderers = []

    def renderer_of(tools) -> Recording:
        renderers.append(Recording(tools))
        return renderers[0]

    async def parse(text, tools) -> ParsedTurn:
        is_first = len(renderers[0].messages) < 3
        calls = [{"name": "add", "arguments": {"a": "\ud83d"}}] if is_first else []
        return ParsedTurn(content="", calls=calls)

    (sample,) = samples_of(
        Server(fault="half"),
        seeds=[1],
        parse=parse,
        renderer_of=renderer_of,
        interface="tools",
        tool_call_parser="toy",
    )
    assert (sample.status, renderers[0].messages[2]["content"]) == (Status.OK, "half ?")


def test_tools_are_those_of_the_server():
    """Arguments that are no object, a tool that fails, one that answers, and an answer without a call."""
    server, renderers = Server(fault="tool error"), []
    arguments: list[object] = ["no object", {"a": 1}, {"a": 2}]

    def renderer_of(tools) -> Recording:
        renderers.append(Recording(tools))
        return renderers[0]

    async def parse(text, tools) -> ParsedTurn:
        calls = [{"name": "add", "arguments": arguments.pop(0)}] if arguments else []
        return ParsedTurn(content="", calls=calls)

    (sample,) = samples_of(
        server, seeds=[1], parse=parse, renderer_of=renderer_of, interface="tools", tool_call_parser="toy"
    )
    (renderer,) = renderers
    schema = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert [tool["function"] for tool in renderer.tools] == [schema]
    called = [one["data"] for one in server.received if one["data"].get("type") == "call_tool"]
    assert called == [{"type": "call_tool", "tool_name": "add", "arguments": {"a": a}} for a in (1, 2)]
    assert [(m["role"], m["content"]) for m in renderer.messages] == [
        ("user", "3 4"), ("user", "5 "), ("tool", "Error: the arguments of add are not a JSON object"),
        ("tool", "7 "), ("tool", "7"),
    ]  # fmt: skip
    assert sample.reward == 1.0 + 2.0
    assert sample.parts == {"tool_calls": 3.0, "tool_errors": 2.0, "unread_calls": 0.0}


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("hang", Status.TIME_LIMIT, "step took longer than environment.step_timeout_s=0.2 s"),
        ("hang in reset", Status.TIME_LIMIT, "reset took longer than environment.reset_timeout_s=0.2 s"),
        ("close", Status.FAILED, "the server closed the session during step with code 1000"),
        ("error", Status.FAILED, "the environment answered step with EXECUTION_ERROR: it broke"),
        ("no json", Status.FAILED, r"the server sent '{', which is not an answer in OpenEnv's form"),
        ("another form", Status.FAILED, "the server sent 'text', which is not an answer in OpenEnv's form"),
        ("too large", Status.FAILED, "more than 4194304 bytes"),
        ("infinite reward", Status.REWARD_FAILED, "the environment's reward: the reward must be a number"),
    ],
)  # fmt: skip
def test_a_fault_fails_the_episode_and_frees_its_place(fault, status, message):
    server = Server(fault=fault)
    short = {"hang": {"step_timeout_s": 0.2}, "hang in reset": {"reset_timeout_s": 0.2}}
    for sample in samples_of(server, **short.get(fault, {})):
        assert (sample.reward, sample.status) == (None, status)
        assert message in str(sample.error)
    assert server.now == 0


def test_steps_without_a_reward_are_scored_by_the_run():
    for sample in samples_of(Server(fault="no reward")):
        last = sample.sequence.turns[-1]
        text = TEXTS.decode(sample.sequence.token_ids[last.start : last.end])
        score = asyncio.run(score_by_length(PROMPT, text, last.end - last.start, last.finish_reason))
        assert sample.reward == score.value


def test_episodes_wait_for_a_free_place():
    server = Server(places=2)
    made = samples_of(server, seeds=range(6))
    assert [sample.status for sample in made] == 6 * [Status.OK]
    assert server.most == 2 and server.sessions > 6
    full = samples_of(Server(places=0), reset_timeout_s=0.3)
    assert all(
        "raise their max_concurrent_envs, or lower environment.max_concurrency" in str(s.error) for s in full
    )


def test_episodes_go_to_the_server_with_the_fewest_and_past_one_that_is_gone():
    one, other = Server(), Server()
    gone = "http://127.0.0.1:9"
    made = samples_of(one, other, seeds=range(8), urls=[gone])
    assert [sample.status for sample in made] == 8 * [Status.OK]
    assert (one.sessions, other.sessions) == (4, 4)


def test_a_server_that_was_lost_is_asked_before_an_episode_waits_for_room():
    async def go() -> None:
        async with asyncio.timeout(DEADLINE_S), serving(Server(places=1)) as full, serving(Server()) as back:
            config = OpenEnvironment(
                type="openenv", urls=(full.url, back.url), observation="text", reset_timeout_s=5.0
            )
            problem = problem_fields(PROMPT, None)
            async with OpenEnvServers(config) as source:
                source._servers[1].is_lost = True
                async with source.episode() as one, source.episode() as other:
                    await one.reset(problem)
                    await other.reset(problem)
                    assert (full.now, back.now) == (1, 1)
                assert not source._servers[1].is_lost

    asyncio.run(go())


def test_episodes_wait_while_all_servers_are_away():
    """As a server behind a proxy while it is started again."""
    server = Server(away=40)
    made = samples_of(server, seeds=range(16))
    assert [(one.status, one.error) for one in made] == [(Status.OK, None)] * 16
    assert server.away == 0


def test_servers_that_stay_away_cost_their_episodes_and_in_the_end_the_run(monkeypatch):
    away = {"urls": ["http://127.0.0.1:9"], "reset_timeout_s": 0.2}
    for one in samples_of(seeds=range(16), **away):
        assert (one.status, one.reward) == (Status.FAILED, None)
        assert "no connection within environment.reset_timeout_s=0.2 s to ws://127.0.0.1:9/ws: " in one.error
    monkeypatch.setattr(openenv, "MOST_AWAY_S", 0.1)
    with pytest.raises(EnvironmentStartError, match=r"no server could be reached for 0 s.*127.0.0.1:9"):
        samples_of(**away)


@pytest.mark.parametrize(
    ("places", "message"),
    [(None, r"environment.urls: ws://127.0.0.1:9/ws: .*; start the server"), (0, "are taken")],
)
def test_servers_are_asked_before_the_first_step(places, message):
    async def ready() -> None:
        async with serving(Server(places=places or 0)) as server:
            url = "ws://127.0.0.1:9" if places is None else server.url
            config = OpenEnvironment(type="openenv", urls=(url,), start_timeout_s=0.3)
            async with OpenEnvServers(config) as servers:
                await servers.ready()

    with pytest.raises(EnvironmentStartError, match=message):
        asyncio.run(ready())


def test_the_key_is_sent_and_never_shown(monkeypatch):
    config = partial(
        OpenEnvironment, type="openenv", urls=("http://127.0.0.1:9",), api_key_variable="TOY_KEY"
    )
    with pytest.raises(
        ValueError,
        match=r"environment.api_key_variable=TOY_KEY is not set in the environment, or empty; export it",
    ):
        check_openenv(config())
    monkeypatch.setitem(os.environ, "TOY_KEY", "secret-7")
    check_openenv(config())
    server = Server(fault="error")
    made = samples_of(server, api_key_variable="TOY_KEY")
    assert server.keys == {"Bearer secret-7"}
    assert "secret-7" not in str(made)
