"""The process of an environment. The standard library alone: another Python (3.9 or newer) may run this file.

::

    ProcessPool (processes.py) ── stdin, stdout ──> guard ── fork ──> server
                                                    kills the server and all that it started,     imports the environment;
                                                    once our end of the pipe closes               one JSON line in, one out

Both processes adopt the orphans below them (PR_SET_CHILD_SUBREAPER), so a daemon of the environment cannot get away.
The guard runs no code of the user's: it survives a crash of the server, and then kills what the server has left
over. Between two episodes the server kills what the episode has left over. What the user prints goes to the error
stream. Nothing is unpickled.

Requests, in this order: ``start`` once, then episodes (``reset``, any number of ``step``, ``end``), then ``close``.
An answer is ``{"ok": ...}`` or ``{"error": {"kind": ..., "message": ...}}``, where kind is

start     the environment cannot be made
raised    the user's code raised
unusable  it returned something of a wrong form
reward    its reward is no finite number

With a command as arguments this file is the guard of that command instead, which an agent is (``agent_process.py``).
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import json
import math
import os
import re
import select
import signal
import sys
import sysconfig
import time
import traceback
import types
import typing
from numbers import Real

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_TIMEOUT_S = 5.0
"""Time for the kernel to end killed processes."""
OLDEST_PYTHON = (3, 9)
LONGEST_MESSAGE = 300
PARTS = "parts"
"""Key of the parts of the reward in the ``info`` of a text environment."""


class Failure(Exception):
    """An answer that is an error. See the top of the file for ``kind``."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


# -------------------------------------------------------------------------------------------------------
# processes


def main(command=()):
    """Guard and server, or guard and ``command``. Exits as they do; 128 + number after a signal."""
    set_of_process(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        os.setsid()  # `os.killpg(0, SIGKILL)` in the user's code must not reach the guard
        set_of_process(PR_SET_CHILD_SUBREAPER, 1)
        set_of_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it ended before the line above
            os._exit(0)
        if command:
            become(command)
        serve()
        os._exit(0)
    os._exit(stand_guard(server))


def become(command):
    """Run a command in place of this process, without input. Its orphans are the guard's."""
    set_of_process(PR_SET_CHILD_SUBREAPER, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def stand_guard(server):
    """Wait for the end of the server, or of the parent's end of our pipe; then kill what is left. -> exit code"""
    wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer)
    asked_to_end = []
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_end.append(number))
    os.close(1)  # the parent sees the end of the file when the server ends
    poll = select.poll()
    poll.register(0, 0)  # the closing alone: the server reads
    poll.register(wake, select.POLLIN)
    code = None
    while code is None:
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            break
        events = dict(poll.poll())
        if 0 in events or asked_to_end:
            code = 0
        if wake in events:
            os.read(wake, 4096)
    end_descendants()
    return code


