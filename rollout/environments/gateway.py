"""An OpenAI server for agents: their requests become turns of an episode, token by token.

::

    agent, a separate process ── HTTP ──> Gateway (sample role, one event loop)
      POST sessions/ID/v1/chat/completions    └─ session: joins the request to the episode, then context.act()
      POST sessions/ID/v1/generate (tokens)
      GET  sessions/ID/v1/models

Each episode is a session with its own key; ``gateway_session.py`` joins its requests. Temperature and top_p of a request
are ignored, since log-probs are at the run's temperature. Unknown fields are ignored. Not here: the agent's process and
its reward (``agent.py``).
"""

import asyncio
import logging
import resource
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rollout.environments.chat import Conversation
from rollout.environments.gateway_session import GatewaySession
from rollout.environments.openai_form import (
    IGNORED,
    JSON,
    LARGEST_BODY,
    Refused,
    body_of,
    check_supported,
    json_response,
    no_session,
    streamed,
)
from rollout.environments.protocol import Context

logger = logging.getLogger(__name__)

STRANGER_S = 10.0
"""Time for a new connection to prove the key of a session."""
MOST_STRANGERS = 4096
"""Most connections that have not proved a key; also at most half of the open files that this process may have."""


class Strangers:
    """The connections that have not proved the key of a session yet. Anyone who reaches the port can open one, and each
    takes an open file. Each is closed after STRANGER_S, and the oldest at once if there are too many. Agents are not
    affected: their requests follow their connections at once."""

    def __init__(self, server: web.Server) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_STRANGERS if soft == resource.RLIM_INFINITY else min(MOST_STRANGERS, soft // 2)
        self._oldest_first: dict[web.RequestHandler, None] = {}

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        connection = self._server()
        self._oldest_first[connection] = None
        if len(self._oldest_first) > self._most:
            self._close(next(iter(self._oldest_first)))
        self._loop.call_later(STRANGER_S, self._close, connection)
        return connection

    def admit(self, connection: web.RequestHandler) -> None:
        self._oldest_first.pop(connection, None)

    def _close(self, connection: web.RequestHandler) -> None:
        if connection in self._oldest_first:
            del self._oldest_first[connection]
            if connection.transport is not None:
                connection.transport.abort()  # close would wait until the stranger has read


class Gateway:
    """The server, inside ``async with``. ``host`` is the address on which it listens, at a free port.

    vocab_size: of the model; token ids of a request must be below it.
    """

    def __init__(self, *, host: str = "127.0.0.1", model: str = "policy", vocab_size: int) -> None:
        self._host, self._model, self._vocab_size = host, model, vocab_size
        self._sessions: dict[str, GatewaySession] = {}
        self._told: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._strangers: Strangers | None = None
        self._listener: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> "Gateway":
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/sessions/{id}/v1/models", self._guarded(self._models))
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._guarded(self._chat))
        app.router.add_post("/sessions/{id}/v1/generate", self._guarded(self._generate))
        # verifiers' clients request it outside v1, where vLLM has it.
        app.router.add_post("/sessions/{id}/inference/v1/generate", self._guarded(self._generate))
        app.router.add_route("*", "/sessions/{id}/{rest:.*}", self._guarded(self._unknown))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runner = runner
        assert runner.server is not None  # made by setup()
        self._strangers = Strangers(runner.server)
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._strangers, self._host, 0, backlog=1024)
        except OSError:
            await runner.cleanup()
            raise
        port = self._listener.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for session in [*self._sessions.values()]:
            await session.close()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def session(self, context: Context, conversation: Conversation) -> AsyncIterator[GatewaySession]:
        """A new session. It is closed on exit."""
        number = secrets.token_urlsafe(16)
        base_url = f"{self.address}/sessions/{number}/v1"
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
                text = "the API key does not belong to this session; use OPENAI_API_KEY of the same process"
                return Refused(401, "invalid_api_key", text).response()
            if self._strangers is not None:
                self._strangers.admit(request.protocol)
            try:
                session.check_open()
                return await handle(request, session)
            except Refused as refused:
                session.refused += 1
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
        answer = await session.chat(body, may_repeat=_may_repeat(request))
        self._tell_of_fork(session)
        about = {
            "id": answer.id,
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
        answer = await session.generate(body, self._vocab_size, may_repeat=_may_repeat(request))
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
        return json_response({"request_id": answer.id, "choices": [choice]})

    async def _unknown(self, request: web.Request, session: GatewaySession) -> web.Response:
        text = f"{request.method} {request.match_info['rest'][:80]}: there are only v1/chat/completions, v1/models and v1/generate"
        raise Refused(404, "unknown_route", text)

    def _tell_of_fork(self, session: GatewaySession) -> None:
        """Once per run."""
        if session.first_difference is not None and "fork" not in self._told:
            self._told.add("fork")
            logger.warning(
                "an agent's request does not repeat the conversation so far: %s; its episode gets a further sequence, "
                "which episode/sequences_mean counts; later forks are not reported",
                session.first_difference,
            )

    def _tell_ignored(self, body: JSON) -> None:
        """Once per field."""
        for field, (why, neutral) in IGNORED.items():
            value = body.get(field)
            if field in self._told or value is None or value in neutral:
                continue
            self._told.add(field)
            logger.warning(
                "an agent's request has %s=%.60r, which is ignored: %s; later requests with it are not reported",
                field,
                value,
                why,
            )


def _may_repeat(request: web.Request) -> bool:
    """Whether a request may repeat one whose answer was lost. OpenAI's clients number their attempts from 0."""
    return request.headers.get("X-Stainless-Retry-Count") != "0"
