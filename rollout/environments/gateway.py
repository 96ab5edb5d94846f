"""An OpenAI server for agents: their requests become turns of an episode, token by token.

::

    agent, a process of its own ── HTTP ──> Gateway (sample role, one event loop)
      POST sessions/ID/v1/chat/completions    └─ session: joins the request to the episode, then context.act()
      POST sessions/ID/v1/generate (tokens)
      GET  sessions/ID/v1/models

A session is an episode, with a key of its own. Its first request opens the conversation. Each later one must repeat
all messages so far, our answers among them, and add new ones: these alone are rendered. What was sampled never becomes
text and tokens again. A request that cannot be joined exactly is refused (409) and says which message differs. A
request that repeats an earlier one gets the same answer, which was sampled once: a client repeats a request whose
answer was lost.

Temperature and top_p of a request are ignored, since log-probs are at the run's temperature. Unknown fields are
ignored. Not here: the agent's process and its reward (``agent.py``).
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.environments.chat import ParseCalls, Renderer, message_of, text_of
from rollout.environments.protocol import Context, EpisodeEnded
from rollout.environments.tool_calls import ParsedTurn, Tools
from rollout.records import Completion, FinishReason, Status

logger = logging.getLogger(__name__)

LARGEST_BODY = 16 * 2**20
"""Bytes of a request: two million tokens of a conversation in JSON."""
LONGEST_SHOWN, SHOWN_BEFORE = 80, 20
"""Characters of a message in an error, and those before the first difference."""
IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "response_format", "tool_choice",
)  # fmt: skip
"""Fields of a request that would change what is sampled. They are told once in the log."""
NEUTRAL = {"top_p": (1, 1.0), "tool_choice": ("auto",), "response_format": ({"type": "text"},)}
JSON = dict[str, Any]


class Refused(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    def response(self) -> web.Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        # OpenAI's clients would repeat 409, 429 and 5xx, which does not help here.
        return _json({"error": error}, status=self.status, headers={"x-should-retry": "false"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How messages become tokens, and texts messages."""

    renderer_of: Callable[[Tools], Renderer]
    """Raises ValueError where the template cannot be used with these tools."""
    parse: ParseCalls | None = None
    """Finds the tool calls in a text. None: requests with tools are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A turn as the agent sees it."""

    message: JSON
    """In OpenAI's form. Empty for a request of tokens."""
    completion: Completion
    prompt_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that was joined, and the task that answers it."""

    length: int
    """Messages, or tokens."""
    options: tuple[Any, ...]
    """What else changes the answer."""
    task: "asyncio.Task[_Answer]"


class GatewaySession:
    """One episode. Made by ``Gateway.session``."""

    def __init__(self, context: Context, conversation: Conversation, *, base_url: str, model: str) -> None:
        self.base_url, self.key = base_url, secrets.token_urlsafe(32)
        self.refused, self.unread_calls, self.last_text = 0, 0, ""
        self.last_refusal: str | None = None
        self.limit: EpisodeEnded | None = None
        """The limit that refused the last turn. A later turn that is answered clears it."""
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done with an error that is no fault of the agent: of an engine, or a defect. The episode's owner raises it."""
        self.model = model
        self._context, self._conversation = context, conversation
        self._messages: list[JSON] = []
        self._keys: list[str] = []
        """The messages in a form that can be compared."""
        self._tools: list[JSON] = []
        self._renderer: Renderer | None = None
        self._asked: list[_Asked] = []
        self._of_tokens: bool | None = None
        self._num_calls, self._sampled_end, self._is_full = 0, False, False
        self._running: asyncio.Task[_Answer] | None = None
        self._is_closed = False

    @property
    def num_turns(self) -> int:
        """Turns that were answered."""
        return sum(_succeeded(asked.task) for asked in self._asked)

    async def close(self) -> None:
        """Refuse further requests, and end the one under way. Nothing is added to the context afterwards."""
        self._is_closed = True
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait([self._running])
        self.failure.cancel()

    async def chat(self, body: JSON) -> _Answer:
        """Raises Refused."""
        messages, tools = _messages_of(body), _tools_of(body)
        if tools and self._conversation.parse is None:
            raise Refused(
                400, "unsupported", "tools need environment.tool_call_parser in the run's config", "tools"
            )
        options = (_max_tokens_of(body, "max_completion_tokens", "max_tokens"),)
        return await self._answered(self._join_messages(messages, tools, options))

    async def generate(self, body: JSON, vocab_size: int | None) -> _Answer:
        """Raises Refused."""
        token_ids, (max_tokens, stop) = _token_ids_of(body, "token_ids", vocab_size), _sampling_of(body)
        return await self._answered(self._join_tokens(token_ids, (max_tokens, *stop)))

    # ---------------------------------------------------------------------------------------------------
    # joining: no await, so two requests never see half of each other

    def _join_messages(
        self, messages: list[JSON], tools: list[JSON], options: tuple[Any, ...]
    ) -> "asyncio.Task[_Answer]":
        self._check_kind(of_tokens=False)
        keys = [_comparable(message) for message in messages]
        same = _common_length(keys, self._keys)
        if self._asked and _comparable(tools) != _comparable(self._tools):
            raise self._differs("the tools changed; give every request of an episode the same tools")
        earlier = self._earlier(len(messages), is_prefix=same == len(messages))
        if earlier is not None:
            if earlier.options != options:
                raise self._differs(
                    f"the same {len(messages)} messages were answered with another max_tokens; repeat the request as it was"
                )
            return earlier.task
        self._check_may_act()
        if same < len(self._keys):
            raise self._differs(_difference(messages, self._messages, same))
        if len(messages) == len(self._keys):
            raise self._differs(
                "no message follows the last answer; append a user's message or those of tools"
            )
        renderer, new = self._renderer, messages[same:]
        try:
            if renderer is None:
                renderer = self._conversation.renderer_of(tools)
                tokens = renderer.opening(new)
            else:
                tokens = renderer.following(new, sampled_end=self._sampled_end)
        except (
            ValueError,
            TypeError,
        ) as error:  # a tokenizer refuses half of a surrogate pair by a TypeError
            raise Refused(400, "no_tokens", f"these messages have no tokens: {error}", "messages") from error
        if not tokens and self._renderer is None:
            raise Refused(400, "no_tokens", "these messages have no tokens; give a text", "messages")
        self._observe(tokens)
        self._of_tokens, self._renderer, self._tools = False, renderer, tools
        self._messages += new
        self._keys += keys[same:]
        return self._start(self._chat_turn(renderer, *options), len(messages), options)

    def _join_tokens(self, token_ids: list[int], options: tuple[Any, ...]) -> "asyncio.Task[_Answer]":
        self._check_kind(of_tokens=True)
        so_far = self._context.token_ids.tolist()
        same = _common_length(token_ids, so_far)
        earlier = self._earlier(len(token_ids), is_prefix=same == len(token_ids))
        if earlier is not None:
            if earlier.options != options:
                raise self._differs("the same tokens were continued with other sampling_params")
            return earlier.task
        self._check_may_act()
        if same < len(so_far):
            where = (
                f"token {same} is {token_ids[same]}, and was {so_far[same]}"
                if same < len(token_ids)
                else f"there are {len(token_ids)} tokens"
            )
            raise self._differs(f"token_ids must begin with the {len(so_far)} tokens so far, but {where}")
        if not token_ids:
            raise Refused(400, "invalid_value", "token_ids is empty; give the prompt's tokens", "token_ids")
        if token_ids[same:]:
            self._observe(token_ids[same:])
        self._of_tokens = True
        return self._start(self._token_turn(*options), len(token_ids), options)

    def _check_kind(self, *, of_tokens: bool) -> None:
        if self._of_tokens not in (None, of_tokens):
            kinds = ("chat/completions", "generate")
            raise self._differs(
                f"this episode began with {kinds[not of_tokens]}; use it for all requests, not {kinds[of_tokens]}"
            )

    def _earlier(self, length: int, *, is_prefix: bool) -> _Asked | None:
        """The same request, if it was made before and has not failed."""
        if not is_prefix:
            return None
        for asked in self._asked:
            if asked.length == length and (not asked.task.done() or _succeeded(asked.task)):
                return asked
        return None

    def _check_may_act(self) -> None:
        if self._running is not None and not self._running.done():
            raise self._differs(
                "another request of this episode is being answered; an episode is one conversation, one request at a time"
            )
        if self.failure.done():
            raise _failed()
        if self._is_full and self.limit is not None:
            raise _limit_reached(self.limit)

    def _differs(self, message: str) -> Refused:
        return Refused(
            409, "history_differs", f"this request cannot continue the episode: {message}", "messages"
        )

    def _observe(self, token_ids: Sequence[int]) -> None:
        try:
            self._context.observe(token_ids)
        except EpisodeEnded as limit:  # nothing was added: a shorter message may follow
            self.limit = limit
            raise _limit_reached(limit) from limit

    def _start(
        self, turn: Awaitable[_Answer], length: int, options: tuple[Any, ...]
    ) -> "asyncio.Task[_Answer]":
        task = self._running = asyncio.ensure_future(turn)
        task.add_done_callback(self._note_failure)
        self._asked.append(_Asked(length=length, options=options, task=task))
        return task

    # ---------------------------------------------------------------------------------------------------
    # turns

    async def _answered(self, task: "asyncio.Task[_Answer]") -> _Answer:
        """The answer of a turn, which goes on when its client is gone."""
        await asyncio.wait([task])
        if task.cancelled():
            raise _closed()
        error = task.exception()
        if error is None:
            return task.result()
        raise _limit_reached(error) if isinstance(error, EpisodeEnded) else _failed()

    def _note_failure(self, task: "asyncio.Task[_Answer]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EpisodeEnded) and not self.failure.done():
            self.failure.set_result(error)

    async def _act(self, max_tokens: int | None, stop_token_ids: Sequence[int]) -> Completion:
        try:
            completion = await self._context.act(max_new_tokens=max_tokens, stop_token_ids=stop_token_ids)
        except EpisodeEnded as limit:  # what was observed before it stays
            self._is_full, self.limit = True, limit
            raise
        self.limit = None
        return completion

    async def _chat_turn(self, renderer: Renderer, max_tokens: int | None) -> _Answer:
        prompt_tokens = len(self._context.token_ids)
        completion = await self._act(max_tokens, renderer.end_token_ids)
        self._sampled_end = int(completion.token_ids[-1]) in renderer.end_token_ids
        text = text_of(self._context, completion, sampled_end=self._sampled_end)
        turn = ParsedTurn(content=text, calls=[])
        if self._tools and self._conversation.parse is not None:
            turn = await self._conversation.parse(text, self._tools)
            self.unread_calls += turn.error is not None
        message = _canonical(message_of(turn, first_call=self._num_calls), place="our answer")
        self._num_calls += len(turn.calls)
        self._messages.append(message)
        self._keys.append(_comparable(message))
        self.last_text = turn.content
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return _Answer(
            message=_for_the_wire(message, turn.reasoning),
            completion=completion,
            prompt_tokens=prompt_tokens,
            finish_reason="tool_calls" if turn.calls else finish,
        )

    async def _token_turn(self, max_tokens: int | None, *stop_token_ids: int) -> _Answer:
        prompt_tokens = len(self._context.token_ids)
        completion = await self._act(max_tokens, stop_token_ids)
        self.last_text = self._context.decode(completion)
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return _Answer(message={}, completion=completion, prompt_tokens=prompt_tokens, finish_reason=finish)

    def check_open(self) -> None:
        if self._is_closed:
            raise _closed()


class Gateway:
    """The server, inside ``async with``. ``host`` is the address on which it listens, at a free port.

    vocab_size: token ids of a request must be below. None: any are taken.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", model: str = "policy", vocab_size: int | None = None
    ) -> None:
        self._host, self._model, self._vocab_size = host, model, vocab_size
        self._sessions: dict[str, GatewaySession] = {}
        self._told: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def __aenter__(self) -> "Gateway":
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/sessions/{id}/v1/models", self._guarded(self._models))
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._guarded(self._chat))
        app.router.add_post("/sessions/{id}/v1/generate", self._guarded(self._generate))
        # verifiers' clients ask beside v1, as vLLM has it.
        app.router.add_post("/sessions/{id}/inference/v1/generate", self._guarded(self._generate))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, self._host, 0, backlog=1024).start()
        except OSError:
            await runner.cleanup()
            raise
        port = runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for session in [*self._sessions.values()]:
            await session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def address(self) -> str:
        return self._address

    @asynccontextmanager
    async def session(self, context: Context, conversation: Conversation) -> AsyncIterator[GatewaySession]:
        """A session, which is closed at the end."""
        number = secrets.token_urlsafe(16)
        base_url = f"{self._address}/sessions/{number}/v1"
        session = GatewaySession(context, conversation, base_url=base_url, model=self._model)
        self._sessions[number] = session
        try:
            yield session
        finally:
            del self._sessions[number]
            await session.close()

    def _guarded(
        self, handle: Callable[[web.Request, GatewaySession], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """``handle`` for requests that prove the key of their session."""

        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._sessions.get(request.match_info["id"])
            if session is None:
                return _closed().response()
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_key = secrets.compare_digest(given.encode(errors="replace"), session.key.encode())
            if scheme.lower() != "bearer" or not is_key:
                text = "the API key is not that of this session; use OPENAI_API_KEY of the same process"
                return Refused(401, "invalid_api_key", text).response()
            try:
                return await handle(request, session)
            except Refused as refused:
                session.refused += refused.status == 409
                session.last_refusal = f"{refused.status}: {refused}"
                return refused.response()

        return handler

    async def _models(self, request: web.Request, session: GatewaySession) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "tandem"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        body = await _body_of(request)
        session.check_open()
        _check_supported(body)
        self._tell_ignored(body)
        answer = await session.chat(body)
        about = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.get("model") or self._model,
        }
        prompt, sampled = answer.prompt_tokens, len(answer.completion.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        if body.get("stream"):
            options = body.get("stream_options")
            with_usage = isinstance(options, dict) and options.get("include_usage") is True
            return await _streamed(request, answer, about, usage if with_usage else None)
        choice = {
            "index": 0,
            "message": answer.message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        return _json({**about, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def _generate(self, request: web.Request, session: GatewaySession) -> web.Response:
        body = await _body_of(request)
        session.check_open()
        sampling = body.get("sampling_params")
        if isinstance(sampling, dict):
            _check_supported(sampling)
            self._tell_ignored(sampling)
        if body.get("stream"):
            raise Refused(400, "unsupported", "generate does not stream; leave out stream", "stream")
        answer = await session.generate(body, self._vocab_size)
        completion = answer.completion
        pairs = zip(completion.token_ids.tolist(), completion.rollout_logprobs.tolist(), strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs
        ]
        choice = {
            "index": 0,
            "token_ids": completion.token_ids.tolist(),
            "logprobs": {"content": content},
            "finish_reason": answer.finish_reason,
        }
        return _json({"request_id": f"gen-{secrets.token_hex(12)}", "choices": [choice]})

    def _tell_ignored(self, body: JSON) -> None:
        """Once per field."""
        for field in IGNORED:
            value = body.get(field)
            if field in self._told or value is None or value in NEUTRAL.get(field, ()):
                continue
            self._told.add(field)
            logger.warning(
                "an agent asks for %s=%.60r, which is ignored: all turns are sampled at rollout.temperature, as the learner "
                "assumes; further requests with it are not reported",
                field,
                value,
            )


# -----------------------------------------------------------------------------------------------------------
# requests


async def _body_of(request: web.Request) -> JSON:
    """Raises Refused."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, "too_large", f"a request may have {LARGEST_BODY} bytes") from error
    except (ValueError, RecursionError) as error:  # no UTF-8 is a ValueError too
        raise Refused(400, "invalid_json", f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", f"the request is a {type(body).__name__}, not an object")
    return body


def _check_supported(body: JSON) -> None:
    """Refuse what would change the answer, and cannot be done exactly."""
    if body.get("n") not in (None, 1):
        text = f"n={body['n']!r:.20}: an episode is one conversation, so each request has one answer; use n=1"
        raise Refused(400, "unsupported", text, "n")
    if body.get("stop"):
        text = "stop: a sampled token cannot be cut at a text; leave out stop, and look for the text in the answer"
        raise Refused(400, "unsupported", text, "stop")
    if body.get("functions"):
        raise Refused(400, "unsupported", "functions are an older form; use tools", "functions")


def _messages_of(body: JSON) -> list[JSON]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "invalid_value", "messages is no list of messages, or empty", "messages")
    return [_canonical(message, place=f"message {number}") for number, message in enumerate(messages)]


def _canonical(message: Any, *, place: str) -> JSON:
    """What matters of a message, in the form of the chat templates: texts, and arguments of calls as objects. Raises
    Refused."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(400, "invalid_value", f"{place} is no message with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, place) for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(400, "invalid_value", f"the content of {place} is no text", "messages")
    made: JSON = {"role": message["role"], "content": content or ""}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Refused(400, "invalid_value", f"tool_calls of {place} is no list", "messages")
        made["tool_calls"] = [_canonical_call(call, place) for call in calls]
    for field in ("tool_call_id", "name"):
        if message.get(field) is not None:
            made[field] = str(message[field])
    return made


def _text_of_part(part: Any, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise Refused(400, "unsupported", f"{place} has a part that is no text", "messages")


def _canonical_call(call: Any, place: str) -> JSON:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, "invalid_value", f"{place} has a tool call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the agent's own text then
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools_of(body: JSON) -> list[JSON]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "invalid_value", "tools is no list of functions", "tools")
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, "invalid_value", "a tool is no function with a name", "tools")
    return tools


def _max_tokens_of(body: JSON, *fields: str) -> int | None:
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refused(400, "invalid_value", f"{field}={value!r:.20} is no positive number", field)
        return value
    return None


def _token_ids_of(body: JSON, field: str, vocab_size: int | None) -> list[int]:
    given = body.get(field)
    highest = 2**31 if vocab_size is None else vocab_size
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < highest for i in given):
        raise Refused(400, "invalid_value", f"{field} is no list of token ids from 0 to {highest - 1}", field)
    return given


def _sampling_of(body: JSON) -> tuple[int | None, list[int]]:
    """(max_tokens, stop_token_ids)"""
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise Refused(400, "invalid_value", "sampling_params is no object", "sampling_params")
    stop = _token_ids_of(sampling, "stop_token_ids", None) if sampling.get("stop_token_ids") else []
    return _max_tokens_of(sampling, "max_tokens"), stop


# -----------------------------------------------------------------------------------------------------------
# answers


def _json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _for_the_wire(message: JSON, reasoning: str) -> JSON:
    """Arguments of calls as texts, as OpenAI has them."""
    made = {**message}
    if "tool_calls" in made:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in made["tool_calls"]
        ]
    if reasoning:
        made["reasoning_content"] = reasoning
    return made


async def _streamed(
    request: web.Request, answer: _Answer, about: JSON, usage: JSON | None
) -> web.StreamResponse:
    """The whole answer as server-sent events: the message in one, the reason of its end in another."""
    delta = {**answer.message}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": answer.finish_reason},
    ]
    chunks: list[JSON] = [{"choices": [choice]} for choice in choices]
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    events = [json.dumps({**about, "object": "chat.completion.chunk", **chunk}).encode() for chunk in chunks]
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(request)
        await response.write(b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]))
        await response.write_eof()
    except ConnectionError:  # the client is gone, and may ask again
        logger.debug("a client left before its answer")
    return response


def _limit_reached(limit: EpisodeEnded) -> Refused:
    if limit.status is Status.TURN_LIMIT:
        return Refused(429, "turn_limit", f"the episode has no further turn: {limit}")
    return Refused(
        400, "context_length_exceeded", f"the episode has no room for this request: {limit}", "messages"
    )


def _closed() -> Refused:
    return Refused(404, "no_session", "there is no such session, or its episode has ended")


def _succeeded(task: "asyncio.Task[_Answer]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _failed() -> Refused:
    return Refused(503, "failed", "the run cannot answer; its log says why")


def _comparable(value: Any) -> str:
    """Unlike ==, it tells 1 from True and 1.0."""
    return json.dumps(value, sort_keys=True)


def _common_length(these: Sequence[Any], those: Sequence[Any]) -> int:
    for number, (this, that) in enumerate(zip(these, those, strict=False)):
        if this != that:
            return number
    return min(len(these), len(those))


def _difference(messages: list[JSON], so_far: list[JSON], first: int) -> str:
    """What differs first, and what to do."""
    fix = "repeat all earlier messages as they were sent and answered, and append new ones"
    if first == len(messages):
        return f"it has {len(messages)} messages, but the episode has {len(so_far)}; {fix}"
    was, given = so_far[first], messages[first]
    for field in ("role", "content", "tool_calls", "tool_call_id", "name"):
        if _comparable(was.get(field)) != _comparable(given.get(field)):
            now, before = _where_they_differ(given.get(field), was.get(field))
            return f"message {first} ({was['role']}) differs: its {field} is {now}, and was {before}; {fix}"
    return f"message {first} ({was['role']}) differs; {fix}"


def _where_they_differ(this: Any, that: Any) -> tuple[str, str]:
    """Both in short, around the first difference."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (this, that)]
    start = max(0, _common_length(*texts) - SHOWN_BEFORE)
    this, that = (("…" if start else "") + text[start : start + LONGEST_SHOWN] for text in texts)
    return repr(this), repr(that)
