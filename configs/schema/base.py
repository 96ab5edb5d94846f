"""The base of every schema class, and the few types that several of them share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Schema(BaseModel):
    """Frozen, closed (an unknown key is an error) and with every default stated once, here in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class Contradictions(ValueError):
    """Several things that a validator found at once; each is a problem of its own."""

    def __init__(self, said: Sequence[str]):
        super().__init__("\n".join(said))
        self.said = tuple(said)


LONGEST_NAME, LONGEST_PATH = 255, 4000
"""Bytes. Linux takes 4096 of a path, of which this leaves some for the files in a folder."""


def _can_be_looked_at(value: Any) -> Any:
    if value == "":  # as a Path it would be the current folder
        raise ValueError("an empty path; name a file or folder, `.` for the current folder")
    if isinstance(value, str) and (len(value.encode()) > LONGEST_PATH or any(len(n.encode()) > LONGEST_NAME for n in value.split("/"))):
        # of these even Path.exists raises
        raise ValueError(f"longer than a path ({LONGEST_PATH} bytes) or a name in it ({LONGEST_NAME}) may be; use shorter names")
    return value


GivenPath = Annotated[Path, BeforeValidator(_can_be_looked_at)]
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
