"""Imports of the engines: thousands of modules, none of which is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """While entered, there are no garbage collections, which take a quarter of an import's time. Later collections skip all
    objects that exist at the exit: in a fork they would copy every page of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
