"""Reads YAML text into values that know their line, and writes values as text.

The reader follows the core schema of YAML 1.2, not PyYAML's YAML 1.1, in which `1e-4` is text and `no` is
false. Two differences: `90_000` is a number, and a repeated key is an error. Readers of either version agree
on the text that is written.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from configs.errors import ConfigError, dotted, shorten
from configs.schema.base import Schema, without_credentials

# -------------------------------------------------------------------------------------------------------------
# YAML 1.2 for PyYAML

MAX_DEPTH = 100
MAX_VALUES = 10_000
"""Limits of one text; an alias counts as often as it is used. No config comes near either."""
_TOO_MANY = f"more than {MAX_VALUES} values, aliases written out"
_FEWER = "name a config, or remove aliases of aliases"

_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"[-+]?[0-9](_?[0-9])*$|0x[0-9a-fA-F]+$|0o[0-7]+$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9](_?[0-9])*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"]),
)
"""Rows (tag, pattern of its texts, their first characters)."""


class _TooMuch(yaml.MarkedYAMLError):
    """The text nests more than MAX_DEPTH blocks, or has more than MAX_VALUES values: PyYAML reads a large file for minutes.
    ``note``: the fix."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2. MAX_DEPTH keeps its recursion below Python's limit."""

    yaml_implicit_resolvers: ClassVar[dict] = {}
    _depth = 0
    _count = 0
    """Keys and values so far."""

    @contextmanager
    def deeper(self, mark: yaml.Mark) -> Iterator[None]:
        """One more level of nesting, for the block at ``mark``. Raises _TooMuch."""
        if self._depth >= MAX_DEPTH:
            fix = "nest less; no key of a config is that deep"
            raise _TooMuch(
                problem=f"more than {MAX_DEPTH} blocks inside each other", problem_mark=mark, note=fix
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._count += 1
        if self._count > 2 * MAX_VALUES:
            raise _TooMuch(problem=_TOO_MANY, problem_mark=self.peek_event().start_mark, note=_FEWER)
        with self.deeper(self.peek_event().start_mark):
            return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Copies merged keys (`<<`) into the mapping, each key once: merges of merges would multiply them."""
        with self.deeper(node.start_mark):
            super().flatten_mapping(node)
        last: dict[Hashable, tuple] = {}
        for key, value in node.value:
            last[(key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)] = (key, value)
        node.value = list(last.values())


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 *or* 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Shown(yaml.SafeDumper):
    """SafeDumper for messages: it quotes text only where this loader needs it."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with any kind of line break gets double quotes: PyYAML's other styles turn U+0085 and its like into
    spaces."""
    breaks = text.splitlines() != [text]
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if text and breaks else None)


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    """The halves of a surrogate pair become one character: JSON writes it as two escapes, and JSON is YAML. Raises ValueError
    for half a pair."""
    try:
        return loader.construct_scalar(node).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it has {len(text)} digits, and no field takes more than {_MOST_DIGITS}")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper, _Shown):
        _class.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _represent_text)
_Shown.add_representer(str, _represent_text)
_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


_MOST_DIGITS = 1000
"""Most digits of a whole number. Python refuses to write numbers of more than 4300 as JSON."""


def is_number_or_bool(text: str) -> bool:
    """Whether the text, written without quotes, would be read as a number or a boolean."""
    return any(pattern.match(text) for pattern in (_BOOL, _INT, _FLOAT))


# -------------------------------------------------------------------------------------------------------------------
# writing


def dump(data: Any) -> str:
    """Plain data as a YAML document."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def show(value: Any) -> str:
    """A value as YAML would write it, on one line and not too long, without users and passwords of
    addresses."""
    plain = value.model_dump(mode="json") if isinstance(value, Schema) else value
    plain = str(plain) if isinstance(plain, Path) else list(plain) if isinstance(plain, tuple) else plain
    text = yaml.dump(
        plain, Dumper=_Shown, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True
    )
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return shorten(without_credentials(text))


# -------------------------------------------------------------------------------------------------------------------
# reading


@dataclass(frozen=True, slots=True)
class Value:
    """A YAML value with the place that set it."""

    data: Any
    """dict[str, Value], list[Value] or a scalar."""
    where: str
    afresh: bool = False
    """The block replaces that of lower layers instead of merging with it."""
    written: str = field(default="", compare=False)
    """The text of a scalar, which may differ from the value's: 1.10, 007."""

    def plain(self) -> Any:
        if isinstance(self.data, dict):
            return {key: value.plain() for key, value in self.data.items()}
        if isinstance(self.data, list):
            return [value.plain() for value in self.data]
        return self.data

    def at(self, path: Sequence[Hashable]) -> "Value | None":
        """The value at a path, or None if there is none."""
        value = self
        for part in path:
            in_list = isinstance(value.data, list) and isinstance(part, int) and part < len(value.data)
            if not in_list and not (isinstance(value.data, dict) and part in value.data):
                return None
            value = value.data[part]
        return value

    def where_of(self, path: Sequence[Hashable]) -> str:
        """The place that set the path, or its nearest ancestor that is set."""
        values = (self.at(path[:depth]) for depth in range(len(path), -1, -1))
        return next(value.where for value in values if value is not None)


def read_yaml(text: str, source: str, override: str | None = None) -> Value | None:
    """The value of a YAML text; None if the text is empty.

    source: the file, or "command line".
    override: the dotted key whose value the text is; places then name no line, and problems show the whole
    text. Raises ConfigError if the text is not YAML, or holds values that no config can hold.
    """
    return _Reader(text, source, override).read()


def comments_in(text: str) -> list[str]:
    """The comments of a YAML text, each from its `#` on. Raises yaml.YAMLError."""
    comments, end = [], 0
    for token in yaml.scan(text, Loader=_Loader):
        comments += re.findall("#.*", text[end : token.start_mark.index])  # blanks and comments alone
        end = max(end, token.end_mark.index)
    return comments


class _Reader:
    """Turns the YAML nodes of one text into values that know their line."""

    _loader: _Loader

    def __init__(self, text: str, source: str, override: str | None):
        self._text, self._source, self._override = text, source, override
        self._count = 0

    def read(self) -> Value | None:
        try:
            self._loader = _Loader(self._text)
            try:
                node = self._loader.get_single_node()
                return None if node is None else self._value(node, (), ())
            finally:
                self._loader.dispose()
        except yaml.YAMLError as error:
            raise self._malformed(error) from error

    def _value(self, node: yaml.Node, path: tuple[str, ...], parents: tuple[int, ...]) -> Value:
        """``parents``: ids of the nodes around this one."""
        if id(node) in parents:
            raise self._unusable(path, "an alias that contains itself", "remove the alias", node.start_mark)
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._unusable(path, _TOO_MANY, _FEWER, node.start_mark)
        within = (*parents, id(node))
        with self._loader.deeper(node.start_mark):
            if isinstance(node, yaml.SequenceNode):
                items = [self._value(item, (*path, str(i)), within) for i, item in enumerate(node.value)]
                return Value(items, self._where(node.start_mark))
            if isinstance(node, yaml.MappingNode):
                return Value(self._mapping(node, path, within), self._where(node.start_mark))
            return Value(self._scalar(node, path), self._where(node.start_mark), written=node.value)

    def _scalar(self, node: yaml.Node, path: tuple[str, ...]) -> str | int | float | None:
        try:
            data = self._loader.construct_object(node)
        except ValueError as error:
            wrong = f"cannot be read as {node.tag.rpartition(':')[2]}: {error}"
            raise self._unusable(path, wrong, "correct the value", node.start_mark) from error
        if not isinstance(data, str | int | float | None):
            wrong = f"values of type {node.tag} are not used in configs"
            raise self._unusable(path, wrong, "write text, a number, true, false or null", node.start_mark)
        return data

    def _mapping(
        self, node: yaml.MappingNode, path: tuple[str, ...], within: tuple[int, ...]
    ) -> dict[str, Value]:
        self._refuse_repeated_keys(node, path)
        self._loader.flatten_mapping(node)  # `<<: *anchor`
        data = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._unusable(path, "a key that is a list or a block", "write text as the key", mark)
            key = self._scalar(key_node, path)
            if not isinstance(key, str):
                raise self._unusable(path, f"the key {key!r} is not text", "write the key in quotes", mark)
            data[key] = replace(self._value(value_node, (*path, key), within), where=self._where(mark))
        return data

    def _refuse_repeated_keys(self, node: yaml.MappingNode, path: tuple[str, ...]) -> None:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, mark = key_node.value, key_node.start_mark
            if not isinstance(key, str):
                continue  # not text: refused later
            if key in lines:
                error = f"the key is repeated; it is set first in line {lines[key]}"
                raise self._unusable((*path, key), error, "keep one of them", mark)
            lines[key] = mark.line + 1

    # ---- errors

    def _where(self, mark: yaml.Mark) -> str:
        return self._source if self._override else f"{self._source}:{mark.line + 1}"

    def _line(self, mark: yaml.Mark) -> str:
        if self._override:
            return shorten(self._text)
        rest = self._text.splitlines()[mark.line :]
        return shorten(rest[0].strip()) if rest else "(end of the file)"

    def _unusable(self, path: tuple[str, ...], error: str, fix: str, mark: yaml.Mark) -> ConfigError:
        """The error for well-formed YAML that no config can hold."""
        field = dotted((self._override, *path) if self._override else path) or "(top level)"
        return ConfigError.of(self._where(mark), field, self._line(mark), error, fix)

    def _malformed(self, error: yaml.YAMLError) -> ConfigError:
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        fix = "correct the YAML there: `key: value` with a space after the colon, the same indent for keys of one block, closed quotes"
        if "\\t" in reason:
            fix = "indent with spaces, not tabs"
        if isinstance(error, _TooMuch):
            fix = str(error.note)
        if "another document" in reason:
            reason, fix = (
                "a second document begins",
                "keep one: remove the `---` line, and write each key once",
            )
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        where = self._where(mark) if mark else self._source
        value = self._line(mark) if mark else shorten(self._text) if self._override else "(the file)"
        field = self._override or "(YAML syntax)"
        return ConfigError.of(where, field, value, f"malformed YAML: {reason}{at}", fix)
