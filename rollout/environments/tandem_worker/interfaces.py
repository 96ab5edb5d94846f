"""Environments by their interface. The user's code runs here."""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
import math
import sys
import types
from numbers import Real

from .failures import Failure, describe, error_text, place_of, readable, short
from .imports import imported
from .tool_schemas import schema_of

OLDEST_PYTHON = (3, 9)
PARTS = "parts"
"""Key of the parts of the reward in the ``info`` of a text environment."""


def make_environment(environment, interface, options, path):
    """path: Tandem's sys.path, if this is its Python. None: keep this Python's own; the current folder is added."""
    if sys.version_info < OLDEST_PYTHON:
        raise Failure(f"environment.python is Python {sys.version.split()[0]}; use 3.9 or newer")
    if path is not None:
        sys.path[:] = path
    module_name, _, name = environment.partition(":")
    module = imported(module_name, f"those of {sys.executable}", f"{sys.executable} does not have")
    make = getattr(module, name, None)
    if not callable(make):
        raise Failure(f"{module_name} has no class {name!r}; define it, or correct the name")
    try:
        made = make(**options)
    except BaseException as error:
        raise Failure(
            f"{name} cannot be made with options {options}: {describe(error)}; correct environment.options"
        ) from error
    try:
        return INTERFACES[interface](made)
    except Failure as error:
        raise Failure(f"{name}: {error}") from error


class Adapter:
    """What all interfaces share."""

    needs: tuple[str, ...] = ("reset",)

    def __init__(self, made):
        self.made, self._loop = made, asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        for name in self.needs:
            if not callable(getattr(made, name, None)):
                raise Failure(f"it has no method {name} ({place_of(type(made))}); define it")
        self.tools = []

    def close(self):
        close = getattr(self.made, "close", None)
        if callable(close):
            self.call(close)

    def call(self, function, *arguments, **named):
        """Call the user's function, async or not."""
        returned = function(*arguments, **named)
        return (
            self._loop.run_until_complete(_awaited(returned)) if inspect.isawaitable(returned) else returned
        )

    def unusable(self, method, what, kind="unusable"):
        function = getattr(self.made, method, self.made)
        return Failure(f"{method} {what} ({place_of(function)})", kind)


class MessageAdapter(Adapter, abc.ABC):
    """An environment that is played here, in messages."""

    @abc.abstractmethod
    def reset(self, problem):
        """The first messages."""

    @abc.abstractmethod
    def step(self, message):
        """The fields of ``processes.Stepped``."""

    def reset_with(self, problem):
        """Call reset() with the fields of the problem and its row that it has parameters for."""
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

    def messages_of(self, method, messages):
        if not isinstance(messages, list) or not all(is_message(message) for message in messages):
            wanted = 'a list of {"role": ..., "content": text}'
            raise self.unusable(method, f"returned {short(messages)} as messages; return {wanted}")
        return messages

    def is_done(self, value):
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # of numpy
            return bool(value)
        raise self.unusable("step", f"returned {short(value)} as done; return True or False")

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
        """The answers to the calls of a message, as ``step`` gives them."""
        messages, errors = [], 0
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            content, failed = self._run_tool(functions, name, arguments)
            errors += failed
            answer = {"role": "tool", "tool_call_id": call["id"], "name": readable(name)}
            messages.append({**answer, "content": readable(content)})
        return {"messages": messages, "tool_calls": len(messages), "tool_errors": errors}

    def _run_tool(self, functions, name, arguments):
        function = functions.get(name)
        if function is None:
            return f"Error: there is no tool {name!r}; the tools are {', '.join(sorted(functions))}", True
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} are not a JSON object: {short(arguments)}", True
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
                f"tool {name} returned {short(returned)}: {error} ({place_of(function)})", "unusable"
            ) from error


