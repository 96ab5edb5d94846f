"""A part of the loss that is a user's function (``trainer/algorithm/own_parts.py`` has the contracts)."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from configs.schema.base import Schema, Seconds

ModuleAndName = Annotated[str, StringConstraints(pattern=r"^[^:]+:[^:]+$")]
"""``module:name`` of a function or a class."""
Plain = str | int | float | bool | None


class OwnFunction(Schema):
    function: ModuleAndName
    """``module:function``. The module is imported from the current folder or from the installed ones, on
    every node of the learner. [Your own parts](own_parts.md) describes the function's arguments and its
    result."""
    settings: dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Plain | list[Plain]
    ] = Field(default_factory=dict)
    """Further arguments of the function, by name: numbers, texts, lists of them."""
    check: Literal["call", "import", "none"] = "call"
    """The trial before the start, in a process that is killed if it hangs. ``call`` imports the module and
    checks the function's contract on a made batch. ``import`` only imports it. ``none`` is for a module that
    only the job's nodes have."""
    check_timeout_s: Seconds = 60.0
    """Deadline of the import, and of all calls of the trial."""
