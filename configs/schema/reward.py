"""The rewards: how a response is scored."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import regex
from pydantic import AfterValidator, Field, field_validator

from configs.errors import Contradiction
from configs.schema.base import (
    PART_NAME,
    Count,
    FiniteFloat,
    GivenPath,
    KeyVariable,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Schema,
    Seconds,
    Tokens,
    at_least,
    at_most,
    served_at,
)
from configs.schema.own_function import ModuleAndName


class OwnReward(Schema):
    """The fields of every reward that is not made of other rewards."""

    type: str
    weight: FiniteFloat = 1.0
    """Factor of this reward, as a part of ``weighted`` and alone."""


class CountdownReward(OwnReward):
    """1 for an expression that uses each given number once and equals the target, else 0."""

    type: Literal["countdown"] = "countdown"


class Gsm8kReward(OwnReward):
    """1 for a final number equal to the reference, else 0."""

    type: Literal["gsm8k"] = "gsm8k"


class MathVerifyReward(OwnReward):
    """1 for a final expression that math-verify finds equal to the reference, else 0."""

    type: Literal["math_verify"] = "math_verify"
    timeout_s: Seconds = 10.0
    """Deadline of one sample. A sample that misses it is not scored, and counts as failed."""
    num_workers: PositiveInt | None = None
    """Processes that score at the same time, one sample each, started when needed. null: half of the cores, at
    most 32."""


class FunctionReward(OwnReward):
    """The user's function."""

    type: Literal["function"] = "function"
    function: ModuleAndName
    """``module:function``, called as ``f(prompt_text, response_text, reference)``. It returns a number, or
    ``(number, parts)``, where ``parts`` is a dict of numbers, recorded as ``reward/part/NAME``. It may be
    ``async``. It may have further parameters, by name: ``row``, the whole record of the data file as a dict
    (None for countdown); ``num_tokens`` of the response; ``finish_reason``, ``stop`` or ``length``. The
    module is imported from the current folder or from the installed ones."""
    timeout_s: Seconds = 10.0
    """Deadline of one call. A sample that misses it is not scored, and counts as failed."""
    num_workers: PositiveInt | None = None
    """Processes that score at the same time, one sample each, started when needed. null: half of the cores, at
    most 32."""
    import_timeout_s: Seconds = 60.0
    """Deadline for a process to start and import the module."""
    check: Literal["call", "import", "none"] = "call"
    """The trial before the start, in a process that is killed if it hangs. ``call`` imports the module and
    calls the function on an empty and an ordinary response to the task's first problem. ``import`` only
    imports it. ``none`` is for a module that only the job's nodes have."""


def _can_be_filled_in(template: str) -> str:
    mark = "a response"
    try:
        text = template.format(prompt="", response=mark, reference="")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{template!r} cannot be filled in ({type(error).__name__}: {error}); its placeholders are {{prompt}}, {{response}} and "
            "{reference}, and a literal brace is written twice"
        ) from error
    if mark not in text:
        raise ValueError(f"{template!r} leaves out the response; write {{response}} where it belongs")
    return template


Template = Annotated[str, AfterValidator(_can_be_filled_in)]
"""A text with placeholders, one of them for the response."""


class PlainText(Schema):
    """The reward model reads ``template`` with ``{prompt}``, ``{response}`` and ``{reference}`` filled in."""

    type: Literal["plain"] = "plain"
    template: Template = "{prompt}{response}"
    """The text that is scored; a literal brace is written twice."""


class ChatText(Schema):
    """The reward model reads a conversation: the prompt as the user's turn, the response as the assistant's."""

    type: Literal["chat"] = "chat"
    tokenizer: GivenPath
    """Folder of the *reward model's* tokenizer, whose chat template writes the conversation."""


RewardModelText = Annotated[PlainText | ChatText, Field(discriminator="type")]


class ModelReward(OwnReward):
    """The score of a reward model served over HTTP (``rollout/rewards/model.py`` describes request and answer)."""

    type: Literal["model"] = "model"
    urls: Annotated[tuple[str, ...], Field(min_length=1), served_at("http://10.0.0.7:30000")]
    """Replicas of the same model; each batch goes to the least loaded. ``sglang``: ``http://host:port``.
    ``json``: the full address."""
    protocol: Literal["sglang", "json"] = "sglang"
    """``sglang``: ``/classify`` of a server started with ``--is-embedding``. ``json``: the user's own
    server."""
    text: RewardModelText = PlainText()
    """The text of a sample that the model reads. Prompt and response are used as they are, without system
    prompt and end token."""
    batch_size: Count = 32
    """Most samples of one request; fewer are sent if no more arrive within a moment."""
    max_concurrency: Count = 16
    """Requests in flight over all replicas."""
    timeout_s: Seconds = 120.0
    """Deadline of one attempt at a request."""
    max_retries: NonNegativeInt = 3
    """Most further attempts at a request that got no answer, HTTP 429 or 5xx. After the last the run stops."""
    api_key_variable: KeyVariable | None = None
    """Name of the environment variable that holds the key of the servers, which is sent as a bearer token."""


