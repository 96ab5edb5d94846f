"""Answers a name of another system with Tandem's field: one name, or a pasted block with every name in it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import dotted, is_close
from configs.other_systems.fields import OTHER_BLOCKS, OTHER_FIELDS, WITHOUT_COUNTERPART


@dataclass(frozen=True, slots=True)
class Known:
    """A name that the tables have."""

    name: str
    """As written: the last part of the path, or the whole path if the tables need more than the last part."""
    is_field: bool
    """Whether Tandem has a field for it."""
    text: str
    """The field, or the reason why there is none."""


def answer(path: Sequence[Hashable], value: Any, ours: Sequence[str] = ()) -> str | None:
    """The fix for an unknown key at a path; None if the tables know neither the key nor anything inside it.

    ours: Tandem's keys at that place. A block whose name is close to one of them may be misspelt, so its keys
    are not looked up, unless its name is in ``OTHER_BLOCKS``.
    """
    if known := _look_up(path, value):
        return f"here it is {known.text}" if known.is_field else _sentence([known.name], known)
    key = str(path[-1])
    if not isinstance(value, Mapping) or not (key in OTHER_BLOCKS or not is_close(key, ours)):
        return None
    found: dict[tuple[bool, str], list[Known]] = {}
    unknown: list[str] = []
    for at, inner in _names_within(path, value):
        if known := _look_up(at, inner):
            found.setdefault((known.is_field, known.text), []).append(known)
        else:
            unknown.append(dotted(at[len(path) :]))
    if not found and key not in OTHER_BLOCKS:
        return None
    lines = [_sentence(list(dict.fromkeys(one.name for one in alike)), alike[0]) for alike in found.values()]
    if unknown:
        lines.append(f"not known here: {', '.join(unknown)}")
    return "\n".join(lines) or None


def _look_up(path: Sequence[Hashable], value: Any) -> Known | None:
    """The tables' answer for the longest end of the path that they contain. slime writes dashes for
    underscores."""
    parts = [str(part) for part in path]
    has_keys = isinstance(value, Mapping) and bool(value)
    if has_keys and parts[-1] in OTHER_BLOCKS:  # `data`, elsewhere the name of a file
        return None
    for start in range(len(parts)):
        end = ".".join(parts[start:]).replace("-", "_")
        name = dotted(parts) if "." in end else parts[-1]
        for table, is_field in ((OTHER_FIELDS, True), (WITHOUT_COUNTERPART, False)):
            if end in table:
                return Known(name, is_field, table[end])
    flag = parts[-1].replace("-", "_")
    if flag.startswith("sglang_") or parts[-2:-1] == ["sglang"]:  # slime's flags, and AReaL's block
        name = flag.removeprefix("sglang_")
        return Known(
            parts[-1], True, f"`rollout.server_args={{{name}: ...}}`, the arguments of SGLang's servers"
        )
    return None


def _names_within(path: Sequence[Hashable], block: Mapping) -> list[tuple[tuple[Hashable, ...], Any]]:
    """Pairs (path, value) of all values at any depth, and of the inner blocks that the tables know as a whole."""
    names = []
    for key, value in block.items():
        at = (*path, key)
        if isinstance(value, Mapping) and value and _look_up(at, value) is None:
            names += _names_within(at, value)
        else:
            names.append((at, value))
    return names


def _sentence(names: Sequence[str], known: Known) -> str:
    """One sentence on names with the same answer."""
    *others, last = names
    subject = f"{', '.join(others)} and {last}" if others else last
    if known.is_field:
        return f"{subject}, here {'they are' if others else 'it is'} {known.text}"
    return f"{subject} {'have' if others else 'has'} no counterpart: {known.text}"
