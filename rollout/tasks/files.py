"""Tasks from the user's own files: JSONL or parquet, one problem per line or row."""

import contextlib
import hashlib
import heapq
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from configs.schema.task import Gsm8kTask, JsonlTask
from rollout.records import Messages, field_of
from rollout.rewards.math_answers import gsm8k_reference
from rollout.tasks.prompts import as_json, plain_text, prompt_of, shape_of, text_of
from rollout.tasks.records import Progress, ProgressOf, place, read_records
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_KEPT, SHAPES_KEPT = 256, 1024


def load_file_task(
    config: Gsm8kTask | JsonlTask,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any] = {},
    keep_rows: bool = False,
) -> Task:
    """The problems of a file of prompts and answers.

    gsm8k: ``question`` is the prompt, the text after ``####`` in ``answer`` the reference. jsonl: the answer is the
    reference, unchanged. Dots name a field inside others (``reward_model.ground_truth``). ``prompts.py`` says what a
    prompt may be.

    Raises ValueError: see ``read_records`` and ``prompt_of``; also for an answer of gsm8k without ``#### <number>``,
    naming its line.
    """
    form = _form_of(config)
    encode = partial(
        encode_prompt,
        tokenizer,
        system_prompt=config.system_prompt,
        apply_chat_template=config.apply_chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )

    def prompts(path: Path | None) -> LazyPrompts:
        problems = [] if path is None else _build_problems(path, config.type, form, keep_rows)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How the records of a file are read."""

    fields: tuple[str, str]
    """The names of prompt and answer, or response."""
    to_reference: Callable[[str], str] | None = None
    """Makes a reference of an answer; None: it is the response of a supervised pair."""
    has_template: bool
    has_system_prompt: bool = False


def _form_of(config: Gsm8kTask | JsonlTask) -> _Form:
    has = {
        "has_template": config.apply_chat_template,
        "has_system_prompt": config.system_prompt is not None,
    }
    if isinstance(config, Gsm8kTask):
        return _Form(fields=("question", "answer"), to_reference=gsm8k_reference, **has)
    return _Form(fields=(config.prompt_field, config.answer_field), to_reference=str, **has)


def _build_problems(path: Path, task: str, form: _Form, keep_rows: bool) -> list[Problem]:
    problems, counts = [], Counter()
    # Public files hold the same problem a hundred times: its hash is computed, and its text kept, once.
    digests: dict[tuple[str, str], str] = {}
    for number, prompt, reference, record in _read_fields(path, form, keep_rows=keep_rows):
        text, messages = (prompt, None) if isinstance(prompt, str) else (plain_text(prompt), prompt)
        digest = None if messages else digests.get((text, reference))
        if digest is None:
            content = json.dumps([prompt, reference], sort_keys=True, default=str).encode()
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()[:16]
            if messages is None:
                digests[text, reference] = digest
        counts[digest] += 1
        # Repeated problems are prompts of their own.
        prompt_id = f"{task}:{digest}" + (f"#{counts[digest]}" if counts[digest] > 1 else "")
        row = record if keep_rows else None
        problems.append(
            Problem(
                prompt_id=prompt_id,
                text=sys.intern(text),
                reference=reference,
                messages=messages,
                row=row,
                number=number,
            )
        )
    return problems or _refuse_empty(path, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Statistics of a file's pairs (prompt and reference, or prompt and response)."""

    path: Path
    count: int
    longest_bytes: int
    """UTF-8 bytes of the longest prompt; of a conversation as JSON."""
    longest: tuple[tuple[str, str | Messages, str], ...]
    """(place, prompt, second text) of the ``LONGEST_KEPT`` longest pairs, the longest first."""
    conversations: tuple[tuple[str, Messages], ...]
    """(place, messages) of the first conversation of each shape (``shape_of``), up to ``SHAPES_KEPT``."""
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
    return _read_survey(path, _file_version(path), _form_of(config), progress)


def survey_pairs(
    path: Path,
    first_field: str,
    second_field: str,
    *,
    has_template: bool = True,
    progress: ProgressOf | None = None,
) -> Survey:
    """The survey of a file for supervised training. Raises ValueError, see ``read_pairs``."""
    form = _Form(fields=(first_field, second_field), has_template=has_template)
    return _read_survey(path, _file_version(path), form, progress)


