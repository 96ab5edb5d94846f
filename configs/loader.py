"""Reads YAML files and command-line overrides into one validated config. Every error names its place and its
fix.

    layers          file named by `extends` (left to right, depth first)  <  the file itself  <  files of an override
                    `extends=other.yaml`  <  the other `key.sub=value` overrides
    merge           mappings merge deeply, everything else (lists, null, scalars) replaces
    validation      pydantic, strict: "8" is not 8, 8.0 is not 8, true is not 1.0

Rules that are not obvious:
- YAML is read by the core schema of YAML 1.2: `1e-4` is a number, `on`, `yes` and `2024-01-01` are text, a
  repeated key is an error; `90_000` is read as 90000.
- `extends` is relative to the file that holds it; as an override, to the current working directory, like
  every path *inside* a config.
- Some blocks have several variants (`task`, `correction.weight`, `data`). A later layer that changes the
  `type` (or `level`) of such a block starts it afresh and drops the keys of the earlier variant. A block
  without a `type` has that of the default. No layer can change the root's `kind`.
- All overrides together are one layer, so their order does not matter. Only several `extends=` are laid over
  each other in their order.
- `correction` may be a preset's name, or hold the block of another system. A layer with either starts the
  block afresh (`shorthands.py`).

Every key remembers the file and line that set it. All problems are reported at once. Checks that span several
fields run once the fields themselves are valid.

    errors.py                   Problem and ConfigError
    reading/yaml_values.py      YAML to values with lines, and back
    reading/schema_shape.py     what the schema allows at each place
    reading/wording.py          pydantic's errors in plain language
    reading/torn_overrides.py   overrides that a shell split
    reading/shorthands.py       named corrections as explicit blocks
    reading/named_files.py      the files that a config names
    other_systems/              names and blocks of verl, ROLL and others
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from pydantic import ValidationError

from configs.errors import COMMAND_LINE, ConfigError, Problem, did_you_mean, shorten
from configs.other_systems.values import in_our_names
from configs.reading.named_files import check_files, close_name
from configs.reading.schema_shape import Shape
from configs.reading.shorthands import expand, with_named_preset
from configs.reading.torn_overrides import OVERRIDE, fix_for_no_override, rejoined, without_signs
from configs.reading.wording import problem_of, problems_of
from configs.reading.yaml_values import Value, comments_in, dump, read_yaml, show
from configs.schema import AnyConfig, RunConfig, SftConfig

__all__ = [
    "ConfigError", "Finding", "ParsedConfig", "Problem", "check_files", "load_config", "parse_config",
    "resolved_yaml",
]  # fmt: skip

Finding = tuple[str, str]
"""(field, "error; fix"); see ``wording.problem_of``."""

_MOST_BYTES = 10_000_000
"""Largest config file that is read."""
_WRITTEN_BY = {".toml": "prime-rl", ".sh": "verl or slime", ".py": "TRL"}
"""Files that start runs of other systems, by suffix. JSON is YAML too."""
_ROOT = Shape.of(AnyConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig | SftConfig:
    """``parse_config``, then ``ParsedConfig.validated``."""
    return parse_config(path, overrides).validated()


def parse_config(path: str | Path, overrides: Sequence[str] = ()) -> "ParsedConfig":
    """Reads a YAML file, the files that it extends, and dotted overrides.

    ``path`` is relative to the current folder, like every path inside the config. ``validated`` raises the
    problems found here.
    """
    unreadable: list[Problem] = []
    layers = _read_file(Path(path), (), COMMAND_LINE, unreadable, field="CONFIG")
    files = ParsedConfig(Path(path), layers, Value({}, COMMAND_LINE), unreadable, ())
    return files.with_overrides(overrides)


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """The layers of a config, read once. Any number of configs can be made from them."""

    path: Path
    layers: Sequence[Value]
    """One per file, lowest first."""
    overrides: Value
    """All overrides, as one layer above the files."""
    unreadable: Sequence[Problem]
    """Problems of files."""
    problems: Sequence[Problem]
    """Problems of overrides."""

    def with_overrides(self, overrides: Sequence[str], where: str = COMMAND_LINE) -> "ParsedConfig":
        """This config with further overrides.

        overrides: ``key.sub=value``, the value read as YAML; ``extends=FILE`` lays a further file (or a list
        of files) over the others. where: the place that problems name: the command line, or the option that
        stands for these overrides, such as ``--learner tp=2``.
        """
        layers, unreadable, problems = [*self.layers], [*self.unreadable], [*self.problems]
        overridden, extended = _read_overrides(overrides, where, self.overrides, problems)
        for name, at in (named for extends in extended for named in _extended_names(extends, unreadable)):
            layers += _read_file(Path(name), (), at, unreadable)
        return ParsedConfig(self.path, layers, overridden, unreadable, problems)

    def validated(
        self,
        *,
        files: bool = False,
        check: Callable[[RunConfig | SftConfig], Iterable[Finding]] | None = None,
        notes: list[str] | None = None,
    ) -> RunConfig | SftConfig:
        """The config. Raises ConfigError with every problem found.

        files: also check that the files the config names exist (``check_files``). check: finds further errors
        of a valid config; each finding becomes a problem with the lines that set its fields. notes: a list
        that gets one line for each key of another system (``correction.verl``): what it was read as.
        """
        if self.unreadable:
            raise ConfigError([*self.unreadable, *self.problems])
        problems, renamed = [*self.problems], []
        layers = [*self.layers, self.overrides] if self.overrides.data else self.layers
        layers = [in_our_names(layer, problems, renamed) for layer in layers]
        layers, understood = expand(layers, problems)
        if notes is not None:
            notes += [*renamed, *understood]
        tree = _merge_layers(layers, problems)
        place = str(self.path)
        tree = Value({"kind": tree.at(["kind"]) or Value("train", place), **tree.data}, place)
        config = _validate(tree, problems)
        if files and config is not None:
            problems += check_files(config, tree)
        if check is not None and config is not None:
            shape = Shape.of(type(config))
            problems += [problem_of(text, field, tree, shape) for field, text in check(config)]
        if problems or config is None:
            raise ConfigError(problems)
        return config


def resolved_yaml(config: RunConfig | SftConfig) -> str:
    """The whole config as YAML, defaults included; loading it gives an equal config."""
    return dump(config.model_dump(mode="json"))


def _validate(tree: Value, problems: list[Problem]) -> RunConfig | SftConfig | None:
    """The config of the tree's ``kind``. None, and further problems, where it is not valid."""
    kind = tree.data["kind"]
    schema = _ROOT.tags.get(kind.data) if isinstance(kind.data, str) else None
    if schema is None:
        value, error = show(kind.plain()), "unknown kind of config"
        fix = did_you_mean(str(kind.data), list(_ROOT.tags), "kinds")
        problems.append(Problem(where=kind.where, field="kind", value=value, error=error, fix=fix))
        return None
    root = Shape.of(schema)
    tree = _with_default_tags(tree, root)
    try:
        # From JSON: strict, yet text becomes a Path and a list a tuple.
        return schema.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        problems += problems_of(error, tree, root)
        return None


