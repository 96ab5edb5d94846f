"""Problems of a config: each has place, field, value, error and fix, and all are reported at once."""

import difflib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

COMMAND_LINE = "command line"
NOT_SET = "(not set)"
_LONGEST_VALUE = 100
_FEW = 8
"""Up to this many names are listed even where one of them is close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error of a config."""

    where: str
    """``file:line`` of the file that set the field, "command line", or the option of a command that did."""
    field: str
    """Dotted. Fields that contradict each other are separated by commas."""
    value: str
    error: str
    fix: str

    def __str__(self) -> str:
        rows = dict(field=self.field, value=self.value, error=self.error, fix=self.fix)
        lines = (f"  {f'{name}:':<6} {text}".replace("\n", f"\n{' ' * 9}") for name, text in rows.items())
        return "\n".join([self.where, *lines])


class Contradiction(ValueError):
    """Valid fields that do not go together."""

    def __init__(self, fields: Sequence[str], error: str, fix: str | None = None):
        """fields: the fields at fault, dotted, relative to the block whose validator raises this; none: the
        whole block. fix: None where a change of any of the fields is a fix."""
        super().__init__(error if fix is None else f"{error}; {fix}")
        self.fields, self.error, self.fix = tuple(fields), error, fix


class Contradictions(ValueError):
    """Several contradictions that one validator raises together; each becomes a ``Problem``."""

    def __init__(self, contradictions: Sequence[Contradiction]):
        super().__init__("\n".join(map(str, contradictions)))
        self.contradictions = tuple(contradictions)


class ConfigError(Exception):
    """All problems of a config."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__(
            "\n\n".join(
                [f"{counted(len(self.problems), 'problem')} in the configuration", *map(str, self.problems)]
            )
        )

    @classmethod
    def of(cls, where: str, field: str, value: str, error: str, fix: str) -> "ConfigError":
        """An error with a single ``Problem``."""
        return cls([Problem(where=where, field=field, value=value, error=error, fix=fix)])


def did_you_mean(wrong: str, known: Sequence[str], label: str, otherwise: str | None = None) -> str:
    """A fix for an unknown name: ``otherwise`` where it is given, else the known name that contains the wrong
    one or is close to it.

    The known names follow under ``label``, unless there are many and one is close. Of dotted names those that end
    with the wrong one come first.
    """
    if places := [name for name in known if name.endswith(f".{wrong}")]:
        return exists_as(places)
    # whole words alone: `token_is` is in `decoupled_token_is`
    containing = sorted((name for name in known if f"_{wrong}_" in f"_{name}_"), key=len)
    same_letters = [name for name in known if name.lower() == wrong.lower()]
    close = containing or difflib.get_close_matches(wrong, known, n=1, cutoff=0.6) or same_letters
    listed = f"{label}: {', '.join(known)}" if known else "remove it"
    if otherwise:
        return f"{otherwise}; {listed}"
    return f"did you mean `{close[0]}`?{f' {listed}' if len(known) <= _FEW else ''}" if close else listed


def exists_as(places: Sequence[str]) -> str:
    """Says where a name stands that was looked for elsewhere; of many places the first few."""
    named = " and ".join(f"`{place}`" for place in places[:_FEW])
    rest = len(places) - _FEW
    return f"it exists as {named}{f' and at {rest} more places' if rest > 0 else ''}"


def is_close(wrong: str, known: Sequence[str]) -> bool:
    """Whether a known name is spelt nearly like the wrong one."""
    return bool(difflib.get_close_matches(wrong, known, n=1, cutoff=0.6))


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def dotted(path: Sequence[Hashable]) -> str:
    return ".".join(map(str, path))


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
