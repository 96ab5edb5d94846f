"""Reads the model's folder and the data before anything starts: headers of the weights, the tokenizer, its
chat template, every record.

The errors are those that the roles would raise seconds after their start. Neither torch nor transformers is
imported.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import did_you_mean
from configs.loader import Finding
from configs.reading.named_files import TOKENIZERS, missing_weights
from configs.schema import RunConfig, SftConfig
from configs.schema.run import CountdownSftData, JsonlSftData, SftData
from configs.schema.sampler import MixtureOrder
from configs.schema.task import (
    CodeReward,
    CountdownTask,
    Gsm8kTask,
    JsonlTask,
    ModelReward,
    RewardByField,
    RewardPart,
    TaskConfig,
    parts_of,
)
from parallel.planning.architecture import read_architecture, read_hf_config
from parallel.weights.hf_headers import weight_problems
from rollout.sampling.prompt_room import PromptRoom, PromptsOf, check_example_length, prompt_room
from rollout.tasks.records import Progress

if TYPE_CHECKING:
    from rollout.records import DataPrompt, Message
    from rollout.tasks import Survey
    from rollout.tokenization import Tokenizer

MOST_BYTES_TOKENISED = 1_000_000
"""Bytes of the longest texts of a file: a second of work. The sample role tokenises every text that may be too
long."""
_ANSWER = {"role": "assistant", "content": "12"}
_FIRST_LINE_S, _LATER_LINES_S = 2.0, 10.0


def input_findings(config: RunConfig | SftConfig, notes: list[str]) -> Iterator[Finding]:
    """Errors of the files that the config reads. ``notes`` gets what is allowed, but rarely intended."""
    yield from _check_weights(config)
    tokenizer = None
    try:
        tokenizer = _open_tokenizer(config.model.path)
    except ValueError as error:
        yield "model.path", str(error)
    if tokenizer is not None:
        yield from _check_tokenizer(config, tokenizer)
    if isinstance(config, SftConfig):
        yield from _check_examples(config, tokenizer, notes)
    else:
        yield from _check_reward_tokenizers(config)
        yield from _check_task(config, tokenizer, notes)


def finding_of(field: str, check: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    """The finding of a check, where it raises ValueError."""
    try:
        check(*arguments)
    except ValueError as error:
        yield field, str(error)


@contextlib.contextmanager
def reading_progress(path: Path) -> Iterator[Progress]:
    """Reports on stderr how much of a large file has been read: on a terminal in a line that vanishes,
    elsewhere in a line now and then."""
    began, next_line, on_terminal = time.monotonic(), _FIRST_LINE_S, sys.stderr.isatty()
    has_printed = False

    def report(share: float) -> None:
        nonlocal next_line, has_printed
        elapsed = time.monotonic() - began
        if elapsed < (_FIRST_LINE_S / 2 if on_terminal else next_line):
            return
        has_printed, next_line = True, elapsed + _LATER_LINES_S
        print(f"reading {path}: {share:4.0%}", end="\r" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if has_printed and on_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------
# the model's folder


def _check_weights(config: RunConfig | SftConfig) -> Iterator[Finding]:
    """Compares the headers of the weight files with the architecture."""
    folders = {"model.path": config.model.path}
    if isinstance(config, RunConfig):
        folders |= {f"{field}.path": model.path for field, model in config.other_models.items()}
    for field, folder in folders.items():
        if missing_weights(folder) is None:
            with contextlib.suppress(ValueError):  # of a broken config.json, which is reported elsewhere
                errors = weight_problems(folder, read_architecture(read_hf_config(folder)))
                yield from ((field, error) for error in errors)


def _open_tokenizer(folder: Path) -> "Tokenizer | None":
    """None where the folder has none, which is reported with the missing files. Raises ValueError."""
    from rollout.tokenizer_files import TokenizerFiles

    if TokenizerFiles.reads(folder):
        return TokenizerFiles(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    from rollout.tokenization import load_tokenizer

    return load_tokenizer(folder)  # older files, which transformers alone can read: takes seconds


def _check_tokenizer(config: RunConfig | SftConfig, tokenizer: "Tokenizer") -> Iterator[Finding]:
    from rollout.tokenization import check_vocabulary_size, end_token_ids
    from rollout.tokenizer_files import TokenizerFiles

    folder = config.model.path
    with contextlib.suppress(ValueError):  # of a broken config.json, which is reported elsewhere
        vocab_size = read_architecture(read_hf_config(folder)).vocab_size
        num_ids = tokenizer.num_ids if isinstance(tokenizer, TokenizerFiles) else len(tokenizer)
        yield from finding_of("model.path", check_vocabulary_size, num_ids, vocab_size, folder)
    if not getattr(tokenizer, "may_have_defaults", False):
        yield from finding_of("model.path", end_token_ids, tokenizer, folder)
    data = config.data if isinstance(config, SftConfig) else config.task
    if isinstance(data, CountdownTask | CountdownSftData):
        from rollout.tasks.countdown import check_characters

        yield from finding_of("model.path", check_characters, tokenizer)
    if tokenizer.chat_template or getattr(data, "apply_chat_template", False):
        yield from _check_template(config, tokenizer, data)


def _check_template(
    config: RunConfig | SftConfig, tokenizer: "Tokenizer", data: TaskConfig | SftData
) -> Iterator[Finding]:
    """Also where an environment alone renders: its own check, at the start, knows nothing of the arguments' names."""
    from rollout.tokenizer_files import check_template_arguments

    arguments, field = config.model.chat_template_kwargs, "model.chat_template_kwargs"
    system_prompt, templated = (
        getattr(data, "system_prompt", None),
        getattr(data, "apply_chat_template", False),
    )
    if not (templated or arguments):
        return
    error = _template_error(tokenizer, system_prompt, arguments)
    if error and arguments and not _template_error(tokenizer, system_prompt, {}):
        yield field, f"{field}={arguments}: {error}; correct or remove them"
    elif error and templated:
        of_data = "data.apply_chat_template" if isinstance(config, SftConfig) else "task.apply_chat_template"
        without = "remove task.system_prompt, " if system_prompt is not None else ""
        fix = f"{without}restore the template that came with the model, or set {of_data}=false"
        yield of_data, f"{error}; {fix}" if tokenizer.chat_template else error
    else:
        yield from finding_of(field, check_template_arguments, tokenizer, arguments)


