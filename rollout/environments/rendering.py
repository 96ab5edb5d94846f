"""A model's chat template, one suffix at a time: the tokens of new messages after a turn that was sampled.

The prompt of turn n begins, token by token, with the prompt and the response of turn n-1. Rendering the whole
conversation anew breaks this: many templates rewrite earlier turns (Qwen3 drops their thinking, others trim blanks),
and a response that becomes text and tokens again may become other tokens. So this module renders only what comes after
the assistant's turn, with a stand-in for the answer::

    rendered:    <|im_start|>user\\n?<|im_end|>\\n<|im_start|>assistant\\nSTAND-IN<|im_end|>\\n<|im_start|>user\\n...
    following:                                                                <|im_end|>\\n<|im_start|>user\\n...

This is exact if the suffix does not depend on the earlier turns and starts with a token of its own, at which every
tokenizer splits. A renderer checks both when it is made. It does not refuse a suffix that changes with a system
message: ``template_probes.py`` compares with the whole rendering and reports such a change.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from configs.schema.model import SET_BY_TANDEM
from rollout.environments.protocol import EpisodeEnded
from rollout.records import Status
from rollout.tokenization import render_chat
from rollout.tokenizer_files import check_template_arguments, template_name

if TYPE_CHECKING:
    from rollout.tokenization import Tokenizer

Message = Mapping[str, Any]

STAND_IN = "tandemstandin"
QUESTION, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, "The answer is 4"
REPLY = "tandemreply"
REPLIES: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": REPLY}],
    "tool": [{"role": "tool", "content": REPLY, "tool_call_id": "call00001", "name": "probe"}],
}
TWO_TOOLS = [{**REPLIES["tool"][0], "tool_call_id": f"call0000{i}"} for i in (1, 2)]
BOUNDARIES = ("7", "a", ".", "é", "🙂", "<", "{", "|", "#", " ", "\n", " \n", "\n\n", "a,", "\t", "</think>")
"""Ends of an answer that could become one token with the start of a suffix."""
LONG_TEXT, CHARACTERS_PER_TOKEN = 2**16, 16
"""Characters of a text that is read whole; characters per token, more than the mean of any long text but blanks."""
_FIX = (
    "use the template of another version of the model, or write chat_template.jinja into the model's folder"
)


@dataclass(frozen=True, slots=True)
class _Suffix:
    """The text after an answer, cut at the end of the assistant's turn."""

    text: str
    dropped: str = ""
    """Blanks that the template writes between the answer and this text."""


@dataclass(frozen=True, slots=True)
class _History:
    """A conversation up to the answer that was sampled."""

    before: tuple[Message, ...] = (QUESTION,)
    answer_start: str = ""


_HISTORIES = {
    "the assistant's answer": _History(answer_start="Hello. "),
    "thinking in the assistant's answer": _History(answer_start="<think>\nTwo and two.\n</think>\n\n"),
    "a tool call in the assistant's answer": _History(
        answer_start='<tool_call>\n{"name": "probe", "arguments": {}}\n</tool_call>\n'
    ),
    "an earlier turn": _History(before=(QUESTION, {"role": "assistant", "content": ANSWER}, QUESTION)),
    "an earlier question": _History(before=({"role": "user", "content": "Hello!"},)),
}


def encode_within(tokenizer: "Tokenizer", text: str, most_tokens: int | None) -> list[int]:
    """The tokens of a text, without special tokens around it. Of a text that is far too long only the beginning is read:
    ten megabytes take ten seconds, and all episodes would wait for them.

    Raises:
        EpisodeEnded: the beginning has more than twice ``most_tokens`` tokens (None: no limit). A beginning may have a few
            tokens more than the whole text, never twice as many.
        ValueError: the text has half of a surrogate pair.
    """
    read = len(text) if most_tokens is None else max(LONG_TEXT, CHARACTERS_PER_TOKEN * most_tokens)
    ids = _encode(tokenizer, text[:read])
    if len(text) <= read:
        return ids
    if most_tokens is not None and len(ids) > 2 * most_tokens:
        raise EpisodeEnded(
            Status.TOKEN_LIMIT,
            f"an observation of {len(text)} characters has more tokens than environment.max_tokens={most_tokens}",
        )
    return _encode(tokenizer, text)


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Raises ValueError: the text has half of a surrogate pair."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except TypeError as error:  # from the tokenizer's Rust part, in words of its own
        raise ValueError(
            "they contain half of a surrogate pair, which UTF-8 does not have; replace it"
        ) from error


