"""Turns pydantic's errors into problems: the line that set the field, its value, the error in plain language,
and the fix."""

import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.errors import (
    COMMAND_LINE,
    NOT_SET,
    Contradiction,
    Contradictions,
    Problem,
    did_you_mean,
    dotted,
    exists_as,
)
from configs.other_systems.answers import answer
from configs.other_systems.values import adapter_target, algorithm
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
"""The keys are the first words of pydantic's error types."""
_PLAIN_TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_COMPARISONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, `.`, `_` and `-`, the first a letter or a digit",
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "letters, digits, `_` and `-`, the first a letter or a digit",
    r"^[A-Za-z0-9_.-]+$": "letters, digits, `.`, `_` and `-`",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "letters, digits and `_`, the first no digit",
    r"^\d+[KMGT]?$": "a number and perhaps a unit, such as `500G`",
    r"^\S+$": "text without blanks",
    r"^/\S+$": "an absolute path without blanks",
    r"^[^:]+:[^:]+$": "of the form module:name, such as my_module:my_name",
    r"^[A-Za-z0-9._,:@+/-]+$": "a name, or several with commas between, of letters, digits and ._:@+/- only",
    r"^--[a-z][a-z-]*(=[A-Za-z0-9._,:@+/=*\[\]()&|-]+)?$": "--name or --name=value, without spaces and quotes",
    r"^([0-9]{1,3}(:[0-5][0-9]){2}|[0-9]+-([01]?[0-9]|2[0-3])(:[0-5][0-9]){0,2})$":  # as Slurm reads it
    "hours:minutes:seconds, such as 12:00:00, or days-hours, such as 2-12",
}
"""Descriptions of the schema's patterns."""


def problems_of(error: ValidationError, tree: Value, root: Shape) -> Iterator[Problem]:
    """``tree``: the values that were validated, with their lines. ``root``: the schema that they were validated
    against."""
    seen: set[tuple] = set()
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":  # this default depends on another wrong field
            continue
        path, shape, parent = _locate(root, details["loc"])
        if details["type"] == "missing" and isinstance(path[-1], int):  # an item of a list of fixed length
            path, shape = path[:-1], parent
        if details["type"] == "value_error":
            error = details["ctx"]["error"]
            for one in error.contradictions if isinstance(error, Contradictions) else [error]:
                yield _contradiction_problem(one, path, shape, tree)
        # A plain union gives an error per member.
        elif path not in seen or details["type"].startswith("union"):
            seen.add(path)
            yield _translate(details, path, shape, parent, tree, root)


def _locate(root: Shape, loc: Sequence[str | int]) -> tuple[tuple, Shape, Shape]:
    """(path, its shape, its parent's shape): pydantic's location without the tags and labels that it inserts
    for unions."""
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
    given = tree.at(path)
    value = NOT_SET if given is None else show(given.plain())
    match kind:
        case "extra_forbidden":
            error, fix = "unknown key", _fix_unknown_key(str(path[-1]), path, parent, root, given)
        case "missing" | "too_long" if shape.length:
            error = f"must be a list of {shape.length} values"
            fix = f"correct the value{_default_note(shape)}"
        case "missing":
            error, fix = "required, but not set", f"add `{dotted(path)}`{_description(shape)}"
        case "union_tag_not_found":
            error = "does not say which variant the block is"
            fix = f"set it to one of: {', '.join(shape.tags)}"
        case "union_tag_invalid":
            error, tag = "unknown variant", str(context.get("tag"))
            fix = algorithm(path[:-1], tag) or did_you_mean(tag, list(shape.tags), "variants")
        case "literal_error":
            error, text = "not one of the choices", str(given.plain() if given is not None else "")
            choices = [str(choice) for choice in shape.choices]
            fix = adapter_target(path, text) or did_you_mean(text, choices, "choices")
        case _ if details["loc"][-1:] == ("[key]",):
            error = f"the name {_plain_error(kind, details['msg'], context, shape)}"
            value, fix = show(path[-1]), "correct the name"
        case _:
            error = _plain_error(kind, details["msg"], context, shape)
            fix = _fix_value(kind, context, path, shape, parent, given)
    return Problem(where=tree.where_of(path), field=dotted(path), value=value, error=error, fix=fix)


# -------------------------------------------------------------------------------------------------------------
# single fields


def _plain_error(kind: str, message: str, context: dict, shape: Shape) -> str:
    is_wrong_type = kind.endswith(("_type", "_parsing", "_from_float"))
    union = [_PLAIN_TYPES[m] for m in shape.members if isinstance(m, type) and m in _PLAIN_TYPES]
    if is_wrong_type:
        union += [f"`{choice}`" for choice in shape.choices]
    if len(union) > 1:
        return f"must be {', '.join(union[:-1])} or {union[-1]}"
    if kind == "too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"must be {PATTERNS[context['pattern']]}"
    if is_wrong_type and (first_word := kind.split("_")[0]) in _WRONG_TYPE:
        return _WRONG_TYPE[first_word]
    return re.sub("(Input|String|Tuple) should", "must", message).replace("must be a valid", "must be a")


