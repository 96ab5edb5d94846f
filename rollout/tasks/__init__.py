"""Tasks, the sources of problems. ``load_task`` is the entry point."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.schema.task import CountdownTask, TaskConfig
from rollout.tasks.countdown import first_countdown_problem, generate_sft_examples, load_countdown
from rollout.tasks.files import (
    Survey,
    first_in_file,
    load_file_task,
    read_pairs,
    survey_pairs,
    survey_task_file,
)
from rollout.tasks.task import Problem, Task, digest_of, ids_of, longer_than, rows_of, without

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Problem", "Survey", "Task", "digest_of", "first_problem", "generate_sft_examples", "ids_of",
    "load_task", "longer_than", "read_pairs", "rows_of", "survey_pairs", "survey_task_file", "without",
]  # fmt: skip


def load_task(
    config: TaskConfig,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any] = {},
    keep_rows: bool = False,
    source_field: str | None = None,
) -> Task:
    """The prompts of a task, for training and held out.

    keep_rows: keep their whole records, for the user's reward. source_field: keep at least this field of
    training records, which names their source.
    Raises ValueError: a file, a line or the tokenizer cannot be used; the message names it and the fix."""
    if isinstance(config, CountdownTask):
        return load_countdown(config, tokenizer=tokenizer)
    return load_file_task(
        config,
        tokenizer=tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        keep_rows=keep_rows,
        source_field=source_field,
    )


def first_problem(config: TaskConfig, of: tuple[str, str] | None = None) -> Problem:
    """The first problem to train on, with its record, without a tokenizer.

    of: (a field, its value as text): the first problem whose record has this value.
    Raises ValueError as ``load_task`` does, and if there is no such problem.
    """
    return first_countdown_problem(config) if isinstance(config, CountdownTask) else first_in_file(config, of)