class JudgeReward(OwnReward):
    """The score that a language model writes in its answer, through any OpenAI-compatible server. The reward
    is ``(score - low) / (high - low)``, from 0 to 1; the score itself is recorded as
    ``reward/part/judge_score``."""

    type: Literal["judge"]
    urls: Annotated[tuple[str, ...], Field(min_length=1), served_at("http://10.0.0.7:8000/v1")]
    """Base addresses of replicas of the same model, like ``http://host:8000/v1``. Each request goes to
    ``/chat/completions`` of the least loaded."""
    model: str
    """The model's name, as the server knows it."""
    prompt: Template
    """The user's message to the judge, with ``{prompt}``, ``{response}`` and ``{reference}`` filled in; a
    literal brace is written twice. Placeholders in the filled-in texts are not replaced."""
    system_prompt: str | None = None
    """A system message before the prompt, without placeholders."""
    score_pattern: str = r"Score[*_]*+:[*_]*+\s*+[*_]*+(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score. Its last match in the judge's answer counts. The sample
    fails if there is no match, or if the search takes longer than a second. The default reads ``Score: 7``,
    even if a part of it is in Markdown's bold."""
    score_range: tuple[FiniteFloat, FiniteFloat]
    """Lowest and highest score. A score outside is a failed sample."""
    api_key_variable: KeyVariable | None = None
    """Name of the environment variable that holds the key of the server. The key itself does not belong in a
    config."""
    max_tokens: Tokens | None = 1024
    """Most tokens of the judge's answer. null: the field is not sent."""
    temperature: (
        Annotated[NonNegativeFloat, at_most(100, "every token is nearly as likely as any other there")] | None
    ) = 0.0
    """Temperature of the judge's answer. null: the field is not sent."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, such as ``{max_completion_tokens: 1024}``."""
    max_concurrency: Count = 32
    """Requests in flight over all replicas."""
    timeout_s: Seconds = 120.0
    """Deadline of one attempt at a request."""
    max_retries: NonNegativeInt = 5
    """Most further attempts at a request that got no answer, HTTP 429 or 5xx. After the last the run stops."""

    @field_validator("urls")
    @classmethod
    def _are_base_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if url.rstrip("/").endswith("/chat/completions"):
                raise ValueError(f"{url!r} is not a base address; leave out /chat/completions")
        return urls

    @field_validator("score_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = regex.compile(pattern).groups
        except regex.error as error:
            raise ValueError(
                f"score_pattern {pattern!r} is no regular expression: {error}; correct it"
            ) from error
        if groups != 1:
            raise ValueError(
                f"score_pattern {pattern!r} has {groups} groups; put only the score into ( ), and write other groups as (?: )"
            )
        return pattern

    @field_validator("score_range")
    @classmethod
    def _is_a_range(cls, limits: tuple[float, float]) -> tuple[float, float]:
        if limits[0] >= limits[1]:
            raise ValueError(f"score_range [{limits[0]:g}, {limits[1]:g}] is empty; write [lowest, highest]")
        return limits

    @field_validator("extra_body")
    @classmethod
    def _adds_only(cls, fields: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(fields.keys() & {"model", "messages", "max_tokens", "temperature", "n", "stream"})
        if taken:
            raise ValueError(f"extra_body has {', '.join(taken)}, which Tandem sets itself; leave it out")
        return fields


class CodeReward(OwnReward):
    """The tests that the Python program of a response passes. The program is the last fenced block of Python
    or of no language. A response without one scores 0, and counts in ``reward/part/no_code``; so does a
    response whose last block is not closed, since it was cut off."""

    type: Literal["code"]
    tests_field: str = "tests"
    """The data's field with the tests; a field inside others is named with dots. It holds a list of tests, or
    one test. A test is ``{"input": text, "output": text}``, the standard input of the program and its output;
    or a text of Python assertions, which run after the program in the same process."""
    score: Literal["all", "fraction"] = "all"
    """``all``: 1 if every test passes, else 0. ``fraction``: the share of the tests that pass."""
    timeout_s: Seconds = 10.0
    """Deadline of one test, also for its CPU seconds. The tests after a late one are not run, and count as
    failed."""
    memory_mib: Annotated[
        PositiveInt, at_least(64, "Python itself needs as much"), at_most(2**24, "no machine has as much")
    ] = 1024
    """Address space of one process, in MiB."""
    max_processes: Count = 32
    """Most processes of one program. A program that starts more is ended."""
    sandbox: Literal["auto", "bubblewrap", "none"] = "auto"
    """``bubblewrap``: no network, no files but Python's and the system's, and a folder that is removed
    afterwards; an error if it does not work. ``none``: only the limits. ``auto``: bubblewrap if it works,
    else the kernel's namespaces (no network, no other processes), else none; a line on the console says
    which. Only bubblewrap, or a container around the run, is a security boundary."""
    num_workers: PositiveInt | None = None
    """Programs that run at the same time. null: half of the cores, at most 32."""


class OverlongPenalty(Schema):
    """DAPO's soft overlong punishment, only as a part of ``weighted``. It reaches -1 times ``weight`` at
    ``rollout.max_new_tokens`` tokens."""

    type: Literal["overlong"] = "overlong"
    weight: PositiveFloat = 1.0
    """Factor of the penalty, above 0; the penalty is itself negative."""
    buffer_tokens: PositiveInt
    """L_cache: over this many tokens before max_new_tokens the penalty goes linearly from 0 to -1."""


SingleReward = (
    CountdownReward | Gsm8kReward | MathVerifyReward | FunctionReward | CodeReward | ModelReward | JudgeReward
)
RewardPart = Annotated[SingleReward | OverlongPenalty, Field(discriminator="type")]


class WeightedReward(Schema):
    """The sum of several rewards, each times its ``weight``; every part is also recorded under its name,
    unweighted."""

    type: Literal["weighted"] = "weighted"
    parts: Annotated[dict[str, RewardPart], Field(min_length=1)]
    """The rewards by name, e.g. ``correct: {type: math_verify}`` and ``helpful: {type: model, urls: [...],
    weight: 0.2}``.

    One part decides whether a response counts as right in an evaluation, by a value of at least 1: the first
    part that checks an answer (countdown, gsm8k, math_verify, function, code) or, if there is none, the first
    model or judge."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if all(part.type == "overlong" for part in self.parts.values()):
            yield Contradiction(
                ("parts",),
                "parts hold an overlong penalty but no reward",
                "add a part that rewards, e.g. correct: {type: gsm8k}",
            )
        wrong = next((name for name in self.parts if not PART_NAME.fullmatch(name)), None)
        if wrong is not None:
            yield Contradiction(
                (),
                f"{wrong!r} cannot name a part, since metrics are named after it",
                "use letters, digits, `_` and `-`",
            )


RewardOfAll = Annotated[SingleReward | WeightedReward, Field(discriminator="type")]
"""A reward of all prompts, or of the prompts of one source."""


class RewardByField(Schema):
    """A separate reward for each source of the data, chosen by a field of the prompts' records.
    ``reward/part/SOURCE`` is the mean over the responses to a source's prompts, before the reward's own ``weight``, and
    ``reward/part/SOURCE/NAME`` the mean of a part of its reward."""

    type: Literal["by_field"]
    field: str = "data_source"
    """The records' field with the name of the source; a field inside others is named with dots."""
    rewards: Annotated[dict[str, RewardOfAll], Field(min_length=1)]
    """The rewards by the values of the field, e.g. ``{math: {type: math_verify}, code: {type: code}}``. Every record of the
    task's files needs one of these values."""

    @property
    def names(self) -> dict[str, str]:
        """The metrics' names by the field's values: parts between slashes, of characters that MLflow
        accepts."""
        parts = {value: re.sub(r"[^\w./-]", "_", value).split("/") for value in self.rewards}
        return {value: "/".join(p for p in of if p not in ("", ".", "..")) for value, of in parts.items()}

    def _contradictions(self) -> Iterator[Contradiction]:
        names = self.names
        for value, name in names.items():
            same = [other for other in names if other != value and f"{names[other]}/".startswith(f"{name}/")]
            if same or not name:
                why = (
                    f"is {same[0]!r} or its beginning in the names of metrics"
                    if name
                    else "cannot name a metric"
                )
                fix = "write another value into the data"
                yield Contradiction(("rewards",), f"the value {value!r} {why}", fix)
                return


AnyReward = Annotated[SingleReward | WeightedReward | RewardByField, Field(discriminator="type")]


class OneReward(NamedTuple):
    """A reward that is neither a sum of others nor a choice between others."""

    field: str
    """Its field in the config, such as ``reward.rewards.math.parts.correct``."""
    reward: RewardPart
    source: tuple[str, str] | None = None
    """(field, value) of the records that it scores; None: all records."""


def rewards_in(reward: AnyReward, field: str = "reward") -> Iterator[OneReward]:
    """The rewards that ``reward`` is made of, in the order of the config. ``field``: the field of
    ``reward``."""
    if isinstance(reward, RewardByField):
        for source, of_source in reward.rewards.items():
            for one in rewards_in(of_source, f"{field}.rewards.{source}"):
                yield one._replace(source=(reward.field, source))
    elif isinstance(reward, WeightedReward):
        for name, part in reward.parts.items():
            yield OneReward(f"{field}.parts.{name}", part)
    else:
        yield OneReward(field, reward)
