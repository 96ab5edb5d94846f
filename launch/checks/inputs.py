"""Reads all that a config names before anything starts: the model's folder (``model_files.py``), and every record of the
data, whose conversations ``conversations.py`` renders.

The errors are those that the roles would raise seconds after their start. Neither torch nor transformers is
imported.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import did_you_mean
from configs.loader import Finding
from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.reward import CodeReward, RewardByField, rewards_in
from configs.schema.run import CountdownSftData, JsonlSftData
from configs.schema.sampler import MixtureOrder
from configs.schema.task import CountdownTask, Gsm8kTask, JsonlTask
from launch.checks.arguments import finding_of
from launch.checks.conversations import check_conversations, token_counts
from launch.checks.model_files import (
    check_tokenizer,
    check_weights,
    end_notes,
    open_tokenizer,
    reward_tokenizers,
)
from launch.tables import print_over
from parallel.planning.architecture import architecture_of
from rollout.sampling.prompt_room import PromptRoom, PromptsOf, check_example_length, prompt_room
from rollout.tasks.records import Progress

if TYPE_CHECKING:
    from rollout.tasks import Survey
    from rollout.tokenization import Tokenizer

_FIRST_LINE_S, _LATER_LINES_S = 2.0, 10.0


def input_findings(config: AnyConfig, notes: list[str]) -> Iterator[Finding]:
    """Errors of the files that the config reads. ``notes`` gets settings that are allowed, but rarely intended."""
    yield from check_weights(config)
    tokenizer = None
    try:
        tokenizer = open_tokenizer(config.model.path)
    except ValueError as error:
        yield "model.path", str(error)
    if tokenizer is not None:
        yield from check_tokenizer(config, tokenizer)
    if isinstance(config, SftConfig):
        yield from _check_examples(config, tokenizer, notes)
    else:
        for folder in reward_tokenizers(config):
            yield from finding_of("reward", open_tokenizer, folder)
        if tokenizer is not None:
            notes += end_notes(config, tokenizer)
        yield from _check_task(config, tokenizer, notes)
        evaluation = config.evaluation
        if evaluation.every > config.steps and not evaluation.at_ends:
            none = f"every={evaluation.every} with at_ends=false evaluates nothing"
            notes.append(f"evaluation: {none} in steps={config.steps}")


@contextlib.contextmanager
def reading_progress(path: Path) -> Iterator[Progress]:
    """Reports on stderr how much of a large file has been read: on a terminal in a line that disappears, elsewhere in an
    occasional line."""
    began, next_line, on_terminal = time.monotonic(), _FIRST_LINE_S, sys.stderr.isatty()

    def report(share: float) -> None:
        nonlocal next_line
        elapsed, line = time.monotonic() - began, f"reading {path}: {share:4.0%}"
        if on_terminal and elapsed >= _FIRST_LINE_S / 2:
            print_over(line, file=sys.stderr)
        elif elapsed >= next_line:
            next_line = elapsed + _LATER_LINES_S
            print(line, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if on_terminal:
            print_over("", file=sys.stderr)


def _check_task(config: RunConfig, tokenizer: "Tokenizer | None", notes: list[str]) -> Iterator[Finding]:
    task = config.task
    if isinstance(task, CountdownTask):
        yield from _check_countdown(config, task, tokenizer)
        return
    surveys: dict[str, Survey] = {}
    for field, path in task.files.items():
        if not path.is_file():
            continue
        try:
            surveys[field] = survey_of(task, path)
        except ValueError as error:
            yield f"task.{field}", str(error)
            continue
        yield from check_conversations(f"task.{field}", surveys[field], tokenizer, config)
        yield from _check_fields(config, field, path, notes)
        if tokenizer is not None:
            yield from _check_lengths(config, task, field, surveys[field], tokenizer, notes)
    notes += _data_notes(surveys, config)
    if task.heldout_path is None and (config.evaluation.every or config.evaluation.at_ends):
        notes.append("evaluation: without task.heldout_path nothing is evaluated")


def _check_countdown(
    config: RunConfig, task: CountdownTask, tokenizer: "Tokenizer | None"
) -> Iterator[Finding]:
    from rollout.tasks.countdown import check_problems, long_prompt

    yield from finding_of("task.heldout_fraction", check_problems, task)
    if tokenizer is None or not (text := long_prompt(task)):
        return
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    limits: dict[str, PromptsOf] = {"rollout.max_new_tokens": "training"}
    if config.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = "held-out"
    for field, which in limits.items():
        room = _prompt_room(config, which)
        if room is not None and tokens > room.tokens:
            yield field, room.too_long(f"{which} prompt {text!r}", tokens)


def _check_fields(config: RunConfig, field: str, path: Path, notes: list[str]) -> Iterator[Finding]:
    """Fields of a file's records that rewards and the order of the prompts read."""
    from rollout.tasks.files import check_field

    if isinstance(config.reward_type, RewardByField):
        yield from _check_by_source(config.reward_type, f"task.{field}", path, notes)
    for read, check, source in _read_fields(config):
        yield from finding_of(f"task.{field}", check_field, path, read, check, of=source)
    if field == "train_path" and isinstance(config.sampler, MixtureOrder):
        yield from finding_of("sampler", _check_sources, config.sampler, path)