def set_of_process(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def descendants(kept=frozenset()):
    """{(pid, start time): parent} of all processes below this one, without those in ``kept`` and theirs. A zombie is in
    it where it is a child of ours: no other can be reaped here."""
    by_parent = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *rest = file.read().rpartition(b")")[2].split()
        except OSError:  # it is gone
            continue
        by_parent.setdefault(int(parent), []).append((int(name), int(rest[17]), state))
    found, waiting = {}, [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for pid, started, state in by_parent.get(parent, ()):
            if (pid, started) not in kept:
                waiting.append(pid)
                if state != b"Z" or parent == os.getpid():
                    found[pid, started] = parent
    return found


def end_descendants(kept=frozenset()):
    """Kill and reap all processes below this one but those in ``kept``. Raises TimeoutError."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        found = descendants(kept)
        if not found:
            return
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for (pid, _), parent in found.items():
            if parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(pid for pid, _ in found)} survive SIGKILL")
        time.sleep(0.001)  # the kernel ends them meanwhile


# -------------------------------------------------------------------------------------------------------
# server


def serve():
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what the user prints
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server, own_pid = Server(), os.getpid()
    while True:
        line = requests.readline()
        if not line:
            return
        answer = server.answer(json.loads(line))
        if os.getpid() != own_pid:  # the user's code forked, and this is the child
            os._exit(0)
        answers.write(answer + b"\n")
        answers.flush()


class Server:
    def __init__(self):
        self.environment: Adapter | None = None
        self.kept, self.largest = frozenset(), 2**20

    def answer(self, request):
        """One line."""
        try:
            content = json_line({"ok": self._do(**request)}, self.environment)
            if len(content) > self.largest:
                what = f"gave {len(content)} bytes, but an answer may have {self.largest}"
                raise self._environment().unusable(request["do"], what)
        except Failure as error:
            content = json_line({"error": {"kind": error.kind, "message": str(error)}})
        except BaseException as error:  # the user's code may raise anything, or call exit()
            content = json_line({"error": {"kind": "raised", "message": describe(error)}})
        return content

    def _do(self, do, **arguments):
        if do == "start":
            self.largest = arguments.pop("largest_answer")
            # Writes the current lines on request, even from code that is not Python's.
            faulthandler.register(signal.SIGUSR1, file=arguments.pop("trace"), all_threads=False)
            self.environment = environment = make_environment(**arguments)
            self.kept = frozenset(descendants())
            return {"tools": environment.tools}
        environment = self._environment()
        if do == "reset":
            messages = environment.reset(arguments["problem"])
            return {"messages": messages, "tools": environment.tools}
        if do == "step":
            return environment.step(arguments["message"])
        if do == "end":
            end_descendants(self.kept)
            return {}
        return environment.close() or {}

    def _environment(self) -> Adapter:
        assert self.environment is not None, "start comes first"
        return self.environment


def json_line(content, environment=None):
    """Raises Failure, with the place of the environment's class."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        place = f" ({place_of(environment.made)})" if environment is not None else ""
        raise Failure("unusable", f"an answer is no JSON: {error}{place}") from error


# -------------------------------------------------------------------------------------------------------
# environments


def make_environment(environment, interface, options, path):
    """path: sys.path of Tandem, for its own Python; None: this Python's own, and then the current folder."""
    if sys.version_info < OLDEST_PYTHON:
        raise Failure("start", f"environment.python is Python {sys.version.split()[0]}; use 3.9 or newer")
    if path is not None:
        sys.path[:] = path
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's file must not shadow an installed module
    importlib.invalidate_caches()
    module_name, _, name = environment.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise Failure(
                "start",
                f"there is no module {module_name!r} in {os.getcwd()} or among those of {sys.executable}; run from the folder "
                f"that holds {module_name.split('.')[0]}.py, or set PYTHONPATH",
            ) from error
        raise Failure(
            "start",
            f"{module_name} imports {error.name!r}, which {sys.executable} does not have; install it there",
        ) from error
    except BaseException as error:  # the import of a user's module may raise anything
        raise Failure(
            "start", f"importing {module_name} raised {describe(error)}; correct the module"
        ) from error
    make = getattr(module, name, None)
    if not callable(make):
        raise Failure("start", f"{module_name} has no class {name!r}; define it, or correct the name")
    try:
        made = make(**options)
    except BaseException as error:
        raise Failure(
            "start",
            f"{name} cannot be made with options {options}: {describe(error)}; correct environment.options",
        ) from error
    try:
        return INTERFACES[interface](made)
    except Failure as error:
        raise Failure("start", f"{name}: {error}") from error


class Adapter:
    """What all interfaces share."""

    needs: tuple[str, ...] = ("reset",)

    def __init__(self, made):
        self.made, self._loop = made, asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        for name in self.needs:
            if not callable(getattr(made, name, None)):
                raise Failure("start", f"it has no method {name} ({place_of(type(made))})")
        self.tools = []

    def reset(self, problem):
        """The first messages."""
        raise NotImplementedError

    def step(self, message):
        """See ``answered``."""
        raise NotImplementedError

    def close(self):
        close = getattr(self.made, "close", None)
        if callable(close):
            self.call(close)

    def call(self, function, *arguments, **named):
        """Call a function of the user's, async or not."""
        returned = function(*arguments, **named)
        return (
            self._loop.run_until_complete(_awaited(returned)) if inspect.isawaitable(returned) else returned
        )

    def reset_with(self, problem):
        """reset() with those fields of the row and the problem that it has parameters for."""
        fields = {key: value for key, value in problem.items() if key != "row"}
        fields.update(problem.get("row") or {})
        parameters = inspect.signature(self.made.reset).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return self.call(self.made.reset, **fields)
        missing = [p.name for p in parameters if is_required(p) and p.name not in fields]
        if missing:
            raise self.unusable(
                "reset",
                f"has a parameter {missing[0]!r}, but the problem has only {', '.join(sorted(fields))}",
            )
        return self.call(self.made.reset, **{p.name: fields[p.name] for p in parameters if p.name in fields})

    def unusable(self, method, what, kind="unusable"):
        function = getattr(self.made, method, self.made)
        return Failure(kind, f"{method} {what} ({place_of(function)})")

    def answered(self, messages, reward=None, done=False, parts=None, calls=0, errors=0):
        return {
            "messages": messages,
            "reward": reward,
            "done": done,
            "parts": parts or {},
            "tool_calls": calls,
            "tool_errors": errors,
        }

    def messages_of(self, method, messages):
        if not isinstance(messages, list) or not all(is_message(message) for message in messages):
            wanted = 'a list of {"role": ..., "content": text}'
            raise self.unusable(method, f"returned {short(messages)} as messages; return {wanted}")
        return messages

    def truth_of(self, value, name):
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # of numpy
            return bool(value)
        raise self.unusable("step", f"returned {short(value)} as {name}; return True or False")

    def number_of(self, value, name, method="step"):
        if not isinstance(value, Real):
            raise self.unusable(method, f"returned {short(value)} as {name}; return a number", "reward")
        if not math.isfinite(value):
            raise self.unusable(method, f"returned {float(value)} as {name}, which is not finite", "reward")
        return float(value)

    def parts_of(self, parts):
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
            raise self.unusable(
                "step", f"returned {short(parts)} as parts; return {{name: number}}", "reward"
            )
        return {name: self.number_of(value, f"part {name!r}") for name, value in parts.items()}

    def run_tools(self, message, functions):
        """The answers to the calls of a message. -> (messages, number of errors)"""
        messages, errors = [], 0
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            content, failed = self._run_tool(functions, name, arguments)
            errors += failed
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        return messages, errors

    def _run_tool(self, functions, name, arguments):
        function = functions.get(name)
        if function is None:
            return f"Error: there is no tool {name!r}; the tools are {', '.join(sorted(functions))}", True
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} are no object of JSON: {short(arguments)}", True
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"Error: {name}: {error}", True
        try:
            returned = self.call(function, **arguments)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return f"Error: {error_text(error)}", True
        if isinstance(returned, str):
            return returned, False
        try:
            return json.dumps(returned, ensure_ascii=False), False
        except (TypeError, ValueError) as error:
            raise Failure(
                "unusable", f"tool {name} returned {short(returned)}: {error} ({place_of(function)})"
            ) from error


class Chat(Adapter):
    """``reset(problem) -> messages``, ``step(message) -> (messages, reward, done[, parts])``, ``tools``."""

    needs = ("reset", "step")

    def __init__(self, made):
        super().__init__(made)
        self._find_tools()

    def _find_tools(self):
        tools = getattr(self.made, "tools", None) or []
        if not isinstance(tools, (list, tuple)):
            raise Failure(
                "start", f"tools is {short(tools)}; make it a list of functions, or of JSON schemas"
            )
        written = [tool for tool in tools if isinstance(tool, dict)]
        if written and len(written) < len(tools):
            raise Failure("start", "tools has functions and JSON schemas; give it one kind")
        self._functions = {} if written else {tool.__name__: tool for tool in tools}
        self.tools = written or [schema_of(tool) for tool in tools]

    def reset(self, problem):
        messages = self.messages_of("reset", self.call(self.made.reset, problem))
        if not messages:
            raise self.unusable("reset", "returned no messages; return one at least")
        self._find_tools()  # reset may have chosen them
        return messages

    def step(self, message):
        if message.get("tool_calls") and self._functions:
            messages, errors = self.run_tools(message, self._functions)
            return self.answered(messages, calls=len(messages), errors=errors)
        returned = self.call(self.made.step, message)
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise self.unusable("step", f"returned {short(returned)}; return (messages, reward, done)")
        messages, reward, done, *parts = returned
        done = self.truth_of(done, "done")
        messages = self.messages_of("step", messages)
        if not messages and not done:
            raise self.unusable(
                "step", "returned no messages, and done is False; the policy has nothing to answer"
            )
        reward = None if reward is None else self.number_of(reward, "reward")
        calls = len(message.get("tool_calls") or ())
        return self.answered(messages, reward, done, self.parts_of(*parts) if parts else {}, calls=calls)


class Text(Adapter):
    """``reset(...) -> text or (text, info)``; ``step(text)`` -> 4 or 5 values, as of gym and gymnasium."""

    needs = ("reset", "step")

    def reset(self, problem):
        returned = self.reset_with(problem)
        text = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
        if not isinstance(text, str):
            raise self.unusable("reset", f"returned {short(returned)}; return a text, or (text, info)")
        return [{"role": "user", "content": text}]

    def step(self, message):
        returned = self.call(self.made.step, message["content"])
        if not isinstance(returned, tuple) or len(returned) not in (4, 5):
            wanted = "(text, reward, done, info), or (text, reward, terminated, truncated, info)"
            raise self.unusable("step", f"returned {short(returned)}; return {wanted}")
        text, reward, *ends, info = returned
        done = any([self.truth_of(end, "done") for end in ends])
        if not isinstance(text, str) and not (done and text is None):
            raise self.unusable("step", f"returned {short(text)} as its observation; return a text")
        if not isinstance(info, dict):
            raise self.unusable("step", f"returned {short(info)} as info; return a dict")
        messages = [] if text is None else [{"role": "user", "content": text}]
        return self.answered(
            messages, self.number_of(reward, "reward"), done, self.parts_of(info.get(PARTS, {}))
        )


class Tools(Adapter):
    """``reset(...) -> text or None``; every other public method is a tool; ``reward``, a number or a method."""

    def __init__(self, made):
        super().__init__(made)
        own = ("reset", "close", "reward")
        names = [name for name in dir(type(made)) if not name.startswith("_") and name not in own]
        static = {name: inspect.getattr_static(type(made), name) for name in names}
        plain = (types.FunctionType, staticmethod, classmethod)
        self._functions = {name: getattr(made, name) for name in names if isinstance(static[name], plain)}
        if not self._functions:
            raise Failure("start", f"it has no public method, so no tool ({place_of(type(made))})")
        self.tools = [schema_of(function, name) for name, function in self._functions.items()]

    def reset(self, problem):
        text = self.reset_with(problem)
        if text is not None and not isinstance(text, str):
            raise self.unusable("reset", f"returned {short(text)}; return a text or None")
        messages = [dict(message) for message in problem["messages"]]
        if text:
            first = next((message for message in messages if message["role"] == "user"), None)
            if first is None:
                raise self.unusable("reset", "returned a text, but the problem has no message of the user")
            first["content"] += text
        return messages

    def step(self, message):
        if message.get("tool_calls"):
            messages, errors = self.run_tools(message, self._functions)
            return self.answered(messages, calls=len(messages), errors=errors)
        reward = getattr(self.made, "reward", None)
        reward = self.call(reward) if callable(reward) else reward
        reward = None if reward is None else self.number_of(reward, "reward", "reward")
        return self.answered([], reward, True)


class Tokens(Adapter):
    """An environment of tokens, which is made here to see that it can be; it runs elsewhere."""

    needs = ("run",)


INTERFACES = {"chat": Chat, "text": Text, "tools": Tools, "tokens": Tokens}


async def _awaited(returned):
    return await returned


def is_message(message):
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def is_required(parameter):
    named = (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return parameter.kind in named and parameter.default is parameter.empty


# -------------------------------------------------------------------------------------------------------
# JSON schemas of functions


def schema_of(function, name=None):
    """The schema of a tool, in OpenAI's form: from the types of the parameters, and from a docstring in Google's or
    Sphinx' style. Raises Failure where a parameter has no type, or there is no docstring."""
    if not callable(function):
        raise Failure("start", f"tool {short(function)} is no function")
    name = name or function.__name__
    text = inspect.getdoc(function)
    if not text:
        raise Failure(
            "start",
            f"tool {name} has no docstring, which tells the model what it does ({place_of(function)})",
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # an annotation may be any expression
        raise Failure(
            "start", f"the types of tool {name} cannot be read: {error_text(error)} ({place_of(function)})"
        ) from error
    properties, required, about = {}, [], parameter_texts(text)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Failure(
                "start",
                f"tool {name} takes {parameter}; a model gives arguments by name ({place_of(function)})",
            )
        if parameter.name not in hints:
            raise Failure(
                "start", f"parameter {parameter.name!r} of tool {name} has no type ({place_of(function)})"
            )
        properties[parameter.name] = schema_of_type(hints[parameter.name], name, function)
        if parameter.name in about:
            properties[parameter.name]["description"] = about[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    summary = _SECTION.split(text)[0].strip()
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


_SECTION = re.compile(
    r"^(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$|^:(?:param|returns?|raises)\b",
    re.MULTILINE,
)
_ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)*)", re.MULTILINE)
_GOOGLE = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_SPHINX = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)


def parameter_texts(docstring):
    """{name: description} of the parameters."""
    found = list(_SPHINX.findall(docstring))
    block = _ARGUMENTS.search(docstring)
    if block:
        found += _GOOGLE.findall(inspect.cleandoc("\n" + block[1]))
    return {name: " ".join(text.split()) for name, text in found}


_SIMPLE = {
    str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", tuple: "array",
    type(None): "null",
}  # fmt: skip
_ARRAYS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_OBJECTS = (dict, collections.abc.Mapping)
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))


