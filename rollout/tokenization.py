"""Text to token ids. A run tokenises each prompt once and handles ids from then on."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs.reading.named_files import TOKENIZERS
from rollout.records import DataPrompt, Message, Messages, WithTools, messages_of
from rollout.sglang_plugin.tandem_transformers import spare_work
from rollout.tokenizer_files import read_object, template_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.tokenizer_files import TokenizerFiles

    Tokenizer = TokenizerFiles | PreTrainedTokenizerBase

Arguments = Mapping[str, Any]
"""Of a chat template."""
_SHOWN = 30
"""Characters on either side of a difference that an error shows."""


def load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local Hugging Face folder; nothing is downloaded. Raises ValueError: the folder or its
    tokenizer is missing or unreadable."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ValueError(
            f"model folder {model_dir} does not exist; set model.path to a Hugging Face folder on this disk"
        )
    if not any((model_dir / name).is_file() for name in TOKENIZERS):
        raise ValueError(
            f"model folder {model_dir} holds no tokenizer (none of {', '.join(TOKENIZERS)}); "
            "copy the tokenizer files of the model into it"
        )
    from transformers import AutoTokenizer  # takes seconds; a check of a config never comes here

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # a tokenizer.json of an unknown kind raises a bare Exception
        raise ValueError(
            f"the tokenizer in {model_dir} cannot be loaded: {error}; restore its tokenizer files"
        ) from error


def import_transformers_without_torch() -> None:
    """Import the tokenizers of transformers without its models, in a process that needs only tokenizers.

    If torch is installed, transformers imports it with its compiler and its distributed parts: 3.6 of 6.3 CPU
    seconds and 330 of 420 MiB of a sample role's imports. A tokenizer needs none of it. Torch itself can still be
    imported afterwards; models of transformers cannot.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    spare_work()
    silent = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(silent)
    os.environ[silent] = "1"  # transformers would advise to install PyTorch
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] - None means: there is no such module
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
        os.environ.pop(silent) if before is None else os.environ.update({silent: before})


