"""Renders conversations of the data before anything starts, by the chat templates of all models that will read them, and
counts their tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    arguments, fix = config.model.chat_template_kwargs, "; use roles that the template takes"
    if tokenizer is not None and template_error(tokenizer, None, arguments) is None:
        for where, prompt, response in survey.conversations:
            error = _conversation_error(tokenizer, prompt, arguments, fix)
            if error := error or _response_error(tokenizer, prompt, response, ends, config):
                yield field, f"{where}: {error}, or drop such records"
                break
    for folder in reward_tokenizers(config) if isinstance(config, RunConfig) else ():
        try:
            reader, fix = open_tokenizer(folder), "; use text: {type: plain}"
        except ValueError:  # which is reported elsewhere
            continue
        for where, prompt, _ in survey.conversations:
            trial = (*messages_of(prompt), _ANSWER)
            if reader is not None and (error := _conversation_error(reader, trial, {}, fix)):
                yield "reward", f"reward: {where}: {error}, or drop such records"
                break


def _conversation_error(
    tokenizer: "Tokenizer", prompt: "DataPrompt", arguments: Mapping[str, Any], fix: str
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
    try:
        text = render(trial)
    except ValueError as error:
        return f"{named}: {error}{fix}"
    name = template_name(tokenizer)
    for place, message in enumerate(trial):
        if message["role"] in ("system", "user") and message["content"] not in text:
            return f"{named}: {name} leaves out message {place + 1}, of role {message['role']}{fix}"
        if message.get("tool_calls") and not _reads_calls(render, trial, place):
            way = "use a template that writes them, or write them into the message's content"
            return f"{named}: {name} leaves out the tool calls of message {place + 1}; {way}"
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or str(function.get("name", tool)) not in text:
            return f"{named}: {name} leaves out the tools; describe them in a message and remove tools_field"
    return None


def _reads_calls(render: Callable[["list[Message]"], str], messages: "list[Message]", place: int) -> bool:
    """Whether the text of a conversation depends on the tool calls of the message at ``place``."""
    bare = {key: value for key, value in messages[place].items() if key != "tool_calls"}
    try:
        return render([*messages[:place], bare, *messages[place + 1 :]]) != render(messages)
    except ValueError:  # the template refuses the message without them
        return True


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