class ChatRenderer:
    """Turns messages into tokens, for conversations whose assistant turns were sampled.

    Args:
        tools: functions in OpenAI's form, ``{"type": "function", "function": {name, description, parameters}}``.
        arguments: of the template, such as ``enable_thinking=False``.
        most_tokens: see ``encode_within``.

    Raises ValueError: the template is missing or cannot be continued exactly; the message says what to do.
    """

    end_token_ids: tuple[int, ...]
    """Each of them ends the assistant's turn. Sampling should stop at each."""
    writes_names: bool
    """Whether the template writes the ``name`` of an assistant's message."""
    notes: tuple[str, ...]
    """Oddities of the template that do not keep it from being used."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = {},
        most_tokens: int | None = None,
    ) -> None:
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self._most_tokens = most_tokens
        self._arguments = dict(arguments)
        self._name = template_name(tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
                "copy the model's chat_template.jinja into its folder"
            )
        if taken := SET_BY_TANDEM & self._arguments.keys():
            raise ValueError(
                f"the template's arguments have {', '.join(sorted(taken))}, which Tandem sets itself; leave it out"
            )
        check_template_arguments(tokenizer, self._arguments)
        added = tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]
        self._added = {text: int(number) for text, number in cast("dict[str, int]", added).items() if text}
        self._tool_calls_needed = False
        self._openers = {"assistant"}
        """Roles that may come before the first turn, in addition to those of ``replies``."""
        self._check_header()
        self.end_token_ids = (self._end_of_turn(),)
        self.replies = self._checked_replies()
        self.end_token_ids += tuple(self._end_of_tool_calls())
        self._check_history()
        self._check_boundary()
        answers = ({"role": "assistant", "content": ANSWER}, _turn_with_calls(REPLIES["tool"], ANSWER))
        self.writes_names = any(map(self._writes_name_of, answers))
        self.notes = tuple(self._find_notes())

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation's first messages, with the header of the assistant's turn. Raises ValueError if
        the template refuses these messages, or leaves out those of a role."""
        text = self.render(messages, header=True)
        for role in {str(message.get("role")) for message in messages} - self.replies.keys() - self._openers:
            first = {"role": role, "content": REPLY}
            if REPLY not in self.render([first, QUESTION], header=True):
                raise ValueError(f"{self._name} leaves out messages of role {role!r}; {_FIX}")
            self._openers.add(role)
        return self.encode(text)

    def following(self, messages: Sequence[Message], *, sampled_end: bool) -> list[int]:
        """The tokens to append to a sampled turn: its end, the new messages, the header of the next turn.

        Args:
            messages: at least one, such as a user's or those of tools.
            sampled_end: whether the last sampled token is one of ``end_token_ids``, so that no end is needed.

        Raises ValueError: the template refuses these messages or leaves them out, or there are none.
        """
        if not messages:
            raise ValueError("no message follows the assistant's turn; give at least one")
        for role in {str(message.get("role")) for message in messages} - self.replies.keys():
            if role == "tool":
                raise ValueError(
                    f"{self._name} does not take messages of role 'tool' here; `tandem check-template --tools` says why"
                )
            reply: list[Message] = [{"role": role, "content": REPLY}]
            self._check_reply(role, reply)
            self.replies[role] = reply
        ids = self.encode(self._suffix(messages, _History()).text)
        if ids[0] not in self.end_token_ids:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"{self._name} does not close the assistant's turn before messages of role {roles}; {_FIX}"
            )
        return ids[1:] if sampled_end else ids

    def render(self, messages: Sequence[Message], *, header: bool) -> str:
        """The template's text of a whole conversation. ``header``: with the header of the assistant's next turn.
        Raises ValueError if the template refuses these messages."""
        try:
            return render_chat(self._tokenizer, messages, self._tools, self._arguments, header=header)
        except ValueError as error:
            raise ValueError(f"{error}; {_FIX}") from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text, which contains its special tokens. Raises EpisodeEnded if it is far too long."""
        return encode_within(self._tokenizer, text, self._most_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with its special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def needs_tool_calls(self, messages: Sequence[Message]) -> bool:
        """Whether the template renders these messages only after a turn with ``tool_calls``, as Mistral's does."""
        return self._tool_calls_needed and any(message.get("role") == "tool" for message in messages)

    def _suffix(self, messages: Sequence[Message], history: _History, *, header: bool = True) -> _Suffix:
        """What the template writes after the assistant's answer. Raises ValueError if it cannot be determined."""
        stand_in = STAND_IN
        given = json.dumps(messages, default=str)
        while stand_in in given:
            stand_in += "x"
        called = self.needs_tool_calls(messages)
        answer = (
            _turn_with_calls(messages, stand_in)
            if called
            else {"role": "assistant", "content": history.answer_start + stand_in}
        )
        text = self.render([*history.before, answer, *messages], header=header)
        _, found, suffix = text.rpartition(stand_in)
        if not found or (not called and text.count(stand_in) != 1):
            raise ValueError(
                f"{self._name} does not write the assistant's answer exactly once, so nothing can follow it; {_FIX}"
            )
        if called:  # the template ends the call before it ends the turn
            ends = [self.decode([number]) for number in self.end_token_ids]
            starts = [at for end in ends if (at := suffix.find(end)) >= 0]
            return _Suffix(suffix[min(starts) :]) if starts else _Suffix(suffix)
        stripped = suffix.lstrip()
        if any(stripped.startswith(token) for token in self._added):
            return _Suffix(stripped, suffix[: len(suffix) - len(stripped)])
        return _Suffix(suffix)

    def _check_header(self) -> None:
        """Refuse a template that leaves the header of the assistant's turn to its caller."""
        opened = self.render([QUESTION], header=True)
        if opened != self.render([QUESTION], header=False):
            return
        answered = self.render([QUESTION, {"role": "assistant", "content": STAND_IN}], header=False)
        before = answered.partition(STAND_IN)[0]
        if before.startswith(opened) and before[len(opened) :].strip():
            raise ValueError(
                f"{self._name} ignores add_generation_prompt, so no prompt ends with the assistant's header "
                f"{before[len(opened) :]!r}; {_FIX}"
            )

    def _end_of_turn(self) -> int:
        """The token with which the template closes the assistant's turn."""
        last = self._suffix([], _History(), header=False).text
        ids = self.encode(last)
        if not last.strip():
            raise ValueError(
                f"{self._name} writes only blanks ({last!r}) after the assistant's answer, so no token ends its turn; {_FIX}"
            )
        if ids[0] not in self._added.values() and len(ids) > 1:
            raise ValueError(
                f"{self._name} closes the assistant's turn with the text {last!r} of {len(ids)} tokens, which cannot "
                f"stop sampling; {_FIX}, so that one token closes the turn"
            )
        return ids[0]

    def _checked_replies(self) -> dict[str, list[Message]]:
        """What may follow the assistant's turn, by role. Raises ValueError if a needed role may not."""
        self._check_reply("user", REPLIES["user"])
        try:
            self._check_reply("tool", REPLIES["tool"])
        except ValueError:
            if not self._accepts_tools_after_calls():
                if self._tools:
                    raise
                return {"user": REPLIES["user"]}
        return dict(REPLIES)

    def _accepts_tools_after_calls(self) -> bool:
        self._tool_calls_needed = True
        try:
            self._check_reply("tool", REPLIES["tool"])
        except ValueError:
            self._tool_calls_needed = False
        return self._tool_calls_needed

    def _check_reply(self, role: str, reply: Sequence[Message]) -> None:
        try:
            suffix = self._suffix(reply, _History()).text
        except ValueError as error:
            raise ValueError(f"role {role!r} cannot follow the assistant's turn: {error}") from error
        if REPLY not in suffix:
            raise ValueError(f"{self._name} leaves out messages of role {role!r}; {_FIX}")
        first, end = self.encode(suffix)[0], self.end_token_ids[0]
        if first != end:
            written, wanted = (self.decode([number]) for number in (first, end))
            raise ValueError(
                f"{self._name} writes {written!r} after the assistant's answer if role {role!r} follows, but {wanted!r} "
                f"if nothing follows, so its turn has no fixed end; {_FIX}"
            )

    def _end_of_tool_calls(self) -> Iterator[int]:
        """The token that closes a turn with tool calls, if it differs from that of other turns (Llama 3.1 has ``<|eom_id|>``)."""
        if not self._tools:
            return
        try:
            text = self.render([QUESTION, _turn_with_calls(REPLIES["tool"], STAND_IN)], header=False)
        except ValueError:  # it takes no tool_calls, so it has no end for them
            return
        ids = self.encode(text.rpartition(STAND_IN)[2]) if STAND_IN in text else []
        added = [number for number in ids if number in self._added.values()]
        if added and added[-1] not in self.end_token_ids:
            yield added[-1]

    def _check_history(self) -> None:
        """Refuse a template whose suffix changes with what came before it. If only the suffix of tools' replies changes,
        and there are no tools, refuse only such replies."""
        try:
            self._check_independence("tool")
        except ValueError:
            if self._tools:
                raise
            del self.replies["tool"]
        self._check_independence("user")

    def _check_independence(self, role: str) -> None:
        for _, reply in (probe for probe in self._reply_probes() if probe[0] == role):
            usual = self._suffix(reply, _History())
            for what, history in self._histories().items():
                other = self._suffix(reply, history)
                if other != usual:
                    raise ValueError(
                        f"{self._name}: what follows the assistant's turn (role {role!r}) changes with {what}: "
                        f"{usual.text!r} or {other.text!r}, so earlier tokens cannot be kept; {_FIX}"
                    )

    def _histories(self) -> dict[str, _History]:
        """Conversations that must not change what follows."""
        if "tool" not in self.replies:
            return _HISTORIES
        answer = {"role": "assistant", "content": ANSWER}
        if self._tool_calls_needed:
            answer = _turn_with_calls(REPLIES["tool"], ANSWER)
        earlier = (QUESTION, answer, *REPLIES["tool"])
        return {**_HISTORIES, "an earlier reply of a tool": _History(before=earlier)}

    def _check_boundary(self) -> None:
        """Refuse a template if the end of an answer and what follows it could become one token.

        The tokenizer splits off an added token before anything else, so only other ends of a turn can fail here.
        """
        for role, reply in self._reply_probes():
            suffix = self._suffix(reply, _History())
            ids = self.encode(suffix.text)
            for end in BOUNDARIES:
                whole = self.encode(ANSWER + end + suffix.text)
                if whole[-len(ids) :] != ids:
                    raise ValueError(
                        f"{self._name}: the tokenizer merges the end {end!r} of an answer with what follows it (role {role!r}); "
                        f"{_FIX}, so that a special token closes the assistant's turn"
                    )

    def _reply_probes(self) -> list[tuple[str, Sequence[Message]]]:
        return [*self.replies.items(), *([("tool", TWO_TOOLS)] if "tool" in self.replies else [])]

    def _writes_name_of(self, answer: Message) -> bool:
        try:
            return REPLY in self.render([QUESTION, {**answer, "name": REPLY}], header=False)
        except ValueError:  # it takes no tool_calls
            return False

    def _find_notes(self) -> Iterator[str]:
        dropped = self._suffix(REPLIES["user"], _History()).dropped
        if dropped:
            yield f"the template writes {dropped!r} between an answer and the end of its turn; Tandem does not"
        if "tool" not in self.replies:
            yield "messages of role 'tool' cannot follow the assistant's turn, so environments with tools are refused"
        names = [str(tool.get("function", tool).get("name", "")) for tool in self._tools]
        opened = self.render([QUESTION], header=True)
        unseen = [name for name in names if name not in opened]
        if unseen:
            yield f"the template leaves out tools ({', '.join(unseen)}); describe them in the system prompt"


def _turn_with_calls(replies: Sequence[Message], stand_in: str) -> dict[str, Any]:
    """The assistant's turn that these messages answer, with the stand-in as the last call's argument."""
    answered = [message for message in replies if message.get("role") == "tool"]
    calls = [
        {
            "id": message.get("tool_call_id", f"call{number:05}"),
            "type": "function",
            "function": {"name": message.get("name", "probe"), "arguments": {"value": stand_in}},
        }
        for number, message in enumerate(answered)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
