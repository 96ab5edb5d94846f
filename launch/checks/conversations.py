"""Renders conversations of the data before anything starts, by the chat templates of all models that will read them, and
counts their tokens."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.loader import Finding
from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.run import JsonlSftData
from configs.schema.task import Gsm8kTask, JsonlTask
from launch.checks.model_files import open_tokenizer, reward_tokenizers, template_error

if TYPE_CHECKING:
    from rollout.records import DataPrompt, Message
    from rollout.tasks import Survey
    from rollout.tokenization import Tokenizer

MOST_BYTES_TOKENISED = 1_000_000
"""Bytes of the longest texts of a file: a second of work. The sample role tokenises every text that may be too
long."""
_ANSWER = {"role": "assistant", "content": "12"}


def check_conversations(
    field: str, survey: "Survey", tokenizer: "Tokenizer | None", config: AnyConfig, ends: Sequence[int] = ()
) -> Iterator[Finding]:
    """Render the first conversation of each shape, as the policy and a reward model will read it. The first error of
    each template is a finding."""
    from rollout.records import messages_of

    if not survey.conversations:
        return
    arguments = config.model.chat_template_kwargs
    if tokenizer is not None and template_error(tokenizer, None, arguments) is None:
        for where, prompt, response in survey.conversations:
            error = _conversation_error(tokenizer, prompt, arguments)
            if error := error or _response_error(tokenizer, prompt, response, ends, config):
                yield field, f"{where}: {error}, or drop such records"
                break
    for folder in reward_tokenizers(config) if isinstance(config, RunConfig) else ():
        try:
            reader = open_tokenizer(folder)
        except ValueError:  # which is reported elsewhere
            continue
        for where, prompt, _ in survey.conversations:
            trial = (*messages_of(prompt), _ANSWER)
            if reader is not None and (error := _conversation_error(reader, trial, {}, for_reward=True)):
                yield "reward", f"reward: {where}: {error}, or drop such records"
                break


def _conversation_error(
    tokenizer: "Tokenizer", prompt: "DataPrompt", arguments: Mapping[str, Any], *, for_reward: bool = False
) -> str | None:
    """Why the template cannot render the conversation, or what it leaves out, with texts made for the trial."""
    from rollout.records import WithTools, messages_of
    from rollout.tokenization import render_chat
    from rollout.tokenizer_files import template_name

    trial: list[Message] = [
        {**message, "content": f"7 + {place} = ?"} if message["role"] in ("system", "user") else dict(message)
        for place, message in enumerate(messages_of(prompt))
    ]
    tools = prompt.tools if isinstance(prompt, WithTools) else ()
    render = partial(render_chat, tokenizer, tools=tools, arguments=arguments, header=True)
    named = f"a conversation of {', '.join(message['role'] for message in trial)}"
    plain = "use text: {type: plain}"
    fix = f"; {plain if for_reward else 'use roles that the template takes'}"
    try:
        text = render(trial)
    except ValueError as error:
        return f"{named}: {error}{fix}"
    name = template_name(tokenizer)
    for place, message in enumerate(trial):
        if message["role"] in ("system", "user") and message["content"] not in text:
            return f"{named}: {name} leaves out message {place + 1}, of role {message['role']}{fix}"
        if lost := _lost_call(render, trial, place, text):
            way = "use a template that writes them, or write them into the message's content and remove tool_calls"
            way += f", or {plain}, which has only the contents" if for_reward else ""
            return f"{named}: {name} leaves out the tool calls of message {place + 1} ({lost}); {way}"
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or str(function.get("name", tool)) not in text:
            return f"{named}: {name} leaves out the tools; describe them in a message and remove tools_field"
    return None


def _lost_call(
    render: Callable[["list[Message]"], str], messages: "list[Message]", place: int, text: str
) -> str | None:
    """What of the tool calls of the message at ``place`` has no effect on the conversation's ``text``."""
    calls = messages[place].get("tool_calls") or []
    is_list = isinstance(calls, list)  # what else it may be, the template decides
    for number, call in enumerate(calls if is_list else [calls]):
        for part, changed in _changes_of(call):
            others = [*calls[:number], changed, *calls[number + 1 :]] if is_list else changed
            changed_message = {**messages[place], "tool_calls": others}
            # A template that refuses the change has read it.
            with suppress(ValueError):
                if render([*messages[:place], changed_message, *messages[place + 1 :]]) == text:
                    return f"{part} of call {number + 1}"
    return None


