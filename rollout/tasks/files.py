"""Tasks from the user's own files: JSONL or parquet, one problem per line or row."""

import contextlib
import hashlib
import heapq
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from configs.schema.task import Gsm8kTask, JsonlTask
from rollout.records import field_of
from rollout.rewards.math_answers import gsm8k_reference
from rollout.tasks.records import Progress, ProgressOf, place, read_records
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_KEPT = 256


def load_file_task(
    config: Gsm8kTask | JsonlTask,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any] = {},
    keep_rows: bool = False,
) -> Task:
    """The problems of a file of prompts and answers.

    gsm8k: ``question`` is the prompt, the text after ``####`` in ``answer`` the reference. jsonl: the answer is the
    reference, unchanged. Dots name a field inside others (``reward_model.ground_truth``). A prompt is text, or a
    conversation of a single user's message, ``[{"role": "user", "content": ...}]``, as in data sets of verl's format.

    Raises ValueError: see ``read_records``; also for any other conversation, and for an answer of gsm8k without
    ``#### <number>``, naming its line.
    """
    fields, to_reference = _reading_of(config)
    encode = partial(
        encode_prompt,
        tokenizer,
        system_prompt=config.system_prompt,
        apply_chat_template=config.apply_chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )

    def prompts(path: Path | None) -> LazyPrompts:
        problems = [] if path is None else _build_problems(path, config.type, fields, to_reference, keep_rows)
        where = None if path is None else partial(place, path)
        return LazyPrompts(
            problems, task=config.type, to_problem=lambda problem: problem, encode=encode, where=where
        )

    task = Task(
        name=config.type,
        train=prompts(config.train_path),
        heldout=prompts(config.heldout_path),
        heldout_sets={of: prompts(path) for of, path in config.heldout_sets.items()},
    )
    _ = task.train[0]  # a missing chat template shows now, not after the engines have started
    return task


def _reading_of(config: Gsm8kTask | JsonlTask) -> tuple[tuple[str, str], Callable[[str], str]]:
    """(the names of prompt and answer, what makes a reference of an answer)"""
    if isinstance(config, Gsm8kTask):
        return ("question", "answer"), gsm8k_reference
    return (config.prompt_field, config.answer_field), str