def _read_fields(config: RunConfig) -> Iterator[tuple[str, Callable[[Any], object], tuple[str, str] | None]]:
    """Fields of the data that rewards read: name, check, and the source (``OneReward.source``) whose records have it."""
    from rollout.rewards.arithmetic import parse_problem
    from rollout.rewards.code import check_tests
    from rollout.rewards.math_answers import only_number

    of_answers: dict[str, Callable[[Any], object]] = {
        "gsm8k": lambda answer: only_number(str(answer)),
        "countdown": lambda answer: parse_problem(str(answer)),
    }
    for _, part, source in rewards_in(config.reward_type):
        if isinstance(part, CodeReward):
            yield part.tests_field, check_tests, source
        elif isinstance(config.task, JsonlTask) and part.type in of_answers:
            yield config.task.answer_field, of_answers[part.type], source


def _check_by_source(reward: RewardByField, field: str, path: Path, notes: list[str]) -> Iterator[Finding]:
    """Each record of a file has a source with a reward. A reward for no record to train on is a note."""
    from rollout.rewards.scorer import known_source
    from rollout.tasks.files import check_field

    seen = set[str]()

    def note_source(value: object) -> None:
        seen.add(known_source(reward, value))

    problems = [*finding_of(field, check_field, path, reward.field, note_source)]
    yield from problems
    if field == "task.train_path" and not problems and (unused := reward.rewards.keys() - seen):
        names = ", ".join(map(repr, sorted(unused)))
        notes.append(f"reward.rewards: no record of {path} has `{reward.field}` {names}")


def _check_sources(mixture: MixtureOrder, path: Path) -> None:
    """Compare the sources of a file with the weights of a mixture. Raises ValueError."""
    from rollout.records import source_name
    from rollout.tasks.files import check_field

    seen: set[str] = set()

    def check(value: object) -> None:
        seen.add(name := source_name(value))
        if name not in mixture.weights:
            has, fix = ", ".join(mixture.weights), "give it a weight, 0 to leave it out"
            raise ValueError(f"is {name!r}, which is not in weights ({has}); {fix}")

    check_field(path, mixture.field, check)
    for name in mixture.turns:
        if name not in seen:
            fix = did_you_mean(name, sorted(seen), f"the names in `{mixture.field}`")
            raise ValueError(f"weights has {name!r}, of which {path} has no record; {fix}")


def survey_of(task: Gsm8kTask | JsonlTask, path: Path) -> "Survey":
    """A survey of the records of ``path``. Repeated calls read the file only once. Raises ValueError."""
    from rollout.tasks import survey_task_file

    return survey_task_file(task, path, progress=reading_progress)


def _prompt_room(config: RunConfig, which: PromptsOf) -> PromptRoom | None:
    """None where there is no room at all, or config.json is broken: both are reported elsewhere."""
    try:
        max_positions = architecture_of(config.model.path).max_positions
        return prompt_room(config, which, max_positions=max_positions)
    except ValueError:
        return None


