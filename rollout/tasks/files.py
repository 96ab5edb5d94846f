"""Tasks from the user's own files: JSONL or parquet, one problem per line or row."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from configs.schema.task import Gsm8kTask, JsonlTask
from rollout.rewards.math_answers import gsm8k_reference
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
Record = tuple[str, dict]
"""Where it stands (``file:line 3``), for messages, and its fields."""


def load_gsm8k(config: Gsm8kTask, *, tokenizer: "PreTrainedTokenizerBase", keep_rows: bool = False) -> Task:
    """GSM8K from the user's disk: ``question`` is the prompt, what follows ``####`` in ``answer`` the reference.

    Raises:
        ValueError: see ``read_records``; also an answer without ``#### <number>``, naming its line.
    """
    return _load(config, tokenizer, name="gsm8k", fields=("question", "answer"), to_reference=gsm8k_reference, keep_rows=keep_rows)


def load_jsonl(config: JsonlTask, *, tokenizer: "PreTrainedTokenizerBase", keep_rows: bool = False) -> Task:
    """Any file of prompts and answers; the answer is the reference as it stands.

    A field inside others is named with dots (``reward_model.ground_truth``). A prompt is text, or a conversation of a single user's
    message, ``[{"role": "user", "content": ...}]``, as data sets in verl's format have it.

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
        return encode_prompt(tokenizer, text, system_prompt=config.system_prompt, apply_chat_template=config.apply_chat_template)

    def prompts(path: Path | None) -> LazyPrompts:
        problems = [] if path is None else _problems(path, name, fields, to_reference, keep_rows=keep_rows)
        return LazyPrompts(problems, task=name, to_problem=lambda problem: problem, encode=encode)

    task = Task(name=name, train=prompts(config.train_path), heldout=prompts(config.heldout_path))
    _ = task.train[0]  # a missing chat template shows now, not after the engines have started
    return task


def _problems(
    path: Path, task: str, fields: tuple[str, str], to_reference: Callable[[str], str], *, keep_rows: bool = False
) -> list[Problem]:
    problems, seen = [], Counter()
    digests: dict[tuple[str, str], str] = {}  # public files hold the same problem a hundred times: it is hashed, and kept, once
    for where, text, answer, record in _read_fields(path, *fields):
        try:
            reference = to_reference(answer)
        except ValueError as error:
            raise ValueError(f"{where}: field `{fields[1]}` {error}") from error
        content = digests.get((text, reference)) or digests.setdefault((text, reference), _digest(text, reference))
        seen[content] += 1
        repeat = f"#{seen[content]}" if seen[content] > 1 else ""  # the same problem twice in a file is two prompts
        row = record if keep_rows else None
        problems.append(Problem(prompt_id=f"{task}:{content}{repeat}", text=sys.intern(text), reference=reference, row=row))
    return problems or _refuse_empty(path, fields)


def _digest(text: str, reference: str) -> str:
    return hashlib.md5(json.dumps([text, reference]).encode(), usedforsecurity=False).hexdigest()[:16]


def check_task_files(config: Gsm8kTask | JsonlTask) -> None:
    """Read the task's files as training will, without a tokenizer: a broken line shows before anything is started.

    Raises:
        ValueError: see ``load_gsm8k`` and ``load_jsonl``.
    """
    is_gsm8k = isinstance(config, Gsm8kTask)
    fields = ("question", "answer") if is_gsm8k else (config.prompt_field, config.answer_field)
    for path in filter(None, (config.train_path, config.heldout_path)):
        _problems(path, config.type, fields, gsm8k_reference if is_gsm8k else str)


def read_pairs(path: Path, first_field: str, second_field: str) -> list[tuple[str, str, str]]:
    """Where each record of a JSONL or parquet file stands (``file:line 3``), and two of its text fields; see ``load_jsonl`` for their
    names and the first one's form.

    Raises:
        ValueError: see ``read_records``; also a field that is missing, empty or neither text nor a number, naming the line, and a file
            without records.
    """
    return [found[:3] for found in _read_fields(path, first_field, second_field)] or _refuse_empty(path, (first_field, second_field))


def _refuse_empty(path: Path, fields: tuple[str, str]) -> NoReturn:
    raise ValueError(f"{path} holds no records; write one per line, with the fields {' and '.join(f'`{f}`' for f in fields)}")


def _read_fields(path: Path, first_field: str, second_field: str) -> Iterator[tuple[str, str, str, dict]]:
    """Where each record stands, its two texts, and the record itself."""
    for where, record in read_records(path):
        first = _only_message(_value(record, first_field, where), first_field, where)
        yield where, _text(first, first_field, where), _text(_value(record, second_field, where), second_field, where), record


def _value(record: dict, field: str, where: str) -> Any:
    """What stands under the field's whole name or, where there is none, at the end of its dotted path."""
    found: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(found, dict) or name not in found:
            raise ValueError(
                f"{where}: field `{field}` is missing; this record has {', '.join(f'`{name}`' for name in record) or 'none'}. "
                "Rename the field, or name it in the config"
            )
        found = found[name]
    return found


def _only_message(value: Any, field: str, where: str) -> Any:
    """The user's text of a conversation that is nothing else; any other value as it is."""
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        return value
    roles = [message.get("role") for message in value]
    if roles != ["user"]:
        raise ValueError(
            f"{where}: field `{field}` is a conversation of {', '.join(map(str, roles))}; only a single message of the user is read: write "
            "what a system message says as task.system_prompt, and other turns into the text"
        )
    return value[0].get("content")


def _text(value: Any, field: str, where: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{where}: field `{field}` is {kind}; it must be text or a number")
    if not value.strip():
        raise ValueError(f"{where}: field `{field}` is empty; fill it or drop the record")
    return value


def read_records(path: Path) -> Iterator[Record]:
    """The records of a ``.jsonl`` or ``.parquet`` file, in order; blank lines are skipped.

    Raises:
        ValueError: the file is missing, unreadable or of another kind, or a line is no JSON object; the line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist (the current folder is {Path.cwd()}); correct the path in the config")
    if path.suffix in LINE_SUFFIXES:
        return _read_lines(path)
    if path.suffix in PARQUET_SUFFIXES:
        return _read_parquet(path)
    raise ValueError(f"data file {path} is of no known kind; its name must end in {', '.join(LINE_SUFFIXES + PARQUET_SUFFIXES)}")


def _read_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:line {number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from error
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON ({error}); each line must be one JSON object; correct or remove it") from error
            if not isinstance(record, dict):
                raise ValueError(f'{where}: a {type(record).__name__}, not an object; write each line like {{"field": "text", ...}}')
            yield where, record


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow  # takes a second to import, which JSONL users need not wait for
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}; write the file again") from error
    first = 1
    for batch in table.to_batches(max_chunksize=4096):
        for number, record in enumerate(_values(batch.to_struct_array()), start=first):
            yield f"{path}:row {number}", record
        first += len(batch)


def _values(array: "pyarrow.Array") -> list:
    """``array.to_pylist()``, several times faster for objects and lists of them: column by column, not value by value."""
    from pyarrow import types

    if types.is_struct(array.type):
        columns = [_values(column) for column in array.flatten()]
        names = [field.name for field in array.type]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if columns else [{} for _ in array]
    elif types.is_list(array.type) and types.is_struct(array.type.value_type):
        inner, lengths = iter(_values(array.flatten())), array.value_lengths().to_pylist()
        rows = [list(islice(inner, length or 0)) for length in lengths]
    else:
        return array.to_pylist()
    if array.null_count == 0:
        return rows
    return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