def check_vocabulary_size(num_ids: int, vocab_size: int, model_dir: Path) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding: the first such prompt would kill SGLang. Raises
    ValueError: the tokenizer has more tokens than the model."""
    if num_ids > vocab_size:
        raise ValueError(
            f"the tokenizer in {model_dir} has {num_ids} tokens, but the model's vocab_size is {vocab_size}; "
            "use the tokenizer that belongs to the model"
        )


def encode_prompt(
    tokenizer: "Tokenizer",
    prompt: DataPrompt,
    *,
    system_prompt: str | None,
    apply_chat_template: bool,
    chat_template_kwargs: Mapping[str, Any] = {},
) -> list[int]:
    """Token ids of a prompt, up to where the model's answer starts.

    With a chat template and its arguments: the system message, if any; the messages, or a text as the user's message;
    and the header of the assistant's turn. Without a template: a text with the tokenizer's own special tokens (such as
    Llama's begin token).

    Raises ValueError: the template is missing or refuses the messages, a system prompt or messages come without a
    template, or the prompt has no token.
    """
    if apply_chat_template:
        text = _render_prompt(tokenizer, prompt, chat_template_kwargs, system_prompt=system_prompt)
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    elif system_prompt is not None:
        raise ValueError(
            "system_prompt needs a chat template; set apply_chat_template: true, or write the text into the prompts"
        )
    elif not isinstance(prompt, str):
        raise ValueError("a prompt of several messages needs a chat template; set apply_chat_template: true")
    else:
        token_ids = list(tokenizer.encode(prompt))
        # Some tokenizers also append an end token. No answer follows it.
        if token_ids[-1:] == [tokenizer.eos_token_id]:
            plain = list(tokenizer.encode(prompt, add_special_tokens=False))
            token_ids = token_ids[:-1] if token_ids[:-1][-len(plain) :] == plain else token_ids
    if not token_ids:
        raise ValueError(f"prompt {prompt!r} has no tokens; an empty prompt cannot be continued")
    return token_ids


def encode_response(
    tokenizer: "Tokenizer",
    prompt: DataPrompt,
    response: str | Message,
    ends: Sequence[int],
    *,
    apply_chat_template: bool = True,
    chat_template_kwargs: Mapping[str, Any] = {},
) -> list[int]:
    """Token ids of a response to learn, which follow those of the prompt (see ``_encode_behind``).

    A text is taken as it is, and the first of ``ends`` follows it. The chat template renders a message of the assistant. The
    response ends with the token of ``ends`` that closes this turn. Many templates write more after it, such as a line break;
    the model samples none of that. If the template closes no turn, the first of ``ends`` follows.

    Raises ValueError: the template refuses the messages, or renders the prompt differently before a response.
    """
    if isinstance(response, str):
        renders = apply_chat_template and _puts_blank(tokenizer)
        before = _render_prompt(tokenizer, prompt, chat_template_kwargs) if renders else str(prompt)
        return [*_encode_behind(tokenizer, before, response), ends[0]]
    before, turn, _ = _write_response(tokenizer, prompt, response, ends, chat_template_kwargs)
    token_ids = _encode_behind(tokenizer, before, turn)
    last = max((place for place, token_id in enumerate(token_ids) if token_id in ends), default=None)
    return [*token_ids, ends[0]] if last is None else token_ids[: last + 1]


def _encode_behind(tokenizer: "Tokenizer", before: str, text: str) -> list[int]:
    """Token ids of a text that follows another.

    They are the ids of the text alone in two cases: the tokenizer puts no blank before it (``_puts_blank``), or the ids of
    both texts together do not start with those of the first. The first has its own ids then: the model samples after them.
    """
    alone = list(tokenizer.encode(text, add_special_tokens=False))
    if not _puts_blank(tokenizer):
        return alone
    first, both = (list(tokenizer.encode(part, add_special_tokens=False)) for part in (before, before + text))
    return both[len(first) :] if both[: len(first)] == first else alone


@lru_cache(maxsize=4)
def _puts_blank(tokenizer: "Tokenizer") -> bool:
    """Whether the tokenizer puts a blank before a text that stands alone, as those of Llama 2 and Mistral 7B do."""
    alone, behind = (list(tokenizer.encode(text, add_special_tokens=False)) for text in ("4", "\n4"))
    return behind[-len(alone) :] != alone


def find_turns(
    tokenizer: "Tokenizer",
    prompt: DataPrompt,
    token_ids: Sequence[int],
    ends: Sequence[int],
    *,
    chat_template_kwargs: Mapping[str, Any] = {},
) -> list[range]:
    """Places of the assistant's turns in ``token_ids``, the ids that ``encode_prompt`` gives for the prompt::

        <|im_start|>user\\n?<|im_end|>\\n<|im_start|>assistant\\nAnswer<|im_end|>\\n<|im_start|>user\\n...
                                                         [---- turn ---]

    A turn is what the model samples after the messages before it: the message as the chat template writes it if it is
    the last one, up to and including the token of ``ends`` that closes it. The prompt must contain it in the same text and
    tokens. If the template closes no turn (GLM), the next message's first token does.

    Raises ValueError that names the message: the template writes the message, or the text before it, differently once
    messages follow; none of ``ends`` closes it; or it and the text around it become other tokens together. Also raises as
    ``encode_response`` does.
    """
    messages = messages_of(prompt)
    text = _render_prompt(tokenizer, prompt, chat_template_kwargs)
    turns: list[range] = []
    text_done = tokens_done = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        earlier = _with_messages(prompt, messages[: number - 1])
        try:
            start, stop = _find_turn(tokenizer, text, earlier, message, ends, chat_template_kwargs)
            before, turn = (
                _encode_behind(tokenizer, text[:begin], text[begin:end])
                for begin, end in ((text_done, start), (start, stop))
            )
            place = range(tokens_done + len(before), tokens_done + len(before) + len(turn))
            if token_ids[tokens_done : place.stop] != before + turn:
                around = text[max(start - _SHOWN, 0) : start], text[start : min(start + _SHOWN, stop)]
                raise ValueError(
                    f"{around[0]!r} and {around[1]!r} become other tokens together than apart, so they are not the tokens that the model "
                    "samples; begin the message with another text"
                )
            if turn[-1] not in ends:
                raise ValueError(
                    f"{template_name(tokenizer)} closes it with none of the model's end tokens "
                    f"({', '.join(_texts_of(tokenizer, ends))}); add its own to eos_token_id of generation_config.json"
                )
        except ValueError as error:
            raise ValueError(
                f"message {number}, of the assistant: {error}, or set data.learned_turns=last"
            ) from error
        turns.append(place)
        text_done, tokens_done = stop, place.stop
    return turns


def _find_turn(
    tokenizer: "Tokenizer",
    text: str,
    prompt: DataPrompt,
    response: Message,
    ends: Sequence[int],
    arguments: Arguments,
) -> tuple[int, int]:
    """Start and end in ``text``, a whole conversation, of a response within it. Raises ValueError, see ``find_turns``."""
    before, turn, is_closed = _write_response(tokenizer, prompt, response, ends, arguments)
    sampled = before + turn
    if not text.startswith(sampled):
        pairs = zip(sampled, text, strict=False)
        first = next((place for place, (was, now) in enumerate(pairs) if was != now), len(text))
        shown = slice(max(first - _SHOWN, 0), first + _SHOWN)
        raise ValueError(
            f"{template_name(tokenizer)} writes {sampled[shown]!r} if it is the last one, and "
            f"{text[shown]!r} if others follow, so its tokens are not those that the model samples; use a template that keeps "
            "earlier turns"
        )
    if not is_closed:
        followers = (end for end in _texts_of(tokenizer, ends) if text.startswith(end, len(sampled)))
        sampled += next(followers, "")
    return len(before), len(sampled)


def _texts_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    return [text for token_id in ids if (text := str(tokenizer.decode([token_id])))]


def _with_messages(prompt: DataPrompt, messages: Messages) -> DataPrompt:
    return WithTools(messages, prompt.tools) if isinstance(prompt, WithTools) else messages


def _write_response(
    tokenizer: "Tokenizer", prompt: DataPrompt, response: Message, ends: Sequence[int], arguments: Arguments
) -> tuple[str, str, bool]:
    """The chat template's text of a prompt with the header of the assistant's turn, its text of the response
    after it, and whether the token that closes the response ends this text. Raises ValueError, see
    ``encode_response``."""
    before = _render_prompt(tokenizer, prompt, arguments)
    whole = _with_messages(prompt, (*messages_of(prompt), response))
    text = _render_prompt(tokenizer, whole, arguments, header=False)
    if not text.startswith(before):
        raise ValueError(
            f"{template_name(tokenizer)} renders the prompt differently if a response follows, so "
            "that no tokens are the response's; give the response as a text"
        )
    written = text[len(before) :]
    calls = [call for call in response.get("tool_calls") or () if isinstance(call, dict)]
    calls = [call for call in (call.get("function", call) for call in calls) if isinstance(call, dict)]
    names = [str(call.get("name", "")) for call in calls]
    token_ids = list(tokenizer.encode(written, add_special_tokens=False))
    if not token_ids or token_ids[0] in ends or any(name not in written for name in names):
        raise ValueError(
            f"{template_name(tokenizer)} leaves out the response, or its tool calls; give the "
            "response as a text"
        )
    if any(_is_quoted(call, written) for call in calls):
        raise ValueError(
            f"{template_name(tokenizer)} puts the arguments of a tool call, which are a text, into quotes, "
            "so no parser of tool calls can read them; write the arguments as an object"
        )
    # Some templates write another token after it, which closes the whole conversation (Phi-3).
    either = "|".join(map(re.escape, _texts_of(tokenizer, ends))) or "(?!)"
    closed = re.search(rf"({either})(?:{either}|\s)*+\Z", written)  # *+: an end may be a blank
    return before, written[: closed.end(1)] if closed else written, closed is not None


def _is_quoted(call: Mapping[str, Any], written: str) -> bool:
    """Whether the template wrote arguments in OpenAI's form, an object's JSON as a text, as the JSON of that text."""
    arguments = call.get("arguments")
    is_json = isinstance(arguments, str) and arguments.lstrip().startswith("{")
    return is_json and json.dumps(arguments, ensure_ascii=False) in written


def _render_prompt(
    tokenizer: "Tokenizer",
    prompt: DataPrompt,
    arguments: Mapping[str, Any],
    *,
    system_prompt: str | None = None,
    header: bool = True,
) -> str:
    """See ``render_chat``."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    tools = prompt.tools if isinstance(prompt, WithTools) else ()
    return render_chat(tokenizer, [*system, *messages_of(prompt)], tools, arguments, header=header)


def render_chat(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    header: bool,
) -> str:
    """The chat template's text of a conversation. ``header``: with the header of the assistant's next turn. Raises ValueError:
    the template is missing, or refuses the messages."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; put its chat_template.jinja into "
            "the folder, or set apply_chat_template: false"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,  # pyright: ignore[reportArgumentType] - lists are invariant
            add_generation_prompt=header,
            tokenize=False,
            **arguments,
        )
    except ValueError:  # from ``TokenizerFiles``, which says what is wrong
        raise
    except Exception as error:  # a template is a program and may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"{template_name(tokenizer)} refuses a conversation with the roles {roles}: {type(error).__name__}: {error}"
        ) from error
    return str(text)


def end_token_ids(tokenizer: "Tokenizer", model_dir: Path) -> list[int]:
    """Every token id that ends an answer: the tokenizer's own first, then those of generation_config.json and
    config.json, ascending.

    Supervised training ends an answer with the first. All of them stop sampling. Chat models often end a turn with
    a token that is not the tokenizer's own, and name it only in generation_config.json.

    Raises ValueError: a file holds no JSON object, an id is not an integer, or no id is given anywhere.
    """
    own_ids = [] if tokenizer.eos_token_id is None else [int(cast("int", tokenizer.eos_token_id))]
    config_files = (Path(model_dir) / name for name in ("generation_config.json", "config.json"))
    config_ids = {token_id for file in config_files for token_id in _read_eos_ids(file)}
    end_ids = own_ids + sorted(config_ids.difference(own_ids))
    if not end_ids:
        raise ValueError(
            f"{model_dir} names no end-of-sequence token; set eos_token_id in its generation_config.json"
        )
    return end_ids


def _read_eos_ids(path: Path) -> list[int]:
    ids = read_object(path).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(type(i) is not int for i in ids):
        raise ValueError(f"{path}: eos_token_id is {ids!r}; it must be an integer or a list of integers")
    return ids
