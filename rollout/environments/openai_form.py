"""Requests and answers in the form of OpenAI's server.

Nothing here knows episodes. A request is refused if it cannot be understood or cannot be served exactly.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from rollout.environments.protocol import EpisodeEnded
from rollout.records import Status

JSON = dict[str, Any]
LARGEST_BODY = 16 * 2**20
"""Bytes of a request: two million tokens of a conversation in JSON."""
LONGEST_SHOWN, SHOWN_BEFORE = 80, 20
"""Characters of a message in an error, and those before the first difference."""
_TEMPERATURE = "all turns are sampled at rollout.temperature, as the learner assumes"
_END = "a turn ends where the policy ends it"
IGNORED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        (_TEMPERATURE, ()),
    ),
    "top_p": (_TEMPERATURE, (1,)),
    "response_format": (_TEMPERATURE, ({"type": "text"},)),
    "tool_choice": (_TEMPERATURE, ("auto",)),
    "chat_template_kwargs": ("all turns use model.chat_template_kwargs of the run's config", ()),
    "logprobs": ("choices[].logprobs is null in chat answers; v1/generate gives log-probs", (False,)),
    "seed": ("the run sets the seed of each turn", ()),
    "min_tokens": (_END, (0,)),
    "ignore_eos": (_END, (False,)),
    "parallel_tool_calls": ("the policy may call several tools in a turn", (True,)),
    "reasoning_effort": ("set it in model.chat_template_kwargs of the run's config, if the template has it", ()),
    "continue_final_message": ("each turn begins after the template's generation prompt", (False,)),
}  # fmt: skip
"""Ignored fields of a request that would change the sampling or the answer: why each is ignored, and its values that change
nothing. Each is logged once."""


class Refused(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    def response(self) -> web.Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        # OpenAI's clients would repeat 409, 429 and 5xx, which does not help here.
        return json_response({"error": error}, status=self.status, headers={"x-should-retry": "false"})


# -----------------------------------------------------------------------------------------------------------
# requests


async def body_of(request: web.Request) -> JSON:
    """Raises Refused."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, "too_large", f"a request may have at most {LARGEST_BODY} bytes") from error
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError too
        raise Refused(400, "invalid_json", f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", f"the request is a {type(body).__name__}, not an object")
    return body


def check_supported(body: JSON) -> None:
    """Refuse fields that would change the answer but cannot be served exactly."""
    if body.get("n") not in (None, 1):
        text = f"n={body['n']!r:.20}: each request gets one answer; use n=1, and send several requests"
        raise Refused(400, "unsupported", text, "n")
    if body.get("stop"):
        text = (
            "stop: the text may begin or end inside a token, which cannot be cut; leave out stop, and search the answer for the text. "
            "rollout.stop of the run's config ends every turn at a text, which stays in the answer"
        )
        raise Refused(400, "unsupported", text, "stop")
    if body.get("functions"):
        raise Refused(400, "unsupported", "functions is the older form of tools; use tools", "functions")


def messages_of(body: JSON) -> list[JSON]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "invalid_value", "messages is not a list of messages, or is empty", "messages")
    return [canonical(message, place=f"message {number}") for number, message in enumerate(messages)]


