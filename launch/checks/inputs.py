"""The model's folder and the data, read before anything starts: weights by their headers, the tokenizer, its
chat template, every record.

What the roles would find of them seconds after their start is found here, without torch and transformers.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.loader import Finding
from configs.reading.named_files import TOKENIZERS, missing_weights
from configs.schema import RunConfig, SftConfig
from configs.schema.run import CountdownSftData, JsonlSftData
from configs.schema.task import CountdownTask, Gsm8kTask, JsonlTask, ModelReward, WeightedReward
from parallel.planning.layout import read_architecture, read_hf_config
from parallel.weights.hf_headers import weight_problems
from rollout.sampling.prompt_room import PromptRoom, PromptsOf, check_example_length, prompt_room
from rollout.tasks.records import Progress

if TYPE_CHECKING:
    from rollout.tasks import Survey
    from rollout.tokenization import Tokenizer

MOST_BYTES_TOKENISED = 1_000_000
"""Of the longest texts of a file: a second of work. The sample role looks at all that may be too long."""
_FIRST_LINE_S, _LATER_LINES_S = 2.0, 10.0


def input_findings(config: RunConfig | SftConfig, notes: list[str]) -> Iterator[Finding]:
    """Everything that is wrong with what the config reads. ``notes`` gets what is allowed, but rarely meant."""
    yield from _of_weights(config)
    tokenizer = None
    try:
        tokenizer = _open_tokenizer(config.model.path)
    except ValueError as error:
        yield "model.path", str(error)
    if tokenizer is not None:
        yield from _of_tokenizer(config, tokenizer)
    if isinstance(config, SftConfig):
        yield from _of_examples(config, tokenizer)
    else:
        yield from _of_reward_tokenizers(config)
        yield from _of_task(config, tokenizer, notes)


def unless(field: str, check: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    """What a check that raises ValueError says."""
    try:
        check(*arguments)
    except ValueError as error:
        yield field, str(error)


@contextlib.contextmanager
def reading_progress(path: Path) -> Iterator[Progress]:
    """Says on stderr how far the reading of a large file has come: on a terminal in a line that vanishes,
    elsewhere in one now and then."""
    began, next_line, on_terminal = time.monotonic(), _FIRST_LINE_S, sys.stderr.isatty()
    said = False

    def report(share: float) -> None:
        nonlocal next_line, said
        elapsed = time.monotonic() - began
        if elapsed < (_FIRST_LINE_S / 2 if on_terminal else next_line):
            return
        said, next_line = True, elapsed + _LATER_LINES_S
        print(f"reading {path}: {share:4.0%}", end="\r" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if said and on_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------
# the model's folder


def _of_weights(config: RunConfig | SftConfig) -> Iterator[Finding]:
    """By the headers of their files; a config.json that cannot be used has been named before."""
    critic = config.critic.model if isinstance(config, RunConfig) and config.critic is not None else None
    folders = {"model.path": config.model.path} | (
        {} if critic is None else {"critic.model.path": critic.path}
    )
    for field, folder in folders.items():
        if missing_weights(folder) is None:
            with contextlib.suppress(ValueError):
                yield from (
                    (field, said)
                    for said in weight_problems(folder, read_architecture(read_hf_config(folder)))
                )


def _open_tokenizer(folder: Path) -> "Tokenizer | None":
    """None where there is none, which is among the missing files. Raises ValueError."""
    from rollout.tokenizer_files import TokenizerFiles

    if TokenizerFiles.reads(folder):
        return TokenizerFiles(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    from rollout.tokenization import load_tokenizer

    return load_tokenizer(folder)  # of older files, which transformers alone can read: takes seconds


def _of_tokenizer(config: RunConfig | SftConfig, tokenizer: "Tokenizer") -> Iterator[Finding]:
    from rollout.tokenization import check_vocabulary_size, end_token_ids
    from rollout.tokenizer_files import TokenizerFiles

    folder = config.model.path
    with contextlib.suppress(ValueError):  # of a broken config.json, which has been named before
        vocab_size = read_architecture(read_hf_config(folder)).vocab_size
        yield from unless(
            "model.path",
            check_vocabulary_size,
            tokenizer.num_ids if isinstance(tokenizer, TokenizerFiles) else len(tokenizer),
            vocab_size,
            folder,
        )
    if not getattr(tokenizer, "may_have_defaults", False):
        yield from unless("model.path", end_token_ids, tokenizer, folder)
    data = config.data if isinstance(config, SftConfig) else config.task
    if isinstance(data, CountdownTask | CountdownSftData):
        from rollout.tasks.countdown import check_characters

        yield from unless("model.path", check_characters, tokenizer)
    elif data.apply_chat_template:
        field = "data.apply_chat_template" if isinstance(config, SftConfig) else "task.apply_chat_template"
        yield from unless(field, _check_template, tokenizer, getattr(data, "system_prompt", None), field)


def _check_template(tokenizer: "Tokenizer", system_prompt: str | None, field: str) -> None:
    from rollout.tokenization import encode_prompt
    from rollout.tokenizer_files import TokenizerFiles

    if not tokenizer.chat_template:
        encode_prompt(tokenizer, "?", system_prompt=system_prompt, apply_chat_template=True)  # which says so
    try:
        if isinstance(tokenizer, TokenizerFiles):
            tokenizer.check_template(system_prompt)
        else:
            encode_prompt(tokenizer, "?", system_prompt=system_prompt, apply_chat_template=True)
    except Exception as error:  # a template is a program: transformers passes on whatever it fails with
        without = "remove task.system_prompt, " if system_prompt is not None else ""
        raise ValueError(
            f"{error}; {without}restore the template that came with the model, or set {field}=false"
        ) from error


def _of_reward_tokenizers(config: RunConfig) -> Iterator[Finding]:
    reward = config.reward_type
    for part in reward.parts.values() if isinstance(reward, WeightedReward) else [reward]:
        if isinstance(part, ModelReward) and part.text.type == "chat" and part.text.tokenizer.is_dir():
            yield from unless("reward", _open_tokenizer, part.text.tokenizer)


# --------------------------------------------------------------------------------------------------------------------
# the data


def _of_task(config: RunConfig, tokenizer: "Tokenizer | None", notes: list[str]) -> Iterator[Finding]:
    task = config.task
    if isinstance(task, CountdownTask):
        from rollout.tasks.countdown import check_problems, long_prompt

        yield from unless("task.heldout_fraction", check_problems, task)
        if tokenizer is not None and (text := long_prompt(task)):
            room = _room(config, "training")
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            if room is not None and tokens > room.tokens:
                yield "rollout.max_new_tokens", room.too_long(f"training prompt {text!r}", tokens)
        return
    surveys: dict[str, Survey] = {}
    fields: tuple[tuple[str, PromptsOf], ...] = (("train_path", "training"), ("heldout_path", "held-out"))
    for field, which in fields:
        path = getattr(task, field)
        if path is None or not path.is_file():
            continue
        try:
            surveys[field] = survey_of(task, path)
        except ValueError as error:
            yield f"task.{field}", str(error)
            continue
        yield from _of_lengths(task, f"task.{field}", surveys[field], tokenizer, _room(config, which))
    notes += _notes_of(surveys, config)


def survey_of(task: Gsm8kTask | JsonlTask, path: Path) -> "Survey":
    """What ``path`` holds; it is read once however often this is asked. Raises ValueError."""
    from rollout.tasks import survey_task_file

    return survey_task_file(task, path, progress=reading_progress)


def _room(config: RunConfig, which: PromptsOf) -> PromptRoom | None:
    """None also where there is none at all, or config.json is broken: both are found before."""
    try:
        return prompt_room(
            config, which, max_positions=read_architecture(read_hf_config(config.model.path)).max_positions
        )
    except ValueError:
        return None


def _of_lengths(
    task: Gsm8kTask | JsonlTask,
    field: str,
    survey: "Survey",
    tokenizer: "Tokenizer | None",
    room: PromptRoom | None,
) -> Iterator[Finding]:
    if tokenizer is None or room is None:
        return
    try:
        longest = _tokenised(survey.longest, tokenizer, task, room.tokens)
    except ValueError:  # of the template, which has been named before
        return
    too_long = [(tokens, where) for where, tokens in longest if tokens > room.tokens]
    if too_long:
        tokens, where = max(too_long, key=lambda found: found[0])
        which = (
            "the longest prompt"
            if len(too_long) == 1
            else f"the longest of at least {len(too_long)} such prompts"
        )
        yield field, f"{field}: {room.too_long(f'{which}, {where},', tokens)}"


def _tokenised(
    texts: Sequence[tuple[str, str, str]], tokenizer: "Tokenizer", task: Gsm8kTask | JsonlTask, room: int
) -> list[tuple[str, int]]:
    """(where, number of tokens) of those of the longest texts that may have more than ``room``."""
    from rollout.tasks.task import most_tokens
    from rollout.tokenization import encode_prompt

    encode = partial(
        encode_prompt,
        tokenizer,
        system_prompt=task.system_prompt,
        apply_chat_template=task.apply_chat_template,
    )
    around, left, found = len(encode("?")), MOST_BYTES_TOKENISED, []
    for where, text, _ in texts:
        if left <= 0 or around + most_tokens(text) <= room:
            continue
        left -= len(text)
        found.append((where, len(encode(text))))
    return found


def _notes_of(surveys: "dict[str, Survey]", config: RunConfig) -> Iterator[str]:
    for field, survey in surveys.items():
        if survey.distinct < survey.count:
            yield f"task.{field}: {survey.count - survey.distinct:,} of {survey.count:,} prompts of {survey.path} repeat an earlier one"
    if len(surveys) == 2:
        shared = len(surveys["train_path"].prompts & surveys["heldout_path"].prompts)
        if shared:
            yield (
                f"task.heldout_path: {shared:,} of the {surveys['heldout_path'].distinct:,} held-out prompts are trained on too, "
                "so that the accuracy on them says nothing about others"
            )
    training = surveys.get("train_path")
    if training is not None and training.count < config.rollout.prompts_per_step:
        yield (
            f"task.train_path: its {training.count:,} prompts are fewer than rollout.prompts_per_step={config.rollout.prompts_per_step}, "
            "so that each step has some of them several times"
        )


def _of_examples(config: SftConfig, tokenizer: "Tokenizer | None") -> Iterator[Finding]:
    data = config.data
    if isinstance(data, CountdownSftData):
        from rollout.tasks.countdown import check_problems

        yield from unless("data.task.heldout_fraction", check_problems, data.task)
        return
    if not data.path.is_file():
        return
    from rollout.tasks import survey_pairs

    try:
        survey = survey_pairs(data.path, data.prompt_field, data.response_field, progress=reading_progress)
    except ValueError as error:
        yield "data.path", str(error)
        return
    if tokenizer is not None:
        yield from unless("data.path", _check_examples, config, data, survey, tokenizer)


def _check_examples(config: SftConfig, data: JsonlSftData, survey: "Survey", tokenizer: "Tokenizer") -> None:
    from rollout.tasks.task import most_tokens
    from rollout.tokenization import encode_prompt

    encode = partial(
        encode_prompt, tokenizer, system_prompt=None, apply_chat_template=data.apply_chat_template
    )
    try:
        max_positions = read_architecture(read_hf_config(config.model.path)).max_positions
        around, left = len(encode("?")), MOST_BYTES_TOKENISED
    except ValueError:  # of config.json or the template, which have been named before
        return
    for where, prompt, response in survey.longest:
        if left <= 0 or around + most_tokens(prompt) + most_tokens(response) <= min(
            config.token_budget, max_positions
        ):
            continue
        left -= len(prompt) + len(response)
        length = len(encode(prompt)) + len(
            tokenizer.encode(response, add_special_tokens=False)
        )  # an end token more, and one place less
        check_example_length(where, length, token_budget=config.token_budget, max_positions=max_positions)
