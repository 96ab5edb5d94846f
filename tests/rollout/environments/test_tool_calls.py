"""Tool calls in sampled text, by SGLang's parsers in their process. The process of all tests but the first few is one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rollout.environments import tool_calls
from rollout.environments.template_probes import EXAMPLE_TOOL
from rollout.environments.tool_calls import ToolCallParser
from rollout.rewards.worker import WorkerStartError
from rollout.servers.tool_call_parsers import parser_names

ROOT = Path(__file__).resolve().parents[3]
CALL = '<tool_call>\n{"name": "tandem_probe", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [EXAMPLE_TOOL]


@pytest.fixture(scope="module")
def qwen():
    with ToolCallParser("qwen25", reasoning_parser="qwen3") as parser:
        yield parser


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parser": "qwen2"}, "tool_call_parser=qwen2 is unknown to SGLang; use qwen"),
        ({"parser": "qwen25", "reasoning_parser": "qwem3"}, "reasoning_parser=qwem3 is unknown to SGLang; use qwen3"),
    ],
)  # fmt: skip
def test_an_unknown_parser_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        ToolCallParser(**options)


def test_names_and_the_caller_need_no_torch():
    """The sample role and the checks before a start import these modules."""
    code = (
        "import sys; from rollout.environments.tool_calls import ToolCallParser; ToolCallParser('llama3'); "
        "print(sorted(sys.modules.keys() & {'torch', 'sglang', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert {"qwen25", "llama3", "mistral"} <= set(parser_names("tool_call_parser"))


def test_calls_are_found(qwen):
    turn = qwen(f"Let me see.\n{CALL}\n{CALL}", TOOLS)
    assert (turn.content, turn.error) == ("Let me see.", None)
    assert [(call["name"], call["arguments"]) for call in turn.calls] == [
        ("tandem_probe", {"a": 1, "b": 2})
    ] * 2
    ids = [call["id"] for call in turn.calls]
    assert len(set(ids)) == 2 and all(len(name) == 9 and name.isalnum() for name in ids)
    assert qwen(f"Let me see.\n{CALL}\n{CALL}", TOOLS) == turn


def test_thinking_holds_no_calls(qwen):
    turn = qwen(f"<think>\nI could write {CALL}\n</think>\n\nFour.", TOOLS)
    assert (turn.content.strip(), turn.calls, turn.error) == ("Four.", [], None)
    assert turn.reasoning.strip() == f"I could write {CALL}"


@pytest.mark.parametrize("text", ["", "Four.", " blanks \n", "\ud800", "a <tool_call> is what I would need"])
def test_other_text_stays(qwen, text):
    turn = qwen(text, TOOLS)
    assert (turn.content, turn.calls, turn.error) == (text, [], None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CALL.replace("2}}", "2"), "Failed to parse JSON part"),
        (CALL[:-12], "it has no end, or is not of the form"),
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
    assert pytest.importorskip("re").search(error, turn.error)


def test_a_lost_process_costs_one_turn_and_is_started_again(qwen):
    qwen.start()
    qwen._process.kill()
    qwen._process.wait()
    assert len(qwen(CALL, TOOLS).calls) == 1  # it was seen to be gone, before anything was sent
    threading.Timer(0.3, qwen._process.kill).start()
    os.kill(qwen._process.pid, 19)  # SIGSTOP: it answers nothing any more
    turn = qwen(CALL, TOOLS)
    assert (turn.calls, turn.error) == ([], "the parser's process ended")


def answering(monkeypatch, code: str) -> None:
    """Put a process that runs ``code`` in the parsers' place; importing those takes seconds."""
    start = "import sys, time, json; from multiprocessing.connection import Connection; c = Connection({descriptor}); "
    monkeypatch.setattr(tool_calls, "BOOTSTRAP", f"_ = {{path!r}}; {start}{code}")


def test_a_late_parser_is_killed(monkeypatch):
    answering(monkeypatch, "c.send_bytes(b'{{}}'); time.sleep(60)")
    with ToolCallParser("llama3", timeout_s=0.2) as parser:
        parser.start()
        pid, before = parser._process.pid, time.monotonic()
        assert parser("x", TOOLS).error == "no answer of the parser within 0.2 s"
        assert time.monotonic() - before < 10 and not psutil.pid_exists(pid)


@pytest.mark.parametrize("code", ["sys.exit(3)", "time.sleep(60)"])
def test_a_process_that_cannot_start_ends_the_run(monkeypatch, code):
    answering(monkeypatch, code)
    with ToolCallParser("llama3", start_timeout_s=3) as parser:
        with pytest.raises(WorkerStartError, match="parser llama3 did not start"):
            parser("x", TOOLS)


def test_the_process_ends_with_its_owner(monkeypatch):
    """Also where the owner is killed: the pipe closes."""
    code = (
        "import sys, time; from rollout.environments import tool_calls; "
        'tool_calls.BOOTSTRAP = "_ = {path!r}; from multiprocessing.connection import Connection; '
        "c = Connection({descriptor}); c.send_bytes(b'{{}}'); c.recv_bytes()\"; "
        "p = tool_calls.ToolCallParser('llama3'); p.start(); print(p._process.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_llamas_calls_have_no_mark():
    with ToolCallParser("llama3") as parser:
        call = {"name": "tandem_probe", "parameters": {"a": 1}}
        for text in (json.dumps(call), f"<|python_tag|>{json.dumps(call)}"):
            (found,) = parser(text, TOOLS).calls
            assert (found["name"], found["arguments"]) == ("tandem_probe", {"a": 1})
        turn = parser('{"answer": 4}', TOOLS)
        assert (turn.content, turn.calls, turn.error) == ('{"answer": 4}', [], None)
        assert parser(json.dumps(call)[:-2], TOOLS).error is not None
