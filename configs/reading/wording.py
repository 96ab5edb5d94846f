"""Pydantic's errors as problems: the line that set the field, its value, what is wrong in plain words, and
what to write instead."""

import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.errors import NOT_SET, Contradiction, Contradictions, Problem, did_you_mean, dotted
from configs.other_systems.fields import OTHER_FIELDS
from configs.other_systems.verl import fix_for_foreign_key
from configs.reading.schema_shape import Shape
from configs.reading.shorthands import SHORTHANDS
from configs.reading.yaml_values import Value, is_number_or_bool, show
from configs.schema.base import Schema
from configs.schema.run import RunConfig

_WRONG_TYPE = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "path": "must be a path, as text",
    "model": "must be a block of keys",
    "dict": "must be a block of keys",
    "tuple": "must be a list",
    "list": "must be a list",
}
"""By the first word of pydantic's error type."""
_PLAIN_TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_COMPARISONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def problems_of(error: ValidationError, tree: Value, root: Shape) -> Iterator[Problem]:
    """``tree`` is what was validated, with its lines; ``root`` the schema class that it was validated
    against."""
    seen: set[tuple] = set()
    for details in error.errors(include_url=False):
        if (
            details["type"] == "default_factory_not_called"
        ):  # a default that follows from a field that is wrong itself
            continue
        path, shape, parent = _locate(root, details["loc"])
        if details["type"] == "missing" and isinstance(path[-1], int):  # an item of a list of so many
            path, shape = path[:-1], parent
        if details["type"] == "value_error":
            error = details["ctx"]["error"]
            for found in error.found if isinstance(error, Contradictions) else [error]:
                yield _contradiction(found, path, shape, tree)
        elif path not in seen or details["type"].startswith(
            "union"
        ):  # a plain union gives one error per member
            seen.add(path)
            yield _translate(details, path, shape, parent, tree, root)


def _locate(root: Shape, loc: Sequence[str | int]) -> tuple[tuple, Shape, Shape]:
    """Pydantic's location without the tags and labels that it inserts for unions; the shape there, and of its
    parent."""
    path: list[Hashable] = []
    shape = parent = root
    for part in loc:
        if shape.tag_key:
            shape = shape.pick(part)
        elif shape.models or shape.item is not None:
            path.append(part)
            parent, shape = shape, shape.child(part)
        else:
            break
    return tuple(path), shape, parent


def _translate(
    details: ErrorDetails, path: tuple, shape: Shape, parent: Shape, tree: Value, root: Shape
) -> Problem:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        path = (*path, shape.tag_key)
    found = tree.at(path)
    value = NOT_SET if found is None else show(found.plain())
    match kind:
        case "extra_forbidden":
            known = [*parent.names(), *(SHORTHANDS if path[:-1] == ("correction",) else ())]
            error, fix = (
                "unknown key",
                did_you_mean(str(path[-1]), known, "keys here", _elsewhere(path, root)),
            )
            fix = fix_for_foreign_key(str(path[-1])) or _by_another_name(str(path[-1]), root) or fix
            if "." in str(path[-1]):
                fix = f"dots are for the command line; in YAML write {_nested(str(path[-1]), found)}"
            elif ":" in str(path[-1]) and value == "null":
                fix = f"write a blank after the colon: `{str(path[-1]).replace(':', ': ', 1)}`"
        case "missing" | "too_long" if shape.length:
            error, fix = (
                f"must be a list of {shape.length} values",
                f"correct the value{_default_note(shape)}",
            )
        case "missing":
            error, fix = "required, but not set", f"add `{dotted(path)}`{_described(shape)}"
        case "union_tag_not_found":
            error, fix = (
                "does not say which variant the block is",
                f"set it to one of: {', '.join(shape.tags)}",
            )
        case "union_tag_invalid":
            error, fix = (
                "unknown variant",
                did_you_mean(str(context.get("tag")), list(shape.tags), "variants"),
            )
        case "literal_error":
            wanted = found.plain() if found is not None else ""
            error, fix = (
                "not one of the choices",
                did_you_mean(str(wanted), [str(choice) for choice in shape.choices], "choices"),
            )
        case _:
            error, fix = (
                _wrong(kind, details["msg"], shape),
                _fix_value(kind, context, path, shape, parent, found),
            )
    return Problem(where=tree.where_of(path), field=dotted(path), value=value, error=error, fix=fix)


