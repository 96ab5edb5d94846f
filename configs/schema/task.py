"""The task and its rewards: what is asked, and how a response is scored."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    Fraction,
    GivenPath,
    NonNegativeInt,
    PositiveInt,
    Schema,
    Seconds,
    at_most,
)

MAX_NUMBERS = 5
"""Most numbers of a Countdown problem; more have too many expressions to enumerate."""
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
Weight = Annotated[float, Field(allow_inf_nan=False)]
"""Factor of a reward's value."""


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
    """Problems from a file of the user's own."""

    train_path: GivenPath
    """A ``.jsonl`` or ``.parquet`` file; a relative path starts at the folder that the command is started in.
    """
    heldout_path: GivenPath | None = None
    """File of the held-out problems; without it nothing is evaluated."""
    system_prompt: str | None = None
    """A system message before every prompt; it needs ``apply_chat_template``."""
    apply_chat_template: bool = True
    """Whether a prompt becomes a user's message in the model's chat template. false: the text stands as it
    is, for base models."""

    @model_validator(mode="after")
    def _system_prompt_has_a_place(self):
        if self.system_prompt is not None and not self.apply_chat_template:
            raise Contradiction(
                ("system_prompt", "apply_chat_template"),
                "system_prompt has its place in a chat template, but apply_chat_template=false",
                "set it to true, or write the text into the prompts",
            )
        return self


class Gsm8kTask(FileTask):
    """GSM8K as published: ``question`` and ``answer`` fields, JSONL or parquet, from the user's disk."""

    type: Literal["gsm8k"]


class JsonlTask(FileTask):
    """Any JSONL or parquet file with a prompt field and an answer field. A field inside others is named with
    dots."""

    type: Literal["jsonl"]
    prompt_field: str = "prompt"
    """Text, or a conversation of a single user's message: ``[{role: user, content: ...}]``."""
    answer_field: str = "answer"
    """Text or a number that the reward gets as ``reference``. Every record needs it, and it must not be empty."""


TaskConfig = Annotated[CountdownTask | Gsm8kTask | JsonlTask, Field(discriminator="type")]


class CountdownReward(Schema):
    """1 for an expression that uses each given number once and equals the target, else 0."""

    type: Literal["countdown"] = "countdown"
    weight: Weight = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""


class Gsm8kReward(Schema):
    """1 for a final number equal to the reference, else 0."""

    type: Literal["gsm8k"] = "gsm8k"
    weight: Weight = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""


class MathVerifyReward(Schema):
    """1 for a final expression that math-verify finds equal to the reference, else 0."""

    type: Literal["math_verify"] = "math_verify"
    weight: Weight = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""
    timeout_s: Seconds = 10.0
    """Deadline of one sample. A sample that misses it scores 0 and is marked failed."""
    num_workers: PositiveInt | None = None
    """Processes that score at the same time, one sample each, started when needed. null: half of the cores, at
    most 32."""


class FunctionReward(Schema):
    """A function of the user's own."""

    type: Literal["function"] = "function"
    weight: Weight = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""
    function: str
    """``module:function``, called as ``f(prompt_text, response_text, reference)``. It returns a number, or
    ``(number, parts)``, where ``parts`` is a dict of numbers, recorded as ``reward/part/NAME``. It may be
    ``async``. Further parameters, by name: ``row``, the whole record of the data file as a dict (None for
    countdown); ``num_tokens`` of the response; ``finish_reason``, ``stop`` or ``length``. The module is
    looked for in the current folder, and among the installed ones."""
    timeout_s: Seconds = 10.0
    """Deadline of one call. A sample that misses it scores 0 and is marked failed."""
    num_workers: PositiveInt | None = None
    """Processes that score at the same time, one sample each, started when needed. null: half of the cores, at
    most 32."""
    import_timeout_s: Seconds = 60.0
    """Deadline for a process to start and import the module."""
    check: Literal["call", "import", "none"] = "call"
    """The trial before anything starts, in a process that is killed if it hangs. ``call`` imports the module and
    calls the function on an empty and an ordinary response to the task's first problem. ``import`` only imports
    it. ``none`` is for a module that only a job's own nodes have."""

    @field_validator("function")
    @classmethod
    def _module_and_name(cls, function: str) -> str:
        if function.count(":") != 1:
            raise ValueError(f"function {function!r} is not of the form module:name")
        return function


