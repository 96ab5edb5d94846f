"""Turns a named correction, or one in the keys of another system, into the explicit block of the schema.

    correction: decoupled_geo_rs                                    a preset
    correction: {preset: decoupled_geo_rs, veto: 1e-5}              a preset with overridden keys
    correction: {verl: {rollout_is: token}}                         verl's rollout_correction block, read by configs/other_systems/verl.py
    correction: {roll: {infer_correction: true}}                    ROLL's infer_* options or train_infer_correction, likewise

A layer with a shorthand replaces the ``correction`` of lower layers. Its other keys,
and those of later layers, are merged over the shorthand's body. Only a ``verl`` (``roll``) block
over another one is merged with it first, so that a later layer can override one of its keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.errors import ConfigError, Problem, did_you_mean
from configs.other_systems.roll import from_roll
from configs.other_systems.verl import from_verl
from configs.presets import ALIASES, PRESETS, alias_notes, preset_body
from configs.reading.yaml_values import Value, show

SHORTHANDS = ("preset", "verl", "roll")
_READERS = {"verl": from_verl, "roll": from_roll}


def with_named_preset(layer: Value) -> Value:
    """``correction: NAME`` as ``correction: {preset: NAME}``, so that other overrides of the block can join
    it."""
    block = layer.at(["correction"])
    if block is None or not isinstance(block.data, str):
        return layer
    return Value({**layer.data, "correction": Value({"preset": block}, block.where)}, layer.where)


def expand(layers: Sequence[Value], problems: list[Problem]) -> tuple[list[Value], list[str]]:
    """(layers, lowest first, with explicit corrections; notes).

    A layer with a shorthand becomes two: the shorthand's body, and the rest. The notes say how each key of
    another system was read. ``problems`` collects the errors.
    """
    expanded: list[Value] = []
    notes: list[str] = []
    started: tuple[str, Value] | None = None
    for layer in map(with_named_preset, layers):
        block = layer.at(["correction"])
        has_keys = block is not None and isinstance(block.data, dict)
        used = [key for key in SHORTHANDS if key in block.data] if has_keys else []
        if block is None or not used:
            expanded.append(layer)
            continue
        rest = Value({key: value for key, value in block.data.items() if key not in SHORTHANDS}, block.where)
        key, given = used[0], block.data[used[0]]
        if started and started[0] == key and all(isinstance(v.data, dict) for v in (started[1], given)):
            given = Value({**started[1].data, **given.data}, given.where)
        started = key, given
        try:
            _require_one(used, block)
            body, notes = _body_of(key, given)
        except ConfigError as error:
            problems += error.problems
            body, rest = {}, Value({}, block.where)  # the other keys may make sense over the body alone
        where = f"{given.where}, {f'preset {given.data}' if key == 'preset' else key}"
        expanded.append(Value({"correction": _as_value(body, where, afresh=True)}, layer.where))
        expanded.append(Value({**layer.data, "correction": rest}, layer.where))
    return expanded, notes


def _require_one(used: Sequence[str], block: Value) -> None:
    if len(used) > 1:
        error = "a correction starts from one of these"
        fix = "keep one; other keys of `correction` may override parts of it"
        field = ", ".join(f"correction.{key}" for key in used)
        value = show({key: block.data[key].plain() for key in used})
        raise ConfigError.of(block.data[used[-1]].where, field, value, error, fix)


def _body_of(key: str, given: Value) -> tuple[dict[str, Any], list[str]]:
    """The explicit block of a shorthand, and notes. Raises ConfigError."""
    field = f"correction.{key}"
    if key == "preset":
        body, notes = _body_of_preset(given), alias_notes(given.data)
    elif not isinstance(given.data, dict):
        fix = f"write `correction: {{{key}: {{...}}}}` with the keys of that system's block"
        raise ConfigError.of(given.where, field, show(given.plain()), "must be a block of keys", fix)
    else:
        try:
            correction, notes = _READERS[key](given.plain())
        except ConfigError as error:
            places = [given.where_of(_path_of(problem.field)) for problem in error.problems]
            problems = zip(error.problems, places, strict=True)
            raise ConfigError(
                [replace(p, where=at, field=f"{field}.{p.field}") for p, at in problems]
            ) from error
        body = correction.model_dump(mode="json", exclude_none=True)
    return body, [f"{field} ({given.where}): {note}" for note in notes]


def _path_of(field: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in field.split(".")]


def _body_of_preset(given: Value) -> dict[str, Any]:
    if isinstance(given.data, str) and given.data in {**PRESETS, **ALIASES}:
        return preset_body(given.data)
    listed = f"presets: {', '.join(PRESETS)}"
    fix = did_you_mean(str(given.data), [*PRESETS, *ALIASES], "presets")
    fix = f"{fix} {listed}" if fix.startswith("did you mean") else listed
    raise ConfigError.of(given.where, "correction.preset", show(given.plain()), "no such preset", fix)


def _as_value(data: Any, where: str, *, afresh: bool = False) -> Value:
    if isinstance(data, dict):
        data = {key: _as_value(value, where) for key, value in data.items()}
    elif isinstance(data, list):
        data = [_as_value(value, where) for value in data]
    return Value(data, where, afresh=afresh)
