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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from configs.schema.run import JsonlSftData
from configs.schema.task import Gsm8kTask, JsonlTask
from rollout.records import (
    DataPrompt,
    Message,
    Messages,
    WithTools,
    field_of,
    messages_of,
    source_name,
    source_of,
)
from rollout.rewards.math_answers import gsm8k_reference
from rollout.tasks.prompts import (
    as_json,
    plain_text,
    prompt_of,
    response_of,
    shape_of,
    text_of,
    turns_of,
    with_tools,
)
from rollout.tasks.records import (
    PARQUET_SUFFIXES,
    Progress,
    ProgressOf,
    Refuse,
    all_together,
    at_once,
    place,
    read_records,
)
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_KEPT, SHAPES_KEPT = 256, 1024
MOST_SURVEYS = 1024
"""Files whose surveys are kept: a task may have any number of held-out sets, and the survey of each is needed more than once."""
T = TypeVar("T")


def load_file_task(
    config: Gsm8kTask | JsonlTask,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any],
    keep_rows: bool,
    source_field: str | None,
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

    def prompts(path: Path | None, source_field: str | None = None) -> LazyPrompts:
        problems = [] if path is None else _build_problems(path, config.type, form, keep_rows, source_field)
        where = None if path is None else partial(place, path)
        return LazyPrompts(problems, to_problem=lambda problem: problem, encode=encode, where=where)

    task = Task(
        name=config.type,
        train=prompts(config.train_path, source_field),
        heldout=prompts(config.heldout_path),
        heldout_sets={of: prompts(path) for of, path in config.heldout_sets.items()},
    )
    _ = task.train[0]  # a missing chat template shows now, not after the engines have started
    return task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How the records of a file are read."""

    fields: tuple[str, ...]
    """Names of the fields of prompt and answer, or prompt and response; or of one field that holds a
    conversation of both."""
    tools_field: str | None = None
    to_reference: Callable[[str], str] | None = None
    """Turns an answer into a reference. None: the second field is the response of a supervised pair."""
    has_template: bool
    has_system_prompt: bool = False
    learns_all_turns: bool = False
    """In a conversation all of the assistant's messages are responses to learn, not only the last one."""


def _form_of(config: Gsm8kTask | JsonlTask) -> _Form:
    is_gsm8k = isinstance(config, Gsm8kTask)
    return _Form(
        fields=("question", "answer") if is_gsm8k else (config.prompt_field, config.answer_field),
        tools_field=None if is_gsm8k else config.tools_field,
        to_reference=gsm8k_reference if is_gsm8k else str,
        has_template=config.apply_chat_template,
        has_system_prompt=config.system_prompt is not None,
    )


def _form_of_pairs(data: JsonlSftData) -> _Form:
    fields = (data.messages_field,) if data.messages_field else (data.prompt_field, data.response_field)
    return _Form(
        fields=fields,
        tools_field=data.tools_field,
        has_template=data.apply_chat_template,
        learns_all_turns=data.learned_turns == "all",
    )


def _build_problems(
    path: Path, task: str, form: _Form, keep_rows: bool, source_field: str | None
) -> list[Problem]:
    problems, counts = [], Counter()
    kept_fields = () if source_field is None else (source_field,)
    sources: dict[str, dict[str, str]] = {}
    # Public files hold the same problem a hundred times. Its hash is computed and its text is kept once.
    digests: dict[tuple[str, str], str] = {}
    for number, prompt, reference, record in _read_fields(
        path, form, keep_rows=keep_rows, kept_fields=kept_fields
    ):
        text, messages, tools = _parts_of(prompt)
        digest = None if messages else digests.get((text, reference))
        if digest is None:
            content = json.dumps([messages or text, reference, *tools], sort_keys=True, default=str).encode()
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()[:16]
            if messages is None:
                digests[text, reference] = digest
        counts[digest] += 1
        # A repeated problem is a separate prompt.
        prompt_id = f"{task}:{digest}" + (f"#{counts[digest]}" if counts[digest] > 1 else "")
        row = record if keep_rows else None
        if source_field is not None:
            source = _checked_field(path, number, record, source_field, source_name)
            row = row or sources.setdefault(source, {source_field: source})  # one for all of the source
        problems.append(
            Problem(
                prompt_id=prompt_id,
                text=sys.intern(text),
                reference=reference,
                messages=messages,
                tools=tools,
                row=row,
                number=number,
            )
        )
    return problems or _refuse_empty(path, form)


