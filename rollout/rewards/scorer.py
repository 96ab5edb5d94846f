"""``Scorer``: scores responses by one reward or a weighted sum of several, of all prompts or of their source.
Reward code cannot hang a run.

score ─┬─ countdown, gsm8k, overlong     in this process
       ├─ math_verify, function          in separate processes (worker.py)
       ├─ code                           in processes with limits (code.py)
       └─ model, judge                   on an HTTP server (model.py, judge.py)
"""

import asyncio
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.schema.reward import (
    AnyReward,
    FunctionReward,
    JudgeReward,
    MathVerifyReward,
    ModelReward,
    RewardByField,
    RewardPart,
    rewards_in,
)
from rollout.records import FinishReason, Prompt, Score, source_name, source_of
from rollout.rewards.arithmetic import countdown_reward
from rollout.rewards.code import SANDBOXES, ProgramTests, choose_sandbox
from rollout.rewards.length import overlong_penalty
from rollout.rewards.math_answers import gsm8k_reward
from rollout.rewards.trial import try_function
from rollout.rewards.worker import MATH_VERIFY, START_TIMEOUT_S, Job, WorkerPool
from tracing import span

if TYPE_CHECKING:
    from rollout.rewards.served import ServedReward
    from rollout.tasks.task import Problem

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 20
"""Failures of each source that are logged one by one; the metrics count all of them."""
MOST_DEFAULT_WORKERS = 32
"""Upper limit of the default. Each worker is a Python process with all imports of the user's module."""


def check_reward(
    config: AnyReward,
    sample: Callable[[str | None], "Problem | None"] = lambda source: None,
    tell: Callable[[str], None] = logger.info,
) -> None:
    """Refuse a reward that cannot be used here, before anything is started. ``Scorer`` checks the servers of
    reward models and judges later.

    Args:
        sample: gives a problem of a source (None: of the only one) on which the user's function is tried. If it gives None,
            the function is only imported.
        tell: takes remarks on a usable reward.

    Raises ValueError: the user's function cannot be used, math-verify is not installed, a tokenizer's folder
    or a server's key is missing, or programs cannot be run.
    """
    for name, part, source in rewards_in(config):
        if isinstance(part, ModelReward | JudgeReward):
            from rollout.rewards.served import key_of

            key_of(part.api_key_variable, name)
        if part.type == "function":
            _check_function(name, part, partial(sample, None if source is None else source[1]), tell)
        elif part.type == "code":
            tell(f"{name}: programs run {SANDBOXES[asyncio.run(choose_sandbox(part, name))]}")
        elif part.type == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                f"{name}.type=math_verify needs the package math-verify, which is not installed; install it or use another"
            )
        elif part.type == "model" and part.text.type == "chat" and not part.text.tokenizer.is_dir():
            raise ValueError(
                f"{name}.text.tokenizer={part.text.tokenizer} is not a folder; name the folder of the reward model's tokenizer"
            )


def _check_function(
    name: str, part: FunctionReward, sample: Callable[[], "Problem | None"], tell: Callable[[str], None]
) -> None:
    if part.check == "none":
        return
    problem = sample() if part.check == "call" else None
    try:
        notes = try_function(part, problem, tell)
    except ValueError as error:
        raise ValueError(f"{name}.function: {error}") from error
    for note in notes:
        tell(f"{name}.function: {note}")


def may_read_rows(config: AnyReward) -> bool:
    """Whether a part of the reward may read a prompt's record: for its source, the user's function or tests
    of programs."""
    return any(
        one.source is not None or one.reward.type in ("function", "code") for one in rewards_in(config)
    )


def known_source(config: RewardByField, value: object) -> str:
    """The value of the field as the name of a source that has a reward. Raises ValueError."""
    source = source_name(value)
    if source not in config.rewards:
        known = ", ".join(map(repr, config.rewards))
        raise ValueError(
            f"is {source!r}, but reward.rewards has rewards only for {known}; add one, or drop such records"
        )
    return source