def _file_version(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file; () for a missing one, which reading reports."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _read_survey(path: Path, _: tuple[int, ...], form: _Form, progress: ProgressOf | None) -> Survey:
    """The length of a supervised pair (no ``to_reference``) counts both texts, that of a problem the prompt."""
    count = longest_bytes = 0
    # A heap: (bytes, -number, prompt, text), the shortest first.
    kept: list[tuple[int, int, str | Messages, str]] = []
    prompts: set[int] = set()
    shapes: dict[tuple, tuple[str, Messages]] = {}
    with contextlib.nullcontext() if progress is None else progress(path) as report:
        for number, first, second, _record in _read_fields(path, form, report):
            count += 1
            if not isinstance(first, str) and len(shapes) < SHAPES_KEPT:
                shapes.setdefault(shape_of(first), (place(path, number), first))
            text = as_json(first)
            prompts.add(hash(text))
            size = num_bytes(text)
            if size > longest_bytes:
                longest_bytes = size
            if form.to_reference is None:
                size += num_bytes(second)
            if len(kept) < LONGEST_KEPT:
                heapq.heappush(kept, (size, -number, first, second))
            elif size > kept[0][0]:
                heapq.heapreplace(kept, (size, -number, first, second))
    if not count:
        _refuse_empty(path, form)
    longest = tuple(
        (place(path, -minus), first, second) for _, minus, first, second in sorted(kept, reverse=True)
    )
    return Survey(
        path=path,
        count=count,
        longest_bytes=longest_bytes,
        longest=longest,
        conversations=tuple(shapes.values()),
        prompts=frozenset(prompts),
    )


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def first_in_file(config: Gsm8kTask | JsonlTask) -> Problem:
    """The first training problem, with its record; the file is read no further. Raises ValueError: see
    ``load_file_task``."""
    form = _form_of(config)
    problems = _read_fields(config.train_path, form, keep_rows=True)
    _, prompt, reference, record = next(problems, None) or _refuse_empty(config.train_path, form)
    messages = None if isinstance(prompt, str) else prompt
    return Problem(
        prompt_id="first", text=plain_text(prompt), reference=reference, messages=messages, row=record
    )


def read_pairs(
    path: Path, first_field: str, second_field: str, *, has_template: bool = True
) -> list[tuple[str, str | Messages, str]]:
    """(place, such as ``file:line 3``, prompt, second text) of each record of a JSONL or parquet file.
    ``load_file_task`` describes the names of fields and the form of the prompt. Raises ValueError: see
    ``read_records``; also for a field that is missing, empty or of another form, naming the line, and for a file without
    records."""
    form = _Form(fields=(first_field, second_field), has_template=has_template)
    pairs = [(place(path, number), first, second) for number, first, second, _ in _read_fields(path, form)]
    return pairs or _refuse_empty(path, form)


def _refuse_empty(path: Path, form: _Form) -> NoReturn:
    raise ValueError(
        f"{path} holds no records; write one per line, with the fields {' and '.join(f'`{f}`' for f in form.fields)}"
    )


def _read_fields(
    path: Path, form: _Form, progress: Progress | None = None, *, keep_rows: bool = False
) -> Iterator[tuple[int, str | Messages, str, dict]]:
    """(number, prompt, reference of the second, record) of each record, which has the needed fields at least."""
    first_field, second_field = form.fields
    to_reference = form.to_reference or str
    roots = () if keep_rows else {field.split(".")[0] for field in form.fields}
    for number, record in read_records(path, progress, roots=roots):
        first, second = record.get(first_field), record.get(second_field)
        # Nearly all records are plain text under plain names. Skipping further checks for these makes a
        # million records twice as fast to read.
        if not (type(first) is str and first.isascii() and first and not first.isspace()):
            value = _field_value(record, first_field, path, number)
            has = {"has_template": form.has_template, "has_system_prompt": form.has_system_prompt}
            try:
                first = prompt_of(value, first_field, **has)
            except ValueError as error:
                raise ValueError(f"{place(path, number)}: {error}") from error
        if not (type(second) is str and second.isascii() and second and not second.isspace()):
            value = _field_value(record, second_field, path, number)
            try:
                second = text_of(value, second_field)
            except ValueError as error:
                raise ValueError(f"{place(path, number)}: {error}") from error
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
