"""The records of the user's JSONL or parquet files, one at a time, with the numbers of their lines or rows."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
Record = tuple[int, dict]
"""(number of the line or row, from 1; fields)."""
Progress = Callable[[float], None]
"""Gets, now and then, the share of a file that has been read."""
ProgressOf = Callable[[Path], AbstractContextManager[Progress]]
"""Makes a context for the reading of a file, which gives the file's ``Progress``."""

Refuse = Callable[[ValueError], object]
"""Gets the error of an unusable record. It raises the error, or keeps it; the record is then skipped."""

MOST_TOLD = 5
"""Bad records of a file that a message names one by one. It only counts the others."""
FIX_OF_ALL = "correct these records, or remove them"
_LINES_BETWEEN_REPORTS = 16384
_ROWS_AT_ONCE = 4096
_FOREIGN = {
    b"\x1f\x8b": ("compressed by gzip", "unpack it with `gunzip`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it with `unzstd`"),
    b"BZh": ("compressed by bzip2", "unpack it with `bunzip2`"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it with `unxz`"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or export it as JSONL"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the data", "fetch the data with `git lfs pull`"),
}
"""First bytes of other kinds of files: (kind, fix)."""
_PARQUET = b"PAR1"


def place(path: Path, number: int) -> str:
    """The place of a record, for messages."""
    return f"{path}:{'row' if path.suffix in PARQUET_SUFFIXES else 'line'} {number}"


def at_once(error: ValueError) -> NoReturn:
    """Stop reading at the first bad record."""
    raise error


@contextmanager
def all_together() -> Iterator[Refuse]:
    """Yields a ``Refuse`` that keeps the errors. At the end it raises one ValueError, if there are any, with
    the first ``MOST_TOLD`` of them, each on a separate line, and the number of further ones. Its text is
    "errors; fix". If the errors have several fixes, each fix stands after its error, and ``FIX_OF_ALL`` at
    the end."""
    told, count = list[str](), 0

    def keep(error: ValueError) -> None:
        nonlocal count
        count += 1
        if count <= MOST_TOLD:
            told.append(str(error))

    yield keep
    if not told:
        return
    parts = [text.rpartition("; ") for text in told]
    fixes = {fix if error else "" for error, _, fix in parts}
    if len(fixes) == 1:
        errors, fix = [error or text for error, _, text in parts], fixes.pop()
    else:
        errors, fix = [f"{error} ({text})" if error else text for error, _, text in parts], FIX_OF_ALL
    if count > MOST_TOLD:
        errors.append(f"and {count - MOST_TOLD:,} more")
    raise ValueError("; ".join(filter(None, ["\n".join(errors), fix])))


def read_records(
    path: Path, progress: Progress | None = None, *, roots: Collection[str] = (), refuse: Refuse = at_once
) -> Iterator[Record]:
    """The records of a ``.jsonl`` or ``.parquet`` file, in order; blank lines are skipped.

    roots: the needed fields. A parquet file that has all of them is read without its other fields.
    refuse: gets the error of each line that is not a JSON object.

    Raises ValueError: the file is missing, unreadable or of another type.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ValueError(
                f"data file {path} does not exist (the current folder is {Path.cwd()}); correct the path in the config"
            )
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as error:
        raise ValueError(
            f"data file {path} cannot be read ({error.strerror}); let this user read it, or correct the path in the config"
        ) from error
    _refuse_other_kinds(path, start)
    if path.suffix in LINE_SUFFIXES:
        return _read_lines(path, progress, refuse)
    return _read_parquet(path, progress, roots)


def _refuse_other_kinds(path: Path, start: bytes) -> None:
    for begins, (kind, fix) in _FOREIGN.items():
        if start.startswith(begins):
            raise ValueError(f"data file {path} is {kind}; {fix}")
    if path.suffix in LINE_SUFFIXES and start.startswith(_PARQUET):
        raise ValueError(f"data file {path} is parquet; give it a name that ends in .parquet")
    if path.suffix not in LINE_SUFFIXES + PARQUET_SUFFIXES:
        hint = "write it as JSONL or parquet"
        if path.suffix == ".json":
            hint = "write each record of its array as a line (`jq -c '.[]'`)"
        suffixes = ", ".join(LINE_SUFFIXES + PARQUET_SUFFIXES)
        raise ValueError(f"data file {path} is of an unknown type; its name must end in {suffixes}: {hint}")


def _read_lines(path: Path, progress: Progress | None, refuse: Refuse) -> Iterator[Record]:
    decode, size = msgspec.json.Decoder().decode, path.stat().st_size or 1
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                record = None
            if type(record) is not dict and line.strip():
                try:
                    record = _decode_leniently(line, path, number)
                except ValueError as error:
                    if _begins_array(number, line):  # every other line would fail too
                        raise
                    refuse(error)
            if type(record) is dict:
                yield number, record
            if progress is not None and number % _LINES_BETWEEN_REPORTS == 0:
                progress(file.tell() / size)


def _begins_array(number: int, line: bytes) -> bool:
    """Whether the file holds an array over several lines, by its first line."""
    return number == 1 and line.lstrip().startswith(b"[") and not line.rstrip().endswith(b"]")


def _decode_leniently(line: bytes, path: Path, number: int) -> dict:
    """Decode a line with Python's own reader, which also accepts a byte order mark, NaN and lone surrogates.
    Raises ValueError, which names the line."""
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place(path, number)}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except RecursionError as error:
        raise ValueError(
            f"{place(path, number)}: nested too deeply to be read; flatten or drop the record"
        ) from error
    except ValueError as error:
        fix = "each line must be one JSON object; correct or remove it"
        if _begins_array(number, line):
            fix = "each line must be one JSON object; `jq -c '.[]'` turns an array into lines"
        raise ValueError(f"{place(path, number)}: not valid JSON ({error}); {fix}") from error
    if type(record) is not dict:
        raise ValueError(
            f'{place(path, number)}: a {type(record).__name__}, not an object; write each line like {{"field": "text", ...}}'
        )
    return record


def _read_parquet(path: Path, progress: Progress | None, roots: Collection[str]) -> Iterator[Record]:
    import pyarrow  # imported here, because it takes a second and JSONL does not need it
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names, rows = file.schema_arrow.names, file.metadata.num_rows or 1
        columns = sorted(roots) if roots and set(roots) <= set(names) else None
        first = 1
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            yield from enumerate(batch.to_pylist(), start=first)
            first += len(batch)
            if progress is not None:
                progress((first - 1) / rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}; write the file again") from error