# -------------------------------------------------------------------------------------------------------------
# single fields


def _wrong(kind: str, message: str, shape: Shape) -> str:
    union = [
        _PLAIN_TYPES[member]
        for member in shape.members
        if isinstance(member, type) and member in _PLAIN_TYPES
    ]
    if kind.endswith(("_type", "_parsing", "_from_float")):
        union += [f"`{choice}`" for choice in shape.choices]
    if len(union) > 1:
        return f"must be {', '.join(union[:-1])} or {union[-1]}"
    if kind == "too_short":
        return "must not be empty"
    stem = kind.split("_")[0]
    if kind.endswith(("_type", "_parsing", "_from_float")) and stem in _WRONG_TYPE:
        return _WRONG_TYPE[stem]
    return (
        message.replace("Input should", "must")
        .replace("String should", "must")
        .replace("must be a valid", "must be a")
    )


def _fix_value(
    kind: str, context: dict, path: tuple, shape: Shape, parent: Shape, found: Value | None
) -> str:
    data = None if found is None else found.data
    name, default = dotted(path), _default_note(shape)
    bounds = [f"{words} {context[key]}" for key, words in _COMPARISONS.items() if key in context]
    if bounds:
        return f"use a value {' and '.join(bounds)}{default}"
    if "pattern" in context:
        return f"use text that matches {context['pattern']}{default}"
    if isinstance(data, str) and kind.startswith(("int", "float", "bool")) and is_number_or_bool(data):
        return f"write it without quotes: `{name}: {data}`"
    if isinstance(data, float) and kind.startswith("int") and data.is_integer():
        return f"write `{name}: {int(data)}`"
    if kind == "too_short":
        return f"give one or more{_described(shape)}"
    if (
        kind.startswith(("string", "path"))
        and isinstance(data, int | float)
        and parent.takes(path[-1], show(data))
    ):
        return f'put it in quotes: `{name}: "{show(data)}"`'
    if kind.startswith(("tuple", "list")) and data is not None and not shape.length:
        return f"write a list: `{name}: {show([found.plain()])}`"
    if kind.startswith(("model", "dict")) and data is None:
        return f"give it keys, or remove `{name}:`"
    if shape.models and isinstance(data, str) and re.match(r"\w+:", data):
        return f"quote the override, since the shell takes braces apart: '{name}={{{data.replace(':', ': ', 1)}, ...}}'"
    if shape.models:
        return f"give a block with keys of: {', '.join(shape.names())}"
    return f"correct the value{default or _described(shape)}"


def _nested(key: str, value: Value | None) -> str:
    plain = None if value is None else value.plain()
    for part in reversed(key.split(".")):
        plain = {part: plain}
    return f"`{show(plain)[1:-1]}`"


def _described(shape: Shape) -> str:
    text = shape.field.description if shape.field else None
    if text:
        first_sentence = re.split(r"(?<=[a-z`)])\.(?=\s+[A-Z])", text, maxsplit=1)[0]
        return f": {' '.join(first_sentence.replace('``', '`').split())}"
    return f" with one `{shape.tag_key}` of: {', '.join(shape.tags)}" if shape.tag_key else ""


def _default_note(shape: Shape) -> str:
    return "" if shape.models or shape.default == NOT_SET else f" (default: {show(shape.default)})"


