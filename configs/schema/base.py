"""The base of every schema class, and the types that several of them share."""

import operator
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from configs.errors import Contradiction, Contradictions


class Schema(BaseModel):
    """Frozen and closed: an unknown key is an error. The schema is the only place of a default."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )

    def _contradictions(self) -> Iterable[Contradiction]:
        """Contradictions between fields that are valid each by itself."""
        return ()

    @model_validator(mode="after")
    def _fields_fit(self):
        if contradictions := list(self._contradictions()):
            raise Contradictions(contradictions)
        return self


_UNEXPANDED = re.compile(r"~[\w-]*(?=/|$)|\$\w+|\$\{\w+\}")
"""The beginning of a path that a shell would expand."""
LONGEST_NAME, LONGEST_PATH = 255, 4000
"""Bytes. Linux takes paths of 4096; the rest leaves room for files in a folder."""


def _check_path(value: Any) -> Any:
    if value == "":  # as a Path it would be the current folder
        raise ValueError("an empty path; name a file or folder, `.` for the current folder")
    if isinstance(value, str) and "\0" in value:  # functions of the system would raise
        raise ValueError("a path cannot hold the character NUL; remove it")
    if isinstance(value, str) and (unexpanded := _UNEXPANDED.match(value)):
        error = f"a path in a config is taken as it stands, and `{unexpanded[0]}` in it is not expanded"
        raise ValueError(f"{error}; write the path out, {os.path.expandvars(os.path.expanduser(value))}")
    sizes = [len(name.encode()) for name in value.split("/")] if isinstance(value, str) else [0]
    if sum(sizes) + len(sizes) - 1 > LONGEST_PATH or max(sizes) > LONGEST_NAME:  # Path.exists would raise
        error = f"longer than a path ({LONGEST_PATH} bytes) or a name in it ({LONGEST_NAME}) may be"
        raise ValueError(f"{error}; use shorter names")
    return value


GivenPath = Annotated[Path, BeforeValidator(_check_path)]
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A name that may be a part of a metric's."""


PartName = Annotated[str, StringConstraints(pattern=rf"^{PART_NAME.pattern}$")]


def _bound(words: str, is_beyond: Callable, limit: float, reason: str) -> AfterValidator:
    """A generous bound: a value beyond it is a mistake, which a role would report late or never."""

    def check(value: Any) -> Any:
        if is_beyond(value, limit):
            raise ValueError(f"beyond reason: {reason}; use {words} {limit:_}")
        return value

    return AfterValidator(check)


at_most = partial(_bound, "at most", operator.gt)
at_least = partial(_bound, "at least", operator.lt)


def address_of(url: str) -> SplitResult | None:
    """The parts of a URL; None if it cannot be parsed."""
    try:
        return urlsplit(url)
    except ValueError:  # brackets that do not close
        return None


def without_credentials(text: str) -> str:
    """The text without the users and passwords of the addresses in it. A password may hold an `@` and, in a
    database's address, a `/`. In doubt too much is removed."""
    text = re.sub(r"//([^/\s]*|[^/\s:@]*:\S*)@", "//…@", text)
    return re.sub(r"([?&](?:password|passwd)=)[^&\s'\"]+", r"\1…", text)


KEY_IN_A_VARIABLE = "leave them out, and name a variable in api_key_variable"


def served_at(example: str, *more_schemes: str) -> AfterValidator:
    """Addresses of servers, like ``example``, of http, https or ``more_schemes``. A user or a password in an
    address would stay readable in the run folder and in MLflow."""

    def check(urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            address = address_of(url)
            if (
                address is None
                or address.scheme not in ("http", "https", *more_schemes)
                or not address.hostname
            ):
                raise ValueError(
                    f"{without_credentials(url)!r} is not an address of a server; write it like {example}"
                )
            if address.username or address.password:
                raise ValueError(
                    f"an address of {address.hostname} holds a user or a password; {KEY_IN_A_VARIABLE}"
                )
        return urls

    return AfterValidator(check)


def _variable(error: str) -> AfterValidator:
    """Refuses, with ``error``, a text that is not the name of an environment variable."""

    def check(name: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(error)
        return name

    return AfterValidator(check)


KeyVariable = Annotated[
    str,
    _variable(
        "api_key_variable is no name of an environment variable; name the variable that holds the key, and not the key"
    ),
]
VariableName = Annotated[
    str,
    _variable(
        "holds a text that is no name of an environment variable; name the variable, and not its value"
    ),
]
SECRET = re.compile(r"token|secret|passw|key|credential", re.IGNORECASE)
"""If the name of an environment variable contains one of these, its value may be a secret."""
SHORTEST_SECRET = 8
"""Characters; shorter values, like `1`, are not secrets."""


def looks_secret(name: str, value: str) -> bool:
    """Whether an environment variable may hold a secret."""
    return SECRET.search(name) is not None and len(value) >= SHORTEST_SECRET


PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
UnitFraction = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1, both included."""
Count = Annotated[PositiveInt, at_most(10**6, "no cluster runs a million of these at once")]
"""Processes, prompts or requests at a time: at most a million."""
Siblings = Annotated[PositiveInt, at_most(2**16, "nobody samples so many responses to one prompt")]
"""Samples of one prompt: at most 65536."""
Steps = Annotated[PositiveInt, at_most(10**9, "at a step a second, thirty years have fewer")]
"""At most a billion."""
Tokens = Annotated[PositiveInt, at_most(2**31 - 1, "positions in a batch are numbers of 32 bits")]
"""At most 2**31 - 1."""
Seconds = Annotated[PositiveFloat, at_most(2 * 10**6, "ZeroMQ waits for 24 days at most")]
"""At most two million, 23 days."""
NonNegativeSeconds = Annotated[NonNegativeFloat, at_most(2 * 10**6, "ZeroMQ waits for 24 days at most")]
"""The same, 0 included."""
Temperature = Annotated[
    PositiveFloat,
    at_least(
        1e-3, "SGLang takes the likeliest token there, and its log-probs are those of another temperature"
    ),
    at_most(100, "every token is nearly as likely as any other there"),
]
"""Between 0.001 and 100."""
LearningRate = Annotated[PositiveFloat, at_most(1, "Adam moves every weight by about lr in a step")]
"""At most 1."""
Coefficient = Annotated[NonNegativeFloat, at_most(1000, "the rest of the loss would not count beside it")]
"""Factor of a term of the loss: at most 1000."""
