"""What is asked, and how an answer is scored."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Fraction, PositiveInt, Schema


class CountdownTask(Schema):
    """Reach a target with all the given numbers and ``+ - *``; generated, with disjoint train and held-out problems."""

    type: Literal["countdown"] = "countdown"
    num_numbers: PositiveInt = 3
    max_number: PositiveInt = 20
    max_target: PositiveInt = 100
    heldout_fraction: Fraction = 1 / 16
    """Share of the problems that are held out, by a hash of the problem: never seen in training, whatever the seed."""


class FileTask(Schema):
    train_path: Path
    heldout_path: Path | None = None
    """Without it nothing is evaluated."""
    system_prompt: str | None = None
    apply_chat_template: bool = True


class Gsm8kTask(FileTask):
    """GSM8K as published: ``question`` and ``answer`` fields, JSONL or parquet, from the user's disk."""

    type: Literal["gsm8k"]


class JsonlTask(FileTask):
    """Any JSONL or parquet file with a prompt field and an answer field."""

    type: Literal["jsonl"]
    prompt_field: str = "prompt"
    answer_field: str = "answer"


TaskConfig = Annotated[CountdownTask | Gsm8kTask | JsonlTask, Field(discriminator="type")]


class RewardConfig(Schema):
    type: Literal["countdown", "gsm8k", "math_verify", "function"]
    function: str | None = None
    """``module:function`` of the user's, called as ``f(prompt_text, response_text, reference) -> float``."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Of one call of the user's function or of math-verify; past it the sample scores 0 and is marked failed."""

    @model_validator(mode="after")
    def _function_named(self):
        if (self.type == "function") != (self.function is not None):
            raise ValueError("`function: module:name` goes with `type: function`, and only with it")
        if self.function is not None and self.function.count(":") != 1:
            raise ValueError(f"function {self.function!r} is not of the form module:name")
        return self
