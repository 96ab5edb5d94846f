"""Imports of the engines: thousands of modules, of which nothing is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Inside, there are no garbage collections, which take a quarter of an import's time. Afterwards they pass over what is
    there by then: in a fork they would copy every page of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
