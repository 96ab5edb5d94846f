"""The server inside an environment's process: interfaces, wrong forms with their lines, schemas of tools."""

import functools
import json
import math
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from transformers.utils import get_json_schema

from rollout.environments import tandem_worker
from rollout.environments.tandem_worker.failures import Failure, error_text
from rollout.environments.tandem_worker.interfaces import INTERFACES
from rollout.environments.tandem_worker.server import Server
from rollout.environments.tandem_worker.tool_schemas import schema_of

ROOT = Path(__file__).resolve().parents[3]
PROBLEM = {
    "prompt_id": "p",
    "text": "2+3?",
    "reference": "5",
    "row": {"level": 4},
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}],
}


def answer(text: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def of(interface: str, **members):
    """An environment of a class with these members."""
    return INTERFACES[interface](type("Made", (), members)())


class TestChat:
    def test_an_episode(self):
        class Guess:
            def reset(self, problem):
                return [{"role": "user", "content": problem["text"]}]

            async def step(self, message):
                return [], np.float32(message["content"] == "5"), np.bool_(True), {"short": 1}

        env = INTERFACES["chat"](Guess())
        assert env.reset(PROBLEM) == [{"role": "user", "content": "2+3?"}]
        stepped = {"messages": [], "reward": 1.0, "done": True, "parts": {"short": 1.0}, "tool_calls": 0}
        assert env.step(answer("5")) == stepped

    @pytest.mark.parametrize(
        ("returned", "kind", "message"),
        [
            (None, "unusable", "step returned NoneType None; return (messages, reward, done)"),
            (([], 1.0), "unusable", "return (messages, reward, done)"),
            (("hi", 1.0, True), "unusable", "returned str 'hi' as messages"),
            (([{"role": "user"}], 1.0, True), "unusable", "as messages"),
            (([{"role": "user", "content": 3}], 1.0, True), "unusable", "as messages"),
            (([], 1.0, 1), "unusable", "returned <class 'int'> as done; return True or False"),
            (([], 1.0, False), "unusable", "returned no messages, and done is False"),
            (([], "high", True), "reward", "returned str 'high' as reward; return a number"),
            (([], math.inf, True), "reward", "returned inf as reward, which is not finite"),
            (([], 1.0, True, [1]), "reward", "returned list [1] as parts"),
            (([], 1.0, True, {"a": math.nan}), "reward", "returned nan as part 'a'"),
        ],
    )
    def test_a_wrong_form_names_the_line(self, returned, kind, message):
        env = of("chat", reset=lambda self, p: [], step=lambda self, m: returned)
        with pytest.raises(Failure) as failure:
            env.step(answer("5"))
        assert failure.value.kind == kind
        assert message in str(failure.value) and "(test_tandem_worker.py:" in str(failure.value)

    @pytest.mark.parametrize("returned", [None, [], "hi", [("user", "hi")]])
    def test_a_wrong_reset(self, returned):
        env = of("chat", reset=lambda self, p: returned, step=lambda self, m: None)
        with pytest.raises(Failure, match=r"reset returned .*\(test_tandem_worker.py:\d+"):
            env.reset(PROBLEM)

    def test_functions_are_called_and_written_schemas_go_to_step(self):
        def add(a: int, b: int = 1) -> int:
            """Add."""
            return a + b

        def step(self, message):
            return [{"role": "tool", "content": "seen"}], 0.5, False

        env = of("chat", reset=lambda self, p: [], step=step, tools=[add])
        stepped = env.step(answer("", ("add", {"a": 2}), ("add", {"a": 2, "b": 5})))
        assert [m["content"] for m in stepped["messages"]] == ["3", "7"]
        assert [m["tool_call_id"] for m in stepped["messages"]] == ["c0", "c1"]
        assert stepped["tool_calls"] == 2 and not stepped.keys() & {"reward", "done"}
        assert env.step(answer("no call"))["reward"] == 0.5

        written = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        env = of("chat", reset=lambda self, p: [], step=step, tools=written)
        assert env.tools == written
        stepped = env.step(answer("", ("add", {"a": 2})))
        assert (stepped["messages"][0]["content"], stepped["tool_calls"]) == ("seen", 1)

        with pytest.raises(Failure, match="functions and JSON schemas"):
            of("chat", reset=lambda self, p: [], step=step, tools=[add, *written])
        for bare in ({"name": "add", "parameters": {}}, {"type": "function", "function": {"name": 3}}):
            with pytest.raises(Failure, match=r'tools has dict .*; write it as \{"type": "function"'):
                of("chat", reset=lambda self, p: [], step=step, tools=[bare])


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (("nothing", {}), "Error: there is no tool 'nothing'; the tools are get, odd"),
        (("get", {}), "Error: get: missing a required argument: 'key'"),
        (("get", {"key": "a", "more": 1}), "Error: get: got an unexpected keyword argument 'more'"),
        (("get", [1]), "Error: the arguments of get are not a JSON object: list [1]"),
        (("get", {"key": "b"}), "Error: KeyError: 'b'"),
    ],
)
def test_a_tool_that_fails_answers_the_model(call, content):
    def get(self, key: str) -> str:
        """Get."""
        return {"a": "1"}[key]

    def odd(self) -> object:
        """Return no JSON."""
        return object()

    env = of("tools", reset=lambda self: None, get=get, odd=odd)
    stepped = env.step(answer("", ("get", {"key": "a"}), call))
    assert [m["content"] for m in stepped["messages"]] == ["1", content]
    assert (stepped["tool_calls"], stepped["tool_errors"]) == (2, 1)
    with pytest.raises(
        Failure, match=r"tool odd returned <class 'object'>.*\(test_tandem_worker.py:\d+ in odd\)"
    ):
        env.step(answer("", ("odd", {})))