def _with_default_tags(value: Value, shape: Shape) -> Value:
    """The value with a tag in every block that leaves its tag out and has a default."""
    if not isinstance(value.data, dict):
        return value
    chosen = shape.variant(value)
    data = {key: _with_default_tags(child, chosen.child(key)) for key, child in value.data.items()}
    if shape.tag_key and shape.tag_key not in data and (tag := shape.tag_of(None)) is not None:
        data[shape.tag_key] = Value(tag, value.where)
    return Value(data, value.where)


# -------------------------------------------------------------------------------------------------------------------
# merging


def _merge_layers(layers: Sequence[Value], problems: list[Problem]) -> Value:
    """Merges all layers, lowest first."""
    merged = layers[0]
    for layer in layers[1:]:
        before, after = merged.at(["kind"]), layer.at(["kind"])
        if before and after and before.plain() != after.plain():
            value = show(after.plain())
            fix = f"name a config of kind {value} instead, or remove the later `kind`"
            error = f"`kind` is {before.plain()!r} in {before.where}; a later layer cannot change it"
            problems.append(Problem(where=after.where, field="kind", value=value, error=error, fix=fix))
            layer = Value({k: v for k, v in layer.data.items() if k != "kind"}, layer.where)
        merged = _merge(merged, layer, _ROOT)
    return merged


