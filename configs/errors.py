"""What is wrong with a config, and how it is said: place, field, value, error and fix, all problems at once."""

import difflib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

COMMAND_LINE = "command line"
NOT_SET = "(not set)"
_LONGEST_VALUE = 100
_FEW = 8
"""So many names are listed even where one of them is close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a config."""

    where: str
    """``file:line`` of the file that set the field, "command line", or the option of a command that did."""
    field: str
    """Dotted; several, comma-separated, where fields contradict each other."""
    value: str
    error: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}\n  field: {self.field}\n  value: {self.value}\n  error: {self.error}\n  fix:   {self.fix}"


class Contradiction(ValueError):
    """A valid field that does not go with others."""

    def __init__(self, fields: Sequence[str], error: str, fix: str | None = None):
        """fields: dotted, those at fault, in the block whose validator raises this; none: the whole block.
        fix: None where changing any of the fields is one."""
        super().__init__(error if fix is None else f"{error}; {fix}")
        self.fields, self.error, self.fix = tuple(fields), error, fix


class Contradictions(ValueError):
    """Several that a validator found at once; each is a problem of its own."""

    def __init__(self, found: Sequence[Contradiction]):
        super().__init__("\n".join(map(str, found)))
        self.found = tuple(found)


class ConfigError(Exception):
    """Everything that is wrong with a config, one block per problem."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n\n".join([f"{count} in the configuration", *map(str, self.problems)]))

    @classmethod
    def of(cls, where: str, field: str, value: str, error: str, fix: str) -> "ConfigError":
        """One ``Problem`` alone."""
        return cls([Problem(where=where, field=field, value=value, error=error, fix=fix)])


def did_you_mean(wrong: str, known: Sequence[str], label: str, otherwise: str | None = None) -> str:
    """A fix for an unknown name: ``otherwise``, or the one that holds it or is close to it; and what is
    known, under ``label``, unless one of many is close."""
    holding = sorted(
        (k for k in known if f"_{wrong}_" in f"_{k}_"), key=len
    )  # as whole words, `token_is` in `decoupled_token_is`
    close = (
        holding
        or difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
        or [k for k in known if k.lower() == wrong.lower()]
    )
    listed = f"{label}: {', '.join(known)}" if known else "remove it"
    if close and not otherwise:
        return f"did you mean `{close[0]}`?{f' {listed}' if len(known) <= _FEW else ''}"
    return f"{otherwise}; {listed}" if otherwise else listed


def dotted(path: Sequence[Hashable]) -> str:
    return ".".join(map(str, path))


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
