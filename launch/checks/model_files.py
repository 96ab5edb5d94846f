"""Reads the model's folder before anything starts: headers of the weights, the tokenizer, its chat template."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.loader import Finding
from configs.reading.named_files import TOKENIZERS, missing_weights
from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.environment import MessageEnvironment
from configs.schema.reward import ModelReward, rewards_in
from configs.schema.run import CountdownSftData, SftData
from configs.schema.task import CountdownTask, TaskConfig
from launch.checks.arguments import finding_of
from parallel.planning.architecture import architecture_of
from parallel.weights.hf_headers import weight_problems

if TYPE_CHECKING:
    from rollout.tokenization import Tokenizer


def check_weights(config: AnyConfig) -> Iterator[Finding]:
    """Compares the headers of the weight files with the architecture."""
    folders = {"model.path": config.model.path}
    if isinstance(config, RunConfig):
        folders |= {f"{field}.path": model.path for field, model in config.other_models.items()}
    for field, folder in folders.items():
        if missing_weights(folder) is None:
            with contextlib.suppress(ValueError):  # of a broken config.json, which is reported elsewhere
                errors = weight_problems(folder, architecture_of(folder))
                yield from ((field, error) for error in errors)


def open_tokenizer(folder: Path) -> "Tokenizer | None":
    """None if the folder has none, which is reported with the missing files. Raises ValueError."""
    from rollout.tokenizer_files import TokenizerFiles

    if TokenizerFiles.reads(folder):
        return TokenizerFiles(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    from rollout.tokenization import load_tokenizer

    return load_tokenizer(folder)  # older files, which only transformers can read: takes seconds


def check_tokenizer(config: AnyConfig, tokenizer: "Tokenizer") -> Iterator[Finding]:
    from rollout.tokenization import check_vocabulary_size, end_token_ids
    from rollout.tokenizer_files import TokenizerFiles

    folder = config.model.path
    with contextlib.suppress(ValueError):  # of a broken config.json, which is reported elsewhere
        vocab_size = architecture_of(folder).vocab_size
        num_ids = tokenizer.num_ids if isinstance(tokenizer, TokenizerFiles) else len(tokenizer)
        yield from finding_of("model.path", check_vocabulary_size, num_ids, vocab_size, folder)
    if not getattr(tokenizer, "may_have_defaults", False):
        yield from finding_of("model.path", end_token_ids, tokenizer, folder)
    if isinstance(config, RunConfig):
        yield from finding_of("rollout.stop", _check_stop_texts, config, tokenizer)
    data = config.data if isinstance(config, SftConfig) else config.task
    if isinstance(data, CountdownTask | CountdownSftData):
        from rollout.tasks.countdown import check_characters

        yield from finding_of("model.path", check_characters, tokenizer)
    template_findings = []
    if tokenizer.chat_template or getattr(data, "apply_chat_template", False):
        template_findings = [*_check_template(config, tokenizer, data)]
        yield from template_findings
    environment = config.environment if isinstance(config, RunConfig) else None
    is_rendered = isinstance(environment, MessageEnvironment) and environment.template == "chat"
    if is_rendered and not tokenizer.chat_template:
        error = f"environment.template=chat: the tokenizer of {folder} has no chat template"
        fix = "put its chat_template.jinja into the folder, or set environment.template=plain"
        yield "environment.template", f"{error}; {fix}"
    elif is_rendered and not template_findings:
        yield from finding_of("environment.template", _check_is_continued, config, tokenizer)


def _check_stop_texts(config: RunConfig, tokenizer: "Tokenizer") -> None:
    """Raises ValueError: the tokenizer has no tokens for a text that is to end responses."""
    for text in config.rollout.stop:
        written = str(tokenizer.decode(tokenizer.encode(f"1{text}1", add_special_tokens=False)))
        if text not in written:
            raise ValueError(
                f"rollout.stop has {text!r}, which no response can have: the tokenizer of {config.model.path} turns 1{text}1 into "
                f"{written!r}; use a text that its tokens can write"
            )


def end_notes(config: RunConfig, tokenizer: "Tokenizer") -> Iterator[str]:
    """Notes on a chat template that closes the assistant's turn with a token at which no response ends."""
    from rollout.environments.rendering import ChatRenderer
    from rollout.tokenization import end_token_ids

    renders = getattr(config.task, "apply_chat_template", False)
    if not renders or isinstance(config.environment, MessageEnvironment):
        return  # an environment of messages stops at the template's own end
    try:
        stops = end_token_ids(tokenizer, config.model.path)
        renderer = ChatRenderer(tokenizer, arguments=config.model.chat_template_kwargs)
    except ValueError:  # reported elsewhere, or a template that renders prompts and cannot be continued
        return
    end = renderer.end_token_ids[0]
    text = renderer.decode([end])
    if end not in stops and not any(stop in text for stop in config.rollout.stop):
        yield (
            f"model.path: the chat template closes an answer with {text!r} ({end}), but responses end only at "
            f"{', '.join(f'{renderer.decode([number])!r} ({number})' for number in stops)}, so a response may run on to "
            f"rollout.max_new_tokens; add {end} to eos_token_id in {config.model.path / 'generation_config.json'}"
        )


