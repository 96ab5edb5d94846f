"""JSON schemas of functions."""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing

from .failures import Failure, error_text, place_of, short


def schema_of(function, name=None):
    """The schema of a tool, in OpenAI's form: from the types of the parameters, and from a docstring in Google's or
    Sphinx' style. Raises Failure if a parameter has no type, or there is no docstring."""
    name = name or getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise Failure(f"tool {short(function)} is not a function with a name; define one")
    text = inspect.getdoc(function)
    if not text:
        raise Failure(
            f"tool {name} has no docstring, which tells the model what it does ({place_of(function)})"
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # an annotation may be any expression
        raise Failure(
            f"the types of tool {name} cannot be read: {error_text(error)} ({place_of(function)})"
        ) from error
    properties, required, about = {}, [], parameter_texts(text)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Failure(
                f"tool {name} takes {parameter}; a model gives arguments by name ({place_of(function)})"
            )
        if parameter.name not in hints:
            raise Failure(f"parameter {parameter.name!r} of tool {name} has no type ({place_of(function)})")
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
    if origin in _OBJECTS and not arguments:
        return {"type": "object"}
    if origin in _OBJECTS:
        return {"type": "object", "additionalProperties": schema_of_type(arguments[1], tool, function)}
    raise Failure(
        f"tool {tool} has a parameter of type {hint}, which has no JSON schema here; use str, int, float, bool, list, dict, "
        f"Literal or a union of them ({place_of(function)})",
    )
