"""A prompt of a record: a text, or a conversation as in data sets of verl and TRL::

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]

A single message of the user is its text. Other fields of a message (``tool_calls``, ``name``) reach the chat
template unchanged. A check before a start renders the roles with the template
(``launch/checks/conversations.py``).

A response to learn is a text, or the assistant's message, which the template renders. A record may have prompt and response
as one conversation, and the tools that the template renders.
"""

import json
import math
import sys
from typing import Any

from rollout.records import DataPrompt, Message, Messages, WithTools, messages_of

ROLES = ("system", "user", "assistant", "tool")
ANSWERED = ("user", "tool")
"""Roles of a last message that the model answers."""
_FORM = '{"role": ..., "content": ...}'


def text_of(value: Any, field: str, *, numbers: bool = True) -> str:
    """The value as text. Raises ValueError: it is neither text nor a number, is empty, or no tokenizer reads it.

    numbers: whether a number counts as text. A prompt is never a number: the config then names the wrong
    field, such as an id.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"field `{field}` is {value}, not a finite number; correct or drop the record")
        if not numbers:
            raise ValueError(
                f'field `{field}` is the number {value}, not text; write it as text ("{value}"), or name the field of the prompt '
                "in the config"
            )
        value = str(value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"field `{field}` is {kind}; it must be text{' or a number' if numbers else ''}")
    if not value.strip():
        raise ValueError(f"field `{field}` is empty; fill it or drop the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(
            f"field `{field}` has half of a surrogate pair ({half}, at position {error.start + 1}), which no tokenizer reads; "
            "write the whole pair, or drop it"
        ) from error
    return value


def prompt_of(value: Any, field: str, *, has_template: bool, has_system_prompt: bool) -> str | Messages:
    """A text, or several messages for the model to answer.

    Raises ValueError: the value is neither; a role is unknown; the last message is the model's; a content is
    not text; it is a conversation, but there is no chat template; or it has a system message, but the config
    sets one for every prompt (``has_system_prompt``).
    """
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        if isinstance(value, list):
            raise ValueError(f"field `{field}` is a list; it must be text, or messages {_FORM}")
        return text_of(value, field, numbers=False)
    roles = [message.get("role") for message in value]
    for place, role in enumerate(roles):
        if role not in ROLES:
            raise ValueError(
                f"field `{field}[{place}].role` is {'missing' if role is None else repr(role)}; each message is {_FORM}, with one of "
                f"the roles {', '.join(ROLES)}"
            )
    if roles == ["user"]:
        return text_of(value[0].get("content"), f"{field}[0].content", numbers=False)
    named = f"field `{field}` is a conversation of {', '.join(roles)}"
    if roles[-1] not in ANSWERED:
        raise ValueError(
            f"{named}, which ends with a message of the role {roles[-1]}; end it with the message to answer, of the role "
            f"{' or '.join(ANSWERED)}"
        )
    if not has_template:
        raise ValueError(
            f"{named}, which only a chat template can render; set apply_chat_template: true, or write the prompt as one text"
        )
    if has_system_prompt and "system" in roles:
        raise ValueError(
            f"{named}, and task.system_prompt adds another system message; remove task.system_prompt, or the system messages of the data"
        )
    return tuple(_message_of(message, f"{field}[{place}].content") for place, message in enumerate(value))


def response_of(value: Any, field: str, *, has_template: bool) -> str | Message:
    """A response to learn: a text, or the only message of a list, which is the assistant's. Raises ValueError."""
    if not isinstance(value, list):
        return text_of(value, field)
    if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != "assistant":
        raise ValueError(
            f"field `{field}` is a list, but not of one message of the role assistant; put earlier turns into the prompt, and "
            "each turn to learn into a separate record"
        )
    if not has_template:
        raise ValueError(
            f"field `{field}` is a message, which only a chat template can render; set apply_chat_template: true, or write the "
            "response as a text"
        )
    return _response_message(value[0], f"{field}[0].content")