def _by_another_name(key: str, root: Shape) -> str | None:
    """What a field of another system is here; the names are those of training by RL."""
    known = OTHER_FIELDS.get(key) if RunConfig in root.models else None
    return f"here it is {known}" if known else None


def _elsewhere(path: tuple, root: Shape) -> str | None:
    """Where else in the schema a key of this name exists: in another variant of its block, or at other
    places."""
    block = root
    for part in path[:-1]:
        block = block.child(part)
    tags = (
        [tag for tag, model in block.tags.items() if path[-1] in model.model_fields] if block.tag_key else []
    )
    if tags:
        return f"it goes with `{dotted((*path[:-1], block.tag_key))}` of: {', '.join(tags)}"
    places = [place for place in _all_paths(root, ()) if place[-1] == path[-1]]
    return f"it exists as {' and '.join(f'`{dotted(p)}`' for p in places)}" if places else None


def _all_paths(shape: Shape, prefix: tuple) -> Iterator[tuple]:
    for key in shape.names():
        yield (*prefix, key)
        yield from _all_paths(shape.child(key), (*prefix, key))


# ------------------------------------------------------------------------------------------- fields that
# contradict each other


def problem_of(said: str, field: str, tree: Value, root: Shape) -> Problem:
    """What a check beyond the schema found, "what is wrong; fix": of the fields that the text names, such as
    ``layout.tp``, or else of ``field``."""
    named = [tuple(name.split(".")) for name in dict.fromkeys(re.findall(r"[a-z_]\w*(?:\.[a-z_]\w*)+", said))]
    paths = [path for path in named if _is_leaf(root, path, tree)] or [tuple(field.split("."))]
    return _of_fields(said, paths, (), root, tree)


def _contradiction(found: ValueError, block: tuple, shape: Shape, tree: Value) -> Problem:
    """What a validator of ours found wrong with fields of ``block``, each with its value and place, or with
    ``block`` itself."""
    fields = found.fields if isinstance(found, Contradiction) else ()
    paths = [(*block, *field.split(".")) for field in fields] or [block]
    return _of_fields(found, paths, block, shape.variant(tree.at(block)) if fields else shape, tree)


def _of_fields(
    found: ValueError | str, paths: Sequence[tuple], block: tuple, shape: Shape, tree: Value
) -> Problem:
    """``paths`` are of the whole config; ``shape`` is that of ``block``, in which they are."""
    if not isinstance(found, Contradiction):
        error, _, fix = str(found).rpartition("; ")
        found = Contradiction((), error, fix) if error else Contradiction((), fix)
    values, places = [], []
    for path in paths:
        given = tree.at(path)
        shown = (
            f"{_default_of(shape, path[len(block) :])} (default)"
            if given is None
            else f"{show(given.plain())} ({given.where})"
        )
        values.append(shown if len(paths) == 1 else f"{dotted(path)}: {shown}")
        places += [] if given is None else [given.where]
    fields = ", ".join(map(dotted, paths))
    otherwise = (
        f"change or remove one of: {fields}" if len(paths) > 1 else f"correct {fields or 'the config'}"
    )
    return Problem(
        where=", ".join(dict.fromkeys(places)) or tree.where_of(block),
        field=fields or "(the whole config)",
        value=", ".join(values),
        error=found.error,
        fix=found.fix or otherwise,
    )


def _is_leaf(shape: Shape, path: tuple[str, ...], block: Value | None) -> bool:
    for part in path:
        is_named_item = (
            isinstance(block and block.data, dict)
            and part in block.data
            and not shape.models
            and shape.item is not None
        )
        if part not in shape.names() and not is_named_item:
            return False
        block = block.at([part]) if block is not None else None
        shape = shape.child(part).variant(block)
    return not shape.models


def _default_of(shape: Shape, path: tuple) -> str:
    value: Any = None
    for part in path:
        shape = shape.child(part)
        value = getattr(value, part, NOT_SET) if isinstance(value, Schema) else shape.default
    return show(value)
