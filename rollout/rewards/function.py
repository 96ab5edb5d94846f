"""The user's reward function, ``module:function``, and the score that it returned."""

import inspect
import math
from collections.abc import Callable
from numbers import Real

import numpy as np

from rollout.environments.tandem_worker.failures import readable, short
from rollout.records import Score
from rollout.user_code import call_problem, further_parameters, import_function

LARGEST = float(np.finfo(np.float32).max)
"""The learner holds rewards in float32."""

RewardFunction = Callable[..., float | tuple[float, dict[str, float]]]
"""f(prompt, response, reference) -> value, or (value, parts). It may be ``async``, and may have further
parameters, of ``FURTHER``."""

GIVEN, FURTHER = ("prompt", "response", "reference"), ("row", "num_tokens", "finish_reason")
"""Parameters of a reward function. The further ones: the record of the data file, the tokens of the response
with its end token, and ``stop`` or ``length``."""

_BY_FIRST_PARAMETER = {
    "data_source": ("verl's", '{name}(row["data_source"], response, reference, row.get("extra_info"))'),
    "solution_str": ("verl's", "{name}(solution_str=response, ground_truth=reference)"),
    **dict.fromkeys(
        ("prompts", "completions"), ("TRL's", "{name}(prompts=[prompt], completions=[response])[0]")
    ),
}
"""Functions of other systems, by the name of their first parameter: whose they are, and a call for one
response. verl passes arguments by name, so its parameters may have any order."""


def import_reward_function(path: str) -> RewardFunction:
    """The function that ``module:function`` names. Raises ValueError if it cannot be imported, does not take three
    texts, or has another system's parameters."""
    function = import_function("reward function", path, "module:function, e.g. my_rewards:score")
    _refuse_others(path, function)
    if problem := call_problem(function, GIVEN, FURTHER):
        raise ValueError(f"reward function {path!r}: {problem}")
    return function


def _refuse_others(path: str, function: RewardFunction) -> None:
    """Raises ValueError for a function with another system's parameters, which would misread ours."""
    found = further_parameters(function, _BY_FIRST_PARAMETER)
    first = next(iter(inspect.signature(function).parameters)) if found else None
    if first in found:
        whose, call = _BY_FIRST_PARAMETER[first]
        called = call.format(name=path.partition(":")[2])
        raise ValueError(
            f"reward function {path!r} has {whose} parameters, but would be called with (prompt, response, reference); wrap "
            f"it: `def score(prompt, response, reference, row): return {called}`"
        )


def to_score(returned: object) -> Score:
    """The score that a reward function returned. A model may influence names of parts, so they are made valid
    as UTF-8.

    Raises:
        TypeError: the value is neither a real number nor a pair of a real number and a dict of them.
        ValueError: a value is infinite or NaN, or the reward is beyond float32.
    """
    value, parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise TypeError(f"the parts of a reward must be a dict from names to numbers, not {short(parts)}")
    reward = _finite_number(value, "the reward")
    if abs(reward) > LARGEST:
        raise ValueError(f"the reward is {reward:g}, and float32 ends at {LARGEST:g}")
    return Score(
        value=reward,
        parts={readable(name): _finite_number(part, f"part {name!r}") for name, part in parts.items()},
    )


def _finite_number(value: object, name: str) -> float:
    if not isinstance(value, Real | np.bool_):  # numpy's truth is no Real, though Python's is
        raise TypeError(f"{name} must be a number, not {short(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {float(value)}, which is not finite")
    return float(value)
