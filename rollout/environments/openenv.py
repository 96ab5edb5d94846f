"""Environments that OpenEnv serves: one WebSocket per episode, JSON messages.

::

    OpenEnvServers ── {"type": "reset", "data": {...}} ──> server        {"type": "observation", "data":
                   ── {"type": "step", "data": action} ──>                  {"observation": {...}, "reward": ..., "done": ...}}
                                                                         {"type": "error", "data": {"message", "code"}}

Tools are actions too: ``{"type": "list_tools"}``, ``{"type": "call_tool", "tool_name", "arguments"}``. Their results have
MCP's form. A session has the interface of ``processes.EnvironmentProcess``, so ``chat.ChatEpisodes`` plays it. The
messages are those of OpenEnv 0.10.0, whose package is not needed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from configs.schema.environment import OpenEnvironment
from rollout.environments.processes import (
    MOST_AWAY_S,
    RETRY_S,
    EnvironmentStartError,
    Message,
    Opened,
    Outage,
    Ready,
    Stepped,
    check_parser_names,
    plain_value,
)
from rollout.environments.protocol import EpisodeFailed, episode_failed
from rollout.environments.tandem_worker.failures import readable
from rollout.guarded_process import finished
from rollout.http_replicas import Replica, choose, open_session
from rollout.pipe import LARGEST_ANSWER
from rollout.records import Status, seed_of
from rollout.rewards.function import to_score
from rollout.rewards.served import key_of

ANSWER = "{answer}"
NO_ROOM = "CAPACITY_REACHED"
NO_ROOM_FIX = ": all places of the servers are taken; raise their max_concurrent_envs, or lower environment.max_concurrency"
PING_S = 20.0
"""Seconds between pings. A server that does not answer one within half of them is lost."""
T = TypeVar("T")
JSON = dict[str, Any]


class _NoRoom(Exception):
    """All places of a server are taken."""


class _Unreachable(Exception):
    """No connection to a server."""


class OpenEnvServers:
    """Sessions on the servers of a config, inside ``async with``. Raises ValueError if the key's variable is not set."""

    def __init__(self, config: OpenEnvironment) -> None:
        self._config = config
        self._servers = [Replica(_websocket_url(url)) for url in config.urls]
        self._client: aiohttp.ClientSession | None = None
        self._outage = Outage()
        self._key = key_of(config.api_key_variable, "environment")

    async def __aenter__(self) -> "OpenEnvServers":
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        self._client = open_session(headers=headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def ready(self) -> Ready:
        """The environment's tools, after every server has answered. Raises EnvironmentStartError."""
        tools: list[JSON] = []
        for server in self._servers:
            session = self._session([server])
            try:
                tools = await session.look()
            except (_Unreachable, EpisodeFailed) as error:
                raise EnvironmentStartError(
                    f"environment.urls: {server.url}: {error}; start the server, or correct the address"
                ) from error
            finally:
                await session.close()
        return Ready(tools=tools)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator["OpenEnvSession"]:
        """A session for one episode.

        Raises:
            EpisodeFailed: no place became free in time, or there was no connection.
            EnvironmentStartError: there was no connection to any server for ``MOST_AWAY_S``.
        """
        session = self._session(self._servers)
        try:
            yield session
        except _Unreachable as error:
            if (away_s := self._outage.seconds) >= MOST_AWAY_S:
                raise EnvironmentStartError(
                    f"environment.urls: no server could be reached for {away_s:.0f} s; the last try: {error}; start the servers, "
                    "and resume the run"
                ) from error
            raise episode_failed(
                f"no connection within environment.reset_timeout_s={self._config.reset_timeout_s:g} s to {error}"
            ) from error
        finally:
            await finished(session.close())

    def _session(self, servers: Sequence[Replica]) -> "OpenEnvSession":
        assert self._client is not None, "use it inside async with"
        return OpenEnvSession(self._client, servers, self._config, self._outage)


class OpenEnvSession:
    """One episode, on the server with the fewest episodes. See ``processes.EnvironmentProcess``."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        servers: Sequence[Replica],
        config: OpenEnvironment,
        outage: Outage,
    ) -> None:
        """outage: of all servers of the config."""
        self._client, self._servers, self._config, self._outage = client, servers, config, outage
        self._server: Replica | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._waits_for_room = False
        self._unreachable: _Unreachable | None = None
        """The last connection error while no server can be reached."""

    async def reset(self, problem: Mapping[str, Any]) -> Opened:
        """Waits for a server and for a free place. Raises _Unreachable: none could be connected to in time."""
        return await self._within("reset", self._config.reset_timeout_s, self._reset(problem))

    async def look(self) -> list[JSON]:
        """The environment's tools, from a session without a problem."""

        async def work() -> list[JSON]:
            await self._placed(None)
            return await self._tools() if self._config.interface == "tools" else []

        return await self._within("start", self._config.start_timeout_s, work())

    async def step(self, message: Message) -> Stepped:
        return await self._within("step", self._config.step_timeout_s, self._step(message))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        server, self._server = self._server, None
        if server is not None:
            server.in_flight -= 1
        if socket is not None:
            with suppress(aiohttp.ClientError, ConnectionError):
                await socket.close()

    async def _within(self, stage: str, limit_s: float, work: Awaitable[T]) -> T:
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await work
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if self._unreachable is not None:
                raise self._unreachable from error
            why = NO_ROOM_FIX if self._waits_for_room else ""
            raise EpisodeFailed(
                Status.TIME_LIMIT,
                f"{stage} took longer than environment.{stage}_timeout_s={limit_s:g} s{why}",
            ) from error

    async def _reset(self, problem: Mapping[str, Any]) -> Opened:
        arguments = reset_arguments(self._config.reset, problem)
        data = await self._placed(arguments)
        if data.get("done") is True:
            raise episode_failed("reset answered that the episode is already over")
        text = self._text_of(data.get("observation"))
        if self._config.interface == "tools":
            follows = [{"role": "user", "content": text}] if text else []
            return Opened(messages=[*problem["messages"], *follows], tools=await self._tools())
        system = [message for message in problem["messages"] if message["role"] == "system"]
        return Opened(messages=[*system, {"role": "user", "content": text}], tools=[])

    async def _tools(self) -> list[JSON]:
        return _schemas((await self._ask("step", {"type": "list_tools"})).get("observation"))

    async def _placed(self, arguments: JSON | None) -> JSON:
        """The answer of the first server that has room, to reset or, without arguments, to a request for the state. All
        servers are tried before a wait, except those that were just unreachable. If none can be reached, it waits and tries
        all again; a request for the state raises _Unreachable then."""
        wait_s, unreachable, full = RETRY_S[0], set[Replica](), set[Replica]()
        while True:
            server = choose([one for one in self._servers if one not in unreachable | full])
            server.in_flight += 1
            self._server = server
            try:
                data = await self._open(server.url, arguments)
            except _Unreachable as error:
                server.is_lost = True
                unreachable.add(server)
                await self.close()
                if len(unreachable) == len(self._servers):
                    self._outage.note_failure()
                    self._unreachable, self._waits_for_room = error, False
                    if arguments is None:
                        raise
            except _NoRoom:
                self._unreachable, self._waits_for_room = None, True
                full.add(server)
                await self.close()
            else:
                server.is_lost, self._unreachable, self._waits_for_room = False, None, False
                return data
            if len(unreachable) + len(full) == len(self._servers):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])
                unreachable = {one for one in unreachable if one.is_lost} if full else set()
                full.clear()

    async def _open(self, url: str, arguments: JSON | None) -> JSON:
        try:
            self._socket = await self._client.ws_connect(url, max_msg_size=LARGEST_ANSWER, heartbeat=PING_S)
        except (aiohttp.ClientError, OSError) as error:
            raise _Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
        self._unreachable = None
        self._outage.end()
        return await self._ask("state") if arguments is None else await self._ask("reset", arguments)

    async def _step(self, message: Message) -> Stepped:
        if self._config.interface == "text":
            data = await self._ask("step", with_answer(self._config.action, message["content"]))
            text = self._text_of(data.get("observation"))
            return _stepped(data, [{"role": "user", "content": text}] if text else [])
        calls = message.get("tool_calls") or []
        answers, rewards, errors, done = [], [], 0, not calls
        for call in calls:
            function = call["function"]
            content, failed, data = await self._call(function["name"], function["arguments"])
            errors += failed
            rewards += [] if data.get("reward") is None else [_number(data["reward"])]
            answer = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
            answers.append({**answer, "content": readable(content)})
            if done := data.get("done") is True:
                break
        return Stepped(
            messages=answers,
            reward=sum(rewards) if rewards else None,
            done=done,
            tool_calls=len(answers),
            tool_errors=errors,
        )

    async def _call(self, name: str, arguments: object) -> tuple[str, bool, JSON]:
        """(text for the policy, whether it is an error, the answer)"""
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} are not a JSON object", True, {}
        data = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise _no_answer(data)
        if error := observation.get("error"):
            text = error.get("message") if isinstance(error, dict) else error
            return f"Error: {text}", True, data
        content, failed = _result_text(observation.get("result"))
        return content, failed, data

    async def _ask(self, kind: str, data: JSON | None = None) -> JSON:
        """The data of the answer: an observation, or the state."""
        assert self._socket is not None  # since reset
        request = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            await self._socket.send_str(json.dumps(request, default=plain_value))
            received = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise episode_failed(f"the connection was lost during {kind}: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            code = self._socket.close_code
            reason = f" with code {code}" if code else ""
            if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                reason = f": its answer has more than {LARGEST_ANSWER} bytes"
            raise episode_failed(f"the server closed the session during {kind}{reason}")
        try:
            answer = json.loads(received.data)
            content = answer["data"]
            if answer["type"] == "error":
                if content.get("code") == NO_ROOM:
                    raise _NoRoom
                raise episode_failed(
                    f"the environment answered {kind} with {content.get('code')}: {content.get('message')}"
                )
            if answer["type"] not in ("observation", "state") or not isinstance(content, dict):
                raise _no_answer(answer)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _no_answer(received.data) from error
        return content

    def _text_of(self, observation: object) -> str:
        """The text of an observation, which the policy reads."""
        if not isinstance(observation, dict):
            raise _no_answer(observation)
        shown: object = {name: value for name, value in observation.items() if name != "metadata"}
        if (field := self._config.observation) is not None:
            if field not in observation:
                names = ", ".join(sorted(observation))
                raise episode_failed(
                    f"environment.observation={field}: an observation has no such field, only {names}"
                )
            shown = observation[field]
        if shown is None:
            return ""
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def check_openenv(config: OpenEnvironment) -> None:
    """Check the config before a start; the servers may start later. Raises ValueError."""
    check_parser_names(config)
    key_of(config.api_key_variable, "environment")


def reset_arguments(named: Mapping[str, str], problem: Mapping[str, Any]) -> JSON:
    """The problem's ``seed``, and the fields that ``named`` takes from it or its row. Raises EpisodeFailed if one is missing."""
    fields = {name: problem[name] for name in ("prompt_id", "text", "reference")} | problem["row"]
    for field in named.values():
        if field not in fields:
            raise episode_failed(
                f"environment.reset names the field {field!r}, but problem {problem['prompt_id']} has only "
                f"{', '.join(sorted(fields))}",
            )
    return {
        "seed": seed_of(str(problem["prompt_id"])),
        **{name: fields[field] for name, field in named.items()},
    }


def with_answer(action: Any, answer: str) -> Any:
    """The action with the policy's answer in place of ``ANSWER``."""
    if isinstance(action, dict):
        return {name: with_answer(value, answer) for name, value in action.items()}
    if isinstance(action, list):
        return [with_answer(value, answer) for value in action]
    return action.replace(ANSWER, answer) if isinstance(action, str) else action


def _stepped(data: JSON, messages: list[Message]) -> Stepped:
    reward, done = data.get("reward"), data.get("done")
    if not isinstance(done, bool):
        raise _no_answer(data)
    if not messages and not done:
        raise episode_failed(
            "an observation is empty, but done is false, so the policy has nothing to answer"
        )
    return Stepped(messages=messages, reward=None if reward is None else _number(reward), done=done)


def _number(reward: object) -> float:
    try:
        return to_score(reward).value
    except (TypeError, ValueError) as error:
        raise EpisodeFailed(Status.REWARD_FAILED, f"the environment's reward: {error}") from error


def _schemas(observation: object) -> list[JSON]:
    """MCP's tools in OpenAI's form."""
    try:
        return [
            {
                "type": "function",
                "function": {
                    "name": str(tool["name"]),
                    "description": str(tool.get("description") or ""),
                    "parameters": dict(tool.get("input_schema") or tool.get("inputSchema") or {}),
                },
            }
            for tool in observation["tools"]  # pyright: ignore[reportIndexIssue] - checked by its error
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise _no_answer(observation) from error


def _result_text(result: object) -> tuple[str, bool]:
    """(text, whether the tool failed) of a result of MCP: its data, or the texts of its content."""
    failed = False
    if isinstance(result, dict):
        failed = result.get("is_error", result.get("isError")) is True
        if result.get("data") is not None:
            result = result["data"]
        elif isinstance(result.get("content"), list):
            parts = [part.get("text", "") for part in result["content"] if isinstance(part, dict)]
            result = "".join(map(str, parts))
    return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)), failed


def _no_answer(received: object) -> EpisodeFailed:
    return episode_failed(f"the server sent {str(received)[:80]!r}, which is not an answer in OpenEnv's form")


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", parts.query, ""))
