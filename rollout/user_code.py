"""The user's own functions and classes, ``module:name``: imported, checked before they are called, and tried in a separate
process before a start (``rewards/trial_process.py``)."""

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout.environments.tandem_worker.failures import Failure
from rollout.environments.tandem_worker.imports import imported
from rollout.pipe import jobs_of, serving

TELL_EVERY_S = 5.0
"""Time between two messages that a trial is still running."""
TRACE_WITHIN_S = 2.0
"""Time for a late process to write its current line."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def import_function(kind: str, path: str, form: str) -> Callable:
    """The function or class that ``module:name`` names, also from a module in the current working directory. ``kind`` and
    ``form`` are for messages. Raises ValueError: the module or the name is missing, the import fails or ends the process, or
    the name is not callable."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{kind} {path!r} is not of the form {form}")
    try:
        module = imported(module_name, "the installed ones", "is not installed in this environment")
    except Failure as error:
        raise ValueError(f"{kind} {path!r}: {error}") from error
    named = getattr(module, name, None)
    if named is None:
        callables = [
            n for n, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)
        ]
        close = difflib.get_close_matches(name, callables, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "define it, or correct the name"
        raise ValueError(f"{kind} {path!r}: {module.__name__} has no {name!r}; {hint}")
    if not callable(named):
        raise ValueError(f"{kind} {path!r} is a {type(named).__name__}, not a function; name {form}")
    return named


def further_parameters(function: Callable, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are parameters of the function."""
    try:
        return [name for name in names if name in inspect.signature(function).parameters]
    except ValueError:  # some C functions have no signature
        return []


def call_problem(
    function: Callable,
    given: Sequence[str],
    further: Sequence[str],
    settings: Mapping[str, Any] | None = None,
) -> str | None:
    """Why the function cannot be called with the arguments ``given``, those of ``further`` that are
    parameters of it, and its settings. None: it can be called. ``settings``: None for a kind of function that
    has no settings in the config."""
    passed = settings or {}
    if taken := sorted(passed.keys() & {*given, *further}):
        return f"settings hold {', '.join(taken)}, which Tandem itself passes; rename it"
    try:
        asked = dict.fromkeys(further_parameters(function, further))
        inspect.signature(function).bind(*given, **asked, **passed)
    except TypeError as error:
        also = "" if settings is None else f" and its settings ({', '.join(settings) or 'none'})"
        return f"it must take ({', '.join(given)}){also}, and may take {', '.join(further)}: {error}"
    except ValueError:  # some C functions have no signature; the first call checks them
        pass
    return None


def serve_trials(descriptor: int, attempt: Callable[..., None]) -> None:
    """Main function of a trial's process. It sends null once it is up. A job holds the arguments of ``attempt``. The answer,
    as JSON, is null, or the text of the ValueError that ``attempt`` raised."""
    with serving(descriptor) as connection:
        connection.send_bytes(b"null")
        for job in jobs_of(connection.recv):
            problem = None
            try:
                attempt(*job)
            except ValueError as error:
                problem = str(error)
            connection.send_bytes(json.dumps(problem).encode())


def users_line(trace: str, is_other: Callable[[str], bool]) -> str:
    """``, at rewards.py:3 in <module>``: the innermost of the user's lines in faulthandler's trace; an empty text if there
    is none. is_other: whether a file is not the user's."""
    for file, line, function in _FRAME.findall(trace):  # innermost first
        if not is_other(file):
            return f", at {os.path.basename(file)}:{line} in {function}"
    return ""
