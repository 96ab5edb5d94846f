"""A prompt of a record: a text, or a conversation as in data sets of verl and TRL::

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]

A single message of the user is its text. Other fields of a message (``tool_calls``, ``name``) reach the chat template as
they are; what the template makes of the roles is checked before a start (``launch/checks/inputs.py``).
"""

import json
import math
import sys
from typing import Any

from rollout.records import Message, Messages

ROLES = ("system", "user", "assistant", "tool")
ANSWERED = ("user", "tool")
"""Roles of a last message, which the model answers."""
_FORM = '{"role": ..., "content": ...}'


def text_of(value: Any, field: str) -> str:
    """The value as text. Raises ValueError: it is neither text nor a number, is empty, or no tokenizer reads it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"field `{field}` is {value}, no finite number; correct or drop the record")
        value = str(value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"field `{field}` is {kind}; it must be text or a number")
    if not value.strip():
        raise ValueError(f"field `{field}` is empty; fill it or drop the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(
            f"field `{field}` has half a character ({half}, at position {error.start + 1}), which no tokenizer reads; write the "
            "whole pair, or drop it"
        ) from error
    return value


def prompt_of(value: Any, field: str, *, has_template: bool, has_system_prompt: bool) -> str | Messages:
    """A text, or several messages that the model is to answer.

    Raises ValueError: it is neither; its roles are unknown, or the last is the model's; a content is no text; without a
    chat template, it is more than a text; or it has a system message, and so has every prompt (``has_system_prompt``).
    """
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        if isinstance(value, list):
            raise ValueError(f"field `{field}` is a list; it must be text, a number, or messages {_FORM}")
        return text_of(value, field)
    roles = [message.get("role") for message in value]
    for place, role in enumerate(roles):
        if role not in ROLES:
            raise ValueError(
                f"field `{field}[{place}].role` is {'missing' if role is None else repr(role)}; each message is {_FORM}, with one of "
                f"the roles {', '.join(ROLES)}"
            )
    if roles == ["user"]:
        return text_of(value[0].get("content"), f"{field}[0].content")
    named = f"field `{field}` is a conversation of {', '.join(roles)}"
    if roles[-1] not in ANSWERED:
        raise ValueError(
            f"{named}, which ends with a message of the role {roles[-1]}; end it with the one that the model is to answer, of the role "
            f"{' or '.join(ANSWERED)}"
        )
    if not has_template:
        raise ValueError(
            f"{named}, which a chat template alone can render; set apply_chat_template: true, or write the prompt as one text"
        )
    if has_system_prompt and "system" in roles:
        raise ValueError(
            f"{named}, and task.system_prompt is a system message too; remove task.system_prompt, or the system messages of the data"
        )
    return tuple(_message_of(message, f"{field}[{place}].content") for place, message in enumerate(value))


def _message_of(given: dict[str, Any], field: str) -> Message:
    content = given.get("content")
    if content is None and given.get("tool_calls"):
        content = ""  # OpenAI's form of a turn that only calls tools
    # A blank text is as good as none, but for the user's.
    if not isinstance(content, str) or content.strip() or given["role"] == "user":
        content = text_of(content, field)
    # A parquet file has every field in every message.
    others = {name: value for name, value in given.items() if value is not None and name != "content"}
    return {**others, "content": sys.intern(content)}


def plain_text(prompt: str | Messages) -> str:
    """What rewards and judges read: the conversation without its system messages. A single message is its text."""
    if isinstance(prompt, str):
        return prompt
    told = [message for message in prompt if message["role"] != "system"]
    if len(told) == 1:
        return told[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in told)


def as_json(prompt: str | Messages) -> str:
    """The same for the same prompt; no shorter than its text. A text is itself."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(prompt, ensure_ascii=False, sort_keys=True, default=str)


def shape_of(messages: Messages) -> tuple[tuple[str, ...], ...]:
    """What decides whether a template takes the conversation: roles, and names of further fields."""
    return tuple((message["role"], *sorted(message.keys() - {"role", "content"})) for message in messages)