def check_tools_template(config: RunConfig, tools: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Tries the chat template with the tools of an environment, which are known once it has been made. Problems without
    tools are reported with the tokenizer."""
    tokenizer = None
    with contextlib.suppress(ValueError):
        tokenizer = open_tokenizer(config.model.path)
    if tokenizer is not None and not any(check_tokenizer(config, tokenizer)):
        yield from finding_of("environment.template", _check_is_continued, config, tokenizer, tools)


def _check_is_continued(config: RunConfig, tokenizer: "Tokenizer", tools: Sequence[Mapping] = ()) -> None:
    """Check that messages can follow sampled tokens. Tools may have another template, which is tried once they are known.
    Raises ValueError."""
    from rollout.environments.rendering import ChatRenderer

    arguments, templates = config.model.chat_template_kwargs, tokenizer.chat_template
    is_for_tools = isinstance(templates, dict) and "tool_use" in templates
    if is_for_tools and not tools and config.environment.type != "agent":
        return
    try:
        ChatRenderer(tokenizer, tools=tools, arguments=arguments)
    except ValueError:
        from rollout.tokenization import load_tokenizer

        # The tokenizer's files do not show all that transformers does with them; transformers decides, which takes seconds.
        try:
            ChatRenderer(load_tokenizer(config.model.path), tools=tools, arguments=arguments)
        except ValueError as error:
            raise ValueError(f"{error}, or set environment.template=plain") from error


def _check_template(
    config: AnyConfig, tokenizer: "Tokenizer", data: TaskConfig | SftData
) -> Iterator[Finding]:
    """Checked even if only an environment renders: its own check, at the start, does not know the arguments' names."""
    from rollout.tokenizer_files import check_template_arguments

    arguments, field = config.model.chat_template_kwargs, "model.chat_template_kwargs"
    system_prompt = getattr(data, "system_prompt", None)
    templated = getattr(data, "apply_chat_template", False)
    if not (templated or arguments):
        return
    error = template_error(tokenizer, system_prompt, arguments)
    if error and arguments and not template_error(tokenizer, system_prompt, {}):
        yield field, f"{field}={arguments}: {error}; correct or remove them"
    elif error and templated:
        of_data = "data.apply_chat_template" if isinstance(config, SftConfig) else "task.apply_chat_template"
        without = "remove task.system_prompt, " if system_prompt is not None else ""
        fix = f"{without}restore the template that came with the model, or set {of_data}=false"
        yield of_data, f"{error}; {fix}" if tokenizer.chat_template else error
    else:
        yield from finding_of(field, check_template_arguments, tokenizer, arguments)


def template_error(tokenizer: "Tokenizer", system_prompt: str | None, arguments: Mapping) -> str | None:
    """The error if the template cannot render a prompt."""
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


def reward_tokenizers(config: RunConfig) -> Iterator[Path]:
    """Folders of the tokenizers with which reward models read conversations. Another check reports missing ones."""
    for _, part, _ in rewards_in(config.reward_type):
        if isinstance(part, ModelReward) and part.text.type == "chat" and part.text.tokenizer.is_dir():
            yield part.text.tokenizer