def schema_of_type(hint, tool, function):
    if hint is typing.Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        kinds = {_SIMPLE.get(type(value)) for value in arguments}
        kind = kinds.pop() if len(kinds) == 1 else None
        return {"type": kind, "enum": list(arguments)} if kind else {"enum": list(arguments)}
    if origin in _UNIONS:
        return {"anyOf": [schema_of_type(one, tool, function) for one in arguments]}
    if origin in _ARRAYS:
        items = [one for one in arguments if one is not Ellipsis]
        return {
            "type": "array",
            "items": schema_of_type(items[0], tool, function) if len(set(items)) == 1 else {},
        }
    if origin in _OBJECTS:
        return {"type": "object", "additionalProperties": schema_of_type(arguments[1], tool, function)}
    raise Failure(
        "start",
        f"tool {tool} has a parameter of type {hint}, which has no JSON schema here; use str, int, float, bool, list, dict, "
        f"Literal or a union of them ({place_of(function)})",
    )


# -------------------------------------------------------------------------------------------------------
# messages, as of rollout/rewards/function.py


def error_text(error):
    """``KeyError: 'x'``, in one line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…"


def describe(error):
    """``KeyError: 'x' (env.py:12 in step)``: the exception, and the innermost line of the user's code."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [(code, number) for code, number in lines if code.co_filename != __file__]
    if isinstance(error, SyntaxError) or not lines:
        return error_text(error)
    code, number = ([line for line in lines if not is_library(line[0].co_filename)] or lines)[-1]
    return f"{error_text(error)} ({os.path.basename(code.co_filename)}:{number} in {code.co_name})"


def is_library(file):
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names)
    return file.startswith("<") or os.path.realpath(file).startswith(folders)


def place_of(thing):
    """``env.py:12 in step``: the definition of a function or a class, or the class of an object."""
    if not callable(thing) or not (inspect.isroutine(thing) or inspect.isclass(thing)):
        thing = type(thing)
    thing = inspect.unwrap(thing)
    try:
        file, line = inspect.getfile(thing), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):  # not written in Python
        return str(getattr(thing, "__module__", "?"))
    return f"{os.path.basename(file)}:{line} in {thing.__name__}"


def short(value):
    has_content = isinstance(value, (str, dict, tuple, list, bool, type(None)))
    return f"{type(value).__name__} {value!r:.60}" if has_content else f"{type(value)}"


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names a user's module may have too
    main(sys.argv[1:])