def _template_error(
    tokenizer: "Tokenizer", system_prompt: str | None, arguments: Mapping[str, Any]
) -> str | None:
    """What goes wrong where the template renders a prompt."""
    from rollout.tokenization import encode_prompt
    from rollout.tokenizer_files import TokenizerFiles

    try:
        if isinstance(tokenizer, TokenizerFiles) and tokenizer.chat_template:
            tokenizer.check_template(system_prompt, arguments)
        else:
            encode_prompt(
                tokenizer,
                "?",
                system_prompt=system_prompt,
                apply_chat_template=True,
                chat_template_kwargs=arguments,
            )
    except Exception as error:  # a template is a program: transformers passes on any error
        return str(error)
    return None


def _check_reward_tokenizers(config: RunConfig) -> Iterator[Finding]:
    for part in _reward_parts(config):
        if isinstance(part, ModelReward) and part.text.type == "chat" and part.text.tokenizer.is_dir():
            yield from finding_of("reward", _open_tokenizer, part.text.tokenizer)


def _reward_parts(config: RunConfig) -> Sequence[RewardPart]:
    return [part for _, part in _parts_of_sources(config)]


def _parts_of_sources(config: RunConfig) -> Iterator[tuple[tuple[str, str] | None, RewardPart]]:
    """Each part of each reward, with (field, value) of the records that it scores; None: all."""
    reward = config.reward_type
    if not isinstance(reward, RewardByField):
        yield from ((None, part) for part in parts_of(reward))
        return
    for value, one in reward.rewards.items():
        yield from (((reward.field, value), part) for part in parts_of(one))


