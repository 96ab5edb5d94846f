"""The order of the training prompts in an epoch. It depends only on the seed, the epoch and the records, so a resumed run
continues where it was. An epoch takes as many prompts as there are:

    shuffle      a random permutation
    sequential   the order of the data
    mixture      several sources by weights (``mixture.py``)
    function     f(num_prompts, seed, epoch, **settings) -> num_prompts indices; some may repeat and others be missing.
                 A parameter ``rows`` gets the records of the data file, by index.

``serve`` tries a function before a start, in its own process (``launch/checks/own_parts.py`` holds the other end of the
pipe).
"""

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from configs.schema.own_function import OwnFunction
from configs.schema.sampler import FileOrder, MixtureOrder, SamplerConfig, ShuffledOrder
from rollout.environments.tandem_worker.failures import describe, place_of
from rollout.records import source_of
from rollout.sampling.mixture import mixture_order
from rollout.user_code import call_problem, further_parameters, import_function, serve_trials

Order = Callable[[int], Sequence[int]]
"""Indices of the prompts of an epoch, in their order."""
Rows = Sequence[Mapping[str, Any] | None]
GIVEN, FURTHER = ("num_prompts", "seed", "epoch"), "rows"
TRIED_PROMPTS, TRIED_EPOCHS = 8, 3


def prompt_order(config: SamplerConfig, num_prompts: int, *, seed: int, rows: Callable[[], Rows]) -> Order:
    """The order that ``config`` names. ``rows``: the records of the prompts; called for a mixture, and for functions that
    want them.

    Raises ValueError if a function cannot be imported, or if the records and the weights of a mixture do not match. The
    order raises ValueError if a function breaks its contract.
    """
    match config:
        case ShuffledOrder():
            return lambda epoch: epoch_order(num_prompts, seed=seed, epoch=epoch)
        case FileOrder():
            return lambda epoch: range(num_prompts)
        case MixtureOrder():
            sources = [source_of(row, config.field) for row in rows()]
            return mixture_order(config, sources, seed=seed)
    function = load(config)
    further = _further(function, rows)
    return lambda epoch: _ordered(config, function, num_prompts, seed, epoch, further)


def epoch_order(num_prompts: int, *, seed: int, epoch: int) -> list[int]:
    """The shuffled order of an epoch."""
    order = list(range(num_prompts))
    random.Random(f"tandem prompt order {seed} {epoch}").shuffle(order)
    return order


def load(own: OwnFunction) -> Callable:
    """Raises ValueError if the function cannot be imported or called with its arguments."""
    function = import_function("sampler function", own.function, "module:function, e.g. my_order:easy_first")
    if problem := call_problem(function, GIVEN, [FURTHER], own.settings):
        raise _broken(own, function, problem)
    return function


def _further(function: Callable, rows: Callable[[], Rows]) -> dict[str, Rows]:
    return {FURTHER: rows()} if further_parameters(function, [FURTHER]) else {}


def _ordered(
    own: OwnFunction, function: Callable, num_prompts: int, seed: int, epoch: int, further: Mapping[str, Rows]
) -> list[int]:
    about = f"for {num_prompts} prompts in epoch {epoch}"
    try:
        order = [
            operator.index(index) for index in function(num_prompts, seed, epoch, **further, **own.settings)
        ]
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or exit()
        raise _broken(own, function, f"{about}, it raised {describe(error)}; correct it") from error
    if len(order) != num_prompts:
        fix = "return one index for each prompt; an index may repeat instead of another"
        raise _broken(own, function, f"{about}, it returned {len(order)} indices; {fix}")
    wrong = next((index for index in order if not 0 <= index < num_prompts), None)
    if wrong is not None:
        raise _broken(own, function, f"{about}, it returned the index {wrong}; return 0 to {num_prompts - 1}")
    return order


def _broken(own: OwnFunction, function: Callable, what: str) -> ValueError:
    return ValueError(f"sampler function {own.function!r} ({place_of(function)}): {what}")


def serve(descriptor: int) -> None:
    """Main function of the trial's process."""
    serve_trials(descriptor, _attempt)


def _attempt(what: str, fields: Mapping[str, Any], row: Mapping[str, Any] | None) -> None:
    """what: "import" or "call", on made-up data. fields: of the function. row: the first record of the data.
    Raises ValueError if the function cannot be used, or breaks its contract."""
    own = TypeAdapter(OwnFunction).validate_python(fields)
    function = load(own)
    if what == "import":
        return
    further = _further(function, lambda: [row] * TRIED_PROMPTS)
    for epoch in range(TRIED_EPOCHS):
        first, again = (_ordered(own, function, TRIED_PROMPTS, 0, epoch, further) for _ in range(2))
        if first != again:
            raise _broken(
                own,
                function,
                f"two calls for epoch {epoch} gave different orders, but a resumed run calls again and must get the same; draw random "
                "numbers from random.Random(f'{seed} {epoch}')",
            )
    _ordered(own, function, 1, 0, 0, {name: rows[:1] for name, rows in further.items()})