def _response_message(given: dict[str, Any], field: str) -> Message:
    message = _message_of(given, field)
    if not message.get("tool_calls"):
        text_of(message["content"], field)  # raises if it is empty
    return message


def turns_of(value: Any, field: str, *, learns_all: bool = False) -> tuple[str | Messages, Message]:
    """Prompt and response of a whole conversation, which ends with the response. ``learns_all``: the assistant's messages in
    the prompt are responses to learn too. Raises ValueError."""
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        raise ValueError(f"field `{field}` must be messages {_FORM}, the last one the response to learn")
    roles = [message.get("role") for message in value]
    named = f"field `{field}` is a conversation of {', '.join(map(str, roles))}"
    if roles[-1] != "assistant":
        raise ValueError(
            f"{named}; end it with a message of the role assistant, the response to learn, or drop the record"
        )
    last = len(roles) - 1
    learned = [place for place, role in enumerate(roles) if role == "assistant"] if learns_all else [last]
    for place in learned:
        if place == 0 or roles[place - 1] not in (*ANSWERED, None):
            which = "the last message, the" if place == last else f"message {place + 1}, a"
            raise ValueError(
                f"{named}; {which} response to learn, must follow one of the role {' or '.join(ANSWERED)}"
            )
    prompt = prompt_of(value[:-1], field, has_template=True, has_system_prompt=False)
    *_, response = (_response_message(value[place], f"{field}[{place}].content") for place in learned)
    return prompt, response


def with_tools(prompt: str | Messages, value: Any, field: str) -> DataPrompt:
    """The prompt with its tools: a list of JSON schemas, or its JSON; null or an empty list: no tools. Raises
    ValueError."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"field `{field}` is not valid JSON: {error}; write a list of JSON schemas"
            ) from error
    if not tools and (tools is None or isinstance(tools, list)):
        return prompt
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(
            f'field `{field}` must be a list of JSON schemas of functions, {{"type": "function", "function": ...}}'
        )
    return WithTools(messages_of(prompt), tuple(tools))


def _message_of(given: dict[str, Any], field: str) -> Message:
    content = given.get("content")
    if content is None and given.get("tool_calls"):
        content = ""  # OpenAI's form of a turn that only calls tools
    # A content may be blank, except the user's.
    if not isinstance(content, str) or content.strip() or given["role"] == "user":
        content = text_of(content, field, numbers=False)
    # In a parquet file every message has all fields, and null in unused ones.
    others = {name: value for name, value in given.items() if value is not None and name != "content"}
    return {**others, "content": sys.intern(content)}


def plain_text(prompt: DataPrompt) -> str:
    """What rewards and judges read: the conversation without its system messages. A single message is its text."""
    if isinstance(prompt, str):
        return prompt
    told = [message for message in messages_of(prompt) if message["role"] != "system"]
    if len(told) == 1:
        return told[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in told)


def as_json(prompt: DataPrompt | Message) -> str:
    """The prompt as JSON: equal for equal prompts, and no shorter than the text. A text stays as it is."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, WithTools):
        prompt = (*prompt.messages, {"tools": prompt.tools})
    return json.dumps(prompt, ensure_ascii=False, sort_keys=True, default=str)


def shape_of(prompt: DataPrompt) -> tuple[tuple[str, ...], ...]:
    """What decides whether a template accepts the conversation: roles, names of further fields, whether a message has
    several tool calls, and whether there are tools."""
    shape = [
        (message["role"], *sorted(message.keys() - {"role", "content"}), *_several_calls(message))
        for message in messages_of(prompt)
    ]
    return (*shape, ("", "tools")) if isinstance(prompt, WithTools) else tuple(shape)


def _several_calls(message: Message) -> tuple[str, ...]:
    calls = message.get("tool_calls")
    return ("several tool calls",) if isinstance(calls, list) and len(calls) > 1 else ()
