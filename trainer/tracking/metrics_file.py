"""metrics.jsonl: a JSON object of a step and its numbers per line; read whole, or from its end."""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.reading.files import openable
from trainer.file_system import write_whole

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, with two lines of one step joined; None stands for a value that was not
    finite.

    Lines that are not a JSON object of a step and numbers (torn by a crash, or edited) are left out, with a
    warning. Raises OSError.
    """
    rows, torn = list[dict[str, Any]](), list[str]()
    lines = openable(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not _join(rows, line):
            torn.append(str(number))
    if torn:
        log.warning("%s: line %s not readable as a step and numbers, left out", path, ", ".join(torn))
    return rows


class GrowingMetrics:
    """The lines of a metrics.jsonl to which a run adds. Each read reads what was added since the one before;
    only a replaced file is read from the start."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[dict[str, Any]]()
        self._inode, self._end, self._last = 0, 0, b""
        """The file that was read, the end of its last whole line, and that line."""

    def read(self) -> list[dict[str, Any]]:
        """Like ``read_metrics``, for a file that is being written; no lines if it does not exist. Unchanged
        lines are the same objects as at the read before. Raises OSError."""
        try:
            added = self._added()
        except FileNotFoundError:
            added = self._begin_anew(0)
        *whole, begun = added.split(b"\n")
        for line in whole:
            _join(self._rows, line.decode(errors="replace"))
            self._end, self._last = self._end + len(line) + 1, line + b"\n"
        rows = [*self._rows]
        _join(rows, begun.decode(errors="replace"))  # if only the end of its line is missing
        return rows

    def _added(self) -> bytes:
        with openable(self._path).open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._end - len(self._last))
            content = file.read()
            # A file that replaces another may get the inode of an earlier one.
            if inode == self._inode and content.startswith(self._last):
                return content[len(self._last) :]
            self._begin_anew(inode)
            file.seek(0)
            return file.read()

    def _begin_anew(self, inode: int) -> bytes:
        self._rows, self._inode, self._end, self._last = [], inode, 0, b""
        return b""


def _join(rows: list[dict[str, Any]], line: str) -> bool:
    """Add a line to those before it, or join it to the last, if it is of the same step. Returns whether it can be read."""
    if (row := _row_in(line)) is None:
        return False
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1] = rows[-1] | row
    else:
        rows.append(row)
    return True


def _row_in(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and all(map(_is_value, row.values()))
    return row if is_row else None


def _is_value(value: Any) -> bool:
    """A number that is finite as a float, or None. (Python's JSON has NaN and integers of any length.)"""
    return value is None or (
        type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
    )


def rows_from_the_end(path: Path, *, with_metric: str = "") -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, the newest first. Reads no more of the file than the caller takes. With
    ``with_metric``, lines before the newest are left out unless they have the metric."""
    newest = True
    for line in _lines_from_the_end(path):
        if newest or not with_metric or f'"{with_metric}"' in line:
            row = _row_in(line)
            if row is not None:
                newest = False
                yield row


def _lines_from_the_end(path: Path) -> Iterator[str]:
    with openable(path).open("rb") as file:
        left, begun = file.seek(0, os.SEEK_END), b""
        while left:
            size = min(left, BLOCK_BYTES)
            left = file.seek(left - size)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from (line.decode(errors="replace") for line in reversed(lines))
        yield begun.decode(errors="replace")


def keep_until(path: Path, step: int, then: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """Replace the file atomically by its whole lines up to ``step``, followed by ``then``; returns these lines."""
    rows = read_metrics(path) if path.exists() else []
    kept = [*(row for row in rows if row["step"] <= step), *then]
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept).encode(), flush=True)
    return kept
