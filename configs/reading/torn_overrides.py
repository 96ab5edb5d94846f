"""Recognises overrides that a shell split, or that are in the syntax of another system, and says how to write
them.

steps = 5               arrives as `steps`, `=`, `5`
layout={tp: 2, dp: 1}   arrives as `layout={tp:`, `2,`, `dp:`, `1}`; in bash without its blanks as `layout=tp:2`, `layout=dp:1`
+key=1, ~key            Hydra's way to add and to remove a key
"""

import re
from collections.abc import Iterator, Sequence
from shlex import quote

OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def rejoined(texts: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Pairs (override, None), or for one that a shell split (its pieces, fix)."""
    rest = list(texts)
    while rest:
        count = _count_pieces(rest)
        pieces, rest = rest[:count], rest[count:]
        if count == 1:
            yield pieces[0], None
        elif _opens_a_block(pieces[0]):
            whole = " ".join(pieces)
            yield whole, f"quote the override, since the shell takes it apart at blanks: {quote(whole)}"
        else:
            key, _, value = "".join(pieces).partition("=")
            yield " ".join(pieces), f"write it without blanks around the `=`: {quote(f'{key}={value}')}"


def _count_pieces(texts: Sequence[str]) -> int:
    """The number of texts, from the first on, that are one override."""
    first = texts[0]
    if _opens_a_block(first):
        open_brackets = 0
        for count, text in enumerate(texts, start=1):
            open_brackets += _open_brackets(text)
            if open_brackets <= 0:
                return count
        return 1  # no bracket closes: a mistake of another kind
    second, third = [*texts[1:3], "", ""][:2]
    if _KEY.fullmatch(first) and second.startswith("="):
        return 3 if second == "=" and third else 2
    is_key = first.endswith("=") and _KEY.fullmatch(first[:-1])
    return 2 if is_key and second and not re.search(r"[=\s]|^-", second) else 1


def _opens_a_block(text: str) -> bool:
    match = OVERRIDE.fullmatch(text)
    return match is not None and match["value"].startswith(("{", "[")) and _open_brackets(text) > 0


def _open_brackets(text: str) -> int:
    return sum(text.count(bracket) for bracket in "{[") - sum(text.count(bracket) for bracket in "}]")


def without_signs(text: str) -> str:
    """The override in `+key=1`, `++key=1` or `--key=1`; the text itself if it has no such sign, or more is wrong with it."""
    plain = text.lstrip("+-")
    return plain if OVERRIDE.fullmatch(plain) else text


def fix_for_no_override(text: str) -> str:
    """The fix for a text that is not of the form ``key.sub=value``."""
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
