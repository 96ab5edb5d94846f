"""Tasks from the user's own files: JSONL or parquet, one problem per line or row."""

import contextlib
import hashlib
import heapq
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from configs.schema.task import Gsm8kTask, JsonlTask
from rollout.rewards.math_answers import gsm8k_reference
from rollout.tasks.records import Progress, ProgressOf, place, read_records
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_KEPT = 256


def load_gsm8k(config: Gsm8kTask, *, tokenizer: "PreTrainedTokenizerBase", keep_rows: bool = False) -> Task:
    """GSM8K from the user's disk: ``question`` is the prompt, what follows ``####`` in ``answer`` the
    reference.

    Raises:
        ValueError: see ``read_records``; also an answer without ``#### <number>``, naming its line.
    """
    return _load(
        config,
        tokenizer,
        name="gsm8k",
        fields=("question", "answer"),
        to_reference=gsm8k_reference,
        keep_rows=keep_rows,
    )


def load_jsonl(config: JsonlTask, *, tokenizer: "PreTrainedTokenizerBase", keep_rows: bool = False) -> Task:
    """Any file of prompts and answers; the answer is the reference as it stands.

    A field inside others is named with dots (``reward_model.ground_truth``). A prompt is text, or a
    conversation of a single user's message, ``[{"role": "user", "content": ...}]``, as data sets in verl's
    format have it.

    Raises:
        ValueError: see ``read_records``; also a conversation of anything else.
    """
    fields = (config.prompt_field, config.answer_field)
    return _load(config, tokenizer, name="jsonl", fields=fields, to_reference=str, keep_rows=keep_rows)


def _load(
    config: Gsm8kTask | JsonlTask,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    name: str,
    fields: tuple[str, str],
    to_reference: Callable[[str], str],
    keep_rows: bool,
) -> Task:
    def encode(text: str) -> list[int]:
        return encode_prompt(
            tokenizer,
            text,
            system_prompt=config.system_prompt,
            apply_chat_template=config.apply_chat_template,
        )

    def prompts(path: Path | None) -> LazyPrompts:
        problems = [] if path is None else _problems(path, name, fields, to_reference, keep_rows=keep_rows)
        where = None if path is None else partial(place, path)
        return LazyPrompts(
            problems, task=name, to_problem=lambda problem: problem, encode=encode, where=where
        )

    task = Task(name=name, train=prompts(config.train_path), heldout=prompts(config.heldout_path))
    _ = task.train[0]  # a missing chat template shows now, not after the engines have started
    return task


def _problems(
    path: Path,
    task: str,
    fields: tuple[str, str],
    to_reference: Callable[[str], str],
    *,
    keep_rows: bool = False,
) -> list[Problem]:
    problems, seen = [], Counter()
    digests: dict[
        tuple[str, str], str
    ] = {}  # public files hold the same problem a hundred times: it is hashed, and kept, once
    for number, text, reference, record in _read_problems(path, fields, to_reference, keep_rows=keep_rows):
        content = digests.get((text, reference)) or digests.setdefault(
            (text, reference), _digest(text, reference)
        )
        seen[content] += 1
        repeat = (
            f"#{seen[content]}" if seen[content] > 1 else ""
        )  # the same problem twice in a file is two prompts
        row = record if keep_rows else None
        prompt_id = f"{task}:{content}{repeat}"
        problems.append(
            Problem(prompt_id=prompt_id, text=sys.intern(text), reference=reference, row=row, number=number)
        )
    return problems or _refuse_empty(path, fields)


def _digest(text: str, reference: str) -> str:
    return hashlib.md5(json.dumps([text, reference]).encode(), usedforsecurity=False).hexdigest()[:16]


def _read_problems(
    path: Path,
    fields: tuple[str, str],
    to_reference: Callable[[str], str],
    progress: Progress | None = None,
    *,
    keep_rows: bool = False,
) -> Iterator[tuple[int, str, str, dict]]:
    """Of each record its number, the prompt's text, the reference, and the record itself: whole, or what of
    it is needed."""
    for number, text, answer, record in _read_fields(path, *fields, progress, keep_rows=keep_rows):
        try:
            reference = to_reference(answer)
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: field `{fields[1]}` {error}") from error
        yield number, text, reference, record


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What there is to know of a file's pairs of texts (prompt and reference, or prompt and response) without
    keeping them."""

    path: Path
    count: int
    longest_bytes: int
    """Of a prompt, in UTF-8."""
    longest: tuple[tuple[str, str, str], ...]
    """(where it stands, first text, second text) of the longest pairs, the longest first; at most
    ``LONGEST_KEPT``."""
    prompts: frozenset[int]
    """A number for each distinct prompt; equal ones have equal numbers, in all surveys of a process."""

    @property
    def distinct(self) -> int:
        return len(self.prompts)


def survey_task_file(
    config: Gsm8kTask | JsonlTask, path: Path, *, progress: ProgressOf | None = None
) -> Survey:
    """Read one of the task's files as training will, without a tokenizer: a broken line shows before anything
    is started.

    A file that has not changed since is not read again. ``progress``: what makes a ``Progress`` for a file.

    Raises:
        ValueError: see ``load_gsm8k`` and ``load_jsonl``.
    """
    is_gsm8k = isinstance(config, Gsm8kTask)
    fields = ("question", "answer") if is_gsm8k else (config.prompt_field, config.answer_field)
    return _survey(path, _version(path), fields, gsm8k_reference if is_gsm8k else str, progress)


def survey_pairs(
    path: Path, first_field: str, second_field: str, *, progress: ProgressOf | None = None
) -> Survey:
    """The same of a file for supervised training. Raises ValueError, see ``read_pairs``."""
    return _survey(path, _version(path), (first_field, second_field), None, progress)


def _version(path: Path) -> tuple[int, ...]:
    """Another one as soon as the file is another one; nothing where there is none, which reading it will say."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=8)
