"""Overrides that a shell took apart, or that another system writes another way: what was meant, and how to
write it.

steps = 5               arrives as `steps`, `=`, `5`
layout={tp: 2, dp: 1}   arrives as `layout={tp:`, `2,`, `dp:`, `1}`; in bash without its blanks as `layout=tp:2`, `layout=dp:1`
+key=1, ~key            Hydra's way to add and to remove a key
"""

import re
from collections.abc import Iterator, Sequence

OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def rejoined(texts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each override with None, or the pieces of one that was taken apart, and how to write it."""
    rest = list(texts)
    while rest:
        count = _pieces(rest)
        pieces, rest = rest[:count], rest[count:]
        if count == 1:
            yield pieces[0], None
        elif _opens_a_block(pieces[0]):
            whole = " ".join(pieces)
            yield whole, f"quote the override, since the shell takes it apart at blanks: {quoted(whole)}"
        else:
            key, _, value = "".join(pieces).partition("=")
            yield " ".join(pieces), f"write it without blanks around the `=`: {quoted(f'{key}={value}')}"


def _pieces(texts: Sequence[str]) -> int:
    """How many of the first texts are one override."""
    first = texts[0]
    if _opens_a_block(first):
        open_brackets = 0
        for count, text in enumerate(texts, start=1):
            open_brackets += _open_brackets(text)
            if open_brackets <= 0:
                return count
        return 1  # they close nowhere: a mistake of another kind
    following = [*texts[1:3], "", ""]
    if _KEY.fullmatch(first) and following[0].startswith("="):
        return 3 if following[0] == "=" and following[1] else 2
    if (
        first.endswith("=")
        and _KEY.fullmatch(first[:-1])
        and following[0]
        and not re.search(r"[=\s]|^-", following[0])
    ):
        return 2
    return 1


def _opens_a_block(text: str) -> bool:
    match = OVERRIDE.fullmatch(text)
    return match is not None and match["value"].startswith(("{", "[")) and _open_brackets(text) > 0


def _open_brackets(text: str) -> int:
    return sum(text.count(bracket) for bracket in "{[") - sum(text.count(bracket) for bracket in "}]")


def quoted(text: str) -> str:
    """For a shell, as little as it needs."""
    return (
        "'" + text.replace("'", "'\\''") + "'" if re.search(r"[\s{}\[\]*?$&|;<>()'\"~#!`\\]", text) else text
    )


def fix_for_no_override(text: str) -> str:
    """What to write instead of a text that has not the form ``key.sub=value``."""
    plain = text.lstrip("-")
    if plain != text and OVERRIDE.fullmatch(plain):
        return f"write `{plain}`, without dashes"
    if text.startswith("+") and OVERRIDE.fullmatch(text.lstrip("+")):
        return f"write `{text.lstrip('+')}`: a key is set whether or not a file has it"
    if text.startswith("~"):
        key = text.lstrip("~").partition("=")[0] or "key"
        return f"no override takes a key away: write `{key}=null` where it may be nothing, or its default"
    if text.endswith((".yaml", ".yml")):
        return "name CONFIG first, overrides after it; `extends=FILE` lays a further file over it"
    key, colon, value = text.partition(":")
    if colon and value and _KEY.fullmatch(key):
        return f"write `{key}={value.strip()}`"
    return "write for example `rollout.group_size=8`, without blanks, or in quotes where the value has some"