# --------------------------------------------------------------------------------------------------------------------
# the data


def _check_task(config: RunConfig, tokenizer: "Tokenizer | None", notes: list[str]) -> Iterator[Finding]:
    task = config.task
    if isinstance(task, CountdownTask):
        from rollout.tasks.countdown import check_problems, long_prompt

        yield from finding_of("task.heldout_fraction", check_problems, task)
        if tokenizer is not None and (text := long_prompt(task)):
            room = _prompt_room(config, "training")
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            if room is not None and tokens > room.tokens:
                yield "rollout.max_new_tokens", room.too_long(f"training prompt {text!r}", tokens)
        return
    from rollout.rewards.code import check_tests
    from rollout.tasks.files import check_field

    code_parts = [(of, part) for of, part in _parts_of_sources(config) if isinstance(part, CodeReward)]
    reward = config.reward_type
    surveys: dict[str, Survey] = {}
    for field, path in task.files.items():
        if not path.is_file():
            continue
        try:
            surveys[field] = survey_of(task, path)
        except ValueError as error:
            yield f"task.{field}", str(error)
            continue
        yield from _check_conversations(f"task.{field}", surveys[field], tokenizer, config)
        if isinstance(reward, RewardByField):
            yield from _check_rewards_of_sources(reward, f"task.{field}", path, notes)
        for of, part in code_parts:
            check = partial(check_field, of=of)
            yield from finding_of(f"task.{field}", check, path, part.tests_field, check_tests)
        if field == "train_path" and isinstance(config.sampler, MixtureOrder):
            yield from finding_of("sampler", _check_sources, config.sampler, path)
        room = _prompt_room(config, "training" if field == "train_path" else "held-out")
        arguments = config.model.chat_template_kwargs
        yield from _check_lengths(task, f"task.{field}", surveys[field], tokenizer, arguments, room, notes)
    notes += _data_notes(surveys, config)


def _check_rewards_of_sources(
    reward: RewardByField, field: str, path: Path, notes: list[str]
) -> Iterator[Finding]:
    """Each record of a file has a source with a reward. A reward for no record to train on is a note."""
    from rollout.rewards.by_field import known_source
    from rollout.tasks.files import check_field

    seen = set[str]()
    problems = [
        *finding_of(
            field, check_field, path, reward.field, lambda value: seen.add(known_source(reward, value))
        )
    ]
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
    """A survey of the records of ``path``, which is read once however often this is called. Raises ValueError."""
    from rollout.tasks import survey_task_file

    return survey_task_file(task, path, progress=reading_progress)


def _prompt_room(config: RunConfig, which: PromptsOf) -> PromptRoom | None:
    """None where there is no room at all, or config.json is broken: both are reported elsewhere."""
    try:
        max_positions = read_architecture(read_hf_config(config.model.path)).max_positions
        return prompt_room(config, which, max_positions=max_positions)
    except ValueError:
        return None


