"""A grid of settings: all combinations of lists of values, and the names of their runs, for job arrays and sweeps."""

import hashlib
import itertools
import re
from collections.abc import Sequence

from configs.schema.run import LONGEST_NAME


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


def run_name(base: str, element: Sequence[str]) -> str:
    """``tiny-seed-0-lr-1e-5``: each key by its shortest end that no other key has. A name that is too long for a
    run ends with a hash of the whole."""
    keys = [text.partition("=")[0] for text in element]
    parts = [base]
    for key, text in zip(keys, element, strict=True):
        ends = [".".join(key.split(".")[-n:]) for n in range(1, key.count(".") + 2)]
        others = [other for other in keys if other != key]
        short = next((end for end in ends if not any(f".{o}".endswith(f".{end}") for o in others)), key)
        parts.append(f"{short}-{text.partition('=')[2][-60:]}")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"
