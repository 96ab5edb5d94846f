"""Text for a terminal, which obeys control characters, and for a shell. A model, its program or a server may have written
the text."""

import shlex
import unicodedata

PICTURES = 0x2400
"""Unicode's pictures of the control characters begin here."""
LEFT_AS_THEY_ARE = "\n\t\u200c\u200d"
"""The last two join letters and emoji."""


def visible(text: str) -> str:
    """The text with its control characters made visible, except tab and new line."""
    return "".join(map(_visible_character, text))


def on_one_visible_line(text: str) -> str:
    """The text of ``visible``, with one blank for each run of blanks and line ends."""
    return visible(" ".join(text.split()))


def tandem_command(*words: object) -> str:
    """A ``tandem`` command for a person to paste into a shell. It is quoted, so that the shell takes each word as it is."""
    return shlex.join(["tandem", *map(str, words)])


def _visible_character(character: str) -> str:
    if character in LEFT_AS_THEY_ARE or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    return chr(PICTURES + code) if code < 0x20 else f"\\u{code:04x}"