def canonical(message: Any, *, place: str) -> JSON:
    """The fields of a message that chat templates read, in their form: content as text, arguments of calls as objects.
    Raises Refused."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(400, "invalid_value", f"{place} is not a message with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, place) for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(400, "invalid_value", f"the content of {place} is not text", "messages")
    made: JSON = {"role": message["role"], "content": content or ""}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Refused(400, "invalid_value", f"tool_calls of {place} is not a list", "messages")
        made["tool_calls"] = [_canonical_call(call, place) for call in calls]
    for field in ("tool_call_id", "name"):
        if message.get(field) is not None:
            made[field] = str(message[field])
    return made


def _text_of_part(part: Any, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise Refused(400, "unsupported", f"{place} has a part that is not text", "messages")


def _canonical_call(call: Any, place: str) -> JSON:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, "invalid_value", f"{place} has a tool call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # otherwise the agent's text stays
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def tools_of(body: JSON) -> list[JSON]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "invalid_value", "tools is not a list of functions", "tools")
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, "invalid_value", "a tool is not a function with a name", "tools")
    return tools


def max_tokens_of(body: JSON, *fields: str) -> int | None:
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refused(400, "invalid_value", f"{field}={value!r:.20} is not a positive integer", field)
        return value
    return None


def token_ids_of(body: JSON, field: str, vocab_size: int) -> list[int]:
    given = body.get(field)
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < vocab_size for i in given):
        raise Refused(
            400, "invalid_value", f"{field} is not a list of token ids from 0 to {vocab_size - 1}", field
        )
    return given


def sampling_of(body: JSON, vocab_size: int) -> tuple[int | None, list[int]]:
    """(max_tokens, stop_token_ids)"""
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise Refused(400, "invalid_value", "sampling_params is not an object", "sampling_params")
    stop = token_ids_of(sampling, "stop_token_ids", vocab_size) if sampling.get("stop_token_ids") else []
    return max_tokens_of(sampling, "max_tokens"), stop


# -----------------------------------------------------------------------------------------------------------
# answers


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def for_the_wire(message: JSON, reasoning: str) -> JSON:
    """The message with the arguments of calls as text, as OpenAI has them."""
    made = {**message}
    if "tool_calls" in made:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": _arguments_text(call["function"]["arguments"])},
            }
            for call in made["tool_calls"]
        ]
    if reasoning:
        made["reasoning_content"] = reasoning
    return made


def _arguments_text(arguments: Any) -> str:
    """As JSON. Half of a surrogate pair, which the policy can write, stays an escape: OpenAI's client writes UTF-8, and could
    not send it back."""
    return json.dumps(arguments, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


async def streamed(
    request: web.Request, message: JSON, finish_reason: str, *, about: JSON, usage: JSON | None
) -> web.StreamResponse:
    """The whole answer as server-sent events: the message in one, the finish reason in the next."""
    delta = {**message}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": finish_reason},
    ]
    chunks: list[JSON] = [{"choices": [choice]} for choice in choices]
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    events = [json.dumps({**about, "object": "chat.completion.chunk", **chunk}).encode() for chunk in chunks]
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    with suppress(ConnectionError):  # the client has gone, and may repeat the request
        await response.prepare(request)
        await response.write(b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]))
        await response.write_eof()
    return response


def limit_reached(limit: EpisodeEnded) -> Refused:
    if limit.status is Status.TURN_LIMIT:
        return Refused(429, "turn_limit", f"the episode has no turns left: {limit}")
    return Refused(
        400, "context_length_exceeded", f"the episode has no room for this request: {limit}", "messages"
    )


def no_session() -> Refused:
    return Refused(404, "no_session", "there is no such session, or its episode has ended")


def run_failed() -> Refused:
    return Refused(503, "failed", "the run cannot answer; its log says why")


def comparable(value: Any) -> str:
    """A text to compare a value by. Unlike ==, it tells 1 from True and 1.0."""
    return json.dumps(value, sort_keys=True)


def common_length(these: Sequence[Any], those: Sequence[Any]) -> int:
    length = min(len(these), len(those))
    if these[:length] == those[:length]:
        return length
    return next(number for number in range(length) if these[number] != those[number])


def difference(messages: list[JSON], so_far: list[JSON], first: int) -> str:
    """The first difference of a request's messages from the conversation so far."""
    if first in (len(messages), len(so_far)):
        return f"it has {len(messages)} messages, but the conversation has {len(so_far)}"
    was, given = so_far[first], messages[first]
    for field in ("role", "content", "tool_calls", "tool_call_id", "name"):
        if comparable(was.get(field)) != comparable(given.get(field)):
            now, before = _where_they_differ(given.get(field), was.get(field))
            return f"message {first} ({was['role']}) differs: its {field} is {now}, but was {before}"
    return f"message {first} ({was['role']}) differs"


def _where_they_differ(this: Any, that: Any) -> tuple[str, str]:
    """Both values, cut around their first difference."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (this, that)]
    start = max(0, common_length(*texts) - SHOWN_BEFORE)
    this, that = (("…" if start else "") + text[start : start + LONGEST_SHOWN] for text in texts)
    return repr(this), repr(that)
