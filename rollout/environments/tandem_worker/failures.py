"""Errors in one line, here and in Tandem's own processes."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback

LONGEST_MESSAGE = 300
FOLDER = os.path.dirname(__file__)


class Failure(Exception):
    """An answer that is an error. See ``__init__.py`` for ``kind``."""

    def __init__(self, message, kind="start"):
        super().__init__(readable(message))
        self.kind = kind


def readable(text):
    """The text with question marks for halves of surrogate pairs, which UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode()


def error_text(error):
    """``KeyError: 'x'``, in one line."""
    try:
        told = str(error)
    except Exception:  # a user's __str__ may be any code
        told = ""
    text = f"{type(error).__name__}: {told}" if told else type(error).__name__
    text = "".join(map(_printable, " ".join(readable(text).split())))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…"


def _printable(character):
    """Control characters as escapes: a terminal obeys them, and the text may be a model's."""
    return character if character.isprintable() else ascii(character)[1:-1]


def describe(error):
    """``KeyError: 'x' (env.py:12 in step)``: the exception, and the innermost line of the user's code."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [(code, number) for code, number in lines if os.path.dirname(code.co_filename) != FOLDER]
    if isinstance(error, SyntaxError) or not lines:
        return error_text(error)
    code, number = ([line for line in lines if not is_library(line[0].co_filename)] or lines)[-1]
    return f"{error_text(error)} ({os.path.basename(code.co_filename)}:{number} in {code.co_name})"


@functools.lru_cache(maxsize=1024)
def is_library(file):
    """Whether a file belongs to Python or an installed package, and so is not the user's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names)
    return file.startswith("<") or os.path.realpath(file).startswith(folders)


def place_of(thing):
    """``env.py:12 in step``: the definition of a function or a class, or the class of an object."""
    if not callable(thing) or not (inspect.isroutine(thing) or inspect.isclass(thing)):
        thing = type(thing)
    thing = inspect.unwrap(thing)
    try:
        file, line = inspect.getfile(thing), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):  # not written in Python
        return str(getattr(thing, "__module__", "?"))
    return f"{os.path.basename(file)}:{line} in {thing.__name__}"


def short(value):
    has_content = isinstance(value, (str, dict, tuple, list, bool, type(None)))
    return f"{type(value).__name__} {value!r:.60}" if has_content else f"{type(value)}"
