"""Tables on the console, and a terminal's changing line. Plain tables have no borders and no colours, so that they read well
in a log file too."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rollout.terminal_text import visible

if TYPE_CHECKING:
    from rich.text import Text


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, with the columns of all rows below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def print_over(text: str, end: str = "", *, file: TextIO | None = None) -> None:
    """Print the text and its ``end`` in the place of the line that a terminal shows last; "" clears that line for other
    output. A text that is longer than a line is cut: the cursor could not go back to its begin."""
    width = shutil.get_terminal_size().columns - 1 - len(end)
    shown = text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"
    print(f"\033[K{shown}{end}", end="\r", file=file, flush=True)


def print_table(
    titles: Sequence[str],
    rows: "Sequence[Sequence[str | Text]]",
    *,
    width: int | None = None,
    title: str | None = None,
) -> None:
    """A table with borders. ``width``: that of the output where it is no terminal; None: as wide as the table is.

    A text is shown as it is, not read as rich's markup: a user's may hold ``[/INST]``.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(Text(visible(heading))) for heading in titles)
    table = Table(*columns, title=None if title is None else Text(visible(title)), title_justify="left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row))
    if width is None:
        width = 1 + sum(max(map(len, column)) + 3 for column in zip(titles, *rows, strict=True))
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)