def _fix_unknown_key(key: str, path: tuple, parent: Shape, root: Shape, given: Value | None) -> str:
    if "." in key:
        return f"dots are for the command line; in YAML write {_nested_text(key, given)}"
    if ":" in key and given is not None and given.plain() is None:
        return f"write a blank after the colon: `{key.replace(':', ': ', 1)}`"
    names = parent.names()
    if (ours := key.replace("-", "_")) != key and ours in names:
        return f"did you mean `{ours}`?"
    if RunConfig in root.models:  # the tables are of training by RL
        theirs = answer(path, given.plain() if given else None, names)
        if theirs is not None:
            return theirs
    return did_you_mean(key, _keys_at(path[:-1], parent), "keys here", _other_places(path, root))


def fix_for_name(name: str, schema: type[Schema]) -> str | None:
    """The fix for a dotted name that is not a field of the schema; None if nothing is known of it."""
    path, root = tuple(name.split(".")), Shape.of(schema)
    return (answer(path, None) if schema is RunConfig else None) or _other_places(path, root)


def _fix_value(
    kind: str, context: dict, path: tuple, shape: Shape, parent: Shape, given: Value | None
) -> str:
    default = _default_note(shape)
    if bounds := [f"{words} {context[key]}" for key, words in _COMPARISONS.items() if key in context]:
        return f"use a value {' and '.join(bounds)}{default}"
    if kind == "too_short":
        return f"give one or more{_description(shape)}"
    if kind.startswith(("model", "dict")) and (given is None or given.data is None):
        return f"give it keys, or remove `{dotted(path)}:`"
    fix = None
    if given is not None:
        fix = _fix_form(kind, path, shape, parent, given) or _fix_block(path, shape, given)
    if fix is not None:
        return fix
    if shape.models:
        return f"give a block with keys of: {', '.join(shape.names())}"
    return f"correct the value{default or _description(shape)}"


def _fix_form(kind: str, path: tuple, shape: Shape, parent: Shape, given: Value) -> str | None:
    """The same value in the YAML form that this field needs."""
    name, data = dotted(path), given.data
    if isinstance(data, str) and kind.startswith(("int", "float", "bool")) and is_number_or_bool(data):
        return f"write it without quotes: `{name}: {data}`"
    if isinstance(data, float) and kind.startswith("int") and data.is_integer():
        return f"write `{name}: {int(data)}`"
    needs_text = kind.startswith(("string", "path"))
    if needs_text and isinstance(data, int | float) and parent.takes(path[-1], show(data)):
        text = f'"{given.written or show(data)}"'
        if given.where.startswith(COMMAND_LINE) and all(isinstance(part, str) for part in path):
            return f"put it in quotes that the shell leaves: '{name}={text}'"
        return f"put it in quotes: `{name}: {text}`"
    if kind.startswith(("tuple", "list")) and data is not None and not shape.length:
        return f"write a list: `{name}: {show([given.plain()])}`"
    return None


def _fix_block(path: tuple, shape: Shape, given: Value) -> str | None:
    """The block that a text or a boolean in its place stands for."""
    name, data = dotted(path), given.data
    if isinstance(data, bool):
        return _switch_text(path, data, given.where, shape)
    if not isinstance(data, str):
        return None
    if (torn := re.match(r"(\w+):", data)) and torn[1] in _keys_at(path, shape):
        return f"quote the override, since the shell takes braces apart: '{name}={{{data.replace(':', ': ', 1)}, ...}}'"
    if shape.tag_key:
        told = None if data in shape.tags else algorithm(path, data)
        return told or _variant_text(name, data, shape)
    return None


def _keys_at(path: tuple, shape: Shape) -> list[str]:
    """All keys that a block may have, with the shorthands of a correction."""
    return [*shape.names(), *(SHORTHANDS if path == ("correction",) else ())]


def _switch_text(path: tuple, wanted: bool, where: str, shape: Shape) -> str | None:
    """How to switch a block on or off that is off by default; None for any other block."""
    needs_nothing = [
        model for model in shape.models if not any(f.is_required() for f in model.model_fields.values())
    ]
    if shape.default is not None or (wanted and len(needs_nothing) != 1):
        return None
    value = "{}" if wanted else "null"
    written = f"{dotted(path)}={value}" if where.startswith(COMMAND_LINE) else f"{path[-1]}: {value}"
    keys = f", or give it keys of: {', '.join(shape.names())}" if wanted else ""
    return f"write `{written}`{keys}"


def _variant_text(name: str, text: str, shape: Shape) -> str:
    """The block of the variant that a bare text names: ``advantage: rloo``."""
    if text in shape.tags:
        return f"write `{name}: {{{shape.tag_key}: {text}}}`, or `{name}.{shape.tag_key}={text}` on the command line"
    if "function" in shape.tags and re.fullmatch(r"[\w.]+:\w+", text):
        block = f'{{{shape.tag_key}: function, function: "{text}"}}'
        return f"write `{name}: {block}`, or '{name}={block}' on the command line"
    return f"give a block, `{name}: {{{shape.tag_key}: ...}}`; {did_you_mean(text, list(shape.tags), 'variants')}"


def _nested_text(key: str, value: Value | None) -> str:
    """The dotted key as nested YAML."""
    plain = None if value is None else value.plain()
    for part in reversed(key.split(".")):
        plain = {part: plain}
    return f"`{show(plain)[1:-1]}`"


def _description(shape: Shape) -> str:
    """The first sentence of the field's docstring, or its variants."""
    text = shape.field.description if shape.field else None
    if text:
        first_sentence = re.split(r"(?<=[a-z`)])\.(?=\s+[A-Z])", text, maxsplit=1)[0]
        return f": {' '.join(first_sentence.replace('``', '`').split())}"
    return f" with one `{shape.tag_key}` of: {', '.join(shape.tags)}" if shape.tag_key else ""


def _default_note(shape: Shape) -> str:
    return "" if shape.models or shape.default == NOT_SET else f" (default: {show(shape.default)})"


def _other_places(path: tuple, root: Shape) -> str | None:
    """The other places of a key's name in the schema: other variants of its block, or else other blocks. A name
    may have dashes for underscores, as slime's have."""
    path, block = (*path[:-1], str(path[-1]).replace("-", "_")), root
    for part in path[:-1]:
        block = block.child(part)
    variants = block.tags if block.tag_key else {}
    if tags := [tag for tag, model in variants.items() if path[-1] in model.model_fields]:
        return f"it goes with `{dotted((*path[:-1], block.tag_key))}` of: {', '.join(tags)}"
    places = [dotted(place) for place in _all_paths(root, ()) if place[-1] == path[-1]]
    return exists_as(places) if places else None


def _all_paths(shape: Shape, prefix: tuple) -> Iterator[tuple]:
    for key in shape.names():
        yield (*prefix, key)
        yield from _all_paths(shape.child(key), (*prefix, key))


# -------------------------------------------------------------------------------------------------------------
# contradictions between fields


def problem_of(text: str, field: str, tree: Value, root: Shape) -> Problem:
    """The problem of a check outside the schema, whose ``text`` is "error; fix".

    Its fields are those that the text names, such as ``layout.tp``, or else ``field``.
    """
    names = dict.fromkeys(re.findall(r"[a-z_]\w*(?:\.[a-z_]\w*)+", text))
    named = [path for path in (tuple(name.split(".")) for name in names) if _is_leaf(root, path, tree)]
    return _problem_at(_split_text(text), named or [tuple(field.split("."))], (), root, tree)


def _contradiction_problem(error: ValueError, block: tuple, shape: Shape, tree: Value) -> Problem:
    """The problem of a validator's error: of the fields that it names inside ``block``, or of the block."""
    if not isinstance(error, Contradiction):
        error = _split_text(str(error))
    if not error.fields:
        return _problem_at(error, [block], block, shape, tree)
    paths = [(*block, *field.split(".")) for field in error.fields]
    return _problem_at(error, paths, block, shape.variant(tree.at(block)), tree)


def _split_text(text: str) -> Contradiction:
    error, _, fix = text.rpartition("; ")
    return Contradiction((), error, fix) if error else Contradiction((), fix)


def _problem_at(
    contradiction: Contradiction, paths: Sequence[tuple], block: tuple, shape: Shape, tree: Value
) -> Problem:
    """``paths`` start at the root; ``shape`` is that of ``block``, which holds them."""
    values, places = [], []
    for path in paths:
        given = tree.at(path)
        if given is None:
            value = f"{_default_text(shape, path[len(block) :])} (default)"
        else:
            value = f"{show(given.plain())} ({given.where})"
            places.append(given.where)
        values.append(value if len(paths) == 1 else f"{dotted(path)}: {value}")
    fields = ", ".join(map(dotted, paths))
    change = f"change or remove one of: {fields}" if len(paths) > 1 else f"correct {fields or 'the config'}"
    repeated = "|".join(re.escape(dotted(path)) for path in paths)  # the line `field` has it
    error = (
        re.sub(rf"^(?:{repeated})(?:=[^\s:]*)?: ", "", contradiction.error)
        if repeated
        else contradiction.error
    )
    return Problem(
        where=", ".join(dict.fromkeys(places)) or tree.where_of(block),
        field=fields or "(the whole config)",
        value=", ".join(values),
        error=error,
        fix=contradiction.fix or change,
    )


def _is_leaf(shape: Shape, path: tuple[str, ...], block: Value | None) -> bool:
    """Whether the path leads to a field that holds no block."""
    for part in path:
        is_mapping = shape.item is not None and not shape.models
        is_named_item = is_mapping and isinstance(block and block.data, dict) and part in block.data
        if part not in shape.names() and not is_named_item:
            return False
        block = block.at([part]) if block is not None else None
        shape = shape.child(part).variant(block)
    return not shape.models


def _default_text(shape: Shape, path: tuple) -> str:
    value: Any = None
    for part in path:
        shape = shape.child(part)
        value = getattr(value, part, NOT_SET) if isinstance(value, Schema) else shape.default
    return show(value)