def _check_lengths(
    config: RunConfig,
    task: Gsm8kTask | JsonlTask,
    name: str,
    survey: "Survey",
    tokenizer: "Tokenizer",
    notes: list[str],
) -> Iterator[Finding]:
    field, room = f"task.{name}", _prompt_room(config, "training" if name == "train_path" else "held-out")
    if room is None:
        return
    try:
        prompts = ((where, prompt, "") for where, prompt, _ in survey.longest)
        longest = token_counts(prompts, tokenizer, task, config.model.chat_template_kwargs, room.tokens)
    except ValueError:  # of the template, which is reported elsewhere
        return
    too_long = [(tokens, where) for where, tokens in longest if tokens > room.tokens]
    if not too_long:
        return
    (tokens, where), count = max(too_long, key=lambda prompt: prompt[0]), len(too_long)
    if task.too_long_prompts == "leave_out" and count < survey.count:
        notes.append(
            f"{field}: at least {count:,} of {survey.count:,} prompts have more than {room.tokens} tokens and are left out; the longest, "
            f"{where}, has {tokens}"
        )
        return
    which = "the longest prompt" if count == 1 else f"the longest of at least {count} such prompts"
    yield field, f"{field}: {room.too_long(f'{which}, {where},', tokens)}"


def _data_notes(surveys: "dict[str, Survey]", config: RunConfig) -> Iterator[str]:
    training = surveys.get("train_path")
    for field, survey in surveys.items():
        if survey.distinct < survey.count:
            yield f"task.{field}: {survey.count - survey.distinct:,} of {survey.count:,} prompts of {survey.path} repeat an earlier one"
        trained = set() if training is None or survey is training else training.prompts
        if shared := len(trained & survey.prompts):
            yield (
                f"task.{field}: {shared:,} of the {survey.distinct:,} held-out prompts are also trained on, "
                "so the accuracy on them says nothing about others"
            )
    if training is not None and training.count < config.rollout.prompts_per_step:
        yield (
            f"task.train_path: its {training.count:,} prompts are fewer than rollout.prompts_per_step={config.rollout.prompts_per_step}, "
            "so each step has some of them several times"
        )


def _check_examples(config: SftConfig, tokenizer: "Tokenizer | None", notes: list[str]) -> Iterator[Finding]:
    data = config.data
    if isinstance(data, CountdownSftData):
        from rollout.tasks.countdown import check_problems

        yield from finding_of("data.task.heldout_fraction", check_problems, data.task)
        return
    if not data.path.is_file():
        return
    from rollout.tasks import survey_pairs

    try:
        survey = survey_pairs(data, progress=reading_progress)
    except ValueError as error:
        yield "data.path", str(error)
        return
    notes += _example_notes(data, survey)
    ends: list[int] = []
    if tokenizer is not None:
        from rollout.tokenization import end_token_ids

        with contextlib.suppress(ValueError):  # which is reported elsewhere
            ends = end_token_ids(tokenizer, config.model.path)
    yield from check_conversations("data.path", survey, tokenizer, config, ends)
    if tokenizer is not None and ends:
        yield from finding_of("data.path", _check_example_lengths, config, data, survey, tokenizer, ends)


def _example_notes(data: JsonlSftData, survey: "Survey") -> Iterator[str]:
    """Notes on what TRL would do with the records and a warm start does not."""
    from rollout.records import messages_of
    from rollout.tasks.records import read_records

    told = (
        where
        for where, prompt, _ in survey.conversations
        if any(message["role"] == "assistant" for message in messages_of(prompt))
    )
    if data.messages_field and data.learned_turns == "last" and (where := next(told, None)):
        yield (
            f"data.path: only the last message of a conversation is learned; earlier ones of the assistant, such as in {where}, are "
            "context. data.learned_turns=all teaches them too"
        )
    shows_no_tools = data.tools_field is None and data.apply_chat_template
    if shows_no_tools and next(read_records(data.path))[1].get("tools"):
        yield "data.path: its records have `tools`, which no prompt shows; data.tools_field=tools gives them to the chat template"


def _check_example_lengths(
    config: SftConfig, data: JsonlSftData, survey: "Survey", tokenizer: "Tokenizer", ends: Sequence[int]
) -> None:
    try:
        max_positions = architecture_of(config.model.path).max_positions
        room = min(config.token_budget, max_positions)
        counts = token_counts(survey.longest, tokenizer, data, config.model.chat_template_kwargs, room, ends)
    except ValueError:  # of config.json or the template, which are reported elsewhere
        return
    for where, length in counts:
        check_example_length(where, length, token_budget=config.token_budget, max_positions=max_positions)