class PlainText(Schema):
    """The reward model reads ``template`` with ``{prompt}``, ``{response}`` and ``{reference}`` filled in."""

    type: Literal["plain"] = "plain"
    template: str = "{prompt}{response}"
    """The text that is scored; a literal brace is written twice."""

    @field_validator("template")
    @classmethod
    def _known_places(cls, template: str) -> str:
        mark = "a response"
        try:
            text = template.format(prompt="", response=mark, reference="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"template {template!r} cannot be filled in ({type(error).__name__}: {error}); its places are {{prompt}}, {{response}} and "
                "{reference}, and a literal brace is written twice"
            ) from error
        if mark not in text:
            raise ValueError(
                f"template {template!r} leaves out the response; write {{response}} where it belongs"
            )
        return template


class ChatText(Schema):
    """The reward model reads a conversation: the prompt as the user's turn, the response as the assistant's."""

    type: Literal["chat"] = "chat"
    tokenizer: GivenPath
    """Folder of the *reward model's* tokenizer, whose chat template writes the conversation."""


RewardModelText = Annotated[PlainText | ChatText, Field(discriminator="type")]


class ModelReward(Schema):
    """The score of a reward model served over HTTP (``rollout/rewards/model.py`` describes request and answer)."""

    type: Literal["model"] = "model"
    weight: Weight = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Replicas of the same model; each batch goes to the least loaded. ``sglang``: ``http://host:port``.
    ``json``: the full address."""
    protocol: Literal["sglang", "json"] = "sglang"
    """``sglang``: ``/classify`` of a server started with ``--is-embedding``. ``json``: a server of the user's
    own."""
    text: RewardModelText = PlainText()
    """The text of a sample that the model reads. Prompt and response as they are: no system prompt, no end
    token."""
    batch_size: Count = 32
    """Most samples of one request; fewer are sent where no more arrive within a moment."""
    max_concurrency: Count = 16
    """Requests in flight over all replicas."""
    timeout_s: Seconds = 120.0
    """Deadline of one attempt at a request."""
    max_retries: NonNegativeInt = 3
    """Most further attempts at a request that got no answer, HTTP 429 or 5xx. After the last the run stops."""

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            try:
                is_address = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
            except ValueError:  # brackets that do not close
                is_address = False
            if not is_address:
                raise ValueError(
                    f"{url!r} is not an address of a reward model; write it like http://10.0.0.7:30000"
                )
        return urls


class OverlongPenalty(Schema):
    """DAPO's soft overlong punishment, only as a part of ``weighted``. It reaches -1 times ``weight`` at
    ``rollout.max_new_tokens``."""

    type: Literal["overlong"] = "overlong"
    weight: Weight = 1.0
    """Factor of the penalty, positive: the penalty itself is negative."""
    buffer_tokens: PositiveInt
    """L_cache: the penalty grows linearly from 0 to 1 over this many tokens before max_new_tokens."""


RewardPart = Annotated[
    CountdownReward | Gsm8kReward | MathVerifyReward | FunctionReward | ModelReward | OverlongPenalty,
    Field(discriminator="type"),
]


class WeightedReward(Schema):
    """The sum of several rewards, each times its ``weight``; every part is also recorded by its name,
    unweighted."""

    type: Literal["weighted"] = "weighted"
    parts: Annotated[dict[str, RewardPart], Field(min_length=1)]
    """The rewards by name, e.g. ``correct: {type: math_verify}`` and ``helpful: {type: model, urls: [...],
    weight: 0.2}``.

    One part alone decides whether a response counts as right in an evaluation, by a value of at least 1: the
    first part that checks an answer (countdown, gsm8k, math_verify, function) or, where there is none, the first
    model."""

    @model_validator(mode="after")
    def _something_is_rewarded(self):
        if all(part.type == "overlong" for part in self.parts.values()):
            raise Contradiction(
                ("parts",),
                "parts hold an overlong penalty and nothing to penalise",
                "add a part that rewards, e.g. correct: {type: gsm8k}",
            )
        wrong = next((name for name in self.parts if not PART_NAME.fullmatch(name)), None)
        if wrong is not None:
            raise Contradiction(
                (),
                f"{wrong!r} cannot name a part, since metrics are named after it",
                "use letters, digits, `_` and `-`",
            )
        return self


AnyReward = Annotated[
    CountdownReward | Gsm8kReward | MathVerifyReward | FunctionReward | ModelReward | WeightedReward,
    Field(discriminator="type"),
]