class Chat(MessageAdapter):
    """``reset(problem) -> messages``, ``step(message) -> (messages, reward, done[, parts])``, ``tools``."""

    needs = ("reset", "step")

    def __init__(self, made):
        super().__init__(made)
        self._find_tools()

    def _find_tools(self):
        tools = getattr(self.made, "tools", None) or []
        if not isinstance(tools, (list, tuple)):
            raise Failure(f"tools is {short(tools)}; make it a list of functions, or of JSON schemas")
        written = [tool for tool in tools if isinstance(tool, dict)]
        if written and len(written) < len(tools):
            raise Failure("tools mixes functions and JSON schemas; give it one kind")
        for tool in written:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                wanted = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise Failure(f"tools has {short(tool)}; write it as {wanted}")
        self.tools = written or [schema_of(tool) for tool in tools]
        self._functions = {} if written else {tool.__name__: tool for tool in tools}

    def reset(self, problem):
        messages = self.messages_of("reset", self.call(self.made.reset, problem))
        if not messages:
            raise self.unusable("reset", "returned no messages; return at least one")
        self._find_tools()  # reset may have chosen them
        return messages

    def step(self, message):
        if message.get("tool_calls") and self._functions:
            return self.run_tools(message, self._functions)
        returned = self.call(self.made.step, message)
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise self.unusable("step", f"returned {short(returned)}; return (messages, reward, done)")
        messages, reward, done, *parts = returned
        done = self.is_done(done)
        messages = self.messages_of("step", messages)
        if not messages and not done:
            raise self.unusable(
                "step", "returned no messages, and done is False, so the policy has nothing to answer"
            )
        reward = None if reward is None else self.number_of(reward, "reward")
        parts, calls = self.parts_of(*parts) if parts else {}, len(message.get("tool_calls") or ())
        return {"messages": messages, "reward": reward, "done": done, "parts": parts, "tool_calls": calls}


class Text(MessageAdapter):
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
        done = any([self.is_done(end) for end in ends])
        if not isinstance(text, str) and not (done and text is None):
            raise self.unusable("step", f"returned {short(text)} as its observation; return a text")
        if not isinstance(info, dict):
            raise self.unusable("step", f"returned {short(info)} as info; return a dict")
        messages = [] if text is None else [{"role": "user", "content": text}]
        reward, parts = self.number_of(reward, "reward"), self.parts_of(info.get(PARTS, {}))
        return {"messages": messages, "reward": reward, "done": done, "parts": parts}


class Tools(MessageAdapter):
    """``reset(...) -> text or None``; every other public method is a tool; ``reward``, a number or a method."""

    def __init__(self, made):
        super().__init__(made)
        own = ("reset", "close", "reward")
        names = [name for name in dir(type(made)) if not name.startswith("_") and name not in own]
        static = {name: inspect.getattr_static(type(made), name) for name in names}
        plain = (types.FunctionType, staticmethod, classmethod)
        self._functions = {name: getattr(made, name) for name in names if isinstance(static[name], plain)}
        if not self._functions:
            raise Failure(f"it has no public method, so no tool ({place_of(type(made))}); define one")
        self.tools = [schema_of(function, name) for name, function in self._functions.items()]

    def reset(self, problem):
        text = self.reset_with(problem)
        if text is not None and not isinstance(text, str):
            raise self.unusable("reset", f"returned {short(text)}; return a text or None")
        messages = [dict(message) for message in problem["messages"]]
        if text:
            last = next((message for message in messages[::-1] if message["role"] == "user"), None)
            if last is None:
                raise self.unusable("reset", "returned a text, but the problem has no message of the user")
            last["content"] += text
        return messages

    def step(self, message):
        if message.get("tool_calls"):
            return self.run_tools(message, self._functions)
        reward = getattr(self.made, "reward", None)
        reward = self.call(reward) if callable(reward) else reward
        reward = None if reward is None else self.number_of(reward, "reward", "reward")
        return {"messages": [], "reward": reward, "done": True}


class Tokens(Adapter):
    """An environment of tokens. It is made here only as a check; it runs elsewhere."""

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
