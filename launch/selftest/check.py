"""A check of the selftest, and its outcome.

A check passes, fails with an error and a fix to try, cannot run on this machine ("not here"), or is left out because
a check that it needs has not passed ("not run"). A crash, a dead process or a deadline fails only the check that it
ends. The other checks continue.
"""

import importlib.util
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from launch.checks.devices import gpus_here
from launch.processes.supervisor import Interrupted, RoleFailed

if TYPE_CHECKING:
    from launch.selftest.bench import Bench

ERROR = re.compile(r"tandem: |[\w.]*(Error|Exception|Died|Failed)\b")
REPORT = "report it with selftest.txt, which has the versions and the end of the log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts that decide which checks can run."""

    gpus: int
    has_transformer_engine: bool


def this_machine() -> Machine:
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    return Machine(gpus=gpus_here(), has_transformer_engine=has_transformer_engine)


class CheckFailed(Exception):
    """error: what is wrong. fix: what to try. details: for the report alone, such as the end of a log."""

    def __init__(self, error: str, fix: str = REPORT, details: str = ""):
        super().__init__(error)
        self.error, self.fix, self.details = error, fix, details


@dataclass(frozen=True, slots=True)
class Found:
    """What a check that passed has measured."""

    text: str
    """One line of the table."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """For scripts; a name ends with its unit."""


class Result(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_HERE = "not here"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    proves: str
    """One sentence."""
    run: Callable[["Bench"], Found]
    """Raises CheckFailed. Any other exception is a failure too."""
    seconds: float
    """Its time on two idle cores, from which the time left is estimated."""
    deadline_s: float = 600.0
    needs: tuple[str, ...] = ()
    """Checks that must have passed before this one."""
    uses_server: bool = False
    why_not_here: Callable[[Machine], str | None] = lambda machine: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: Check
    result: Result
    text: str
    """The finding, the error or the reason."""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    details: str = ""


def why_not(check: Check, machine: Machine, earlier: Mapping[str, Outcome]) -> Outcome | None:
    """The outcome of a check that cannot run; None if it can. earlier: outcomes by the check's name."""
    if (reason := check.why_not_here(machine)) is not None:
        return Outcome(check=check, result=Result.NOT_HERE, text=reason)
    for need in (earlier[name] for name in check.needs):
        text = f"it needs `{need.check.name}`"
        if need.result is Result.NOT_HERE:
            return Outcome(check=check, result=Result.NOT_HERE, text=f"{text}: {need.text}")
        if need.result is not Result.PASS:
            word = "failed" if need.result is Result.FAIL else "was not run"
            return Outcome(check=check, result=Result.NOT_RUN, text=f"{text}, which {word}")
    return None


def outcome_of(check: Check, bench: "Bench") -> Outcome:
    """Run the check. Raises only Interrupted and KeyboardInterrupt. The caller fills in ``seconds``."""
    try:
        found = check.run(bench)
    except Interrupted:
        raise
    except CheckFailed as failure:
        wrong = failure
    except RoleFailed as failure:
        wrong = CheckFailed(_in_one_line(failure), details=str(failure))
    except Exception as error:
        wrong = CheckFailed(f"{type(error).__name__}: {error}", details=traceback.format_exc())
    else:
        return Outcome(check=check, result=Result.PASS, text=found.text, figures=found.figures)
    return Outcome(check=check, result=Result.FAIL, text=wrong.error, fix=wrong.fix, details=wrong.details)


def _in_one_line(failure: RoleFailed) -> str:
    """How a process ended, and the most telling line of the end of its log."""
    first, *rest = str(failure).splitlines()
    said = [line.strip() for line in rest if line.strip() and not line.startswith("Its whole log")]
    if not said:
        return first
    errors = [line for line in said if ERROR.match(line)]
    has_traceback = any(line.startswith("Traceback") for line in said)
    return f"{first} {(errors or said)[-1 if has_traceback else 0]}"
