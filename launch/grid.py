"""A grid of settings: all combinations of lists of values, for job arrays and sweeps."""

import itertools
from collections.abc import Sequence


def combinations(lists: Sequence[str], option: str = "") -> list[tuple[str, ...]]:
    """The overrides of every combination of ``key=v1,v2,...``. The last key's values change fastest.

    option: what errors begin with, such as ``--array``. Raises ValueError for a list of another form.
    """
    choices, keys = [], set()
    for text in lists:
        key, _, values = text.partition("=")
        parts = [value.strip() for value in values.split(",")]
        error = None
        if not key or not all(parts):
            error = f"not a list of values; write key=v1,v2, such as {option}seed=0,1,2"
        elif set(values) & set("[]{}\"'"):
            error = "values with brackets or quotes cannot be listed; submit such runs one by one"
        elif key in keys or len(set(parts)) < len(parts):
            error = f"{'the key' if key in keys else 'a value'} is given twice; give each once"
        if error is not None:
            raise ValueError(f"{option}{text}: {error}")
        keys.add(key)
        choices.append([f"{key}={value}" for value in parts])
    return list(itertools.product(*choices))
