"""The user's objectives, advantages and weights: Python functions that a config names.

    objective   f(current_logprobs_T, old_logprobs_T, advantages_T, **settings) -> loss_T         of: mask_T, cu_seqlens
    advantage   f(rewards_S, group_ids_S, **settings) -> advantages_S                             of: lengths_S
    weight      f(log_ratio_N, **settings) -> weights_N                                           of: bounds_S, segment_bounds

After ``of`` stand further parameters that a function may have, by name. A function returns a tensor with the
shape, dtype and device of its first argument, or that tensor and a dict of such tensors, whose means are
recorded as ``own/PART/NAME``.

Every call checks the form (shape, dtype, device) of the result. ``trainer/own_contract.py`` checks before the
start what one call cannot show, such as that a sequence's values do not depend on its batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from configs.schema import RunConfig
from configs.schema.base import PART_NAME
from configs.schema.own_function import OwnFunction
from rollout.environments.tandem_worker.failures import place_of
from rollout.user_code import call_problem, further_parameters, import_function
from trainer.ranks.metrics import Metric


class ContractError(ValueError):
    """A user's function does not keep its contract."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the algorithm that a user's function may replace."""

    name: str
    given: tuple[str, ...]
    """Its arguments, in order. Its result has the form of the first."""
    further: tuple[str, ...]
    """Further arguments, each for a parameter of this name."""
    returns: str


OBJECTIVE = Part(
    "objective", ("current_logprobs_T", "old_logprobs_T", "advantages_T"), ("mask_T", "cu_seqlens"), "loss_T"
)
ADVANTAGE = Part("advantage", ("rewards_S", "group_ids_S"), ("lengths_S",), "advantages_S")
WEIGHT = Part("weight", ("log_ratio_N",), ("bounds_S", "segment_bounds"), "weights_N")
PARTS = {part.name: part for part in (OBJECTIVE, ADVANTAGE, WEIGHT)}


def own_parts(config: RunConfig) -> dict[str, tuple[Part, OwnFunction]]:
    """The functions that train the policy, by their fields."""
    chosen = {
        "objective": (OBJECTIVE, config.policy_objective),
        "advantage": (ADVANTAGE, config.advantage),
        "correction.weight": (WEIGHT, config.correction.weight),
    }
    return {field: (part, own) for field, (part, own) in chosen.items() if isinstance(own, OwnFunction)}


def load_own_parts(config: RunConfig) -> None:
    """Import the functions that the config names, before the first step. Raises ValueError."""
    for part, own in own_parts(config).values():
        load(part, own.function)


@cache
def load(part: Part, path: str) -> Callable:
    """The function that ``module:name`` names. Raises ValueError."""
    return import_function(f"{part.name} function", path, f"module:function, e.g. my_loss:{part.name}")


def check_signature(part: Part, own: OwnFunction) -> None:
    """Raises ValueError if the function cannot be called with its arguments and settings."""
    if problem := call_problem(load(part, own.function), part.given, part.further, own.settings):
        raise broken(part, own, problem)


@cache
def _further_of(part: Part, path: str) -> list[str]:
    return further_parameters(load(part, path), part.further)


def call(
    part: Part, own: OwnFunction, *given: Tensor, **further: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The function's result for these arguments, and the tensors that it records.

    further: computes each further argument, for a function that has a parameter of its name.

    Raises ContractError if the result does not have the form of the first argument.
    """
    function = load(part, own.function)
    wanted = {name: further[name]() for name in _further_of(part, own.function)}
    returned = function(*given, **wanted, **own.settings)
    result, recorded = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(recorded, dict):
        raise broken(
            part, own, f"the second value must be a dict of tensors to record, not {_shown(recorded)}"
        )
    unusable = [name for name in recorded if not isinstance(name, str) or not PART_NAME.fullmatch(name)]
    if unusable:
        raise broken(part, own, f"{unusable[0]!r} cannot name a metric; use letters, digits, `_` and `-`")
    like = given[0]
    return _require_form(part, own, part.returns, result, like), {
        name: _require_form(part, own, f"metric {name}", values, like, any_dtype=True)
        for name, values in recorded.items()
    }


def metrics_of(part: Part, recorded: Mapping[str, Tensor], mask: Tensor | None = None) -> dict[str, Metric]:
    """The mean of each recorded tensor, on the mask."""
    return {f"own/{part.name}/{name}": Metric.mean(values, mask) for name, values in recorded.items()}


def require_weights(own: OwnFunction, weights_N: Tensor, log_ratio_N: Tensor) -> None:
    """Raises ContractError for a weight that is negative or not finite. If a log-ratio is not finite, nothing
    is raised: the loss reports it."""
    if not weights_N.numel():
        return
    least, greatest = torch.stack(torch.aminmax(weights_N)).tolist()  # NaN if one of them is
    if (math.isfinite(greatest) and least >= 0) or not log_ratio_N.isfinite().all():
        return
    place = int((~(weights_N.isfinite() & (weights_N >= 0))).nonzero()[0])
    weight, log_ratio = weights_N[place].item(), log_ratio_N[place].item()
    raise broken(
        WEIGHT,
        own,
        f"weights_N must be finite and at least 0, but is {weight:g} where log rho is {log_ratio:g}; bound log_ratio_N before its "
        "exp (to -20 and 20, say)",
    )


def broken(part: Part, own: OwnFunction, what: str) -> ContractError:
    function = load(part, own.function)
    return ContractError(f"{part.name} function {own.function!r} ({place_of(function)}): {what}")


def _require_form(
    part: Part, own: OwnFunction, name: str, values: object, like: Tensor, *, any_dtype: bool = False
) -> Tensor:
    first = part.given[0]
    wanted = f"{name} must be a tensor like {first}, {_form(like)}"
    if not isinstance(values, Tensor):
        raise broken(part, own, f"{wanted}, not {_shown(values)}; return one value for each")
    if values.shape != like.shape:
        raise broken(part, own, f"{wanted}, not {_form(values)}; return one value for each, no sum or mean")
    if values.device != like.device or (values.dtype != like.dtype and not any_dtype):
        fix = f"make tensors by {first}.new_tensor(...), or end with .to({first})"
        raise broken(part, own, f"{wanted}, not {_form(values)}; {fix}")
    return values


def _form(tensor: Tensor) -> str:
    place = "" if tensor.is_cpu else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}{place}"


def _shown(value: object) -> str:
    return (
        f"{type(value).__name__} {value!r:.60}" if isinstance(value, int | float | str) else f"{type(value)}"
    )