class TestText:
    @pytest.mark.parametrize("returned", ["go", ("go", {"seed": 1})])
    def test_reset(self, returned):
        env = of("text", reset=lambda self: returned, step=lambda self, t: None)
        assert env.reset(PROBLEM) == [{"role": "user", "content": "go"}]

    def test_reset_gets_the_fields_that_it_names(self):
        got = []

        def some(self, level, reference, seed=None):
            got.append((level, reference, seed))
            return "go"

        def everything(self, **fields):
            got.append(fields)
            return "go"

        def missing(self, colour):
            return "go"

        of("text", reset=some, step=lambda self, t: None).reset(PROBLEM)
        of("text", reset=everything, step=lambda self, t: None).reset(PROBLEM)
        assert got == [(4, "5", None), {**{k: v for k, v in PROBLEM.items() if k != "row"}, "level": 4}]
        with pytest.raises(
            Failure, match=r"parameter 'colour', but the problem has only level, .*\(test_tandem_worker"
        ):
            of("text", reset=missing, step=lambda self, t: None).reset(PROBLEM)

    @pytest.mark.parametrize(
        ("returned", "done"),
        [
            (("on", 0.5, False, {}), False),
            (("on", 0.5, True, {}), True),
            (("on", 0.5, False, False, {}), False),
            (("on", 0.5, False, True, {"parts": {"a": 2}}), True),
        ],
    )
    def test_step(self, returned, done):
        stepped = of("text", reset=lambda self: "", step=lambda self, t: returned).step(answer("x"))
        assert (stepped["messages"], stepped["reward"]) == ([{"role": "user", "content": "on"}], 0.5)
        assert (stepped["done"], stepped["parts"]) == (done, {"a": 2.0} if len(returned[-1]) else {})

    @pytest.mark.parametrize(
        "returned",
        [None, ("on", 0.5, False), (3, 0.5, False, {}), ("on", None, False, {}), ("on", 1, True, [])],
    )
    def test_a_wrong_step(self, returned):
        with pytest.raises(Failure, match=r"step returned .*\(test_tandem_worker.py:\d+"):
            of("text", reset=lambda self: "", step=lambda self, t: returned).step(answer("x"))


class TestTools:
    def get(self, key: str) -> str:
        """Get."""
        return key

    @pytest.mark.parametrize("reward", [2, lambda self: 2])
    def test_reset_extends_the_problem_and_an_answer_ends(self, reward):
        env = of("tools", reset=lambda self, level: f" Level {level}.", get=TestTools.get, reward=reward)
        contents = [m["content"] for m in env.reset(PROBLEM)]
        assert contents == ["Be brief.", "2+3? Level 4."]
        turns = [{"role": "user", "content": "1"}, answer("2"), {"role": "user", "content": "3"}]
        assert [m["content"] for m in env.reset(PROBLEM | {"messages": turns})] == ["1", "2", "3 Level 4."]
        assert PROBLEM["messages"][1]["content"] == "2+3?"
        stepped = env.step(answer("5"))
        assert (stepped["reward"], stepped["done"], stepped["messages"]) == (2.0, True, [])

    def test_without_a_reward_the_run_scores(self):
        env = of("tools", reset=lambda self: None, get=TestTools.get)
        assert env.step(answer("5"))["reward"] is None

    def test_public_methods_are_the_tools(self):
        env = of(
            "tools", reset=lambda self: None, get=TestTools.get, _hidden=TestTools.get, limit=3, close=print
        )
        assert [tool["function"]["name"] for tool in env.tools] == ["get"]
        with pytest.raises(Failure, match="no public method"):
            of("tools", reset=lambda self: None)


def search(
    query: str, limit: int, exact: bool = False, scale: float = 1.0, tags: list[str] | None = None,
    order: Literal["new", "old"] = "new", extra: dict[str, int] | None = None,
):  # fmt: skip
    """Search the index.

    Args:
        query: what to look for,
            in words
        limit: most results
        exact: no stems
        scale: a factor
        tags: all of them
        order: by date
        extra: anything

    Returns:
        The results.
    """


def test_a_schema_is_that_of_transformers():
    ours, theirs = schema_of(search), get_json_schema(search)
    theirs["function"].pop("return", None)
    for name, schema in theirs["function"]["parameters"]["properties"].items():
        own = ours["function"]["parameters"]["properties"][name]
        if schema.pop("nullable", False):  # ours is plain JSON schema
            *alternatives, null = own.pop("anyOf")
            assert null == {"type": "null"}
            own |= alternatives[0]
    assert ours == theirs


