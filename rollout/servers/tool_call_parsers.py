"""SGLang's parsers of tool calls and of thinking, in a separate process: its main function, and the parsers' names.

``rollout/environments/tool_calls.py`` starts the process. Requests and answers are JSON over a pipe.
"""

import difflib
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rollout.pipe import jobs_of, serving

_NAMES = {
    "tool_call_parser": ("srt/function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
    "reasoning_parser": ("srt/parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
}
_LONGEST_ERROR = 300
_DEEPEST_ARGUMENTS = 100
"""Levels of nesting. Python reads a thousand, but fewer if its caller is deep in the stack already."""


@cache
def parser_names(kind: str) -> tuple[str, ...]:
    """Names of the parsers in the installed SGLang. ``kind``: ``tool_call_parser`` or ``reasoning_parser``.

    Only the file of the names is loaded: ``import sglang`` would take seconds and load torch.
    """
    file, variable = _NAMES[kind]
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        raise ValueError("SGLang is not installed; bash launch/install.sh installs it")
    spec = importlib.util.spec_from_file_location("sglang_parser_names", Path(package.origin).parent / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(getattr(module, variable))


def check_parser_name(kind: str, name: str) -> None:
    """Raises ValueError, with the nearest names, if the installed SGLang has no such parser."""
    names = parser_names(kind)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        raise ValueError(f"{kind}={name} is unknown to SGLang; use {', '.join(close or sorted(names))}")


def serve(descriptor: int) -> None:
    """Main function of the process: answers one request at a time, and ends when the pipe closes."""
    with serving(descriptor) as connection:
        from sglang.srt.function_call import function_call_parser  # noqa: F401

        connection.send_bytes(b'{"ready": true}')
        for request in jobs_of(connection.recv_bytes):
            connection.send_bytes(json.dumps(parse(**json.loads(request))).encode())


class _Unreadable(ValueError):
    """A tool call that SGLang leaves out silently."""


def parse(
    text: str, tools: Sequence[Mapping[str, Any]], parser: str, reasoning_parser: str | None
) -> dict[str, Any]:
    """The parts of the text: ``reasoning``, ``content``, ``calls`` ({name, arguments} each), ``error``. Without tools there
    are no calls.

    SGLang leaves out calls that it cannot read, and logs why. Here one such call is an error, and no calls are returned.
    """
    reasoning, content, calls = "", text, []
    with _Complaints() as complaints:
        try:
            if reasoning_parser is not None:
                reasoning, text = _without_reasoning(text, reasoning_parser)
            content, calls = _parse_calls(text, tools, parser) if tools else (text, [])
        except _Unreadable as error:
            complaints.texts = complaints.texts or [str(error)]
        except Exception as error:  # a parser may raise anything
            complaints.texts.append(f"{type(error).__name__}: {error}")
    error = "; ".join(dict.fromkeys(complaints.texts))[:_LONGEST_ERROR] or None
    if error is not None:
        content, calls = text, []
    return {"reasoning": reasoning, "content": content, "calls": calls, "error": error}


def _without_reasoning(text: str, name: str) -> tuple[str, str]:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    parser = ReasoningParser(name, stream_reasoning=False, tool_call_parser_active=True)
    reasoning, rest = parser.parse_non_stream(text)
    return reasoning or "", rest or ""


def _parse_calls(
    text: str, tools: Sequence[Mapping[str, Any]], name: str
) -> tuple[str, list[dict[str, Any]]]:
    """Raises whatever the parser raises, and _Unreadable."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
    if not parser.has_tool_call(text):
        return text, []
    begin, end = parser.detector.bot_token, getattr(parser.detector, "eot_token", "")
    if begin not in text and '"name"' not in text:
        return text, []  # Llama's form has no mark: an answer in JSON is no call
    content, found = parser.parse_non_stream(text)
    if not found:
        raise _Unreadable("a tool call begins, but it has no end, or not the form that the prompt describes")
    if begin and end and text.rfind(begin) > text.rfind(end):
        raise _Unreadable("the last tool call has no end")
    return content, [{"name": call.name, "arguments": _arguments(call.parameters)} for call in found]


def _arguments(written: str) -> dict[str, Any]:
    arguments = json.loads(written or "{}", parse_constant=_refuse_constant)
    if not isinstance(arguments, dict):
        raise _Unreadable(f"the arguments of a tool call are {written}, not an object")
    if _is_nested_deeper(arguments, _DEEPEST_ARGUMENTS):
        raise _Unreadable(f"the arguments of a tool call are nested deeper than {_DEEPEST_ARGUMENTS} levels")
    return arguments


def _is_nested_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        groups = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in groups for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, (dict, list)) for each in level)


def _refuse_constant(name: str) -> None:
    raise _Unreadable(f"{name} in the arguments of a tool call is no JSON")


class _Complaints(logging.Handler):
    """Collects the warnings of SGLang's parsers while it is entered. They are not printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._logger = logging.getLogger("sglang.srt")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "_Complaints":
        self._propagates, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagates
