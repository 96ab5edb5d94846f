"""YAML files and command-line overrides into one validated config, with errors that say where and how to fix them.

    layers          file named by `extends` (left to right, depth first)  <  the file itself  <  `key.sub=value` overrides
    merge           mappings merge deeply, everything else (lists, null, scalars) replaces
    validation      pydantic, strict: "8" is not 8, 8.0 is not 8, true is not 1.0

Rules that are not obvious:
- YAML is read by the core schema of YAML 1.2: `1e-4` is a number, `on`, `yes` and `2024-01-01` are text, a repeated key is an error;
  `90_000` is read as 90000.
- `extends` is relative to the file that holds it. Paths *inside* a config are relative to the current working directory.
- A block of several variants (`task`, `correction.weight`, `data`) whose `type` (or `level`) is changed by a later layer starts
  afresh: keys that earlier layers gave the other variant are dropped. All overrides together are one layer, so their order does not
  matter. A block without its `type` has that of the default. The root's `kind` cannot be changed by a later layer.

Every key remembers the file and line that set it, so that an error can name them. All problems found are reported at once; the checks
that span several fields run once the fields themselves are valid.
"""

import difflib
import json
import re
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.base import Schema

COMMAND_LINE = "command line"
NOT_SET = "(not set)"
_LONGEST_VALUE = 100


# ---------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a config."""

    where: str
    """``file:line`` of the file that set the field, or "command line"."""
    field: str
    """Dotted; several, comma-separated, where fields contradict each other."""
    value: str
    error: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}\n  field: {self.field}\n  value: {self.value}\n  error: {self.error}\n  fix:   {self.fix}"


class ConfigError(Exception):
    """Everything that is wrong with a config, one block per problem."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n\n".join([f"{count} in the configuration", *map(str, self.problems)]))


# -------------------------------------------------------------------------------------------------------------------- YAML

_INT = re.compile(r"[-+]?[0-9](_?[0-9])*$|0x[0-9a-fA-F]+$|0o[0-7]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9](_?[0-9])*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2 in place of PyYAML's YAML 1.1 (where `1e-4` is text and `no` is false)."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 *or* 1.2 would read as something else, so that any reader agrees."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Shown(yaml.SafeDumper):
    """For values in messages: text is quoted only where this loader needs it."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks of any kind in double quotes: PyYAML's other styles turn U+0085 and its like into spaces."""
    breaks = text.splitlines() != [text]
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if text and breaks else None)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
    _Shown.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _represent_text)
_Shown.add_representer(str, _represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


@dataclass(frozen=True, slots=True)
class _Value:
    """A YAML value with the place that set it; ``data`` is dict[str, _Value], list[_Value] or a scalar."""

    data: Any
    where: str

    def plain(self) -> Any:
        if isinstance(self.data, dict):
            return {key: value.plain() for key, value in self.data.items()}
        if isinstance(self.data, list):
            return [value.plain() for value in self.data]
        return self.data

    def at(self, path: Sequence[Hashable]) -> "_Value | None":
        """The value at a path, or None where there is none."""
        here = self
        for part in path:
            in_list = isinstance(here.data, list) and isinstance(part, int) and part < len(here.data)
            if not in_list and not (isinstance(here.data, dict) and part in here.data):
                return None
            here = here.data[part]
        return here

    def where_of(self, path: Sequence[Hashable]) -> str:
        """The place that set the path, or its nearest ancestor that is set."""
        return next(found.where for depth in range(len(path), -1, -1) if (found := self.at(path[:depth])) is not None)


class _UnusableNode(yaml.MarkedYAMLError):
    """Well-formed YAML that no config can hold; ``field`` is where, dotted."""

    def __init__(self, field: str, problem: str, fix: str, mark: yaml.Mark):
        super().__init__(None, None, problem, mark)
        self.field, self.fix = field, fix


def _parse_yaml(text: str, source: str, *, lines: bool) -> _Value | None:
    """Text to a value, None where there is nothing in it. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _Conversion(loader, source, lines).value(node, (), ())
    finally:
        loader.dispose()


@dataclass(frozen=True, slots=True)
class _Conversion:
    """From YAML's nodes to values that know their line."""

    loader: _Loader
    source: str
    lines: bool

    def value(self, node: yaml.Node, path: tuple[str, ...], parents: tuple[int, ...]) -> _Value:
        if id(node) in parents:
            raise _UnusableNode(_dotted(path), "an alias that contains itself", "remove the alias", node.start_mark)
        within = (*parents, id(node))
        if isinstance(node, yaml.SequenceNode):
            items = [self.value(item, (*path, str(index)), within) for index, item in enumerate(node.value)]
            return _Value(items, self.where(node))
        if isinstance(node, yaml.MappingNode):
            return _Value(self.mapping(node, path, within), self.where(node))
        return _Value(self.scalar(node, path), self.where(node))

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.lines else self.source

    def scalar(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        try:
            data = self.loader.construct_object(node)
        except ValueError as error:
            raise _UnusableNode(_dotted(path), f"cannot be read as {node.tag}: {error}", "correct the value", node.start_mark) from error
        if not isinstance(data, str | int | float | None):
            problem = f"values of type {node.tag} are not used in configs"
            raise _UnusableNode(_dotted(path), problem, "write text, a number, true, false or null", node.start_mark)
        return data

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...], within: tuple[int, ...]) -> dict[str, _Value]:
        self.refuse_repeated_keys(node, path)
        self.loader.flatten_mapping(node)  # `<<: *anchor`
        data = {}
        for key_node, value_node in node.value:
            key = self.loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _UnusableNode(_dotted(path), f"the key {key!r} is not text", "write the key in quotes", key_node.start_mark)
            data[key] = _Value(self.value(value_node, (*path, key), within).data, self.where(key_node))
        return data

    def refuse_repeated_keys(self, node: yaml.MappingNode, path: tuple[str, ...]) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in first:
                problem = f"the key is repeated; it is set first in line {first[key]}"
                raise _UnusableNode(_dotted((*path, key)), problem, "keep one of them", key_node.start_mark)
            if isinstance(key, str):
                first[key] = key_node.start_mark.line + 1


def _yaml_problem(error: yaml.YAMLError, source: str, text: str, field: str | None = None) -> Problem:
    """``text``: what was read. ``field``: of an override; its value is then the whole text."""
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    rest = text.splitlines()[mark.line : mark.line + 1] if mark else []
    line = text if field else rest[0].strip() if rest else "(end of the file)" if mark else "(the file)"
    where = f"{source}:{mark.line + 1}" if mark and not field else source
    if isinstance(error, _UnusableNode):
        at = f"{field}.{error.field}" if field and error.field else field or error.field or "(top level)"
        return Problem(where=where, field=at, value=_shorten(line), error=what, fix=error.fix)
    fix = "correct the YAML there: `key: value` with a space after the colon, the same indent for keys of one block, closed quotes"
    if "\\t" in what:
        fix = "indent with spaces, not tabs"
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    field = field or "(YAML syntax)"
    return Problem(where=where, field=field, value=_shorten(line), error=f"malformed YAML: {what}{place}", fix=fix)


# ------------------------------------------------------------------------------------------------------- shape of the schema


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the schema says of one place: the classes a block may be (picked by ``tag_key`` if several), or an item's annotation."""

    models: tuple[type[Schema], ...] = ()
    tag_key: str | None = None
    default_tag: str | None = None
    item: Any = None
    info: FieldInfo | None = None
    annotation: Any = None

    @classmethod
    def of(cls, annotation: Any, info: FieldInfo | None = None) -> "_Shape":
        models, tag_key, item = _members(annotation, info.discriminator if info else None)
        default = info.default if info else None
        tag = getattr(default, tag_key, None) if tag_key and isinstance(default, Schema) else None
        return cls(tuple(models), tag_key if len(models) > 1 else None, tag, item, info, annotation)

    @property
    def tags(self) -> dict[str, type[Schema]]:
        """The variants by their tag."""
        return {tag: model for model in self.models for tag in get_args(model.model_fields[self.tag_key].annotation)}

    def pick(self, tag: Any) -> "_Shape":
        chosen = self.tags.get(tag) if self.tag_key and isinstance(tag, str) else None
        return _Shape((chosen,), info=self.info, annotation=chosen) if chosen else self

    def child(self, key: Hashable) -> "_Shape":
        for model in self.models:
            if key in model.model_fields:
                info = model.model_fields[key]
                return _Shape.of(info.annotation, info)
        return _Shape.of(self.item) if self.item is not None and not self.models else _Shape()

    def names(self) -> list[str]:
        return list(dict.fromkeys(key for model in self.models for key in model.model_fields))


def _members(annotation: Any, tag_key: Any) -> tuple[list[type[Schema]], str | None, Any]:
    """(schema classes, discriminator, annotation of an item of a list or dict) of a field's annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = next((m.discriminator for m in arguments[1:] if isinstance(m, FieldInfo) and m.discriminator), tag_key)
        return _members(arguments[0], inner)
    if origin in (Union, types.UnionType):
        found = [_members(argument, tag_key) for argument in arguments]
        tag = next((t for _, t, _ in found if isinstance(t, str)), None)
        return [m for models, _, _ in found for m in models], tag, next((i for _, _, i in found if i is not None), None)
    if origin in (list, tuple, dict):
        return [], None, arguments[1] if origin is dict else arguments[0]
    is_block = origin is None and isinstance(annotation, type) and issubclass(annotation, Schema)
    return ([annotation] if is_block else []), tag_key if isinstance(tag_key, str) else None, None


_ROOT = _Shape.of(AnyConfig)


def _tag_of(value: _Value, shape: _Shape) -> Any:
    found = value.at([shape.tag_key])
    return shape.default_tag if found is None else found.data


def _pick(value: _Value, shape: _Shape) -> _Shape:
    return shape.pick(_tag_of(value, shape)) if shape.tag_key else shape


def _merge(lower: _Value, upper: _Value, shape: _Shape) -> _Value:
    """``upper`` over ``lower``; a block that changes its variant starts afresh."""
    if not (isinstance(lower.data, dict) and isinstance(upper.data, dict)):
        return upper
    if shape.tag_key and shape.tag_key in upper.data and _tag_of(lower, shape) not in (None, _tag_of(upper, shape)):
        return upper
    both = {**lower.data, **upper.data}
    chosen = _pick(_Value(both, upper.where), shape)
    for key in lower.data.keys() & upper.data.keys():
        both[key] = _merge(lower.data[key], upper.data[key], chosen.child(key))
    return _Value(both, upper.where)


def _with_default_tags(value: _Value, shape: _Shape) -> _Value:
    """Blocks that leave out their tag get that of the field's default, where there is one."""
    if not isinstance(value.data, dict):
        return value
    chosen = _pick(value, shape)
    data = {key: _with_default_tags(child, chosen.child(key)) for key, child in value.data.items()}
    if shape.tag_key and shape.tag_key not in data and shape.default_tag is not None:
        data[shape.tag_key] = _Value(shape.default_tag, value.where)
    return _Value(data, value.where)


# ------------------------------------------------------------------------------------------------------------------- layers


def _read_file(path: Path, named_by: tuple[Path, ...], where: str, problems: list[Problem]) -> list[_Value]:
    """The layers of a file, lowest first: those that it extends, then its own. Problems are added to the list."""
    field = "extends" if named_by else "CONFIG"
    if path.resolve() in [p.resolve() for p in named_by]:
        chain = " -> ".join(str(p) for p in (*named_by, path))
        problems.append(
            Problem(where=where, field=field, value=str(path), error=f"files extend each other: {chain}", fix="remove one of these extends")
        )
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(_unreadable(path, where, field, error))
        return []
    try:
        own = _parse_yaml(text, str(path), lines=True)
    except yaml.YAMLError as error:
        problems.append(_yaml_problem(error, str(path), text))
        return []
    if own is None or own.data is None:
        fix = "write at least `model:` and `task:`, or `extends:` another file" if not named_by else "fill it, or remove it from extends"
        problems.append(Problem(where=str(path), field="(the whole file)", value="(empty)", error="the file is empty", fix=fix))
        return []
    if not isinstance(own.data, dict):
        error = f"a config is a mapping of keys, this file holds {_kind_of(own.data)}"
        fix = "write `key: value` lines at its top level"
        problems.append(Problem(where=own.where, field="(the whole file)", value=_show(own.plain()), error=error, fix=fix))
        return []
    extends = own.data.pop("extends", None)
    if extends is None:
        return [own]
    bases = _extended_names(extends, problems)
    chain = (*named_by, path)
    return [layer for name, at in bases for layer in _read_file(path.parent / name, chain, at, problems)] + [own]


def _extended_names(extends: _Value, problems: list[Problem]) -> list[tuple[str, str]]:
    items = extends.data if isinstance(extends.data, list) else [extends]
    for item in items:
        if not isinstance(item.data, str) or not item.data:
            error, fix = "must be the name of a file or a list of such names", "write `extends: base.yaml` or `extends: [a.yaml, b.yaml]`"
            problems.append(Problem(where=item.where, field="extends", value=_show(item.plain()), error=error, fix=fix))
    return [(item.data, item.where) for item in items if isinstance(item.data, str) and item.data]


def _unreadable(path: Path, where: str, field: str, error: OSError | UnicodeDecodeError) -> Problem:
    problem = {"where": where, "field": field, "value": str(path)}
    if isinstance(error, UnicodeDecodeError):
        return Problem(**problem, error=f"the file is not UTF-8 text (byte {error.start})", fix="save it as UTF-8")
    if isinstance(error, FileNotFoundError):
        relative = "the file that names it" if field == "extends" else f"the current folder, {Path.cwd()}"
        hint = _close_file(path) or "correct the name"
        return Problem(**problem, error=f"no such file; names are relative to {relative}", fix=hint)
    if isinstance(error, IsADirectoryError):
        return Problem(**problem, error="this is a folder, not a file", fix="name a YAML file in it")
    return Problem(**problem, error=f"cannot be read: {error.strerror or error}", fix="check its permissions")


def _close_file(path: Path) -> str | None:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f"the folder {path.parent} does not exist either" if not path.parent.exists() else None
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean `{path.parent / close[0]}`?" if close else None


_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)


def _read_overrides(overrides: Iterable[str], problems: list[Problem]) -> _Value:
    """All overrides as one layer; of two for the same key the later wins."""
    layer = _Value({}, COMMAND_LINE)
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            plain = text.lstrip("-")
            hint = f"write `{plain}`, without dashes" if _OVERRIDE.fullmatch(plain) else "write for example `rollout.group_size=8`"
            error = "an override must have the form key.sub=value"
            problems.append(Problem(where=COMMAND_LINE, field="(override)", value=text, error=error, fix=hint))
            continue
        key, written = match["key"], match["value"]
        try:
            value = _parse_yaml(written, COMMAND_LINE, lines=False)
        except yaml.YAMLError as error:
            problems.append(_yaml_problem(error, COMMAND_LINE, written, key))
            continue
        if value is None:
            fix = f"write {key}=null for no value, or {key}='\"\"' for empty text"
            problems.append(Problem(where=COMMAND_LINE, field=key, value="(nothing)", error="no value after the `=`", fix=fix))
            continue
        for part in reversed(key.split(".")):
            value = _Value({part: value}, COMMAND_LINE)
        layer = _merge(layer, value, _Shape())
    return layer


def _merge_layers(layers: Sequence[_Value], problems: list[Problem]) -> _Value:
    merged = layers[0]
    for layer in layers[1:]:
        before, after = merged.at(["kind"]), layer.at(["kind"])
        if before and after and before.data != after.data:
            fix = f"name a config of kind {after.data} instead, or remove the later `kind`"
            error = f"`kind` is {before.data!r} in {before.where}; a later layer cannot change it"
            problems.append(Problem(where=after.where, field="kind", value=_show(after.plain()), error=error, fix=fix))
            layer = _Value({k: v for k, v in layer.data.items() if k != "kind"}, layer.where)
        merged = _merge(merged, layer, _ROOT)
    return merged


# -------------------------------------------------------------------------------------------------- pydantic's errors, in words

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
_COMPARISONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _problems_of(error: ValidationError, tree: _Value, root: type[Schema]) -> Iterator[Problem]:
    seen: set[tuple] = set()
    for details in error.errors(include_url=False):
        path, shape, parent = _locate(root, details["loc"])
        if details["type"] == "value_error":
            yield _contradiction(details, path, shape, tree)
        elif path not in seen or details["type"].startswith("union"):  # a plain union gives one error per member
            seen.add(path)
            yield _translate(details, path, shape, parent, tree)


def _locate(root: type[Schema], loc: Sequence[str | int]) -> tuple[tuple, _Shape, _Shape]:
    """Pydantic's location without the tags and labels that it inserts for unions; the shape there, and of its parent."""
    path: list[Hashable] = []
    shape = parent = _Shape.of(root)
    for part in loc:
        if shape.tag_key:
            shape = shape.pick(part)
        elif shape.models or shape.item is not None:
            path.append(part)
            parent, shape = shape, shape.child(part)
        else:
            break
    return tuple(path), shape, parent


def _translate(details: ErrorDetails, path: tuple, shape: _Shape, parent: _Shape, tree: _Value) -> Problem:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        path, shape = (*path, shape.tag_key), shape
    found = tree.at(path)
    value = NOT_SET if found is None else _show(found.plain())
    problem = {"where": tree.where_of(path), "field": _dotted(path), "value": value}
    if kind == "extra_forbidden":
        where_else = _elsewhere(path[-1], tree)
        return Problem(**problem, error="unknown key", fix=_did_you_mean(str(path[-1]), parent.names(), "keys here", where_else))
    if kind == "missing":
        return Problem(**problem, error="required, but not set", fix=f"add `{_dotted(path)}`{_described(shape)}")
    if kind == "union_tag_not_found":
        return Problem(**problem, error="does not say which variant the block is", fix=f"set it to one of: {', '.join(shape.tags)}")
    if kind == "union_tag_invalid":
        return Problem(**problem, error="unknown variant", fix=_did_you_mean(str(context.get("tag")), list(shape.tags), "variants"))
    if kind == "literal_error":
        choices = [str(choice) for choice in _literals(shape.info)]
        wanted = found.plain() if found is not None else ""
        return Problem(**problem, error="not one of the choices", fix=_did_you_mean(str(wanted), choices, "choices"))
    return Problem(**problem, error=_wrong(kind, details["msg"], shape), fix=_fix_value(kind, context, path, shape, found))


def _wrong(kind: str, message: str, shape: _Shape) -> str:
    union = _plain_union(shape.annotation)
    if union:
        return f"must be {', '.join(union[:-1])} or {union[-1]}"
    stem = kind.split("_")[0]
    if kind.endswith(("_type", "_parsing", "_from_float")) and stem in _WRONG_TYPE:
        return _WRONG_TYPE[stem]
    return message.replace("Input should", "must").replace("String should", "must").replace("must be a valid", "must be a")


def _plain_union(annotation: Any) -> list[str]:
    """The members of ``str | int``, in words; empty where it is no union of plain types."""
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    members = [words[a] for a in get_args(annotation) if a in words] if get_origin(annotation) in (Union, types.UnionType) else []
    return members if len(members) > 1 else []


def _fix_value(kind: str, context: dict, path: tuple, shape: _Shape, found: _Value | None) -> str:
    data = None if found is None else found.data
    name, default = _dotted(path), _default_note(shape)
    bounds = [f"{words} {context[key]}" for key, words in _COMPARISONS.items() if key in context]
    if bounds:
        return f"use a value {' and '.join(bounds)}{default}"
    if "pattern" in context:
        return f"use text that matches {context['pattern']}{default}"
    if isinstance(data, str) and kind.startswith(("int", "float", "bool")) and _is_number_or_bool(data):
        return f"write it without quotes: `{name}: {data}`"
    if isinstance(data, float) and kind.startswith("int") and data.is_integer():
        return f"write `{name}: {int(data)}`"
    if kind.startswith(("string", "path")) and isinstance(data, int | float):
        return f'put it in quotes: `{name}: "{_show(data)}"`'
    if kind.startswith(("model", "dict")) and data is None:
        return f"give it keys, or remove `{name}:`"
    if shape.models:
        return f"give a block with keys of: {', '.join(shape.names())}"
    return f"correct the value{default or _described(shape)}"


def _is_number_or_bool(text: str) -> bool:
    return any(pattern.match(text) for _, pattern, _ in _CORE_SCHEMA[1:4])


def _contradiction(details: ErrorDetails, block: tuple, shape: _Shape, tree: _Value) -> Problem:
    """An error raised by a validator of ours: the fields that its text names, each with its value and place."""
    said = str(details.get("ctx", {}).get("error", details["msg"]))
    chosen = _pick(tree.at(block) or _Value({}, ""), shape)
    names = [n for n in dict.fromkeys(re.findall(r"[a-z_]\w*(?:\.[a-z_]\w*)*", said)) if _is_leaf(chosen, n, tree.at(block))]
    paths = [(*block, *name.split(".")) for name in names] or [block]
    values, places = [], []
    for path in paths:
        found = tree.at(path)
        shown = f"{_default_of(chosen, path[len(block) :])} (default)" if found is None else f"{_show(found.plain())} ({found.where})"
        values.append(shown if len(paths) == 1 else f"{_dotted(path)}: {shown}")
        places += [] if found is None else [found.where]
    error, _, fix = said.rpartition("; ")
    fields = ", ".join(map(_dotted, paths))
    return Problem(
        where=", ".join(dict.fromkeys(places)) or tree.where_of(block),
        field=fields or "(the whole config)",
        value=", ".join(values),
        error=error or said,
        fix=fix if error else f"change or remove one of: {fields}" if len(paths) > 1 else f"correct {fields or 'the config'}",
    )


def _is_leaf(shape: _Shape, dotted: str, block: _Value | None) -> bool:
    for part in dotted.split("."):
        if part not in shape.names():
            return False
        block = block.at([part]) if block is not None else None
        shape = shape.child(part)
        shape = _pick(block, shape) if block is not None else shape
    return not shape.models


def _default_of(shape: _Shape, path: tuple) -> str:
    if path[:-1] and isinstance(getattr(shape.child(path[0]).info, "default", None), Schema):
        value: Any = shape.child(path[0]).info.default
        for part in path[1:]:
            value = getattr(value, part, NOT_SET)
        return _show(value)
    for part in path:
        shape = shape.child(part)
    return NOT_SET if shape.info is None or shape.info.is_required() else _show(shape.info.get_default(call_default_factory=True))


def _did_you_mean(wrong: str, known: Sequence[str], label: str, otherwise: str | None = None) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6) or [k for k in known if k.lower() == wrong.lower()]
    if close:
        return f"did you mean `{close[0]}`?"
    listed = f"{label}: {', '.join(known)}" if known else "remove it"
    return f"{otherwise}; {listed}" if otherwise else listed


def _elsewhere(key: Hashable, tree: _Value) -> str | None:
    """Where else in the schema a key of this name exists."""
    places = [path for path in _all_paths(_pick(tree, _ROOT), ()) if path[-1] == key]
    return f"it exists as {' and '.join(f'`{_dotted(p)}`' for p in places)}" if places else None


def _all_paths(shape: _Shape, prefix: tuple) -> Iterator[tuple]:
    for key in shape.names():
        yield (*prefix, key)
        yield from _all_paths(shape.child(key), (*prefix, key))


def _literals(info: FieldInfo | None) -> list[Any]:
    def flat(annotation: Any) -> Iterator[Any]:
        for argument in get_args(annotation):
            yield from flat(argument) if get_args(argument) else [argument]

    return [c for c in flat(info.annotation) if not isinstance(c, type)] if info else []


def _described(shape: _Shape) -> str:
    text = shape.info.description if shape.info else None
    if text:
        return f": {' '.join(text.split())}"
    return f" with one `{shape.tag_key}` of: {', '.join(shape.tags)}" if shape.tag_key else ""


def _default_note(shape: _Shape) -> str:
    if shape.info is None or shape.info.is_required() or shape.models:
        return ""
    return f" (default: {_show(shape.info.get_default(call_default_factory=True))})"


def _dotted(path: Sequence[Hashable]) -> str:
    return ".".join(map(str, path))


def _kind_of(data: Any) -> str:
    return "a list" if isinstance(data, list) else f"only the value {_show(data)}"


def _show(value: Any) -> str:
    """A value as YAML would write it, on one line and not too long."""
    plain = value.model_dump(mode="json") if isinstance(value, Schema) else value
    plain = str(plain) if isinstance(plain, Path) else list(plain) if isinstance(plain, tuple) else plain
    text = yaml.dump(plain, Dumper=_Shown, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return _shorten(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


# -------------------------------------------------------------------------------------------------------------------- public


def load_config(path: str | Path, overrides: Sequence[str] = (), *, files: bool = False) -> RunConfig | SftConfig:
    """The config of a YAML file (with what it extends) and dotted overrides.

    path: relative to the current folder, like every path inside the config.
    overrides: ``key.sub=value``, the value read as YAML.
    files: also check that the files the config names exist (``check_files``), with the line that names them.
    Raises ConfigError with every problem found.
    """
    problems: list[Problem] = []
    layers = _read_file(Path(path), (), COMMAND_LINE, problems)
    unreadable = bool(problems)
    override_layer = _read_overrides(overrides, problems)
    if unreadable:
        raise ConfigError(problems)
    tree = _merge_layers([*layers, override_layer] if override_layer.data else layers, problems)
    tree, root = _with_root(tree, Path(path), problems)
    config = None if root is None else _validate(tree, root, problems)
    if files and config is not None:
        problems += _missing_files(config, tree)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _with_root(tree: _Value, path: Path, problems: list[Problem]) -> tuple[_Value, type[Schema] | None]:
    """The tree with its ``kind`` (train where left out) and default tags, and the schema class of that kind."""
    kind = tree.at(["kind"]) or _Value("train", str(path))
    tree = _Value({"kind": kind, **tree.data}, str(path))
    root = _ROOT.tags.get(kind.data) if isinstance(kind.data, str) else None
    if root is None:
        fix = _did_you_mean(str(kind.data), list(_ROOT.tags), "kinds")
        problems.append(Problem(where=kind.where, field="kind", value=_show(kind.plain()), error="unknown kind of config", fix=fix))
        return tree, None
    return _with_default_tags(tree, _Shape.of(root)), root


def _validate(tree: _Value, root: type[Schema], problems: list[Problem]) -> Any:
    try:
        return root.model_validate_json(json.dumps(tree.plain()), strict=True)  # JSON: strict, yet text becomes a Path and a list a tuple
    except ValidationError as error:
        problems += _problems_of(error, tree, root)
        return None


def check_files(config: RunConfig | SftConfig) -> list[Problem]:
    """The files and folders that the config names and that are not there; an empty list where all is well."""
    return _missing_files(config, _Value({}, "config"))


def _missing_files(config: RunConfig | SftConfig, tree: _Value) -> list[Problem]:
    found = list(_file_problems(config))
    return [
        Problem(where=tree.where_of(field.split(".")), field=field, value=str(path), error=f"{error}: {path.absolute()}", fix=fix)
        for field, path, error, fix in found
    ]


def _file_problems(config: RunConfig | SftConfig) -> Iterator[tuple[str, Path, str, str]]:
    """(field, path, what is wrong, fix)"""
    model = config.model.path
    if not model.is_dir():
        error = "a Hugging Face folder is wanted, this is a file" if model.exists() else "no such folder"
        yield "model.path", model, error, _fix_path(model, "download the checkpoint to this disk first, and name its folder")
    elif not (model / "config.json").is_file():
        fix = "name the folder that holds config.json, *.safetensors and the tokenizer"
        yield "model.path", model, "the folder has no config.json", fix
    for field, path in _data_files(config):
        if not path.is_file():
            error = "a file is wanted, this is a folder" if path.is_dir() else "no such file"
            yield field, path, error, _fix_path(path, "correct the path")
    resume = config.resume if isinstance(config, RunConfig) else None
    if resume is not None and not resume.is_dir():
        yield "resume", resume, "no such run folder", _fix_path(resume, "name a folder under launch.runs_dir, or remove resume")


def _data_files(config: RunConfig | SftConfig) -> Iterator[tuple[str, Path]]:
    block, names = ("task", ("train_path", "heldout_path")) if isinstance(config, RunConfig) else ("data", ("path",))
    for name in names:
        path = getattr(getattr(config, block), name, None)
        if path is not None:
            yield f"{block}.{name}", path


def _fix_path(path: Path, otherwise: str) -> str:
    if str(path).startswith("~"):
        return "write the path out: `~` is not expanded in a config"
    close = None if path.exists() else _close_file(path) if path.parent.exists() else None
    return close or (otherwise if path.is_absolute() else f"{otherwise}; relative paths start at the current folder, {Path.cwd()}")


def resolved_yaml(config: RunConfig | SftConfig) -> str:
    """The whole config as YAML, defaults included; loading it gives an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
