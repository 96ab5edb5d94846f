"""The process of the tool-call parsers: names, deadlines, losses, its end. What the parsers find:
servers/test_tool_call_parsers.py."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from configs.schema.environment import ChatEnvironment
from rollout.environments.loading import call_parser
from rollout.environments.tool_calls import ToolCallParser
from rollout.rewards import worker
from rollout.rewards.worker import WorkerStartError
from rollout.servers.tool_call_parsers import parser_names

ROOT = Path(__file__).resolve().parents[3]
ANSWERS = (
    "answer = {'content': 'heard', 'calls': [], 'error': None, 'reasoning': ''}; "
    "[b'END' in question and sys.exit() or c.send_bytes(json.dumps(answer).encode()) for question in iter(c.recv_bytes, 0)]"
)
READY = "c.send_bytes(b'{}'); "


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


def bootstrap(code: str) -> str:
    """Runs ``code`` in the parsers' place; importing those takes seconds."""
    start = "import sys, time, json; from multiprocessing.connection import Connection; c = Connection({descriptor}); "
    return "_ = {path!r}; " + start + code.replace("{", "{{").replace("}", "}}")


@pytest.fixture
def parser(monkeypatch, request):
    monkeypatch.setattr(worker, "BOOTSTRAP", bootstrap(request.param))
    parser = ToolCallParser("llama3")
    parser._timeout_s = parser._start_timeout_s = 10
    yield parser
    parser.close()


@pytest.mark.parametrize("parser", [READY + ANSWERS], indirect=True)
def test_a_lost_process_costs_one_turn_and_is_started_again(parser):
    assert parser("a", []).content == "heard"
    lost = parser.pid
    turn = parser("END", [])
    assert (turn.content, turn.calls, turn.error) == ("END", [], "the parser's process ended")
    assert parser("c", []).content == "heard" and parser.pid != lost


@pytest.mark.parametrize(
    "parser", [READY + "print(c.recv_bytes(), file=sys.stderr); time.sleep(600)"], indirect=True
)
def test_closing_waits_for_no_answer_and_nothing_starts_again(parser):
    turns = []
    parser._timeout_s = 600
    parser.start()
    asking = [threading.Thread(target=lambda: turns.append(parser("x", []))) for _ in range(3)]
    for thread in asking:
        thread.start()
    while not parser._asking.locked():
        time.sleep(0.01)
    pid = parser.pid
    parser.close()
    for thread in asking:
        thread.join(timeout=60)
    assert [turn.error for turn in turns] == 3 * ["the parser was closed"]
    assert parser.pid is None and not psutil.pid_exists(pid)


@pytest.mark.parametrize("parser", [READY + "time.sleep(60)"], indirect=True)
def test_a_late_parser_is_killed(parser):
    parser.start()
    parser._timeout_s, pid = 0.2, parser.pid
    turn = parser("x", [])
    assert (turn.content, turn.error) == ("x", "no answer from the parser within 0.2 s")
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("parser", ["sys.exit(3)", "time.sleep(60)"], indirect=True)
def test_a_process_that_cannot_start_ends_the_run(parser):
    parser._start_timeout_s = 2
    with pytest.raises(WorkerStartError, match="SGLang's tool-call parsers did not start"):
        parser("x", [])
    assert parser.pid is None


def test_the_process_ends_with_its_owner():
    """Also where the owner is killed: the pipe closes."""
    code = (
        "import time; from rollout.environments.tool_calls import ToolCallParser; from rollout.rewards import worker; "
        f"worker.BOOTSTRAP = {bootstrap(READY + ANSWERS)!r}; "
        "p = ToolCallParser('llama3'); p.start(); print(p.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_process_of_a_config_ends_with_its_use(monkeypatch):
    monkeypatch.setattr(worker, "BOOTSTRAP", bootstrap(READY + ANSWERS))
    block = ChatEnvironment(environment="a:B", tool_call_parser="llama3", reasoning_parser="qwen3")
    before = psutil.Process().children()

    async def heard() -> str:
        async with call_parser(block) as parse:
            assert parse is not None and len(psutil.Process().children()) == len(before) + 1
            return (await parse("a", [])).content

    assert asyncio.run(heard()) == "heard"
    assert psutil.Process().children() == before
