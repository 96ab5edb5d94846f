"""The task: the problems. ``reward.py`` has the scores of responses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import Fraction, GivenPath, PartName, PositiveInt, Schema, at_most

MAX_NUMBERS = 5
"""Most numbers of a Countdown problem; more have too many expressions to enumerate."""


class CountdownTask(Schema):
    """Reach a target with all the given numbers and ``+ - *``; generated, with disjoint train and held-out
    problems."""

    type: Literal["countdown"] = "countdown"
    num_numbers: Annotated[int, Field(ge=1, le=MAX_NUMBERS, strict=True)] = 3
    """Numbers of a problem."""
    max_number: Annotated[PositiveInt, at_most(10**6, "no small model adds such numbers")] = 20
    """Each number is between 1 and this."""
    max_target: Annotated[PositiveInt, at_most(10**9, "no small model reaches such numbers")] = 100
    """The target is between 1 and this."""
    heldout_fraction: Fraction = 1 / 16
    """Share of the problems that are held out, by a hash of the problem: never seen in training, whatever the
    seed."""


class FileTask(Schema):
    """Problems from the user's files."""

    train_path: GivenPath
    """A ``.jsonl`` or ``.parquet`` file; a relative path starts at the folder that the command is started in.
    """
    heldout_path: GivenPath | None = None
    """File of the held-out problems; without it nothing is evaluated."""
    heldout_sets: dict[PartName, GivenPath] = Field(default_factory=dict)
    """Further files of held-out problems, by name, with the same fields. ``eval/set/NAME/accuracy`` is the
    accuracy on one of them. ``eval/accuracy``, by which the best checkpoint is kept, is the accuracy on
    ``heldout_path`` alone."""
    too_long_prompts: Literal["refuse", "leave_out"] = "refuse"
    """What happens to prompts that leave no room for ``rollout.max_new_tokens``: the run is refused before
    its start, or these prompts are left out, and counted on the console and in the dry run."""
    system_prompt: str | None = None
    """A system message before every prompt; it needs ``apply_chat_template``, and data without system messages."""
    apply_chat_template: bool = True
    """Whether a prompt becomes a user's message in the model's chat template. false: the text is used as it
    is, for base models."""

    @property
    def files(self) -> dict[str, Path]:
        """The files by their fields, the training file first."""
        main = {"train_path": self.train_path, "heldout_path": self.heldout_path}
        sets = {f"heldout_sets.{name}": path for name, path in self.heldout_sets.items()}
        return {field: path for field, path in (main | sets).items() if path is not None}

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.heldout_sets and self.heldout_path is None:
            yield Contradiction(
                ("heldout_sets", "heldout_path"),
                "heldout_sets are further ones, but heldout_path, by which checkpoints and runs are compared, is null",
                "name one of the files as heldout_path",
            )
        if self.system_prompt is not None and not self.apply_chat_template:
            yield Contradiction(
                ("system_prompt", "apply_chat_template"),
                "system_prompt needs a chat template, but apply_chat_template=false",
                "set it to true, or write the text into the prompts",
            )


class Gsm8kTask(FileTask):
    """GSM8K as published: ``question`` and ``answer`` fields, JSONL or parquet, from the user's disk."""

    type: Literal["gsm8k"]


class JsonlTask(FileTask):
    """Any JSONL or parquet file with a prompt field and an answer field. A field inside others is named with
    dots."""

    type: Literal["jsonl"]
    prompt_field: str = "prompt"
    """The field with the prompt: text, or a conversation ``[{role: user, content: ...}, ...]`` whose last message is the
    user's or a tool's. More than a single message of the user needs ``apply_chat_template``."""
    answer_field: str = "answer"
    """The field with the text or number that the reward gets as ``reference``. Every record needs it, and it
    must not be empty."""
    tools_field: str | None = None
    """The name of a field with tools for the chat template, a list of JSON schemas as TRL's ``tools`` or its JSON as text.
    A record without tools has null or an empty list."""

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from super()._contradictions()
        if self.tools_field is not None and not self.apply_chat_template:
            yield Contradiction(
                ("tools_field", "apply_chat_template"),
                "tools_field needs a chat template, but apply_chat_template=false",
                "set it to true, or remove tools_field",
            )


TaskConfig = Annotated[CountdownTask | Gsm8kTask | JsonlTask, Field(discriminator="type")]
