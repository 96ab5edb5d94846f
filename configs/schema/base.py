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


def _not_empty(value: Any) -> Any:
    if value == "":  # as a Path it would be the current folder
        raise ValueError("an empty path; name a file or folder, `.` for the current folder")
    return value


GivenPath = Annotated[Path, BeforeValidator(_not_empty)]
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