def default_num_workers(cores: int) -> int:
    """Half of the ``cores`` of this process. The other half is for the servers, the sample role and, on one node, the
    learner."""
    return max(1, min(MOST_DEFAULT_WORKERS, cores // 2))


_Reward = Callable[[Prompt, Job], Awaitable[Score]]


class Scorer:
    """Scores responses inside ``async with``. Entering checks that every reward model and judge answers, and that
    programs can be run.

    ``max_new_tokens`` is the longest response, for the overlong penalty. ``num_workers`` is the default
    number of processes of each part of type math_verify, function or code. A process scores one sample at a
    time, within ``timeout_s``. A late or dead process is killed and replaced. Start-up and the wait for a
    free process do not count towards ``timeout_s``. The rewards of different sources (``RewardByField``) have
    their own processes and requests.

    Entering raises:
        RewardModelError: a reward model does not answer as it should.
        ValueError: the overlong penalty's buffer is longer than a response can be, a reward model's tokenizer
            is unusable, a judge's key is not set, or programs cannot be run.
    """

    def __init__(self, config: AnyReward, *, max_new_tokens: int, num_workers: int | None = None):
        self._config, self._max_new_tokens = config, max_new_tokens
        self._names: dict[Any, str] = config.names if isinstance(config, RewardByField) else {}
        """By source."""
        self._parts: dict[str | None, dict[str, RewardPart]] = {}
        """By source, and by field; source None: the reward of all prompts. The field alone does not tell sources
        apart, because their names may have dots."""
        for field, part, source in rewards_in(config):
            self._parts.setdefault(None if source is None else source[1], {})[field] = part
        self._deciding = {source: _deciding_of(parts) for source, parts in self._parts.items()}
        # The sources share the default number of processes.
        default = default_num_workers(len(os.sched_getaffinity(0))) // len(self._parts)
        self._num_workers = num_workers or max(1, default)
        self._rewards: dict[str | None, list[_Reward]] = {}
        """The rewards of ``_parts``."""
        self._models: list[ServedReward] = []
        self._exits = AsyncExitStack()
        self._num_errors = Counter[str | None]()
        """By source."""

    def source_name(self, prompt: Prompt) -> str | None:
        """The name of the prompt's source in metrics; None if one reward scores all prompts."""
        return self._names.get(self._source(prompt))

    def _source(self, prompt: Prompt) -> str | None:
        if not isinstance(self._config, RewardByField):
            return None
        return source_of(prompt.row, self._config.field, partial(known_source, self._config))

    @property
    def retries(self) -> int:
        """Requests to reward models and judges that failed and were repeated, so far."""
        return sum(model.retries for model in self._models)

    async def __aenter__(self) -> "Scorer":
        async with AsyncExitStack() as exits:
            for source, parts in self._parts.items():
                self._rewards[source] = [
                    await self._make_reward(field, part, exits) for field, part in parts.items()
                ]
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all processes and requests. Calls under way raise ``CancelledError``. Safe to call twice."""
        await self._exits.aclose()

    async def _make_reward(self, field: str, part: RewardPart, exits: AsyncExitStack) -> _Reward:
        match part.type:
            case "countdown":
                return _inline_reward(lambda job: countdown_reward(job.reference, job.response_text))
            case "gsm8k":
                return _inline_reward(lambda job: gsm8k_reward(job.reference, job.response_text))
            case "overlong":
                longest, buffer = self._max_new_tokens, part.buffer_tokens
                if buffer > longest:
                    raise ValueError(
                        f"{field}.buffer_tokens={buffer} is more than rollout.max_new_tokens={longest}; lower it"
                    )
                penalty = partial(overlong_penalty, max_tokens=longest, buffer_tokens=buffer)

                def score_length(job: Job) -> Score:
                    # The model's positions may have cut it off earlier. It still counts as the longest.
                    is_cut = job.finish_reason == FinishReason.LENGTH
                    return Score(value=penalty(longest if is_cut else job.num_tokens))

                return _inline_reward(score_length)
            case "code":
                programs = ProgramTests(part, num_workers=part.num_workers or self._num_workers, name=field)
                exits.push_async_callback(programs.close)
                await programs.start()
                return lambda prompt, job: programs.score(prompt, job.response_text)
            case "model" | "judge":
                # Imported here, because checks before a start must not import an HTTP client.
                from rollout.rewards.judge import Judge
                from rollout.rewards.model import RewardModel

                model = Judge(part, name=field) if part.type == "judge" else RewardModel(part, name=field)
                self._models.append(model)
                exits.push_async_callback(model.close)
                await model.start()
                return lambda prompt, job: model.score(prompt, job.response_text)
            case _:
                pool = _worker_pool(part, part.num_workers or self._num_workers)
                exits.callback(pool.close)
                return lambda prompt, job: pool.call(job)

    async def score(
        self, prompt: Prompt, response_text: str, *, num_tokens: int, finish_reason: FinishReason
    ) -> Score:
        """The sum of the parts, each times its weight. ``num_tokens`` of the response include its end token.

        A single reward has its own ``parts``. A weighted reward has each part's unweighted value under the
        part's name, and the part's own parts as ``name/own``. A failed part counts 0 in ``value``, and
        ``error`` names the reason and the prompt: the sample is not scored. ``correct`` is True if the
        deciding part (see ``WeightedReward``) was scored with at least 1. With ``RewardByField`` the name of
        the prompt's source stands before all names of parts and, unless the reward failed, is itself a part:
        the reward's value, unweighted too.

        Raises:
            ValueError: the prompt has no source. A check before the start refuses such data.
            WorkerStartError: the process of a reward cannot be started.
            RewardModelError: a reward model does not answer, or its answer has the wrong form.
            CancelledError: the scorer was closed meanwhile.
        """
        source = self._source(prompt)
        parts = self._parts[source]
        job = Job(
            prompt_text=prompt.text,
            response_text=response_text,
            reference=prompt.reference,
            row=prompt.row,
            num_tokens=num_tokens,
            finish_reason=finish_reason.value,
        )
        with span("reward", family="rewards"):
            under_way = [reward(prompt, job) for reward in self._rewards[source]]
            # gather makes a task for each part, which costs more than most rewards.
            results = await asyncio.gather(*under_way) if len(under_way) > 1 else [await under_way[0]]
        scores = dict(zip(parts, results, strict=True))
        for field, score in scores.items():
            if score.error is not None:
                scores[field] = self._report_failure(score, parts[field], prompt, source)
        errors = [score.error for score in scores.values() if score.error is not None]
        deciding = scores[self._deciding[source]]
        value = sum(parts[field].weight * score.value for field, score in scores.items())
        return Score(
            value=value,
            parts=self._named_parts(source, scores, value, has_failed=bool(errors)),
            correct=deciding.error is None and deciding.value >= 1.0,
            error="; ".join(errors) or None,
        )

    def _named_parts(
        self, source: str | None, scores: dict[str, Score], weighted_sum: float, *, has_failed: bool
    ) -> dict[str, float]:
        reward = self._config
        if isinstance(reward, RewardByField):
            reward = reward.rewards[str(source)]
        if reward.type == "weighted":
            named: dict[str, float] = {}
            for name, score in zip(reward.parts, scores.values(), strict=True):
                named[name] = score.value
                named |= {f"{name}/{own}": number for own, number in score.parts.items()}
            unweighted = weighted_sum  # which has no weight of its own
        else:
            (score,) = scores.values()
            named, unweighted = score.parts, score.value
        if (of := self._names.get(source)) is None:
            return named
        whole = {} if has_failed else {of: unweighted}
        return whole | {f"{of}/{part}": number for part, number in named.items()}

    def _report_failure(self, score: Score, part: RewardPart, prompt: Prompt, source: str | None) -> Score:
        name = part.function if part.type == "function" else part.type
        score = replace(score, error=f"reward {name} failed for prompt {prompt.prompt_id}: {score.error}")
        self._num_errors[source] += 1
        if self._num_errors[source] <= MAX_LOGGED_ERRORS:
            is_last = self._num_errors[source] == MAX_LOGGED_ERRORS
            last = " (further failures are only counted)" if is_last else ""
            logger.warning("%s; not scored%s", score.error, last)
        return score


def _deciding_of(parts: Mapping[str, RewardPart]) -> str:
    """The first part that checks the answer decides whether a response is correct. Without one the first model
    or judge decides."""
    candidates = [field for field, part in parts.items() if part.type != "overlong"]
    return min(candidates, key=lambda field: parts[field].type in ("model", "judge"))


def _inline_reward(function: Callable[[Job], Score]) -> _Reward:
    """A pure and fast reward. It runs in the thread of the event loop."""

    async def score(_: Prompt, job: Job) -> Score:
        try:
            return function(job)
        except ValueError as error:  # an unusable reference
            return Score(error=f"{type(error).__name__}: {error}")

    return score


def _worker_pool(config: MathVerifyReward | FunctionReward, num_workers: int) -> WorkerPool:
    """math-verify or the user's function, in processes."""
    reward, start_timeout_s = MATH_VERIFY, START_TIMEOUT_S
    if config.type == "function":
        reward, start_timeout_s = config.function, max(START_TIMEOUT_S, config.import_timeout_s)
    return WorkerPool(
        reward, num_workers=num_workers, timeout_s=config.timeout_s, start_timeout_s=start_timeout_s
    )