def _changes_of(call: Any) -> Iterator[tuple[str, Any]]:
    """(part, the call with only this part changed). OpenAI's form has the parts in ``function``."""
    function = call.get("function", call) if isinstance(call, dict) else call
    fields = function if isinstance(function, dict) else {}
    parts = [name for name in ("name", "arguments") if fields.get(name) is not None]
    for name in parts:
        changed = {**fields, name: _another(fields[name])}
        yield f"the {name}", {**call, "function": changed} if "function" in call else changed
    if not parts:
        yield "all", _another(call)


def _another(value: Any) -> Any:
    """Another value of the same type, in an object another for every value. A JSON text stays one."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 8 if value == 7 else 7
        case str():
            with suppress(ValueError, RecursionError):
                if isinstance(inside := json.loads(value), dict | list):
                    return json.dumps(_another(inside))
            return f"{value}7"
        case dict():
            # Not deeper: data may be nested deeper than Python calls.
            return {
                name: 7 if isinstance(inner, dict) else _another(inner) for name, inner in value.items()
            } or {"other": 7}
        case list():
            return [*value, 7]
    return 7


def _response_error(
    tokenizer: "Tokenizer",
    prompt: "DataPrompt",
    response: "str | Message",
    ends: Sequence[int],
    config: AnyConfig,
) -> str | None:
    """Why the template cannot render the assistant's message after the prompt, or cannot render earlier ones so that they can
    be learned."""
    from rollout.tokenization import encode_prompt, encode_response, find_turns

    if isinstance(response, str) or not ends:
        return None
    given: Any = {"chat_template_kwargs": config.model.chat_template_kwargs}
    try:
        encode_response(tokenizer, prompt, response, ends, **given)
        if isinstance(config, SftConfig) and config.learns_all_turns:
            ids = encode_prompt(tokenizer, prompt, system_prompt=None, apply_chat_template=True, **given)
            find_turns(tokenizer, prompt, ids, ends, **given)
    except ValueError as error:
        return str(error)
    return None


def token_counts(
    texts: "Iterable[tuple[str, DataPrompt, str | Message]]",
    tokenizer: "Tokenizer",
    data: Gsm8kTask | JsonlTask | JsonlSftData,
    arguments: Mapping[str, Any],
    room: int,
    ends: Sequence[int] = (),
) -> list[tuple[str, int]]:
    """(place, tokens of prompt and response) of the longest texts, if these may be more than ``room``. Raises ValueError for
    a broken template."""
    from rollout.tasks.prompts import as_json
    from rollout.tasks.task import most_tokens
    from rollout.tokenization import encode_prompt, encode_response

    settings: Any = {"apply_chat_template": data.apply_chat_template, "chat_template_kwargs": arguments}
    system_prompt = getattr(data, "system_prompt", None)
    encode = partial(encode_prompt, tokenizer, system_prompt=system_prompt, **settings)
    around, left, counts = len(encode("?")), MOST_BYTES_TOKENISED, []
    for where, prompt, response in texts:
        are_texts = isinstance(prompt, str) and isinstance(response, str)
        if left <= 0 or (are_texts and around + most_tokens(prompt) + most_tokens(response) <= room):
            continue
        left -= len(as_json(prompt)) + len(as_json(response))
        num_tokens = len(encode(prompt))
        if response:
            # The end token adds a place, and the last token of a sequence takes none.
            num_tokens += len(encode_response(tokenizer, prompt, response, ends, **settings)) - 1
        counts.append((where, num_tokens))
    return counts
