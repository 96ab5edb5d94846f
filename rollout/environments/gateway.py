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
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.environments.chat import ParseCalls, Renderer, message_of, text_of
from rollout.environments.openai_form import (
    IGNORED,
    JSON,
    LARGEST_BODY,
    NEUTRAL,
    Refused,
    body_of,
    canonical,
    check_supported,
    common_length,
    comparable,
    difference,
    for_the_wire,
    json_response,
    limit_reached,
    max_tokens_of,
    messages_of,
    no_session,
    run_failed,
    sampling_of,
    streamed,
    token_ids_of,
    tools_of,
)
from rollout.environments.protocol import Context, EpisodeEnded
from rollout.environments.tool_calls import ParsedTurn, Tools
from rollout.records import Completion, FinishReason

logger = logging.getLogger(__name__)


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
        messages, tools = messages_of(body), tools_of(body)
        if tools and self._conversation.parse is None:
            raise Refused(
                400, "unsupported", "tools need environment.tool_call_parser in the run's config", "tools"
            )
        options = (max_tokens_of(body, "max_completion_tokens", "max_tokens"),)
        return await self._answered(self._join_messages(messages, tools, options))

    async def generate(self, body: JSON, vocab_size: int | None) -> _Answer:
        """Raises Refused."""
        token_ids, (max_tokens, stop) = token_ids_of(body, "token_ids", vocab_size), sampling_of(body)
        return await self._answered(self._join_tokens(token_ids, (max_tokens, *stop)))

    # ---------------------------------------------------------------------------------------------------
    # joining: no await, so two requests never see half of each other

    def _join_messages(
        self, messages: list[JSON], tools: list[JSON], options: tuple[Any, ...]
    ) -> "asyncio.Task[_Answer]":
        self._check_kind(of_tokens=False)
        keys = [comparable(message) for message in messages]
        same = common_length(keys, self._keys)
        if self._asked and comparable(tools) != comparable(self._tools):
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
            raise self._differs(difference(messages, self._messages, same))
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
        except (ValueError, TypeError) as error:  # TypeError: half of a surrogate pair has no tokens
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
        same = common_length(token_ids, so_far)
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
        self.check_open()
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
            raise run_failed()
        if self._is_full and self.limit is not None:
            raise limit_reached(self.limit)

    def _differs(self, message: str) -> Refused:
        return Refused(
            409, "history_differs", f"this request cannot continue the episode: {message}", "messages"
        )

    def _observe(self, token_ids: Sequence[int]) -> None:
        try:
            self._context.observe(token_ids)
        except EpisodeEnded as limit:  # nothing was added: a shorter message may follow
            self.limit = limit
            raise limit_reached(limit) from limit

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
            raise no_session()
        error = task.exception()
        if error is None:
            return task.result()
        raise limit_reached(error) if isinstance(error, EpisodeEnded) else run_failed()

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
        message = canonical(message_of(turn, first_call=self._num_calls), place="our answer")
        self._num_calls += len(turn.calls)
        self._messages.append(message)
        self._keys.append(comparable(message))
        self.last_text = turn.content
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return _Answer(
            message=for_the_wire(message, turn.reasoning),
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
            raise no_session()


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
        app.router.add_route("*", "/sessions/{id}/{rest:.*}", self._guarded(self._unknown))
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
                return no_session().response()
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_key = secrets.compare_digest(given.encode(errors="replace"), session.key.encode())
            if scheme.lower() != "bearer" or not is_key:
                text = "the API key is not that of this session; use OPENAI_API_KEY of the same process"
                return Refused(401, "invalid_api_key", text).response()
            try:
                session.check_open()
                return await handle(request, session)
            except Refused as refused:
                session.refused += refused.status == 409
                session.last_refusal = f"{refused.status}: {refused}"
                return refused.response()

        return handler

    async def _models(self, request: web.Request, session: GatewaySession) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "tandem"}
        return json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        body = await body_of(request)
        check_supported(body)
        self._tell_ignored(body)
        answer = await session.chat(body)
        about = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body["model"] if isinstance(body.get("model"), str) else self._model,
        }
        prompt, sampled = answer.prompt_tokens, len(answer.completion.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        if body.get("stream"):
            options = body.get("stream_options")
            with_usage = isinstance(options, dict) and options.get("include_usage") is True
            usage = usage if with_usage else None
            return await streamed(request, answer.message, answer.finish_reason, about=about, usage=usage)
        choice = {
            "index": 0,
            "message": answer.message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        return json_response({**about, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def _generate(self, request: web.Request, session: GatewaySession) -> web.Response:
        body = await body_of(request)
        sampling = body.get("sampling_params")
        if isinstance(sampling, dict):
            check_supported(sampling)
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
        return json_response({"request_id": f"gen-{secrets.token_hex(12)}", "choices": [choice]})

    async def _unknown(self, request: web.Request, session: GatewaySession) -> web.Response:
        text = f"{request.method} {request.match_info['rest'][:80]}: there are v1/chat/completions, v1/models and v1/generate alone"
        raise Refused(404, "unknown_route", text)

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


def _succeeded(task: "asyncio.Task[_Answer]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