def _merge(lower: Value, upper: Value, shape: Shape) -> Value:
    """``upper`` over ``lower``; a block that changes its variant starts afresh."""
    if upper.afresh or not (isinstance(lower.data, dict) and isinstance(upper.data, dict)):
        return upper
    has_tag = shape.tag_key is not None and shape.tag_key in upper.data
    if has_tag and shape.tag_of(lower) not in (None, shape.tag_of(upper)):
        return upper
    both = {**lower.data, **upper.data}
    chosen = shape.variant(Value(both, upper.where))
    for key in lower.data.keys() & upper.data.keys():
        both[key] = _merge(lower.data[key], upper.data[key], chosen.child(key))
    return Value(both, upper.where)


# ---------------------------------------------------------------------------------------------------------------------
# files


def _read_file(
    path: Path, named_by: tuple[Path, ...], where: str, problems: list[Problem], field: str = "extends"
) -> list[Value]:
    """The layers of a file, lowest first: those of the files that it extends, then its own.

    named_by: the chain of files whose ``extends`` led here. where, field: the place that names this file.
    problems: a list that gets what is wrong.
    """
    try:
        own = read_mapping(path, where, field, named_by)
    except ConfigError as error:
        problems += error.problems
        return []
    extends = own.data.pop("extends", None)
    if extends is None:
        return [own]
    chain, layers = (*named_by, path), []
    for name, at in _extended_names(extends, problems):
        layers += _read_file(path.parent / name, chain, at, problems)
    return [*layers, own]


def read_mapping(path: Path, where: str, field: str, named_by: tuple[Path, ...] = ()) -> Value:
    """The keys of a file, ``extends`` included. where, field: the place that names the file. Raises ConfigError."""
    # Path.resolve raises where links lead in a circle.
    if os.path.realpath(path) in map(os.path.realpath, named_by):
        error = f"files extend each other: {' -> '.join(str(p) for p in (*named_by, path))}"
        raise ConfigError.of(where, field, str(path), error, "remove one of these extends")
    try:
        _refuse_other_than_text(path, where, field)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([_unreadable(path, named_by, where, field, error)]) from error
    own = read_yaml(text, str(path))
    if own is None or own.data is None:
        fixes = {
            "CONFIG": "write at least `model:` and `task:`, or `extends:` another file",
            "extends": "fill it, or remove it from extends",
        }
        fix = fixes.get(field, "fill it, or name another file")
        raise ConfigError.of(str(path), "(the whole file)", "(empty)", "the file is empty", fix)
    if not isinstance(own.data, dict):
        holds = "a list" if isinstance(own.data, list) else f"only the value {show(own.data)}"
        error = f"a mapping of keys is wanted, this file holds {holds}"
        fix = "write `key: value` lines at its top level"
        raise ConfigError.of(own.where, "(the whole file)", show(own.plain()), error, fix)
    return own


def _refuse_other_than_text(path: Path, where: str, field: str) -> None:
    """Reading a pipe or a device may never end, a file of weights would fill the memory, and another system's script or
    TOML would be called malformed YAML.

    Raises ConfigError, or OSError.
    """
    status, wrong, fix = path.stat(), None, "name a YAML file"
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file and not stat.S_ISDIR(status.st_mode):
        wrong = "a pipe, a socket or a device, not a file"
    elif is_file and status.st_size > _MOST_BYTES:
        wrong = f"a file of {status.st_size:,} bytes; no config is that large"
    elif is_file and path.suffix in _WRITTEN_BY and field in ("CONFIG", "extends"):
        wrong = f"a {path.suffix} file, and a config is YAML"
        fix = f"`tandem init DIR` writes one; coming from {_WRITTEN_BY[path.suffix]}, see docs/coming_from.md"
    if wrong is not None:
        raise ConfigError.of(where, field, shorten(str(path)), f"this is {wrong}", fix)


def _extended_names(extends: Value, problems: list[Problem]) -> list[tuple[str, str]]:
    """Pairs (file, place that names it)."""
    names = []
    for item in extends.data if isinstance(extends.data, list) else [extends]:
        if isinstance(item.data, str) and item.data:
            names.append((item.data, item.where))
            continue
        error = "must be the name of a file or a list of such names"
        fix, value = "write `extends: base.yaml` or `extends: [a.yaml, b.yaml]`", show(item.plain())
        problems.append(Problem(where=item.where, field="extends", value=value, error=error, fix=fix))
    return names