def _survey(
    path: Path,
    _: tuple[int, ...],
    fields: tuple[str, str],
    to_reference: Callable[[str], str] | None,
    progress: ProgressOf | None,
) -> Survey:
    with contextlib.nullcontext() if progress is None else progress(path) as report:
        return _read_survey(path, fields, to_reference, report)


def _read_survey(
    path: Path, fields: tuple[str, str], to_reference: Callable[[str], str] | None, report: Progress | None
) -> Survey:
    """Of prompts alone the first text counts for the length, of supervised pairs (no ``to_reference``) both
    do."""
    count = longest_bytes = 0
    kept: list[tuple[int, int, str, str]] = []  # a heap: (bytes, -number, texts), the shortest first
    prompts: set[int] = set()
    for number, first, second, _record in _read_problems(path, fields, to_reference or str, report):
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
    """The first training problem, with its record; the file is read no further.

    Raises:
        ValueError: see ``load_gsm8k`` and ``load_jsonl``.
    """
    is_gsm8k = isinstance(config, Gsm8kTask)
    fields = ("question", "answer") if is_gsm8k else (config.prompt_field, config.answer_field)
    problems = _read_problems(config.train_path, fields, gsm8k_reference if is_gsm8k else str, keep_rows=True)
    _, text, reference, record = next(problems, None) or _refuse_empty(config.train_path, fields)
    return Problem(prompt_id="first", text=text, reference=reference, row=record)


def read_pairs(path: Path, first_field: str, second_field: str) -> list[tuple[str, str, str]]:
    """Where each record of a JSONL or parquet file stands (``file:line 3``), and two of its text fields; see
    ``load_jsonl`` for their names and the first one's form.

    Raises:
        ValueError: see ``read_records``; also a field that is missing, empty or neither text nor a number,
        naming the line, and a file
            without records.
    """
    pairs = [
        (place(path, number), first, second)
        for number, first, second, _ in _read_fields(path, first_field, second_field)
    ]
    return pairs or _refuse_empty(path, (first_field, second_field))


def _refuse_empty(path: Path, fields: tuple[str, str]) -> NoReturn:
    raise ValueError(
        f"{path} holds no records; write one per line, with the fields {' and '.join(f'`{f}`' for f in fields)}"
    )


def _read_fields(
    path: Path,
    first_field: str,
    second_field: str,
    progress: Progress | None = None,
    *,
    keep_rows: bool = False,
) -> Iterator[tuple[int, str, str, dict]]:
    """Of each record its number, its two texts, and the record itself: whole, or what of it is needed."""
    roots = () if keep_rows else {field.split(".")[0] for field in (first_field, second_field)}
    for number, record in read_records(path, progress, roots=roots):
        first, second = record.get(first_field), record.get(second_field)
        # Nearly all records are plain text under plain names; asking no more of them makes reading a million
        # of them twice as fast.
        if not (type(first) is str and first.isascii() and first and not first.isspace()):
            first = _text(
                _only_message(_value(record, first_field, path, number), first_field, path, number),
                first_field,
                path,
                number,
            )
        if not (type(second) is str and second.isascii() and second and not second.isspace()):
            second = _text(_value(record, second_field, path, number), second_field, path, number)
        yield number, first, second, record


def _value(record: dict, field: str, path: Path, number: int) -> Any:
    """What stands under the field's whole name or, where there is none, at the end of its dotted path."""
    found: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(found, dict) or name not in found:
            has = ", ".join(f"`{name}`" for name in record) or "none"
            raise ValueError(
                f"{place(path, number)}: field `{field}` is missing; this record has {has}. Rename the field, or name it in the config"
            )
        found = found[name]
    return found


def _only_message(value: Any, field: str, path: Path, number: int) -> Any:
    """The user's text of a conversation that is nothing else; any other value as it is."""
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        return value
    roles = [message.get("role") for message in value]
    if roles != ["user"]:
        raise ValueError(
            f"{place(path, number)}: field `{field}` is a conversation of {', '.join(map(str, roles))}; only a single message of the user "
            "is read: write what a system message says as task.system_prompt, and other turns into the text"
        )
    return value[0].get("content")


def _text(value: Any, field: str, path: Path, number: int) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
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
