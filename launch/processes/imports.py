"""Imports of the engines: thousands of modules, of which nothing is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Inside, no garbage collection looks at what is imported, which takes a quarter of the time. Afterwards none looks at
    all that is there by then: a fork would copy every page of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
