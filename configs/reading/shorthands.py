"""A correction that is given by name, or in the keys of another system, as the explicit block that the schema
knows.

    correction: decoupled_geo_rs                                    a preset
    correction: {preset: decoupled_geo_rs, veto: 1e-5}              a preset, and keys that say otherwise
    correction: {verl: {rollout_is: token}}                         verl's rollout_correction block, read by configs/other_systems/verl.py
    correction: {roll: {infer_correction: true}}                    ROLL's infer_* options or train_infer_correction, likewise

A layer that does so starts the block afresh: nothing that lower layers say of ``correction`` stays. Its other
keys, and those of later layers, merge over the body that the name stands for. Only a ``verl`` (``roll``)
block over another one is read together with it, so that one of its keys can be overridden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.errors import ConfigError, Problem, did_you_mean
from configs.other_systems.verl import from_roll, from_verl
from configs.presets import ALIASES, PRESETS, alias_notes, preset_body
from configs.reading.yaml_values import Value, show

SHORTHANDS = ("preset", "verl", "roll")
_READERS = {"verl": from_verl, "roll": from_roll}


def with_named_preset(layer: Value) -> Value:
    """``correction: NAME`` as ``correction: {preset: NAME}``, so that overrides of the same layer can stand
    beside it."""
    block = layer.at(["correction"])
    if block is None or not isinstance(block.data, str):
        return layer
    return Value({**layer.data, "correction": Value({"preset": block}, block.where)}, layer.where)


def expand(layers: Sequence[Value], problems: list[Problem]) -> tuple[list[Value], list[str]]:
    """The layers, lowest first, with explicit corrections: a layer that uses a shorthand becomes two, what it
    stands for and the rest.

    Also the notes on how the block of another system was understood, where the correction starts from one.
    Problems are added to the list.
    """
    expanded: list[Value] = []
    notes: list[str] = []
    started: tuple[str, Value] | None = None
    for layer in map(with_named_preset, layers):
        block = layer.at(["correction"])
        used = (
            [key for key in SHORTHANDS if key in block.data]
            if block is not None and isinstance(block.data, dict)
            else []
        )
        if block is None or not used:
            expanded.append(layer)
            continue
        rest = Value({key: value for key, value in block.data.items() if key not in SHORTHANDS}, block.where)
        key, given = used[0], block.data[used[0]]
        if (
            started
            and started[0] == key
            and isinstance(given.data, dict)
            and isinstance(started[1].data, dict)
        ):
            given = Value({**started[1].data, **given.data}, given.where)
        started = key, given
        try:
            _require_one(used, block)
            body, notes = _body(key, given)
        except ConfigError as error:
            problems += error.problems
            body, rest = {}, Value({}, block.where)  # its other keys may only make sense over what it names
        where = f"{given.where}, {f'preset {given.data}' if key == 'preset' else key}"
        expanded.append(Value({"correction": _as_value(body, where, afresh=True)}, layer.where))
        expanded.append(Value({**layer.data, "correction": rest}, layer.where))
    return expanded, notes


def _require_one(used: Sequence[str], block: Value) -> None:
    if len(used) > 1:
        error, fix = (
            "a correction starts from one of these",
            "keep one; other keys of `correction` may then say otherwise",
        )
        field, value = (
            ", ".join(f"correction.{key}" for key in used),
            show({key: block.data[key].plain() for key in used}),
        )
        raise ConfigError.of(block.data[used[-1]].where, field, value, error, fix)


def _body(key: str, given: Value) -> tuple[dict[str, Any], list[str]]:
    """What a shorthand stands for, and notes. Raises ConfigError."""
    if key == "preset":
        return _preset(given), [
            f"correction.preset ({given.where}): {note}" for note in alias_notes(given.data)
        ]
    if not isinstance(given.data, dict):
        error, fix = (
            "must be a block of keys",
            f"write `correction: {{{key}: {{...}}}}` with the keys of that system's block",
        )
        raise ConfigError.of(given.where, f"correction.{key}", show(given.plain()), error, fix)
    try:
        correction, notes = _READERS[key](given.plain())
    except ConfigError as error:
        raise ConfigError(
            [
                replace(p, where=given.where_of(_path(p.field)), field=f"correction.{key}.{p.field}")
                for p in error.problems
            ]
        ) from error
    return correction.model_dump(mode="json", exclude_none=True), [
        f"correction.{key} ({given.where}): {note}" for note in notes
    ]


def _path(field: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in field.split(".")]


def _preset(given: Value) -> dict[str, Any]:
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