def _build_problems(
    path: Path,
    task: str,
    fields: tuple[str, str],
    to_reference: Callable[[str], str],
    keep_rows: bool,
) -> list[Problem]:
    problems, counts = [], Counter()
    # Public files hold the same problem a hundred times: its hash is computed, and its text kept, once.
    digests: dict[tuple[str, str], str] = {}
    for number, text, reference, record in _read_fields(path, fields, to_reference, keep_rows=keep_rows):
        if (digest := digests.get((text, reference))) is None:
            content = json.dumps([text, reference]).encode()
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()[:16]
            digests[text, reference] = digest
        counts[digest] += 1
        # Repeated problems are prompts of their own.
        prompt_id = f"{task}:{digest}" + (f"#{counts[digest]}" if counts[digest] > 1 else "")
        row = record if keep_rows else None
        problems.append(
            Problem(prompt_id=prompt_id, text=sys.intern(text), reference=reference, row=row, number=number)
        )
    return problems or _refuse_empty(path, fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Statistics of a file's pairs of texts (prompt and reference, or prompt and response)."""

    path: Path
    count: int
    longest_bytes: int
    """UTF-8 bytes of the longest prompt."""
    longest: tuple[tuple[str, str, str], ...]
    """(place, first text, second text) of the ``LONGEST_KEPT`` longest pairs, the longest first."""
    prompts: frozenset[int]
    """Hashes of the distinct prompts, comparable between all surveys of a process."""

    @property
    def distinct(self) -> int:
        return len(self.prompts)


def survey_task_file(
    config: Gsm8kTask | JsonlTask, path: Path, *, progress: ProgressOf | None = None
) -> Survey:
    """Read one of the task's files as training will, without a tokenizer, to find broken lines before a start.

    An unchanged file is not read again. ``progress`` makes a ``Progress`` for a file.

    Raises ValueError: see ``load_file_task``.
    """
    return _read_survey(path, _file_version(path), *_reading_of(config), progress)


def survey_pairs(
    path: Path, first_field: str, second_field: str, *, progress: ProgressOf | None = None
) -> Survey:
    """The survey of a file for supervised training. Raises ValueError, see ``read_pairs``."""
    return _read_survey(path, _file_version(path), (first_field, second_field), None, progress)


def _file_version(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file; () for a missing one, which reading reports."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _read_survey(
    path: Path,
    _: tuple[int, ...],
    fields: tuple[str, str],
    to_reference: Callable[[str], str] | None,
    progress: ProgressOf | None,
) -> Survey:
    """The length of a supervised pair (no ``to_reference``) counts both texts, that of a problem the prompt."""
    count = longest_bytes = 0
    kept: list[tuple[int, int, str, str]] = []  # a heap: (bytes, -number, texts), the shortest first
    prompts: set[int] = set()
    with contextlib.nullcontext() if progress is None else progress(path) as report:
        for number, first, second, _record in _read_fields(path, fields, to_reference or str, report):
            count += 1
            prompts.add(hash(first))
            size = num_bytes(first)
            if size > longest_bytes:
                longest_bytes = size
            if to_reference is None:
                size += num_bytes(second)
            if len(kept) < LONGEST_KEPT:
                heapq.heappush(kept, (size, -number, first, second))
            elif size > kept[0][0]:
                heapq.heapreplace(kept, (size, -number, first, second))
    if not count:
        _refuse_empty(path, fields)
    longest = tuple(
        (place(path, -minus), first, second) for _, minus, first, second in sorted(kept, reverse=True)
    )
    return Survey(
        path=path, count=count, longest_bytes=longest_bytes, longest=longest, prompts=frozenset(prompts)
    )


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def first_in_file(config: Gsm8kTask | JsonlTask) -> Problem:
    """The first training problem, with its record; the file is read no further. Raises ValueError: see
    ``load_file_task``."""
    fields, to_reference = _reading_of(config)
    problems = _read_fields(config.train_path, fields, to_reference, keep_rows=True)
    _, text, reference, record = next(problems, None) or _refuse_empty(config.train_path, fields)
    return Problem(prompt_id="first", text=text, reference=reference, row=record)


def read_pairs(path: Path, first_field: str, second_field: str) -> list[tuple[str, str, str]]:
    """(place, such as ``file:line 3``, first text, second text) of each record of a JSONL or parquet file.
    ``load_file_task`` describes the names of fields and the form of the first. Raises ValueError: see
    ``read_records``; also for a field that is missing, empty or neither text nor a number, naming the line, and for a
    file without records."""
    pairs = [
        (place(path, number), first, second)
        for number, first, second, _ in _read_fields(path, (first_field, second_field))
    ]
    return pairs or _refuse_empty(path, (first_field, second_field))


def _refuse_empty(path: Path, fields: tuple[str, str]) -> NoReturn:
    raise ValueError(
        f"{path} holds no records; write one per line, with the fields {' and '.join(f'`{f}`' for f in fields)}"
    )


def _read_fields(
    path: Path,
    fields: tuple[str, str],
    to_reference: Callable[[str], str] = str,
    progress: Progress | None = None,
    *,
    keep_rows: bool = False,
) -> Iterator[tuple[int, str, str, dict]]:
    """(number, first text, reference of the second, record) of each record, which has the needed fields at least."""
    first_field, second_field = fields
    roots = () if keep_rows else {field.split(".")[0] for field in fields}
    for number, record in read_records(path, progress, roots=roots):
        first, second = record.get(first_field), record.get(second_field)
        # Nearly all records are plain text under plain names. Skipping further checks for these makes a
        # million records twice as fast to read.
        if not (type(first) is str and first.isascii() and first and not first.isspace()):
            value = _field_value(record, first_field, path, number)
            first = _as_text(_only_message(value, first_field, path, number), first_field, path, number)
        if not (type(second) is str and second.isascii() and second and not second.isspace()):
            value = _field_value(record, second_field, path, number)
            second = _as_text(value, second_field, path, number)
        try:
            reference = to_reference(second)
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: field `{second_field}` {error}") from error
        yield number, first, reference, record


def _field_value(record: dict, field: str, path: Path, number: int) -> Any:
    try:
        return field_of(record, field)
    except LookupError:
        has = ", ".join(f"`{name}`" for name in record) or "none"
        raise ValueError(
            f"{place(path, number)}: field `{field}` is missing; this record has {has}. Rename the field, or name it in the config"
        ) from None


def check_field(path: Path, field: str, check: Callable[[Any], object]) -> None:
    """Have ``check`` look at a field of every record of a file, in order. Raises ValueError: see ``read_records``;
    also for a missing field, and where ``check`` raises it, naming the line."""
    for number, record in read_records(path, roots={field.split(".")[0]}):
        value = _field_value(record, field, path, number)
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: field `{field}` {error}") from error


def _only_message(value: Any, field: str, path: Path, number: int) -> Any:
    """The text of a conversation that is a single user's message; any other value unchanged."""
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        return value
    roles = [message.get("role") for message in value]
    if roles != ["user"]:
        raise ValueError(
            f"{place(path, number)}: field `{field}` is a conversation of {', '.join(map(str, roles))}; only a single message of the user "
            "is read: write a system message as task.system_prompt, and other turns into the text"
        )
    return value[0].get("content")


def _as_text(value: Any, field: str, path: Path, number: int) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{place(path, number)}: field `{field}` is {value}, no finite number; correct or drop the record"
            )
        value = str(value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{place(path, number)}: field `{field}` is {kind}; it must be text or a number")
    if not value.strip():
        raise ValueError(f"{place(path, number)}: field `{field}` is empty; fill it or drop the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(
            f"{place(path, number)}: field `{field}` has half a character ({half}, at position {error.start + 1}), which no "
            "tokenizer reads; write the whole pair, or drop it"
        ) from error
    return value