def _check_conversations(
    field: str,
    survey: "Survey",
    tokenizer: "Tokenizer | None",
    config: RunConfig | SftConfig,
    ends: Sequence[int] = (),
) -> Iterator[Finding]:
    """Render the first conversation of each shape, as the policy and a reward model will read it. The first error of
    each template is a finding."""
    from rollout.records import messages_of

    if not survey.conversations:
        return
    arguments = config.model.chat_template_kwargs
    if tokenizer is not None and _template_error(tokenizer, None, arguments) is None:
        found = (
            f"{where}: {error}, or drop such records"
            for where, prompt, response in survey.conversations
            if (
                error := _conversation_error(
                    tokenizer, prompt, arguments, "; use roles that the template takes"
                )
            )
            or (error := _response_error(tokenizer, prompt, response, ends, config))
        )
        yield from ((field, text) for text in islice(found, 1))
    for part in _reward_parts(config) if isinstance(config, RunConfig) else ():
        if not (isinstance(part, ModelReward) and part.text.type == "chat" and part.text.tokenizer.is_dir()):
            continue
        with contextlib.suppress(ValueError):  # which is reported elsewhere
            reader, use_plain = _open_tokenizer(part.text.tokenizer), "; use text: {type: plain}"
            found = (
                f"{where}: {error}, or drop such records"
                for where, prompt, _ in survey.conversations
                if reader
                and (error := _conversation_error(reader, (*messages_of(prompt), _ANSWER), {}, use_plain))
            )
            yield from (("reward", f"reward: {text}") for text in islice(found, 1))


def _conversation_error(
    tokenizer: "Tokenizer", prompt: "DataPrompt", arguments: Mapping[str, Any], fix: str
) -> str | None:
    """Why the template cannot render the conversation, or what it leaves out, with texts made for the trial."""
    from rollout.records import WithTools, messages_of

    trial = [
        {**message, "content": f"7 + {place} = ?"} if message["role"] in ("system", "user") else dict(message)
        for place, message in enumerate(messages_of(prompt))
    ]
    tools = [dict(tool) for tool in prompt.tools] if isinstance(prompt, WithTools) else []
    given = {**arguments, "tools": tools} if tools else arguments
    named = f"a conversation of {', '.join(message['role'] for message in trial)}"
    try:
        text = str(
            tokenizer.apply_chat_template(
                trial, add_generation_prompt=True, tokenize=False, return_dict=False, **given
            )
        )
    except Exception as error:  # a template is a program: transformers passes on any error
        return f"{named}: {error}{fix}"
    name = f"the chat template of {tokenizer.name_or_path}"
    for place, message in enumerate(trial):
        if message["role"] in ("system", "user") and message["content"] not in text:
            return f"{named}: {name} leaves out message {place + 1}, of role {message['role']}{fix}"
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or str(function.get("name", tool)) not in text:
            return f"{named}: {name} leaves out the tools; describe them in a message and remove tools_field"
    return None


def _response_error(
    tokenizer: "Tokenizer",
    prompt: "DataPrompt",
    response: "str | Message",
    ends: Sequence[int],
    config: RunConfig | SftConfig,
) -> str | None:
    """Why the template cannot render the assistant's message after the prompt, or its earlier ones so that they can be
    learned."""
    from rollout.tokenization import encode_prompt, encode_response, find_turns

    if isinstance(response, str) or not ends:
        return None
    arguments = config.model.chat_template_kwargs
    try:
        encode_response(tokenizer, prompt, response, ends, chat_template_kwargs=arguments)
        if isinstance(config, SftConfig) and config.learns_all_turns:
            ids = encode_prompt(
                tokenizer,
                prompt,
                system_prompt=None,
                apply_chat_template=True,
                chat_template_kwargs=arguments,
            )
            find_turns(tokenizer, prompt, ids, ends, chat_template_kwargs=arguments)
    except ValueError as error:
        return str(error)
    return None


def _check_lengths(
    task: Gsm8kTask | JsonlTask,
    field: str,
    survey: "Survey",
    tokenizer: "Tokenizer | None",
    arguments: Mapping[str, Any],
    room: PromptRoom | None,
    notes: list[str],
) -> Iterator[Finding]:
    if tokenizer is None or room is None:
        return
    try:
        prompts = ((where, prompt, "") for where, prompt, _ in survey.longest)
        longest = _token_counts(prompts, tokenizer, task, arguments, room.tokens)
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


