"""A reward function of the user's, ``module:function``: how it is found, called, and what it may return."""

import difflib
import importlib
import inspect
import math
import os
import sys
import sysconfig
from collections.abc import Callable
from numbers import Real
from types import ModuleType, TracebackType
from typing import cast

from rollout.records import Score

RewardFunction = Callable[..., float | tuple[float, dict[str, float]]]
"""f(prompt_text, response_text, reference) -> value, or (value, parts). One with a parameter ``row`` is also
given the data file's row."""


def import_reward_function(path: str) -> RewardFunction:
    """The function that ``module:function`` names; modules in the current working directory are found too.

    Raises:
        ValueError: the module or the function is missing, importing the module fails or ends the process, or
        the function is `async`
            or does not take three texts.
    """
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(
            f"reward function {path!r} is not of the form module:function, e.g. my_rewards:score"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file of the user's must not shadow an installed module
    importlib.invalidate_caches()  # the module's file may be newer than the interpreter's listing of its folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(
                f"reward function {path!r}: {module_name} imports {error.name!r}, which is not installed"
            ) from error
        raise ValueError(
            f"reward function {path!r}: there is no module {module_name!r} in {os.getcwd()} or among the installed ones; "
            f"run from the folder that holds {module_name.split('.')[0]}.py, or set PYTHONPATH"
        ) from error
    except SystemExit as error:
        wrong = f"importing {module_name} ends the process: {describe(error)}"
        raise ValueError(
            f"reward function {path!r}: {wrong}; put a script's part under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(
            f"reward function {path!r}: importing {module_name} raised {describe(error)}; correct the module"
        ) from error
    return _checked(path, module, function_name)


def _checked(path: str, module: ModuleType, name: str) -> RewardFunction:
    function = getattr(module, name, None)
    if function is None:
        close = difflib.get_close_matches(
            name, [n for n, value in vars(module).items() if inspect.isfunction(value)], n=1
        )
        hint = f"did you mean {close[0]!r}?" if close else "define it, or correct the name"
        raise ValueError(f"reward function {path!r}: {module.__name__} has no {name!r}; {hint}")
    if not callable(function):
        raise ValueError(
            f"reward function {path!r} is a {type(function).__name__}, not a function; name one that can be called"
        )
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        where = place_of(function)
        raise ValueError(
            f"reward function {path!r} is `async def` ({where}), and nothing awaits it; write `def`, and asyncio.run inside"
        )
    try:
        more = {"row": {}} if takes_row(function) else {}
        inspect.signature(function).bind("prompt", "response", "reference", **more)
    except TypeError as error:
        must = "must take (prompt_text, response_text, reference), and beside them at most row"
        raise ValueError(f"reward function {path!r} {must}: {error}") from error
    except ValueError:  # some functions written in C have no signature; the first call will tell
        pass
    return cast(RewardFunction, function)


def takes_row(function: Callable) -> bool:
    """Whether a reward function names a parameter ``row``, for the whole record of the data file."""
    try:
        return "row" in inspect.signature(function).parameters
    except ValueError:  # some functions written in C have no signature
        return False


def to_score(returned: object) -> Score:
    """What a reward function returned, as a score.

    Raises:
        TypeError: neither a real number nor a pair of one and a dict of such.
        ValueError: a value is infinite or NaN.
    """
    if inspect.iscoroutine(returned):
        returned.close()  # else Python warns that nothing awaited it
    value, parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise TypeError(f"the parts of a reward must be a dict from names to numbers, not {_short(parts)}")
    return Score(
        value=_finite(value, "the reward"),
        parts={name: _finite(part, f"part {name!r}") for name, part in parts.items()},
    )


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, not {_short(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {float(value)}, which is not finite")
    return float(value)


def _short(value: object) -> str:
    return (
        f"{type(value).__name__} {value!r:.60}"
        if isinstance(value, str | dict | tuple | list)
        else f"{type(value)}"
    )


def describe(error: BaseException) -> str:
    """``KeyError: 'x' (rewards.py:12 in score)``: the exception, and the line of the user's code that raised
    it or called what did."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    said = _one_line(said)
    if isinstance(error, SyntaxError):  # names its own line
        return said
    lines = list(_lines_of(error.__traceback__))
    outside = [line for line in lines if not is_library(line[0])]
    if not lines:
        return said
    file, number, function = (outside or lines)[-1]
    return f"{said} ({os.path.basename(file)}:{number} in {function})"


def _lines_of(traceback: TracebackType | None):
    """(file, line, function), outermost first."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_filename, traceback.tb_lineno, code.co_name
        traceback = traceback.tb_next


_LIBRARIES = tuple(
    {
        os.path.realpath(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def is_library(file: str) -> bool:
    """Whether a file is Python's own or an installed package's, so not the place where a user looks first."""
    return file.startswith("<") or os.path.realpath(file).startswith(_LIBRARIES)


_LONGEST_MESSAGE = 300


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"


def place_of(function: Callable) -> str:
    """``rewards.py:12 in score``, where a function is defined; its module's name where it was not written in
    Python."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    if code is None:
        return str(getattr(function, "__module__", "?"))
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"