def _unreadable(
    path: Path, named_by: tuple[Path, ...], where: str, field: str, error: OSError | UnicodeDecodeError
) -> Problem:
    if isinstance(error, UnicodeDecodeError):
        wrong, fix = f"the file is not UTF-8 text (byte {error.start})", "save it as UTF-8"
    elif isinstance(error, FileNotFoundError) and field == "CONFIG" and OVERRIDE.fullmatch(str(path)):
        wrong = "this is an override, CONFIG a YAML file"
        fix = f"name CONFIG first: `CONFIG {shorten(str(path))}`"
    elif isinstance(error, FileNotFoundError):
        relative = "the file that names it" if named_by else f"the current folder, {Path.cwd()}"
        # A file that led here cannot be meant: files would extend each other.
        fix = close_name(path, but=named_by) or "correct the name"
        wrong = f"no such file; names are relative to {relative}"
    elif isinstance(error, OSError) and error.errno == errno.ELOOP:
        wrong, fix = "its symbolic links lead in a circle", "make the link point to a file"
    elif isinstance(error, IsADirectoryError):
        wrong, fix = "this is a folder, not a file", "name a YAML file in it"
    else:
        wrong, fix = f"cannot be read: {error.strerror or error}", "check its name and permissions"
    return Problem(where=where, field=field, value=shorten(str(path)), error=wrong, fix=fix)


# -----------------------------------------------------------------------------------------------------------------
# overrides


def _read_overrides(
    overrides: Sequence[str], where: str, layer: Value, problems: list[Problem]
) -> tuple[Value, list[Value]]:
    """All overrides as one layer above ``layer``, and the values of all ``extends``, none of which replaces
    another.

    Of two overrides for the same key the later one holds.
    """
    extended = []
    for text, fix in rejoined(overrides):
        if fix is not None:
            error, value = "the shell took this override apart", shorten(text)
            problems.append(
                Problem(where=where, field="(override)", value=value, error=error, fix=shorten(fix))
            )
            continue
        try:
            override = _read_override(text, where)
        except ConfigError as error:
            problems += error.problems
            if (plain := without_signs(text)) != text:  # its key may be wrong too
                layer, more = _read_overrides([plain], where, layer, problems)
                extended += more
            continue
        if "extends" in override.data:
            extended.append(override.data["extends"])
        else:
            layer = _merge(layer, with_named_preset(override), Shape())
    return layer, extended


def _read_override(text: str, where: str) -> Value:
    """One override as a layer. Raises ConfigError."""
    if not text.isascii() and (readable := text.encode(errors="backslashreplace").decode()) != text:
        error = "this is not UTF-8 text, or the locale is of another encoding"
        fix = "write it in UTF-8, and set LC_ALL=C.UTF-8"
        raise ConfigError.of(where, "(override)", shorten(readable), error, fix)
    match = OVERRIDE.fullmatch(text)
    if match is None:
        error = "an override must have the form key.sub=value"
        raise ConfigError.of(where, "(override)", shorten(text), error, fix_for_no_override(text))
    key = match["key"]
    value, text = read_yaml(match["value"], where, override=key), match["value"]
    if comments := comments_in(text):
        error = f"YAML takes `{shorten(comments[0])}` for a comment and drops it"
        fix = f"quote the text that holds it, such as {quote(f'{key}={json.dumps(text)}')}"
        raise ConfigError.of(where, key, shorten(text), error, fix)
    if value is None:
        raise ConfigError.of(where, key, "(nothing)", "no value after the `=`", _fix_missing_value(key))
    for part in reversed(key.split(".")):
        value = Value({part: value}, where)
    return value


def _fix_missing_value(key: str) -> str:
    """How to write no value, in the forms that the key takes."""
    *parents, last = key.split(".")
    block = _ROOT
    for part in parents:
        block = block.child(part)
    ways = [(None, f"{key}=null for no value"), ("", f"{key}='\"\"' for empty text")]
    taken = [way for value, way in ways if block.takes(last, value)]
    return f"write {' or '.join(taken)}" if taken else "write one, or leave the override out"
