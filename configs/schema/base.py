"""The base of every schema class, and the few types that several of them share."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Schema(BaseModel):
    """Frozen, closed (an unknown key is an error) and with every default stated once, here in the schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


_UNEXPANDED = re.compile(r"~[\w-]*(?=/|$)|\$\w+|\$\{\w+\}")
"""What a shell replaces at the beginning of a path."""
LONGEST_NAME, LONGEST_PATH = 255, 4000
"""Bytes. Linux takes 4096 of a path, of which this leaves some for the files in a folder."""


def _can_be_looked_at(value: Any) -> Any:
    if value == "":  # as a Path it would be the current folder
        raise ValueError("an empty path; name a file or folder, `.` for the current folder")
    if isinstance(value, str) and (unexpanded := _UNEXPANDED.match(value)):
        fix = f"write the path out, {os.path.expandvars(os.path.expanduser(value))}"
        raise ValueError(
            f"a path in a config is taken as it stands, and `{unexpanded[0]}` in it is not expanded; {fix}"
        )
    if isinstance(value, str) and (
        len(value.encode()) > LONGEST_PATH or any(len(n.encode()) > LONGEST_NAME for n in value.split("/"))
    ):
        # of these even Path.exists raises
        raise ValueError(
            f"longer than a path ({LONGEST_PATH} bytes) or a name in it ({LONGEST_NAME}) may be; use shorter names"
        )
    return value


GivenPath = Annotated[Path, BeforeValidator(_can_be_looked_at)]


def at_most(limit: float, reason: str) -> AfterValidator:
    """A generous bound: whoever exceeds it has mistyped, and would hear of it from a role, or never."""

    def check(value: Any) -> Any:
        if value > limit:
            raise ValueError(f"beyond reason: {reason}; use at most {limit:_}")
        return value

    return AfterValidator(check)


def at_least(limit: float, reason: str) -> AfterValidator:
    """The same from below."""

    def check(value: Any) -> Any:
        if value < limit:
            raise ValueError(f"beyond reason: {reason}; use at least {limit}")
        return value

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[PositiveInt, at_most(10**6, "no cluster runs a million of these at once")]
"""Of processes, prompts or requests at a time: at most a million."""
Siblings = Annotated[PositiveInt, at_most(2**16, "nobody samples so many responses to one prompt")]
"""Samples of one prompt: at most 65536."""
Steps = Annotated[PositiveInt, at_most(10**9, "at a step a second, thirty years have fewer")]
"""At most a billion."""
Tokens = Annotated[PositiveInt, at_most(2**31 - 1, "positions in a batch are numbers of 32 bits")]
"""At most 2**31 - 1."""
Seconds = Annotated[PositiveFloat, at_most(2 * 10**6, "ZeroMQ waits for 24 days at most")]
"""At most two million, 23 days."""
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
"""Of a term of the loss: at most 1000."""
