"""The user's reward function, ``module:function``: import, call, and check of its result."""

import difflib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from numbers import Real
from typing import cast

from rollout.environments.tandem_worker.failures import describe
from rollout.records import Score

RewardFunction = Callable[..., float | tuple[float, dict[str, float]]]
"""f(prompt_text, response_text, reference) -> value, or (value, parts). It may be ``async``, and may have further
parameters, of ``FURTHER``."""

FURTHER = {"row": {}, "num_tokens": 1, "finish_reason": "stop"}
"""Further parameters by name, with values for a trial: the record of the data file, the tokens of the response with
its end token, and ``stop`` or ``length``."""


def import_reward_function(path: str) -> RewardFunction:
    """The function that ``module:function`` names, also from a module in the current working directory.

    Raises:
        ValueError: the module or the function is missing, the import fails or ends the process, or the
        function does not take three texts.
    """
    return _checked_function(
        path, import_named("reward function", path, "module:function, e.g. my_rewards:score")
    )


def import_named(kind: str, path: str, form: str) -> object:
    """The object that ``module:name`` names, also from a module in the current working directory. ``kind`` and
    ``form`` are for messages.

    Raises:
        ValueError: the module or the name is missing, or the import fails or ends the process.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{kind} {path!r} is not of the form {form}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's file must not shadow an installed module
    importlib.invalidate_caches()  # the file may be newer than the interpreter's listing of its folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(
                f"{kind} {path!r}: {module_name} imports {error.name!r}, which is not installed"
            ) from error
        raise ValueError(
            f"{kind} {path!r}: there is no module {module_name!r} in {os.getcwd()} or among the installed ones; "
            f"run from the folder that holds {module_name.split('.')[0]}.py, or set PYTHONPATH"
        ) from error
    except SystemExit as error:
        raise ValueError(
            f"{kind} {path!r}: importing {module_name} ends the process: {describe(error)}; "
            "put a script's part under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # the import of a user's module may raise anything
        raise ValueError(
            f"{kind} {path!r}: importing {module_name} raised {describe(error)}; correct the module"
        ) from error
    named = getattr(module, name, None)
    if named is None:
        callables = [
            n for n, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)
        ]
        close = difflib.get_close_matches(name, callables, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "define it, or correct the name"
        raise ValueError(f"{kind} {path!r}: {module.__name__} has no {name!r}; {hint}")
    return named


def _checked_function(path: str, function: object) -> RewardFunction:
    if not callable(function):
        raise ValueError(
            f"reward function {path!r} is a {type(function).__name__}, not a function; name something callable"
        )
    try:
        further = {name: FURTHER[name] for name in further_parameters(function)}
        inspect.signature(function).bind("prompt", "response", "reference", **further)
    except TypeError as error:
        must = (
            f"must take (prompt_text, response_text, reference), and beside them at most {', '.join(FURTHER)}"
        )
        raise ValueError(f"reward function {path!r} {must}: {error}") from error
    except ValueError:  # some C functions have no signature; the first call checks them
        pass
    return cast(RewardFunction, function)


def further_parameters(function: Callable) -> list[str]:
    """Those of ``FURTHER`` that a reward function has."""
    try:
        return [name for name in FURTHER if name in inspect.signature(function).parameters]
    except ValueError:  # some C functions have no signature
        return []


def to_score(returned: object) -> Score:
    """The score that a reward function returned.

    Raises:
        TypeError: the value is neither a real number nor a pair of a real number and a dict of them.
        ValueError: a value is infinite or NaN.
    """
    value, parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise TypeError(
            f"the parts of a reward must be a dict from names to numbers, not {_short_text(parts)}"
        )
    return Score(
        value=_finite_number(value, "the reward"),
        parts={name: _finite_number(part, f"part {name!r}") for name, part in parts.items()},
    )


def _finite_number(value: object, name: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {_short_text(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {float(value)}, which is not finite")
    return float(value)


def _short_text(value: object) -> str:
    has_content = isinstance(value, str | dict | tuple | list)
    return f"{type(value).__name__} {value!r:.60}" if has_content else f"{type(value)}"


def place_of(function: Callable) -> str:
    """``rewards.py:12 in score``, the definition of a function; the module's name of one not written in Python."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    if code is None:
        return str(getattr(function, "__module__", "?"))
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"
