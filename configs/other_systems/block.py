"""Reads a block of another system key by key. No key is dropped silently: it is honoured, noted as without
effect in that system too, or refused with a fix.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeGuard, TypeVar, overload

from configs.errors import NOT_SET, ConfigError, Problem, did_you_mean, dotted
from configs.reading.yaml_values import show
from configs.schema.correction import ImportanceWeight, RejectionRule

_Choice = TypeVar("_Choice", bound=str)
TWO_BOUNDS = 'write both as text, lower first: "0.5_2.0"'


class ForeignBlock:
    """A block of another system. Its problems, and notes on what its keys mean, are collected while it is read."""

    def __init__(
        self,
        block: Mapping[str, Any],
        name: str,
        known: Sequence[str],
        *,
        path: tuple = (),
        outer: "ForeignBlock | None" = None,
    ):
        """path, outer: for a block inside another one; ``outer`` collects the problems and notes of both."""
        self.block, self.notes = block, [] if outer is None else outer.notes
        self._name, self._path, self._problems = name, path, [] if outer is None else outer._problems
        for key in block:
            if key not in known:
                self.refuse(key, "unknown key", did_you_mean(str(key), known, "keys of this block"))

    def refuse(self, key: str, error: str, fix: str) -> None:
        value = show(self.block[key]) if key in self.block else NOT_SET
        self._problems.append(
            Problem(where=self._name, field=dotted((*self._path, key)), value=value, error=error, fix=fix)
        )

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self._problems)

    # ---- notes

    def say(self, keys: Sequence[str], ours: str, *, first: bool = False) -> None:
        """Note the meaning of those of the keys that are set."""
        given = [f"{key}: {show(self.block[key])}" for key in keys if key in self.block]
        if given:
            self.notes.insert(0 if first else len(self.notes), f"{', '.join(given)} -> {ours}")

    def unused(self, keys: Sequence[str], why: str) -> None:
        """Note that those of the keys that are set have no effect."""
        given = [f"{key}: {show(self.block[key])}" for key in keys if not is_off(self.block.get(key))]
        if given:
            self.notes.append(f"{', '.join(given)} -> no effect: {why}")

    # ---- values; a wrong value becomes a problem, and is read as not set

    def get(self, key: str, default: Any = None) -> Any:
        return self.block.get(key, default)

    @overload
    def flag(self, key: str, default: bool = False) -> bool: ...
    @overload
    def flag(self, key: str, default: None) -> bool | None: ...
    def flag(self, key: str, default: bool | None = False) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(key, "must be true or false", "write true or false, without quotes")
        return default

    def choice(self, key: str, choices: Sequence[_Choice], default: _Choice | None) -> _Choice | None:
        value = self.get(key, default)
        if value is None or value in choices:
            return value
        self.refuse(key, "not one of the choices", did_you_mean(str(value), choices, "choices"))
        return default

    def number(self, key: str, default: float | None, *, zero: bool = False) -> float | None:
        """A positive number, or 0 if ``zero``."""
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if is_number(value) and (value > 0 or (zero and value == 0)):
            return float(value)
        fix = f"use a number {'of at least' if zero else 'above'} 0, without quotes"
        self.refuse(key, "must be a number", fix)
        return None

    def veto(self, key: str, default: float | None) -> float | None:
        value = self.number(key, default)
        if value is not None and value >= 1:
            error = "would reject what the two policies agree on (rho = 1)"
            self.refuse(key, error, "use a value below 1; usual are 1e-4 to 1e-6")
        return value

    def any_number(self, key: str, default: float) -> float:
        """A number of either sign."""
        value = self.get(key, default)
        if is_number(value):
            return float(value)
        self.refuse(key, "must be a number", "use a number, without quotes")
        return default

    def inside(self, key: str, known: Sequence[str]) -> "ForeignBlock":
        """The block at a key; empty if the key is left out."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            self.refuse(key, "must be a block of keys", f"give it keys of: {', '.join(known)}")
            value = {}
        return ForeignBlock(value, self._name, known, path=(*self._path, key), outer=self)

    def all_inside(self, key: str, known: Sequence[str]) -> list["ForeignBlock"]:
        """The blocks in the list at a key."""
        items = self.get(key) or []
        if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
            fix = f"write a list of blocks with keys of: {', '.join(known)}"
            self.refuse(key, "must be a list of blocks", fix)
            items = []
        paths = [(*self._path, key, i) for i in range(len(items))]
        return [
            ForeignBlock(x, self._name, known, path=p, outer=self) for x, p in zip(items, paths, strict=True)
        ]

    def listed(self, key: str) -> list[Any]:
        """The parts of a comma-separated text, or of a list."""
        value = self.get(key)
        if isinstance(value, str):
            value = value.split(",")
        parts = value if isinstance(value, list | tuple) else [value]
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        return [part for part in parts if part not in (None, "")]

    def bounds(self, key: str, text: Any) -> tuple[float | None, float] | None:
        """(lower, upper) of verl's ``"0.5_2.0"``; (None, upper) of a number or its text."""
        parts = text.split("_") if isinstance(text, str) else [text]
        try:
            bounds = [float(part) for part in parts if not isinstance(part, bool)]
        except (TypeError, ValueError):
            bounds = []
        if len(bounds) not in (1, 2) or not all(isfinite(bound) and bound > 0 for bound in bounds):
            error = f"{show(text)} is neither a number above 0 nor two of them"
            self.refuse(key, error, f"write a number or, for two bounds, {TWO_BOUNDS}")
            return None
        if len(bounds) == 2 and not self.ordered(key, *bounds):
            return None
        return (None, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])

    def ordered(self, key: str, lower: float, upper: float) -> bool:
        if lower <= upper:
            return True
        error = f"the lower bound {show(lower)} is above the upper bound {show(upper)}"
        self.refuse(key, error, "correct them; nothing could pass")
        return False


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a float can hold the value."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", "none", "None")


def shown(part: ImportanceWeight | RejectionRule) -> str:
    return show({key: value for key, value in part.model_dump().items() if not is_off(value)})