def _parts_of(prompt: DataPrompt) -> tuple[str, Messages | None, tuple[Mapping[str, Any], ...]]:
    """(the text that rewards read, the messages if the prompt is a conversation, its tools)."""
    if isinstance(prompt, str):
        return prompt, None, ()
    tools = prompt.tools if isinstance(prompt, WithTools) else ()
    return plain_text(prompt), messages_of(prompt), tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Statistics of a file's pairs (prompt and reference, or prompt and response)."""

    path: Path
    count: int
    longest_bytes: int
    """UTF-8 bytes of the longest prompt; of a conversation as JSON."""
    longest: tuple[tuple[str, DataPrompt, str | Message], ...]
    """(place, prompt, second text) of the ``LONGEST_KEPT`` longest pairs, the longest first."""
    conversations: tuple[tuple[str, DataPrompt, str | Message], ...]
    """(place, prompt, second text) of the first conversation of each shape (``shape_of``), up to ``SHAPES_KEPT``."""
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

    Raises ValueError: see ``load_file_task``. One error is for all broken lines, see ``all_together``.
    """
    return _read_survey(path, _file_version(path), _form_of(config), progress)


def survey_pairs(data: JsonlSftData, *, progress: ProgressOf | None = None) -> Survey:
    """The survey of a file for supervised training. Raises ValueError, see ``read_pairs``. One error is for
    all broken lines, see ``all_together``."""
    return _read_survey(data.path, _file_version(data.path), _form_of_pairs(data), progress)


def _file_version(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file; () for a missing one, which reading reports."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=MOST_SURVEYS)
def _read_survey(path: Path, _: tuple[int, ...], form: _Form, progress: ProgressOf | None) -> Survey:
    """The length of a supervised pair (no ``to_reference``) is that of both texts; the length of a problem,
    that of the prompt."""
    count = longest_bytes = 0
    # A heap: (bytes, -number, prompt, text), the shortest first.
    kept: list[tuple[int, int, DataPrompt, str | Message]] = []
    prompts: set[int] = set()
    shapes: dict[tuple, tuple[str, DataPrompt, str | Message]] = {}
    reporting = contextlib.nullcontext() if progress is None else progress(path)
    with all_together() as refuse, reporting as report:
        for number, first, second, _record in _read_fields(path, form, report, refuse=refuse):
            count += 1
            if not (isinstance(first, str) and isinstance(second, str)) and len(shapes) < SHAPES_KEPT:
                response = () if isinstance(second, str) else shape_of((second,))
                shapes.setdefault((shape_of(first), response), (place(path, number), first, second))
            text = as_json(first)
            prompts.add(hash(text))
            size = num_bytes(text)
            if size > longest_bytes:
                longest_bytes = size
            if form.to_reference is None:
                size += num_bytes(as_json(second))
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


def _is_of(record: dict, of: tuple[str, str] | None) -> bool:
    """Whether a record has the value in the field that ``of`` names; every record if it names no field."""
    if of is None:
        return True
    try:
        return source_of(record, of[0]) == of[1]
    except ValueError:
        return False


def first_in_file(config: Gsm8kTask | JsonlTask, of: tuple[str, str] | None) -> Problem:
    """The first training problem, with its record. The rest of the file is not read.

    of: (a field, its value as text): the first problem whose record has this value.
    Raises ValueError: see ``load_file_task``; also if there is no such problem.
    """
    form = _form_of(config)
    problems = _read_fields(config.train_path, form, keep_rows=True)
    found = (problem for problem in problems if _is_of(problem[3], of))
    _, prompt, reference, record = next(found, None) or _refuse_empty(config.train_path, form)
    text, messages, tools = _parts_of(prompt)
    return Problem(
        prompt_id="first", text=text, reference=reference, messages=messages, tools=tools, row=record
    )


def read_pairs(data: JsonlSftData) -> list[tuple[str, DataPrompt, str | Message]]:
    """(place, such as ``file:line 3``, prompt, response) of each record of a JSONL or parquet file.
    ``prompts.py`` says what both may be. Raises ValueError: see ``read_records``; also for a field that is missing, empty
    or of another form, naming the line, and for a file without records."""
    form = _form_of_pairs(data)
    records = _read_fields(data.path, form)
    pairs = [(place(data.path, number), first, second) for number, first, second, _ in records]
    return pairs or _refuse_empty(data.path, form)


def _refuse_empty(path: Path, form: _Form) -> NoReturn:
    fields, s = " and ".join(f"`{field}`" for field in form.fields), "s" * (len(form.fields) > 1)
    raise ValueError(f"{path} holds no records; write one per line, with the field{s} {fields}")


def _read_fields(
    path: Path,
    form: _Form,
    progress: Progress | None = None,
    *,
    keep_rows: bool = False,
    kept_fields: tuple[str, ...] = (),
    refuse: Refuse = at_once,
) -> Iterator[tuple[int, DataPrompt, Any, dict]]:
    """(number, prompt, reference or response, record) of each usable record. ``record`` has at least the
    needed fields. ``refuse`` gets the error of each unusable one."""
    first_field, second_field = form.fields[0], form.fields[-1]
    are_texts = len(form.fields) == 2 and form.tools_field is None
    needed = [*form.fields, *([form.tools_field] if form.tools_field else [])]
    roots = () if keep_rows else {field.split(".")[0] for field in (*needed, *kept_fields)}
    value_of = _parquet_value if path.suffix in PARQUET_SUFFIXES else _field_value
    for number, record in read_records(path, progress, roots=roots, refuse=refuse):
        first: Any = record.get(first_field)
        second: Any = record.get(second_field)
        # Nearly all records are plain text under plain names. Skipping further checks for these makes a
        # million records twice as fast to read.
        if not (are_texts and _is_plain(first) and _is_plain(second)):
            try:
                first, second = _form_fields(record, form, value_of)
            except ValueError as error:
                refuse(ValueError(f"{place(path, number)}: {error}"))
                continue
        if form.to_reference is not None:
            try:
                second = form.to_reference(second)
            except ValueError as error:
                refuse(ValueError(f"{place(path, number)}: field `{second_field}` {error}"))
                continue
        yield number, first, second, record


def _is_plain(value: object) -> bool:
    return type(value) is str and value.isascii() and bool(value) and not value.isspace()


def _form_fields(
    record: dict, form: _Form, value_of: Callable[[dict, str], Any]
) -> tuple[DataPrompt, str | Message]:
    """Prompt, and answer or response. Raises ValueError."""
    if len(form.fields) == 1:
        field = form.fields[0]
        prompt, second = turns_of(value_of(record, field), field, learns_all=form.learns_all_turns)
    else:
        first_field, second_field = form.fields
        prompt = prompt_of(
            value_of(record, first_field),
            first_field,
            has_template=form.has_template,
            has_system_prompt=form.has_system_prompt,
        )
        value = value_of(record, second_field)
        if form.to_reference is None:
            second = response_of(value, second_field, has_template=form.has_template)
        else:
            second = text_of(value, second_field)
    if form.tools_field is not None:
        prompt = with_tools(prompt, value_of(record, form.tools_field), form.tools_field)
    return prompt, second


def _field_value(record: dict, field: str) -> Any:
    try:
        return field_of(record, field)
    except LookupError:
        has = ", ".join(f"`{name}`" for name in record) or "none"
        raise ValueError(
            f"field `{field}` is missing; this record has {has}. Rename the field, or name it in the config"
        ) from None


def _parquet_value(record: dict, field: str) -> Any:
    """The value without null fields of objects in it. Parquet gives each object of a column the fields of all
    objects, so a call of one tool would have the arguments of all tools."""
    return _without_nulls(_field_value(record, field))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def check_field(
    path: Path, field: str, check: Callable[[Any], object], *, of: tuple[str, str] | None = None
) -> None:
    """Call ``check`` with a field of every record of a file, in order.

    of: (another field, its value as text): only for records with this value.
    Raises ValueError: see ``read_records``; also for a missing field or an error of ``check``, with the line.
    One error is for all such records, see ``all_together``.
    """
    roots = {name.split(".")[0] for name in (field, *(of or ())[:1])}
    with all_together() as refuse:
        for number, record in read_records(path, roots=roots, refuse=refuse):
            if not _is_of(record, of):
                continue
            try:
                _checked_field(path, number, record, field, check)
            except ValueError as error:
                refuse(error)


def _checked_field(path: Path, number: int, record: dict, field: str, check: Callable[[Any], T]) -> T:
    """The result of ``check`` for the field; an error names the record's place."""
    try:
        value = _field_value(record, field)
    except ValueError as error:
        raise ValueError(f"{place(path, number)}: {error}") from error
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{place(path, number)}: field `{field}` {error}") from error