def _token_counts(
    texts: "Iterable[tuple[str, DataPrompt, str | Message]]",
    tokenizer: "Tokenizer",
    data: Gsm8kTask | JsonlTask | JsonlSftData,
    arguments: Mapping[str, Any],
    room: int,
    ends: Sequence[int] = (),
) -> list[tuple[str, int]]:
    """(place, tokens of prompt and response) of the longest texts, as far as these may be more than ``room``. Raises
    ValueError for a broken template."""
    from rollout.tasks.prompts import as_json
    from rollout.tasks.task import most_tokens
    from rollout.tokenization import encode_prompt, encode_response

    encode = partial(
        encode_prompt,
        tokenizer,
        system_prompt=getattr(data, "system_prompt", None),
        apply_chat_template=data.apply_chat_template,
        chat_template_kwargs=arguments,
    )
    around, left, counts = len(encode("?")), MOST_BYTES_TOKENISED, []
    for where, prompt, response in texts:
        are_texts = isinstance(prompt, str) and isinstance(response, str)
        if left <= 0 or (are_texts and around + most_tokens(prompt) + most_tokens(response) <= room):
            continue
        left -= len(as_json(prompt)) + len(as_json(response))
        num_tokens = len(encode(prompt))
        if response:
            # The end token adds a place, and the last token of a sequence takes none.
            num_tokens += (
                len(encode_response(tokenizer, prompt, response, ends, chat_template_kwargs=arguments)) - 1
            )
        counts.append((where, num_tokens))
    return counts


def _data_notes(surveys: "dict[str, Survey]", config: RunConfig) -> Iterator[str]:
    for field, survey in surveys.items():
        if survey.distinct < survey.count:
            yield f"task.{field}: {survey.count - survey.distinct:,} of {survey.count:,} prompts of {survey.path} repeat an earlier one"
    training = surveys.get("train_path")
    for field, survey in surveys.items():
        if (
            training is not None
            and survey is not training
            and (shared := len(training.prompts & survey.prompts))
        ):
            yield (
                f"task.{field}: {shared:,} of the {survey.distinct:,} held-out prompts are trained on too, "
                "so that the accuracy on them says nothing about others"
            )
    if training is not None and training.count < config.rollout.prompts_per_step:
        yield (
            f"task.train_path: its {training.count:,} prompts are fewer than rollout.prompts_per_step={config.rollout.prompts_per_step}, "
            "so that each step has some of them several times"
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
    yield from _check_conversations("data.path", survey, tokenizer, config, ends)
    if tokenizer is not None and ends:
        yield from finding_of("data.path", _check_example_lengths, config, data, survey, tokenizer, ends)


def _example_notes(data: JsonlSftData, survey: "Survey") -> Iterator[str]:
    """What TRL would do and a warm start does not."""
    from rollout.records import messages_of
    from rollout.tasks.records import read_records

    told = (
        where
        for where, prompt, _ in survey.conversations
        if any(message["role"] == "assistant" for message in messages_of(prompt))
    )
    if data.messages_field and data.learned_turns == "last" and (where := next(told, None)):
        yield (
            f"data.path: the last message of a conversation is learned; earlier ones of the assistant, such as in {where}, are read "
            "alone. data.learned_turns=all teaches them too"
        )
    if (
        data.tools_field is None
        and data.apply_chat_template
        and next(read_records(data.path))[1].get("tools")
    ):
        yield "data.path: its records have `tools`, which no prompt shows; data.tools_field=tools gives them to the chat template"


def _check_example_lengths(
    config: SftConfig, data: JsonlSftData, survey: "Survey", tokenizer: "Tokenizer", ends: Sequence[int]
) -> None:
    try:
        max_positions = read_architecture(read_hf_config(config.model.path)).max_positions
        room = min(config.token_budget, max_positions)
        counts = _token_counts(survey.longest, tokenizer, data, config.model.chat_template_kwargs, room, ends)
    except ValueError:  # of config.json or the template, which are reported elsewhere
        return
    for where, length in counts:
        check_example_length(where, length, token_budget=config.token_budget, max_positions=max_positions)
