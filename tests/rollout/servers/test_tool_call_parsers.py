"""Tool calls in sampled text, by SGLang's own parsers. Tests share a parser, whose process takes seconds to start."""

import json
import re
from contextlib import closing

import pytest

from rollout.environments.template_probes import EXAMPLE_TOOL
from rollout.environments.tool_calls import ToolCallParser

pytestmark = pytest.mark.engines

CALL = '<tool_call>\n{"name": "tandem_probe", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [EXAMPLE_TOOL]


@pytest.fixture(scope="module")
def qwen():
    with closing(ToolCallParser("qwen25", reasoning_parser="qwen3")) as parser:
        yield parser


def test_calls_are_found(qwen):
    turn = qwen(f"Let me see.\n{CALL}\n{CALL}", TOOLS)
    assert (turn.content, turn.error) == ("Let me see.", None)
    assert [(call["name"], call["arguments"]) for call in turn.calls] == [
        ("tandem_probe", {"a": 1, "b": 2})
    ] * 2


def test_thinking_holds_no_calls(qwen):
    turn = qwen(f"<think>\nI could write {CALL}\n</think>\n\nFour.", TOOLS)
    assert (turn.content.strip(), turn.calls, turn.error) == ("Four.", [], None)
    assert turn.reasoning.strip() == f"I could write {CALL}"


def test_thinking_is_apart_without_tools_too(qwen):
    turn = qwen(f"<think>\nHm.\n</think>\n\n{CALL}", [])
    assert (turn.content.strip(), turn.calls, turn.error) == (CALL, [], None)
    assert turn.reasoning.strip() == "Hm."


@pytest.mark.parametrize("text", ["", "Four.", " blanks \n", "\ud800", "a <tool_call> is what I would need"])
def test_other_text_stays(qwen, text):
    turn = qwen(text, TOOLS)
    assert (turn.content, turn.calls, turn.error) == (text, [], None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CALL.replace("2}}", "2"), "Failed to parse JSON part"),
        (CALL[:-12], "it has no end, or not the form"),
        (f'{CALL}\n<tool_call>\n{{"name', "the last tool call has no end"),
        (CALL.replace("tandem_probe", "other"), "undefined function: other"),
        (CALL.replace('{"a": 1, "b": 2}', "[1]"), r"arguments of a tool call are \[1\], not an object"),
        (CALL.replace("1,", "NaN,"), "NaN in the arguments of a tool call is no JSON"),
        ("<tool_call>\n[1]\n</tool_call>", "AttributeError"),
        (f"<tool_call>\n{'[' * 5000}\n</tool_call>", "RecursionError"),
        (f"{CALL}\n{CALL.replace('2}}', '2')}", "Failed to parse JSON part"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_and_no_call(qwen, text, error):
    turn = qwen(text, TOOLS)
    assert turn.calls == [] and turn.content == text
    assert turn.error is not None and len(turn.error) <= 300
    assert re.search(error, turn.error)


def test_nesting_that_a_caller_could_not_read_is_an_error(qwen):
    """A caller deep in its stack has less room for recursion than the parsers' process."""

    def nested(depth: int) -> str:
        return CALL.replace('{"a": 1', '{"a": ' + "[" * depth + "]" * depth)

    def far_down(steps: int, text: str):
        return far_down(steps - 1, text) if steps else qwen(text, TOOLS)

    for depth in (150, 500, 950):
        turn = far_down(500, nested(depth))
        assert turn.calls == [] and "nested deeper than 100" in turn.error
    (call,) = qwen(nested(90), TOOLS).calls
    assert call["name"] == "tandem_probe"


def test_llamas_calls_have_no_mark():
    call = {"name": "tandem_probe", "parameters": {"a": 1}}
    with closing(ToolCallParser("llama3")) as parser:
        for text in (json.dumps(call), f"<|python_tag|>{json.dumps(call)}"):
            (found,) = parser(text, TOOLS).calls
            assert (found["name"], found["arguments"]) == ("tandem_probe", {"a": 1})
        turn = parser('{"answer": 4}', TOOLS)
        assert (turn.content, turn.calls, turn.error) == ('{"answer": 4}', [], None)
        assert parser(json.dumps(call)[:-2], TOOLS).error is not None