def test_a_schema_from_sphinx_and_without_descriptions():
    def find(key, deep):
        """Find it.

        :param str key: what
        :param deep: how far
        :returns: it
        """

    find.__annotations__ = {"key": str, "deep": Any}
    parameters = {"key": {"type": "string", "description": "what"}, "deep": {"description": "how far"}}
    assert schema_of(find)["function"]["description"] == "Find it."
    assert schema_of(find)["function"]["parameters"]["properties"] == parameters


def test_types_without_arguments():
    def find(key: typing.Dict, deep: typing.Mapping, some: typing.List):  # noqa: UP006
        """Find it."""

    schema = schema_of(find)["function"]["parameters"]["properties"]
    assert schema == {
        "key": {"type": "object"},
        "deep": {"type": "object"},
        "some": {"type": "array", "items": {}},
    }


@pytest.mark.parametrize("tool", ["search", 3, functools.partial(print)])
def test_a_tool_that_is_no_function_with_a_name(tool):
    with pytest.raises(Failure, match="is not a function with a name; define one"):
        of("chat", reset=lambda self, p: [], step=lambda self, m: None, tools=[tool])


def untyped(key):
    """Doc."""


def undocumented(key: str): ...


def starred(*keys: str):
    """Doc."""


def of_a_class(key: Failure):
    """Doc."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "parameter 'key' of tool untyped has no type"),
        (undocumented, "tool undocumented has no docstring"),
        (starred, "a model gives arguments by name"),
        (of_a_class, "has no JSON schema here"),
    ],
)
def test_a_function_that_is_no_tool(function, message):
    with pytest.raises(Failure, match=rf"{message}.*\(test_tandem_worker.py:\d+ in {function.__name__}\)"):
        schema_of(function)


def test_an_exception_that_cannot_tell_its_text_is_an_error_answer():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("x")

    def step(self, message):
        raise Mute

    server = Server()
    server.environment = of("chat", reset=lambda self, p: [], step=step)
    error = json.loads(server.answer({"do": "step", "message": answer("5")}))["error"]
    assert error["kind"] == "raised" and error["message"].startswith("Mute (test_tandem_worker.py:")


def test_a_text_that_is_no_unicode_is_an_error_answer():
    server = Server()
    server.environment = of("chat", reset=lambda self, p: [{"role": "user", "content": "\ud800"}], step=print)
    error = json.loads(server.answer({"do": "reset", "problem": PROBLEM}))["error"]
    assert error["kind"] == "unusable" and "surrogates not allowed" in error["message"]


UNDER_A_GUARD = """
import os, subprocess, sys
from rollout.environments.tandem_worker import guard

guard.set_of_process(guard.PR_SET_CHILD_SUBREAPER, 1)
guard.END_TIMEOUT_S, kill = 0.5, os.kill
first, second = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))

def refuse_first(pid, number):
    if pid == first.pid:
        raise PermissionError("it is of another user")
    kill(pid, number)

os.kill = refuse_first
try:
    guard.end_descendants()
except TimeoutError as error:
    print(str(error) == f"processes {[first.pid]} survive SIGKILL")
print(list(guard.descendants()) and os.path.exists(f"/proc/{second.pid}"))
kill(first.pid, 9)
"""


def test_a_process_without_children_reads_no_others():
    """It is asked after every episode, on nodes with thousands of processes."""
    code = (
        "import os, subprocess; from rollout.environments.tandem_worker import guard; read = os.listdir; "
        "os.listdir = None; print(guard.descendants()); guard.end_descendants(); os.listdir = read; "
        "child = subprocess.Popen(['true']); os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT); "
        "print([pid for pid, _ in guard.descendants()] == [child.pid]); guard.end_descendants(); print(guard.has_children())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["{}", "True", "False"], done.stderr


def test_a_process_that_may_not_be_killed_keeps_no_other_alive():
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_GUARD], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_folder_imports_the_standard_library_alone():
    folder = Path(tandem_worker.__file__).parent
    modules = sorted(f"tandem_worker.{file.stem}" for file in folder.glob("[!_]*.py"))
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(folder.parent)!r})\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    names = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/", timeout=60
    ).stdout.split()
    packages = {name.partition(".")[0] for name in names if not name.startswith(FROM_START)}
    assert packages - sys.stdlib_module_names - {"__main__", "tandem_worker"} == set()


FROM_START = (
    "__editable__",
    "_virtualenv",
    "_distutils",
    "distutils",
    "sitecustomize",
    "google",
    "mpl_toolkits",
)
"""What an installation may import at the start of every Python."""


def test_the_text_of_an_error_moves_no_terminal():
    """It may hold a model's words."""
    text = error_text(ValueError("bad \x1b[2J\x9b31m\x07\n\u202eanswer\r\x7f é"))
    assert text == r"ValueError: bad \x1b[2J\x9b31m\x07 \u202eanswer \x7f é"
